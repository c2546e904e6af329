// One ucontext fiber: a stack that can be left in the middle and entered again.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace kvferry::host {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Sets the fiber to run entry(argument) at the next resume(). The fiber must be fresh, ended or given up; whatever
  // lives on the stack of one given up is not destroyed, which is fine for kernel bodies.
  void start(void (*entry)(void*), void* argument);
  // Called by the scheduler: runs the fiber until it yields or ends. Returns whether it has ended.
  bool resume();
  // Called on the fiber: back to the scheduler.
  void yield();

 private:
  static void trampoline(unsigned low, unsigned high);
  // The thread sanitizer must be told as well.
  static void tell_tsan(void* next);

  void* memory_;
  std::size_t memory_bytes_;
  void* stack_;
  std::size_t stack_bytes_;
  ucontext_t self_{};
  ucontext_t scheduler_{};
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool ended_ = false;
  // The scheduler's stack, as the address sanitizer knows it; unused without.
  const void* outer_stack_ = nullptr;
  std::size_t outer_bytes_ = 0;
  void* tsan_self_ = nullptr;
  void* tsan_outer_ = nullptr;
};

}  // namespace kvferry::host
