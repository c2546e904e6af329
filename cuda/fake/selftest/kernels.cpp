// Modules and kernels of the simulated driver.
#include "driver.hpp"

#include "kvferry/vectorized_copy.cuh"

namespace selftest {
namespace {

struct Copies {
  static constexpr size_t kPairs = 9, kBytes = 10007;
  CUdeviceptr memory = 0, tables = 0;
  std::vector<unsigned char> data = std::vector<unsigned char>(2 * kPairs * (kBytes + 16));
  std::vector<CUdeviceptr> addresses;

  // Pair p goes from slot p to slot 2 * kPairs - 1 - p, with varying alignments.
  static size_t at(size_t slot) { return slot * (kBytes + 16) + slot % 16; }

  Copies() {
    OK(cu.cuMemAlloc_v2(&memory, data.size()));
    OK(cu.cuMemAlloc_v2(&tables, 2 * kPairs * 8));
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * 2654435761u >> 11);
    OK(cu.cuMemcpyHtoD_v2(memory, data.data(), data.size()));
    for (size_t p = 0; p < kPairs; ++p) addresses.push_back(memory + at(p));
    for (size_t p = 0; p < kPairs; ++p) addresses.push_back(memory + at(2 * kPairs - 1 - p));
    OK(cu.cuMemcpyHtoD_v2(tables, addresses.data(), addresses.size() * 8));
  }
  ~Copies() {
    OK(cu.cuMemFree_v2(memory));
    OK(cu.cuMemFree_v2(tables));
  }
  kvferry::VectorizedCopyParams params() const {
    return {tables, tables + kPairs * 8, kPairs, kBytes, 4096, (kBytes + 4095) / 4096, 5, 0};
  }
  void check() {
    std::vector<unsigned char> back(data.size()), wanted = data;
    OK(cu.cuMemcpyDtoH_v2(back.data(), memory, back.size()));
    for (size_t p = 0; p < kPairs; ++p) std::memcpy(&wanted[at(2 * kPairs - 1 - p)], &data[at(p)], kBytes);
    HOLDS(back == wanted);
  }
};

}  // namespace

void kernel_tests() {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  IS(cu.cuModuleLoadData(&module, nullptr), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuModuleLoadData(&module, "any bytes"));
  IS(cu.cuModuleGetFunction(&function, module, "no_such_kernel"), CUDA_ERROR_NOT_FOUND);
  OK(cu.cuModuleGetFunction(&function, module, "vectorized_copy"));
  CUstream stream = nullptr;
  OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  {
    Copies copies;
    Gate gate;
    gate.close(stream);
    auto params = copies.params();
    void* pointers[] = {&params};
    OK(cu.cuLaunchKernel(function, 3, 1, 1, 256, 1, 1, 0, stream, pointers, nullptr));
    params = {};  // copied at the call
    gate.open();
    OK(cu.cuStreamSynchronize(stream));
    copies.check();
    size_t too_many = sizeof params + 8;
    void* extra[] = {reinterpret_cast<void*>(1), &params, reinterpret_cast<void*>(2), &too_many, nullptr};
    IS(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, extra), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    IS(cu.cuLaunchKernel(function, 0, 1, 1, 256, 1, 1, 0, stream, pointers, nullptr), CUDA_ERROR_INVALID_VALUE);
    IS(cu.cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, stream, pointers, nullptr), CUDA_ERROR_INVALID_VALUE);
    IS(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 1 << 20, stream, pointers, nullptr), CUDA_ERROR_INVALID_VALUE);
  }
  {
    Copies copies;
    auto params = copies.params();
    size_t bytes = sizeof params;
    void* extra[] = {reinterpret_cast<void*>(1), &params, reinterpret_cast<void*>(2), &bytes, nullptr};
    OK(cu.cuLaunchKernel(function, 1, 1, 1, 1024, 1, 1, 0, kPerThreadStream, nullptr, extra));
    OK(cu.cuStreamSynchronize(kPerThreadStream));
    copies.check();
  }
  {
    // Captured: the parameters are the graph's.
    Copies copies;
    OK(cu.cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
    auto params = copies.params();
    void* pointers[] = {&params};
    OK(cu.cuLaunchKernel(function, 2, 1, 1, 64, 1, 1, 0, stream, pointers, nullptr));
    params = {};
    CUgraph graph = nullptr;
    OK(cu.cuStreamEndCapture(stream, &graph));
    CUgraphExec exec = nullptr;
    OK(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cu.cuGraphLaunch(exec, stream));
    OK(cu.cuStreamSynchronize(stream));
    copies.check();
    OK(cu.cuGraphExecDestroy(exec));
    OK(cu.cuGraphDestroy(graph));
  }
  u32 flag = 0;
  OK(cu.kvferryFakeHold(stream, &flag));
  IS(cu.cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
  OK(cu.cuStreamSynchronize(stream));
  OK(cu.cuStreamDestroy_v2(stream));
  OK(cu.cuModuleUnload(module));
  void* pointers[] = {&flag};
  IS(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, pointers, nullptr), CUDA_ERROR_INVALID_HANDLE);
}

}  // namespace selftest
