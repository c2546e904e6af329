// Virtual memory management: physical memory is a memfd, so that handles really pass between processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "capture.h"
#include "memory.h"

namespace kvferry::fake {
namespace {

constexpr u64 kGranularity = u64(2) << 20;

// Physical memory. Lives while a handle or a mapping holds it.
struct Physical {
  int fd;
  u64 bytes;
  int device;
  bool imported;
  bool shareable;

  ~Physical() {
    close(fd);
    if (!imported) uncharge_device(device, bytes);
  }
};

struct Mapping {
  u64 bytes;
  std::shared_ptr<Physical> memory;
  u64 offset;
};

struct Vmm {
  std::mutex lock;
  // By handle: the memory, and how many times the caller has it (imports and retains).
  std::unordered_map<u64, std::pair<std::shared_ptr<Physical>, u64>> handles;
  std::map<u64, u64> reserved;  // address -> bytes
  std::map<u64, Mapping> mapped;
  u64 next = 1;
};
Vmm& vmm() { return leaked<Vmm>(); }

bool valid_location(const CUmemLocation& at) { return at.type == 1 && at.id >= 0 && at.id < settings().devices; }

// Mappings that make up [address, address + bytes) exactly; empty if there is a gap or a cut. Under Vmm::lock.
std::vector<u64> pieces(const Vmm& v, u64 address, u64 bytes) {
  std::vector<u64> found;
  u64 at = address;
  while (at < address + bytes) {
    const auto piece = v.mapped.find(at);
    if (piece == v.mapped.end()) return {};
    found.push_back(at);
    at += piece->second.bytes;
  }
  return at == address + bytes ? found : std::vector<u64>{};
}

// The device is part of the memfd's name, which an importer can read.
int device_of_fd(int fd) {
  char link[64], name[256] = {};
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  if (readlink(link, name, sizeof name - 1) < 0) return -1;
  int device = -1;
  return std::sscanf(name, "/memfd:kvferry-fake-vmm-%d", &device) == 1 ? device : -1;
}

u64 add_handle(Vmm& v, std::shared_ptr<Physical> memory) {
  std::lock_guard<std::mutex> guard(v.lock);
  const u64 handle = v.next++ << 4;
  v.handles[handle] = {std::move(memory), 1};
  return handle;
}

}  // namespace
}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop, u32 option) {
  KVF_ENTER();
  if (granularity == nullptr || prop == nullptr || option > 1) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_location(prop->location)) return CUDA_ERROR_INVALID_DEVICE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

