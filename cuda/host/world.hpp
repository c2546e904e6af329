// Runs the kernels of several ranks against each other: every thread of every CTA of every rank is a fiber, and so is
// every copy. Streams run their operations in order; everything else may happen in any order, which the seed decides.
//
// Random runs are unkind on purpose: CTAs and whole launches are held back until nothing else moves, one rank runs while
// others stand still, and threads lose their turn before stores and atomics.
#pragma once

#include <functional>

#include "host_cx.hpp"
#include "schedule.hpp"

namespace kvferry::host {

enum OpKind : u32 {
  kKernelOp,
  kCopyOp,     // rows of bytes, as a copy engine moves them
  kConsumeOp,  // a copy that moves the store counters of its source along, to `counts`; leaves 0 there and in the source
               // bytes that nobody sends
};

constexpr u32 kNoOp = ~u32(0);
constexpr u8 kConsumed = 0xee;

// One operation of a stream. Mirrored by tests/host_kernels/world.rs.
struct WorldOp {
  u32 kind;    // OpKind
  u32 stream;  // operations of a stream run in the order of the list
  u32 rank;    // whose regions it may touch
  u32 after;   // an operation that has to end first, or kNoOp
  const char* name;  // of a kernel body
  const void* params;
  u64 params_bytes;
  u32 nblocks;
  u32 nthreads;
  u32 shared_bytes;
  u32 ended;  // out: 1 when it has run
  u64 src;
  u64 dst;
  u64 counts;
  u64 bytes;  // of a row
  u64 rows;
  u64 src_pitch;
  u64 dst_pitch;
};

// What the host does while kernels run.
struct WorldEvent {
  u64 at_ns;
  u64 address;  // of a u64
  u64 value;
};

struct WorldRank {
  const Region* regions;
  u64 region_count;
  Report* report;
};

struct WorldRun {
  WorldOp* ops;
  u64 op_count;
  const WorldEvent* events;
  u64 event_count;
  const WorldRank* ranks;
  u64 rank_count;
  u64 seed;
  u64 max_idle;  // jumps of the clock without progress before the run is given up as stuck
  u32 order;     // Order
  u32 enforce;   // Monitor
};

using Bodies = std::function<Body(const WorldOp&)>;

// Runs until all operations have ended or nothing can move any more (kStuck in the report of a rank that waits).
void run_world(const WorldRun& run, const Bodies& bodies);

}  // namespace kvferry::host
