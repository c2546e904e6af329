#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "fault.h"
#include "grid.h"
#include "memory.h"
#include "stream.h"

#include "kvferry/exchange.cuh"
#include "kvferry/vectorized_copy.cuh"
#if __has_include("kvferry/strided_copy.cuh")
#include "kvferry/strided_copy.cuh"
#endif

namespace kvferry::fake {
namespace {

// The last allocation that an access met: neighbouring accesses spare themselves the search.
struct Seen {
  u64 begin = 0;
  u64 end = 0;
  bool readable = false;
  bool writable = false;
};

// Looks an access up: error 700 for memory that the kernel's device cannot reach.
void check_access(const Context& context, Seen& seen, u64 address, u64 bytes, bool write) {
  if (address < seen.begin || address + bytes > seen.end) {
    const Range range = allocations().look(address, bytes);
    if (!range.whole) stop_with(CUDA_ERROR_ILLEGAL_ADDRESS);
    const Allocation& at = range.at;
    const u64 bit = u64(1) << context.device;
    if (at.kind == Kind::kMapped) {
      seen = {address, address + bytes, (at.readers & bit) != 0, (at.writers & bit) != 0};
    } else {
      const bool near = is_host(at.kind) || at.device == context.device || (context.peers.load() >> at.device & 1) != 0;
      seen = {at.base, at.base + at.size, near, near};
    }
  }
  if (!(write ? seen.writable : seen.readable)) stop_with(CUDA_ERROR_ILLEGAL_ADDRESS);
}

// The context (see platform.cuh) of one simulated thread, without what needs a scheduler. Ranks run on different threads:
// what is atomic on a GPU is so here.
template <bool kChecked>
class FakeCx {
 public:
  FakeCx(const LaunchShape& shape, void* shared, Seen& seen) : shape_(shape), shared_(shared), seen_(seen) {}

  u32 block = 0;
  u32 thread = 0;

  u32 tid() const { return thread; }
  u32 nthreads() const { return shape_.threads; }
  u32 bid() const { return block; }
  u32 nblocks() const { return shape_.blocks; }
  void* shared() { return shared_; }

  template <class V, auto...>
  V load(u64 address) {
    look(address, sizeof(V), false);
    V value;
    std::memcpy(&value, bytes_of(address), sizeof value);
    return value;
  }
  template <class V, auto...>
  void store(u64 address, V value) {
    look(address, sizeof(V), true);
    std::memcpy(bytes_of(address), &value, sizeof value);
  }
  u32 cas(u64 address, u32 expected, u32 desired) {
    look(address, sizeof(u32), true);
    auto* const word = reinterpret_cast<u32*>(bytes_of(address));
    __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
  }
  u32 ticket(u64 address, u32 value) {
    look(address, sizeof(u32), true);
    return __atomic_fetch_add(reinterpret_cast<u32*>(bytes_of(address)), value, __ATOMIC_ACQ_REL);
  }

  // Stronger than on a GPU, where the start and the end of a kernel order what these do not.
  template <class V>
  V load_relaxed(u64 address) {
    look(address, sizeof(V), false);
    if constexpr (sizeof(V) == 16) {
      const auto* const words = reinterpret_cast<const u64*>(bytes_of(address));
      const u64 lo = __atomic_load_n(words, __ATOMIC_ACQUIRE);
      return {lo, __atomic_load_n(words + 1, __ATOMIC_ACQUIRE)};
    } else {
      return __atomic_load_n(reinterpret_cast<const V*>(bytes_of(address)), __ATOMIC_ACQUIRE);
    }
  }
  u64 load_acquire(u64 address) { return load_relaxed<u64>(address); }
  void store_release(u64 address, u64 value) {
    look(address, sizeof(u64), true);
    __atomic_store_n(reinterpret_cast<u64*>(bytes_of(address)), value, __ATOMIC_RELEASE);
  }
  void store_relaxed(u64 address, u64 value) { store_release(address, value); }
  void add_release(u64 address, u64 value) {
    look(address, sizeof(u64), true);
    __atomic_fetch_add(reinterpret_cast<u64*>(bytes_of(address)), value, __ATOMIC_ACQ_REL);
  }
  void add_relaxed(u64 address, u64 value) { add_release(address, value); }

