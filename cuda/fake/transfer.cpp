#include "transfer.h"

#include <cstring>
#include <numeric>

#include "fault.h"
#include "stream.h"

namespace kvferry::fake {
namespace {

// Whether a side lies where it must; sets `known`.
CUresult look_up(u64 address, u64 bytes, Side side, bool& known) {
  const Range range = allocations().look(address, bytes);
  known = range.known;
  if (range.known) {
    return range.whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  // Memory that the driver does not know is pageable host memory, unless it cannot be.
  if (side == Side::kDevice || in_window(address)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

bool still_there(u64 address, u64 bytes, bool known) { return !known || allocations().look(address, bytes).whole; }

}  // namespace

CUresult prepare(Copy& copy, Side dst, Side src) {
  KVF_TRY(look_up(copy.dst, copy.bytes, dst, copy.dst_known));
  return look_up(copy.src, copy.bytes, src, copy.src_known);
}

CUresult run_copy(const Copy& copy) {
  if (!still_there(copy.dst, copy.bytes, copy.dst_known) || !still_there(copy.src, copy.bytes, copy.src_known)) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  char* const dst = bytes_of(copy.dst);
  const char* const src = bytes_of(copy.src);
  // A copy is not one moment: with jitter it happens in two parts, either one first.
  const u64 cut = settings().jitter_us > 0 && copy.bytes >= 64 ? random_below(copy.bytes) : 0;
  const bool tail_first = cut > 0 && random_below(2) == 1;
  return guarded([&] {
    if (cut == 0) {
      std::memmove(dst, src, copy.bytes);
    } else if (tail_first) {
      std::memcpy(dst + cut, src + cut, copy.bytes - cut);
      jitter();
      std::memcpy(dst, src, cut);
    } else {
      std::memcpy(dst, src, cut);
      jitter();
      std::memcpy(dst + cut, src + cut, copy.bytes - cut);
    }
  });
}

CUresult run_copies(const std::vector<Copy>& copies) {
  std::vector<u32> order(copies.size());
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  for (u32 i : order) KVF_TRY(run_copy(copies[i]));
  return CUDA_SUCCESS;
}

CUresult prepare(const Box& box) {
  const auto inside = [&](u64 at, u64 row, u64 layer) {
    const u64 bytes = (box.layers - 1) * layer + (box.rows - 1) * row + box.width;
    bool known = false;
    return look_up(at, bytes, Side::kDevice, known);
  };
  KVF_TRY(inside(box.dst, box.dst_row, box.dst_layer));
  return inside(box.src, box.src_row, box.src_layer);
}

CUresult run_box(const Box& box) {
  std::vector<u64> order(box.rows * box.layers);
  std::iota(order.begin(), order.end(), u64(0));
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  for (const u64 at : order) {
    const u64 row = at % box.rows, layer = at / box.rows;
    const u64 dst = box.dst + layer * box.dst_layer + row * box.dst_row;
    const u64 src = box.src + layer * box.src_layer + row * box.src_row;
    KVF_TRY(run_copy({dst, src, box.width, true, true}));
  }
  return CUDA_SUCCESS;
}

CUresult run_fill(const Fill& fill) {
  const u64 row = fill.width * fill.element;
  if (row == 0 || fill.height == 0) return CUDA_SUCCESS;
  if (!allocations().look(fill.dst, (fill.height - 1) * fill.pitch + row).whole) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return guarded([&] {
    for (u64 y = 0; y < fill.height; ++y) {
      char* const at = bytes_of(fill.dst + y * fill.pitch);
      if (fill.element == 1) {
        std::memset(at, int(fill.value), row);
      } else {
        for (u64 x = 0; x < row; x += fill.element) std::memcpy(at + x, &fill.value, fill.element);
      }
    }
  });
}

}  // namespace kvferry::fake
