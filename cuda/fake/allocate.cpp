// cuMemAlloc, cuMemHostAlloc, cuMemHostRegister and their ends.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "capture.h"
#include "memory.h"

using namespace kvferry::fake;

namespace {

// What cuMemAlloc aligns to: every suballocation of a real driver does so too.
constexpr u64 kDeviceAlign = 512;

void poison(u64 address, u64 bytes) {
  const u64 limit = settings().poison_limit;
  const u64 head = std::min(bytes, limit);
  std::memset(bytes_of(address), kPoison, head);
  const u64 tail = std::min(bytes - head, limit);
  std::memset(bytes_of(address + bytes - tail), kPoison, tail);
}

void release_device(const Allocation& allocation) {
  shadow_unmap(allocation.pages, allocation.page_bytes);
  fallocate(window.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(allocation.pages - window.base),
            off_t(allocation.page_bytes));
  window_give(allocation.pages - kPage, allocation.page_bytes + kPage);
  uncharge_device(allocation.device, allocation.page_bytes);
}

// Host memory is known to every device: all of them are waited for. The error is that of the memory's own context.
CUresult synchronize_all(Context& owner) {
  for (Context* context : state().contexts) {
    if (context->alive.load()) synchronize(*context);
  }
  return owner.error.load();
}

void release_pinned(const Allocation& allocation) {
  munmap(reinterpret_cast<void*>(allocation.pages), allocation.page_bytes);
}

}  // namespace

KVF_API cuMemAlloc_v2(CUdeviceptr* out, std::size_t bytes) {
  KVF_CURRENT(context);
  KVF_TRY(unsafe_call());
  if (out == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > settings().memory) return CUDA_ERROR_OUT_OF_MEMORY;
  const u64 used = round_up(bytes, kDeviceAlign), pages = round_up(used, kPage);
  if (!charge_device(context->device, pages)) return CUDA_ERROR_OUT_OF_MEMORY;
  // A page that is never mapped lies before every allocation, hence also after every allocation.
  const u64 piece = window_take(pages + kPage, kPage);
  if (piece == 0 || !shadow_map(piece + kPage, pages, window.fd, piece + kPage - window.base, PROT_READ | PROT_WRITE)) {
    if (piece != 0) window_give(piece, pages + kPage);
    uncharge_device(context->device, pages);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  // The end meets the unmapped page: a kernel that runs over by a full unit faults.
  const u64 base = piece + kPage + pages - used;
  poison(base, bytes);
  allocations().add({base, bytes, Kind::kDevice, context->device, context, piece + kPage, pages, 0, 0, 0, 0});
  *out = base;
  return CUDA_SUCCESS;
}

KVF_API cuMemFree_v2(CUdeviceptr address) {
  KVF_ENTER();
  KVF_TRY(unsafe_call());
  if (address == 0) return CUDA_SUCCESS;
  const auto found = allocations().find(address);
  if (!found || found->kind != Kind::kDevice || found->base != address) return CUDA_ERROR_INVALID_VALUE;
  // A real driver waits for the device before it lets go of memory.
  KVF_TRY(synchronize(*found->context));
  const auto taken = allocations().take(address, Kind::kDevice);
  if (!taken) return CUDA_ERROR_INVALID_VALUE;
  release_device(*taken);
  return CUDA_SUCCESS;
}

KVF_API cuMemHostAlloc(void** out, std::size_t bytes, unsigned flags) {
  KVF_CURRENT(context);
  KVF_TRY(unsafe_call());
  if (out == nullptr || bytes == 0 || (flags & ~7u) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > (u64(1) << 46)) return CUDA_ERROR_OUT_OF_MEMORY;
  const u64 pages = round_up(bytes, kPage) + 2 * kPage;
  void* start = mmap(nullptr, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  char* first = static_cast<char*>(start) + kPage;
  mprotect(first, pages - 2 * kPage, PROT_READ | PROT_WRITE);
  allocations().add({reinterpret_cast<u64>(first), bytes, Kind::kPinned, context->device, context,
                     reinterpret_cast<u64>(start), pages, 0, 0, flags, 0});
  *out = first;
  return CUDA_SUCCESS;
}

KVF_API cuMemAllocHost_v2(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }

KVF_API cuMemFreeHost(void* address) {
  KVF_ENTER();
  KVF_TRY(unsafe_call());
  const auto found = allocations().find(reinterpret_cast<u64>(address));
  if (!found || found->kind != Kind::kPinned || found->base != reinterpret_cast<u64>(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  KVF_TRY(synchronize_all(*found->context));
  const auto taken = allocations().take(found->base, Kind::kPinned);
  if (!taken) return CUDA_ERROR_INVALID_VALUE;
  release_pinned(*taken);
  return CUDA_SUCCESS;
}

KVF_API cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned flags) {
  KVF_CURRENT(context);
  KVF_TRY(unsafe_call());
  const u64 base = reinterpret_cast<u64>(address);
  if (base == 0 || bytes == 0 || (flags & ~15u) != 0 || base + bytes < base) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & 4) != 0) return CUDA_ERROR_NOT_PERMITTED;  // IOMEMORY
  if (in_window(base)) return CUDA_ERROR_INVALID_VALUE;
  // Every page must be there. madvise with no advice worth the name asks just that.
  const u64 first = base / kPage * kPage;
  if (madvise(reinterpret_cast<void*>(first), round_up(base + bytes, kPage) - first, MADV_NORMAL) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool added =
      allocations().add({base, bytes, Kind::kRegistered, context->device, context, 0, 0, 0, 0, flags, 0});
  return added ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

KVF_API cuMemHostUnregister(void* address) {
  KVF_CURRENT(context);
  (void)context;
  KVF_TRY(unsafe_call());
  const auto found = allocations().find(reinterpret_cast<u64>(address));
  if (!found || found->kind != Kind::kRegistered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  if (found->base != reinterpret_cast<u64>(address)) return CUDA_ERROR_INVALID_VALUE;
  KVF_TRY(synchronize_all(*found->context));
  const auto taken = allocations().take(found->base, Kind::kRegistered);
  return taken ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

KVF_API cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* address, unsigned flags) {
  KVF_CURRENT(context);
  (void)context;
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto found = allocations().find(reinterpret_cast<u64>(address));
  if (!found || !is_host(found->kind)) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<u64>(address);
  return CUDA_SUCCESS;
}

KVF_API cuMemHostGetFlags(unsigned* flags, void* address) {
  KVF_CURRENT(context);
  (void)context;
  const auto found = allocations().find(reinterpret_cast<u64>(address));
  if (flags == nullptr || !found || !is_host(found->kind)) return CUDA_ERROR_INVALID_VALUE;
  *flags = unsigned(found->flags);
  return CUDA_SUCCESS;
}

void kvferry::fake::drop_memory(Context& context) {
  std::vector<Allocation> mine;
  allocations().each([&](const Allocation& allocation) {
    if (allocation.context == &context) mine.push_back(allocation);
  });
  for (const Allocation& allocation : mine) {
    if (!allocations().take(allocation.base, allocation.kind)) continue;
    if (allocation.kind == Kind::kDevice) release_device(allocation);
    if (allocation.kind == Kind::kPinned) release_pinned(allocation);
    if (allocation.kind == Kind::kOpened) {
      shadow_unmap(allocation.pages, allocation.page_bytes);
      window_give(allocation.pages - kPage, allocation.page_bytes + kPage);
    }
  }
}
