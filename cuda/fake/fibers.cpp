#include "fibers.h"

#include <sched.h>
#include <time.h>

#include <cstring>
#include <memory>

#include "../host/fiber.hpp"
#include "fault.h"
#include "memory.h"
#include "stream.h"

#include "kvferry/platform.cuh"

namespace kvferry::fake {
namespace {

// Threads of a launch that are on the device at a time.
constexpr u32 kMostThreads = 4096;
// A launch in which everybody waits looks again after this long.
constexpr long kNapNanoseconds = 20000;

enum class Where : u8 { kReady, kBarrier, kEnded };

struct Strand {
  host::Fiber* fiber;
  u32 block;
  u32 index;
  Where where;
  bool polled;
  CUresult result;
  sigjmp_buf* fault;
};

struct Team {
  u32 index;
  u32 arrived = 0;
  u32 ended = 0;
  bool any = false;       // what threads brought to the barrier they are at
  bool outcome = false;   // of the last barrier
  std::vector<Strand> threads;
  std::vector<U128> shared;
};

// Stacks are kept by the worker thread from launch to launch.
std::vector<std::unique_ptr<host::Fiber>>& spare() {
  static thread_local std::vector<std::unique_ptr<host::Fiber>> fibers;
  return fibers;
}

}  // namespace

struct Waiting::State {
  const LaunchShape& shape;
  const std::function<void(Waiting&, u32, u32)>& body;
  std::vector<std::unique_ptr<Team>> resident;
  Strand* current = nullptr;
  CUresult result = CUDA_SUCCESS;

  static void enter(void* argument) {
    auto& self = *static_cast<State*>(argument);
    Strand& thread = *self.current;
    Waiting waiting(self);
    // A fault ends this thread; its jump must stay on this stack.
    sigjmp_buf here;
    const int stopped = sigsetjmp(here, 1);
    if (stopped != 0) {
      self.current->result = stopped;
    } else {
      thread.fault = &here;
      fault_target() = &here;
      self.body(waiting, thread.block, thread.index);
    }
    self.current->where = Where::kEnded;
  }

  Team& block_of(u32 index) {
    for (auto& block : resident) {
      if (block->index == index) return *block;
    }
    stop_with(CUDA_ERROR_UNKNOWN);
  }

  void start(u32 index) {
    auto block = std::make_unique<Team>();
    block->index = index;
    block->shared.resize((shape.shared_bytes + 15) / 16);
    if (!block->shared.empty()) std::memset(block->shared.data(), kPoison, block->shared.size() * sizeof(U128));
    for (u32 at = 0; at < shape.threads; ++at) {
      if (spare().empty()) spare().push_back(std::make_unique<host::Fiber>());
      host::Fiber* const fiber = spare().back().release();
      spare().pop_back();
      fiber->start(&State::enter, this);
      block->threads.push_back({fiber, index, at, Where::kReady, false, CUDA_SUCCESS, nullptr});
    }
    resident.push_back(std::move(block));
  }

  // Everybody is at the barrier who has not ended.
  static void release(Team& block) {
    if (block.arrived == 0 || block.arrived + block.ended < block.threads.size()) return;
    block.outcome = block.any;
    block.any = false;
    block.arrived = 0;
    for (Strand& thread : block.threads) {
      if (thread.where == Where::kBarrier) thread.where = Where::kReady;
    }
  }

  // Runs a thread until it waits. False if all it did was to look once more.
  bool turn(Team& block, Strand& thread) {
    current = &thread;
    thread.polled = false;
    if (thread.fault != nullptr) fault_target() = thread.fault;
    thread.fiber->resume();
    fault_target() = nullptr;
    if (thread.where == Where::kEnded) {
      block.ended += 1;
      if (thread.result != CUDA_SUCCESS && result == CUDA_SUCCESS) result = thread.result;
      release(block);
    }
    return !thread.polled;
  }

  // One turn for everybody, from a random one on. False if nobody got anywhere.
  bool round() {
    bool moved = false;
    const std::size_t first = random_below(resident.size());
    for (std::size_t i = 0; i < resident.size(); ++i) {
      Team& block = *resident[(first + i) % resident.size()];
      const std::size_t count = block.threads.size();
      const std::size_t begin = random_below(count);
      for (std::size_t k = 0; k < count; ++k) {
        Strand& thread = block.threads[(begin + k) % count];
        if (thread.where == Where::kReady && turn(block, thread)) moved = true;
        if (result != CUDA_SUCCESS) return true;
      }
    }
    return moved;
  }

  void retire(bool all) {
    for (std::size_t i = resident.size(); i-- > 0;) {
      Team& block = *resident[i];
      if (!all && block.ended < block.threads.size()) continue;
      for (Strand& thread : block.threads) spare().emplace_back(thread.fiber);
      resident.erase(resident.begin() + std::ptrdiff_t(i));
    }
  }
};

CUresult Waiting::run(const LaunchShape& shape, const std::function<void(Waiting&, u32, u32)>& thread) {
  watch_faults();
  sigjmp_buf* const outer = fault_target();
  State state{shape, thread, {}, nullptr, CUDA_SUCCESS};
  u32 next = 0;
  while (state.result == CUDA_SUCCESS) {
    while (next < shape.blocks && (state.resident.empty() || (state.resident.size() + 1) * shape.threads <= kMostThreads)) {
      state.start(next++);
    }
    if (state.resident.empty()) break;
    if (!state.round()) {
      // Somebody else must run first: another device, or the host.
      const timespec nap{0, kNapNanoseconds};
      nanosleep(&nap, nullptr);
    }
    state.retire(false);
  }
  // Fibers that were given up can be started anew.
  state.retire(true);
  fault_target() = outer;
  return state.result;
}

bool Waiting::sync_or(u32 index, bool mine) {
  Team& block = state_.block_of(index);
  Strand& self = *state_.current;
  block.any |= mine;
  block.arrived += 1;
  self.where = Where::kBarrier;
  State::release(block);
  if (self.where == Where::kBarrier) self.fiber->yield();
  return block.outcome;
}

void Waiting::poll() {
  Strand& self = *state_.current;
  self.polled = true;
  self.fiber->yield();
}

void* Waiting::shared(u32 index) { return state_.block_of(index).shared.data(); }

}  // namespace kvferry::fake
