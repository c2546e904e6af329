// Accesses that go wrong, devices that reach each other, contexts that end: simulated driver only.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "driver.hpp"

#include "kvferry/vectorized_copy.cuh"

namespace selftest {
namespace {

// One run copied by the kernel on a stream of the current context, its pointer table in pinned memory.
class Copier {
 public:
  Copier() {
    OK(cu.cuModuleLoadData(&module_, "any bytes"));
    OK(cu.cuModuleGetFunction(&function_, module_, "vectorized_copy"));
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    void* pinned = nullptr;
    OK(cu.cuMemHostAlloc(&pinned, 4096, 3));
    table_ = static_cast<CUdeviceptr*>(pinned);
  }
  // The stream's answer once the copy is over.
  CUresult copy(CUdeviceptr dst, CUdeviceptr src, u64 bytes) {
    table_[0] = src;
    table_[1] = dst;
    const CUdeviceptr at = reinterpret_cast<CUdeviceptr>(table_);
    kvferry::VectorizedCopyParams params{at, at + 8, 1, bytes, bytes, 1, 5, 0};
    void* pointers[] = {&params};
    OK(cu.cuLaunchKernel(function_, 1, 1, 1, 32, 1, 1, 0, stream, pointers, nullptr));
    return cu.cuStreamSynchronize(stream);
  }
  void close() {
    OK(cu.cuStreamDestroy_v2(stream));
    OK(cu.cuMemFreeHost(table_));
    OK(cu.cuModuleUnload(module_));
  }

  CUstream stream = nullptr;

 private:
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  CUdeviceptr* table_ = nullptr;
};

bool checked() {
  const char* text = std::getenv("KVFERRY_FAKE_CHECK");
  return text != nullptr && *text == '1';
}

CUcontext retain(CUdevice device) {
  CUcontext context = nullptr;
  OK(cu.cuDevicePrimaryCtxRetain(&context, device));
  OK(cu.cuCtxSetCurrent(context));
  return context;
}

// Memory of device 1, touched by a kernel of device 0.
void peers(CUcontext first) {
  const CUcontext second = retain(1);
  CUdeviceptr far = 0, near = 0;
  OK(cu.cuMemAlloc_v2(&far, 4096));
  OK(cu.cuMemsetD8_v2(far, 0x77, 4096));
  OK(cu.cuCtxSynchronize());
  OK(cu.cuCtxSetCurrent(first));
  OK(cu.cuMemAlloc_v2(&near, 4096));
  IS(cu.cuCtxEnablePeerAccess(first, 0), CUDA_ERROR_INVALID_CONTEXT);
  cu.cuCtxEnablePeerAccess(second, 0);  // by the exchange tests before, maybe
  IS(cu.cuCtxEnablePeerAccess(second, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
  Copier copier;
  OK(copier.copy(near, far + 1, 1000));
  unsigned char byte = 0;
  OK(cu.cuMemcpyDtoH_v2(&byte, near + 999, 1));
  HOLDS(byte == 0x77);
  // A stream belongs to its device: a kernel of another one is refused.
  copier.close();
  OK(cu.cuMemFree_v2(near));
  // The last reference takes everything of the context with it.
  OK(cu.cuDevicePrimaryCtxRelease_v2(1));
  u32 type = 0;
  IS(cu.cuPointerGetAttribute(&type, 2, far), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuCtxSetCurrent(second), CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

// Memory freed while a copy that reads it is in flight on another device's stream.
void freed_in_flight() {
  const CUcontext second = retain(1);
  CUstream stream = nullptr;
  CUdeviceptr mine = 0, other = 0;
  OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cu.cuMemAlloc_v2(&mine, 4096));
  const CUcontext first = retain(0);
  OK(cu.cuMemAlloc_v2(&other, 4096));
  static u32 flag = 0;
  OK(cu.kvferryFakeHold(stream, &flag));
  OK(cu.cuMemcpyAsync(mine, other, 4096, stream));
  OK(cu.cuMemFree_v2(other));  // waits for its own context only
  __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
  IS(cu.cuStreamSynchronize(stream), CUDA_ERROR_ILLEGAL_ADDRESS);
  OK(cu.cuCtxSynchronize());
  OK(cu.cuCtxSetCurrent(second));
  IS(cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  // A context that ends takes its error along.
  OK(cu.cuDevicePrimaryCtxRelease_v2(1));
  OK(cu.cuCtxSetCurrent(first));
  OK(cu.cuDevicePrimaryCtxRelease_v2(0));
}

void wild_access() {
  Copier copier;
  CUevent event = nullptr;
  OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CUdeviceptr gone = 0, good = 0, address = 0;
  OK(cu.cuMemAlloc_v2(&good, 4096));
  OK(cu.cuMemAlloc_v2(&gone, 4096));
  OK(cu.cuMemFree_v2(gone));
  OK(cu.cuEventRecord(event, copier.stream));
  IS(copier.copy(good, gone, 64), CUDA_ERROR_ILLEGAL_ADDRESS);
  IS(cu.cuEventQuery(event), CUDA_ERROR_ILLEGAL_ADDRESS);
  IS(cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
  IS(cu.cuMemAlloc_v2(&address, 64), CUDA_ERROR_ILLEGAL_ADDRESS);
  IS(cu.cuEventDestroy_v2(event), CUDA_ERROR_ILLEGAL_ADDRESS);
  u32 type = 0;
  OK(cu.cuPointerGetAttribute(&type, 2, good));
  // Another device goes on, if it leaves this one's memory alone.
  retain(1);
  OK(cu.cuMemAlloc_v2(&address, 4096));
  Copier other;
  IS(other.copy(address, good, 4096), checked() ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
  if (checked()) return;
  // The process must end although a stream still waits.
  static u32 never = 0;
  OK(cu.kvferryFakeHold(other.stream, &never));
}

}  // namespace

void failure_tests(const char* self) {
  if (!cu.simulated) return;
  CUcontext first = nullptr;
  OK(cu.cuCtxGetCurrent(&first));
  peers(first);
  OK(cu.cuCtxSetCurrent(first));
  freed_in_flight();
  OK(cu.cuCtxSetCurrent(first));
  const pid_t child = fork();
  if (child == 0) {
    execl(self, self, "crash", static_cast<char*>(nullptr));
    _exit(99);
  }
  int status = 0;
  waitpid(child, &status, 0);
  HOLDS(status != 0);  // SIGSEGV, or what a sanitizer makes of it
  wild_access();
}

// A process that touches device memory on the CPU: must end with SIGSEGV, also after our handler was installed.
int crash_child() {
  OK(cu.cuInit(0));
  retain(0);
  CUdeviceptr memory = 0;
  OK(cu.cuMemAlloc_v2(&memory, 4096));
  Copier copier;
  OK(copier.copy(memory + 2048, memory, 1024));
  *reinterpret_cast<volatile char*>(memory) = 1;
  return 0;
}

}  // namespace selftest
