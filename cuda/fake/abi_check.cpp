// Compiles to nothing. Where there is a cuda.h, our idea of its types and numbers is compared with it.
#include "api.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#include <type_traits>

namespace ours = kvferry::fake;

#define SAME_SIZE(name) static_assert(sizeof(::name) == sizeof(ours::name), #name)
#define SAME_OFFSET(name, field) static_assert(offsetof(::name, field) == offsetof(ours::name, field), #name "." #field)
SAME_SIZE(CUresult);
SAME_SIZE(CUdevice);
SAME_SIZE(CUdeviceptr);
SAME_SIZE(CUuuid);
SAME_SIZE(CUmemLocation);
SAME_SIZE(CUmemcpyAttributes);
SAME_SIZE(CUmemAllocationProp);
SAME_SIZE(CUmemAccessDesc);
SAME_SIZE(CUipcMemHandle);
SAME_SIZE(CUlaunchConfig);
SAME_SIZE(CUDA_MEMCPY2D);
SAME_SIZE(CUDA_MEMCPY3D);
SAME_SIZE(CUmemGenericAllocationHandle);
SAME_OFFSET(CUmemcpyAttributes, dstLocHint);
SAME_OFFSET(CUmemcpyAttributes, flags);
SAME_OFFSET(CUmemAllocationProp, requestedHandleTypes);
SAME_OFFSET(CUmemAllocationProp, location);
SAME_OFFSET(CUmemAccessDesc, flags);
SAME_OFFSET(CUlaunchConfig, sharedMemBytes);
SAME_OFFSET(CUlaunchConfig, hStream);
SAME_OFFSET(CUlaunchConfig, numAttrs);
SAME_OFFSET(CUDA_MEMCPY2D, srcDevice);
SAME_OFFSET(CUDA_MEMCPY2D, srcPitch);
SAME_OFFSET(CUDA_MEMCPY2D, dstDevice);
SAME_OFFSET(CUDA_MEMCPY2D, dstPitch);
SAME_OFFSET(CUDA_MEMCPY2D, Height);
SAME_OFFSET(CUDA_MEMCPY3D, srcDevice);
SAME_OFFSET(CUDA_MEMCPY3D, srcHeight);
SAME_OFFSET(CUDA_MEMCPY3D, dstDevice);
SAME_OFFSET(CUDA_MEMCPY3D, dstHeight);
SAME_OFFSET(CUDA_MEMCPY3D, Depth);

#define SAME_ERROR(name, value, text) static_assert(int(::name) == value, #name);
KVF_FAKE_ERRORS(SAME_ERROR)

#define SAME(theirs, mine) static_assert(unsigned(theirs) == unsigned(mine), #theirs)
SAME(::CU_STREAM_NON_BLOCKING, ours::CU_STREAM_NON_BLOCKING);
SAME(::CU_EVENT_DISABLE_TIMING, ours::CU_EVENT_DISABLE_TIMING);
SAME(::CU_EVENT_INTERPROCESS, ours::CU_EVENT_INTERPROCESS);
SAME(::CU_EVENT_RECORD_EXTERNAL, ours::CU_EVENT_RECORD_EXTERNAL);
SAME(::CU_EVENT_WAIT_EXTERNAL, ours::CU_EVENT_WAIT_EXTERNAL);
SAME(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, ours::CAPTURE_THREAD_LOCAL);
SAME(CU_STREAM_CAPTURE_MODE_RELAXED, ours::CAPTURE_RELAXED);
SAME(CU_STREAM_CAPTURE_STATUS_INVALIDATED, ours::CAPTURE_STATUS_INVALIDATED);
SAME(::CU_MEMORYTYPE_HOST, ours::CU_MEMORYTYPE_HOST);
SAME(::CU_MEMORYTYPE_DEVICE, ours::CU_MEMORYTYPE_DEVICE);
SAME(::CU_MEMORYTYPE_UNIFIED, ours::CU_MEMORYTYPE_UNIFIED);
SAME(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, ours::SRC_ACCESS_STREAM);
SAME(CU_MEMCPY_SRC_ACCESS_ORDER_ANY, ours::SRC_ACCESS_ANY);
SAME(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, ours::kBatchMemOpNode);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12);
SAME(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16);
SAME(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, 3);
SAME(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97);
SAME(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8);
#endif
