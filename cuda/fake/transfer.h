// Copies and fills, as worker threads carry them out.
#pragma once

#include "memory.h"

namespace kvferry::fake {

struct Copy {
  u64 dst;
  u64 src;
  u64 bytes;
  bool dst_known;  // the driver knew the memory when the copy was submitted, so it must know it still when it runs
  bool src_known;
};

enum class Side { kAny, kHost, kDevice };

// Looks both sides up; an address in the window that nothing is allocated at, or a range that leaves its allocation, is
// CUDA_ERROR_INVALID_VALUE, as from the real driver.
CUresult prepare(Copy& copy, Side dst, Side src);
CUresult run_copy(const Copy& copy);
CUresult run_copies(const std::vector<Copy>& copies);  // in random order

// A copy of `rows` times `layers` runs. Device memory on both sides, known when it was submitted.
struct Box {
  u64 dst;
  u64 src;
  u64 width;
  u64 rows;
  u64 layers;
  u64 dst_row, dst_layer;  // bytes per step
  u64 src_row, src_layer;
};
CUresult prepare(const Box& box);
CUresult run_box(const Box& box);

struct Fill {
  u64 dst;
  u64 pitch;
  u64 width;  // elements
  u64 height;
  u32 value;
  u32 element;  // 1, 2 or 4 bytes
};
CUresult run_fill(const Fill& fill);

}  // namespace kvferry::fake
