#include "driver.hpp"

namespace selftest {
namespace {

struct Bench {
  CUstream a = nullptr, b = nullptr, blocking = nullptr;
  CUevent event = nullptr, back = nullptr;
  CUdeviceptr memory = 0;
  unsigned char* host = nullptr;

  Bench() {
    OK(cu.cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamCreate(&blocking, 0));
    OK(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cu.cuEventCreate(&back, CU_EVENT_DISABLE_TIMING));
    OK(cu.cuMemAlloc_v2(&memory, 4096));
    void* pinned = nullptr;
    OK(cu.cuMemHostAlloc(&pinned, 4096, 3));
    host = static_cast<unsigned char*>(pinned);
    std::memset(host, 0, 4096);
  }
  ~Bench() {
    for (CUstream stream : {a, b, blocking}) OK(cu.cuStreamDestroy_v2(stream));
    for (CUevent e : {event, back}) OK(cu.cuEventDestroy_v2(e));
    OK(cu.cuMemFree_v2(memory));
    OK(cu.cuMemFreeHost(host));
  }
  CUdeviceptr pinned() const { return reinterpret_cast<CUdeviceptr>(host); }
};

std::atomic<int> destroyed{0};

void replay() {
  Bench s;
  OK(cu.cuStreamBeginCapture_v2(s.a, CAPTURE_THREAD_LOCAL));
  u32 status = 0;
  u64 id = 0;
  CUgraph graph = nullptr, ended = nullptr;
  OK(cu.cuStreamGetCaptureInfo_v2(s.a, &status, &id, &graph, nullptr, nullptr));
  HOLDS(status == CAPTURE_STATUS_ACTIVE && id != 0 && graph != nullptr);
  CUuserObject object = nullptr;
  OK(cu.cuUserObjectCreate(&object, &destroyed, [](void* at) { *static_cast<std::atomic<int>*>(at) += 1; }, 1, 1));
  OK(cu.cuGraphRetainUserObject(graph, object, 1, 1));
  OK(cu.cuMemcpyAsync(s.memory, s.pinned(), 64, s.a));
  OK(cu.cuEventRecord(s.event, s.a));
  OK(cu.cuStreamWaitEvent(s.b, s.event, 0));  // b joins
  OK(cu.cuMemcpyAsync(s.pinned() + 1024, s.memory, 64, s.b));
  OK(cu.cuMemsetD8Async(s.memory + 64, 5, 64, s.a));
  OK(cu.cuEventRecord(s.back, s.b));
  OK(cu.cuStreamWaitEvent(s.a, s.back, 0));
  OK(cu.cuStreamEndCapture(s.a, &ended));
  HOLDS(ended == graph);
  size_t nodes = 0;
  OK(cu.cuGraphGetNodes(graph, nullptr, &nodes));
  HOLDS(nodes == 3);
  OK(cu.cuStreamIsCapturing(s.b, &status));
  HOLDS(status == CAPTURE_STATUS_NONE);
  CUgraphExec exec = nullptr;
  OK(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
  OK(cu.cuGraphDestroy(graph));
  for (unsigned char value = 1; value < 20; ++value) {
    std::memset(s.host, value, 64);
    OK(cu.cuGraphLaunch(exec, s.a));
    OK(cu.cuStreamSynchronize(s.a));
    HOLDS(s.host[1024] == value && s.host[1024 + 63] == value);
  }
  // An event recorded in a capture that has ended.
  IS(cu.cuEventQuery(s.event), CUDA_ERROR_INVALID_VALUE);
  IS(cu.cuStreamWaitEvent(s.b, s.event, 0), CUDA_ERROR_INVALID_VALUE);
  HOLDS(destroyed == 0);
  Gate gate;
  gate.close(s.a);
  OK(cu.cuGraphLaunch(exec, s.a));
  OK(cu.cuGraphExecDestroy(exec));
  HOLDS(destroyed == 0);
  gate.open();
  OK(cu.cuStreamSynchronize(s.a));
  for (int i = 0; i < 1000 && destroyed == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  HOLDS(destroyed == 1);
}

// Runs `spoil` inside a capture of stream a in the mode, expects its answer, and that the capture is spoiled or not.
template <class Spoil>
void during(const char* what, u32 mode, CUresult answer, bool spoils, Spoil spoil, CUresult other_end = CUDA_SUCCESS) {
  Bench s;
  OK(cu.cuStreamBeginCapture_v2(s.a, mode));
  OK(cu.cuMemsetD8Async(s.memory, 1, 64, s.a));
  const CUresult got = spoil(s);
  expect(got == answer, __FILE__, __LINE__,
         std::string(what) + " gave " + name_of(got) + ", expected " + name_of(answer));
  CUgraph graph = nullptr;
  const CUresult end = cu.cuStreamEndCapture(s.a, &graph);
  const CUresult wanted = spoils ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : other_end;
  expect(end == wanted, __FILE__, __LINE__,
         std::string("end after ") + what + " gave " + name_of(end) + ", expected " + name_of(wanted));
  HOLDS((graph != nullptr) == (end == CUDA_SUCCESS));
  if (graph != nullptr) OK(cu.cuGraphDestroy(graph));
}

template <class Call>
CUresult elsewhere(u32 mode, Call call) {
  CUcontext context = nullptr;
  OK(cu.cuCtxGetCurrent(&context));
  CUresult result = 0;
  std::thread([&] {
    OK(cu.cuCtxSetCurrent(context));
    u32 before = mode;
    OK(cu.cuThreadExchangeStreamCaptureMode(&before));
    result = call();
  }).join();
  return result;
}

constexpr CUresult kUnsupported = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

CUresult allocate() {
  CUdeviceptr address = 0;
  const CUresult result = cu.cuMemAlloc_v2(&address, 64);
  if (result == 0) OK(cu.cuMemFree_v2(address));
  return result;
}

CUresult pin() {
  void* address = nullptr;
  const CUresult result = cu.cuMemHostAlloc(&address, 64, 3);
  if (result == 0) OK(cu.cuMemFreeHost(address));
  return result;
}

void unsafe_calls() {
  alignas(4096) static char page[4096];
  CUevent outside = nullptr;
  OK(cu.cuEventCreate(&outside, CU_EVENT_DISABLE_TIMING));
  const u32 g = CAPTURE_GLOBAL, r = CAPTURE_RELAXED, t = CAPTURE_THREAD_LOCAL;
  during("cuMemAlloc", g, kUnsupported, true, [](Bench&) { return allocate(); });
  during("cuMemAlloc, relaxed capture", r, CUDA_SUCCESS, false, [](Bench&) { return allocate(); });
  during("cuMemAlloc elsewhere", g, kUnsupported, true, [&](Bench&) { return elsewhere(g, allocate); });
  during("cuMemAlloc elsewhere, relaxed thread", g, CUDA_SUCCESS, false,
         [&](Bench&) { return elsewhere(r, allocate); });
  during("cuMemAlloc elsewhere, thread-local capture", t, CUDA_SUCCESS, false,
         [&](Bench&) { return elsewhere(g, allocate); });
  during("cuMemAlloc, thread-local capture", t, kUnsupported, true, [](Bench&) { return allocate(); });
  during("cuMemHostAlloc", g, kUnsupported, true, [](Bench&) { return pin(); });
  during("cuMemHostRegister", g, kUnsupported, true, [](Bench&) {
    const CUresult result = cu.cuMemHostRegister_v2(page, 4096, 3);
    if (result == 0) cu.cuMemHostUnregister(page);
    return result;
  });
  during("cuMemFree", g, kUnsupported, true, [](Bench& s) { return cu.cuMemFree_v2(s.memory); });
  during("cuMemcpyDtoH", g, CUDA_SUCCESS, false, [](Bench& s) { return cu.cuMemcpyDtoH_v2(s.host, s.memory, 4); });
  during("cuMemcpyDtoH, relaxed capture", r, CUDA_SUCCESS, false,
         [](Bench& s) { return cu.cuMemcpyDtoH_v2(s.host, s.memory, 4); });
  during("cuEventQuery", g, kUnsupported, true, [&](Bench&) { return cu.cuEventQuery(outside); });
  during("cuEventQuery elsewhere", g, kUnsupported, true,
         [&](Bench&) { return elsewhere(g, [&] { return cu.cuEventQuery(outside); }); });
  during("cuEventSynchronize", g, kUnsupported, true, [&](Bench&) { return cu.cuEventSynchronize(outside); });
  during("cuStreamQuery of another", g, kUnsupported, true, [](Bench& s) { return cu.cuStreamQuery(s.b); });
  during("cuStreamSynchronize of another", g, kUnsupported, true, [](Bench& s) { return cu.cuStreamSynchronize(s.b); });
  during("cuStreamSynchronize of another, relaxed", r, CUDA_SUCCESS, false,
         [](Bench& s) { return cu.cuStreamSynchronize(s.b); });
  during("cuStreamSynchronize", r, kUnsupported, true, [](Bench& s) { return cu.cuStreamSynchronize(s.a); });
  during("cuStreamQuery", r, kUnsupported, true, [](Bench& s) { return cu.cuStreamQuery(s.a); });
  during("cuCtxSynchronize", r, kUnsupported, true, [](Bench&) { return cu.cuCtxSynchronize(); });
  during("cuMemGetInfo", g, CUDA_SUCCESS, false, [](Bench&) {
    size_t x, y;
    return cu.cuMemGetInfo_v2(&x, &y);
  });
  during("cuEventCreate", g, CUDA_SUCCESS, false, [](Bench&) {
    CUevent event = nullptr;
    const CUresult result = cu.cuEventCreate(&event, 2);
    if (result == 0) OK(cu.cuEventDestroy_v2(event));
    return result;
  });
  during("cuStreamCreate", g, CUDA_SUCCESS, false, [](Bench&) {
    CUstream stream = nullptr;
    const CUresult result = cu.cuStreamCreate(&stream, 1);
    if (result == 0) OK(cu.cuStreamDestroy_v2(stream));
    return result;
  });
  during("cuMemsetD8Async on legacy", g, CUDA_SUCCESS, false,
         [](Bench& s) { return cu.cuMemsetD8Async(s.memory, 1, 4, nullptr); });
  during("cuMemsetD8", g, CUDA_SUCCESS, false, [](Bench& s) { return cu.cuMemsetD8_v2(s.memory, 1, 4); });
  OK(cu.cuEventDestroy_v2(outside));
}

void structure() {
  const u32 r = CAPTURE_RELAXED;
  during("waiting for an outside event", r, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, true, [](Bench& s) {
    OK(cu.cuEventRecord(s.event, s.b));
    return cu.cuStreamWaitEvent(s.a, s.event, 0);
  });
  during("waiting for an event never recorded", r, CUDA_SUCCESS, false,
         [](Bench& s) { return cu.cuStreamWaitEvent(s.a, s.event, 0); });
  during("querying a captured event", r, CUDA_ERROR_CAPTURED_EVENT, true, [](Bench& s) {
    OK(cu.cuEventRecord(s.event, s.a));
    return cu.cuEventQuery(s.event);
  });
  during("synchronizing a captured event", r, CUDA_ERROR_CAPTURED_EVENT, true, [](Bench& s) {
    OK(cu.cuEventRecord(s.event, s.a));
    return cu.cuEventSynchronize(s.event);
  });
  const auto fork = [](Bench& s) {
    OK(cu.cuEventRecord(s.event, s.a));
    OK(cu.cuStreamWaitEvent(s.b, s.event, 0));
    return cu.cuMemsetD8Async(s.memory, 1, 4, s.b);
  };
  during("a fork without a join", r, CUDA_SUCCESS, false, fork, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  during("ending in the forked stream", r, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, true, [&](Bench& s) {
    fork(s);
    CUgraph graph = nullptr;
    return cu.cuStreamEndCapture(s.b, &graph);
  });
  during("merging two captures", r, CUDA_ERROR_STREAM_CAPTURE_MERGE, true, [](Bench& s) {
    OK(cu.cuStreamBeginCapture_v2(s.b, CAPTURE_RELAXED));
    OK(cu.cuEventRecord(s.event, s.a));
    const CUresult result = cu.cuStreamWaitEvent(s.b, s.event, 0);
    CUgraph graph = nullptr;
    cu.cuStreamEndCapture(s.b, &graph);
    return result;
  });
  during("the batch call", r, kUnsupported, false, [](Bench& s) {
    CUdeviceptr dst = s.memory, src = s.pinned();
    size_t bytes = 64, start = 0;
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = SRC_ACCESS_STREAM;
    return cu.cuMemcpyBatchAsync_v2(&dst, &src, &bytes, 1, &attributes, &start, 1, s.a);
  });
  during(
      "ending from another thread", CAPTURE_GLOBAL, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, false,
      [](Bench& s) {
        return elsewhere(CAPTURE_GLOBAL, [&] {
          CUgraph graph = nullptr;
          return cu.cuStreamEndCapture(s.a, &graph);
        });
      },
      CUDA_ERROR_ILLEGAL_STATE);
  during(
      "destroying a stream", r, CUDA_SUCCESS, false,
      [](Bench& s) {
        OK(cu.cuStreamDestroy_v2(s.a));
        OK(cu.cuCtxSynchronize());
        return cu.cuStreamCreate(&s.a, CU_STREAM_NON_BLOCKING);
      },
      CUDA_ERROR_ILLEGAL_STATE);
  during("the legacy stream waiting", r, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, true, [](Bench& s) {
    OK(cu.cuEventRecord(s.event, s.a));
    return cu.cuStreamWaitEvent(nullptr, s.event, 0);
  });
  // A blocking stream in a capture forbids the legacy stream.
  Bench s;
  OK(cu.cuStreamBeginCapture_v2(s.blocking, r));
  u32 status = 0;
  IS(cu.cuStreamIsCapturing(nullptr, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  IS(cu.cuMemsetD8Async(s.memory, 1, 4, nullptr), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  IS(cu.cuMemsetD8Async(s.memory, 1, 4, s.blocking), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  OK(cu.cuStreamIsCapturing(s.blocking, &status));
  HOLDS(status == CAPTURE_STATUS_INVALIDATED);
  CUgraph graph = nullptr;
  IS(cu.cuStreamEndCapture(s.blocking, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  IS(cu.cuStreamEndCapture(s.blocking, &graph), CUDA_ERROR_ILLEGAL_STATE);
  IS(cu.cuStreamBeginCapture_v2(nullptr, r), kUnsupported);
}

}  // namespace

void capture_tests() {
  replay();
  unsafe_calls();
  structure();
}

}  // namespace selftest
