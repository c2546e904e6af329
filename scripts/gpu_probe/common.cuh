// What all sections of the probe share: memory, ids, timing, checking, and parameters for the library's kernels.
#pragma once

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvferry/strided_copy.cuh"

namespace probe {

using namespace kvferry;

inline int failures = 0;

#define CK(call)                                                                                         \
  do {                                                                                                   \
    const cudaError_t status = (call);                                                                   \
    if (status != cudaSuccess) {                                                                         \
      std::printf("FATAL %s, line %d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::fflush(stdout);                                                                               \
      std::_Exit(1);                                                                                     \
    }                                                                                                    \
  } while (0)

constexpr u64 kKiB = 1024, kMiB = 1024 * kKiB;
constexpr u64 kBytes = 256 * kMiB;  // of every buffer

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

__host__ __device__ inline u64 mix(u64 x) {
  x = (x + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  return (x ^ (x >> 29)) * 0x94d049bb133111ebull;
}

__global__ void fill_kernel(u32* at, u64 words, u32 poison, bool pattern) {
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < words; i += u64(gridDim.x) * blockDim.x) {
    at[i] = pattern ? u32(mix(i) >> 16) : poison;
  }
}

// One place for every 4-byte word: which source word belongs there.
struct Rows {
  u64 row;     // bytes
  u32 t, h;    // source [block][t][h][row], destination [block][h'][t][row]
  u32 only_h;  // 1: only head 0 is moved, the destination has no head axis
  u64 block() const { return row * t * h; }
};

__global__ void check_kernel(const u32* dst, u64 blocks, Rows r, const u32* inverse, u64* wrong) {
  const u64 words = r.row / 4, heads = r.only_h ? 1 : r.h;
  const u64 per = words * r.t * heads, total = per * blocks;
  for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < total; i += u64(gridDim.x) * blockDim.x) {
    const u64 block = i / per, w = i % words, t = i / words % r.t, h = i / words / r.t % heads;
    const u64 from = ((u64(inverse[block]) * r.t + t) * r.h + h) * words + w;
    if (dst[i] != u32(mix(from) >> 16)) atomicAdd((unsigned long long*)wrong, 1ull);
  }
}

struct Memory {
  char *dev, *dev2, *pin;
  char* peer = nullptr;  // on device 1
  u64* wrong;
  cudaStream_t stream;

  void poison(char* at, u64 bytes) const {
    fill_kernel<<<264, 512, 0, stream>>>(reinterpret_cast<u32*>(at), bytes / 4, 0xdeadbeef, false);
  }
  void pattern(char* at) const {
    fill_kernel<<<264, 512, 0, stream>>>(reinterpret_cast<u32*>(at), kBytes / 4, 0, true);
  }
};

enum Direction { kH2D, kD2H, kD2D, kToPeer, kFromPeer };
inline const char* name(Direction d) {
  static const char* names[] = {"H2D", "D2H", "D2D", "to peer", "from peer"};
  return names[d];
}

struct Ends2 {
  char *src, *dst;
};
inline Ends2 ends(const Memory& m, Direction d) {
  switch (d) {
    case kH2D:
      return {m.pin, m.dev2};
    case kD2H:
      return {m.dev, m.pin};
    case kD2D:
      return {m.dev, m.dev2};
    case kToPeer:
      return {m.dev, m.peer};
    default:
      return {m.peer, m.dev2};
  }
}
// The source must hold the pattern; what another section wrote there is gone.
inline void prepare(const Memory& m, Direction d) {
  m.pattern(ends(m, d).src);
  CK(cudaStreamSynchronize(m.stream));
}

// Random pairs of block ids, on the host and on the device.
struct Ids {
  std::vector<u32> src, dst, inverse;
  u64* table = nullptr;
  u32* d_inverse = nullptr;

  explicit Ids(u64 blocks, unsigned seed = 1) : src(blocks), dst(blocks), inverse(blocks) {
    std::mt19937 random(seed);
    std::iota(src.begin(), src.end(), 0u);
    dst = src;
    std::shuffle(src.begin(), src.end(), random);
    std::shuffle(dst.begin(), dst.end(), random);
    std::vector<u64> packed(blocks);
    for (u64 i = 0; i < blocks; ++i) packed[i] = src[i] | u64(dst[i]) << 32, inverse[dst[i]] = src[i];
    CK(cudaMalloc(&table, blocks * 8));
    CK(cudaMalloc(&d_inverse, blocks * 4));
    CK(cudaMemcpy(table, packed.data(), blocks * 8, cudaMemcpyHostToDevice));
    CK(cudaMemcpy(d_inverse, inverse.data(), blocks * 4, cudaMemcpyHostToDevice));
  }
  ~Ids() { cudaFree(table), cudaFree(d_inverse); }
  Ids(const Ids&) = delete;
};

inline Divisor divisor(u64 count) {
  u32 shift = 0;
  while ((u64(1) << shift) < count) ++shift;
  return {u32(count), u32(((u64(1) << (31 + shift)) + count - 1) / count), shift, 0};
}

struct Loop {
  u64 count, src_stride, dst_stride;
};

// One region per side. `piece`: chunk bytes (tile, bulk) or unit bytes (word). lane_shift: of the team; word: ignored.
template <class P>
P* params(Ends2 at, const Ids& ids, u64 pairs, u64 src_block, u64 dst_block, const std::vector<Loop>& loops, u64 run,
          u64 piece, u32 lane_shift, bool word) {
  static P p;
  p = P{};
  StridedHeader& h = p.header;
  h.src.block_stride = src_block, h.dst.block_stride = dst_block;
  h.src.parts = h.dst.parts = divisor(1);
  h.src.blocks = h.dst.blocks = u32(ids.src.size());
  h.src.bases_at = 0, h.dst.bases_at = 1, h.ids_at = 2;
  p.tail[0] = reinterpret_cast<u64>(at.src), p.tail[1] = reinterpret_cast<u64>(at.dst);
  if (pairs + 2 <= sizeof(p.tail) / 8) {
    h.ids_kind = kInlinePairs;
    for (u64 i = 0; i < pairs; ++i) p.tail[2 + i] = ids.src[i] | u64(ids.dst[i]) << 32;
  } else {
    h.ids_kind = kPairTable, h.pair_table = reinterpret_cast<u64>(ids.table);
  }
  h.run_bytes = run, h.chunk_bytes = piece;
  const u64 inner = (run + piece - 1) / piece;
  u64 per_pair = inner;
  h.inner = divisor(inner);
  for (const Loop& l : loops) {
    h.loop[h.loops++] = {l.src_stride, l.dst_stride, 0, 0, divisor(l.count)};
    per_pair *= l.count;
  }
  h.per_pair = divisor(per_pair);
  h.items = u32(per_pair * pairs);
  u32 unit_shift = 0;
  while ((u64(2) << unit_shift) <= piece && word) ++unit_shift;
  h.lane_shift = word ? unit_shift : lane_shift;
  return &p;
}

template <class F>
double event_seconds(const Memory& m, F f, int runs = 3) {
  static cudaEvent_t a = nullptr, b = nullptr;
  if (a == nullptr) {
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
  }
  f();
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    CK(cudaEventRecord(a, m.stream));
    f();
    CK(cudaEventRecord(b, m.stream));
    CK(cudaEventSynchronize(b));
    float ms = 0;
    CK(cudaEventElapsedTime(&ms, a, b));
    times.push_back(ms * 1e-3);
  }
  CK(cudaGetLastError());
  return median(times);
}

template <class F>
void check(const Memory& m, Direction d, const Ids& ids, u64 blocks, Rows rows, const char* what, F launch) {
  const u64 bytes = blocks * rows.row * rows.t * (rows.only_h ? 1 : rows.h);
  m.poison(ends(m, d).dst, bytes);
  launch();
  CK(cudaMemsetAsync(m.wrong, 0, 8, m.stream));
  check_kernel<<<264, 512, 0, m.stream>>>(reinterpret_cast<u32*>(ends(m, d).dst), blocks, rows, ids.d_inverse, m.wrong);
  u64 wrong = 0;
  CK(cudaMemcpyAsync(&wrong, m.wrong, 8, cudaMemcpyDeviceToHost, m.stream));
  CK(cudaStreamSynchronize(m.stream));
  if (wrong != 0) {
    ++failures;
    std::printf("WRONG: %s %s, rows of %llu: %llu words of %llu\n", name(d), what, (unsigned long long)rows.row,
                (unsigned long long)wrong, (unsigned long long)bytes / 4);
  }
}

}  // namespace probe
