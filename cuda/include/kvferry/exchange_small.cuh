// The two small kernels beside `exchange`: one tells for the copy engine, one tries a set-up out.
#pragma once

#include "kvferry/exchange_words.cuh"

namespace kvferry {

// Readies the words that the copy engine stores in the arrival words of peers when the payload is there. Runs when the
// headers have been read and the own share is done: what may fail the call comes before. Both parities are written, so
// that the copies need not know the epoch: the word of the other parity is what it has been. One CTA, a thread per rank. A
// failed communicator announces nothing new.
template <class Cx>
KVF_HD void exchange_arrive(Cx& cx, const ExchangeArriveParams& p) {
  if (cx.bid() != 0 || cx.tid() >= p.world) return;
  const u64 epoch = load<u64>(cx, p.state + offsetof(ExchangeState, epoch)) + 1;
  const bool sound = load<u32>(cx, p.state + offsetof(ExchangeState, poison)) == kSound;
  const u64 more = sound ? p.targets >> cx.tid() & 1 : 0;
  for (u64 parity = 0; parity < 2; ++parity) {
    const u64 row = (parity * kMaxRanks + cx.tid()) * 8;
    const u64 sent = load<u64>(cx, p.state + offsetof(ExchangeState, sent) + row);
    store<u64>(cx, p.state + offsetof(ExchangeState, staging) + row, sent + (parity == (epoch & 1) ? more : 0));
  }
}

KVF_HD u64 probe_word(u64 nonce, u32 from, u32 to, u32 index) {
  u64 x = nonce ^ (u64(from) << 48 | u64(to) << 32 | index);
  x *= 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  x *= 0xbf58476d1ce4e5b9u;
  return x ^ x >> 29;
}

// Set-up: every rank writes a pattern to every peer and then a flag, and looks whether peers' patterns were there when
// their flags came, and whether everybody's atomic additions add up. One CTA per rank, all at the same time, once, on
// control blocks that are 0.
template <class Cx>
KVF_HD void exchange_probe(Cx& cx, const ExchangeProbeParams& p) {
  if (cx.bid() != 0) return;
  const u32 tid = cx.tid();
  const u32 words = kProbeBytes / 8;
  for (u32 to = 0; to < p.world; ++to) {
    if (to == p.rank) continue;
    const u64 pool = p.peer[to].pool + p.rank * kProbeBytes;
    for (u32 i = tid; i < words; i += cx.nthreads()) store<u64>(cx, pool + i * 8, probe_word(p.nonce, p.rank, to, i));
    cx.add_relaxed(p.peer[to].control + kProbeAt, 1);
  }
  cx.sync();
  const u64 flags = kProbeAt + 8;
  bool late = false;
  if (tid < p.world && tid != p.rank) {
    cx.store_release(p.peer[tid].control + flags + 8 * p.rank, p.nonce);
    const u64 start = cx.clock();
    while (cx.load_acquire(p.peer[p.rank].control + flags + 8 * tid) != p.nonce) {
      late = cx.clock() - start >= p.timeout_ns;
      if (late) break;
      cx.poll();
    }
  }
  const bool all = !cx.sync_or(late);
  const u64 sum = cx.load_acquire(p.peer[p.rank].control + kProbeAt);
  const bool counted = sum == u64(p.world - 1) * cx.nthreads();
  for (u32 from = 0; from < p.world; ++from) {
    if (from == p.rank) continue;
    const bool timeout = cx.sync_or(late && tid == from);
    bool wrong = false;
    if (!timeout) {
      const u64 pool = p.peer[p.rank].pool + from * kProbeBytes;
      for (u32 i = tid; i < words; i += cx.nthreads()) {
        wrong |= load<u64>(cx, pool + i * 8) != probe_word(p.nonce, from, p.rank, i);
      }
    }
    wrong = cx.sync_or(wrong);
    if (tid != 0) continue;
    const u64 report = p.report + from * sizeof(ExchangeProbeReport);
    // Additions of a peer that did not come are not missed at others.
    const u64 state = timeout ? kProbeTimeout : wrong ? kProbePayload : all && !counted ? kProbeAtomics : kProbeGood;
    store<u64>(cx, report + offsetof(ExchangeProbeReport, value), state == kProbeAtomics ? sum : 0);
    cx.store_release(report + offsetof(ExchangeProbeReport, state), state);
  }
}

}  // namespace kvferry
