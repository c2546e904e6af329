"""The bench's own kernels as host code: one CTA and one thread after the other."""

from __future__ import annotations

import ctypes
import subprocess
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import kernels

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
typedef unsigned long long u64;
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
#define __device__ static
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(x)
#define __syncthreads()
#define __threadfence_system() std::atomic_thread_fence(std::memory_order_seq_cst)
static u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static unsigned load_acquire(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void add_release(unsigned* word) { __atomic_fetch_add(word, 1u, __ATOMIC_RELEASE); }
static void copy_word(char* to, const char* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) __builtin_trap();
  memcpy(to, from, 16);
}
static void atomicOr(unsigned* word, unsigned v) { __atomic_fetch_or(word, v, __ATOMIC_RELAXED); }
static void atomicAdd_system(unsigned* word, unsigned v) { __atomic_fetch_add(word, v, __ATOMIC_SEQ_CST); }
static void atomicSub_system(unsigned* word, unsigned v) { __atomic_fetch_sub(word, v, __ATOMIC_SEQ_CST); }
"""
# The last CTA and the last thread first: the first of both is the one that waits, with all others behind it.
LAUNCH = r"""
template <class F> static void each(unsigned grid, unsigned block, F f) {
  gridDim.x = grid; blockDim.x = block;
  for (unsigned b = grid; b--;) for (unsigned t = block; t--;) { blockIdx.x = b; threadIdx.x = t; f(); }
}
extern "C" void run_spin(unsigned g, unsigned b, u64 ns) { each(g, b, [&] { spin(ns); }); }
extern "C" void run_meet(unsigned g, unsigned b, const u64* a, int w, int r, unsigned e, u64 n) {
  each(g, b, [&] { meet(a, w, r, e, n); });
}
extern "C" void run_exchange(unsigned g, unsigned b, const char* x, const u64* a, int w, int r, int batch,
                             long long rows, long long first, long long total, int row, u64 n) {
  each(g, b, [&] { exchange(x, a, w, r, batch, rows, first, total, row, n); });
}
"""
_U64, _I32, _U32, _I64 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
Kind = {_U64: "uint64", _I32: "int32", _U32: "uint32", _I64: "int64"}
"""NumPy's names."""
SIGNATURES: dict[str, list[Any]] = {
    "spin": [_U64],
    "meet": [_U64, _I32, _I32, _U32, _U64],
    "exchange": [_U64, _U64, _I32, _I32, _I32, _I64, _I64, _I64, _I32, _U64],
}


def compiled(folder: Path) -> Any:
    """The kernels as host code."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(PRELUDE + kernels.BODY + LAUNCH)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(library))
    for name, kinds in SIGNATURES.items():
        function = getattr(found, f"run_{name}")
        function.argtypes, function.restype = [_U32, _U32, *kinds], None
    return found
