// Primary contexts, the stack of current ones, and peer access.
#include "capture.h"
#include "module.h"
#include "state.h"
#include "stream.h"

using namespace kvferry::fake;

namespace {

Context* of_device(CUdevice device) {
  return device >= 0 && device < settings().devices ? state().contexts[std::size_t(device)] : nullptr;
}

// Everything that belonged to the context is gone, as when the driver destroys a primary context.
void destroy(Context& context) {
  synchronize(context);
  context.alive.store(false);
  drop_streams(context);
  drop_modules(context);
  drop_memory(context);
  context.peers.store(0);
  context.error.store(0);
}

}  // namespace

KVF_API cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  KVF_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* context = of_device(device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard<std::mutex> guard(state().lock);
  if (context->retained++ == 0) {
    context->legacy = Stream::make_legacy(*context);
    context->alive.store(true);
  }
  *out = context;
  return CUDA_SUCCESS;
}

KVF_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  KVF_ENTER();
  Context* context = of_device(device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard<std::mutex> guard(state().lock);
  if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--context->retained == 0) destroy(*context);
  return CUDA_SUCCESS;
}

KVF_API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  KVF_ENTER();
  Context* context = of_device(device);
  if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = 0;
  *active = context->alive.load();
  return CUDA_SUCCESS;
}

KVF_API cuCtxGetCurrent(CUcontext* out) {
  KVF_ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const Thread& t = thread();
  *out = t.depth == 0 ? nullptr : t.stack[t.depth - 1];
  return CUDA_SUCCESS;
}

KVF_API cuCtxSetCurrent(CUcontext handle) {
  KVF_ENTER();
  Thread& t = thread();
  if (handle == nullptr) {
    if (t.depth > 0) t.depth -= 1;
    return CUDA_SUCCESS;
  }
  Context* context = context_of(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive.load()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  if (t.depth == 0) t.depth = 1;
  t.stack[t.depth - 1] = context;
  return CUDA_SUCCESS;
}

KVF_API cuCtxPushCurrent_v2(CUcontext handle) {
  KVF_ENTER();
  Context* context = context_of(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive.load()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  Thread& t = thread();
  if (t.depth == Thread::kDepth) return CUDA_ERROR_INVALID_VALUE;
  t.stack[t.depth++] = context;
  return CUDA_SUCCESS;
}

KVF_API cuCtxPopCurrent_v2(CUcontext* out) {
  KVF_ENTER();
  Thread& t = thread();
  if (t.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  t.depth -= 1;
  if (out != nullptr) *out = t.stack[t.depth];
  return CUDA_SUCCESS;
}

KVF_API cuCtxGetDevice(CUdevice* device) {
  Context* context = nullptr;
  KVF_TRY(current_even_if_failed(context));
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = context->device;
  return CUDA_SUCCESS;
}

KVF_API cuCtxSynchronize() {
  KVF_CURRENT(context);
  KVF_TRY(refuse_synchronizing_captured(*context));
  KVF_TRY(unsafe_call());
  return synchronize(*context);
}

KVF_API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  KVF_CURRENT(context);
  (void)context;
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}

KVF_API cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
  KVF_CURRENT(context);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Context* peer = context_of(handle);
  if (peer == nullptr || !peer->alive.load() || peer == context) return CUDA_ERROR_INVALID_CONTEXT;
  if (settings().no_peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const u64 bit = u64(1) << peer->device;
  return (context->peers.fetch_or(bit) & bit) != 0 ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

KVF_API cuCtxDisablePeerAccess(CUcontext handle) {
  KVF_CURRENT(context);
  Context* peer = context_of(handle);
  if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const u64 bit = u64(1) << peer->device;
  return (context->peers.fetch_and(~bit) & bit) == 0 ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : CUDA_SUCCESS;
}
