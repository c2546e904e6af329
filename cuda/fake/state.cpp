#include "state.h"

#include <pthread.h>

#include <cstdlib>

namespace kvferry::fake {
namespace {

u64 number(const char* name, u64 otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  return std::strtoull(text, nullptr, 10);
}

Settings read() {
  Settings s{};
  s.devices = int(number("KVFERRY_FAKE_DEVICES", 2));
  if (s.devices > 64) s.devices = 64;  // peers are a word of bits
  s.sm_count = int(number("KVFERRY_FAKE_SMS", 4));
  s.version = int(number("KVFERRY_FAKE_VERSION", 13000));
  s.memory = number("KVFERRY_FAKE_MEMORY_MB", 16 << 10) << 20;
  s.poison_limit = number("KVFERRY_FAKE_POISON_MB", 32) << 20;
  s.jitter_us = u32(number("KVFERRY_FAKE_JITTER_US", 0));
  s.seed = number("KVFERRY_FAKE_SEED", 1);
  s.check = number("KVFERRY_FAKE_CHECK", 0) != 0;
  s.no_ipc = number("KVFERRY_FAKE_NO_IPC", 0) != 0;
  s.no_peer = number("KVFERRY_FAKE_NO_PEER", 0) != 0;
  s.hold_ms = u32(number("KVFERRY_FAKE_HOLD_MS", 10000));
  return s;
}

std::atomic<bool> initialised{false};
std::atomic<bool> forked{false};

void mark_child() {
  if (initialised.load()) forked.store(true);
}

}  // namespace

const Settings& settings() {
  static const Settings* const s = new Settings(read());
  return *s;
}

State& state() { return leaked<State>(); }

Thread& thread() {
  static thread_local Thread t{};
  return t;
}

u64 thread_id() {
  static std::atomic<u64> next{1};
  Thread& t = thread();
  if (t.id == 0) t.id = next.fetch_add(1);
  return t.id;
}

CUresult enter() {
  if (!initialised.load(std::memory_order_acquire) || forked.load(std::memory_order_relaxed)) {
    return CUDA_ERROR_NOT_INITIALIZED;
  }
  return thread().in_callback ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

CUresult current_even_if_failed(Context*& context) {
  KVF_ENTER();
  const Thread& t = thread();
  context = t.depth == 0 ? nullptr : t.stack[t.depth - 1];
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return context->alive.load() ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult current(Context*& context) {
  KVF_TRY(current_even_if_failed(context));
  return context->error.load();
}

Context* context_of(CUcontext handle) {
  State& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  for (Context* context : s.contexts) {
    if (context == handle) return context;
  }
  return nullptr;
}

void fail(Context& context, CUresult error) {
  int none = 0;
  context.error.compare_exchange_strong(none, error);
}

}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (forked.load()) return CUDA_ERROR_NOT_INITIALIZED;
  if (settings().devices <= 0) return CUDA_ERROR_NO_DEVICE;
  State& s = state();
  std::lock_guard<std::mutex> guard(s.lock);
  if (initialised.load()) return CUDA_SUCCESS;
  for (int device = 0; device < settings().devices; ++device) s.contexts.push_back(new Context(device));
  pthread_atfork(nullptr, nullptr, mark_child);
  initialised.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

KVF_API cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = settings().version;
  return CUDA_SUCCESS;
}

KVF_API cuGetErrorName(CUresult error, const char** name) {
  if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (error) {
#define KVF_ERROR_NAME(symbol, value, text) \
  case value:                               \
    *name = #symbol;                        \
    return CUDA_SUCCESS;
    KVF_FAKE_ERRORS(KVF_ERROR_NAME)
#undef KVF_ERROR_NAME
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

KVF_API cuGetErrorString(CUresult error, const char** message) {
  if (message == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (error) {
#define KVF_ERROR_TEXT(symbol, value, text) \
  case value:                               \
    *message = text;                        \
    return CUDA_SUCCESS;
    KVF_FAKE_ERRORS(KVF_ERROR_TEXT)
#undef KVF_ERROR_TEXT
    default:
      *message = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}
