// Measures what the strided copy needs to be tuned: rates, hints, CTAs, launch and completion costs. One process, one
// GPU, a peer when there are two. Prints tables; exits 1 when a copy was wrong. Arguments: letters of the sections to
// run (a tile, b rows, r long odd rows, c bulk and old, d launch, e completion, f driver batch); none: all. See run.sh.
#include <cstring>

#include "latency.cuh"
#include "throughput.cuh"

int main(int argc, char** argv) {
  using namespace probe;
  const char* wanted = argc > 1 ? argv[1] : "dabrcef";
  const double start = now();
  int devices = 0;
  CK(cudaGetDeviceCount(&devices));
  cudaDeviceProp properties;
  CK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, %d SMs, L2 %d MiB, %d device(s)\n", properties.name, properties.multiProcessorCount,
              properties.l2CacheSize >> 20, devices);
  Memory m;
  if (devices > 1) {
    CK(cudaSetDevice(1));
    CK(cudaMalloc(&m.peer, kBytes));
    CK(cudaDeviceEnablePeerAccess(0, 0));
    CK(cudaSetDevice(0));
    CK(cudaDeviceEnablePeerAccess(1, 0));
  }
  CK(cudaSetDevice(0));
  CK(cudaStreamCreateWithFlags(&m.stream, cudaStreamNonBlocking));
  CK(cudaMalloc(&m.dev, kBytes));
  CK(cudaMalloc(&m.dev2, kBytes));
  CK(cudaHostAlloc((void**)&m.pin, kBytes, cudaHostAllocPortable | cudaHostAllocMapped));
  CK(cudaMalloc(&m.wrong, 8));
  std::memset(m.pin, 1, kBytes);
  ceilings(m);
  for (const char* section = wanted; *section != 0; ++section) {
    const double begin = now();
    switch (*section) {
      case 'a':
        tile_section(m);
        break;
      case 'b':
        word_section(m, false);
        break;
      case 'r':
        word_section(m, true);
        break;
      case 'c':
        bulk_section(m);
        break;
      case 'd':
        launch_section(m);
        break;
      case 'e':
        completion_section(m);
        break;
      case 'f':
        batch_section(m);
        break;
      default:
        std::printf("no section %c\n", *section);
    }
    std::printf("(section %c: %.1f s)\n", *section, now() - begin);
    std::fflush(stdout);
  }
  ceilings(m);
  std::printf("%s, %.1f s\n", failures == 0 ? "all copies were right" : "SOME COPIES WERE WRONG", now() - start);
  return failures == 0 ? 0 : 1;
}
