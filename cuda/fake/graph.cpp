// Graphs: what a capture recorded, made executable, launched, and the objects it keeps alive.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>
#include <unordered_map>

#include "event.h"

namespace kvferry::fake {
namespace {

// Destructors of user objects run on a thread of the driver's, where driver calls are not permitted.
class Reaper {
 public:
  void post(UserObject* object) {
    std::unique_lock<std::mutex> guard(lock_);
    dead_.push_back(object);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    guard.unlock();
    more_.notify_one();
  }

 private:
  void work() {
    thread().in_callback = true;
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      more_.wait(guard, [&] { return !dead_.empty(); });
      UserObject* const object = dead_.front();
      dead_.pop_front();
      guard.unlock();
      object->destroy(object->object);
      delete object;
      guard.lock();
    }
  }

  std::mutex lock_;
  std::condition_variable more_;
  std::deque<UserObject*> dead_;
  bool started_ = false;
};

// An executable graph. Launches hold on to it, so it may be destroyed while they run.
struct Exec {
  Exec(std::shared_ptr<Graph> from, const Bag& kept) : graph(std::move(from)), bag(kept) {}

  const std::shared_ptr<Graph> graph;
  const Bag bag;
  std::mutex lock;
  Point last;  // launches of one executable graph do not overlap
};

Handles<Exec>& execs() { return leaked<Handles<Exec>>(); }

// The objects by handle: a released one is not found, unless a graph still holds it.
struct UserObjects {
  std::mutex lock;
  std::unordered_map<void*, u64> ours;  // references held by the caller
};

// Runs the nodes in a random order that respects their dependencies.
CUresult replay(const Graph& graph) {
  std::unordered_map<const Node*, u32> waiting;
  std::unordered_map<const Node*, std::vector<const Node*>> next;
  std::vector<const Node*> ready;
  for (const auto& node : graph.nodes) {
    waiting[node.get()] = u32(node->after.size());
    for (const Node* before : node->after) next[before].push_back(node.get());
    if (node->after.empty()) ready.push_back(node.get());
  }
  while (!ready.empty()) {
    std::swap(ready[random_below(ready.size())], ready.back());
    const Node* const node = ready.back();
    ready.pop_back();
    const Op& op = node->op;
    if (op.run && (op.always || op.context->error.load() == 0)) {
      jitter();
      const CUresult result = op.run();
      if (result != CUDA_SUCCESS) {
        fail(*op.context, result);
        return result;
      }
    }
    for (const Node* after : next[node]) {
      if (--waiting[after] == 0) ready.push_back(after);
    }
  }
  return CUDA_SUCCESS;
}

// External events count when the whole launch is done: later than a real graph may do it, never earlier.
Point launch_place(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Exec>& exec) {
  std::vector<Point> after;
  for (const auto& node : exec->graph->nodes) {
    if (node->op.type != kWaitEventNode || node->event == nullptr) continue;
    if (const auto record = last_record(*node->event)) after.push_back(record->place);
  }
  if (exec->last.stream != nullptr) after.push_back(exec->last);
  const auto run = [exec] { return replay(*exec->graph); };
  const Point place = stream->enqueue({&stream->context(), kGraphNode, run}, std::move(after));
  for (const auto& node : exec->graph->nodes) {
    if (node->op.type != kEventRecordNode || node->event == nullptr) continue;
    auto record = std::make_shared<Record>();
    record->place = place;
    record->nanoseconds.store(now_nanoseconds());
    std::lock_guard<std::mutex> guard(node->event->lock);
    node->event->last = record;
    node->event->capture = nullptr;
  }
  return place;
}

}  // namespace

Bag::Bag(const Bag& other) : held_(other.held_) {
  for (const auto& entry : held_) retain(entry.first, entry.second);
}

Bag::~Bag() { clear(); }

void Bag::clear() {
  for (const auto& entry : held_) release(entry.first, entry.second);
  held_.clear();
}

void Bag::keep(UserObject* object, u64 references) { held_.emplace_back(object, references); }

bool Bag::let_go(UserObject* object, u64 references) {
  u64 held = 0;
  for (const auto& entry : held_) held += entry.first == object ? entry.second : 0;
  if (held < references) return false;
  held_.erase(std::remove_if(held_.begin(), held_.end(), [&](const auto& entry) { return entry.first == object; }),
              held_.end());
  if (held > references) held_.emplace_back(object, held - references);
  release(object, references);
  return true;
}

void Bag::retain(UserObject* object, u64 references) { object->references.fetch_add(references); }

