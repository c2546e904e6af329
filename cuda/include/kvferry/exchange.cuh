// One call of the head exchange on one rank: tell all peers, copy the own share, push to peers where they said, wait for
// what they push.
//
// Call e of a communicator, as each CTA runs it:
//   post    CTA 0 writes a header to every peer: hash, where to write, how many arrivals will come.
//   own     Lanes of the own share copy at once.
//   read    A CTA that pushes waits for the headers of *all* ranks of epoch e. Only if all agree does it push, so all
//           ranks decide alike and arrivals are counted only in calls that ran.
//   push    Lanes of a peer's share copy to the place in its header, then add 1 to its arrival word (release).
//   wait    CTA 0 waits until each arrival word has what the headers announced on top of all earlier calls (acquire).
//   leave   The last CTA to leave, by a ticket over the grid, counts the call, or fills the result if it failed.
// A launch does the steps in its flags; a call may be several launches in stream order.
//
// Every CTA reads the epoch at its start. It cannot change under its feet: only the last CTA to leave advances it, and
// that is never somebody else. A peer is at most one epoch ahead (to finish e + 1 it needs my header of e + 1), so one
// cell and one arrival word per pair and parity suffice. A communicator that failed signals nothing and stays at its epoch,
// or that bound would be lost.
//
// Bytes that peers write during the launch are not read by it. Input may lie in the own pool: its buffer is posted again
// by a later launch only.
#pragma once

#include "kvferry/exchange_copy.cuh"
#include "kvferry/exchange_small.cuh"

