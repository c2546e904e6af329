// The plain-loop schedule: every thread runs to its end before the next one starts.
#include <numeric>

#include "schedule.hpp"

namespace kvferry::host {

void Permuter::fill(std::vector<u32>& out, u32 n) {
  out.resize(n);
  std::iota(out.begin(), out.end(), 0u);
  if (order_ == kReversed) std::reverse(out.begin(), out.end());
  if (order_ == kRandom) std::shuffle(out.begin(), out.end(), random_);
}

namespace {

class NoSwitching final : public Scheduler {
 public:
  explicit NoSwitching(Monitor& monitor) : monitor_(monitor) {}
  void sync(u32 block, u32 thread) override { monitor_.fault(kBarrierInLoop, 0, block, thread); }
  bool sync_or(u32 block, u32 thread, bool mine) override {
    sync(block, thread);
    return mine;
  }
  void poll(u32 block, u32 thread) override { monitor_.fault(kBarrierInLoop, 0, block, thread); }

 private:
  Monitor& monitor_;
};

}  // namespace

void run_loops(const Launch& launch, Monitor& monitor, const Body& body) {
  NoSwitching scheduler(monitor);
  Permuter permuter(launch.order, launch.seed);
  std::vector<u32> blocks, threads;
  std::vector<U128> shared((launch.shared_bytes + 15) / 16);
  permuter.fill(blocks, launch.nblocks);
  for (u32 block : blocks) {
    if (!shared.empty()) std::memset(shared.data(), kSharedPoison, shared.size() * sizeof(U128));
    permuter.fill(threads, launch.nthreads);
    for (u32 thread : threads) {
      HostCx cx(block, launch.nblocks, thread, launch.nthreads, shared.data(), scheduler, monitor);
      body(cx);
    }
  }
}

}  // namespace kvferry::host
