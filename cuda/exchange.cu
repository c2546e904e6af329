// Entry points of exchange.cuh; the bodies and their contract are there.
#include "kvferry/exchange.cuh"

#define KVF_CHECK_FIELD_OF(Struct, field, offset) \
  static_assert(offsetof(kvferry::Struct, field) == offset, "layout is shared with Rust");
#define KVF_CHECK_STATE(field, offset) KVF_CHECK_FIELD_OF(ExchangeState, field, offset)
#define KVF_CHECK_RECORD(field, offset) KVF_CHECK_FIELD_OF(ExchangeRecord, field, offset)
#define KVF_CHECK_HOST_PAGE(field, offset) KVF_CHECK_FIELD_OF(ExchangeHostPage, field, offset)
#define KVF_CHECK_HEADER(field, offset) KVF_CHECK_FIELD_OF(ExchangeHeader, field, offset)
#define KVF_CHECK_PEER(field, offset) KVF_CHECK_FIELD_OF(ExchangePeer, field, offset)
#define KVF_CHECK_LOOP(field, offset) KVF_CHECK_FIELD_OF(ExchangeLoop, field, offset)
#define KVF_CHECK_ITEM(field, offset) KVF_CHECK_FIELD_OF(ExchangeItem, field, offset)
#define KVF_CHECK_PARAMS(field, offset)           \
  KVF_CHECK_FIELD_OF(ExchangeSmall, field, offset) \
  KVF_CHECK_FIELD_OF(ExchangeLarge, field, offset)
#define KVF_CHECK_ARRIVE(field, offset) KVF_CHECK_FIELD_OF(ExchangeArriveParams, field, offset)
#define KVF_CHECK_PROBE(field, offset) KVF_CHECK_FIELD_OF(ExchangeProbeParams, field, offset)
#define KVF_CHECK_PROBE_REPORT(field, offset) KVF_CHECK_FIELD_OF(ExchangeProbeReport, field, offset)
KVF_EXCHANGE_STATE_FIELDS(KVF_CHECK_STATE)
KVF_EXCHANGE_RECORD_FIELDS(KVF_CHECK_RECORD)
KVF_EXCHANGE_HOST_PAGE_FIELDS(KVF_CHECK_HOST_PAGE)
KVF_EXCHANGE_HEADER_FIELDS(KVF_CHECK_HEADER)
KVF_EXCHANGE_PEER_FIELDS(KVF_CHECK_PEER)
KVF_EXCHANGE_LOOP_FIELDS(KVF_CHECK_LOOP)
KVF_EXCHANGE_ITEM_FIELDS(KVF_CHECK_ITEM)
KVF_EXCHANGE_PARAMS_FIELDS(KVF_CHECK_PARAMS)
KVF_EXCHANGE_ARRIVE_FIELDS(KVF_CHECK_ARRIVE)
KVF_EXCHANGE_PROBE_FIELDS(KVF_CHECK_PROBE)
KVF_EXCHANGE_PROBE_REPORT_FIELDS(KVF_CHECK_PROBE_REPORT)
static_assert(sizeof(kvferry::ExchangeState) == 3136, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeHostPage) == 128, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeHeader) == 72, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangePeer) == 56, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeLoop) == 32, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeItem) == 144, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeSmall) == 3976, "every driver takes 4,096 bytes");
static_assert(sizeof(kvferry::ExchangeLarge) == 32744, "the drivers that we support take 32,764 bytes");
static_assert(sizeof(kvferry::ExchangeArriveParams) == 24, "layout is shared with Rust");
static_assert(sizeof(kvferry::ExchangeProbeParams) == 1056, "layout is shared with Rust");

#define KVF_ENTRY(symbol, body, Params, threads)                                                   \
  extern "C" __global__ void __launch_bounds__(threads, 1) symbol(const __grid_constant__ Params p) { \
    kvferry::DeviceCx cx;                                                                          \
    body(cx, p);                                                                                   \
  }
KVF_EXCHANGE_KERNELS(KVF_ENTRY)
