// How a CTA copies its share of what one rank gets.
//
// The words of all items of a target are counted in chunks of one round of the CTA, four words per thread; lane l of n
// takes chunks l, l + n, ... A word is found again by multiplication (Divisor). Which word width an item has was decided
// from everything that its addresses are made of, so no word is misaligned and no byte is stored twice.
#pragma once

#include "kvferry/exchange_words.cuh"

namespace kvferry {

constexpr u32 kExchangeUnits = 4;  // words that a thread has on their way

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

// Lane `lane` of a target, by all threads of the CTA, chunk after chunk: words `first + u * nthreads + tid`. All loads of a
// chunk are on their way before the first store waits for one. `place_of(place)` is asked between the two, so that the
// input is loaded while headers are on their way; it says where the target wants its bytes, or false to give up.
template <class Params, class Cx, class PlaceOf>
KVF_HD void copy_lane(Cx& cx, const Params& p, const ExchangePeer& target, u32 lane, PlaceOf place_of) {
  const u32 last = target.first_item + target.items - 1;
  u32 i = target.first_item;
  KVF_NO_UNROLL
  for (u32 chunk = lane; chunk < target.chunks; chunk += target.lanes) {
    KVF_NO_UNROLL
    while (i < last && chunk >= p.item[i + 1].first_chunk) ++i;
    const ExchangeItem& item = p.item[i];
    const u32 first = (chunk - item.first_chunk) * cx.nthreads() * kExchangeUnits + cx.tid();
    U128 value[kExchangeUnits];
    u64 to[kExchangeUnits];
    KVF_UNROLL
    for (u32 u = 0; u < kExchangeUnits; ++u) {
      const u32 word = first + u * cx.nthreads();
      if (word >= item.words) continue;
      const ExchangeEnds ends = word_ends(item, word);
      value[u] = load_word(cx, ends.src, item.word_shift);
      to[u] = ends.dst;
    }
    u64 place = 0;
    if (!place_of(place)) return;
    KVF_UNROLL
    for (u32 u = 0; u < kExchangeUnits; ++u) {
      if (first + u * cx.nthreads() < item.words) store_word(cx, place + to[u], value[u], item.word_shift);
    }
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
