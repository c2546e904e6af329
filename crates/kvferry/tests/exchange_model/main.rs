//! An explicit-state model of the exchange protocol (ARCHITECTURE.md, "The exchange"), explored to the end.
//!
//! **Agents.** Per rank: a *host* (issues calls and consumers ahead of the device, drops results, resets), a *native
//! thread* (sets the abort word), *streams* (run kernels, consumers, events and the copy engine's copies in order) and the
//! *CTAs* of its grid, of which CTA 0 posts the headers and waits for the arrivals. Grids differ between ranks.
//!
//! **Steps**, each atomic: start a CTA and latch the epoch; store the payload or the epoch of a header at one peer; read one
//! peer's header; read an input in the pool; write a lane of the own share or of a peer's result; signal an arrival; have
//! all arrivals; leave (the last: count, advance the epoch or fill); consume a result; record an event, pass one; copy, stage
//! and copy a flag; drop a result; time out; set or see the abort word; drain, meet, zero the control words. A region of
//! memory holds the number of the call whose bytes were written last. One write and one read stand for a long one: if a
//! long read overlaps a long write, one of the two orders of the atomic steps reads a wrong number.
//!
//! **Properties** (`Kind`): no consumer and no input reader finds bytes of another call or unwritten ones; no write goes
//! where its owner has not posted for this epoch, and none at all in a refused call; no header is overwritten before its
//! receiver has left the call; a wait ends only when every byte is there, and no arrival is left over; all ranks judge
//! a call alike and rightly; a rank that gave up signals nothing later; nobody is two calls ahead; no deadlock: whoever
//! is not done can get on. After a failure a result holds the fill or bytes of the very call that failed.
//!
//! **Variants** (`habits.rs`, `failures.rs`): one buffer in every call (`out=`, graph replay), eager calls between replays,
//! results held, results as inputs, readers and calls on a second stream, a header kernel first, the copy engine, counts of
//! arrivals that change, refusal, mismatch, timeouts, abort, reset. Each habit runs beside every other.
//!
//! **Bounds.** W = 2: 4 calls, up to 3 CTAs per rank, every pair of habits; W = 3: 4 calls, up to 2 CTAs; W = 4: 2 calls, one
//! CTA; with failures at any time 2 to 3 calls. `KVFERRY_SOAK=1` (`make soak`) goes further. A state is kept whole, so
//! "no violation" means all states at these bounds. Reductions: `reduce.rs`, with their argument and a check.
//!
//! **It must find** (`faults.rs`, `more_faults.rs`): each rule of the protocol is a switch (`protocol.rs`), and with each
//! switch set wrong the search finds a violation and prints the shortest schedule: `cargo test --test exchange_model --
//! --nocapture`. Only then does its silence count.
//!
//! **Not covered.** Memory order (steps are sequentially consistent; the shared-word tests and the GPU runs are for that),
//! lane arithmetic (the plan's tests), spinning and its limits, residency (a CTA may start late, never not), processes that
//! die while they hold a lock, set-up, teardown and quarantine of memory, two communicators on one GPU.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::panic, reason = "a failing model fails its test")]

mod compile;
mod correct;
mod cta;
mod failures;
mod faults;
mod habits;
mod launch;
mod memory;
mod model;
mod more_faults;
mod protocol;
mod reduce;
mod reduction;
mod scenario;
mod search;
mod state;
mod step;
mod trace;
