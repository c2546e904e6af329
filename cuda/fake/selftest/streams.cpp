#include "driver.hpp"

namespace selftest {
namespace {

struct Streams {
  CUstream a = nullptr, b = nullptr, blocking = nullptr;
  CUdeviceptr memory = 0;
  unsigned char* host = nullptr;

  Streams() {
    OK(cu.cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamCreate(&blocking, 0));
    OK(cu.cuMemAlloc_v2(&memory, 4096));
    void* pinned = nullptr;
    OK(cu.cuMemHostAlloc(&pinned, 4096, 3));
    host = static_cast<unsigned char*>(pinned);
    std::memset(host, 0, 4096);
  }
  ~Streams() {
    for (CUstream stream : {a, b, blocking}) OK(cu.cuStreamDestroy_v2(stream));
    OK(cu.cuMemFree_v2(memory));
    OK(cu.cuMemFreeHost(host));
  }
  CUdeviceptr pinned() const { return reinterpret_cast<CUdeviceptr>(host); }
};

void order() {
  Streams s;
  Gate gate;
  CUevent event = nullptr;
  OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cu.cuEventQuery(event));
  OK(cu.cuStreamWaitEvent(s.b, event, 0));  // never recorded: nothing to wait for
  OK(cu.cuStreamSynchronize(s.b));
  gate.close(s.a);
  OK(cu.cuMemsetD8Async(s.memory, 7, 64, s.a));
  OK(cu.cuEventRecord(event, s.a));
  IS(cu.cuEventQuery(event), CUDA_ERROR_NOT_READY);
  IS(cu.cuStreamQuery(s.a), CUDA_ERROR_NOT_READY);
  OK(cu.cuStreamQuery(s.b));
  OK(cu.cuStreamWaitEvent(s.b, event, 0));
  OK(cu.cuMemcpyAsync(s.pinned(), s.memory, 64, s.b));
  // The event moves on; the wait of b does not.
  OK(cu.cuEventRecord(event, s.blocking));
  IS(cu.cuStreamQuery(s.b), CUDA_ERROR_NOT_READY);
  OK(cu.cuEventSynchronize(event));
  HOLDS(s.host[0] == 0);
  gate.open();
  OK(cu.cuStreamSynchronize(s.b));
  HOLDS(s.host[0] == 7 && s.host[63] == 7 && s.host[64] == 0);
  OK(cu.cuEventDestroy_v2(event));
  OK(cu.cuStreamSynchronize(s.a));
}

void legacy_order() {
  Streams s;
  Gate gate;
  CUevent event = nullptr;
  OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  gate.close(s.blocking);
  OK(cu.cuMemsetD8Async(s.memory, 1, 64, s.blocking));
  OK(cu.cuMemcpyAsync(s.pinned(), s.memory, 64, nullptr));  // waits for the blocking stream
  OK(cu.cuEventRecord(event, kPerThreadStream));            // and is waited for by the next one
  IS(cu.cuEventQuery(event), CUDA_ERROR_NOT_READY);
  OK(cu.cuMemsetD8Async(s.memory + 64, 2, 64, s.a));
  OK(cu.cuStreamSynchronize(s.a));  // a non-blocking stream is on its own
  gate.open();
  OK(cu.cuStreamSynchronize(nullptr));
  HOLDS(s.host[0] == 1);
  OK(cu.cuEventSynchronize(event));
  OK(cu.cuEventDestroy_v2(event));
}

void timing() {
  Streams s;
  CUevent first = nullptr, second = nullptr, untimed = nullptr;
  OK(cu.cuEventCreate(&first, 0));
  OK(cu.cuEventCreate(&second, CU_EVENT_BLOCKING_SYNC));
  OK(cu.cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  float ms = -1;
  IS(cu.cuEventElapsedTime(&ms, first, second), CUDA_ERROR_INVALID_HANDLE);
  Gate gate;
  OK(cu.cuEventRecord(first, s.a));
  gate.close(s.a);
  OK(cu.cuEventRecord(second, s.a));
  OK(cu.cuEventRecord(untimed, s.a));
  IS(cu.cuEventElapsedTime(&ms, first, second), CUDA_ERROR_NOT_READY);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.open();
  OK(cu.cuStreamSynchronize(s.a));
  OK(cu.cuEventElapsedTime(&ms, first, second));
  HOLDS(ms >= 15 && ms < 5000);
  IS(cu.cuEventElapsedTime(&ms, first, untimed), CUDA_ERROR_INVALID_HANDLE);
  for (CUevent event : {first, second, untimed}) OK(cu.cuEventDestroy_v2(event));
}

std::atomic<int> callback_result{-1};

void callbacks() {
  Streams s;
  Gate gate;
  std::atomic<int> calls{0};
  gate.close(s.a);
  const auto call = [](void* argument) {
    int count = 0;
    callback_result = cu.cuDeviceGetCount(&count);
    static_cast<std::atomic<int>*>(argument)->fetch_add(1);
  };
  OK(cu.cuLaunchHostFunc(s.a, call, &calls));
  HOLDS(calls == 0);
  gate.open();
  OK(cu.cuStreamSynchronize(s.a));
  HOLDS(calls == 1);
  OK(cu.cuStreamWriteValue32_v2(s.a, s.memory, 77, 0));
  OK(cu.cuMemcpyAsync(s.pinned(), s.memory, 4, s.a));
  OK(cu.cuStreamSynchronize(s.a));
  HOLDS(s.host[0] == 77);
  // Work of a destroyed stream still runs.
  CUstream stream = nullptr;
  OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  gate.close(stream);
  OK(cu.cuMemsetD8Async(s.pinned(), 9, 1, stream));
  OK(cu.cuStreamDestroy_v2(stream));
  HOLDS(s.host[0] == 77);
  gate.open();
  OK(cu.cuCtxSynchronize());
  HOLDS(s.host[0] == 9);
}

// Which calls need a current context, and what a wild handle gives.
void contexts() {
  Streams s;
  CUevent event = nullptr;
  OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  std::thread([&] {
    CUdeviceptr address = 0;
    CUcontext owner = nullptr;
    void* pinned = nullptr;
    IS(cu.cuMemAlloc_v2(&address, 64), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuMemHostAlloc(&pinned, 64, 3), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuMemFree_v2(s.memory + 512), CUDA_ERROR_INVALID_VALUE);
    IS(cu.cuMemcpyAsync(s.memory, s.memory + 64, 4, nullptr), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuMemsetD8_v2(s.memory, 1, 4), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuStreamCreate(&pinned, 0), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuEventCreate(&pinned, 0), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
    IS(cu.cuStreamSynchronize(nullptr), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.cuStreamSynchronize(s.a));
    OK(cu.cuStreamQuery(s.a));
    OK(cu.cuEventRecord(event, s.a));
    OK(cu.cuEventSynchronize(event));
    OK(cu.cuEventQuery(event));
    OK(cu.cuStreamWaitEvent(s.b, event, 0));
    OK(cu.cuMemsetD8Async(s.memory, 1, 4, s.a));
    OK(cu.cuMemcpyAsync(s.pinned(), s.memory, 4, s.a));
    OK(cu.cuStreamGetCtx(s.a, &owner));
    u32 status = 9;
    OK(cu.cuStreamIsCapturing(s.a, &status));
    HOLDS(status == CAPTURE_STATUS_NONE);
    IS(cu.cuMemcpyDtoH_v2(s.host, s.memory, 4), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.cuStreamSynchronize(s.a));
  }).join();
  OK(cu.cuEventDestroy_v2(event));
}

}  // namespace

void stream_tests() {
  order();
  legacy_order();
  timing();
  callbacks();
  HOLDS(callback_result == CUDA_ERROR_NOT_PERMITTED);
  contexts();
}

}  // namespace selftest
