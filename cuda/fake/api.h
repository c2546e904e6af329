// The part of the CUDA driver's C interface that the simulation speaks: types, numbers, and the mark of an export.
// Written from the driver API manual; `abi_check.cpp` compares it with cuda.h where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

// Exported functions have C names; everything else stays hidden.
#define KVF_API extern "C" __attribute__((visibility("default"))) kvferry::fake::CUresult

namespace kvferry::fake {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
// Handles are looked up before use, so a wild one is an error and not a crash.
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUmodule = void*;
using CUfunction = void*;
using CUgraph = void*;
using CUgraphExec = void*;
using CUgraphNode = void*;
using CUuserObject = void*;
using CUmemGenericAllocationHandle = unsigned long long;
using CUhostFn = void (*)(void*);

// X(name, value, text)
#define KVF_FAKE_ERRORS(X)                                                                                         \
  X(CUDA_SUCCESS, 0, "no error")                                                                                   \
  X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                                               \
  X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                                                  \
  X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                                         \
  X(CUDA_ERROR_DEINITIALIZED, 4, "driver shutting down")                                                           \
  X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                                               \
  X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                                                      \
  X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                                               \
  X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                                                     \
  X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                                                 \
  X(CUDA_ERROR_NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device")                 \
  X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices")             \
  X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                                                     \
  X(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state")                       \
  X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                                           \
  X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                                                 \
  X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")                                   \
  X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch")                            \
  X(CUDA_ERROR_LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated")                                     \
  X(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled")                                 \
  X(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled")                                   \
  X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                                                  \
  X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
  X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region")       \
  X(CUDA_ERROR_MISALIGNED_ADDRESS, 716, "misaligned address")                                                      \
  X(CUDA_ERROR_LAUNCH_FAILED, 719, "unspecified launch failure")                                                   \
  X(CUDA_ERROR_NOT_PERMITTED, 800, "operation not permitted")                                                      \
  X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")                                                      \
  X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing")                \
  X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, "operation failed due to a previous error during capture")         \
  X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902, "operation would result in a merge of separate capture sequences")       \
  X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, 903, "capture was not ended in the same stream as it began")              \
  X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904, "capturing stream has unjoined work")                                 \
  X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, 905, "dependency created on uncaptured work in another stream")           \
  X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906,                                                                       \
    "operation would make the legacy stream depend on a capturing blocking stream")                                \
  X(CUDA_ERROR_CAPTURED_EVENT, 907, "operation not permitted on an event last recorded in a capturing stream")     \
  X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908,                                                                   \
    "attempt to terminate a thread-local capture sequence from another thread")                                    \
  X(CUDA_ERROR_UNKNOWN, 999, "unknown error")

enum : CUresult {
#define KVF_ERROR_NUMBER(name, value, text) name = value,
  KVF_FAKE_ERRORS(KVF_ERROR_NUMBER)
#undef KVF_ERROR_NUMBER
};

// Special stream handles.
inline const CUstream kLegacyStream = reinterpret_cast<CUstream>(std::uintptr_t(1));
inline const CUstream kPerThreadStream = reinterpret_cast<CUstream>(std::uintptr_t(2));

enum : u32 { CU_STREAM_NON_BLOCKING = 1 };
enum : u32 { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum : u32 { CU_EVENT_RECORD_EXTERNAL = 1, CU_EVENT_WAIT_EXTERNAL = 1 };
enum : u32 { CAPTURE_GLOBAL = 0, CAPTURE_THREAD_LOCAL = 1, CAPTURE_RELAXED = 2 };
enum : u32 { CAPTURE_STATUS_NONE = 0, CAPTURE_STATUS_ACTIVE = 1, CAPTURE_STATUS_INVALIDATED = 2 };
enum : u32 { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_UNIFIED = 4 };
enum : u32 { CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2, CU_MEMHOSTALLOC_WRITECOMBINED = 4 };
enum : u32 { SRC_ACCESS_STREAM = 1, SRC_ACCESS_DURING_API_CALL = 2, SRC_ACCESS_ANY = 3 };
enum NodeType : u32 {
  kKernelNode = 0,
  kMemcpyNode = 1,
  kMemsetNode = 2,
  kHostNode = 3,
  kGraphNode = 4,
  kEmptyNode = 5,
  kWaitEventNode = 6,
  kEventRecordNode = 7,
  kBatchMemOpNode = 12,
};

struct CUuuid {
  u8 bytes[16];
};

struct CUmemLocation {
  int type;  // 1: device
  int id;
};

struct CUmemcpyAttributes {
  u32 srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  u32 flags;
};

struct CUmemAllocationProp {
  int type;  // 1: pinned
  u32 requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    u8 compressionType;
    u8 gpuDirectRDMACapable;
    std::uint16_t usage;
    u8 reserved[4];
  } allocFlags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  u32 flags;  // 0 none, 1 read, 3 read and write
};

struct CUipcMemHandle {
  u8 reserved[64];
};

struct CUDA_MEMCPY2D {
  std::size_t srcXInBytes, srcY;
  u32 srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  std::size_t srcPitch;
  std::size_t dstXInBytes, dstY;
  u32 dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  std::size_t dstPitch;
  std::size_t WidthInBytes, Height;
};

struct CUDA_MEMCPY3D {
  std::size_t srcXInBytes, srcY, srcZ, srcLOD;
  u32 srcMemoryType;
  const void* srcHost;
  CUdeviceptr srcDevice;
  void* srcArray;
  void* reserved0;
  std::size_t srcPitch, srcHeight;
  std::size_t dstXInBytes, dstY, dstZ, dstLOD;
  u32 dstMemoryType;
  void* dstHost;
  CUdeviceptr dstDevice;
  void* dstArray;
  void* reserved1;
  std::size_t dstPitch, dstHeight;
  std::size_t WidthInBytes, Height, Depth;
};

struct CUlaunchConfig {
  u32 gridDimX, gridDimY, gridDimZ;
  u32 blockDimX, blockDimY, blockDimZ;
  u32 sharedMemBytes;
  CUstream hStream;
  void* attrs;
  u32 numAttrs;
};

}  // namespace kvferry::fake
