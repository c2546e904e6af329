#include "module.h"

#include <cstring>

#include "capture.h"

namespace kvferry::fake {
namespace {

Handles<Module>& modules() { return leaked<Handles<Module>>(); }
Handles<Function>& functions() { return leaked<Handles<Function>>(); }

constexpr int kMostShared = 232448;

struct alignas(16) Block {
  u8 bytes[16];
};

// Parameters as the caller passed them: pointers to each (ours have one), or one buffer.
CUresult read_params(const Kernel& kernel, void** params, void** extra, std::vector<Block>& out) {
  out.resize((kernel.params_bytes + 15) / 16);
  if (params != nullptr) {
    if (extra != nullptr || params[0] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(out.data(), params[0], kernel.params_bytes);
    return CUDA_SUCCESS;
  }
  if (extra == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const void* buffer = nullptr;
  std::size_t bytes = 0;
  // CU_LAUNCH_PARAM_END, _BUFFER_POINTER, _BUFFER_SIZE are 0, 1, 2; each of the latter two is followed by its value.
  for (void** at = extra; *at != nullptr; at += 2) {
    const auto which = reinterpret_cast<std::uintptr_t>(*at);
    if (which == 1) {
      buffer = at[1];
    } else if (which == 2) {
      bytes = *static_cast<const std::size_t*>(at[1]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (buffer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // A shorter buffer is legal; what it lacks is undefined.
  if (bytes > kernel.params_bytes) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  std::memset(out.data(), 0xa5, out.size() * sizeof(Block));
  std::memcpy(out.data(), buffer, bytes);
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction handle, const CUlaunchConfig& c, void** params, void** extra) {
  const auto function = functions().find(handle);
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(c.hStream, stream));
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  // A kernel runs where its module was loaded, on a stream of that context.
  if (function->context != &stream->context()) return CUDA_ERROR_INVALID_HANDLE;
  if (c.gridDimX == 0 || c.gridDimX > 0x7fffffff || c.gridDimY != 1 || c.gridDimZ != 1) return CUDA_ERROR_INVALID_VALUE;
  if (c.blockDimX == 0 || c.blockDimX > 1024 || c.blockDimY != 1 || c.blockDimZ != 1) return CUDA_ERROR_INVALID_VALUE;
  if (int(c.sharedMemBytes) > function->most_shared.load()) return CUDA_ERROR_INVALID_VALUE;
  const Kernel* const kernel = function->kernel;
  if (c.blockDimX > kernel->most_threads) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  auto copied = std::make_shared<std::vector<Block>>();
  KVF_TRY(read_params(*kernel, params, extra, *copied));
  const LaunchShape shape{function->context, c.gridDimX, c.blockDimX, c.sharedMemBytes};
  return submit(stream, {function->context, kKernelNode, [=] { return kernel->run(shape, copied->data()); }});
}

}  // namespace

void drop_modules(Context& context) {
  modules().remove_if([&](Module& module) { return module.context == &context; });
  functions().remove_if([&](Function& function) { return function.context == &context; });
}

}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuModuleLoadData(CUmodule* out, const void* image) {
  KVF_CURRENT(context);
  if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // Loading waits for the device, as it was seen to do, and is allowed during a capture.
  KVF_TRY(synchronize(*context));
  auto module = std::make_shared<Module>();
  module->context = context;
  *out = modules().add(module);
  return CUDA_SUCCESS;
}

KVF_API cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, void*, void**) {
  return cuModuleLoadData(out, image);
}

KVF_API cuModuleUnload(CUmodule handle) {
  KVF_ENTER();
  const auto module = modules().find(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  KVF_TRY(synchronize(*module->context));
  if (modules().remove(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::lock_guard<std::mutex> guard(module->lock);
  for (void* function : module->functions) functions().remove(function);
  return CUDA_SUCCESS;
}

KVF_API cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  KVF_CURRENT(context);
  (void)context;
  if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto module = modules().find(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const Kernel* const kernel = find_kernel(name);
  if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  auto function = std::make_shared<Function>();
  function->kernel = kernel;
  function->context = module->context;
  std::lock_guard<std::mutex> guard(module->lock);
  *out = functions().add(function);
  module->functions.push_back(*out);
  return CUDA_SUCCESS;
}

KVF_API cuFuncLoad(CUfunction handle) {
  KVF_CURRENT(context);
  (void)context;
  return functions().find(handle) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

KVF_API cuFuncSetAttribute(CUfunction handle, int which, int value) {
  KVF_CURRENT(context);
  (void)context;
  const auto function = functions().find(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (which == 9) return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;  // carveout
  if (which != 8 || value < 0 || value > kMostShared) return CUDA_ERROR_INVALID_VALUE;
  function->most_shared.store(value);
  return CUDA_SUCCESS;
}

KVF_API cuFuncGetAttribute(int* value, int which, CUfunction handle) {
  KVF_CURRENT(context);
  (void)context;
  const auto function = functions().find(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (value == nullptr || which < 0 || which > 15) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case 0:
      *value = int(function->kernel->most_threads);
      return CUDA_SUCCESS;
    case 4:
      *value = 32;  // registers
      return CUDA_SUCCESS;
    case 5:
    case 6:
      *value = 90;  // PTX and binary version
      return CUDA_SUCCESS;
    case 8:
      *value = function->most_shared.load();
      return CUDA_SUCCESS;
    default:
      *value = 0;
      return CUDA_SUCCESS;
  }
}

KVF_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, std::size_t) {
  KVF_CURRENT(context);
  (void)context;
  if (functions().find(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (blocks == nullptr || threads <= 0) return CUDA_ERROR_INVALID_VALUE;
  *blocks = threads > 1024 ? 0 : (2048 / threads > 32 ? 32 : 2048 / threads);
  return CUDA_SUCCESS;
}

KVF_API cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, CUstream on, void** params, void** extra) {
  return launch(function, {gx, gy, gz, bx, by, bz, shared, on, nullptr, 0}, params, extra);
}

// Attributes are hints here.
KVF_API cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  KVF_ENTER();
  return config == nullptr ? CUDA_ERROR_INVALID_VALUE : launch(function, *config, params, extra);
}

KVF_API cuLaunchHostFunc(CUstream on, CUhostFn call, void* argument) {
  if (call == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  const auto run = [call, argument] {
    thread().in_callback = true;
    call(argument);
    thread().in_callback = false;
    return CUDA_SUCCESS;
  };
  return submit(stream, {&stream->context(), kHostNode, run});
}
