// Handles of cuMemAlloc's memory for other processes. The other process finds our memory file under /proc, as ptrace
// rights allow: the same user, and a parent or a system without restrictions.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "capture.h"
#include "memory.h"

using namespace kvferry::fake;

namespace {

struct Handle {
  char magic[8];
  int pid;
  int fd;
  int device;
  int reserved;
  u64 file_offset;  // of the first page
  u64 page_bytes;
  u64 inset;  // from the first page to the allocation
  u64 bytes;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));
constexpr char kMagic[8] = {'k', 'v', 'f', 'f', 'a', 'k', 'e', '1'};

// Opening twice gives the same address; closing as often lets go.
struct Opened {
  std::mutex lock;
  std::map<std::pair<int, u64>, std::pair<u64, u64>> by_source;  // (pid, file offset) -> (address, times)
};

}  // namespace

KVF_API cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
  KVF_CURRENT(context);
  (void)context;
  if (settings().no_ipc) return CUDA_ERROR_NOT_SUPPORTED;
  const auto found = allocations().find(address);
  if (out == nullptr || !found || found->kind != Kind::kDevice) return CUDA_ERROR_INVALID_VALUE;
  Handle handle{};
  std::memcpy(handle.magic, kMagic, sizeof kMagic);
  handle.pid = int(getpid());
  handle.fd = window.fd;
  handle.device = found->device;
  handle.file_offset = found->pages - window.base;
  handle.page_bytes = found->page_bytes;
  handle.inset = found->base - found->pages;
  handle.bytes = found->size;
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &handle, sizeof handle);
  return CUDA_SUCCESS;
}

KVF_API cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle given, unsigned flags) {
  KVF_CURRENT(context);
  if (settings().no_ipc) return CUDA_ERROR_NOT_SUPPORTED;
  Handle handle{};
  std::memcpy(&handle, &given, sizeof handle);
  // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is the only flag, and required.
  if (out == nullptr || flags != 1 || std::memcmp(handle.magic, kMagic, sizeof kMagic) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (handle.pid == int(getpid())) return CUDA_ERROR_INVALID_CONTEXT;  // not in the process that made it
  if (handle.device >= settings().devices) return CUDA_ERROR_INVALID_DEVICE;
  Opened& all = leaked<Opened>();
  std::lock_guard<std::mutex> guard(all.lock);
  auto& entry = all.by_source[{handle.pid, handle.file_offset}];
  // A mapping that went away with its context is made anew.
  if (entry.second > 0 && allocations().find(entry.first)) {
    entry.second += 1;
    *out = entry.first;
    return CUDA_SUCCESS;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  const u64 piece = window_take(handle.page_bytes + kPage, kPage);
  const bool mapped =
      piece != 0 && shadow_map(piece + kPage, handle.page_bytes, fd, handle.file_offset, PROT_READ | PROT_WRITE);
  close(fd);
  if (!mapped) return CUDA_ERROR_MAP_FAILED;
  // What the flag asks for: kernels of this context reach the memory, wherever it lies.
  if (handle.device != context->device) context->peers.fetch_or(u64(1) << handle.device);
  const u64 base = piece + kPage + handle.inset;
  allocations().add(
      {base, handle.bytes, Kind::kOpened, handle.device, context, piece + kPage, handle.page_bytes, 0, 0, 0, 0});
  entry = {base, 1};
  *out = base;
  return CUDA_SUCCESS;
}

KVF_API cuIpcCloseMemHandle(CUdeviceptr address) {
  KVF_CURRENT(context);
  KVF_TRY(unsafe_call());
  Opened& all = leaked<Opened>();
  std::lock_guard<std::mutex> guard(all.lock);
  for (auto at = all.by_source.begin(); at != all.by_source.end(); ++at) {
    if (at->second.first != address || at->second.second == 0) continue;
    if (--at->second.second > 0) return CUDA_SUCCESS;
    KVF_TRY(synchronize(*context));
    const auto taken = allocations().take(address, Kind::kOpened);
    all.by_source.erase(at);
    if (!taken) return CUDA_ERROR_INVALID_VALUE;
    shadow_unmap(taken->pages, taken->page_bytes);
    window_give(taken->pages - kPage, taken->page_bytes + kPage);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}
