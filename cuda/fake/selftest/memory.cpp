#include <sys/mman.h>

#include "driver.hpp"

namespace selftest {
namespace {

void attributes() {
  CUdeviceptr device = 0;
  void* pinned = nullptr;
  OK(cu.cuMemAlloc_v2(&device, 1000));
  HOLDS(device % 256 == 0);
  OK(cu.cuMemHostAlloc(&pinned, 1000, 3));
  std::vector<char> pageable(1000);
  const auto type = [](CUdeviceptr address) {
    u64 type = ~u64(0), ordinal = 0;
    u32 which[2] = {2, 9};
    void* values[2] = {&type, &ordinal};
    OK(cu.cuPointerGetAttributes(2, which, values, address));
    return u32(type);
  };
  HOLDS(type(device) == CU_MEMORYTYPE_DEVICE && type(device + 999) == CU_MEMORYTYPE_DEVICE);
  HOLDS(type(reinterpret_cast<CUdeviceptr>(pinned) + 999) == CU_MEMORYTYPE_HOST);
  HOLDS(type(reinterpret_cast<CUdeviceptr>(pageable.data())) == 0);
  CUdeviceptr start = 0;
  size_t bytes = 0;
  OK(cu.cuPointerGetAttribute(&start, 11, device + 500));
  OK(cu.cuPointerGetAttribute(&bytes, 12, device + 500));
  HOLDS(start == device && bytes == 1000);
  u32 unknown = 0;
  IS(cu.cuPointerGetAttribute(&unknown, 2, reinterpret_cast<CUdeviceptr>(pageable.data())), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemFree_v2(device + 512), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuMemFree_v2(0));
  OK(cu.cuMemFree_v2(device));
  IS(cu.cuMemFree_v2(device), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuMemFreeHost(pinned));
  IS(cu.cuMemAlloc_v2(&device, 0), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemAlloc_v2(&device, size_t(1) << 45), CUDA_ERROR_OUT_OF_MEMORY);
}

void registration() {
  const size_t page = 4096, all = 8 * page;
  char* memory = static_cast<char*>(mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  OK(cu.cuMemHostRegister_v2(memory, 2 * page, 3));
  IS(cu.cuMemHostRegister_v2(memory, page, 3), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  IS(cu.cuMemHostRegister_v2(memory + page, 2 * page, 3), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  OK(cu.cuMemHostRegister_v2(memory + 2 * page, 2 * page, 3));
  // Two ranges that share a page do not overlap.
  OK(cu.cuMemHostRegister_v2(memory + 4 * page, 100, 3));
  OK(cu.cuMemHostRegister_v2(memory + 4 * page + 200, 100, 3));
  OK(cu.cuMemHostUnregister(memory + 4 * page + 200));
  OK(cu.cuMemHostUnregister(memory + 4 * page));
  // A copy inside one registration is fine, over two it is not.
  CUdeviceptr device = 0;
  OK(cu.cuMemAlloc_v2(&device, all));
  CUstream stream = nullptr;
  OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cu.cuMemcpyAsync(device, reinterpret_cast<CUdeviceptr>(memory), 2 * page, stream));
  IS(cu.cuMemcpyAsync(device, reinterpret_cast<CUdeviceptr>(memory) + page, 2 * page, stream),
     CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuStreamSynchronize(stream));
  OK(cu.cuMemHostUnregister(memory));
  IS(cu.cuMemHostUnregister(memory), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  IS(cu.cuMemHostUnregister(memory + 3 * page), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuMemHostUnregister(memory + 2 * page));
  munmap(memory, all);
  IS(cu.cuMemHostRegister_v2(memory, page, 3), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemHostRegister_v2(nullptr, page, 3), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuStreamDestroy_v2(stream));
  OK(cu.cuMemFree_v2(device));
}

void copies() {
  const size_t n = 100003;
  std::vector<unsigned char> data(n), back(n);
  for (size_t i = 0; i < n; ++i) data[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
  CUdeviceptr a = 0, b = 0;
  OK(cu.cuMemAlloc_v2(&a, n));
  OK(cu.cuMemAlloc_v2(&b, n));
  if (cu.simulated) {
    OK(cu.cuMemcpyDtoH_v2(back.data(), a, n));
    HOLDS(back[0] == 0xa5 && back[n - 1] == 0xa5);
  }
  OK(cu.cuMemcpyHtoD_v2(a, data.data(), n));
  OK(cu.cuMemcpy(b, a, n));
  OK(cu.cuMemcpyDtoH_v2(back.data(), b, n));
  HOLDS(back == data);
  OK(cu.cuMemsetD8_v2(b + 7, 0x11, 100));
  OK(cu.cuMemcpyDtoH_v2(back.data(), b, n));
  HOLDS(back[6] == data[6] && back[7] == 0x11 && back[106] == 0x11 && back[107] == data[107]);
  // Too far, and memory that is none.
  IS(cu.cuMemcpyDtoH_v2(back.data(), b + n - 8, 1024), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemcpyDtoH_v2(back.data(), 0x123450000000, 16), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemsetD8_v2(b + n - 8, 0, 1024), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemsetD8_v2(reinterpret_cast<CUdeviceptr>(back.data()), 0, 16), CUDA_ERROR_INVALID_VALUE);
  std::vector<char> pageable(64);
  IS(cu.cuMemcpyDtoH_v2(back.data(), reinterpret_cast<CUdeviceptr>(pageable.data()), 64), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuMemcpyHtoD_v2(a, data.data(), 0));
  // The batch call.
  CUstream stream = nullptr;
  OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUdeviceptr dsts[3] = {b, b + 1000, b + 2000}, srcs[3] = {a + 5, a + 1005, a + 2005};
  size_t sizes[3] = {100, 200, 300}, start = 0;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = SRC_ACCESS_STREAM;
  OK(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 3, &attributes, &start, 1, stream));
  OK(cu.cuStreamSynchronize(stream));
  OK(cu.cuMemcpyDtoH_v2(back.data(), b, n));
  for (int i = 0; i < 3; ++i) HOLDS(std::memcmp(&back[size_t(i) * 1000], &data[size_t(i) * 1000 + 5], sizes[i]) == 0);
  size_t failed = 0;
  OK(cu.cuMemcpyBatchAsync(dsts, srcs, sizes, 3, &attributes, &start, 1, &failed, kPerThreadStream));
  for (CUstream legacy : {CUstream(nullptr), kLegacyStream}) {
    IS(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 3, &attributes, &start, 1, legacy), CUDA_ERROR_INVALID_VALUE);
  }
  IS(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 0, &attributes, &start, 1, stream), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 3, &attributes, &start, 0, stream), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 3, nullptr, nullptr, 0, stream), CUDA_ERROR_INVALID_VALUE);
  sizes[1] = 0;
  IS(cu.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, 3, &attributes, &start, 1, stream), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuStreamSynchronize(stream));
  OK(cu.cuStreamDestroy_v2(stream));
  OK(cu.cuMemFree_v2(a));
  OK(cu.cuMemFree_v2(b));
}

}  // namespace

void memory_tests() {
  attributes();
  registration();
  copies();
}

}  // namespace selftest
