// Kernels that wait: two ranks exchange halves, each on a stream of its own device.
#include <chrono>

#include "driver.hpp"

#include "kvferry/exchange.cuh"

namespace selftest {
namespace {

using namespace kvferry;

constexpr u32 kHalf = 3000;  // bytes
constexpr u32 kThreads = 32, kBlocks = 3;
constexpr u64 kPlace = 256;
constexpr u64 kPool = kPlace + 2 * kHalf;

Divisor divisor(u32 count) {
  u32 shift = 0;
  while ((u64(1) << shift) < count) ++shift;
  return {count, u32(((u64(1) << (31 + shift)) + count - 1) / count), shift, 0};
}

struct Rank {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUdeviceptr control = 0, state = 0, input = 0;
  ExchangeHostPage* page = nullptr;
  std::vector<unsigned char> data = std::vector<unsigned char>(2 * kHalf);
};

struct Pair {
  Rank rank[2];

  Pair() {
    for (int r = 0; r < 2; ++r) {
      Rank& me = rank[r];
      OK(cu.cuDevicePrimaryCtxRetain(&me.context, r));
      OK(cu.cuCtxSetCurrent(me.context));
      OK(cu.cuStreamCreate(&me.stream, CU_STREAM_NON_BLOCKING));
      OK(cu.cuModuleLoadData(&me.module, "any bytes"));
      OK(cu.cuModuleGetFunction(&me.function, me.module, "exchange"));
      OK(cu.cuMemAlloc_v2(&me.control, kControlBytes + kPool));
      OK(cu.cuMemAlloc_v2(&me.state, sizeof(ExchangeState)));
      OK(cu.cuMemAlloc_v2(&me.input, 2 * kHalf));
      OK(cu.cuMemsetD8_v2(me.control, 0, kControlBytes));
      OK(cu.cuMemsetD8_v2(me.state, 0, sizeof(ExchangeState)));
      void* page = nullptr;
      OK(cu.cuMemHostAlloc(&page, sizeof(ExchangeHostPage), 3));
      me.page = static_cast<ExchangeHostPage*>(page);
      *me.page = {};
      me.page->timeout_ns = 20000000000;
      for (size_t i = 0; i < me.data.size(); ++i) me.data[i] = static_cast<unsigned char>((i * 2 + r) * 2654435761u >> 9);
      OK(cu.cuMemcpyHtoD_v2(me.input, me.data.data(), me.data.size()));
      OK(cu.cuCtxSynchronize());  // the streams are not ordered with the default one
    }
    for (int r = 0; r < 2; ++r) {
      OK(cu.cuCtxSetCurrent(rank[r].context));
      const CUresult enabled = cu.cuCtxEnablePeerAccess(rank[1 - r].context, 0);
      HOLDS(enabled == CUDA_SUCCESS || enabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    }
  }
  ~Pair() {
    for (int r = 0; r < 2; ++r) {
      Rank& me = rank[r];
      OK(cu.cuCtxSetCurrent(me.context));
      OK(cu.cuStreamDestroy_v2(me.stream));
      OK(cu.cuModuleUnload(me.module));
      for (CUdeviceptr memory : {me.control, me.state, me.input}) OK(cu.cuMemFree_v2(memory));
      OK(cu.cuMemFreeHost(me.page));
      OK(cu.cuDevicePrimaryCtxRelease_v2(r));
    }
    OK(cu.cuCtxSetCurrent(rank[0].context));  // the whole self-test holds it
  }

  ExchangeSmall params(u32 me) const {
    ExchangeSmall p{};
    p.header = {rank[me].state, reinterpret_cast<u64>(rank[me].page), kPlace, 2 * kHalf, 99, 0, 1, me, 2, 63, 0, 0};
    for (u32 step = 0; step < 2; ++step) {
      const u32 t = (me + step) % 2;
      const u32 words = kHalf / 8;
      ExchangePeer& peer = p.peer[t];
      peer = {rank[t].control, rank[t].control + kControlBytes, kPool, 2 * kHalf, t == me ? 0u : 2u, 2, 0, t, 1, 0};
      peer.first_lane = p.header.lanes;
      p.header.lanes += peer.lanes;
      peer.chunks = (words + 4 * kThreads - 1) / (4 * kThreads);
      p.item[t] = {rank[me].input + t * kHalf, me * kHalf, words, 0, 3, 0, divisor(words), {}};
    }
    return p;
  }
  void launch(u32 me, ExchangeSmall p) const {
    OK(cu.cuCtxSetCurrent(rank[me].context));
    void* pointers[] = {&p};
    OK(cu.cuLaunchKernel(rank[me].function, kBlocks, 1, 1, kThreads, 1, 1, 512, rank[me].stream, pointers, nullptr));
  }
  void wait() const {
    for (const Rank& me : rank) OK(cu.cuStreamSynchronize(me.stream));
  }
  std::vector<unsigned char> result(u32 me) const {
    std::vector<unsigned char> out(2 * kHalf);
    OK(cu.cuCtxSetCurrent(rank[me].context));
    OK(cu.cuMemcpyDtoH_v2(out.data(), rank[me].control + kControlBytes + kPlace, out.size()));
    return out;
  }
  bool right(u32 me) const {
    const auto out = result(me);
    for (u32 from = 0; from < 2; ++from) {
      if (std::memcmp(&out[from * kHalf], &rank[from].data[me * kHalf], kHalf) != 0) return false;
    }
    return true;
  }
};

}  // namespace

void exchange_tests() {
  {
    Pair pair;
    // More calls than one, enqueued at once; then captured ones, the two ranks in unlike graphs.
    for (int call = 0; call < 5; ++call) {
      for (u32 r = 0; r < 2; ++r) pair.launch(r, pair.params(r));
    }
    pair.wait();
    HOLDS(pair.right(0) && pair.right(1));
    CUgraphExec execs[2] = {};
    for (u32 r = 0; r < 2; ++r) {
      const Rank& me = pair.rank[r];
      OK(cu.cuCtxSetCurrent(me.context));
      OK(cu.cuMemsetD8_v2(me.control + kControlBytes, 0, kPool));
      OK(cu.cuCtxSynchronize());
      OK(cu.cuStreamBeginCapture_v2(me.stream, CAPTURE_RELAXED));
      for (u32 call = 0; call < 3 - r; ++call) pair.launch(r, pair.params(r));
      CUgraph graph = nullptr;
      OK(cu.cuStreamEndCapture(me.stream, &graph));
      OK(cu.cuGraphInstantiateWithFlags(&execs[r], graph, 0));
      OK(cu.cuGraphDestroy(graph));
    }
    for (u32 r = 0; r < 2; ++r) {
      OK(cu.cuCtxSetCurrent(pair.rank[r].context));
      for (u32 replay = 0; replay < 2 + r; ++replay) OK(cu.cuGraphLaunch(execs[r], pair.rank[r].stream));
    }
    pair.wait();
    HOLDS(pair.right(0) && pair.right(1));
    for (u32 r = 0; r < 2; ++r) {
      ExchangeState state;
      OK(cu.cuCtxSetCurrent(pair.rank[r].context));
      OK(cu.cuMemcpyDtoH_v2(&state, pair.rank[r].state, sizeof state));
      HOLDS(state.epoch == 11 && state.ticket == 0 && state.poison == 0);
      OK(cu.cuGraphExecDestroy(execs[r]));
    }
  }
  {
    // The peer does not come: the host ends the wait.
    Pair pair;
    pair.launch(0, pair.params(0));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    IS(cu.cuStreamQuery(pair.rank[0].stream), CUDA_ERROR_NOT_READY);
    __atomic_store_n(&pair.rank[0].page->abort, 5, __ATOMIC_RELEASE);
    OK(cu.cuStreamSynchronize(pair.rank[0].stream));
    HOLDS(pair.rank[0].page->record.state == 1 && pair.rank[0].page->record.kind == kAborted);
    for (unsigned char byte : pair.result(0)) {
      if (byte != 0xff) return HOLDS(byte == 0xff);
    }
  }
  {
    Pair pair;
    OK(cu.cuCtxSetCurrent(pair.rank[0].context));
    auto p = pair.params(0);
    void* pointers[] = {&p};
    IS(cu.cuLaunchKernel(pair.rank[0].function, 1, 1, 1, 65, 1, 1, 512, pair.rank[0].stream, pointers, nullptr),
       CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  }
}

}  // namespace selftest
