// The one file that knows which compiler it is under: CUDA qualifiers, special registers and PTX stay here.
//
// A kernel body is `template <class Cx> KVF_HD void op(Cx& cx, const OpParams& p)`. The context `Cx` gives it
//     tid() nthreads()      thread in its CTA, threads per CTA      (u32)
//     bid() nblocks()       CTA in the grid, CTAs in the grid       (u32)
//     sync()                CTA barrier, reached by every thread of the CTA
//     sync_or()             the same; says whether any thread brought `true`
//     spin() poll()         one turn of a loop that waits, short or patient: lets whoever is waited for run
//     clock()               nanoseconds, to measure waiting with
//     shared()              the CTA's dynamic shared memory, aligned to 16, uninitialised
//     load<V>() store<V>()  global memory at a 64-bit address that is a multiple of sizeof(V); a `Hint` may follow V
//     cas()                 compare-and-swap of a u32 in global memory, relaxed: returns what was there
//     ticket()              adds to a u32 of this GPU, acquire and release: returns what was there
// and, for memory that other GPUs or the host write while the kernel runs, at system scope:
//     load_acquire() store_release() add_release()    of a u64
//     load_relaxed<V>() store_relaxed() add_relaxed() of a u64; the load also of a u32, or of two u64, each whole
// and nothing else: no threadIdx, no __shared__ in a body. `DeviceCx` is the GPU's; `HostCx` (cuda/host) runs the
// same bodies under checks. Bodies write `load<V>(cx, address)`, which spares them `cx.template load<V>(address)`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define KVF_HD __device__ __forceinline__
#define KVF_NO_UNROLL _Pragma("unroll 1")
#define KVF_UNROLL _Pragma("unroll")
#else
#define KVF_HD inline
#define KVF_NO_UNROLL
#define KVF_UNROLL
#endif

namespace kvferry {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// The widest unit of one access: becomes ld/st.global.v2.u64 (16 bytes) on the device.
struct alignas(16) U128 {
  u64 lo;
  u64 hi;
};
static_assert(sizeof(U128) == 16 && alignof(U128) == 16, "a 16-byte access needs a 16-byte type");

// What is said to the caches about an access. Speed only: the bytes are the same.
enum class Hint {
  kNone,
  kStream,  // .cs: touched once, the first to be evicted
};

template <class V, Hint kHint = Hint::kNone, class Cx>
KVF_HD V load(Cx& cx, u64 address) {
  return cx.template load<V, kHint>(address);
}

template <class V, Hint kHint = Hint::kNone, class Cx>
KVF_HD void store(Cx& cx, u64 address, V value) {
  cx.template store<V, kHint>(address, value);
}

template <class V, class Cx>
KVF_HD V load_relaxed(Cx& cx, u64 address) {
  return cx.template load_relaxed<V>(address);
}

#if defined(__CUDACC__)

extern __shared__ U128 kvf_dynamic_shared[];

namespace device {

// An address read from a table is a generic pointer to the compiler, which then cannot use the global-memory path; the
// instructions are therefore spelled out. Device, mapped host and peer memory are all global to PTX.
template <class V, Hint kHint>
struct Global;

#define KVF_GLOBAL_ACCESS(V, hint, op, suffix, constraint, Reg)                                               \
  template <>                                                                                                 \
  struct Global<V, hint> {                                                                                    \
    static KVF_HD V load(u64 address) {                                                                       \
      Reg value;                                                                                              \
      asm volatile("ld.global" op suffix " %0, [%1];" : "=" constraint(value) : "l"(address));                \
      return V(value);                                                                                        \
    }                                                                                                         \
    static KVF_HD void store(u64 address, V value) {                                                          \
      asm volatile("st.global" op suffix " [%0], %1;" ::"l"(address), constraint(Reg(value)));                \
    }                                                                                                         \
  };
#define KVF_GLOBAL_ACCESSES(hint, op)                                                                         \
  KVF_GLOBAL_ACCESS(u8, hint, op, ".u8", "h", u16) /* PTX has no 8-bit registers */                           \
  KVF_GLOBAL_ACCESS(u16, hint, op, ".u16", "h", u16)                                                          \
  KVF_GLOBAL_ACCESS(u32, hint, op, ".u32", "r", u32)                                                          \
  KVF_GLOBAL_ACCESS(u64, hint, op, ".u64", "l", u64)                                                          \
  template <>                                                                                                 \
  struct Global<U128, hint> {                                                                                 \
    static KVF_HD U128 load(u64 address) {                                                                    \
      U128 v;                                                                                                 \
      asm volatile("ld.global" op ".v2.u64 {%0, %1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(address));         \
      return v;                                                                                               \
    }                                                                                                         \
    static KVF_HD void store(u64 address, U128 v) {                                                           \
      asm volatile("st.global" op ".v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(v.lo), "l"(v.hi));            \
    }                                                                                                         \
  };
KVF_GLOBAL_ACCESSES(Hint::kNone, "")
KVF_GLOBAL_ACCESSES(Hint::kStream, ".cs")
#undef KVF_GLOBAL_ACCESSES
#undef KVF_GLOBAL_ACCESS

// Words that others write meanwhile. The clobber keeps the compiler from moving other accesses across.
template <class V>
struct Relaxed;
template <>
struct Relaxed<u32> {
  static KVF_HD u32 load(u64 address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
};
template <>
struct Relaxed<u64> {
  static KVF_HD u64 load(u64 address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
};
template <>
struct Relaxed<U128> {
  static KVF_HD U128 load(u64 address) {
    U128 v;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(address) : "memory");
    return v;
  }
};

}  // namespace device

struct DeviceCx {
  KVF_HD u32 tid() const { return threadIdx.x; }
  KVF_HD u32 nthreads() const { return blockDim.x; }
  KVF_HD u32 bid() const { return blockIdx.x; }
  KVF_HD u32 nblocks() const { return gridDim.x; }
  KVF_HD void sync() { __syncthreads(); }
  KVF_HD bool sync_or(bool mine) { return __syncthreads_or(mine) != 0; }
  KVF_HD void* shared() { return kvf_dynamic_shared; }

  KVF_HD void spin() {}
  KVF_HD void poll() {
#if defined(__CUDA_ARCH__)
    __nanosleep(32);
#endif
  }
  KVF_HD u64 clock() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }

  template <class V, Hint kHint>
  KVF_HD V load(u64 address) {
    return device::Global<V, kHint>::load(address);
  }

  template <class V, Hint kHint>
  KVF_HD void store(u64 address, V value) {
    device::Global<V, kHint>::store(address, value);
  }

  KVF_HD u32 cas(u64 address, u32 expected, u32 desired) {
    u32 found;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(found)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return found;
  }

  KVF_HD u32 ticket(u64 address, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(value)
                 : "memory");
    return before;
  }

  template <class V>
  KVF_HD V load_relaxed(u64 address) {
    return device::Relaxed<V>::load(address);
  }

  KVF_HD void store_relaxed(u64 address, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }

  KVF_HD void add_relaxed(u64 address, u64 value) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }

  KVF_HD u64 load_acquire(u64 address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }

  KVF_HD void store_release(u64 address, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }

  KVF_HD void add_release(u64 address, u64 value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
  }
};

#endif  // __CUDACC__

}  // namespace kvferry
