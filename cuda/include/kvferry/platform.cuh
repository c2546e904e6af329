// The one file that knows which compiler it is under: CUDA qualifiers, special registers and PTX stay here.
//
// A kernel body is `template <class Cx> KVF_HD void op(Cx& cx, const OpParams& p)`. The context `Cx` gives it
//     tid() nthreads()      thread in its CTA, threads per CTA      (u32)
//     bid() nblocks()       CTA in the grid, CTAs in the grid       (u32)
//     sync()                CTA barrier, reached by every thread of the CTA
//     poll()                one turn of a spin loop: lets whoever is waited for run
//     shared()              the CTA's dynamic shared memory, aligned to 16, uninitialised
//     load<V>() store<V>()  global memory at a 64-bit address that is a multiple of sizeof(V)
// and nothing else: no threadIdx, no __shared__ in a body. `DeviceCx` is the GPU's; `HostCx` (cuda/host) runs the
// same bodies under checks. Bodies write `load<V>(cx, address)`, which spares them `cx.template load<V>(address)`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define KVF_HD __device__ __forceinline__
#define KVF_NO_UNROLL _Pragma("unroll 1")
#else
#define KVF_HD inline
#define KVF_NO_UNROLL
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

template <class V, class Cx>
KVF_HD V load(Cx& cx, u64 address) {
  return cx.template load<V>(address);
}

template <class V, class Cx>
KVF_HD void store(Cx& cx, u64 address, V value) {
  cx.template store<V>(address, value);
}

#if defined(__CUDACC__)

extern __shared__ U128 kvf_dynamic_shared[];

namespace device {

// An address read from a table is a generic pointer to the compiler, which then cannot use the global-memory path; the
// instructions are therefore spelled out. Device, mapped host and peer memory are all global to PTX.
template <class V>
struct Global;

#define KVF_GLOBAL_ACCESS(V, suffix, constraint, Reg)                                          \
  template <>                                                                                  \
  struct Global<V> {                                                                           \
    static KVF_HD V load(u64 address) {                                                        \
      Reg value;                                                                               \
      asm volatile("ld.global." suffix " %0, [%1];" : "=" constraint(value) : "l"(address));   \
      return V(value);                                                                         \
    }                                                                                          \
    static KVF_HD void store(u64 address, V value) {                                           \
      asm volatile("st.global." suffix " [%0], %1;" ::"l"(address), constraint(Reg(value)));   \
    }                                                                                          \
  };
KVF_GLOBAL_ACCESS(u8, "u8", "h", u16)  // PTX has no 8-bit registers
KVF_GLOBAL_ACCESS(u16, "u16", "h", u16)
KVF_GLOBAL_ACCESS(u32, "u32", "r", u32)
KVF_GLOBAL_ACCESS(u64, "u64", "l", u64)
#undef KVF_GLOBAL_ACCESS

template <>
struct Global<U128> {
  static KVF_HD U128 load(u64 address) {
    U128 v;
    asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(address));
    return v;
  }
  static KVF_HD void store(u64 address, U128 v) {
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(v.lo), "l"(v.hi));
  }
};

}  // namespace device

struct DeviceCx {
  KVF_HD u32 tid() const { return threadIdx.x; }
  KVF_HD u32 nthreads() const { return blockDim.x; }
  KVF_HD u32 bid() const { return blockIdx.x; }
  KVF_HD u32 nblocks() const { return gridDim.x; }
  KVF_HD void sync() { __syncthreads(); }
  KVF_HD void* shared() { return kvf_dynamic_shared; }

  KVF_HD void poll() {
#if defined(__CUDA_ARCH__)
    __nanosleep(32);
#endif
  }

  template <class V>
  KVF_HD V load(u64 address) {
    return device::Global<V>::load(address);
  }

  template <class V>
  KVF_HD void store(u64 address, V value) {
    device::Global<V>::store(address, value);
  }
};

#endif  // __CUDACC__

}  // namespace kvferry
