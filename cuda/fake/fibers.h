// Kernels whose threads wait for one another, or for other devices: every thread of a block is a fiber.
#pragma once

#include <functional>
#include <vector>

#include "kernels.h"

namespace kvferry::fake {

// Where the threads of a launch are; the context of a body (see platform.cuh) is made from it.
class Waiting {
 public:
  // Runs `thread(block, thread)` for every thread of every block. Blocks start in order, as on a device, and as many at a
  // time as fit its multiprocessors; which of those that can go on does so is random.
  static CUresult run(const LaunchShape& shape, const std::function<void(Waiting&, u32 block, u32 thread)>& thread);

  // Called by a thread.
  bool sync_or(u32 block, bool mine);  // a barrier of the block; whether any thread of it brought true
  void poll();                         // lets others run, and then other devices
  void* shared(u32 block);

 private:
  struct State;
  explicit Waiting(State& state) : state_(state) {}
  State& state_;
};

}  // namespace kvferry::fake