namespace kvferry {

// What the kernels do. The host tests also build bodies with one rule broken, to see it found.
struct ExchangeRules {
  static constexpr bool kLastAdvances = true;   // the last CTA to leave counts the call; else CTA 0 when its wait is over
  static constexpr bool kReadsAll = true;       // push after reading all headers; else after reading the target's
  static constexpr bool kCumulative = true;     // arrivals on top of earlier calls'; else those of this call alone
  static constexpr bool kSignalsAfter = true;   // a lane's arrival after its barrier; else before
  static constexpr bool kWaitsForPlace = true;  // push where this call's header says; else where any header said
};

constexpr u64 kPatienceNs = 20000;  // how long to spin before the host is asked
constexpr u32 kPollsPerLook = 32;
constexpr u32 kPollsForOthers = 64;

// What a CTA adds to the ticket word.
constexpr u32 kLeft = 1;
constexpr u32 kLeftMask = 0xffff;
constexpr u32 kLeftFailed = kLeft | 0x10000;

enum class Waited { kReady, kTimeout, kAborted, kGivenUp };

KVF_HD u64 state_at(const ExchangeHeader& h, u64 field) { return h.state + field; }

// Spins until `ready()`. The host's page is far away: it is looked at only when the wait has become long.
template <class Cx, class Ready>
KVF_HD Waited wait_until(Cx& cx, const ExchangeHeader& h, Ready ready) {
  u64 start = 0;
  bool patient = false;
  KVF_NO_UNROLL
  for (u32 polls = 0;; ++polls) {
    if (ready()) return Waited::kReady;
    if (polls % kPollsPerLook == kPollsPerLook - 1) {
      const u64 now = cx.clock();
      if (start == 0) start = now;
      patient = now - start >= kPatienceNs;
      if (patient) {
        const U128 host = load_relaxed<U128>(cx, h.host_page + offsetof(ExchangeHostPage, abort));
        if (host.lo != 0) return Waited::kAborted;
        if (host.hi != 0 && now - start >= host.hi) return Waited::kTimeout;
        // Somebody else of this grid has met a fault.
        if (load_relaxed<u32>(cx, state_at(h, offsetof(ExchangeState, poison))) != kSound) return Waited::kGivenUp;
      }
    }
    if (patient) {
      cx.poll();
    } else {
      cx.spin();
    }
  }
}

struct Blame {
  u32 kind;  // ExchangeFault
  u32 peer;
  u64 seen;
  u64 expected;
  u64 value;
};

// The first to poison writes the record.
template <class Cx>
KVF_HD void poison(Cx& cx, const ExchangeHeader& h, u64 epoch, const Blame& blame) {
  if (cx.cas(state_at(h, offsetof(ExchangeState, poison)), kSound, kPoisonFresh) != kSound) return;
  const u64 record = h.host_page + offsetof(ExchangeHostPage, record);
  cx.store_relaxed(record + offsetof(ExchangeRecord, kind), blame.kind);
  cx.store_relaxed(record + offsetof(ExchangeRecord, peer), blame.peer);
  cx.store_relaxed(record + offsetof(ExchangeRecord, epoch), epoch);
  cx.store_relaxed(record + offsetof(ExchangeRecord, op), h.op);
  cx.store_relaxed(record + offsetof(ExchangeRecord, seen), blame.seen);
  cx.store_relaxed(record + offsetof(ExchangeRecord, expected), blame.expected);
  cx.store_relaxed(record + offsetof(ExchangeRecord, value), blame.value);
  cx.store_release(record + offsetof(ExchangeRecord, state), 1);
}

// What a wait that did not end well says; nothing if another CTA has said it.
template <class Cx>
KVF_HD void poison_after(Cx& cx, const ExchangeHeader& h, u64 epoch, Waited how, Blame blame) {
  if (how == Waited::kGivenUp) return;
  if (how == Waited::kAborted) {
    blame.kind = kAborted;
    blame.value = load_relaxed<u64>(cx, h.host_page + offsetof(ExchangeHostPage, abort));
  }
  poison(cx, h, epoch, blame);
}

KVF_HD u64 tagged(u64 value, u64 epoch) { return value << 32 | u32(epoch); }

// Tells one peer. Nothing here needs a release: what the header permits is to write into the place, and whoever read that
// did so in launches that have ended.
template <class Cx>
KVF_HD void post(Cx& cx, const ExchangeHeader& h, const ExchangePeer& peer, u64 epoch) {
  const u64 cell = peer.control + cell_at(epoch, h.rank);
  cx.store_relaxed(cell + kCellHashLow, tagged(h.hash, epoch));
  cx.store_relaxed(cell + kCellHashHigh, tagged(h.hash >> 32, epoch));
  cx.store_relaxed(cell + kCellPlace, tagged(h.place >> kPlaceShift, epoch));
  cx.store_relaxed(cell + kCellArrivals, tagged(h.verdict == 0 ? peer.arrivals : 0, epoch));
  cx.store_relaxed(cell + kCellVerdict, tagged(h.verdict, epoch));
}

// Waits for the header of one peer and judges it: leaves the address to write to in `at` and returns whether the call may
// go on as far as this peer is concerned.
template <class Rules, class Cx>
KVF_HD bool read_header(Cx& cx, const ExchangeHeader& h, const ExchangePeer& own, const ExchangePeer& peer, u32 source,
                        u64 epoch, u64& at, u32& arrivals) {
  const u64 cell = own.control + cell_at(epoch, source);
  U128 hash{}, place{};
  u64 verdict = 0;
  const Waited how = wait_until(cx, h, [&] {
    hash = load_relaxed<U128>(cx, cell + kCellHashLow);
    place = load_relaxed<U128>(cx, cell + kCellPlace);
    verdict = cx.load_acquire(cell + kCellVerdict);
    if (!Rules::kWaitsForPlace && u32(place.lo) != 0) return true;
    const u32 e = u32(epoch);
    return u32(hash.lo) == e && u32(hash.hi) == e && u32(place.lo) == e && u32(place.hi) == e && u32(verdict) == e;
  });
  const u64 told_hash = (hash.lo >> 32) | (hash.hi & ~u64(0xffffffff));
  const u64 told_place = (place.lo >> 32) << kPlaceShift;
  const u32 refusal = u32(verdict >> 32);
  arrivals = u32(place.hi >> 32);
  at = peer.pool + told_place;
  Blame blame{kHeaderTimeout, source, u32(verdict), epoch, 0};
  if (how != Waited::kReady) {
    poison_after(cx, h, epoch, how, blame);
    return false;
  }
  if (refusal != 0) {
    blame = {kRefused, source, 0, 0, refusal};
  } else if (told_hash != h.hash) {
    blame = {kMismatch, source, told_hash, h.hash, told_hash};
  } else if (peer.reach > peer.pool_bytes || told_place > peer.pool_bytes - peer.reach) {
    blame = {kBadPlace, source, told_place + peer.reach, peer.pool_bytes, told_place};
  } else {
    return true;
  }
  poison(cx, h, epoch, blame);
  return false;
}

template <class Params>
KVF_HD u32 target_of(const Params& p, u32 lane) {
  u32 target = 0;
  KVF_NO_UNROLL
  while (lane - p.peer[target].first_lane >= p.peer[target].lanes) ++target;
  return target;
}

template <class Rules, class Params, class Cx>
KVF_HD void exchange(Cx& cx, const Params& p) {
  const ExchangeHeader& h = p.header;
  const ExchangePeer& own = p.peer[h.rank];
  const u32 tid = cx.tid();
  const bool first = cx.bid() == 0;
  const bool peer_thread = tid < h.world && tid != h.rank;  // looks after one peer

  const u64 epoch = load<u64>(cx, state_at(h, offsetof(ExchangeState, epoch))) + 1;
  const bool dead = load_relaxed<u32>(cx, state_at(h, offsetof(ExchangeState, poison))) == kPoisonOld;

  if (first && !dead && (h.flags & kPost) != 0 && peer_thread) post(cx, h, p.peer[tid], epoch);

  bool stop = dead || h.verdict != 0;  // the same in all threads of the CTA, always
  bool read = false;                   // the CTA has read the headers
  u32 arrivals = 0;                    // that the peer of this thread announced
  const auto read_headers = [&](u32 target) {
    bool bad = stop;
    if (!stop && peer_thread && (Rules::kReadsAll || target == tid || target == h.rank)) {
      u64 at = 0;
      bad = !read_header<Rules>(cx, h, own, p.peer[tid], tid, epoch, at, arrivals);
      static_cast<u64*>(cx.shared())[tid] = at;
    }
    stop = cx.sync_or(bad);
    read = Rules::kReadsAll;
  };

  KVF_NO_UNROLL
  for (u32 lane = cx.bid(); lane < h.lanes && !stop; lane += cx.nblocks()) {
    const u32 target = target_of(p, lane);
    const bool mine = target == h.rank;
    if ((h.flags & (mine ? kOwn : kPush)) == 0) continue;
    if (!mine && !read) read_headers(target);
    if (stop) continue;
    const ExchangePeer& peer = p.peer[target];
    copy_lane(cx, p, peer, lane - peer.first_lane, mine ? own.pool + h.place : static_cast<u64*>(cx.shared())[target]);
    if (mine) continue;
    if (Rules::kSignalsAfter) cx.sync();
    if (tid == 0) cx.add_release(peer.control + arrival_at(epoch, h.rank), 1);
  }

  // The own share may be copied beside the other launches of a call: it takes no part in their counting.
  if ((h.flags & ~u32(kOwn)) == 0) return;

  // What the last CTA to leave has to know fits its ticket: how many have left, and how many of them failed.
  const u64 ticket = state_at(h, offsetof(ExchangeState, ticket));
  const u32 others = cx.nblocks() - 1;
  bool last = false;

  if (first && (h.flags & (kWaitHeaders | kWaitArrivals)) != 0) {
    if (!read) read_headers(h.rank);
    bool bad = stop;
    bool alone = false;
    // A thread that looks after no peer, in a warp without any if there is one: neither wait is to hold up the other.
    if (tid == (cx.nthreads() > h.world ? cx.nthreads() - 1 : h.rank)) {
      // Asked for now, looked at when the waits are over: the way to the host takes as long as a small call.
      const u64 abort = load_relaxed<u64>(cx, h.host_page + offsetof(ExchangeHostPage, abort));
      // The others mostly leave while this CTA still waits. Then it is the last, and needs no ticket to find out. This
      // must not wait for them without end: they may need the place that this CTA takes.
      u64 left = 0;
      KVF_NO_UNROLL
      for (u32 polls = 0; polls < kPollsForOthers && !alone; ++polls) {
        left = cx.load_acquire(ticket);
        alone = (u32(left) & kLeftMask) == others;
        if (!alone) cx.spin();
      }
      bad |= alone && (u32(left) & ~kLeftMask) != 0;
      if (abort != 0 && !stop) {
        bad = true;
        poison(cx, h, epoch, Blame{kAborted, u32(abort >> 32), 0, 0, abort});
      }
    }
    if (!stop && (h.flags & kWaitArrivals) != 0 && peer_thread) {
      const u64 row = ((epoch & 1) * kMaxRanks + tid) * 8;
      const u64 expected = state_at(h, offsetof(ExchangeState, expected)) + row;
      const u64 sent = state_at(h, offsetof(ExchangeState, sent)) + row;
      const u64 want = (Rules::kCumulative ? load<u64>(cx, expected) : 0) + arrivals;
      const u64 word = own.control + arrival_at(epoch, tid);
      u64 seen = 0;
      const Waited how = wait_until(cx, h, [&] {
        seen = cx.load_acquire(word);
        return seen >= want;
      });
      bad = how != Waited::kReady;
      if (bad) poison_after(cx, h, epoch, how, Blame{kArrivalTimeout, tid, seen, want, 0});
      // Read by nobody else in this launch, and by nobody at all if the call fails after all.
      if (!bad && (h.flags & kAdvance) != 0) {
        store<u64>(cx, expected, want);
        store<u64>(cx, sent, load<u64>(cx, sent) + p.peer[tid].arrivals);
      }
    }
    stop = cx.sync_or(bad);
    last = cx.sync_or(alone);
    if (!Rules::kLastAdvances && !stop && tid == 0) {
      store<u64>(cx, state_at(h, offsetof(ExchangeState, epoch)), epoch);
    }
  }

  // Leave. The ticket's acquire and release make what all CTAs did known to the last one.
  if (!last) {
    cx.sync();
    u32 before = 0;
    if (tid == 0) before = cx.ticket(ticket, stop ? kLeftFailed : kLeft);
    last = cx.sync_or(tid == 0 && (before & kLeftMask) == others);
    if (!last) return;
    stop = cx.sync_or(stop || (before & ~kLeftMask) != 0);
  }
  if (tid == 0) {
    store<u32>(cx, ticket, 0);
    if (stop) {
      store<u32>(cx, state_at(h, offsetof(ExchangeState, poison)), kPoisonOld);
    } else if ((h.flags & kAdvance) != 0 && Rules::kLastAdvances) {
      store<u64>(cx, state_at(h, offsetof(ExchangeState, epoch)), epoch);
    }
  }
  if (stop && (h.flags & kAdvance) != 0) fill_ones(cx, own.pool + h.place, h.result_bytes);
}

// X(kernel symbol, body, params, most threads per CTA)
#define KVF_EXCHANGE_KERNELS(X)                                                                         \
  X(exchange, kvferry::exchange<kvferry::ExchangeRules>, kvferry::ExchangeSmall, 1024)                  \
  X(exchange_large, kvferry::exchange<kvferry::ExchangeRules>, kvferry::ExchangeLarge, 1024)            \
  X(exchange_arrive, kvferry::exchange_arrive, kvferry::ExchangeArriveParams, 64)                       \
  X(exchange_probe, kvferry::exchange_probe, kvferry::ExchangeProbeParams, 256)

}  // namespace kvferry
