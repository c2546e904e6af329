#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvferry::host {
namespace {

// The sanitizer must be told of every change of stack, or it takes the new one for a wild pointer.
void leaving(void** saved, const void* stack, std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(saved, stack, bytes);
#else
  (void)saved, (void)stack, (void)bytes;
#endif
}

void entered(void* saved, const void** from, std::size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, from, bytes);
#else
  (void)saved, (void)from, (void)bytes;
#endif
}

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::abort();
}

}  // namespace

Fiber::Fiber() {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  stack_bytes_ = std::size_t(128) << 10;
  memory_bytes_ = stack_bytes_ + page;
  memory_ = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (memory_ == MAP_FAILED) die("mmap of a fiber stack");
  // Stacks grow down: an overflow meets this page.
  if (mprotect(memory_, page, PROT_NONE) != 0) die("mprotect of a fiber's guard page");
  stack_ = static_cast<char*>(memory_) + page;
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  if (tsan_self_ != nullptr) __tsan_destroy_fiber(tsan_self_);
#endif
  munmap(memory_, memory_bytes_);
}

void Fiber::start(void (*entry)(void*), void* argument) {
  entry_ = entry;
  argument_ = argument;
  ended_ = false;
  if (getcontext(&self_) != 0) die("getcontext");
  self_.uc_stack.ss_sp = stack_;
  self_.uc_stack.ss_size = stack_bytes_;
  self_.uc_link = nullptr;
  // makecontext passes ints only.
  const auto self = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&self_, reinterpret_cast<void (*)()>(&Fiber::trampoline), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
#if defined(__SANITIZE_THREAD__)
  if (tsan_self_ != nullptr) __tsan_destroy_fiber(tsan_self_);
  tsan_self_ = __tsan_create_fiber(0);
#endif
}

void Fiber::tell_tsan(void* next) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(next, 0);
#else
  (void)next;
#endif
}

void Fiber::trampoline(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>(std::uintptr_t(low) | (std::uintptr_t(high) << 32));
  entered(nullptr, &fiber->outer_stack_, &fiber->outer_bytes_);
  fiber->entry_(fiber->argument_);
  fiber->ended_ = true;
  leaving(nullptr, fiber->outer_stack_, fiber->outer_bytes_);
  fiber->tell_tsan(fiber->tsan_outer_);
  swapcontext(&fiber->self_, &fiber->scheduler_);
  std::abort();  // an ended fiber is never resumed
}

bool Fiber::resume() {
  void* saved = nullptr;
  leaving(&saved, stack_, stack_bytes_);
#if defined(__SANITIZE_THREAD__)
  tsan_outer_ = __tsan_get_current_fiber();
#endif
  tell_tsan(tsan_self_);
  if (swapcontext(&scheduler_, &self_) != 0) die("swapcontext");
  entered(saved, nullptr, nullptr);
  return ended_;
}

void Fiber::yield() {
  void* saved = nullptr;
  leaving(&saved, outer_stack_, outer_bytes_);
  tell_tsan(tsan_outer_);
  if (swapcontext(&self_, &scheduler_) != 0) die("swapcontext");
  entered(saved, &outer_stack_, &outer_bytes_);
}

}  // namespace kvferry::host
