// Division by a number that the host knows beforehand. Mirrored by `Divisor` of crates/kvferry-kernels.
#pragma once

#include "kvferry/platform.cuh"

namespace kvferry {

// n / count for n < 2^31, exactly: shift = ceil(log2 count), mul = ceil(2^(31 + shift) / count).
struct Divisor {
  u32 count;
  u32 mul;
  u32 shift;
  u32 reserved;  // 0
};

KVF_HD u32 divide(u32 n, const Divisor& by) { return u32((u64(n << 1) * by.mul) >> 32) >> by.shift; }

#define KVF_DIVISOR_FIELDS(X) X(count, 0) X(mul, 4) X(shift, 8) X(reserved, 12)

}  // namespace kvferry
