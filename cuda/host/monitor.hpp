// Watches every global-memory access of a host run: alignment, bounds, and how often each byte was stored.
//
// The regions are exactly the bytes a body may touch. A copy through memcpy hides what faults on a GPU, so alignment is
// checked explicitly; a byte stored twice by mistake holds the right value in the end, so stores are counted.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvferry/platform.cuh"

namespace kvferry::host {

enum Fault : u32 {
  kMisaligned,
  kLoadOutside,
  kStoreOutside,
  kDoubleStore,
  kBarrierInLoop,    // a barrier or a poll under the plain-loop schedule
  kBarrierDiverged,  // some threads of a CTA left while others wait
  kStuck,            // nothing but polls for too many rounds
  kFaults,
};

enum Access : u32 { kRead = 1, kWrite = 2 };

struct Region {
  u64 base;
  u64 len;
  u8* counters;  // one per byte, or null when stores are not counted (flags and counters are stored often)
  u64 access;    // Access bits
};

struct Report {
  u64 counts[kFaults];
  u64 first_address;
  u32 first_fault;  // valid when some count is not zero
  u32 first_block;
  u32 first_thread;
  u32 unused;
};

class Monitor {
 public:
  // `enforce`: an access outside the regions is recorded and skipped. Without it the access happens, for the sanitizer
  // to see.
  Monitor(const Region* regions, u64 count, bool enforce, Report* report)
      : regions_(regions, regions + count), enforce_(enforce), report_(report) {
    *report_ = Report{};
    std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
  }

  void fault(Fault kind, u64 address, u32 block, u32 thread) {
    u64 before = 0;
    for (u64 n : report_->counts) before += n;
    if (before == 0) {
      report_->first_fault = kind;
      report_->first_address = address;
      report_->first_block = block;
      report_->first_thread = thread;
    }
    report_->counts[kind] += 1;
  }

  // The store counter of a byte; null where none is kept.
  u8* counter(u64 address) {
    const Region* region = find(kWrite, address, 1);
    return region == nullptr || region->counters == nullptr ? nullptr : region->counters + (address - region->base);
  }

  // Whether the access may be carried out.
  bool check(Access access, u64 address, u64 bytes, u32 block, u32 thread) {
    if (address % bytes != 0) fault(kMisaligned, address, block, thread);
    const Region* region = find(access, address, bytes);
    if (region == nullptr) {
      fault(access == kRead ? kLoadOutside : kStoreOutside, address, block, thread);
      return !enforce_;
    }
    if (access == kWrite && region->counters != nullptr) {
      u8* counter = region->counters + (address - region->base);
      bool again = false;
      for (u64 i = 0; i < bytes; ++i) {
        again |= counter[i] != 0;
        if (counter[i] != 255) counter[i] += 1;
      }
      if (again) fault(kDoubleStore, address, block, thread);
    }
    return true;
  }

 private:
  const Region* find(Access access, u64 address, u64 bytes) {
    const Region*& last = access == kRead ? last_read_ : last_written_;
    if (last != nullptr && holds(*last, access, address, bytes)) return last;
    auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                  [](u64 a, const Region& region) { return a < region.base; });
    if (after == regions_.begin()) return nullptr;
    const Region* region = &*(after - 1);
    if (!holds(*region, access, address, bytes)) return nullptr;
    last = region;
    return region;
  }

  static bool holds(const Region& region, Access access, u64 address, u64 bytes) {
    return (region.access & access) != 0 && address >= region.base && bytes <= region.len &&
           address - region.base <= region.len - bytes;
  }

  std::vector<Region> regions_;
  bool enforce_;
  Report* report_;
  const Region* last_read_ = nullptr;
  const Region* last_written_ = nullptr;
};

}  // namespace kvferry::host
