// The C interface through which the Rust tests run kernel bodies on the host.
#include <cstring>

#include "kvferry/exchange.cuh"
#include "kvferry/strided_copy.cuh"
#include "schedule.hpp"
#include "selftest.hpp"
#include "world.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

using namespace kvferry;

namespace {

enum Status : int { kRan, kUnknownBody, kWrongParams, kBadLaunch };

template <class Params, class Fn>
int run(Fn body, const void* params, u64 params_bytes, const host::Launch& launch, host::Monitor& monitor) {
  if (params_bytes != sizeof(Params)) return kWrongParams;
  Params p;
  std::memcpy(&p, params, sizeof p);
  const host::Body bound = [&](host::HostCx& cx) { body(cx, p); };
  if (launch.mode == host::kFibers) {
    host::run_fibers(launch, monitor, bound);
  } else {
    host::run_loops(launch, monitor, bound);
  }
  return kRan;
}

}  // namespace

// X(name, body, params, most threads per CTA)
#define KVF_SELFTEST_BODIES(X)                                                                                        \
  X(transpose, (selftest::transpose<true, true, host::HostCx>), selftest::TransposeParams, 64)                       \
  X(transpose_unfilled, (selftest::transpose<false, true, host::HostCx>), selftest::TransposeParams, 64)             \
  X(transpose_undrained, (selftest::transpose<true, false, host::HostCx>), selftest::TransposeParams, 64)            \
  X(diverged_barrier, selftest::diverged_barrier, selftest::TransposeParams, 64)                                     \
  X(handoff, selftest::handoff, selftest::HandoffParams, 64)                                                         \
  X(copy_misaligned, selftest::broken_copy<selftest::Broken::kMisaligned>, VectorizedCopyParams, 1024)               \
  X(copy_cta_alignment, selftest::broken_copy<selftest::Broken::kCtaAlignment>, VectorizedCopyParams, 1024)          \
  X(copy_double_store, selftest::broken_copy<selftest::Broken::kDoubleStore>, VectorizedCopyParams, 1024)            \
  X(copy_overrun, selftest::broken_copy<selftest::Broken::kOverrun>, VectorizedCopyParams, 1024)                     \
  X(copy_peek, selftest::broken_copy<selftest::Broken::kPeek>, VectorizedCopyParams, 1024)                           \
  X(copy_gap, selftest::broken_copy<selftest::Broken::kGap>, VectorizedCopyParams, 1024)