void Bag::release(UserObject* object, u64 references) {
  if (object->references.fetch_sub(references) == references) leaked<Reaper>().post(object);
}

}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle, unsigned long long flags) {
  KVF_CURRENT(context);
  (void)context;
  const auto graph = graphs().find(handle);
  if (out == nullptr || graph == nullptr || (flags & ~15ull) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(graph->lock);
  *out = execs().add(std::make_shared<Exec>(graph, graph->bag));
  return CUDA_SUCCESS;
}

KVF_API cuGraphLaunch(CUgraphExec handle, CUstream on) {
  const auto exec = execs().find(handle);
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (is_capturing(stream)) {
    return submit(stream, {&stream->context(), kGraphNode, [exec] { return replay(*exec->graph); }});
  }
  if (stream->is_legacy()) KVF_TRY(refuse_if_capturing(stream));
  std::lock_guard<std::mutex> guard(exec->lock);
  exec->last = launch_place(stream, exec);
  return CUDA_SUCCESS;
}

KVF_API cuGraphUpload(CUgraphExec handle, CUstream) {
  KVF_ENTER();
  return execs().find(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

KVF_API cuGraphExecDestroy(CUgraphExec handle) {
  KVF_ENTER();
  return execs().remove(handle) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

KVF_API cuGraphDestroy(CUgraph handle) {
  KVF_ENTER();
  const auto graph = graphs().remove(handle);
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  // Executable graphs share the nodes but hold references of their own.
  std::lock_guard<std::mutex> guard(graph->lock);
  graph->bag.clear();
  return CUDA_SUCCESS;
}

KVF_API cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, std::size_t* count) {
  KVF_ENTER();
  const auto graph = graphs().find(handle);
  if (graph == nullptr || count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t all = graph->nodes.size();
  if (nodes != nullptr) {
    for (std::size_t i = 0; i < *count; ++i) nodes[i] = i < all ? graph->nodes[i].get() : nullptr;
    *count = std::min(*count, all);
  } else {
    *count = all;
  }
  return CUDA_SUCCESS;
}

KVF_API cuGraphNodeGetType(CUgraphNode node, u32* type) {
  KVF_ENTER();
  if (node == nullptr || type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *type = static_cast<const Node*>(node)->op.type;
  return CUDA_SUCCESS;
}

KVF_API cuUserObjectCreate(CUuserObject* out, void* object, CUhostFn destroy, unsigned references, unsigned flags) {
  KVF_ENTER();
  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is required.
  if (out == nullptr || destroy == nullptr || references == 0 || references > 0x7fffffff || flags != 1) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto* const created = new UserObject{object, destroy, {references}};
  UserObjects& all = leaked<UserObjects>();
  std::lock_guard<std::mutex> guard(all.lock);
  all.ours[created] = references;
  *out = created;
  return CUDA_SUCCESS;
}

KVF_API cuUserObjectRetain(CUuserObject handle, unsigned count) {
  KVF_ENTER();
  UserObjects& all = leaked<UserObjects>();
  std::lock_guard<std::mutex> guard(all.lock);
  const auto found = all.ours.find(handle);
  if (found == all.ours.end() || count == 0) return CUDA_ERROR_INVALID_VALUE;
  found->second += count;
  Bag::retain(static_cast<UserObject*>(handle), count);
  return CUDA_SUCCESS;
}

KVF_API cuUserObjectRelease(CUuserObject handle, unsigned count) {
  KVF_ENTER();
  UserObjects& all = leaked<UserObjects>();
  std::lock_guard<std::mutex> guard(all.lock);
  const auto found = all.ours.find(handle);
  if (found == all.ours.end() || count == 0 || found->second < count) return CUDA_ERROR_INVALID_VALUE;
  found->second -= count;
  if (found->second == 0) all.ours.erase(found);
  Bag::release(static_cast<UserObject*>(handle), count);
  return CUDA_SUCCESS;
}

KVF_API cuGraphRetainUserObject(CUgraph handle, CUuserObject object, unsigned count, unsigned flags) {
  KVF_ENTER();
  const auto graph = graphs().find(handle);
  UserObjects& all = leaked<UserObjects>();
  std::lock_guard<std::mutex> guard(all.lock);
  const auto found = all.ours.find(object);
  if (graph == nullptr || found == all.ours.end() || count == 0 || flags > 1) return CUDA_ERROR_INVALID_VALUE;
  auto* const kept = static_cast<UserObject*>(object);
  if (flags == 1) {  // CU_GRAPH_USER_OBJECT_MOVE: the caller's references become the graph's
    if (found->second < count) return CUDA_ERROR_INVALID_VALUE;
    found->second -= count;
    if (found->second == 0) all.ours.erase(found);
  } else {
    Bag::retain(kept, count);
  }
  std::lock_guard<std::mutex> held(graph->lock);
  graph->bag.keep(kept, count);
  return CUDA_SUCCESS;
}

KVF_API cuGraphReleaseUserObject(CUgraph handle, CUuserObject object, unsigned count) {
  KVF_ENTER();
  const auto graph = graphs().find(handle);
  if (graph == nullptr || object == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> held(graph->lock);
  return graph->bag.let_go(static_cast<UserObject*>(object), count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
