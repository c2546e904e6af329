#include "event.h"

#include <time.h>

#include <algorithm>

namespace kvferry::fake {

Handles<Event>& events() { return leaked<Handles<Event>>(); }

std::shared_ptr<Record> last_record(Event& event) {
  std::lock_guard<std::mutex> guard(event.lock);
  return event.last;
}

u64 now_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}

namespace {

// Events that belong to a capture can be neither asked about nor waited for by the host.
CUresult refuse_captured(Event& event) {
  std::lock_guard<std::mutex> captured(captures().lock);
  std::lock_guard<std::mutex> guard(event.lock);
  if (event.capture == nullptr) return CUDA_SUCCESS;
  if (event.capture->ended) return CUDA_ERROR_INVALID_VALUE;
  event.capture->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult check_host_use(CUevent handle, std::shared_ptr<Event>& event) {
  KVF_ENTER();
  event = events().find(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  KVF_TRY(refuse_captured(*event));
  KVF_TRY(unsafe_call());
  return event->context.error.load();
}

// The stream joins the event's capture, or depends on more of the one it is in. Under captures().lock.
CUresult wait_for_captured(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Capture>& capture,
                           const std::vector<Node*>& nodes) {
  if (capture->ended) return CUDA_ERROR_INVALID_VALUE;
  if (stream->is_legacy()) {
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (stream->capture != nullptr && stream->capture != capture) {
    stream->capture->invalidated = true;
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->capture == nullptr) {
    stream->capture = capture;
    stream->tail = nodes;
    if (std::find(capture->streams.begin(), capture->streams.end(), stream) == capture->streams.end()) {
      capture->streams.push_back(stream);
    }
    return CUDA_SUCCESS;
  }
  for (Node* node : nodes) {
    if (std::find(stream->tail.begin(), stream->tail.end(), node) == stream->tail.end()) stream->tail.push_back(node);
  }
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace kvferry::fake

using namespace kvferry::fake;

KVF_API cuEventCreate(CUevent* out, unsigned flags) {
  KVF_CURRENT(context);
  if (out == nullptr || (flags & ~7u) != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((flags & CU_EVENT_INTERPROCESS) != 0) {
    return (flags & CU_EVENT_DISABLE_TIMING) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
  }
  *out = events().add(std::make_shared<Event>(*context, flags));
  return CUDA_SUCCESS;
}

KVF_API cuEventDestroy_v2(CUevent handle) {
  KVF_ENTER();
  const auto event = events().remove(handle);
  return event == nullptr ? CUDA_ERROR_INVALID_HANDLE : event->context.error.load();
}

KVF_API cuEventRecordWithFlags(CUevent handle, CUstream on, unsigned flags) {
  if (flags > CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  const auto event = events().find(handle);
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  if (event == nullptr || &event->context != &stream->context()) return CUDA_ERROR_INVALID_HANDLE;
  if (captures().count.load() > 0) {
    std::lock_guard<std::mutex> captured(captures().lock);
    if (const auto capture = stream->capture) {
      if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      if (flags == CU_EVENT_RECORD_EXTERNAL) {
        add_node(stream, {&stream->context(), kEventRecordNode, nullptr})->event = event;
        return CUDA_SUCCESS;
      }
      std::lock_guard<std::mutex> guard(event->lock);
      event->last = nullptr;
      event->capture = capture;
      event->nodes = stream->tail;
      return CUDA_SUCCESS;
    }
  }
  if (flags == CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  const auto record = std::make_shared<Record>();
  const auto stamp = [record] {
    record->nanoseconds.store(now_nanoseconds());
    return CUDA_SUCCESS;
  };
  Point place;
  KVF_TRY(submit(stream, {&stream->context(), kEventRecordNode, stamp, true}, &place));
  record->place = place;
  std::lock_guard<std::mutex> guard(event->lock);
  event->last = record;
  event->capture = nullptr;
  event->nodes.clear();
  return CUDA_SUCCESS;
}

KVF_API cuEventRecord(CUevent handle, CUstream on) { return cuEventRecordWithFlags(handle, on, 0); }

KVF_API cuEventQuery(CUevent handle) {
  std::shared_ptr<Event> event;
  KVF_TRY(check_host_use(handle, event));
  const auto record = last_record(*event);
  if (record != nullptr && !record->place.done()) return CUDA_ERROR_NOT_READY;
  return event->context.error.load();
}

KVF_API cuEventSynchronize(CUevent handle) {
  std::shared_ptr<Event> event;
  KVF_TRY(check_host_use(handle, event));
  const auto record = last_record(*event);
  if (record != nullptr) record->place.wait();
  return event->context.error.load();
}

KVF_API cuEventElapsedTime_v2(float* milliseconds, CUevent first, CUevent second) {
  std::shared_ptr<Event> from, to;
  KVF_TRY(check_host_use(first, from));
  KVF_TRY(check_host_use(second, to));
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto a = last_record(*from), b = last_record(*to);
  const bool timed = ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING) == 0;
  if (a == nullptr || b == nullptr || !timed) return CUDA_ERROR_INVALID_HANDLE;
  if (!a->place.done() || !b->place.done()) return CUDA_ERROR_NOT_READY;
  *milliseconds = float(double(std::int64_t(b->nanoseconds.load() - a->nanoseconds.load())) / 1e6);
  return CUDA_SUCCESS;
}

KVF_API cuEventElapsedTime(float* milliseconds, CUevent first, CUevent second) {
  return cuEventElapsedTime_v2(milliseconds, first, second);
}

KVF_API cuStreamWaitEvent(CUstream on, CUevent handle, unsigned flags) {
  if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
  const auto event = events().find(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Stream> stream;
  KVF_TRY(resolve(on, stream));
  std::shared_ptr<Record> record;
  {
    std::lock_guard<std::mutex> captured(captures().lock);
    std::lock_guard<std::mutex> guard(event->lock);
    if (flags != CU_EVENT_WAIT_EXTERNAL && event->capture != nullptr) {
      return wait_for_captured(stream, event->capture, event->nodes);
    }
    if (const auto& capture = stream->capture) {
      if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
      if (flags == CU_EVENT_WAIT_EXTERNAL) {
        add_node(stream, {&stream->context(), kWaitEventNode, nullptr})->event = event;
        return CUDA_SUCCESS;
      }
      if (event->last == nullptr) return CUDA_SUCCESS;
      capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    record = event->last;
  }
  if (record == nullptr || record->place.done()) return CUDA_SUCCESS;
  stream->enqueue({&stream->context(), kWaitEventNode, nullptr}, {record->place});
  return CUDA_SUCCESS;
}
