// Bodies that test the harness itself: some right, most broken on purpose. A harness that lets one of the broken ones
// pass proves nothing about the real kernels.
#pragma once

#include "kvferry/vectorized_copy.cuh"

namespace kvferry::selftest {

constexpr u32 kTile = 8;

struct TransposeParams {
  u64 src;    // u32[tiles][kTile][kTile]
  u64 dst;    // the same, every tile transposed
  u64 tiles;
};

// One CTA of kTile * kTile threads per tile, grid-stride. kFilled: wait until the tile is in shared memory; kDrained:
// wait until it has been read before the next one overwrites it. Right only with both.
template <bool kFilled, bool kDrained, class Cx>
void transpose(Cx& cx, const TransposeParams& p) {
  u32* tile = static_cast<u32*>(cx.shared());
  const u32 row = cx.tid() / kTile, column = cx.tid() % kTile;
  for (u64 t = cx.bid(); t < p.tiles; t += cx.nblocks()) {
    const u64 base = t * kTile * kTile;
    tile[row * kTile + column] = load<u32>(cx, p.src + (base + cx.tid()) * 4);
    if (kFilled) cx.sync();
    store<u32>(cx, p.dst + (base + cx.tid()) * 4, tile[column * kTile + row]);
    if (kDrained) cx.sync();
  }
}

// A barrier that only half of the CTA reaches.
template <class Cx>
void diverged_barrier(Cx& cx, const TransposeParams&) {
  if (cx.tid() < cx.nthreads() / 2) cx.sync();
}

struct HandoffParams {
  u64 flag;   // u32, 0 at the start
  u64 value;  // u32, written by CTA 0 before the flag
  u64 out;    // u32[nblocks - 1][nthreads], what the other CTAs read
  u64 send;   // 0: CTA 0 never raises the flag
};

// CTA 0 hands a value to all others, which spin for it.
template <class Cx>
void handoff(Cx& cx, const HandoffParams& p) {
  if (cx.bid() == 0) {
    if (cx.tid() != 0 || p.send == 0) return;
    store<u32>(cx, p.value, 42);
    store<u32>(cx, p.flag, 1);
    return;
  }
  while (load<u32>(cx, p.flag) == 0) cx.poll();
  const u64 slot = u64(cx.bid() - 1) * cx.nthreads() + cx.tid();
  store<u32>(cx, p.out + slot * 4, load<u32>(cx, p.value));
}

enum class Broken {
  kMisaligned,    // 16-byte units whatever the pointers
  kCtaAlignment,  // the unit is decided from the CTA's first pair (an older reference kernel)
  kDoubleStore,   // the last whole unit is stored by two threads
  kOverrun,       // the tail is rounded up to a whole unit
  kPeek,          // the same, but only the load goes too far
  kGap,           // the tail is forgotten
};

// One CTA per pair, each thread a unit.
template <Broken kHow, class Cx>
void broken_copy(Cx& cx, const VectorizedCopyParams& p) {
  bool wide = true;
  bool decided = false;
  for (u64 pair = cx.bid(); pair < p.pairs; pair += cx.nblocks()) {
    const u64 src = load<u64>(cx, p.src_table + pair * 8);
    const u64 dst = load<u64>(cx, p.dst_table + pair * 8);
    if (!decided || kHow != Broken::kCtaAlignment) wide = ((src | dst) & 15) == 0 || kHow == Broken::kMisaligned;
    decided = true;
    u64 units = wide ? p.bytes / 16 : 0;
    const bool ragged = wide && p.bytes % 16 != 0;
    if (kHow == Broken::kOverrun && ragged) units += 1;
    for (u64 i = cx.tid(); i < units; i += cx.nthreads()) store<U128>(cx, dst + i * 16, load<U128>(cx, src + i * 16));
    if (kHow == Broken::kDoubleStore && units > 0 && cx.tid() == 0) {
      store<U128>(cx, dst + (units - 1) * 16, load<U128>(cx, src + (units - 1) * 16));
    }
    if (kHow == Broken::kPeek && ragged && cx.tid() == 0) {
      volatile u64 seen = load<U128>(cx, src + units * 16).lo;
      (void)seen;
    }
    if (kHow == Broken::kGap && ragged) continue;
    for (u64 i = units * 16 + cx.tid(); i < p.bytes; i += cx.nthreads()) {
      store<u8>(cx, dst + i, load<u8>(cx, src + i));
    }
  }
}

}  // namespace kvferry::selftest
