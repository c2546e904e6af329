// Modules and functions.
#pragma once

#include "kernels.h"

namespace kvferry::fake {

struct Function {
  const Kernel* kernel;
  Context* context;
  std::atomic<int> most_shared{48 << 10};  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
};

struct Module {
  Context* context;
  std::mutex lock;
  std::vector<void*> functions;  // handles given out
};

// Modules of the context and their functions are no longer valid.
void drop_modules(Context& context);

}  // namespace kvferry::fake
