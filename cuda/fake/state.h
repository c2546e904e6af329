// What the whole simulated driver shares: settings, devices, contexts, the calling thread, and the checks at the door.
//
// Nothing here has a destructor that runs at exit: worker threads may still be busy when statics end.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api.h"

namespace kvferry::fake {

class Stream;

struct Settings {
  int devices;       // KVFERRY_FAKE_DEVICES
  int sm_count;      // KVFERRY_FAKE_SMS
  int version;       // KVFERRY_FAKE_VERSION, what cuDriverGetVersion says
  u64 memory;        // KVFERRY_FAKE_MEMORY_MB, bytes per device
  u64 poison_limit;  // KVFERRY_FAKE_POISON_MB, bytes poisoned at each end of a fresh allocation
  u32 jitter_us;     // KVFERRY_FAKE_JITTER_US
  u64 seed;          // KVFERRY_FAKE_SEED
  bool check;        // KVFERRY_FAKE_CHECK
  bool no_ipc;       // KVFERRY_FAKE_NO_IPC
  bool no_peer;      // KVFERRY_FAKE_NO_PEER
  u32 hold_ms;       // KVFERRY_FAKE_HOLD_MS, the longest a stream waits for a value
};
const Settings& settings();

// A primary context, the only kind there is. Never freed, so that a stale handle can be told from a good one.
struct Context {
  explicit Context(int ordinal) : device(ordinal) {}

  const int device;
  int retained = 0;                // under State::lock
  std::atomic<bool> alive{false};  // retained > 0
  std::atomic<int> error{0};       // the first asynchronous error; every later call gives it again
  std::atomic<u64> peers{0};       // bit d: this context may touch memory of device d

  // Guards the lists and makes the enqueueing of one operation with its cross-stream dependencies one step.
  std::mutex order;
  std::vector<std::shared_ptr<Stream>> streams;  // also destroyed ones that still have work
  std::shared_ptr<Stream> legacy;
};

struct State {
  std::mutex lock;
  std::vector<Context*> contexts;  // by device
};
State& state();

// Objects by handle. A handle is the object's address; one that was destroyed is no longer found.
template <class T>
class Handles {
 public:
  void* add(std::shared_ptr<T> object) {
    void* handle = object.get();
    std::unique_lock<std::shared_mutex> guard(lock_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  std::shared_ptr<T> find(void* handle) {
    std::shared_lock<std::shared_mutex> guard(lock_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(void* handle) {
    std::unique_lock<std::shared_mutex> guard(lock_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  template <class Predicate>
  void remove_if(Predicate predicate) {
    std::vector<std::shared_ptr<T>> dropped;  // destroyed without the lock
    std::unique_lock<std::shared_mutex> guard(lock_);
    for (auto at = objects_.begin(); at != objects_.end();) {
      if (predicate(*at->second)) {
        dropped.push_back(std::move(at->second));
        at = objects_.erase(at);
      } else {
        ++at;
      }
    }
    guard.unlock();
  }
  std::size_t size() {
    std::shared_lock<std::shared_mutex> guard(lock_);
    return objects_.size();
  }

 private:
  std::shared_mutex lock_;
  std::unordered_map<void*, std::shared_ptr<T>> objects_;
};

// One leaked instance of T for the process.
template <class T>
T& leaked() {
  static T* const instance = new T();  // zeroed
  return *instance;
}

// What belongs to a thread. Trivially destructible: driver calls come in from other destructors at exit.
struct Thread {
  static constexpr int kDepth = 64;
  Context* stack[kDepth];
  int depth;
  u32 capture_mode;
  bool in_callback;  // inside a host function, where driver calls are not permitted
  u64 id;            // 0 until asked for
};
Thread& thread();
u64 thread_id();

// The checks at the start of a call. `enter`: initialised, not a forked child, not in a host function.
// `current`: also that a context is current, alive and without an asynchronous error.
CUresult enter();
CUresult current(Context*& context);
CUresult current_even_if_failed(Context*& context);
// The context behind a handle; null if there is none.
Context* context_of(CUcontext handle);
// Keeps the first error of a context.
void fail(Context& context, CUresult error);

// Waits for all work submitted to the context so far; its error.
CUresult synchronize(Context& context);
// Drops what belongs to a context whose last reference is gone. In the files that own the objects.
void drop_streams(Context& context);
void drop_memory(Context& context);

#define KVF_TRY(expression)                                   \
  do {                                                        \
    const kvferry::fake::CUresult kvf_result_ = (expression); \
    if (kvf_result_ != 0) return kvf_result_;                 \
  } while (0)

#define KVF_ENTER() KVF_TRY(kvferry::fake::enter())
// Declares `name`, the current context in good health.
#define KVF_CURRENT(name)                 \
  kvferry::fake::Context* name = nullptr; \
  KVF_TRY(kvferry::fake::current(name))

}  // namespace kvferry::fake
