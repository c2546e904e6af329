// What an address points to.
#include <cstring>

#include "memory.h"

using namespace kvferry::fake;

namespace {

template <class V>
void put(void* at, V value) {
  std::memcpy(at, &value, sizeof value);
}

// Writes one attribute (CUpointer_attribute); for memory nobody knows the null of its type.
CUresult attribute(void* at, u32 which, u64 address, const std::optional<Allocation>& found) {
  if (at == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool known = found.has_value();
  const bool host = known && is_host(found->kind);
  switch (which) {
    case 1:  // CONTEXT
      put<void*>(at, known ? found->context : nullptr);
      return CUDA_SUCCESS;
    case 2:  // MEMORY_TYPE
      put<u32>(at, !known ? 0u : u32(host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
      return CUDA_SUCCESS;
    case 3:  // DEVICE_POINTER
      put<u64>(at, known ? address : 0);
      return CUDA_SUCCESS;
    case 4:  // HOST_POINTER
      put<u64>(at, host ? address : 0);
      return CUDA_SUCCESS;
    case 6:  // SYNC_MEMOPS
      put<u32>(at, 0);
      return CUDA_SUCCESS;
    case 7:  // BUFFER_ID
      put<u64>(at, known ? found->id : 0);
      return CUDA_SUCCESS;
    case 8:  // IS_MANAGED
      put<u8>(at, 0);
      return CUDA_SUCCESS;
    case 9:  // DEVICE_ORDINAL
      put<int>(at, known ? found->device : -2);
      return CUDA_SUCCESS;
    case 10:  // IS_LEGACY_CUDA_IPC_CAPABLE
      put<u8>(at, known && found->kind == Kind::kDevice && !settings().no_ipc);
      return CUDA_SUCCESS;
    case 11:  // RANGE_START_ADDR
      put<u64>(at, known ? found->base : 0);
      return CUDA_SUCCESS;
    case 12:  // RANGE_SIZE
      put<u64>(at, known ? found->size : 0);
      return CUDA_SUCCESS;
    case 13:  // MAPPED
      put<u8>(at, known);
      return CUDA_SUCCESS;
    case 14:  // ALLOWED_HANDLE_TYPES
      put<u64>(at, known && found->kind == Kind::kMapped ? 1 : 0);
      return CUDA_SUCCESS;
    case 15:  // IS_GPU_DIRECT_RDMA_CAPABLE
      put<u8>(at, 0);
      return CUDA_SUCCESS;
    case 16:  // ACCESS_FLAGS
      put<u32>(at, known ? 3 : 0);
      return CUDA_SUCCESS;
    case 17:  // MEMPOOL_HANDLE
      put<u64>(at, 0);
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace

KVF_API cuPointerGetAttributes(unsigned count, u32* which, void** values, CUdeviceptr address) {
  KVF_ENTER();
  if (which == nullptr || values == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto found = allocations().find(address);
  for (unsigned i = 0; i < count; ++i) KVF_TRY(attribute(values[i], which[i], address, found));
  return CUDA_SUCCESS;
}

KVF_API cuPointerGetAttribute(void* value, u32 which, CUdeviceptr address) {
  KVF_ENTER();
  const auto found = allocations().find(address);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  return attribute(value, which, address, found);
}

// Accepted and without effect: synchronous copies are already as synchronous as they get.
KVF_API cuPointerSetAttribute(const void* value, u32 which, CUdeviceptr address) {
  KVF_ENTER();
  if (value == nullptr || which != 6 || !allocations().find(address)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

KVF_API cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
  KVF_CURRENT(context);
  (void)context;
  const auto found = allocations().find(address);
  if (!found) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = found->base;
  if (bytes != nullptr) *bytes = found->size;
  return CUDA_SUCCESS;
}
