#include "stream.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <thread>

namespace kvferry::fake {
namespace {

u64& random_state() {
  static thread_local u64 value = 0;
  return value;
}

// Signals are for the threads of the program; only faults of our own code come here.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, number);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

u64 next_id() {
  static std::atomic<u64> ids{1};
  return ids.fetch_add(1);
}

}  // namespace

Handles<Stream>& streams() { return leaked<Handles<Stream>>(); }

void seed_random(u64 seed) { random_state() = (settings().seed * 0x9e3779b97f4a7c15 ^ seed * 0xbf58476d1ce4e5b9) | 1; }

u64 random_below(u64 bound) {
  u64& x = random_state();
  if (x == 0) seed_random(thread_id() + (u64(1) << 32));
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return bound == 0 ? 0 : (x >> 11) % bound;
}

void jitter() {
  const u32 most = settings().jitter_us;
  if (most == 0) return;
  const long nanoseconds = long(random_below(u64(most) * 1000));
  const timespec pause{nanoseconds / 1000000000, nanoseconds % 1000000000};
  nanosleep(&pause, nullptr);
}

bool Point::done() const { return stream == nullptr || stream->done(seq); }

void Point::wait() const {
  if (stream != nullptr) stream->wait(seq);
}

Stream::Stream(Context& context, u32 flags, int priority, bool legacy)
    : context_(context), flags_(flags), priority_(priority), legacy_(legacy), id_(next_id()) {}

std::shared_ptr<Stream> Stream::make(Context& context, u32 flags, int priority) {
  std::shared_ptr<Stream> stream(new Stream(context, flags, priority, false));
  std::lock_guard<std::mutex> guard(context.order);
  context.streams.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> Stream::make_legacy(Context& context) {
  std::shared_ptr<Stream> stream(new Stream(context, 0, 0, true));
  std::lock_guard<std::mutex> guard(context.order);
  context.streams.push_back(stream);
  return stream;
}

Point Stream::enqueue(Op op, std::vector<Point> after) {
  if (!legacy_ && !is_blocking()) return push(std::move(op), std::move(after));
  std::lock_guard<std::mutex> guard(context_.order);
  if (legacy_) {
    for (const auto& other : context_.streams) {
      if (!other->is_blocking()) continue;
      const u64 seq = other->submitted();
      if (!other->done(seq)) after.push_back({other, seq});
    }
  } else if (const auto& legacy = context_.legacy) {
    const u64 seq = legacy->submitted();
    if (seq > legacy_seen_ && !legacy->done(seq)) after.push_back({legacy, seq});
    legacy_seen_ = seq;
  }
  return push(std::move(op), std::move(after));
}

Point Stream::push(Op op, std::vector<Point> after) {
  std::unique_lock<std::mutex> guard(lock_);
  queue_.push_back({std::move(op), std::move(after)});
  const Point point{shared_from_this(), ++submitted_};
  if (!started_) {
    started_ = true;
    SignalsBlocked blocked;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  }
  guard.unlock();
  more_.notify_one();
  return point;
}

void Stream::work() {
  seed_random(id_);
  std::unique_lock<std::mutex> guard(lock_);
  for (;;) {
    more_.wait(guard, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) break;
    {
      Item item = std::move(queue_.front());
      queue_.pop_front();
      guard.unlock();
      run(item);
    }  // what the operation owned is let go of before it counts as done
    guard.lock();
    completed_ += 1;
    less_.notify_all();
  }
  guard.unlock();
  std::lock_guard<std::mutex> order(context_.order);
  auto& all = context_.streams;
  all.erase(std::remove(all.begin(), all.end(), shared_from_this()), all.end());
}

void Stream::run(Item& item) {
  for (const Point& point : item.after) point.wait();
  if (!item.op.run) return;
  jitter();
  if (!item.op.always && item.op.context->error.load() != 0) return;
  const CUresult result = item.op.run();
  if (result != CUDA_SUCCESS) fail(*item.op.context, result);
}

bool Stream::done(u64 seq) {
  std::lock_guard<std::mutex> guard(lock_);
  return completed_ >= seq;
}

void Stream::wait(u64 seq) {
  std::unique_lock<std::mutex> guard(lock_);
  less_.wait(guard, [&] { return completed_ >= seq; });
}

u64 Stream::submitted() {
  std::lock_guard<std::mutex> guard(lock_);
  return submitted_;
}

void Stream::close() {
  std::unique_lock<std::mutex> guard(lock_);
  closed_ = true;
  const bool idle = !started_;
  guard.unlock();
  more_.notify_one();
  if (!idle) return;
  std::lock_guard<std::mutex> order(context_.order);
  auto& all = context_.streams;
  all.erase(std::remove(all.begin(), all.end(), shared_from_this()), all.end());
}

CUresult synchronize(Context& context) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> guard(context.order);
    all = context.streams;
  }
  std::vector<Point> points;
  for (const auto& stream : all) points.push_back({stream, stream->submitted()});
  for (const Point& point : points) point.wait();
  return context.error.load();
}

}  // namespace kvferry::fake
