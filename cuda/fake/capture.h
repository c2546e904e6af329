// Stream capture: operations become nodes of a graph instead of running.
#pragma once

#include "stream.h"

namespace kvferry::fake {

struct Event;

// An object whose destructor runs, on a thread of the driver's, when the last reference is gone.
struct UserObject {
  void* object;
  CUhostFn destroy;
  std::atomic<u64> references;
};

// References to user objects held by a graph or an executable graph.
class Bag {
 public:
  Bag() = default;
  Bag(const Bag& other);
  Bag& operator=(const Bag&) = delete;
  ~Bag();
  void keep(UserObject* object, u64 references);    // takes them over
  bool let_go(UserObject* object, u64 references);  // false: it does not hold so many
  void clear();
  static void retain(UserObject* object, u64 references);
  static void release(UserObject* object, u64 references);

 private:
  std::vector<std::pair<UserObject*, u64>> held_;
};

struct Node {
  Op op;
  std::vector<Node*> after;
  std::shared_ptr<Event> event;  // of external records and waits
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  std::mutex lock;  // guards the bag
  Bag bag;
};

struct Capture {
  u64 id;
  u32 mode;
  u64 owner;  // thread that began it
  std::shared_ptr<Stream> origin;
  bool ended = false;
  bool invalidated = false;
  std::shared_ptr<Graph> graph;
  std::vector<std::shared_ptr<Stream>> streams;  // the origin and those that joined
};

struct Captures {
  std::mutex lock;
  std::vector<std::shared_ptr<Capture>> active;
  std::atomic<int> count{0};  // size of `active`, readable without the lock
};
Captures& captures();

// Hands an operation to a stream, or to the graph that the stream is being captured into. `place` is where it went; its
// stream is null if it was captured.
CUresult submit(const std::shared_ptr<Stream>& stream, Op op, Point* place = nullptr);
bool is_capturing(const std::shared_ptr<Stream>& stream);
// A node without an operation of its own; under captures().lock, the stream in an active capture.
Node* add_node(const std::shared_ptr<Stream>& stream, Op op);

// "Potentially unsafe" calls are refused while a capture forbids them to this thread, and spoil that capture.
CUresult unsafe_call();
// For calls that ask about a stream or its context: work that is being captured can be neither waited for nor asked
// about.
CUresult refuse_if_capturing(const std::shared_ptr<Stream>& stream);
CUresult refuse_synchronizing_captured(Context& context);
// The stream is going away: a capture it began ends, one it joined is spoiled.
void forget_capture(const std::shared_ptr<Stream>& stream);
// The legacy stream may not be used while a blocking stream of its context is captured. Under captures().lock.
Capture* capture_of_blocking_stream(Context& context);

Handles<Graph>& graphs();

}  // namespace kvferry::fake
