// The fiber schedule: all threads of the resident CTAs take turns, switching at barriers and polls.
#include <memory>

#include "fiber.hpp"
#include "schedule.hpp"

namespace kvferry::host {
namespace {

enum class State { kReady, kAtBarrier, kEnded };

class Wave;

struct Thread {
  Wave* wave;
  u32 block;   // in the grid
  u32 cta;     // in the wave
  u32 thread;
  State state;
  Fiber fiber;
};

struct Cta {
  std::vector<U128> shared;
  u32 waiting;
  u32 ended;
  bool any;   // of those that wait
  bool said;  // of those that the barrier let go last: nobody reaches the next one before all have looked
};

class Wave final : public Scheduler {
 public:
  Wave(const Launch& launch, Monitor& monitor, const Body& body)
      : launch_(launch), monitor_(monitor), body_(body), permuter_(launch.order, launch.seed) {}

  void run() {
    std::vector<u32> blocks;
    permuter_.fill(blocks, launch_.nblocks);
    for (std::size_t at = 0; at < blocks.size(); at += launch_.resident) {
      const std::size_t n = std::min<std::size_t>(launch_.resident, blocks.size() - at);
      load(blocks.data() + at, static_cast<u32>(n));
      if (!turns()) return;
    }
  }

  void sync(u32, u32) override {
    Cta& cta = ctas_[current_->cta];
    current_->state = State::kAtBarrier;
    cta.waiting += 1;
    progress_ = true;
    release(cta);
    current_->fiber.yield();
  }

  bool sync_or(u32 block, u32 thread, bool mine) override {
    Cta& cta = ctas_[current_->cta];
    cta.any |= mine;
    sync(block, thread);
    return cta.said;
  }

  void poll(u32, u32) override { current_->fiber.yield(); }

 private:
  void load(const u32* blocks, u32 n) {
    ctas_.assign(n, Cta{});
    for (Cta& cta : ctas_) {
      cta.shared.resize((launch_.shared_bytes + 15) / 16);
      if (!cta.shared.empty()) std::memset(cta.shared.data(), kSharedPoison, cta.shared.size() * sizeof(U128));
    }
    live_ = n * launch_.nthreads;
    while (threads_.size() < live_) threads_.push_back(std::make_unique<Thread>());
    for (u32 i = 0; i < live_; ++i) {
      Thread& thread = *threads_[i];
      thread.wave = this;
      thread.cta = i / launch_.nthreads;
      thread.block = blocks[thread.cta];
      thread.thread = i % launch_.nthreads;
      thread.state = State::kReady;
      thread.fiber.start(&Wave::entry, &thread);
    }
  }

  static void entry(void* argument) {
    auto* thread = static_cast<Thread*>(argument);
    Wave& wave = *thread->wave;
    HostCx cx(thread->block, wave.launch_.nblocks, thread->thread, wave.launch_.nthreads,
              wave.ctas_[thread->cta].shared.data(), wave, wave.monitor_);
    wave.body_(cx);
  }

  // Whether the wave ended; false when it is stuck.
  bool turns() {
    const u32 all = live_;
    u64 idle = 0;
    std::vector<u32> order;
    while (live_ > 0) {
      progress_ = false;
      permuter_.fill(order, all);
      for (u32 i : order) {
        current_ = threads_[i].get();
        if (current_->state != State::kReady || !current_->fiber.resume()) continue;
        current_->state = State::kEnded;
        ctas_[current_->cta].ended += 1;
        live_ -= 1;
        progress_ = true;
        release(ctas_[current_->cta]);
      }
      idle = progress_ ? 0 : idle + 1;
      if (idle > launch_.max_idle_rounds) {
        monitor_.fault(kStuck, 0, current_->block, current_->thread);
        return false;
      }
    }
    return true;
  }

  // Opens the barrier when every thread that still runs waits at it. The hardware lets threads that have ended count
  // as arrived; we call it a fault, since a body that depends on it breaks on a sub-CTA barrier.
  void release(Cta& cta) {
    if (cta.waiting == 0 || cta.waiting + cta.ended < launch_.nthreads) return;
    if (cta.ended > 0) monitor_.fault(kBarrierDiverged, 0, current_->block, current_->thread);
    cta.waiting = 0;
    cta.said = cta.any;
    cta.any = false;
    const std::size_t first = static_cast<std::size_t>(&cta - ctas_.data()) * launch_.nthreads;
    for (std::size_t i = first; i < first + launch_.nthreads; ++i) {
      if (threads_[i]->state == State::kAtBarrier) threads_[i]->state = State::kReady;
    }
  }

  const Launch& launch_;
  Monitor& monitor_;
  const Body& body_;
  Permuter permuter_;
  std::vector<Cta> ctas_;
  std::vector<std::unique_ptr<Thread>> threads_;  // stacks are reused from wave to wave
  Thread* current_ = nullptr;
  u32 live_ = 0;
  bool progress_ = false;
};

}  // namespace

void run_fibers(const Launch& launch, Monitor& monitor, const Body& body) { Wave(launch, monitor, body).run(); }

}  // namespace kvferry::host
