// cuMemcpy2DAsync and cuMemcpy3DAsync between device memory, named by unified addresses: what the exchange uses of them.
#include "capture.h"
#include "transfer.h"

using namespace kvferry::fake;

namespace {

// Bytes a pitch may have (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
constexpr u64 kMostPitch = 0x7fffffff;

CUresult box_copy(Box box, CUstream on) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (box.width == 0 || box.rows == 0 || box.layers == 0) return CUDA_SUCCESS;
  if (box.dst_row > kMostPitch || box.src_row > kMostPitch) return CUDA_ERROR_INVALID_VALUE;
  KVF_TRY(prepare(box));
  return submit(stream, {&stream->context(), kMemcpyNode, [box] { return run_box(box); }});
}

bool unified(u32 type) { return type == CU_MEMORYTYPE_UNIFIED || type == CU_MEMORYTYPE_DEVICE; }

}  // namespace

KVF_API cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream on) {
  KVF_ENTER();
  if (copy == nullptr || !unified(copy->srcMemoryType) || !unified(copy->dstMemoryType)) return CUDA_ERROR_INVALID_VALUE;
  const u64 width = copy->WidthInBytes;
  if (copy->srcPitch < copy->srcXInBytes + width || copy->dstPitch < copy->dstXInBytes + width)
    return CUDA_ERROR_INVALID_VALUE;
  return box_copy({copy->dstDevice + copy->dstY * copy->dstPitch + copy->dstXInBytes,
                   copy->srcDevice + copy->srcY * copy->srcPitch + copy->srcXInBytes, width, copy->Height, 1,
                   copy->dstPitch, 0, copy->srcPitch, 0},
                  on);
}

KVF_API cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream on) {
  KVF_ENTER();
  if (copy == nullptr || !unified(copy->srcMemoryType) || !unified(copy->dstMemoryType)) return CUDA_ERROR_INVALID_VALUE;
  if (copy->reserved0 != nullptr || copy->reserved1 != nullptr || copy->srcLOD != 0 || copy->dstLOD != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const u64 width = copy->WidthInBytes;
  if (copy->srcPitch < copy->srcXInBytes + width || copy->dstPitch < copy->dstXInBytes + width)
    return CUDA_ERROR_INVALID_VALUE;
  if (copy->srcHeight < copy->srcY + copy->Height || copy->dstHeight < copy->dstY + copy->Height)
    return CUDA_ERROR_INVALID_VALUE;
  const u64 dst_layer = copy->dstPitch * copy->dstHeight, src_layer = copy->srcPitch * copy->srcHeight;
  return box_copy(
      {copy->dstDevice + copy->dstZ * dst_layer + copy->dstY * copy->dstPitch + copy->dstXInBytes,
       copy->srcDevice + copy->srcZ * src_layer + copy->srcY * copy->srcPitch + copy->srcXInBytes, width, copy->Height,
       copy->Depth, copy->dstPitch, dst_layer, copy->srcPitch, src_layer},
      on);
}
