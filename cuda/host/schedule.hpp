// Runs a body for every thread of a grid, in an order the caller chooses.
#pragma once

#include <functional>
#include <random>

#include "host_cx.hpp"

namespace kvferry::host {

enum Order : u32 { kForward, kReversed, kRandom };
enum Mode : u32 {
  kLoops,   // one thread after the other; for bodies without barriers and polls
  kFibers,  // one fiber per thread; sync() and poll() switch
};

struct Launch {
  u32 nblocks;
  u32 nthreads;
  u32 shared_bytes;
  u32 order;     // Order
  u32 mode;      // Mode
  u32 resident;  // fibers: CTAs that run at the same time; the next wave starts when all have ended
  u64 seed;
  u64 max_idle_rounds;  // fibers: rounds without progress before the run is given up as stuck
  u32 enforce;          // Monitor
  u32 unused;
};

using Body = std::function<void(HostCx&)>;

// The order of 0..n. Random orders differ from call to call and repeat with the seed.
class Permuter {
 public:
  Permuter(u32 order, u64 seed) : order_(order), random_(seed) {}
  void fill(std::vector<u32>& out, u32 n);

 private:
  u32 order_;
  std::mt19937_64 random_;
};

// Shared memory starts as this byte everywhere: reading what nobody wrote shows.
constexpr u8 kSharedPoison = 0xa5;

void run_loops(const Launch& launch, Monitor& monitor, const Body& body);
void run_fibers(const Launch& launch, Monitor& monitor, const Body& body);

}  // namespace kvferry::host
