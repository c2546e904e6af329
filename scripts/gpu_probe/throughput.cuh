// Sections a, b, c: rates of the strided kernels, their variants and the old pointer-table kernel.
#pragma once

#include "bulk.cuh"
#include "common.cuh"

namespace probe {

template <Hint kHint, class P>
__global__ void __launch_bounds__(1024) tile_kernel(const __grid_constant__ P p) {
  DeviceCx cx;
  strided_tile<kHint>(cx, p);
}

template <Hint kHint, class P>
__global__ void __launch_bounds__(1024) word_kernel(const __grid_constant__ P p) {
  DeviceCx cx;
  strided_word<kHint>(cx, p);
}

template <class P>
__global__ void __launch_bounds__(32) bulk_kernel(const __grid_constant__ P p, BulkShape s) {
  strided_bulk(p, s);
}

// The pointer-table kernel of the earlier probes: one CTA-wide turn per piece of 64 KiB.
__global__ void __launch_bounds__(1024) old_kernel(const u64* pairs, char* src, char* dst, u64 bytes, u32 count) {
  const u64 units = bytes / 16, per = u64(blockDim.x) * 4, pieces = (units + per - 1) / per;
  for (u64 t = blockIdx.x; t < pieces * count; t += gridDim.x) {
    const u64 pair = pairs[t / pieces], i = t % pieces * per + threadIdx.x;
    const int4* a = reinterpret_cast<const int4*>(src + u32(pair) * bytes);
    int4* b = reinterpret_cast<int4*>(dst + (pair >> 32) * bytes);
    int4 x[4];
#pragma unroll
    for (u32 u = 0; u < 4; ++u) {
      if (i + u * blockDim.x < units) x[u] = __ldcs(a + i + u * blockDim.x);
    }
#pragma unroll
    for (u32 u = 0; u < 4; ++u) {
      if (i + u * blockDim.x < units) __stcs(b + i + u * blockDim.x, x[u]);
    }
  }
}

using Launch = void (*)(u32 grid, u32 block, const StridedSmall& p, cudaStream_t);
template <Hint kHint>
void launch_tile(u32 grid, u32 block, const StridedSmall& p, cudaStream_t s) {
  tile_kernel<kHint><<<grid, block, 0, s>>>(p);
}
template <Hint kHint>
void launch_word(u32 grid, u32 block, const StridedSmall& p, cudaStream_t s) {
  word_kernel<kHint><<<grid, block, 0, s>>>(p);
}
constexpr Launch kTile[] = {launch_tile<Hint::kNone>, launch_tile<Hint::kStream>};
constexpr Launch kWord[] = {launch_word<Hint::kNone>, launch_word<Hint::kStream>};
constexpr const char* kHints[] = {"none", "cs"};

// Four 16-byte accesses per thread cover a piece.
inline u32 team_shift(u64 piece, u32 block) {
  u32 shift = 0;
  while ((u64(64) << shift) < piece && (2u << shift) <= block) ++shift;
  return shift;
}

inline double rate(Direction d, u64 bytes, double seconds) { return (d == kD2D ? 2.0 : 1.0) * bytes / seconds / 1e9; }

inline void ceilings(const Memory& m) {
  std::printf("ceilings, one memcpy of 256 MiB, GB/s:");
  for (Direction d : {kH2D, kD2H, kD2D, kToPeer, kFromPeer}) {
    if (d >= kToPeer && m.peer == nullptr) continue;
    const Ends2 at = ends(m, d);
    const double s =
        event_seconds(m, [&] { CK(cudaMemcpyAsync(at.dst, at.src, kBytes, cudaMemcpyDefault, m.stream)); }, 5);
    std::printf("  %s %.1f", name(d), rate(d, kBytes, s));
  }
  std::printf("\n");
}

inline void tile_section(const Memory& m) {
  for (Direction d : {kH2D, kD2H, kD2D, kToPeer, kFromPeer}) {
    if (d >= kToPeer && m.peer == nullptr) continue;
    const std::vector<u32> grids = d == kD2D ? std::vector<u32>{132, 264, 528} : std::vector<u32>{1, 2, 4, 8, 16, 32};
    std::printf("\n[a] tile %s, GB/s; columns: hint x threads\n%8s %5s", name(d), "run", "CTAs");
    for (const char* hint : kHints) std::printf(" %5s/1024 %5s/512", hint, hint);
    std::printf("\n");
    prepare(m, d);
    for (u64 run : {2 * kKiB, 4 * kKiB, 16 * kKiB, 32 * kKiB, 64 * kKiB, 2 * kMiB}) {
      const u64 bytes = d == kD2D ? kBytes : d >= kToPeer ? kBytes : kBytes / 2, blocks = bytes / run;
      const Ids ids(blocks);
      const Rows rows{run, 1, 1, 0};
      for (u32 grid : grids) {
        std::printf("%8llu %5u", (unsigned long long)run, grid);
        for (int hint = 0; hint < 2; ++hint) {
          for (u32 block : {1024u, 512u}) {
            const u64 piece = std::min<u64>(run, block * 64);
            const StridedSmall* p = params<StridedSmall>(ends(m, d), ids, blocks, run, run, {}, run, piece,
                                                         team_shift(piece, block), false);
            if (grid == grids.back()) {
              check(m, d, ids, blocks, rows, "tile", [&] { kTile[hint](grid, block, *p, m.stream); });
            }
            const double s = event_seconds(m, [&] { kTile[hint](grid, block, *p, m.stream); });
            std::printf(block == 1024 ? " %10.1f" : " %9.1f", rate(d, bytes, s));
          }
        }
        std::printf("\n");
      }
      std::fflush(stdout);
    }
  }
}

// NHD -> HND of 16 tokens x 8 heads in one order of walking.
struct Order {
  const char* name;
  bool source;  // walked in source order
};

// `long_rows`: those around and above the length from which the library tiles.
inline void word_section(const Memory& m, bool long_rows) {
  const std::vector<u64> lengths = long_rows ? std::vector<u64>{768, 1032, 1152, 1160, 2056, 4100, 4104}
                                             : std::vector<u64>{16, 32, 64, 128, 132, 256, 512, 576, 584, 656, 1024};
  for (Direction d : {kH2D, kD2H, kD2D}) {
    const std::vector<u32> grids =
        d == kD2D ? std::vector<u32>{132, 264, 528, 1056} : std::vector<u32>{4, 8, 16, 32, 64};
    std::printf(
        "\n[b] rows NHD -> HND %s, GB/s; word (walk, hint, threads) and tile\n%6s %5s %9s %9s %9s %9s %9s %9s %9s "
        "%9s\n",
        name(d), "row", "CTAs", "dst/no/1k", "dst/no/.5k", "dst/cs/1k", "dst/cs/.5k", "src/no/1k", "src/cs/.5k",
        "tile/1k", "tile/.5k");
    prepare(m, d);
    for (u64 row : lengths) {
      const Rows rows{row, 16, 8, 0};
      const u64 bytes_goal = d == kD2D ? kBytes : kBytes / 4, blocks = bytes_goal / rows.block(),
                bytes = blocks * rows.block();
      const Ids ids(blocks);
      const u64 unit = row % 16 == 0 ? 16 : row % 8 == 0 ? 8 : 4;
      const Loop t{16, 8 * row, row}, h{8, row, 16 * row};
      for (u32 grid : grids) {
        std::printf("%6llu %5u", (unsigned long long)row, grid);
        struct Column {
          bool source, tile;
          int hint;
          u32 block;
        };
        for (const Column& c : {Column{false, false, 0, 1024},
                                {false, false, 0, 512},
                                {false, false, 1, 1024},
                                {false, false, 1, 512},
                                {true, false, 0, 1024},
                                {true, false, 1, 512},
                                {false, true, 0, 1024},
                                {false, true, 0, 512}}) {
          const std::vector<Loop> loops = c.source ? std::vector<Loop>{t, h} : std::vector<Loop>{h, t};
          const StridedSmall* p =
              params<StridedSmall>(ends(m, d), ids, blocks, rows.block(), rows.block(), loops, row,
                                   c.tile ? (row + 15) / 16 * 16 : unit, team_shift(row * 16 / unit, c.block), !c.tile);
          const Launch launch = c.tile ? kTile[c.hint] : kWord[c.hint];
          if (grid == grids.back())
            check(m, d, ids, blocks, rows, c.tile ? "tile rows" : "word rows",
                  [&] { launch(grid, c.block, *p, m.stream); });
          std::printf(
              " %9.1f",
              rate(d, bytes, event_seconds(m, [&] { launch(grid, c.block, *p, m.stream); }, d == kD2D ? 5 : 2)));
        }
        std::printf("\n");
      }
      std::fflush(stdout);
    }
  }
  if (long_rows) return;
  std::printf(
      "\n[b2] slice: head 0 of 8 of NHD on the host side, contiguous on the device, word mode, no hint, 1024 threads, "
      "GB/s\n%6s %7s %7s %7s %7s\n",
      "row", "H2D/16", "H2D/32", "D2H/16", "D2H/32");
  for (u64 row : {16, 64, 128, 256}) {
    const Rows rows{row, 16, 8, 1};
    const u64 blocks = kBytes / rows.block(), bytes = blocks * row * 16;
    const Ids ids(blocks);
    std::printf("%6llu", (unsigned long long)row);
    for (Direction d : {kH2D, kD2H}) {
      prepare(m, d);
      for (u32 grid : {16u, 32u}) {
        const bool in = d == kH2D;
        const StridedSmall* p =
            params<StridedSmall>(ends(m, d), ids, blocks, in ? rows.block() : 16 * row, in ? 16 * row : rows.block(),
                                 {{16, in ? 8 * row : row, in ? row : 8 * row}}, row, 16, 0, true);
        if (in) check(m, d, ids, blocks, rows, "slice", [&] { kWord[0](grid, 1024, *p, m.stream); });
        std::printf(" %7.1f", rate(d, bytes, event_seconds(m, [&] { kWord[0](grid, 1024, *p, m.stream); }, 2)));
      }
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

inline void bulk_section(const Memory& m) {
  const BulkShape shapes[] = {{1, 6, 16384}, {1, 12, 16384}, {2, 6, 16384}, {4, 3, 16384},
                              {1, 24, 8192}, {4, 12, 4096},  {8, 6, 4096},  {16, 3, 4096}};
  CK(cudaFuncSetAttribute(bulk_kernel<StridedSmall>, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024));
  for (Direction d : {kH2D, kD2H, kD2D, kToPeer, kFromPeer}) {
    if (d >= kToPeer && m.peer == nullptr) continue;
    const std::vector<u32> grids = d == kD2D ? std::vector<u32>{132} : std::vector<u32>{1, 2, 4, 8, 16};
    std::printf("\n[c] bulk %s, GB/s; columns: lanes x stages x tile; old pointer-table kernel last\n%8s %5s", name(d),
                "run", "CTAs");
    for (const BulkShape& s : shapes) std::printf("  %2ux%2ux%2uK", s.lanes, s.stages, s.tile / 1024);
    std::printf("      old\n");
    prepare(m, d);
    for (u64 run : {2 * kKiB, 4 * kKiB, 16 * kKiB, 64 * kKiB}) {
      const u64 bytes = d == kD2D ? kBytes : kBytes / 4, blocks = bytes / run;
      const Ids ids(blocks);
      const Rows rows{run, 1, 1, 0};
      for (u32 grid : grids) {
        std::printf("%8llu %5u", (unsigned long long)run, grid);
        for (const BulkShape& s : shapes) {
          BulkShape shape = s;
          shape.tile = u32(std::min<u64>(run, s.tile));
          const StridedSmall* p =
              params<StridedSmall>(ends(m, d), ids, blocks, run, run, {}, run, shape.tile, 0, false);
          const auto launch = [&] { bulk_kernel<<<grid, 32, bulk_shared_bytes(shape), m.stream>>>(*p, shape); };
          if (grid == grids.back()) check(m, d, ids, blocks, rows, "bulk", launch);
          std::printf(" %9.1f", rate(d, bytes, event_seconds(m, launch)));
        }
        const auto launch = [&] {
          old_kernel<<<d == kD2D ? 264 : grid, 1024, 0, m.stream>>>(ids.table, ends(m, d).src, ends(m, d).dst, run,
                                                                    u32(blocks));
        };
        if (grid == grids.back()) check(m, d, ids, blocks, rows, "old", launch);
        std::printf(" %9.1f\n", rate(d, bytes, event_seconds(m, launch)));
      }
      std::fflush(stdout);
    }
  }
}

}  // namespace probe