KVF_API cuMemCreate(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* prop,
                    unsigned long long flags) {
  KVF_ENTER();
  if (out == nullptr || prop == nullptr || flags != 0 || prop->type != 1) return CUDA_ERROR_INVALID_VALUE;
  if (!valid_location(prop->location)) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((prop->requestedHandleTypes & ~1u) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const int device = prop->location.id;
  if (!charge_device(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  char name[64];
  std::snprintf(name, sizeof name, "kvferry-fake-vmm-%d", device);
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) {
    if (fd >= 0) close(fd);
    uncharge_device(device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const bool shareable = prop->requestedHandleTypes == 1;
  *out = add_handle(vmm(), std::shared_ptr<Physical>(new Physical{fd, bytes, device, false, shareable}));
  return CUDA_SUCCESS;
}

KVF_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  KVF_ENTER();
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const auto found = v.handles.find(handle);
  if (found == v.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.second == 0) v.handles.erase(found);
  return CUDA_SUCCESS;
}

KVF_API cuMemAddressReserve(CUdeviceptr* out, std::size_t bytes, std::size_t align, CUdeviceptr,
                            unsigned long long flags) {
  KVF_ENTER();
  if (out == nullptr || bytes == 0 || bytes % kGranularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((align & (align - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
  // A page in between: reservations never touch, so nothing runs from one into the next.
  const u64 piece = window_take(bytes + kGranularity, align > kGranularity ? align : kGranularity);
  if (piece == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  v.reserved[piece] = bytes;
  *out = piece;
  return CUDA_SUCCESS;
}

KVF_API cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  KVF_ENTER();
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const auto found = v.reserved.find(address);
  if (found == v.reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  const auto inside = v.mapped.lower_bound(address);
  if (inside != v.mapped.end() && inside->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  v.reserved.erase(found);
  window_give(address, bytes + kGranularity);
  return CUDA_SUCCESS;
}

KVF_API cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                 unsigned long long flags) {
  KVF_ENTER();
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const auto found = v.handles.find(handle);
  if (found == v.handles.end() || flags != 0 || offset != 0 || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto& memory = found->second.first;
  if (bytes % kGranularity != 0 || address % kGranularity != 0 || bytes > memory->bytes)
    return CUDA_ERROR_INVALID_VALUE;
  auto space = v.reserved.upper_bound(address);
  if (space == v.reserved.begin()) return CUDA_ERROR_INVALID_VALUE;
  --space;
  if (address + bytes > space->first + space->second) return CUDA_ERROR_INVALID_VALUE;
  const auto after = v.mapped.lower_bound(address);
  if (after != v.mapped.end() && after->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (after != v.mapped.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  // Mapped, and nobody may touch it before cuMemSetAccess.
  if (!shadow_map(address, bytes, memory->fd, offset, PROT_NONE)) return CUDA_ERROR_MAP_FAILED;
  v.mapped[address] = {bytes, memory, offset};
  return CUDA_SUCCESS;
}

KVF_API cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* grants, std::size_t count) {
  KVF_ENTER();
  if (grants == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const std::vector<u64> all = pieces(v, address, bytes);
  if (all.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t i = 0; i < count; ++i) {
    if (!valid_location(grants[i].location)) return CUDA_ERROR_INVALID_DEVICE;
    if (grants[i].flags > 3 || grants[i].flags == 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (u64 at : all) {
    const Mapping& mapping = v.mapped[at];
    allocations().add(
        {at, mapping.bytes, Kind::kMapped, mapping.memory->device, nullptr, at, mapping.bytes, 0, 0, 0, 0});
    u64 readers = 0, writers = 0;
    allocations().change(at, [&](Allocation& allocation) {
      for (std::size_t i = 0; i < count; ++i) {
        const u64 bit = u64(1) << grants[i].location.id;
        allocation.readers = (allocation.readers & ~bit) | (grants[i].flags != 0 ? bit : 0);
        allocation.writers = (allocation.writers & ~bit) | (grants[i].flags == 3 ? bit : 0);
      }
      readers = allocation.readers, writers = allocation.writers;
    });
    const int protection = (readers != 0 ? PROT_READ : 0) | (writers != 0 ? PROT_WRITE : 0);
    mprotect(bytes_of(at), mapping.bytes, protection);
    if (readers == 0) allocations().take(at, Kind::kMapped);
  }
  return CUDA_SUCCESS;
}

KVF_API cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  KVF_ENTER();
  if (flags == nullptr || location == nullptr || !valid_location(*location)) return CUDA_ERROR_INVALID_VALUE;
  const auto found = allocations().find(address);
  const u64 bit = u64(1) << location->id;
  *flags = !found ? 0 : ((found->writers & bit) != 0 ? 3 : ((found->readers & bit) != 0 ? 1 : 0));
  return CUDA_SUCCESS;
}

KVF_API cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  KVF_ENTER();
  KVF_TRY(unsafe_call());
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const std::vector<u64> all = pieces(v, address, bytes);
  if (all.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (u64 at : all) {
    allocations().take(at, Kind::kMapped);
    shadow_unmap(at, v.mapped[at].bytes);
    v.mapped.erase(at);
  }
  return CUDA_SUCCESS;
}

KVF_API cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, u32 type,
                                     unsigned long long flags) {
  KVF_ENTER();
  Vmm& v = vmm();
  std::lock_guard<std::mutex> guard(v.lock);
  const auto found = v.handles.find(handle);
  if (out == nullptr || found == v.handles.end() || type != 1 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!found->second.first->shareable) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(found->second.first->fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(out, &fd, sizeof fd);
  return CUDA_SUCCESS;
}

// The descriptor stays the caller's; it travels in the pointer itself.
KVF_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* os_handle, u32 type) {
  KVF_ENTER();
  if (out == nullptr || type != 1) return CUDA_ERROR_INVALID_VALUE;
  const int given = int(reinterpret_cast<std::intptr_t>(os_handle));
  struct stat about{};
  const int device = device_of_fd(given);
  if (device < 0 || device >= settings().devices || fstat(given, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = add_handle(vmm(), std::shared_ptr<Physical>(new Physical{fd, u64(about.st_size), device, true, true}));
  return CUDA_SUCCESS;
}

KVF_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* address) {
  KVF_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Vmm& v = vmm();
  std::shared_ptr<Physical> memory;
  {
    std::lock_guard<std::mutex> guard(v.lock);
    auto at = v.mapped.upper_bound(reinterpret_cast<u64>(address));
    if (at == v.mapped.begin()) return CUDA_ERROR_INVALID_VALUE;
    --at;
    if (reinterpret_cast<u64>(address) - at->first >= at->second.bytes) return CUDA_ERROR_INVALID_VALUE;
    memory = at->second.memory;
    for (auto& entry : v.handles) {
      if (entry.second.first != memory) continue;
      entry.second.second += 1;
      *out = entry.first;
      return CUDA_SUCCESS;
    }
  }
  *out = add_handle(v, memory);
  return CUDA_SUCCESS;
}
