// Devices and what they say about themselves.
#include <cstdio>
#include <cstring>

#include "memory.h"
#include "state.h"

using namespace kvferry::fake;

namespace {

bool valid(CUdevice device) { return device >= 0 && device < settings().devices; }

int pci_bus(CUdevice device) { return 0x1b + device; }

// Attributes by number (CUdevice_attribute); what is not listed is 0.
int attribute(u32 which, CUdevice device) {
  switch (which) {
    case 1:
      return 1024;  // threads per block
    case 2:
    case 3:
      return 1024;  // block x, y
    case 4:
      return 64;  // block z
    case 5:
      return 0x7fffffff;  // grid x
    case 6:
    case 7:
      return 65535;  // grid y, z
    case 8:
      return 48 << 10;  // shared memory per block
    case 10:
      return 32;  // warp
    case 11:
      return 0x7fffffff;  // pitch of a copy
    case 13:
      return 1980000;  // clock, kHz
    case 16:
      return settings().sm_count;
    case 19:
      return 1;  // can map host memory
    case 31:
      return 1;  // concurrent kernels
    case 33:
      return pci_bus(device);
    case 34:
    case 50:
      return 0;  // PCI device, domain
    case 36:
      return 3201000;  // memory clock, kHz
    case 37:
      return 6144;  // memory bus, bits
    case 38:
      return 50 << 20;  // L2
    case 39:
      return 2048;  // threads per multiprocessor
    case 40:
      return 3;  // copy engines
    case 41:
      return 1;  // unified addressing
    case 75:
      return 9;  // compute capability
    case 76:
      return 0;
    case 78:
      return 1;  // stream priorities
    case 81:
      return 233472;  // shared memory per multiprocessor
    case 91:
      return 1;  // the host address of registered memory works on the device
    case 97:
      return 232448;  // shared memory per block, opted in
    case 99:
      return 1;  // host registration
    case 102:
      return 1;  // virtual memory management
    case 103:
      return 1;  // shareable as file descriptors
    case 106:
      return 32;  // blocks per multiprocessor
    case 111:
      return 1024;  // shared memory reserved per block
    case 122:
    case 123:
      return 1;  // 64-bit stream memory operations, NOR
    case 129:
      return 1;  // unified function pointers
    case 131:
    case 134:
      return 0;  // NUMA nodes
    default:
      return 0;
  }
}

}  // namespace

KVF_API cuDeviceGetCount(int* count) {
  KVF_ENTER();
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = settings().devices;
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGet(CUdevice* device, int ordinal) {
  KVF_ENTER();
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetName(char* name, int len, CUdevice device) {
  KVF_ENTER();
  if (name == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, std::size_t(len), "kvferry simulated GPU");
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  KVF_ENTER();
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  static const u8 base[16] = {0x6b, 0x76, 0x66, 0x65, 0x72, 0x72, 0x79, 0x00, 0x5a, 0x17, 0xfa, 0x4e, 0, 0, 0, 0};
  std::memcpy(uuid->bytes, base, sizeof base);
  uuid->bytes[15] = u8(device + 1);
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

KVF_API cuDeviceGetAttribute(int* value, u32 which, CUdevice device) {
  KVF_ENTER();
  if (value == nullptr || which == 0 || which > 200) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute(which, device);
  return CUDA_SUCCESS;
}

KVF_API cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  KVF_ENTER();
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = settings().memory;
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetPCIBusId(char* id, int len, CUdevice device) {
  KVF_ENTER();
  if (id == nullptr || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(id, std::size_t(len), "0000:%02X:00.0", unsigned(pci_bus(device)));
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
  KVF_ENTER();
  if (device == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (CUdevice d = 0; d < settings().devices; ++d) {
    unsigned domain = 0, bus = 0;
    if (std::sscanf(id, "%x:%x", &domain, &bus) == 2 && domain == 0 && bus == unsigned(pci_bus(d))) {
      *device = d;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

KVF_API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  KVF_ENTER();
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(device) || !valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer && !settings().no_peer;
  return CUDA_SUCCESS;
}

KVF_API cuDeviceGetP2PAttribute(int* value, u32 which, CUdevice src, CUdevice dst) {
  KVF_ENTER();
  if (value == nullptr || which == 0 || which > 5) return CUDA_ERROR_INVALID_VALUE;
  if (!valid(src) || !valid(dst) || src == dst) return CUDA_ERROR_INVALID_DEVICE;
  *value = which == 1 ? 0 : (which == 5 ? 0 : !settings().no_peer);
  return CUDA_SUCCESS;
}

KVF_API cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  KVF_CURRENT(context);
  if (available == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *total = settings().memory;
  *available = settings().memory - device_bytes_in_use(context->device);
  return CUDA_SUCCESS;
}