 private:
  void look(u64 address, u64 bytes, bool write) {
    if ((address & (bytes - 1)) != 0) stop_with(CUDA_ERROR_MISALIGNED_ADDRESS);
    if (kChecked) check_access(*shape_.context, seen_, address, bytes, write);
  }

  const LaunchShape& shape_;
  void* const shared_;
  Seen& seen_;
};

template <class Params, bool kChecked, class Body>
CUresult run_threads(Body body, const LaunchShape& shape, const Params& params) {
  // Blocks come in any order, as on a device.
  std::vector<u32> order(shape.blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  std::vector<U128> shared((shape.shared_bytes + 15) / 16);
  Seen seen;
  FakeCx<kChecked> cx(shape, shared.data(), seen);
  return guarded([&] {
    for (u32 block : order) {
      if (!shared.empty()) std::memset(shared.data(), kPoison, shared.size() * sizeof(U128));
      cx.block = block;
      for (cx.thread = 0; cx.thread < shape.threads; ++cx.thread) body(cx, params);
    }
  });
}

// As above, for bodies with barriers and waits.
template <bool kChecked>
class FiberCx : public FakeCx<kChecked> {
 public:
  FiberCx(const LaunchShape& shape, void* shared, Seen& seen, Grid& grid)
      : FakeCx<kChecked>(shape, shared, seen), grid_(grid) {}

  void sync() { grid_.sync_or(false); }
  bool sync_or(bool mine) { return grid_.sync_or(mine); }
  void spin() { grid_.yield(); }
  void poll() { grid_.yield(); }
  u64 clock() { return Grid::clock(); }

 private:
  Grid& grid_;
};

template <class Params, bool kChecked, class Body>
CUresult run_fibers(Body body, const LaunchShape& shape, const Params& params) {
  return Grid::run(shape, [&](Grid& grid, u32 block, u32 thread, void* shared) {
    Seen seen;
    FiberCx<kChecked> cx(shape, shared, seen, grid);
    cx.block = block;
    cx.thread = thread;
    body(cx, params);
  });
}

template <class Params, class Body>
CUresult run_waiting_body(Body body, const LaunchShape& shape, const void* params) {
  const Params& p = *static_cast<const Params*>(params);
  return settings().check ? run_fibers<Params, true>(body, shape, p) : run_fibers<Params, false>(body, shape, p);
}

template <class Params, class Body>
CUresult run_body(Body body, const LaunchShape& shape, const void* params) {
  const Params& p = *static_cast<const Params*>(params);
  return settings().check ? run_threads<Params, true>(body, shape, p) : run_threads<Params, false>(body, shape, p);
}

// X(symbol, body, params, most threads per block), as the headers list them.
#define KVF_FAKE_KERNEL(symbol, body, Params, most)                                          \
  {#symbol, sizeof(Params), most, [](const LaunchShape& shape, const void* params) {         \
     return run_body<Params>([](auto& cx, const Params& p) { body(cx, p); }, shape, params); \
   }},

// A fiber per thread: fewer threads than a GPU takes. Whoever launches asks for the limit.
#define KVF_FAKE_WAITING_KERNEL(symbol, body, Params, most)                                          \
  {#symbol, sizeof(Params), most < 64 ? most : 64, [](const LaunchShape& shape, const void* params) { \
     return run_waiting_body<Params>([](auto& cx, const Params& p) { body(cx, p); }, shape, params); \
   }},

const Kernel kKernels[] = {KVF_VECTORIZED_COPY_KERNELS(KVF_FAKE_KERNEL)
#if defined(KVF_STRIDED_COPY_KERNELS)
                               KVF_STRIDED_COPY_KERNELS(KVF_FAKE_KERNEL)
#endif
                               KVF_EXCHANGE_KERNELS(KVF_FAKE_WAITING_KERNEL)
};

}  // namespace

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  }
  return nullptr;
}

}  // namespace kvferry::fake
