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
  virtual bool sync_or(u32 block, u32 thread, bool mine) = 0;
  virtual void poll(u32 block, u32 thread) = 0;
  // About to store, or to read what others store: a chance to let them run first.
  virtual void preempt(bool stores) { (void)stores; }
  virtual u64 clock() { return 0; }
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
  bool sync_or(bool mine) { return scheduler_->sync_or(bid_, tid_, mine); }
  void spin() { scheduler_->poll(bid_, tid_); }
  void poll() { scheduler_->poll(bid_, tid_); }
  u64 clock() { return scheduler_->clock(); }

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
    scheduler_->preempt(true);
    if (monitor_->check(kWrite, address, sizeof(V), bid_, tid_)) {
      std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(V));
    }
  }

  u32 cas(u64 address, u32 expected, u32 desired) {
    return change<u32>(address, [=](u32 found) { return found == expected ? desired : found; });
  }
  u32 ticket(u64 address, u32 value) {
    return change<u32>(address, [=](u32 found) { return found + value; });
  }
  void add_relaxed(u64 address, u64 value) {
    change<u64>(address, [=](u64 found) { return found + value; });
  }
  void add_release(u64 address, u64 value) { add_relaxed(address, value); }

  template <class V>
  V load_relaxed(u64 address) {
    scheduler_->preempt(false);
    return load<V, Hint::kNone>(address);
  }
  u64 load_acquire(u64 address) { return load_relaxed<u64>(address); }
  void store_relaxed(u64 address, u64 value) { store<u64, Hint::kNone>(address, value); }
  void store_release(u64 address, u64 value) { store<u64, Hint::kNone>(address, value); }

 private:
  // One step that nobody comes between.
  template <class V, class Fn>
  V change(u64 address, Fn fn) {
    scheduler_->preempt(true);
    const bool readable = monitor_->check(kRead, address, sizeof(V), bid_, tid_);
    if (!readable || !monitor_->check(kWrite, address, sizeof(V), bid_, tid_)) return 0;
    V found;
    std::memcpy(&found, reinterpret_cast<const void*>(address), sizeof found);
    const V changed = fn(found);
    std::memcpy(reinterpret_cast<void*>(address), &changed, sizeof changed);
    return found;
  }

  u32 bid_, nblocks_, tid_, nthreads_;
  void* shared_;
  Scheduler* scheduler_;
  Monitor* monitor_;
};

}  // namespace kvferry::host
