// Entry points of vectorized_copy.cuh; the body and its contract are there.
#include "kvferry/vectorized_copy.cuh"

#define KVF_CHECK_FIELD(field, offset) \
  static_assert(offsetof(kvferry::VectorizedCopyParams, field) == offset, "layout is shared with Rust");
KVF_VECTORIZED_COPY_FIELDS(KVF_CHECK_FIELD)
static_assert(sizeof(kvferry::VectorizedCopyParams) == 56, "layout is shared with Rust");

#define KVF_ENTRY(symbol, body, Params, threads)                                                            \
  extern "C" __global__ void __launch_bounds__(threads) symbol(const __grid_constant__ Params p) {          \
    kvferry::DeviceCx cx;                                                                                   \
    body(cx, p);                                                                                            \
  }
KVF_VECTORIZED_COPY_KERNELS(KVF_ENTRY)
