// The driver under test, loaded as a program would: the simulated one, or a real one, which must give the same answers.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../api.h"

namespace selftest {

using namespace kvferry::fake;
using std::size_t;

// X(name in the library, arguments)
#define SELFTEST_CALLS(X)                                                                                         \
  X(cuInit, (unsigned))                                                                                           \
  X(cuGetErrorName, (CUresult, const char**))                                                                     \
  X(cuDeviceGetCount, (int*))                                                                                     \
  X(cuDeviceGetName, (char*, int, CUdevice))                                                                      \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                             \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                     \
  X(cuCtxGetCurrent, (CUcontext*))                                                                                \
  X(cuCtxSetCurrent, (CUcontext))                                                                                 \
  X(cuCtxSynchronize, ())                                                                                         \
  X(cuCtxEnablePeerAccess, (CUcontext, unsigned))                                                                 \
  X(cuMemAlloc_v2, (CUdeviceptr*, size_t))                                                                        \
  X(cuMemFree_v2, (CUdeviceptr))                                                                                  \
  X(cuMemHostAlloc, (void**, size_t, unsigned))                                                                   \
  X(cuMemFreeHost, (void*))                                                                                       \
  X(cuMemHostRegister_v2, (void*, size_t, unsigned))                                                              \
  X(cuMemHostUnregister, (void*))                                                                                 \
  X(cuMemGetInfo_v2, (size_t*, size_t*))                                                                          \
  X(cuPointerGetAttribute, (void*, u32, CUdeviceptr))                                                             \
  X(cuPointerGetAttributes, (unsigned, u32*, void**, CUdeviceptr))                                                \
  X(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t))                                                                 \
  X(cuMemcpyHtoD_v2, (CUdeviceptr, const void*, size_t))                                                          \
  X(cuMemcpyDtoH_v2, (void*, CUdeviceptr, size_t))                                                                \
  X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                                  \
  X(cuMemcpyBatchAsync,                                                                                           \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream))       \
  X(cuMemcpyBatchAsync_v2,                                                                                        \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream))                \
  X(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t))                                                          \
  X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                              \
  X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))                                                  \
  X(cuStreamCreate, (CUstream*, unsigned))                                                                        \
  X(cuStreamDestroy_v2, (CUstream))                                                                               \
  X(cuStreamSynchronize, (CUstream))                                                                              \
  X(cuStreamQuery, (CUstream))                                                                                    \
  X(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                                             \
  X(cuStreamGetCtx, (CUstream, CUcontext*))                                                                       \
  X(cuStreamWaitValue32_v2, (CUstream, CUdeviceptr, u32, unsigned))                                               \
  X(cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, u32, unsigned))                                              \
  X(cuStreamBeginCapture_v2, (CUstream, u32))                                                                     \
  X(cuStreamEndCapture, (CUstream, CUgraph*))                                                                     \
  X(cuStreamIsCapturing, (CUstream, u32*))                                                                        \
  X(cuStreamGetCaptureInfo_v2, (CUstream, u32*, u64*, CUgraph*, const CUgraphNode**, size_t*))                    \
  X(cuThreadExchangeStreamCaptureMode, (u32*))                                                                    \
  X(cuEventCreate, (CUevent*, unsigned))                                                                          \
  X(cuEventDestroy_v2, (CUevent))                                                                                 \
  X(cuEventRecord, (CUevent, CUstream))                                                                           \
  X(cuEventQuery, (CUevent))                                                                                      \
  X(cuEventSynchronize, (CUevent))                                                                                \
  X(cuEventElapsedTime, (float*, CUevent, CUevent))                                                               \
  X(cuModuleLoadData, (CUmodule*, const void*))                                                                   \
  X(cuModuleUnload, (CUmodule))                                                                                   \
  X(cuModuleGetFunction, (CUfunction*, CUmodule, const char*))                                                    \
  X(cuLaunchKernel,                                                                                               \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**)) \
  X(cuLaunchHostFunc, (CUstream, CUhostFn, void*))                                                                \
  X(cuGraphInstantiateWithFlags, (CUgraphExec*, CUgraph, unsigned long long))                                     \
  X(cuGraphLaunch, (CUgraphExec, CUstream))                                                                       \
  X(cuGraphExecDestroy, (CUgraphExec))                                                                            \
  X(cuGraphDestroy, (CUgraph))                                                                                    \
  X(cuGraphGetNodes, (CUgraph, CUgraphNode*, size_t*))                                                            \
  X(cuUserObjectCreate, (CUuserObject*, void*, CUhostFn, unsigned, unsigned))                                     \
  X(cuUserObjectRelease, (CUuserObject, unsigned))                                                                \
  X(cuGraphRetainUserObject, (CUgraph, CUuserObject, unsigned, unsigned))                                         \
  X(cuMemGetAllocationGranularity, (size_t*, const CUmemAllocationProp*, u32))                                    \
  X(cuMemCreate, (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long))         \
  X(cuMemRelease, (CUmemGenericAllocationHandle))                                                                 \
  X(cuMemAddressReserve, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))                         \
  X(cuMemAddressFree, (CUdeviceptr, size_t))                                                                      \
  X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                    \
  X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                                        \
  X(cuMemUnmap, (CUdeviceptr, size_t))                                                                            \
  X(cuMemExportToShareableHandle, (void*, CUmemGenericAllocationHandle, u32, unsigned long long))                 \
  X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle*, void*, u32))                                  \
  X(cuIpcGetMemHandle, (CUipcMemHandle*, CUdeviceptr))                                                            \
  X(cuIpcOpenMemHandle_v2, (CUdeviceptr*, CUipcMemHandle, unsigned))                                              \
  X(cuIpcCloseMemHandle, (CUdeviceptr))

struct Driver {
#define SELFTEST_MEMBER(name, arguments) CUresult(*name) arguments = nullptr;
  SELFTEST_CALLS(SELFTEST_MEMBER)
#undef SELFTEST_MEMBER
  CUresult (*kvferryFakeHold)(CUstream, const u32*) = nullptr;
  u64 (*kvferryFakeLive)(const char*) = nullptr;
  bool simulated = false;
};
extern Driver cu;

// Counts a failure and says where. Goes on: one run shows every difference.
void expect(bool holds, const char* file, int line, const std::string& what);
std::string name_of(CUresult result);

#define IS(result, code)                                                                                 \
  do {                                                                                                   \
    const CUresult got_ = (result);                                                                      \
    ::selftest::expect(got_ == (code), __FILE__, __LINE__,                                               \
                       std::string(#result " gave ") + ::selftest::name_of(got_) + ", expected " #code); \
  } while (0)
#define OK(result) IS(result, CUDA_SUCCESS)
#define HOLDS(condition) ::selftest::expect((condition), __FILE__, __LINE__, #condition)

// A gate on a stream: what is enqueued after it waits until it is opened. Its word is pinned memory.
class Gate {
 public:
  Gate();
  ~Gate();
  void close(CUstream stream);
  void open();

 private:
  u32* word_ = nullptr;
};

void memory_tests();
void stream_tests();
void capture_tests();
void kernel_tests();
void exchange_tests();
void share_tests(const char* self);
int share_child(int argc, char** argv);
void failure_tests(const char* self);
int crash_child();

}  // namespace selftest
