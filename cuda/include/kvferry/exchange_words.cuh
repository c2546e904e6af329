// The memory through which ranks of a head exchange meet, and the parameters of its kernels. Mirrored by
// crates/kvferry-kernels/src/exchange.
#pragma once

#include "kvferry/divisor.cuh"

namespace kvferry {

constexpr u32 kMaxRanks = 64;

// Every rank exports [control block | pool]. In the control block, by parity of the epoch and source:
constexpr u64 kCellsAt = 0;        // a cell of 64 bytes, see ExchangeCell
constexpr u64 kArrivalsAt = 8192;  // a word on a line of its own: arrivals of all calls that ran
constexpr u64 kProbeAt = 17408;    // exchange_probe: a count, then a flag per source
constexpr u64 kControlBytes = 20480;
constexpr u64 kLine = 64;
constexpr u32 kPlaceShift = 8;  // landing places are multiples of 256

KVF_HD u64 cell_at(u64 epoch, u32 source) { return kCellsAt + kLine * ((epoch & 1) * kMaxRanks + source); }
KVF_HD u64 arrival_at(u64 epoch, u32 source) { return kArrivalsAt + kLine * ((epoch & 1) * kMaxRanks + source); }

// What a rank tells a peer at the start of a call, as GPUs tell it: words of 32 bits, each with the low half of the epoch
// below it. Every word says for itself whether it is of this call, so that no store has to wait until another one has
// arrived: a release of the last one would cost a way to the peer and back before it even set out.
enum ExchangeCell : u64 {
  kCellHashLow = 0,
  kCellHashHigh = 8,
  kCellPlace = 16,  // in units of 256 bytes
  kCellArrivals = 24,
  kCellVerdict = 32,
};

// A rank's own memory, not seen by peers.
struct ExchangeState {
  u64 epoch;   // calls finished
  u32 ticket;  // CTAs of this launch that have left, and 2^16 times those of them that failed
  u32 poison;  // Poison
  u64 reserved[6];
  u64 expected[2][kMaxRanks];  // by parity and source: arrivals of the calls that ran
  u64 sent[2][kMaxRanks];      // by parity and target: arrivals announced in the calls that ran
  u64 staging[2][kMaxRanks];   // by parity and target: what the copy engine stores in the target's arrival word
};

enum Poison : u32 {
  kSound = 0,
  // A CTA of this launch met a fault; whoever sets it writes the record. The launch still posts: all ranks must learn
  // what this one knows.
  kPoisonFresh = 1,
  // An earlier launch did: fill the result, signal nothing. Set by the last CTA to leave and by nobody else, so that all
  // CTAs of a launch agree on it without a word.
  kPoisonOld = 2,
};

struct ExchangeRecord {
  u64 state;  // 1 when the rest is complete
  u64 kind;   // ExchangeFault
  u64 peer;
  u64 epoch;
  u64 op;
  u64 seen;
  u64 expected;
  u64 value;
};

enum ExchangeFault : u32 {
  kHeaderTimeout = 1,
  kArrivalTimeout = 2,
  kMismatch = 3,
  kRefused = 4,
  kBadPlace = 5,
  kAborted = 6,
};

// Memory of the host that the kernel reads and writes.
struct ExchangeHostPage {
  u64 abort;       // not 0: give up
  u64 timeout_ns;  // of one wait; 0: none
  u64 reserved[6];
  ExchangeRecord record;
};

enum ExchangeFlags : u32 {
  kPost = 1,
  kWaitHeaders = 2,
  kOwn = 4,
  kPush = 8,
  kWaitArrivals = 16,
  kAdvance = 32,
};

struct ExchangeHeader {
  u64 state;      // ExchangeState
  u64 host_page;  // ExchangeHostPage
  u64 place;      // where results land in the own pool, bytes
  u64 result_bytes;
  u64 hash;
  u64 verdict;  // not 0: this rank refuses the call
  u32 op;
  u32 rank;
  u32 world;
  u32 flags;  // ExchangeFlags
  u32 lanes;  // of all targets; the own share's come first
  u32 reserved;
};

struct ExchangePeer {
  u64 control;  // as mapped here
  u64 pool;
  u64 pool_bytes;
  u64 reach;     // bytes from its landing place to the end of the last piece
  u32 arrivals;  // how often its arrival word is added to in this call
  u32 lanes;
  u32 first_lane;
  u32 first_item;
  u32 items;
  u32 chunks;
};

struct ExchangeLoop {
  u64 src_stride;  // bytes per step, two's complement
  u64 dst_stride;
  Divisor count;
};

constexpr u32 kExchangeLoops = 3;

struct ExchangeItem {
  u64 src;
  u64 dst_offset;   // from the target's landing place
  u32 words;        // < 2^31
  u32 first_chunk;  // among the target's chunks
  u32 word_shift;   // a word has 2^word_shift bytes
  u32 loops;
  Divisor run;  // words of a run
  ExchangeLoop loop[kExchangeLoops];  // outermost first
};

template <u32 kPeers, u32 kItems>
struct ExchangeParams {
  ExchangeHeader header;
  ExchangePeer peer[kPeers];
  ExchangeItem item[kItems];
};
// Kernel parameters may have 4,096 bytes on every driver, 32,764 on all that we support; the driver copies the whole
// struct at each launch, so most launches take the small one.
using ExchangeSmall = ExchangeParams<8, 24>;
using ExchangeLarge = ExchangeParams<kMaxRanks, 202>;

struct ExchangeArriveParams {
  u64 state;
  u32 world;
  u32 reserved;
  u64 targets;  // bit t: rank t gets one more arrival
};

constexpr u64 kProbeBytes = 4096;  // per source, at the start of each pool

struct ExchangeProbePeer {
  u64 control;
  u64 pool;
};

struct ExchangeProbeReport {
  u64 state;  // ExchangeProbeState
  u64 value;
};

enum ExchangeProbeState : u32 { kProbeGood = 1, kProbeTimeout = 2, kProbePayload = 3, kProbeAtomics = 4 };

struct ExchangeProbeParams {
  u64 report;  // ExchangeProbeReport per rank
  u64 nonce;
  u64 timeout_ns;
  u32 rank;
  u32 world;
  ExchangeProbePeer peer[kMaxRanks];
};

// X(field, offset) for every struct
#define KVF_EXCHANGE_STATE_FIELDS(X) \
  X(epoch, 0) X(ticket, 8) X(poison, 12) X(reserved, 16) X(expected, 64) X(sent, 1088) X(staging, 2112)
#define KVF_EXCHANGE_RECORD_FIELDS(X) \
  X(state, 0) X(kind, 8) X(peer, 16) X(epoch, 24) X(op, 32) X(seen, 40) X(expected, 48) X(value, 56)
#define KVF_EXCHANGE_HOST_PAGE_FIELDS(X) X(abort, 0) X(timeout_ns, 8) X(reserved, 16) X(record, 64)
#define KVF_EXCHANGE_HEADER_FIELDS(X)                                                            \
  X(state, 0) X(host_page, 8) X(place, 16) X(result_bytes, 24) X(hash, 32) X(verdict, 40)        \
  X(op, 48) X(rank, 52) X(world, 56) X(flags, 60) X(lanes, 64) X(reserved, 68)
#define KVF_EXCHANGE_PEER_FIELDS(X)                                                              \
  X(control, 0) X(pool, 8) X(pool_bytes, 16) X(reach, 24) X(arrivals, 32) X(lanes, 36)           \
  X(first_lane, 40) X(first_item, 44) X(items, 48) X(chunks, 52)
#define KVF_EXCHANGE_LOOP_FIELDS(X) X(src_stride, 0) X(dst_stride, 8) X(count, 16)
#define KVF_EXCHANGE_ITEM_FIELDS(X)                                                              \
  X(src, 0) X(dst_offset, 8) X(words, 16) X(first_chunk, 20) X(word_shift, 24) X(loops, 28)      \
  X(run, 32) X(loop, 48)
#define KVF_EXCHANGE_PARAMS_FIELDS(X) X(header, 0) X(peer, 72)
#define KVF_EXCHANGE_ARRIVE_FIELDS(X) X(state, 0) X(world, 8) X(reserved, 12) X(targets, 16)
#define KVF_EXCHANGE_PROBE_PEER_FIELDS(X) X(control, 0) X(pool, 8)
#define KVF_EXCHANGE_PROBE_REPORT_FIELDS(X) X(state, 0) X(value, 8)
#define KVF_EXCHANGE_PROBE_FIELDS(X) \
  X(report, 0) X(nonce, 8) X(timeout_ns, 16) X(rank, 24) X(world, 28) X(peer, 32)

}  // namespace kvferry
