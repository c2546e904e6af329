// How a CTA copies its share of what one rank gets.
//
// The words of all items of a target are counted in chunks of one round of the CTA, four words per thread; lane l of n
// takes chunks l, l + n, ... or the l-th n-th of them. A word is found by multiplication (Divisor), or by a step from the
// one before it. Which word width an item has was decided from everything that its addresses are made of, so no word is
// misaligned and no byte is stored twice.
#pragma once

#include "kvferry/exchange_words.cuh"

namespace kvferry {

constexpr u32 kExchangeUnits = 4;     // words that a thread has on their way
constexpr u32 kExchangeStretch = 64;  // chunks per lane from which on each lane has its own stretch

struct ExchangeEnds {
  u64 src;
  u64 dst;  // from the landing place
};

// Where a word lies on both sides.
KVF_HD ExchangeEnds word_ends(const ExchangeItem& item, u32 word) {
  u32 rest = divide(word, item.run);
  const u64 at = u64(word - rest * item.run.count) << item.word_shift;
  ExchangeEnds ends{item.src + at, item.dst_offset + at};
  KVF_NO_UNROLL
  for (u32 l = item.loops; l-- > 0;) {
    const ExchangeLoop& loop = item.loop[l];
    u32 outer = 0;
    u32 i = rest;
    if (l > 0) {
      outer = divide(rest, loop.count);
      i = rest - outer * loop.count.count;
    }
    ends.src += i * loop.src_stride;
    ends.dst += i * loop.dst_stride;
    rest = outer;
  }
  return ends;
}

// A word of 2^shift bytes. The width is the same for the whole CTA: one branch around each access is cheaper than a copy of
// the code for each width, which would cost registers.
template <class Cx>
KVF_HD U128 load_word(Cx& cx, u64 address, u32 shift) {
  if (shift == 4) return load<U128, Hint::kStream>(cx, address);
  if (shift == 3) return {load<u64, Hint::kStream>(cx, address), 0};
  if (shift == 2) return {load<u32, Hint::kStream>(cx, address), 0};
  if (shift == 1) return {load<u16, Hint::kStream>(cx, address), 0};
  return {load<u8, Hint::kStream>(cx, address), 0};
}

template <class Cx>
KVF_HD void store_word(Cx& cx, u64 address, U128 value, u32 shift) {
  if (shift == 4) return store<U128, Hint::kStream>(cx, address, value);
  if (shift == 3) return store<u64, Hint::kStream>(cx, address, value.lo);
  if (shift == 2) return store<u32, Hint::kStream>(cx, address, u32(value.lo));
  if (shift == 1) return store<u16, Hint::kStream>(cx, address, u16(value.lo));
  store<u8, Hint::kStream>(cx, address, u8(value.lo));
}

// One chunk: words `first + u * nthreads + tid`. Two loads are on their way before the first store waits for one: with more,
// the registers would not do, and it is the arithmetic that takes the time.
template <class Cx>
KVF_HD void copy_chunk(Cx& cx, const ExchangeItem& item, u64 place, u32 first) {
  constexpr u32 kUnits = 2;
  KVF_NO_UNROLL
  for (u32 round = 0; round < kExchangeUnits; round += kUnits) {
    U128 value[kUnits];
    u64 to[kUnits];
    KVF_UNROLL
    for (u32 u = 0; u < kUnits; ++u) {
      const u32 word = first + (round + u) * cx.nthreads() + cx.tid();
      if (word >= item.words) continue;
      const ExchangeEnds ends = word_ends(item, word);
      value[u] = load_word(cx, ends.src, item.word_shift);
      to[u] = place + ends.dst;
    }
    KVF_UNROLL
    for (u32 u = 0; u < kUnits; ++u) {
      const u32 word = first + (round + u) * cx.nthreads() + cx.tid();
      if (word < item.words) store_word(cx, to[u], value[u], item.word_shift);
    }
  }
}

// The same for items that most calls are made of: words of 16 bytes, at most two loops, and all of it near enough to the
// first word that offsets in words have 32 bits. A thread goes from word to word without dividing.
struct ExchangeWalk {
  u32 word;
  u32 column;  // in the run
  u32 row;     // of the inner loop
  u32 src;     // words from the first one, two's complement
  u32 dst;
};

// Loops as words, missing ones as loops that never end.
struct ExchangeShape {
  u32 run;
  u32 rows;     // of the inner loop
  u32 run_src;  // what is added where a run ends: to the next one
  u32 run_dst;
  u32 row_src;  // what is added where the inner loop ends
  u32 row_dst;
};

KVF_HD u32 words_of(u64 bytes) { return u32(bytes >> 4); }

// How far a loop leads, in words, whatever its direction.
KVF_HD u64 reach_of(const ExchangeLoop& loop, u64 stride) {
  const u64 bytes = stride >> 63 != 0 ? 0 - stride : stride;
  return (bytes >> 4) * loop.count.count;
}

KVF_HD bool walkable(const ExchangeItem& item) {
  if (item.word_shift != 4 || item.loops > 2) return false;
  u64 src = item.run.count;
  u64 dst = item.run.count;
  KVF_NO_UNROLL
  for (u32 l = 0; l < item.loops; ++l) {
    const ExchangeLoop& loop = item.loop[l];
    // Above, the products might not fit either.
    if (loop.src_stride + (u64(1) << 35) >= u64(1) << 36 || loop.dst_stride >= u64(1) << 35) return false;
    src += reach_of(loop, loop.src_stride);
    dst += reach_of(loop, loop.dst_stride);
  }
  return src < u64(1) << 31 && dst < u64(1) << 31;
}

KVF_HD ExchangeShape shape_of(const ExchangeItem& item) {
  ExchangeShape shape{item.run.count, ~u32(0), 0, 0, 0, 0};
  if (item.loops == 0) return shape;
  const ExchangeLoop& inner = item.loop[item.loops - 1];
  const u32 src = words_of(inner.src_stride);
  const u32 dst = words_of(inner.dst_stride);
  shape.run_src = src - shape.run;
  shape.run_dst = dst - shape.run;
  if (item.loops == 1) return shape;
  shape.rows = inner.count.count;
  shape.row_src = words_of(item.loop[0].src_stride) - shape.rows * src;
  shape.row_dst = words_of(item.loop[0].dst_stride) - shape.rows * dst;
  return shape;
}

// The word `words` after the first one; also, as a difference, from any word to the one so far on.
KVF_HD ExchangeWalk walk_to(const ExchangeItem& item, const ExchangeShape& shape, u32 words) {
  const u32 runs = divide(words, item.run);
  ExchangeWalk at{words, words - runs * shape.run, runs, words + runs * shape.run_src, words + runs * shape.run_dst};
  if (item.loops < 2) return at;
  const u32 outer = divide(runs, item.loop[1].count);
  at.row -= outer * shape.rows;
  at.src += outer * shape.row_src;
  at.dst += outer * shape.row_dst;
  return at;
}

// Both are reduced, so that each carry happens once at most.
KVF_HD void advance(ExchangeWalk& at, const ExchangeWalk& step, const ExchangeShape& shape) {
  at.word += step.word;
  at.column += step.column;
  at.row += step.row;
  at.src += step.src;
  at.dst += step.dst;
  if (at.column >= shape.run) {
    at.column -= shape.run;
    at.row += 1;
    at.src += shape.run_src;
    at.dst += shape.run_dst;
  }
  if (at.row >= shape.rows) {
    at.row -= shape.rows;
    at.src += shape.row_src;
    at.dst += shape.row_dst;
  }
}

KVF_HD u64 beside(u64 base, u32 words) { return base + (u64(int64_t(int32_t(words))) << 4); }

// `count` chunks of a walkable item, the first at word `first`, `stride` words apart.
template <class Cx>
KVF_HD void copy_walk(Cx& cx, const ExchangeItem& item, u64 place, u32 first, u32 stride, u32 count) {
  const ExchangeShape shape = shape_of(item);
  const ExchangeWalk step = walk_to(item, shape, cx.nthreads());
  const ExchangeWalk next = walk_to(item, shape, stride - (kExchangeUnits - 1) * cx.nthreads());
  ExchangeWalk at = walk_to(item, shape, first + cx.tid());
  const u64 to = place + item.dst_offset;
  KVF_NO_UNROLL
  for (; count > 0; --count) {
    U128 value[kExchangeUnits];
    u32 dst[kExchangeUnits];
    const u32 word = at.word;
    KVF_UNROLL
    for (u32 u = 0; u < kExchangeUnits; ++u) {
      if (at.word < item.words) value[u] = load<U128, Hint::kStream>(cx, beside(item.src, at.src));
      dst[u] = at.dst;
      advance(at, u + 1 < kExchangeUnits ? step : next, shape);
    }
    KVF_UNROLL
    for (u32 u = 0; u < kExchangeUnits; ++u) {
      if (word + u * cx.nthreads() < item.words) store<U128, Hint::kStream>(cx, beside(to, dst[u]), value[u]);
    }
  }
}

// Lane `lane` of a target, by all threads of the CTA. `place`: the address of its landing place.
//
// All lanes together go through the bytes from front to back: places written far apart at a time cost 8 MB a half (measured
// with two H200s). With much to do a lane has a stretch of its own: then that is faster by 3 %.
template <class Params, class Cx>
KVF_HD void copy_lane(Cx& cx, const Params& p, const ExchangePeer& target, u32 lane, u64 place) {
  const u32 per_chunk = cx.nthreads() * kExchangeUnits;
  const u32 last = target.first_item + target.items - 1;
  const bool stretch = target.chunks / target.lanes >= kExchangeStretch;
  const u32 by = stretch ? 1 : target.lanes;
  const u32 end = stretch ? u32(u64(target.chunks) * (lane + 1) / target.lanes) : target.chunks;
  u32 chunk = stretch ? u32(u64(target.chunks) * lane / target.lanes) : lane;
  u32 i = target.first_item;
  KVF_NO_UNROLL
  while (chunk < end) {
    KVF_NO_UNROLL
    while (i < last && chunk >= p.item[i + 1].first_chunk) ++i;
    const ExchangeItem& item = p.item[i];
    const u32 first = (chunk - item.first_chunk) * per_chunk;
    u32 count = 1;
    if (walkable(item)) {
      const u32 until = i < last && p.item[i + 1].first_chunk < end ? p.item[i + 1].first_chunk : end;
      count = (until - chunk - 1) / by + 1;
      copy_walk(cx, item, place, first, by * per_chunk, count);
    } else {
      copy_chunk(cx, item, place, first);
    }
    chunk += count * by;
  }
}

// Fills [address, address + bytes) with 0xFF, which is NaN in every floating-point type of ours. `address` is a multiple
// of 16.
template <class Cx>
KVF_HD void fill_ones(Cx& cx, u64 address, u64 bytes) {
  const u64 whole = bytes & ~u64(15);
  KVF_NO_UNROLL
  for (u64 at = u64(cx.tid()) * 16; at < whole; at += u64(cx.nthreads()) * 16) {
    store<U128>(cx, address + at, U128{~u64(0), ~u64(0)});
  }
  KVF_NO_UNROLL
  for (u64 at = whole + cx.tid(); at < bytes; at += cx.nthreads()) store<u8>(cx, address + at, u8(0xff));
}

}  // namespace kvferry