extern "C" {

int kvf_host_run(const char* name, const void* params, u64 params_bytes, const host::Launch* launch,
                 const host::Region* regions, u64 region_count, host::Report* report) {
  if (launch->nthreads == 0 || launch->resident == 0) return kBadLaunch;
  host::Monitor monitor(regions, region_count, launch->enforce != 0, report);
#define KVF_DISPATCH(symbol, body, Params, threads)                                                       \
  if (std::strcmp(name, #symbol) == 0) {                                                                  \
    if (launch->nthreads > threads) return kBadLaunch;                                                    \
    const auto bound = [](host::HostCx& cx, const Params& p) { body(cx, p); };                            \
    return run<Params>(bound, params, params_bytes, *launch, monitor);                                    \
  }
  KVF_VECTORIZED_COPY_KERNELS(KVF_DISPATCH)
  KVF_STRIDED_COPY_KERNELS(KVF_DISPATCH)
  KVF_SELFTEST_BODIES(KVF_DISPATCH)
#undef KVF_DISPATCH
  return kUnknownBody;
}

// Offset of a field in a parameter struct, the size for "sizeof", the alignment for "alignof", ~0 if there is no such.
u64 kvf_host_layout(const char* type, const char* field) {
  if (std::strcmp(field, "sizeof") == 0) {
    if (std::strcmp(type, "Launch") == 0) return sizeof(host::Launch);
    if (std::strcmp(type, "Region") == 0) return sizeof(host::Region);
    if (std::strcmp(type, "Report") == 0) return sizeof(host::Report);
    if (std::strcmp(type, "WorldOp") == 0) return sizeof(host::WorldOp);
    if (std::strcmp(type, "WorldRank") == 0) return sizeof(host::WorldRank);
    if (std::strcmp(type, "WorldRun") == 0) return sizeof(host::WorldRun);
  }
#define KVF_OFFSET(name, offset) \
  if (std::strcmp(field, #name) == 0) return offsetof(Struct, name);
#define KVF_LAYOUT(name, FIELDS)                                       \
  if (std::strcmp(type, #name) == 0) {                                 \
    using Struct = name;                                               \
    if (std::strcmp(field, "sizeof") == 0) return sizeof(Struct);      \
    if (std::strcmp(field, "alignof") == 0) return alignof(Struct);    \
    FIELDS(KVF_OFFSET)                                                 \
  }
  KVF_LAYOUT(VectorizedCopyParams, KVF_VECTORIZED_COPY_FIELDS)
  KVF_LAYOUT(Divisor, KVF_DIVISOR_FIELDS)
  KVF_LAYOUT(StridedLoopParams, KVF_STRIDED_LOOP_FIELDS)
  KVF_LAYOUT(StridedSideParams, KVF_STRIDED_SIDE_FIELDS)
  KVF_LAYOUT(StridedHeader, KVF_STRIDED_HEADER_FIELDS)
  KVF_LAYOUT(StridedReport, KVF_STRIDED_REPORT_FIELDS)
  KVF_LAYOUT(StridedSmall, KVF_STRIDED_PARAMS_FIELDS)
  KVF_LAYOUT(StridedLarge, KVF_STRIDED_PARAMS_FIELDS)
#define KVF_ALL_PARAMS_FIELDS(X) KVF_EXCHANGE_PARAMS_FIELDS(X) X(item, ~u64(0))
  KVF_LAYOUT(ExchangeState, KVF_EXCHANGE_STATE_FIELDS)
  KVF_LAYOUT(ExchangeRecord, KVF_EXCHANGE_RECORD_FIELDS)
  KVF_LAYOUT(ExchangeHostPage, KVF_EXCHANGE_HOST_PAGE_FIELDS)
  KVF_LAYOUT(ExchangeHeader, KVF_EXCHANGE_HEADER_FIELDS)
  KVF_LAYOUT(ExchangePeer, KVF_EXCHANGE_PEER_FIELDS)
  KVF_LAYOUT(ExchangeLoop, KVF_EXCHANGE_LOOP_FIELDS)
  KVF_LAYOUT(ExchangeItem, KVF_EXCHANGE_ITEM_FIELDS)
  KVF_LAYOUT(ExchangeSmall, KVF_ALL_PARAMS_FIELDS)
  KVF_LAYOUT(ExchangeLarge, KVF_ALL_PARAMS_FIELDS)
  KVF_LAYOUT(ExchangeArriveParams, KVF_EXCHANGE_ARRIVE_FIELDS)
  KVF_LAYOUT(ExchangeProbePeer, KVF_EXCHANGE_PROBE_PEER_FIELDS)
  KVF_LAYOUT(ExchangeProbeReport, KVF_EXCHANGE_PROBE_REPORT_FIELDS)
  KVF_LAYOUT(ExchangeProbeParams, KVF_EXCHANGE_PROBE_FIELDS)
#undef KVF_ALL_PARAMS_FIELDS
#undef KVF_LAYOUT
#undef KVF_OFFSET
  return ~u64(0);
}

// 1 when the address sanitizer watches this build.
int kvf_host_sanitized() {
#if defined(__SANITIZE_ADDRESS__)
  return 1;
#else
  return 0;
#endif
}

// Forbids the bytes to sanitized code, or allows them again; does nothing without the sanitizer.
void kvf_host_guard(const void* address, u64 bytes, int forbid) {
#if defined(__SANITIZE_ADDRESS__)
  if (forbid != 0) {
    ASAN_POISON_MEMORY_REGION(address, bytes);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(address, bytes);
  }
#else
  (void)address, (void)bytes, (void)forbid;
#endif
}

}  // extern "C"
