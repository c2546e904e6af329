// Memory the simulated driver knows.
//
// Device addresses come from one window of address space that the CPU may not touch: code that reads a device pointer
// on the host faults, as it would with a real card. The bytes lie in a second window of the same size, the shadow, at a
// fixed distance; only worker threads go there. What is not allocated is not mapped in the shadow either.
#pragma once

#include <map>
#include <optional>
#include <shared_mutex>

#include "state.h"

namespace kvferry::fake {

enum class Kind {
  kDevice,      // cuMemAlloc
  kMapped,      // cuMemMap with access
  kOpened,      // cuIpcOpenMemHandle
  kPinned,      // cuMemHostAlloc
  kRegistered,  // cuMemHostRegister
};

struct Allocation {
  u64 base;
  u64 size;
  Kind kind;
  int device;        // of device memory; of host memory the device whose context made it
  Context* context;  // null for mapped memory
  u64 pages;         // first mapped byte: window address of device memory, host address of pinned memory
  u64 page_bytes;    // mapped bytes; 0 of registered memory, whose pages are somebody else's
  u64 readers;       // mapped memory: bit d = device d may read
  u64 writers;       // and write
  u64 flags;         // host memory: as asked for
  u64 id;            // unique in the process
};

inline bool is_host(Kind kind) { return kind == Kind::kPinned || kind == Kind::kRegistered; }

// What is known about a range.
struct Range {
  bool known;     // its first byte belongs to something allocated
  bool whole;     // so does every byte; for mapped memory the pieces may be many
  Allocation at;  // what the first byte belongs to, if known
};

class Allocations {
 public:
  // False, and nothing changed, if the range meets another one.
  bool add(Allocation allocation);
  std::optional<Allocation> find(u64 address);
  std::optional<Allocation> take(u64 base, Kind kind);  // removes the one that starts here
  Range look(u64 address, u64 bytes);
  bool touches(u64 address, u64 bytes);
  template <class Visit>
  void each(Visit visit) {
    std::shared_lock<std::shared_mutex> guard(lock_);
    for (const auto& entry : map_) visit(entry.second);
  }
  template <class Change>
  void change(u64 base, Change change) {
    std::unique_lock<std::shared_mutex> guard(lock_);
    const auto found = map_.find(base);
    if (found != map_.end()) change(found->second);
  }
  std::size_t count(Kind kind);

 private:
  std::map<u64, Allocation>::iterator at_or_before(u64 address);

  std::shared_mutex lock_;
  std::map<u64, Allocation> map_;
};
Allocations& allocations();

u64 device_bytes_in_use(int device);
bool charge_device(int device, u64 bytes);  // false: more than the device has
void uncharge_device(int device, u64 bytes);

// The windows. Set once, before the first device address exists.
struct Window {
  u64 base = 0;
  u64 bytes = 0;
  u64 shift = 0;  // shadow - base
  int fd = -1;    // memory of cuMemAlloc: file offset = address - base
};
extern Window window;

inline bool in_window(u64 address) { return address - window.base < window.bytes; }
// Where the bytes behind an address lie.
inline char* bytes_of(u64 address) {
  return reinterpret_cast<char*>(in_window(address) ? address + window.shift : address);
}

// Takes a free piece of the window; 0 if there is none. `align` is a power of two.
u64 window_take(u64 bytes, u64 align);
void window_give(u64 address, u64 bytes);
// Puts pages of a file behind window addresses, or nothing again.
bool shadow_map(u64 address, u64 bytes, int fd, u64 offset, int protection);
void shadow_unmap(u64 address, u64 bytes);

inline u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }
constexpr u64 kPage = 4096;
constexpr u8 kPoison = 0xa5;

}  // namespace kvferry::fake
