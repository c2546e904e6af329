// The kernels that modules of the simulated driver hold: the real bodies, compiled for the CPU.
#pragma once

#include "state.h"

namespace kvferry::fake {

struct LaunchShape {
  Context* context;
  u32 blocks;
  u32 threads;
  u32 shared_bytes;
};

struct Kernel {
  const char* name;
  std::size_t params_bytes;
  u32 most_threads;  // per block
  // Runs every thread of every block: one after the other, or by turns where they wait (grid.h). `params` is aligned to 16 bytes.
  CUresult (*run)(const LaunchShape& shape, const void* params);
};

// Null if there is no kernel of this name.
const Kernel* find_kernel(const char* name);

}  // namespace kvferry::fake
