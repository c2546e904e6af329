#include "grid.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "fault.h"
#include "memory.h"
#include "stream.h"

namespace kvferry::fake {

CUresult Grid::run(const LaunchShape& shape, const Body& body) {
  Grid grid(shape, body);
  // Stacks are kept from launch to launch, and go with the thread of the stream: a process may have so many mappings
  // and no more. A thread that a fault has ended is started anew.
  static thread_local std::vector<std::unique_ptr<Thread>> pool;
  const std::size_t count = std::size_t(shape.blocks) * shape.threads;
  while (pool.size() < count) pool.push_back(std::make_unique<Thread>());
  // Blocks start in any order, as on a device.
  std::vector<u32> order(shape.blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  grid.blocks_.resize(shape.blocks);
  for (u32 b = 0; b < shape.blocks; ++b) {
    Block& block = grid.blocks_[b];
    block.index = order[b];
    block.shared.resize((shape.shared_bytes + 15) / 16);
    if (!block.shared.empty()) std::memset(block.shared.data(), kPoison, block.shared.size() * sizeof(U128));
    for (u32 t = 0; t < shape.threads; ++t) {
      Thread* const thread = pool[grid.threads_.size()].get();
      thread->grid = &grid;
      thread->block = &block;
      thread->thread = t;
      thread->waits = thread->ended = false;
      thread->fiber.start(&Grid::entry, thread);
      grid.threads_.push_back(thread);
    }
  }
  return grid.turns();
}

void Grid::entry(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  Grid& grid = *thread.grid;
  const CUresult result =
      guarded([&] { grid.body_(grid, thread.block->index, thread.thread, thread.block->shared.data()); });
  if (result != CUDA_SUCCESS) grid.result_ = result;
}

CUresult Grid::turns() {
  sigjmp_buf* const outer = fault_target();
  std::size_t live = threads_.size();
  u64 idle = 0;
  while (live > 0 && result_ == CUDA_SUCCESS) {
    progress_ = false;
    for (Thread* thread : threads_) {
      if (thread->ended || thread->waits) continue;
      current_ = thread;
      const bool ended = thread->fiber.resume();
      fault_target() = outer;
      if (result_ != CUDA_SUCCESS) break;
      if (!ended) continue;
      thread->ended = true;
      thread->block->ended += 1;
      live -= 1;
      progress_ = true;
      release(*thread->block);
    }
    idle = progress_ ? 0 : idle + 1;
    if (idle == 0) continue;
    // Whoever is waited for runs on another thread, or in another process.
    sched_yield();
    if (idle % 64 == 0) {
      if (shape_.context->error.load() != 0) break;
      const timespec pause{0, 50000};
      nanosleep(&pause, nullptr);
    }
  }
  return result_;
}

bool Grid::sync_or(bool mine) {
  Thread& thread = *current_;
  Block& block = *thread.block;
  block.any |= mine;
  block.waiting += 1;
  thread.waits = true;
  progress_ = true;
  release(block);
  if (thread.waits) yield();
  return block.said;
}

// A block that some threads have left does not hold up the others.
void Grid::release(Block& block) {
  if (block.waiting == 0 || block.waiting + block.ended < shape_.threads) return;
  block.waiting = 0;
  block.said = block.any;
  block.any = false;
  for (Thread* thread : threads_) {
    if (thread->block == &block) thread->waits = false;
  }
}

void Grid::yield() {
  Thread* const thread = current_;
  sigjmp_buf* const target = fault_target();
  thread->fiber.yield();
  fault_target() = target;
}

u64 Grid::clock() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}

}  // namespace kvferry::fake
