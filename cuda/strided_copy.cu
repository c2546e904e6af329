// Entry points of strided_copy.cuh; the bodies and their contract are there.
#include "kvferry/strided_copy.cuh"

#define KVF_CHECK_FIELD_OF(Struct, field, offset) \
  static_assert(offsetof(kvferry::Struct, field) == offset, "layout is shared with Rust");
#define KVF_CHECK_DIVISOR(field, offset) KVF_CHECK_FIELD_OF(Divisor, field, offset)
#define KVF_CHECK_LOOP(field, offset) KVF_CHECK_FIELD_OF(StridedLoopParams, field, offset)
#define KVF_CHECK_SIDE(field, offset) KVF_CHECK_FIELD_OF(StridedSideParams, field, offset)
#define KVF_CHECK_HEADER(field, offset) KVF_CHECK_FIELD_OF(StridedHeader, field, offset)
#define KVF_CHECK_REPORT(field, offset) KVF_CHECK_FIELD_OF(StridedReport, field, offset)
#define KVF_CHECK_PARAMS(field, offset)          \
  KVF_CHECK_FIELD_OF(StridedSmall, field, offset) \
  KVF_CHECK_FIELD_OF(StridedLarge, field, offset)
KVF_DIVISOR_FIELDS(KVF_CHECK_DIVISOR)
KVF_STRIDED_LOOP_FIELDS(KVF_CHECK_LOOP)
KVF_STRIDED_SIDE_FIELDS(KVF_CHECK_SIDE)
KVF_STRIDED_HEADER_FIELDS(KVF_CHECK_HEADER)
KVF_STRIDED_REPORT_FIELDS(KVF_CHECK_REPORT)
KVF_STRIDED_PARAMS_FIELDS(KVF_CHECK_PARAMS)
static_assert(sizeof(kvferry::Divisor) == 16, "layout is shared with Rust");
static_assert(sizeof(kvferry::StridedLoopParams) == 40, "layout is shared with Rust");
static_assert(sizeof(kvferry::StridedSideParams) == 80, "layout is shared with Rust");
static_assert(sizeof(kvferry::StridedHeader) == 488, "layout is shared with Rust");
static_assert(sizeof(kvferry::StridedReport) == 32, "layout is shared with Rust");
static_assert(sizeof(kvferry::StridedSmall) == 4096, "as small as every driver takes");
static_assert(sizeof(kvferry::StridedLarge) == 32760, "as large as the drivers that we support take");

#define KVF_ENTRY(symbol, body, Params, threads)                                                   \
  extern "C" __global__ void __launch_bounds__(threads) symbol(const __grid_constant__ Params p) { \
    kvferry::DeviceCx cx;                                                                          \
    body(cx, p);                                                                                   \
  }
KVF_STRIDED_COPY_KERNELS(KVF_ENTRY)
