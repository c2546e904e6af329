#include "fault.h"

#include <signal.h>

#include <mutex>

#include "state.h"

namespace kvferry::fake {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};

// Whoever had the signal before us. Written before our handler can see a signal of that number.
struct sigaction before[2];
std::mutex installing;
volatile sig_atomic_t given_back = 0;

void on_fault(int number, siginfo_t* info, void* machine) {
  sigjmp_buf* const target = fault_target();
  if (target != nullptr) siglongjmp(*target, CUDA_ERROR_ILLEGAL_ADDRESS);
  if (given_back != 0) {
    // The handler we gave it to has sent it on to us: nobody wants it.
    signal(number, SIG_DFL);
    return;
  }
  given_back = 1;
  const struct sigaction& old = before[number == SIGBUS];
  sigaction(number, &old, nullptr);
  if ((old.sa_flags & SA_SIGINFO) != 0 && old.sa_sigaction != nullptr) {
    old.sa_sigaction(number, info, machine);
  } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
    old.sa_handler(number);
  }
  // With the default disposition the access is tried again, and ends the process.
}

}  // namespace

sigjmp_buf*& fault_target() {
  static thread_local sigjmp_buf* target = nullptr;
  return target;
}

void watch_faults() {
  for (int i = 0; i < 2; ++i) {
    struct sigaction now{};
    sigaction(kSignals[i], nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_fault) continue;
    std::lock_guard<std::mutex> guard(installing);
    before[i] = now;
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(kSignals[i], &ours, nullptr);
  }
}

}  // namespace kvferry::fake
