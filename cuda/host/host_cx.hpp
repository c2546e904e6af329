// The context (see platform.cuh) that runs a kernel body on the CPU, one simulated thread at a time.
#pragma once

#include <cstring>

#include "monitor.hpp"

namespace kvferry::host {

// What a simulated thread asks of whoever schedules it.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual void sync(u32 block, u32 thread) = 0;
  virtual void poll(u32 block, u32 thread) = 0;
};

class HostCx {
 public:
  HostCx(u32 block, u32 nblocks, u32 thread, u32 nthreads, void* shared, Scheduler& scheduler, Monitor& monitor)
      : bid_(block),
        nblocks_(nblocks),
        tid_(thread),
        nthreads_(nthreads),
        shared_(shared),
        scheduler_(&scheduler),
        monitor_(&monitor) {}

  u32 tid() const { return tid_; }
  u32 nthreads() const { return nthreads_; }
  u32 bid() const { return bid_; }
  u32 nblocks() const { return nblocks_; }
  void* shared() { return shared_; }
  void sync() { scheduler_->sync(bid_, tid_); }
  void poll() { scheduler_->poll(bid_, tid_); }

  template <class V, Hint>
  V load(u64 address) {
    V value{};
    if (monitor_->check(kRead, address, sizeof(V), bid_, tid_)) {
      std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof(V));
    }
    return value;
  }

  template <class V, Hint>
  void store(u64 address, V value) {
    if (monitor_->check(kWrite, address, sizeof(V), bid_, tid_)) {
      std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(V));
    }
  }

  u32 cas(u64 address, u32 expected, u32 desired) {
    const bool readable = monitor_->check(kRead, address, sizeof(u32), bid_, tid_);
    if (!readable || !monitor_->check(kWrite, address, sizeof(u32), bid_, tid_)) return 0;
    u32 found;
    std::memcpy(&found, reinterpret_cast<const void*>(address), sizeof found);
    if (found == expected) std::memcpy(reinterpret_cast<void*>(address), &desired, sizeof desired);
    return found;
  }

 private:
  u32 bid_, nblocks_, tid_, nthreads_;
  void* shared_;
  Scheduler* scheduler_;
  Monitor* monitor_;
};

}  // namespace kvferry::host
