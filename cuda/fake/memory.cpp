#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace kvferry::fake {

Window window;

namespace {

constexpr u64 kWindowBytes = u64(1) << 38;
constexpr u64 kWindowAlign = u64(2) << 20;

struct Pieces {
  std::mutex lock;
  std::map<u64, u64> taken;  // start -> bytes
  u64 next = 0;              // where the search starts: freed addresses rest for a while
};

struct Usage {
  std::atomic<u64> bytes[64] = {};
};

u64 reserve(u64 bytes) {
  void* start = mmap(nullptr, bytes + kWindowAlign, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? 0 : round_up(reinterpret_cast<u64>(start), kWindowAlign);
}

// Under Pieces::lock.
bool open_window() {
  if (window.bytes != 0) return true;
  const int fd = memfd_create("kvferry-fake-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(kWindowBytes)) != 0) return false;
  const u64 base = reserve(kWindowBytes), shadow = reserve(kWindowBytes);
  if (base == 0 || shadow == 0) return false;
  window.base = base;
  window.shift = shadow - base;
  window.fd = fd;
  window.bytes = kWindowBytes;
  return true;
}

// First fit in [from, to); 0 if there is none.
u64 fit(const std::map<u64, u64>& taken, u64 from, u64 to, u64 bytes, u64 align) {
  u64 at = round_up(from, align);
  auto next = taken.upper_bound(at);
  if (next != taken.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > at) at = round_up(before->first + before->second, align);
  }
  for (; next != taken.end() && next->first < to; ++next) {
    if (at + bytes <= next->first) return at;
    at = round_up(next->first + next->second, align);
  }
  return at + bytes <= to ? at : 0;
}

}  // namespace

Allocations& allocations() { return leaked<Allocations>(); }

std::map<u64, Allocation>::iterator Allocations::at_or_before(u64 address) {
  auto next = map_.upper_bound(address);
  return next == map_.begin() ? map_.end() : std::prev(next);
}

bool Allocations::add(Allocation allocation) {
  static std::atomic<u64> ids{1};
  allocation.id = ids.fetch_add(1);
  std::unique_lock<std::shared_mutex> guard(lock_);
  const auto before = at_or_before(allocation.base);
  if (before != map_.end() && before->second.base + before->second.size > allocation.base) return false;
  const auto after = map_.lower_bound(allocation.base);
  if (after != map_.end() && after->first < allocation.base + allocation.size) return false;
  map_.emplace(allocation.base, allocation);
  return true;
}

std::optional<Allocation> Allocations::find(u64 address) {
  std::shared_lock<std::shared_mutex> guard(lock_);
  const auto found = at_or_before(address);
  if (found == map_.end() || address - found->first >= found->second.size) return std::nullopt;
  return found->second;
}

std::optional<Allocation> Allocations::take(u64 base, Kind kind) {
  std::unique_lock<std::shared_mutex> guard(lock_);
  const auto found = map_.find(base);
  if (found == map_.end() || found->second.kind != kind) return std::nullopt;
  const Allocation allocation = found->second;
  map_.erase(found);
  return allocation;
}

Range Allocations::look(u64 address, u64 bytes) {
  std::shared_lock<std::shared_mutex> guard(lock_);
  auto found = at_or_before(address);
  if (found == map_.end() || address - found->first >= found->second.size) return Range{};
  Range range{true, false, found->second};
  const u64 end = address + bytes;
  u64 reached = found->first + found->second.size;
  while (reached < end && range.at.kind == Kind::kMapped) {
    ++found;
    if (found == map_.end() || found->first != reached || found->second.kind != Kind::kMapped) break;
    // Rights of a range are those that every piece grants.
    range.at.readers &= found->second.readers;
    range.at.writers &= found->second.writers;
    reached += found->second.size;
  }
  range.whole = end >= address && end <= reached;
  return range;
}

bool Allocations::touches(u64 address, u64 bytes) {
  std::shared_lock<std::shared_mutex> guard(lock_);
  const auto before = at_or_before(address);
  if (before != map_.end() && address - before->first < before->second.size) return true;
  const auto after = map_.lower_bound(address);
  return after != map_.end() && after->first < address + bytes;
}

std::size_t Allocations::count(Kind kind) {
  std::size_t n = 0;
  each([&](const Allocation& allocation) { n += allocation.kind == kind; });
  return n;
}

u64 device_bytes_in_use(int device) { return leaked<Usage>().bytes[device].load(); }

bool charge_device(int device, u64 bytes) {
  std::atomic<u64>& used = leaked<Usage>().bytes[device];
  u64 now = used.load();
  do {
    if (bytes > settings().memory || now > settings().memory - bytes) return false;
  } while (!used.compare_exchange_weak(now, now + bytes));
  return true;
}

void uncharge_device(int device, u64 bytes) { leaked<Usage>().bytes[device].fetch_sub(bytes); }

u64 window_take(u64 bytes, u64 align) {
  Pieces& pieces = leaked<Pieces>();
  std::lock_guard<std::mutex> guard(pieces.lock);
  if (!open_window() || bytes == 0 || bytes > window.bytes) return 0;
  const u64 end = window.base + window.bytes;
  if (pieces.next == 0) pieces.next = window.base;
  u64 at = fit(pieces.taken, pieces.next, end, bytes, align);
  if (at == 0) at = fit(pieces.taken, window.base, end, bytes, align);
  if (at == 0) return 0;
  pieces.taken.emplace(at, bytes);
  pieces.next = at + bytes;
  return at;
}

void window_give(u64 address, u64 bytes) {
  Pieces& pieces = leaked<Pieces>();
  std::lock_guard<std::mutex> guard(pieces.lock);
  const auto found = pieces.taken.find(address);
  if (found != pieces.taken.end() && found->second == bytes) pieces.taken.erase(found);
}

bool shadow_map(u64 address, u64 bytes, int fd, u64 offset, int protection) {
  void* at = reinterpret_cast<void*>(address + window.shift);
  return mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, off_t(offset)) != MAP_FAILED;
}

void shadow_unmap(u64 address, u64 bytes) {
  void* at = reinterpret_cast<void*>(address + window.shift);
  mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace kvferry::fake
