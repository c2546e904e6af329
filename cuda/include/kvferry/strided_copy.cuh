// Copies blocks between two strided layouts: for every pair of block ids, every run inside the block.
//
// Pairs and loops are counted as one index. `items` of them are walked by a grid of any size:
//     item = ((pair * loop[0].count + i0) * loop[1].count + i1 ...) * inner.count + piece
// and everything is found again by multiplication (Divisor). Where a run begins on one side:
//     region = start_region + id / parts * block_region + sum of i * region step     of that side's table of bases
//     offset = start + id / parts * block_stride + id % parts * part_stride + sum of i * stride
// A region is one allocation; its base is a word of `tail`, or of a table in memory when there are many.
//
// Two bodies share this. In `strided_tile` a piece is a chunk of one run, copied by a team of threads, each piece with
// an alignment of its own. In `strided_word` a piece is one unit of 1 to 16 bytes, one per thread and step: for runs so
// short that teams would idle. Its units are aligned by construction, and neighbouring threads take neighbouring units,
// so the order of the loops decides which side is walked in address order.
//
// No barrier, no shared memory. Destinations must not overlap. Bytes before, between and after runs are not touched.
#pragma once

#include "kvferry/copy_run.cuh"
#include "kvferry/divisor.cuh"

namespace kvferry {

constexpr u32 kStridedLoops = 6;

// One loop around a run. All structs of this file are mirrored in crates/kvferry-kernels.
struct StridedLoopParams {
  u64 src_stride;  // bytes per step
  u64 dst_stride;
  u32 src_region;  // regions per step
  u32 dst_region;
  Divisor steps;
};

struct StridedSideParams {
  u64 bases;         // device-visible u64 per region; 0: they are tail[bases_at..]
  u64 start;         // bytes
  u64 block_stride;  // bytes
  u64 part_stride;   // bytes
  u64 ids;           // ids of this side alone (kSeparate): device-visible, signed, id_bytes each
  u32 id_bytes;      // 4 or 8
  u32 blocks;        // ids are below this; at most 2^31. Checked for kSeparate only
  u32 start_region;
  u32 block_region;  // regions
  u32 bases_at;      // word of tail
  u32 reserved;      // 0
  Divisor parts;
};

enum StridedIds : u32 {
  kInlinePairs,  // tail[ids_at + pair] = source | destination << 32
  kPairTable,    // the same words at `pair_table`
  kSeparate,     // two arrays, read and checked here; a pair with a bad id is skipped and reported
};

struct StridedHeader {
  StridedSideParams src;
  StridedSideParams dst;
  u64 pair_table;   // device-visible u64 per pair
  u64 report;       // device-visible StridedReport
  u64 run_bytes;
  u64 chunk_bytes;  // tile: of a piece, a multiple of 16 unless a run is one piece
  u32 items;        // < 2^31
  u32 loops;        // used entries of `loop`, outermost first
  u32 ids_kind;     // StridedIds
  u32 ids_at;       // word of tail
  u32 lane_shift;   // tile: 2^lane_shift threads make a team and divide the CTA; word: a unit has 2^lane_shift bytes
  u32 reserved;     // 0
  Divisor per_pair;  // items of one pair
  Divisor inner;     // pieces of one run
  StridedLoopParams loop[kStridedLoops];
};

// What a launch with separate ids leaves behind. Zeroed by the host before; the first bad id fills it, others are
// only skipped. Read it after the launch has completed.
struct StridedReport {
  u32 state;  // 0: all ids were good
  u32 side;   // 0 source, 1 destination
  u64 index;  // pair
  u64 value;  // the id as found, sign-extended
  u64 limit;  // ids must be below this
};

template <u32 kWords>
struct StridedParams {
  StridedHeader header;
  u64 tail[kWords];  // bases of the source, of the destination, packed ids: whatever is not in memory
};
// Kernel parameters may have 4,096 bytes on every driver, 32,764 on all that we support; the driver copies the whole
// struct at each launch, so short launches take the small one.
using StridedSmall = StridedParams<(4096 - sizeof(StridedHeader)) / 8>;
using StridedLarge = StridedParams<(32760 - sizeof(StridedHeader)) / 8>;

// X(field, offset) for every struct
#define KVF_STRIDED_LOOP_FIELDS(X) X(src_stride, 0) X(dst_stride, 8) X(src_region, 16) X(dst_region, 20) X(steps, 24)
#define KVF_STRIDED_SIDE_FIELDS(X)                                                                     \
  X(bases, 0) X(start, 8) X(block_stride, 16) X(part_stride, 24) X(ids, 32) X(id_bytes, 40)            \
  X(blocks, 44) X(start_region, 48) X(block_region, 52) X(bases_at, 56) X(reserved, 60) X(parts, 64)
#define KVF_STRIDED_HEADER_FIELDS(X)                                                                   \
  X(src, 0) X(dst, 80) X(pair_table, 160) X(report, 168) X(run_bytes, 176) X(chunk_bytes, 184)         \
  X(items, 192) X(loops, 196) X(ids_kind, 200) X(ids_at, 204) X(lane_shift, 208) X(reserved, 212)      \
  X(per_pair, 216) X(inner, 232) X(loop, 248)
#define KVF_STRIDED_REPORT_FIELDS(X) X(state, 0) X(side, 4) X(index, 8) X(value, 16) X(limit, 24)
#define KVF_STRIDED_PARAMS_FIELDS(X) X(header, 0) X(tail, 488)

// X(kernel symbol, body, params, most threads per CTA)
#define KVF_STRIDED_COPY_KERNELS(X)                                                                        \
  X(strided_tile, kvferry::strided_tile<kvferry::Hint::kNone>, kvferry::StridedSmall, 1024)                \
  X(strided_tile_large, kvferry::strided_tile<kvferry::Hint::kNone>, kvferry::StridedLarge, 1024)          \
  X(strided_word, kvferry::strided_word<kvferry::Hint::kNone>, kvferry::StridedSmall, 1024)                \
  X(strided_word_large, kvferry::strided_word<kvferry::Hint::kNone>, kvferry::StridedLarge, 1024)

// The ids of a pair as they lie in memory, not yet looked at: a load is waited for where its value is used.
struct RawPair {
  u64 first;   // both ids packed, or the source's
  u64 second;  // the destination's, kSeparate only
};

template <class Cx>
KVF_HD u64 load_id(Cx& cx, const StridedSideParams& side, u32 pair) {
  return side.id_bytes == 8 ? load<u64>(cx, side.ids + u64(pair) * 8) : load<u32>(cx, side.ids + u64(pair) * 4);
}

template <class Params, class Cx>
KVF_HD RawPair load_pair(Cx& cx, const Params& p, u32 pair) {
  const StridedHeader& h = p.header;
  if (h.ids_kind == kInlinePairs) return {p.tail[h.ids_at + pair], 0};
  if (h.ids_kind == kPairTable) return {load<u64>(cx, h.pair_table + u64(pair) * 8), 0};
  return {load_id(cx, h.src, pair), load_id(cx, h.dst, pair)};
}

template <class Cx>
KVF_HD void report_bad_id(Cx& cx, u64 report, u32 side, u32 pair, u64 value, u32 limit) {
  if (load<u32>(cx, report) != 0 || cx.cas(report, 0, 1) != 0) return;
  store<u32>(cx, report + 4, side);
  store<u64>(cx, report + 8, pair);
  store<u64>(cx, report + 16, value);
  store<u64>(cx, report + 24, limit);
}

// The id as an index. A bad one becomes 0, which is legal to compute with, and turns `good` off.
template <class Cx>
KVF_HD u32 checked_id(Cx& cx, const StridedHeader& h, u32 side, u32 pair, u64 raw, bool speak, bool& good) {
  const StridedSideParams& s = side == 0 ? h.src : h.dst;
  const u64 value = s.id_bytes == 8 ? raw : u64(int64_t(int32_t(u32(raw))));
  if (value < s.blocks) return u32(value);
  if (speak) report_bad_id(cx, h.report, side, pair, value, s.blocks);
  good = false;
  return 0;
}

struct IdPair {
  u32 src;
  u32 dst;
  bool good;
};

// `speak`: whether this thread reports a bad id (one of a team is enough).
template <class Cx>
KVF_HD IdPair unpack(Cx& cx, const StridedHeader& h, u32 pair, RawPair raw, bool speak) {
  IdPair ids{u32(raw.first), u32(raw.first >> 32), true};
  if (h.ids_kind == kSeparate) {
    ids.src = checked_id(cx, h, 0, pair, raw.first, speak, ids.good);
    ids.dst = checked_id(cx, h, 1, pair, raw.second, speak, ids.good);
  }
  return ids;
}

// A place on one side while it is being added up.
struct SidePlace {
  u64 offset;
  u32 region;
};

KVF_HD SidePlace block_place(const StridedSideParams& side, u32 id) {
  const u32 block = divide(id, side.parts);
  const u32 part = id - block * side.parts.count;
  return {side.start + block * side.block_stride + part * side.part_stride,
          side.start_region + block * side.block_region};
}

template <class Params, class Cx>
KVF_HD u64 address(Cx& cx, const Params& p, const StridedSideParams& side, SidePlace at) {
  const u64 base = side.bases == 0 ? p.tail[side.bases_at + at.region]
                                   : load<u64>(cx, side.bases + u64(at.region) * 8);
  return base + at.offset;
}

struct Ends {
  u64 src;
  u64 dst;
  u32 piece;  // of the run
};

// Where the run of an item begins on both sides. `in_pair` counts the pair's items.
template <class Params, class Cx>
KVF_HD Ends run_ends(Cx& cx, const Params& p, IdPair ids, u32 in_pair) {
  const StridedHeader& h = p.header;
  SidePlace src = block_place(h.src, ids.src), dst = block_place(h.dst, ids.dst);
  u32 rest = divide(in_pair, h.inner);
  const u32 piece = in_pair - rest * h.inner.count;
  KVF_NO_UNROLL
  for (u32 l = h.loops; l-- > 0;) {
    const StridedLoopParams& loop = h.loop[l];
    const u32 outer = divide(rest, loop.steps);
    const u32 i = rest - outer * loop.steps.count;
    src.offset += i * loop.src_stride, src.region += i * loop.src_region;
    dst.offset += i * loop.dst_stride, dst.region += i * loop.dst_region;
    rest = outer;
  }
  return {address(cx, p, h.src, src), address(cx, p, h.dst, dst), piece};
}

template <Hint kHint, class Params, class Cx>
KVF_HD void strided_tile(Cx& cx, const Params& p) {
  const StridedHeader& h = p.header;
  const u32 team = u32(1) << h.lane_shift;
  const u32 lane = cx.tid() & (team - 1);
  const u32 per_cta = cx.nthreads() >> h.lane_shift;
  const u32 teams = cx.nblocks() * per_cta;
  u32 item = cx.bid() * per_cta + (cx.tid() >> h.lane_shift);
  if (item >= h.items) return;

  u32 pair = divide(item, h.per_pair);
  RawPair raw = load_pair(cx, p, pair);
  KVF_NO_UNROLL
  for (;;) {
    // The next item's ids are on their way while this one is copied.
    const u32 next = item + teams;
    const bool more = next < h.items;
    u32 next_pair = pair;
    RawPair next_raw = raw;
    if (more) {
      next_pair = divide(next, h.per_pair);
      next_raw = load_pair(cx, p, next_pair);
    }

    const IdPair ids = unpack(cx, h, pair, raw, lane == 0);
    if (ids.good) {
      const Ends run = run_ends(cx, p, ids, item - pair * h.per_pair.count);
      const u64 begin = run.piece * h.chunk_bytes;
      const u64 left = h.run_bytes - begin;
      copy_run<kHint>(cx, run.src + begin, run.dst + begin, left < h.chunk_bytes ? left : h.chunk_bytes, lane, team);
    }
    if (!more) return;
    item = next, pair = next_pair, raw = next_raw;
  }
}

// Units of type V; each thread has kUnits of them in flight, one grid apart, so that little work still spreads over all
// CTAs.
template <class V, u32 kUnits, Hint kHint, class Params, class Cx>
KVF_HD void strided_units(Cx& cx, const Params& p) {
  const StridedHeader& h = p.header;
  const u32 step = cx.nblocks() * cx.nthreads();
  KVF_NO_UNROLL
  for (u32 base = cx.bid() * cx.nthreads() + cx.tid(); base < h.items; base += step * kUnits) {
    V value[kUnits];
    u64 to[kUnits];
    bool good[kUnits];
    KVF_UNROLL
    for (u32 u = 0; u < kUnits; ++u) {
      const u32 item = base + u * step;
      good[u] = item < h.items;
      if (!good[u]) continue;
      const u32 pair = divide(item, h.per_pair);
      const IdPair ids = unpack(cx, h, pair, load_pair(cx, p, pair), true);
      good[u] = ids.good;
      if (!good[u]) continue;
      const Ends run = run_ends(cx, p, ids, item - pair * h.per_pair.count);
      value[u] = load<V, kHint>(cx, run.src + run.piece * sizeof(V));
      to[u] = run.dst + run.piece * sizeof(V);
    }
    KVF_UNROLL
    for (u32 u = 0; u < kUnits; ++u) {
      if (good[u]) store<V, kHint>(cx, to[u], value[u]);
    }
  }
}

template <Hint kHint, class Params, class Cx>
KVF_HD void strided_word(Cx& cx, const Params& p) {
  switch (p.header.lane_shift) {
    case 4:
      return strided_units<U128, 4, kHint>(cx, p);
    case 3:
      return strided_units<u64, 4, kHint>(cx, p);
    case 2:
      return strided_units<u32, 4, kHint>(cx, p);
    case 1:
      return strided_units<u16, 4, kHint>(cx, p);
    default:
      return strided_units<u8, 4, kHint>(cx, p);
  }
}

}  // namespace kvferry
