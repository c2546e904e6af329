// How a team of threads copies one run of bytes: the inner loop that the copy kernels share.
#pragma once

#include "kvferry/platform.cuh"

namespace kvferry {

// Copies n units of type V with `team` lanes; four loads are issued before the first store waits for one.
template <class V, Hint kHint, class Cx>
KVF_HD void copy_units(Cx& cx, u64 src, u64 dst, u64 n, u32 lane, u32 team) {
  const u64 step = u64(team) * sizeof(V);
  const u64 end = n * sizeof(V);
  u64 at = u64(lane) * sizeof(V);
  // Unrolled by hand above the compiler's own: more copies cost registers, and with them resident CTAs.
  KVF_NO_UNROLL
  for (; at + 3 * step < end; at += 4 * step) {
    const V a = load<V, kHint>(cx, src + at);
    const V b = load<V, kHint>(cx, src + at + step);
    const V c = load<V, kHint>(cx, src + at + 2 * step);
    const V d = load<V, kHint>(cx, src + at + 3 * step);
    store<V, kHint>(cx, dst + at, a);
    store<V, kHint>(cx, dst + at + step, b);
    store<V, kHint>(cx, dst + at + 2 * step, c);
    store<V, kHint>(cx, dst + at + 3 * step, d);
  }
  // At most three units are left for this lane; their loads overlap as well.
  const bool first = at < end;
  const bool second = at + step < end;
  const bool third = at + 2 * step < end;
  V a{}, b{}, c{};
  if (first) a = load<V, kHint>(cx, src + at);
  if (second) b = load<V, kHint>(cx, src + at + step);
  if (third) c = load<V, kHint>(cx, src + at + 2 * step);
  if (first) store<V, kHint>(cx, dst + at, a);
  if (second) store<V, kHint>(cx, dst + at + step, b);
  if (third) store<V, kHint>(cx, dst + at + 2 * step, c);
}

// Head bytes up to the first address that is a multiple of sizeof(V) on both sides, whole units, tail bytes.
// Requires src == dst modulo sizeof(V).
template <class V, Hint kHint, class Cx>
KVF_HD void copy_aligned(Cx& cx, u64 src, u64 dst, u64 bytes, u32 lane, u32 team) {
  const u64 gap = (0 - dst) & (sizeof(V) - 1);
  const u64 head = gap < bytes ? gap : bytes;
  const u64 units = (bytes - head) / sizeof(V);
  const u64 tail_at = head + units * sizeof(V);
  KVF_NO_UNROLL
  for (u64 i = lane; i < head; i += team) store<u8>(cx, dst + i, load<u8>(cx, src + i));
  copy_units<V, kHint>(cx, src + head, dst + head, units, lane, team);
  KVF_NO_UNROLL
  for (u64 i = tail_at + lane; i < bytes; i += team) store<u8>(cx, dst + i, load<u8>(cx, src + i));
}

// One run of any size between any two addresses that do not overlap, by `team` threads of which this is `lane`. The
// unit is the widest of 16, 8, 4, 2, 1 bytes that divides src - dst.
template <Hint kHint, class Cx>
KVF_HD void copy_run(Cx& cx, u64 src, u64 dst, u64 bytes, u32 lane, u32 team) {
  const u32 differ = u32(src ^ dst) & 15;
  if (differ == 0) {
    copy_aligned<U128, kHint>(cx, src, dst, bytes, lane, team);
  } else if ((differ & 7) == 0) {
    copy_aligned<u64, kHint>(cx, src, dst, bytes, lane, team);
  } else if ((differ & 3) == 0) {
    copy_aligned<u32, kHint>(cx, src, dst, bytes, lane, team);
  } else if ((differ & 1) == 0) {
    copy_aligned<u16, kHint>(cx, src, dst, bytes, lane, team);
  } else {
    copy_aligned<u8, kHint>(cx, src, dst, bytes, lane, team);
  }
}

}  // namespace kvferry
