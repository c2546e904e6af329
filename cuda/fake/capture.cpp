#include "capture.h"

#include <algorithm>
#include <unordered_set>

namespace kvferry::fake {
namespace {

// Whether the capture forbids unsafe calls to the calling thread (manual of cuThreadExchangeStreamCaptureMode).
bool forbids(const Capture& capture) {
  const u32 mode = thread().capture_mode;
  if (mode == CAPTURE_RELAXED) return false;
  if (capture.owner == thread_id() && capture.mode != CAPTURE_RELAXED) return true;
  return mode == CAPTURE_GLOBAL && capture.mode == CAPTURE_GLOBAL;
}

// Under captures().lock.
void end(const std::shared_ptr<Capture>& capture) {
  Captures& all = captures();
  capture->ended = true;
  for (const auto& stream : capture->streams) {
    if (stream->capture == capture) {
      stream->capture = nullptr;
      stream->tail.clear();
    }
  }
  all.active.erase(std::remove(all.active.begin(), all.active.end(), capture), all.active.end());
  all.count.store(int(all.active.size()));
}

// Whether all that other streams captured comes before what the origin ends with.
bool joined(const Capture& capture) {
  std::unordered_set<const Node*> reached;
  std::vector<const Node*> next(capture.origin->tail.begin(), capture.origin->tail.end());
  while (!next.empty()) {
    const Node* node = next.back();
    next.pop_back();
    if (!reached.insert(node).second) continue;
    next.insert(next.end(), node->after.begin(), node->after.end());
  }
  for (const auto& stream : capture.streams) {
    for (const Node* node : stream->tail) {
      if (reached.count(node) == 0) return false;
    }
  }
  return true;
}

}  // namespace

Captures& captures() { return leaked<Captures>(); }
Handles<Graph>& graphs() { return leaked<Handles<Graph>>(); }

Node* add_node(const std::shared_ptr<Stream>& stream, Op op) {
  auto node = std::make_unique<Node>();
  node->op = std::move(op);
  node->after = stream->tail;
  Node* const added = node.get();
  stream->capture->graph->nodes.push_back(std::move(node));
  stream->tail = {added};
  return added;
}

Capture* capture_of_blocking_stream(Context& context) {
  for (const auto& capture : captures().active) {
    for (const auto& stream : capture->streams) {
      if (&stream->context() == &context && stream->is_blocking()) return capture.get();
    }
  }
  return nullptr;
}

CUresult submit(const std::shared_ptr<Stream>& stream, Op op, Point* place) {
  Captures& all = captures();
  if (all.count.load() > 0) {
    std::lock_guard<std::mutex> guard(all.lock);
    if (stream->capture != nullptr) {
      if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      add_node(stream, std::move(op));
      if (place != nullptr) *place = Point{};
      return CUDA_SUCCESS;
    }
    Capture* const spoiled = stream->is_legacy() ? capture_of_blocking_stream(stream->context()) : nullptr;
    if (spoiled != nullptr) {
      spoiled->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  Point point = stream->enqueue(std::move(op));
  if (place != nullptr) *place = std::move(point);
  return CUDA_SUCCESS;
}

bool is_capturing(const std::shared_ptr<Stream>& stream) {
  Captures& all = captures();
  if (all.count.load() == 0) return false;
  std::lock_guard<std::mutex> guard(all.lock);
  return stream->capture != nullptr;
}

CUresult unsafe_call() {
  Captures& all = captures();
  if (all.count.load() == 0) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(all.lock);
  bool refused = false;
  for (const auto& capture : all.active) {
    if (!forbids(*capture)) continue;
    capture->invalidated = true;
    refused = true;
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult refuse_if_capturing(const std::shared_ptr<Stream>& stream) {
  Captures& all = captures();
  if (all.count.load() == 0) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(all.lock);
  if (stream->is_legacy()) {
    Capture* const spoiled = capture_of_blocking_stream(stream->context());
    if (spoiled == nullptr) return CUDA_SUCCESS;
    spoiled->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  stream->capture->invalidated = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

void forget_capture(const std::shared_ptr<Stream>& stream) {
  if (captures().count.load() == 0) return;
  std::lock_guard<std::mutex> guard(captures().lock);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return;
  capture->invalidated = true;
  if (capture->origin != stream) return;
  end(capture);
  graphs().remove(capture->graph.get());
}

CUresult refuse_synchronizing_captured(Context& context) {
  Captures& all = captures();
  if (all.count.load() == 0) return CUDA_SUCCESS;
  std::lock_guard<std::mutex> guard(all.lock);
  bool refused = false;
  for (const auto& capture : all.active) {
    for (const auto& stream : capture->streams) {
      if (&stream->context() != &context) continue;
      capture->invalidated = true;
      refused = true;
    }
  }
  return refused ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuThreadExchangeStreamCaptureMode(u32* mode) {
  KVF_ENTER();
  if (mode == nullptr || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::swap(*mode, thread().capture_mode);
  return CUDA_SUCCESS;
}

KVF_API cuStreamBeginCapture_v2(CUstream handle, u32 mode) {
  if (mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  if (stream->is_legacy()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  static std::atomic<u64> ids{1};
  Captures& all = captures();
  std::lock_guard<std::mutex> guard(all.lock);
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  auto capture = std::make_shared<Capture>();
  capture->id = ids.fetch_add(1);
  capture->mode = mode;
  capture->owner = thread_id();
  capture->origin = stream;
  capture->graph = std::make_shared<Graph>();
  capture->streams.push_back(stream);
  graphs().add(capture->graph);
  stream->capture = capture;
  stream->tail.clear();
  all.active.push_back(capture);
  all.count.store(int(all.active.size()));
  return CUDA_SUCCESS;
}

KVF_API cuStreamEndCapture(CUstream handle, CUgraph* out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  std::shared_ptr<Capture> capture;
  CUresult result = CUDA_SUCCESS;
  {
    std::lock_guard<std::mutex> guard(captures().lock);
    capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
      capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CAPTURE_RELAXED && capture->owner != thread_id()) {
      result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;  // and it is over all the same
    } else if (capture->invalidated) {
      result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!joined(*capture)) {
      result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    end(capture);
  }
  if (result != CUDA_SUCCESS) {
    graphs().remove(capture->graph.get());
    return result;
  }
  *out = capture->graph.get();
  return CUDA_SUCCESS;
}

KVF_API cuStreamIsCapturing(CUstream handle, u32* status) {
  if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  std::lock_guard<std::mutex> guard(captures().lock);
  if (stream->is_legacy() && capture_of_blocking_stream(stream->context()) != nullptr)
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *status = stream->capture == nullptr     ? CAPTURE_STATUS_NONE
            : stream->capture->invalidated ? CAPTURE_STATUS_INVALIDATED
                                           : CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetCaptureInfo_v2(CUstream handle, u32* status, u64* id, CUgraph* graph, const CUgraphNode** after,
                                  std::size_t* after_count) {
  KVF_TRY(cuStreamIsCapturing(handle, status));
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(handle, stream));
  std::lock_guard<std::mutex> guard(captures().lock);
  if (stream->capture == nullptr || stream->capture->invalidated) return CUDA_SUCCESS;
  if (id != nullptr) *id = stream->capture->id;
  if (graph != nullptr) *graph = stream->capture->graph.get();
  // Valid until the next call on the stream, as with the driver.
  if (after != nullptr) *after = reinterpret_cast<const CUgraphNode*>(stream->tail.data());
  if (after_count != nullptr) *after_count = stream->tail.size();
  return CUDA_SUCCESS;
}

KVF_API cuStreamGetCaptureInfo_v3(CUstream handle, u32* status, u64* id, CUgraph* graph, const CUgraphNode** after,
                                  const void** edges, std::size_t* after_count) {
  if (edges != nullptr) *edges = nullptr;
  return cuStreamGetCaptureInfo_v2(handle, status, id, graph, after, after_count);
}
