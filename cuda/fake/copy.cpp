// cuMemcpy*, cuMemset*: what is checked at the call, and what is asynchronous about each.
#include <cstring>

#include "capture.h"
#include "transfer.h"

using namespace kvferry::fake;

namespace {

// A pageable source up to this size is staged: the call returns when the bytes have been read.
constexpr u64 kStaged = 1 << 20;

std::function<CUresult()> copy_op(const Copy& copy) {
  return [copy] { return run_copy(copy); };
}

// The same with the source as it is now.
std::function<CUresult()> staged_op(const Copy& copy) {
  const auto* from = reinterpret_cast<const char*>(copy.src);
  auto bytes = std::make_shared<std::vector<char>>(from, from + copy.bytes);
  Copy staged = copy;
  staged.src = reinterpret_cast<u64>(bytes->data());
  return [staged, bytes] { return run_copy(staged); };
}

CUresult async_copy(u64 dst, u64 src, u64 bytes, Side to, Side from, CUstream on) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (bytes == 0) return CUDA_SUCCESS;
  Copy copy{dst, src, bytes, false, false};
  KVF_TRY(prepare(copy, to, from));
  const bool captured = is_capturing(stream);
  const bool stage = !captured && !copy.src_known && copy.dst_known && bytes <= kStaged;
  Point place;
  KVF_TRY(submit(stream, {&stream->context(), kMemcpyNode, stage ? staged_op(copy) : copy_op(copy)}, &place));
  // Pageable memory: the call returns when the driver is done with it.
  if (!captured && !stage && (!copy.src_known || !copy.dst_known)) {
    place.wait();
    return stream->context().error.load();
  }
  return CUDA_SUCCESS;
}

// On the legacy stream, ended when the call returns, except between two places of device memory.
CUresult blocking_copy(u64 dst, u64 src, u64 bytes, Side to, Side from) {
  KVF_CURRENT(context);
  if (bytes == 0) return CUDA_SUCCESS;
  Copy copy{dst, src, bytes, false, false};
  KVF_TRY(prepare(copy, to, from));
  const auto is_device = [](u64 address) { return in_window(address); };
  Point place;
  KVF_TRY(submit(context->legacy, {context, kMemcpyNode, copy_op(copy)}, &place));
  if (is_device(dst) && is_device(src)) return CUDA_SUCCESS;
  place.wait();
  return context->error.load();
}

CUresult fill(u64 dst, u64 pitch, u64 width, u64 height, u32 value, u32 element, CUstream on, bool blocking) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  if (dst % element != 0 || (height > 1 && pitch < width * element)) return CUDA_ERROR_INVALID_VALUE;
  const Range range = allocations().look(dst, (height - 1) * pitch + width * element);
  if (!range.known || !range.whole) return CUDA_ERROR_INVALID_VALUE;
  const Fill filled{dst, pitch, width, height, value, element};
  Point place;
  KVF_TRY(submit(stream, {&stream->context(), kMemsetNode, [filled] { return run_fill(filled); }}, &place));
  // Fills of device memory are asynchronous even without the word in their name.
  if (!blocking || !is_host(range.at.kind)) return CUDA_SUCCESS;
  place.wait();
  return stream->context().error.load();
}

u64 address(const void* pointer) { return reinterpret_cast<u64>(pointer); }

}  // namespace

KVF_API cuMemcpy(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes) {
  return blocking_copy(dst, src, bytes, Side::kAny, Side::kAny);
}
KVF_API cuMemcpyHtoD_v2(CUdeviceptr dst, const void* src, std::size_t bytes) {
  return blocking_copy(dst, address(src), bytes, Side::kDevice, Side::kHost);
}
KVF_API cuMemcpyDtoH_v2(void* dst, CUdeviceptr src, std::size_t bytes) {
  return blocking_copy(address(dst), src, bytes, Side::kHost, Side::kDevice);
}
KVF_API cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes) {
  return blocking_copy(dst, src, bytes, Side::kDevice, Side::kDevice);
}
KVF_API cuMemcpyPeer(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, std::size_t bytes) {
  KVF_ENTER();
  if (context_of(to) == nullptr || context_of(from) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return blocking_copy(dst, src, bytes, Side::kDevice, Side::kDevice);
}
KVF_API cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream on) {
  return async_copy(dst, src, bytes, Side::kAny, Side::kAny, on);
}
KVF_API cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, std::size_t bytes, CUstream on) {
  return async_copy(dst, address(src), bytes, Side::kDevice, Side::kHost, on);
}
KVF_API cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, std::size_t bytes, CUstream on) {
  return async_copy(address(dst), src, bytes, Side::kHost, Side::kDevice, on);
}
KVF_API cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, std::size_t bytes, CUstream on) {
  return async_copy(dst, src, bytes, Side::kDevice, Side::kDevice, on);
}
KVF_API cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, std::size_t bytes,
                          CUstream on) {
  KVF_ENTER();
  if (context_of(to) == nullptr || context_of(from) == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return async_copy(dst, src, bytes, Side::kDevice, Side::kDevice, on);
}

KVF_API cuMemsetD8_v2(CUdeviceptr dst, u8 value, std::size_t n) { return fill(dst, n, n, 1, value, 1, nullptr, true); }
KVF_API cuMemsetD16_v2(CUdeviceptr dst, std::uint16_t value, std::size_t n) {
  return fill(dst, 2 * n, n, 1, value, 2, nullptr, true);
}
KVF_API cuMemsetD32_v2(CUdeviceptr dst, u32 value, std::size_t n) {
  return fill(dst, 4 * n, n, 1, value, 4, nullptr, true);
}
KVF_API cuMemsetD8Async(CUdeviceptr dst, u8 value, std::size_t n, CUstream on) {
  return fill(dst, n, n, 1, value, 1, on, false);
}
KVF_API cuMemsetD16Async(CUdeviceptr dst, std::uint16_t value, std::size_t n, CUstream on) {
  return fill(dst, 2 * n, n, 1, value, 2, on, false);
}
KVF_API cuMemsetD32Async(CUdeviceptr dst, u32 value, std::size_t n, CUstream on) {
  return fill(dst, 4 * n, n, 1, value, 4, on, false);
}
KVF_API cuMemsetD2D8_v2(CUdeviceptr dst, std::size_t pitch, u8 value, std::size_t width, std::size_t height) {
  return fill(dst, pitch, width, height, value, 1, nullptr, true);
}
KVF_API cuMemsetD2D8Async(CUdeviceptr dst, std::size_t pitch, u8 value, std::size_t width, std::size_t height,
                          CUstream on) {
  return fill(dst, pitch, width, height, value, 1, on, false);
}
