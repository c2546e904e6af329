"""The bench's own kernels, compiled by NVRTC where they run: delays, meetings, the reference's method.

`exchange` is our implementation of the method that the reference describes, and used nowhere but here: CTA b
serves rank b mod W; threads form rows of 16-byte words, one load and one store in flight each; every CTA adds
one to a counter at its target; the first CTA waits until all have arrived, then takes them off again. Where a
row's words do not divide a CTA's threads the rest stay idle here, which is kinder than the original, whose
rest sends again. Waiting for "at least" instead of "exactly" keeps it from hanging where a peer is already in
its next call. Every wait is bounded and says so in the fault word.
"""

from __future__ import annotations

THREADS = 512
MEET_AT, SIGNAL_AT, FAULT_AT, POOL_AT = 0, 1024, 2048, 4096
"""Offsets in every rank's allocation: counters of meetings, of exchanges, what timed out, and the data."""
MOST_RANKS = 64
WAIT_NS = 2_000_000_000

PRELUDE = r"""
typedef unsigned long long u64;
__device__ __forceinline__ u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(unsigned* word) {
  asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}
__device__ __forceinline__ void copy_word(char* to, const char* from) {
  int4 v = __ldg(reinterpret_cast<const int4*>(from));
  asm volatile("st.global.L1::no_allocate.v4.s32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
"""
"""What only a GPU has; a test puts a host's in its place."""

BODY = r"""
#define MEET_AT 0
#define SIGNAL_AT 1024
#define FAULT_AT 2048
#define POOL_AT 4096

__device__ __forceinline__ unsigned* word_at(u64 base, u64 offset, int number) {
  return reinterpret_cast<unsigned*>(base + offset) + number;
}
__device__ bool wait_for(const unsigned* word, unsigned wanted, u64 limit_ns, u64 base, unsigned kind) {
  u64 start = now_ns();
  while ((int)(load_acquire(word) - wanted) < 0) {
    if (now_ns() - start > limit_ns) {
      atomicOr(word_at(base, FAULT_AT, 0), kind);
      return false;
    }
  }
  return true;
}

extern "C" __global__ void spin(u64 ns) {
  u64 start = now_ns();
  while (now_ns() - start < ns) {
  }
}

extern "C" __global__ void meet(const u64* bases, int world, int rank, unsigned epoch, u64 limit_ns) {
  int peer = threadIdx.x;
  if (peer >= world || peer == rank) return;
  add_release(word_at(bases[peer], MEET_AT, rank));
  wait_for(word_at(bases[rank], MEET_AT, peer), epoch, limit_ns, bases[rank], 1u);
}

extern "C" __global__ void __launch_bounds__(512)
    exchange(const char* x, const u64* bases, int world, int rank, int batch, long long rows, long long first,
             long long total, int row_bytes, u64 limit_ns) {
  int target = blockIdx.x % world, lane = blockIdx.x / world;
  int lanes = (gridDim.x - target + world - 1) / world;
  int columns = row_bytes / 16, at_once = blockDim.x / columns;
  int row = threadIdx.x / columns, column = threadIdx.x - row * columns;
  long long pitch = (long long)row_bytes * world;
  const char* from = x + (long long)target * row_bytes + column * 16;
  char* to = reinterpret_cast<char*>(bases[target]) + POOL_AT + column * 16;
  if (row < at_once) {
    for (int b = 0; b < batch; b++) {
      #pragma unroll 1
      for (long long r = (long long)lane * at_once + row; r < rows; r += (long long)lanes * at_once)
        copy_word(to + (b * total + first + r) * row_bytes, from + (b * rows + r) * pitch);
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd_system(word_at(bases[target], SIGNAL_AT, rank), 1u);
  if (blockIdx.x == 0 && threadIdx.x < world) {
    unsigned expected = (gridDim.x - rank + world - 1) / world;
    unsigned* mine = word_at(bases[rank], SIGNAL_AT, threadIdx.x);
    if (wait_for(mine, expected, limit_ns, bases[rank], 2u)) atomicSub_system(mine, expected);
  }
}
"""
SOURCE = PRELUDE + BODY


def rows_at_once(row_bytes: int) -> int:
    """Tokens that a CTA of the reference's method moves at once; 0 where it cannot."""
    return THREADS // (row_bytes // 16) if row_bytes % 16 == 0 and row_bytes >= 16 else 0
