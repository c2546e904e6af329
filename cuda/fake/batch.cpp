// cuMemcpyBatchAsync in both of its signatures.
#include "capture.h"
#include "transfer.h"

using namespace kvferry::fake;

namespace {

constexpr std::size_t kNoIndex = ~std::size_t(0);
// Up to this many bytes, a source that may be read at any time is read at the worst one.
constexpr u64 kEarly = 8 << 20;

// Attributes cover the copies from their index on to the next attribute's.
CUresult check_attributes(const CUmemcpyAttributes* attributes, const std::size_t* starts, std::size_t n,
                          std::size_t copies) {
  if (attributes == nullptr || starts == nullptr || n == 0 || n > copies || starts[0] != 0)
    return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < n; ++i) {
    if (i > 0 && starts[i] <= starts[i - 1]) return CUDA_ERROR_INVALID_VALUE;
    if (starts[i] >= copies) return CUDA_ERROR_INVALID_VALUE;
    const u32 order = attributes[i].srcAccessOrder;
    if (order < SRC_ACCESS_STREAM || order > SRC_ACCESS_ANY) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

[[maybe_unused]] CUresult batch(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes, std::size_t count,
               CUmemcpyAttributes* attributes, std::size_t* starts, std::size_t attribute_count, std::size_t* failed,
               CUstream on) {
  if (failed != nullptr) *failed = kNoIndex;
  // Without a current context this call says "invalid value", as it was seen to do.
  Context* context = nullptr;
  const CUresult has_context = current(context);
  if (has_context == CUDA_ERROR_INVALID_CONTEXT) return CUDA_ERROR_INVALID_VALUE;
  KVF_TRY(has_context);
  if (on == nullptr || on == kLegacyStream) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (is_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (count == 0 || dsts == nullptr || srcs == nullptr || sizes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  KVF_TRY(check_attributes(attributes, starts, attribute_count, count));
  auto copies = std::make_shared<std::vector<Copy>>(count);
  auto early = std::make_shared<std::vector<std::vector<char>>>();
  std::size_t attribute = 0;
  u64 read = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (attribute + 1 < attribute_count && i == starts[attribute + 1]) attribute += 1;
    Copy& copy = (*copies)[i];
    copy = {dsts[i], srcs[i], sizes[i], false, false};
    const CUresult found = sizes[i] == 0 ? CUDA_ERROR_INVALID_VALUE : prepare(copy, Side::kAny, Side::kAny);
    if (found != CUDA_SUCCESS) {
      if (failed != nullptr) *failed = i;
      return found;
    }
    const u32 order = attributes[attribute].srcAccessOrder;
    const bool at_will = order == SRC_ACCESS_ANY && read + sizes[i] <= kEarly && random_below(2) == 1;
    if (order == SRC_ACCESS_DURING_API_CALL || at_will) {
      const char* const from = bytes_of(srcs[i]);
      early->emplace_back(from, from + sizes[i]);
      copy.src = reinterpret_cast<u64>(early->back().data());
      copy.src_known = false;
      read += sizes[i];
    }
  }
  return submit(stream, {&stream->context(), kMemcpyNode, [copies, early] { return run_copies(*copies); }});
}

}  // namespace

#if !defined(KVF_FAKE_NO_BATCH_V1)
KVF_API cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes, std::size_t count,
                           CUmemcpyAttributes* attributes, std::size_t* starts, std::size_t attribute_count,
                           std::size_t* failed, CUstream on) {
  return batch(dsts, srcs, sizes, count, attributes, starts, attribute_count, failed, on);
}
#endif

#if !defined(KVF_FAKE_NO_BATCH_V2)
KVF_API cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, std::size_t* sizes, std::size_t count,
                              CUmemcpyAttributes* attributes, std::size_t* starts, std::size_t attribute_count,
                              CUstream on) {
  return batch(dsts, srcs, sizes, count, attributes, starts, attribute_count, nullptr, on);
}
#endif
