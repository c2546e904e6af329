// Streams: a queue of operations and one thread that works it off.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <string>

#include "state.h"

namespace kvferry::fake {

struct Capture;
struct Node;

// One operation. `run` may be called many times (a captured operation is replayed), so it owns what it needs.
struct Op {
  Context* context;  // whose error it sets, and whose error stops it
  NodeType type;
  std::function<CUresult()> run;  // empty: only its place in the order counts
  bool always = false;            // runs also after the context has failed
};

// A place in a stream: everything up to and including operation `seq`.
struct Point {
  std::shared_ptr<Stream> stream;
  u64 seq = 0;

  bool done() const;
  void wait() const;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> make(Context& context, u32 flags, int priority);
  static std::shared_ptr<Stream> make_legacy(Context& context);

  Context& context() const { return context_; }
  u32 flags() const { return flags_; }
  int priority() const { return priority_; }
  u64 id() const { return id_; }
  bool is_legacy() const { return legacy_; }
  // Waits for, and is waited for by, the legacy stream.
  bool is_blocking() const { return !legacy_ && (flags_ & CU_STREAM_NON_BLOCKING) == 0; }

  // Puts an operation at the end, to run after `after` as well, and returns its place. Legacy order is seen to here.
  Point enqueue(Op op, std::vector<Point> after = {});
  bool done(u64 seq);
  void wait(u64 seq);
  u64 submitted();
  // No more operations come; the thread ends after the last one.
  void close();

  // Under captures().lock: the capture this stream takes part in, and the nodes its next operation depends on.
  std::shared_ptr<Capture> capture;
  std::vector<Node*> tail;

 private:
  struct Item {
    Op op;
    std::vector<Point> after;
  };

  Stream(Context& context, u32 flags, int priority, bool legacy);
  Point push(Op op, std::vector<Point> after);
  void work();
  void run(Item& item);

  Context& context_;
  const u32 flags_;
  const int priority_;
  const bool legacy_;
  const u64 id_;
  u64 legacy_seen_ = 0;  // under Context::order: the place in the legacy stream that we wait for already

  std::mutex lock_;
  std::condition_variable more_;
  std::condition_variable less_;
  std::deque<Item> queue_;
  u64 submitted_ = 0;
  u64 completed_ = 0;
  bool started_ = false;
  bool closed_ = false;
};

Handles<Stream>& streams();

// The stream behind a handle, its context in good health. Only 0 and the special handles need a current context.
CUresult resolve(CUstream handle, std::shared_ptr<Stream>& out);

// Random numbers of the calling worker thread; with jitter on, everybody's order is its business.
u64 random_below(u64 bound);
void seed_random(u64 seed);
// Sleeps for a random while, if KVFERRY_FAKE_JITTER_US says so.
void jitter();

}  // namespace kvferry::fake
