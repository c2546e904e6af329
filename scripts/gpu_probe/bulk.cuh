// A strided copy by the bulk copy engine (sm_90+): each of `lanes` threads of a CTA drives a ring of `stages` tiles in
// shared memory. Not in the library unless the probe shows where it wins. 16-byte multiples only.
#pragma once

#include "kvferry/strided_copy.cuh"

namespace kvferry {

struct BulkShape {
  u32 lanes;   // <= 32, a power of two
  u32 stages;  // of each lane, >= 2
  u32 tile;    // bytes, >= chunk_bytes
};

constexpr u32 kBulkSlot = 32;  // barrier (8), destination (8), bytes (4)

inline u32 bulk_shared_bytes(BulkShape s) { return s.lanes * s.stages * (s.tile + kBulkSlot); }

__device__ __forceinline__ u64 device_nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Waits for a barrier's phase, two seconds at most: longer means that the bytes never come.
__device__ __forceinline__ void bulk_wait(u32 barrier, u32 phase) {
  u64 start = 0;
  for (u32 polls = 0;; ++polls) {
    u32 done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    if (done) return;
    if (polls % 256 == 255) {
      const u64 t = device_nanoseconds();
      if (start == 0) start = t;
      if (t - start > 2000000000ull) __trap();
    }
  }
}

template <class Params>
__device__ __forceinline__ void strided_bulk(const Params& p, BulkShape s) {
  const StridedHeader& h = p.header;
  DeviceCx cx;
  const u32 lane = threadIdx.x;
  if (lane >= s.lanes) return;
  const u32 shared = u32(__cvta_generic_to_shared(kvf_dynamic_shared));
  const u32 tiles = shared + lane * s.stages * s.tile;
  const u32 slots = shared + s.lanes * s.stages * s.tile + lane * s.stages * kBulkSlot;
  for (u32 i = 0; i < s.stages; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(slots + i * kBulkSlot) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

  const u32 teams = gridDim.x * s.lanes;
  u32 next = blockIdx.x * s.lanes + lane, at = next;
  u32 fill = 0, drain = 0, phase = 0;  // stages
  auto issue = [&] {
    const u32 pair = divide(next, h.per_pair);
    const IdPair ids = unpack(cx, h, pair, load_pair(cx, p, pair), true);
    u64 src = 0, dst = 0;
    u32 bytes = 0;
    if (ids.good) {
      const Ends run = run_ends(cx, p, ids, next - pair * h.per_pair.count);
      const u64 begin = run.piece * h.chunk_bytes;
      const u64 left = h.run_bytes - begin;
      bytes = u32(left < h.chunk_bytes ? left : h.chunk_bytes);
      src = run.src + begin, dst = run.dst + begin;
    }
    const u32 slot = slots + fill * kBulkSlot;
    asm volatile("st.shared.u64 [%0 + 8], %1;\n st.shared.u32 [%0 + 16], %2;" ::"r"(slot), "l"(dst), "r"(bytes)
                 : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(slot), "r"(bytes) : "memory");
    if (bytes != 0) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       tiles + fill * s.tile),
                   "l"(src), "r"(bytes), "r"(slot)
                   : "memory");
    }
    next += teams;
    fill = fill + 1 == s.stages ? 0 : fill + 1;
  };
  for (u32 i = 0; i + 1 < s.stages && next < h.items; ++i) issue();
  for (; at < h.items; at += teams) {
    const u32 slot = slots + drain * kBulkSlot;
    bulk_wait(slot, phase);
    u64 dst;
    u32 bytes;
    asm volatile("ld.shared.u64 %0, [%2 + 8];\n ld.shared.u32 %1, [%2 + 16];"
                 : "=l"(dst), "=r"(bytes)
                 : "r"(slot)
                 : "memory");
    if (bytes != 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                   "r"(tiles + drain * s.tile), "r"(bytes)
                   : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    drain = drain + 1 == s.stages ? 0 : drain + 1;
    phase ^= drain == 0;
    if (next < h.items) {
      // All stores but the newest have read their tiles: the stage before `drain`'s predecessor is free.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      issue();
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace kvferry
