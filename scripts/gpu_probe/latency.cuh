// Sections d, e, f: what the host pays: launches, completion, single calls, the driver's batch copy.
#pragma once

#include <atomic>
#include <thread>

#include "throughput.cuh"

namespace probe {

template <class P>
void launch_cost(const Memory& m, const char* what) {
  static P p;
  p = P{};  // no items: every thread leaves at once
  p.header.lane_shift = 5;
  std::vector<double> submit, end_to_end;
  for (int i = 0; i < 220; ++i) {
    const double t0 = now();
    tile_kernel<Hint::kNone><<<8, 1024, 0, m.stream>>>(p);
    const double t1 = now();
    while (cudaStreamQuery(m.stream) == cudaErrorNotReady) {
    }
    if (i >= 20) submit.push_back(t1 - t0), end_to_end.push_back(now() - t0);
  }
  const double t0 = now();
  for (int i = 0; i < 500; ++i) tile_kernel<Hint::kNone><<<8, 1024, 0, m.stream>>>(p);
  const double queued = (now() - t0) / 500;
  CK(cudaStreamSynchronize(m.stream));
  const double device = event_seconds(m, [&] { tile_kernel<Hint::kNone><<<8, 1024, 0, m.stream>>>(p); }, 41);
  std::printf(
      "  %-6s submit, idle stream %.2f us, 500 in a row %.2f us each; end to end (spin) %.2f us; between events %.2f "
      "us\n",
      what, median(submit) * 1e6, queued * 1e6, median(end_to_end) * 1e6, device * 1e6);
}

inline void launch_section(const Memory& m) {
  std::printf("\n[d] launch cost\n");
  launch_cost<StridedParams<3>>(m, "512 B");
  launch_cost<StridedParams<(1024 - sizeof(StridedHeader)) / 8>>(m, "1 KB");
  launch_cost<StridedParams<(2048 - sizeof(StridedHeader)) / 8>>(m, "2 KB");
  launch_cost<StridedSmall>(m, "4 KB");
  launch_cost<StridedParams<(16384 - sizeof(StridedHeader)) / 8>>(m, "16 KB");
  launch_cost<StridedLarge>(m, "32 KB");
  std::printf("  1 block of 64 x 32 KiB, end to end us (submit, then spin on the stream): CTAs x threads\n");
  const u64 run = 32 * kKiB;
  const u32 n = 64;
  for (Direction d : {kH2D, kD2H, kD2D}) {
    prepare(m, d);
    const Ids ids(n);
    std::printf("  %s:", name(d));
    for (u32 grid : {2u, 4u, 8u, 16u, 64u, 256u}) {
      for (u32 block : {1024u, 512u, 256u}) {
        for (int split = 0; split < 2; ++split) {
          // split: pieces of a CTA's one access per thread instead of four
          const u64 piece = std::min<u64>(run, block * (split ? 16 : 64));
          u32 shift = team_shift(piece, block);
          if (split) shift = team_shift(piece * 4, block);
          // 8 regions apart on the source, in one piece on the destination: FC <- LW
          const StridedSmall* p =
              params<StridedSmall>(ends(m, d), ids, 1, run, run * n, {{n, 2 * run, run}}, run, piece, shift, false);
          std::vector<double> times;
          for (int i = 0; i < 43; ++i) {
            const double t0 = now();
            kTile[0](grid, block, *p, m.stream);
            while (cudaStreamQuery(m.stream) == cudaErrorNotReady) {
            }
            if (i >= 2) times.push_back(now() - t0);
          }
          std::printf(" %ux%u%s %.1f", grid, block, split ? "s" : "", median(times) * 1e6);
        }
      }
    }
    const Ends2 at = ends(m, d);
    std::vector<double> times;
    for (int i = 0; i < 43; ++i) {
      const double t0 = now();
      CK(cudaMemcpyAsync(at.dst, at.src, run * n, cudaMemcpyDefault, m.stream));
      while (cudaStreamQuery(m.stream) == cudaErrorNotReady) {
      }
      if (i >= 2) times.push_back(now() - t0);
    }
    std::printf(" | one memcpy %.1f\n", median(times) * 1e6);
    std::fflush(stdout);
  }
}

// Runs for about `nanoseconds` (never beyond a second), then raises a flag in host memory as its last deed.
__global__ void flag_kernel(volatile u32* flag, u64 nanoseconds) {
  const u64 start = device_nanoseconds();
  while (device_nanoseconds() - start < nanoseconds && nanoseconds < 1000000000ull) __nanosleep(200);
  __threadfence_system();
  *flag = 1;
}

struct Callback {
  std::atomic<double> at{0};
  static void CUDART_CB run(void* self) { static_cast<Callback*>(self)->at.store(now()); }
};

inline void completion_section(const Memory& m) {
  std::printf(
      "\n[e] completion: us from the kernel's last store being seen by a spinning core until ... (median, p90)\n");
  volatile u32* flag;
  CK(cudaHostAlloc((void**)&flag, 64, cudaHostAllocMapped));
  cudaEvent_t spin_event, block_event;
  CK(cudaEventCreateWithFlags(&spin_event, cudaEventDisableTiming));
  CK(cudaEventCreateWithFlags(&block_event, cudaEventDisableTiming | cudaEventBlockingSync));
  const char* methods[] = {"query spin", "blocking sync", "host func", "spin sync", "query each 20 us"};
  for (u64 us : {20, 200, 2000}) {
    std::printf("  kernel of %4llu us:", (unsigned long long)us);
    for (int method = 0; method < 5; ++method) {
      std::vector<double> late;
      for (int i = 0; i < 100; ++i) {
        *flag = 0;
        Callback callback;
        std::atomic<int> go{0};
        double seen = 0;
        const cudaEvent_t event = method == 1 ? block_event : spin_event;
        // The waiter is up before the kernel starts, and begins to wait as soon as there is something to wait for.
        std::thread waiter([&] {
          go = 1;
          while (go != 2) {
          }
          if (method == 0) {
            while (cudaEventQuery(event) == cudaErrorNotReady) {
            }
          } else if (method == 1 || method == 3) {
            CK(cudaEventSynchronize(event));
          } else if (method == 4) {
            while (cudaEventQuery(event) == cudaErrorNotReady)
              std::this_thread::sleep_for(std::chrono::microseconds(20));
          }
          seen = now();
        });
        while (go == 0) {
        }
        flag_kernel<<<1, 1, 0, m.stream>>>((u32*)flag, us * 1000);
        CK(cudaEventRecord(event, m.stream));
        if (method == 2) CK(cudaLaunchHostFunc(m.stream, Callback::run, &callback));
        go = 2;
        const double give_up = now() + 2;
        while (*flag == 0 && now() < give_up) {
        }
        const double raised = now();
        waiter.join();
        CK(cudaStreamSynchronize(m.stream));
        if (method == 2) {
          while (callback.at.load() == 0 && now() < give_up) {
          }
          seen = callback.at.load();
        }
        late.push_back(seen - raised);
      }
      std::sort(late.begin(), late.end());
      std::printf("  %s %.1f (%.1f)", methods[method], late[50] * 1e6, late[90] * 1e6);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  cudaStream_t other;
  CK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const auto cost = [&](const char* what, auto call) {
    std::vector<double> times;
    for (int i = 0; i < 220; ++i) {
      const double t0 = now();
      call();
      const double t1 = now();
      if (i >= 20) times.push_back(t1 - t0);
      if (i % 4 == 3) {
        CK(cudaStreamSynchronize(m.stream));
        CK(cudaStreamSynchronize(other));
      }
    }
    std::printf("  %s %.2f", what, median(times) * 1e6);
  };
  Callback callback;
  cudaStreamCaptureStatus capturing;
  std::printf("  single calls, us:");
  cost("EventRecord", [&] { CK(cudaEventRecord(block_event, m.stream)); });
  cost("StreamWaitEvent", [&] { CK(cudaStreamWaitEvent(other, block_event, 0)); });
  cost("EventQuery (done)", [&] { cudaEventQuery(block_event); });
  cost("LaunchHostFunc", [&] { CK(cudaLaunchHostFunc(other, Callback::run, &callback)); });
  cost("MemcpyAsync 512 KiB",
       [&] { CK(cudaMemcpyAsync(m.dev2, m.pin, 512 * kKiB, cudaMemcpyHostToDevice, m.stream)); });
  cost("MemcpyAsync 4 KiB", [&] { CK(cudaMemcpyAsync(m.dev2, m.pin, 4 * kKiB, cudaMemcpyHostToDevice, m.stream)); });
  cost("StreamIsCapturing", [&] { CK(cudaStreamIsCapturing(m.stream, &capturing)); });
  cost("StreamGetCaptureInfo", [&] {
    unsigned long long id;
    CK(cudaStreamGetCaptureInfo(m.stream, &capturing, &id));
  });
  cost("steady_clock", [&] { now(); });
  std::printf("\n");
  std::fflush(stdout);
}

inline void batch_section(const Memory& m) {
  std::printf("\n[f] driver batch copy: GB/s (submit us per copy)\n%5s %9s", "", "run");
  const std::vector<u64> counts = {8, 64, 512, 4096};
  for (u64 n : counts) std::printf("   n=%-12llu", (unsigned long long)n);
  std::printf("\n");
  for (Direction d : {kH2D, kD2H}) {
    prepare(m, d);
    for (u64 run : {4 * kKiB, 16 * kKiB, 32 * kKiB, 64 * kKiB, 128 * kKiB, 256 * kKiB, 512 * kKiB, 2 * kMiB}) {
      std::printf("%5s %9llu", name(d), (unsigned long long)run);
      for (u64 n : counts) {
        if (n * run > kBytes) continue;
        const Ids ids(kBytes / run);
        std::vector<void*> src(n), dst(n);
        std::vector<size_t> sizes(n, run);
        for (u64 i = 0; i < n; ++i)
          src[i] = ends(m, d).src + ids.src[i] * run, dst[i] = ends(m, d).dst + ids.dst[i] * run;
        cudaMemcpyAttributes attributes{};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        size_t first = 0;
        std::vector<double> submit, whole;
        for (int i = 0; i < 4; ++i) {
          const double t0 = now();
          CK(cudaMemcpyBatchAsync((const void**)dst.data(), (const void**)src.data(), sizes.data(), n, &attributes,
                                  &first, 1, m.stream));
          const double t1 = now();
          CK(cudaStreamSynchronize(m.stream));
          if (i > 0) submit.push_back(t1 - t0), whole.push_back(now() - t0);
        }
        std::printf("   %6.1f (%5.2f)", n * run / median(whole) / 1e9, median(submit) * 1e6 / n);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

}  // namespace probe
