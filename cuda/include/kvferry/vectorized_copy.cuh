// Copies `pairs` independent runs of `bytes` bytes: run i goes from src_table[i] to dst_table[i].
//
// The work is cut into items: chunk c of pair i, `chunk_bytes` long (the last chunk of a pair may be shorter). An item
// belongs to one team of 2^team_shift consecutive threads; teams walk the items in strides of their number, so any
// grid covers any amount of work. There is no barrier and no shared memory.
//
// Alignment is decided for each item (copy_run). Any pointer and any size is legal.
#pragma once

#include "kvferry/copy_run.cuh"

namespace kvferry {

// Mirrored by `VectorizedCopyParams` in crates/kvferry-kernels.
struct VectorizedCopyParams {
  u64 src_table;        // device-visible u64[pairs]
  u64 dst_table;        // device-visible u64[pairs]; destinations must not overlap
  u64 pairs;
  u64 bytes;            // of every pair
  u64 chunk_bytes;      // a multiple of 16 unless chunks_per_pair is 1
  u64 chunks_per_pair;  // ceil(bytes / chunk_bytes); pairs * chunks_per_pair <= 2^62
  u32 team_shift;       // 2^team_shift divides the CTA's thread count
  u32 reserved;         // 0
};

// X(field, offset)
#define KVF_VECTORIZED_COPY_FIELDS(X) \
  X(src_table, 0)                     \
  X(dst_table, 8)                     \
  X(pairs, 16)                        \
  X(bytes, 24)                        \
  X(chunk_bytes, 32)                  \
  X(chunks_per_pair, 40)              \
  X(team_shift, 48)                   \
  X(reserved, 52)

// X(kernel symbol, body, params, most threads per CTA)
#define KVF_VECTORIZED_COPY_KERNELS(X) X(vectorized_copy, kvferry::vectorized_copy, kvferry::VectorizedCopyParams, 1024)

template <class Cx>
KVF_HD void vectorized_copy(Cx& cx, const VectorizedCopyParams& p) {
  const u32 team = u32(1) << p.team_shift;
  const u32 lane = cx.tid() & (team - 1);
  const u64 teams = u64(cx.nblocks()) * (cx.nthreads() >> p.team_shift);
  const u64 items = p.bytes == 0 ? 0 : p.pairs * p.chunks_per_pair;
  u64 item = u64(cx.bid()) * (cx.nthreads() >> p.team_shift) + (cx.tid() >> p.team_shift);
  if (item >= items) return;

  // The next item's pointers are on their way while this item is copied: a table may lie behind PCIe.
  const bool whole = p.chunks_per_pair == 1;
  u64 pair = whole ? item : item / p.chunks_per_pair;
  u64 src = load<u64>(cx, p.src_table + pair * 8);
  u64 dst = load<u64>(cx, p.dst_table + pair * 8);
  KVF_NO_UNROLL
  for (;;) {
    const u64 offset = whole ? 0 : (item - pair * p.chunks_per_pair) * p.chunk_bytes;
    const u64 left = p.bytes - offset;
    const u64 next_item = item + teams;
    const bool more = next_item < items;
    u64 next_pair = pair, next_src = src, next_dst = dst;
    if (more) {
      next_pair = whole ? next_item : next_item / p.chunks_per_pair;
      next_src = load<u64>(cx, p.src_table + next_pair * 8);
      next_dst = load<u64>(cx, p.dst_table + next_pair * 8);
    }
    const u64 bytes = whole || left < p.chunk_bytes ? left : p.chunk_bytes;
    copy_run<Hint::kNone>(cx, src + offset, dst + offset, bytes, lane, team);
    if (!more) return;
    item = next_item, pair = next_pair, src = next_src, dst = next_dst;
  }
}

}  // namespace kvferry
