// A launch whose threads wait for each other, or for other launches: a fiber each, all on the stream's thread.
#pragma once

#include <functional>
#include <vector>

#include "../host/fiber.hpp"
#include "kvferry/platform.cuh"
#include "kernels.h"

namespace kvferry::fake {

class Grid {
 public:
  // What a thread runs: block, thread, shared memory of the block. It must own nothing: a fault ends it where it is.
  using Body = std::function<void(Grid&, u32 block, u32 thread, void* shared)>;

  // Runs all threads of all blocks by turns until they have ended, one has met a fault, or the context has failed.
  static CUresult run(const LaunchShape& shape, const Body& body);

  // Of the thread that runs.
  bool sync_or(bool mine);
  void yield();
  static u64 clock();

 private:
  struct Block {
    u32 index;  // in the grid
    std::vector<U128> shared;
    u32 waiting = 0;
    u32 ended = 0;
    bool any = false;   // of those that wait
    bool said = false;  // of those let go last
  };

  struct Thread {
    Grid* grid;
    Block* block;
    u32 thread;
    bool waits;
    bool ended;
    host::Fiber fiber;
  };

  Grid(const LaunchShape& shape, const Body& body) : shape_(shape), body_(body) {}
  CUresult turns();
  void release(Block& block);
  static void entry(void* argument);

  const LaunchShape& shape_;
  const Body& body_;
  std::vector<Block> blocks_;
  std::vector<Thread*> threads_;
  Thread* current_ = nullptr;
  bool progress_ = false;
  CUresult result_ = CUDA_SUCCESS;
};

}  // namespace kvferry::fake
