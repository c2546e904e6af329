// cuStream*, and the streams that exist without being created.
#include <map>

#include "capture.h"

namespace kvferry::fake {
namespace {

// Per-thread default streams, by thread and context.
struct Defaults {
  std::mutex lock;
  std::map<std::pair<u64, Context*>, std::shared_ptr<Stream>> streams;
};

std::shared_ptr<Stream> per_thread(Context& context) {
  Defaults& defaults = leaked<Defaults>();
  std::lock_guard<std::mutex> guard(defaults.lock);
  auto& stream = defaults.streams[{thread_id(), &context}];
  if (stream == nullptr) stream = Stream::make(context, 0, 0);
  return stream;
}

}  // namespace

CUresult resolve(CUstream handle, std::shared_ptr<Stream>& out) {
  if (handle == nullptr || handle == kLegacyStream || handle == kPerThreadStream) {
    KVF_CURRENT(context);
    out = handle == kPerThreadStream ? per_thread(*context) : context->legacy;
    return CUDA_SUCCESS;
  }
  KVF_ENTER();
  out = streams().find(handle);
  return out == nullptr ? CUDA_ERROR_INVALID_HANDLE : out->context().error.load();
}

void drop_streams(Context& context) {
  Defaults& defaults = leaked<Defaults>();
  {
    std::lock_guard<std::mutex> guard(defaults.lock);
    for (auto at = defaults.streams.begin(); at != defaults.streams.end();) {
      at = at->first.second == &context ? defaults.streams.erase(at) : std::next(at);
    }
  }
  streams().remove_if([&](Stream& stream) { return &stream.context() == &context; });
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> guard(context.order);
    all = context.streams;
    context.legacy = nullptr;
  }
  for (const auto& stream : all) stream->close();
}

}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  KVF_CURRENT(context);
  if (out == nullptr || (flags & ~unsigned(CU_STREAM_NON_BLOCKING)) != 0) return CUDA_ERROR_INVALID_VALUE;
  const int clamped = priority > 0 ? 0 : (priority < -5 ? -5 : priority);
  *out = streams().add(Stream::make(*context, flags, clamped));
  return CUDA_SUCCESS;
}

KVF_API cuStreamCreate(CUstream* out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

KVF_API cuStreamDestroy_v2(CUstream handle) {
  KVF_ENTER();
  const auto stream = streams().remove(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  forget_capture(stream);
  // Work that is still queued runs.
  stream->close();
  return stream->context().error.load();
}

KVF_API cuStreamSynchronize(CUstream handle) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  KVF_TRY(refuse_if_capturing(stream));
  KVF_TRY(unsafe_call());
  if (stream->is_legacy()) {
    // Waiting for the legacy stream is waiting for what its next operation would wait for.
    stream->enqueue({&stream->context(), kEmptyNode, nullptr}).wait();
  } else {
    stream->wait(stream->submitted());
  }
  return stream->context().error.load();
}

KVF_API cuStreamQuery(CUstream handle) {
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  KVF_TRY(refuse_if_capturing(stream));
  KVF_TRY(unsafe_call());
  bool done = stream->done(stream->submitted());
  if (done && stream->is_legacy()) {
    std::lock_guard<std::mutex> guard(stream->context().order);
    for (const auto& other : stream->context().streams) {
      if (other->is_blocking() && !other->done(other->submitted())) done = false;
    }
  }
  const int error = stream->context().error.load();
  return error != 0 ? error : (done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

KVF_API cuStreamGetCtx(CUstream handle, CUcontext* out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  *out = &stream->context();
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetDevice(CUstream handle, CUdevice* device) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  *device = stream->context().device;
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetFlags(CUstream handle, unsigned* flags) {
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  *flags = stream->flags();
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetPriority(CUstream handle, int* priority) {
  if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  *priority = stream->priority();
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetId(CUstream handle, u64* id) {
  if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  *id = stream->id();
  return CUDA_SUCCESS;
}
