#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "event.h"
#include "fault.h"
#include "fibers.h"
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

// The context (see platform.cuh) of one simulated thread. Barriers are not there: a kernel that has some is listed with
// those that wait.
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

 private:
  void look(u64 address, u64 bytes, bool write) {
    if ((address & (bytes - 1)) != 0) stop_with(CUDA_ERROR_MISALIGNED_ADDRESS);
    if (kChecked) check_access(*shape_.context, seen_, address, bytes, write);
  }

  const LaunchShape& shape_;
  void* const shared_;
  Seen& seen_;
};

// The context of a thread that may wait, and be written to by other devices meanwhile. Everything is sequentially
// consistent: no missing fence shows here.
template <bool kChecked>
class WaitingCx {
 public:
  WaitingCx(const LaunchShape& shape, Waiting& waiting, u32 block, u32 thread)
      : shape_(shape), waiting_(waiting), block_(block), thread_(thread) {}

  u32 tid() const { return thread_; }
  u32 nthreads() const { return shape_.threads; }
  u32 bid() const { return block_; }
  u32 nblocks() const { return shape_.blocks; }
  void* shared() { return waiting_.shared(block_); }
  void sync() { waiting_.sync_or(block_, false); }
  bool sync_or(bool mine) { return waiting_.sync_or(block_, mine); }
  void spin() { waiting_.poll(); }
  void poll() { waiting_.poll(); }
  u64 clock() { return now_nanoseconds(); }

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
  template <class V>
  V load_relaxed(u64 address) {
    if constexpr (sizeof(V) == sizeof(U128)) {
      return U128{load_acquire(address), load_acquire(address + 8)};
    } else {
      return __atomic_load_n(word<V>(address, false), __ATOMIC_SEQ_CST);
    }
  }
  u64 load_acquire(u64 address) { return __atomic_load_n(word<u64>(address, false), __ATOMIC_SEQ_CST); }
  void store_relaxed(u64 address, u64 value) { __atomic_store_n(word<u64>(address, true), value, __ATOMIC_SEQ_CST); }
  void store_release(u64 address, u64 value) { store_relaxed(address, value); }
  void add_relaxed(u64 address, u64 value) { __atomic_fetch_add(word<u64>(address, true), value, __ATOMIC_SEQ_CST); }
  void add_release(u64 address, u64 value) { add_relaxed(address, value); }
  u32 ticket(u64 address) { return __atomic_fetch_add(word<u32>(address, true), 1u, __ATOMIC_SEQ_CST); }
  u32 cas(u64 address, u32 expected, u32 desired) {
    __atomic_compare_exchange_n(word<u32>(address, true), &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
  }

 private:
  template <class V>
  V* word(u64 address, bool write) {
    look(address, sizeof(V), write);
    return reinterpret_cast<V*>(bytes_of(address));
  }
  void look(u64 address, u64 bytes, bool write) {
    if ((address & (bytes - 1)) != 0) stop_with(CUDA_ERROR_MISALIGNED_ADDRESS);
    if (kChecked) check_access(*shape_.context, seen_, address, bytes, write);
  }

  const LaunchShape& shape_;
  Waiting& waiting_;
  const u32 block_;
  const u32 thread_;
  Seen seen_;
};

template <class Params, bool kChecked, class Body>
CUresult run_waiting(Body body, const LaunchShape& shape, const Params& params) {
  return Waiting::run(shape, [&](Waiting& waiting, u32 block, u32 thread) {
    WaitingCx<kChecked> cx(shape, waiting, block, thread);
    body(cx, params);
  });
}

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

template <class Params, class Body>
CUresult run_body(Body body, const LaunchShape& shape, const void* params) {
  const Params& p = *static_cast<const Params*>(params);
  return settings().check ? run_threads<Params, true>(body, shape, p) : run_threads<Params, false>(body, shape, p);
}

template <class Params, class Body>
CUresult run_waiting_body(Body body, const LaunchShape& shape, const void* params) {
  const Params& p = *static_cast<const Params*>(params);
  return settings().check ? run_waiting<Params, true>(body, shape, p) : run_waiting<Params, false>(body, shape, p);
}

// X(symbol, body, params, most threads per block), as the headers list them.
#define KVF_FAKE_KERNEL(symbol, body, Params, most)                                          \
  {#symbol, sizeof(Params), most, [](const LaunchShape& shape, const void* params) {         \
     return run_body<Params>([](auto& cx, const Params& p) { body(cx, p); }, shape, params); \
   }},

// The same for kernels with barriers and waits.
#define KVF_FAKE_WAITING_KERNEL(symbol, body, Params, most)                                          \
  {#symbol, sizeof(Params), most, [](const LaunchShape& shape, const void* params) {                 \
     return run_waiting_body<Params>([](auto& cx, const Params& p) { body(cx, p); }, shape, params); \
   }},

const Kernel kKernels[] = {KVF_VECTORIZED_COPY_KERNELS(KVF_FAKE_KERNEL)
                               KVF_EXCHANGE_KERNELS(KVF_FAKE_WAITING_KERNEL)
#if defined(KVF_STRIDED_COPY_KERNELS)
                               KVF_STRIDED_COPY_KERNELS(KVF_FAKE_KERNEL)
#endif
};

}  // namespace

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  }
  return nullptr;
}

}  // namespace kvferry::fake
