// The C interface through which the Rust tests run ranks against each other.
#include <cstring>
#include <memory>

#include "exchange_rules.hpp"
#include "world.hpp"

using namespace kvferry;

namespace {

// The body of an operation with its parameters, which it owns; empty if there is no such or they have another size.
host::Body body_of(const host::WorldOp& op) {
#define KVF_BODY(symbol, body, Params, threads)                                               \
  if (std::strcmp(op.name, #symbol) == 0) {                                                   \
    if (op.params_bytes != sizeof(Params) || op.nthreads > threads) return {};                \
    auto p = std::make_shared<Params>();                                                      \
    std::memcpy(p.get(), op.params, sizeof(Params));                                          \
    return [p](host::HostCx& cx) {                                                            \
      const auto run = [](host::HostCx& c, const Params& q) { body(c, q); };                  \
      run(cx, *p);                                                                            \
    };                                                                                        \
  }
  KVF_EXCHANGE_KERNELS(KVF_BODY)
  KVF_BROKEN_EXCHANGES(KVF_BODY)
#undef KVF_BODY
  return {};
}

}  // namespace

extern "C" {

// 0, or 1 + the index of an operation that is no good.
u64 kvf_host_world(const host::WorldRun* run) {
  for (u64 i = 0; i < run->op_count; ++i) {
    const host::WorldOp& op = run->ops[i];
    const bool kernel = op.kind == host::kKernelOp;
    if (op.rank >= run->rank_count || (kernel && (op.nblocks == 0 || op.nthreads == 0 || !body_of(op)))) return i + 1;
  }
  host::run_world(*run, body_of);
  return 0;
}

}  // extern "C"
