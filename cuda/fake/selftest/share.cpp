// Memory of other devices and other processes, and what a forked child may do.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "driver.hpp"

namespace selftest {
namespace {

constexpr size_t kBytes = size_t(2) << 20;

CUdeviceptr map(CUmemGenericAllocationHandle handle) {
  CUdeviceptr address = 0;
  OK(cu.cuMemAddressReserve(&address, kBytes, 0, 0, 0));
  OK(cu.cuMemMap(address, kBytes, 0, handle, 0));
  const CUmemAccessDesc grant{{1, 0}, 3};
  OK(cu.cuMemSetAccess(address, kBytes, &grant, 1));
  return address;
}

void unmap(CUdeviceptr address, CUmemGenericAllocationHandle handle) {
  OK(cu.cuMemUnmap(address, kBytes));
  OK(cu.cuMemAddressFree(address, kBytes));
  OK(cu.cuMemRelease(handle));
}

std::string hex(const void* bytes, size_t n) {
  std::string text;
  char digits[3];
  for (size_t i = 0; i < n; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(bytes)[i]);
    text += digits;
  }
  return text;
}

int run_child(const char* self, const std::string& descriptor, const std::string& ipc) {
  const pid_t child = fork();
  if (child == 0) {
    execl(self, self, descriptor.c_str(), ipc.c_str(), static_cast<char*>(nullptr));
    _exit(99);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

void forked_child() {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    CUcontext context = nullptr;
    const bool refused = cu.cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
                         cu.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                         cu.cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  HOLDS(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

void share_tests(const char* self) {
  CUmemAllocationProp prop{};
  prop.type = 1;
  prop.requestedHandleTypes = 1;
  prop.location = {1, 0};
  size_t granularity = 0;
  OK(cu.cuMemGetAllocationGranularity(&granularity, &prop, 0));
  HOLDS(granularity == kBytes);
  CUmemGenericAllocationHandle handle = 0;
  IS(cu.cuMemCreate(&handle, 4096, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuMemCreate(&handle, kBytes, &prop, 0));
  const CUdeviceptr address = map(handle);
  OK(cu.cuMemsetD8_v2(address, 0x33, kBytes));
  u32 type = 0;
  OK(cu.cuPointerGetAttribute(&type, 2, address + 5));
  HOLDS(type == CU_MEMORYTYPE_DEVICE);
  int fd = -1;
  OK(cu.cuMemExportToShareableHandle(&fd, handle, 1, 0));
  fcntl(fd, F_SETFD, 0);  // the child inherits it
  CUdeviceptr plain = 0;
  OK(cu.cuMemAlloc_v2(&plain, 100000));
  OK(cu.cuMemsetD8_v2(plain, 0x44, 100000));
  CUipcMemHandle ipc{};
  OK(cu.cuIpcGetMemHandle(&ipc, plain));
  IS(cu.cuIpcGetMemHandle(&ipc, address), CUDA_ERROR_INVALID_VALUE);
  OK(cu.cuIpcGetMemHandle(&ipc, plain));
  CUdeviceptr same = 0;
  IS(cu.cuIpcOpenMemHandle_v2(&same, ipc, 1), CUDA_ERROR_INVALID_CONTEXT);
  OK(cu.cuCtxSynchronize());
  const int status = run_child(self, std::to_string(fd), hex(&ipc, sizeof ipc));
  expect(status == 0, __FILE__, __LINE__, "the importing process ended with " + std::to_string(status));
  unsigned char mapped = 0, opened = 0;
  OK(cu.cuMemcpyDtoH_v2(&mapped, address + kBytes - 1, 1));
  OK(cu.cuMemcpyDtoH_v2(&opened, plain + 99999, 1));
  HOLDS(mapped == 0x55 && opened == 0x66);
  close(fd);
  unmap(address, handle);
  OK(cu.cuMemFree_v2(plain));
  forked_child();
}

// The importing process: argv is the descriptor and the handle.
int share_child(int argc, char** argv) {
  if (argc != 3) return 2;
  OK(cu.cuInit(0));
  CUcontext context = nullptr;
  OK(cu.cuDevicePrimaryCtxRetain(&context, 0));
  OK(cu.cuCtxSetCurrent(context));
  CUmemGenericAllocationHandle handle = 0;
  const std::intptr_t fd = std::atoi(argv[1]);
  OK(cu.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(fd), 1));
  const CUdeviceptr address = map(handle);
  CUipcMemHandle ipc{};
  for (size_t i = 0; i < sizeof ipc; ++i) {
    const char digits[3] = {argv[2][2 * i], argv[2][2 * i + 1], '\0'};
    ipc.reserved[i] = static_cast<u8>(std::strtoul(digits, nullptr, 16));
  }
  CUdeviceptr plain = 0, again = 0;
  OK(cu.cuIpcOpenMemHandle_v2(&plain, ipc, 1));
  OK(cu.cuIpcOpenMemHandle_v2(&again, ipc, 1));
  HOLDS(again == plain);
  OK(cu.cuIpcCloseMemHandle(again));
  unsigned char mapped = 0, opened = 0;
  OK(cu.cuMemcpyDtoH_v2(&mapped, address + 1000, 1));
  OK(cu.cuMemcpyDtoH_v2(&opened, plain + 99999, 1));
  OK(cu.cuMemsetD8_v2(address, 0x55, kBytes));
  OK(cu.cuMemsetD8_v2(plain, 0x66, 100000));
  OK(cu.cuCtxSynchronize());
  OK(cu.cuIpcCloseMemHandle(plain));
  unmap(address, handle);
  return mapped == 0x33 && opened == 0x44 ? 0 : 3;
}

}  // namespace selftest
