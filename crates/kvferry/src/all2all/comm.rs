//! A communicator: what its users hold, and what is behind it.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_host::ForkGuard;
use kvferry_layout::Dtype;
use kvferry_layout::exchange::{self, ExchangeOp, HeadLayout};

use super::backend::Backend;
use super::error::{ExchangeFailure, When};
use super::mesh::Mesh;
use super::options::{CallOptions, ExchangeArray, ExchangeDevice, Landing};
use super::plan::PlanCache;
use super::pool::Pool;
use super::protocol::Refusal;
use super::result::{ExchangeResult, Output};
use super::state::Monitor;
use super::stats::{Counters, ExchangeStats, get};
use super::turn::{Turn, Turned};
use super::watch::Watch;
use super::wire::Notice;
use super::{All2AllBuilder, collective};
use crate::error::{Error, Result};

/// Which axis [`All2All::allgather`] joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GatherAxis {
    /// `[B, N_r, H, D]` becomes `[B, ΣN, H, D]`.
    Tokens,
    /// `[B, N, H_r, D]` becomes `[B, N, ΣH, D]`.
    Heads,
}

impl GatherAxis {
    const fn op(self) -> ExchangeOp {
        match self {
            GatherAxis::Tokens => ExchangeOp::AllGatherTokens,
            GatherAxis::Heads => ExchangeOp::AllGatherHeads,
        }
    }
}

/// One rank's end of a group that exchanges attention heads. Cloning shares it.
///
/// All ranks make the same calls in the same order. Calls of several threads of one rank are carried out one after
/// another in the order in which they come, so threads that call at once must see to the order themselves.
///
/// A rank that disagrees, refuses its arguments, is late, dies or aborts *breaks* the communicator on every rank: the
/// call raises, and every later call, [`check`](Self::check) and [`close`](Self::close) raise the same, until all ranks
/// [`reset`](Self::reset). [`Error::Busy`] and a [`Landing`] that was never asked for break nothing: the rank may drop
/// results and call again, while the others wait for it.
///
/// Dropping the last clone says goodbye to the peers without waiting for them; while its thread panics it does not, and
/// the peers see this rank die.
#[derive(Clone, Debug)]
pub struct All2All {
    pub(super) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) capacity: u64,
    pub(super) buffers: u32,
    pub(super) device: ExchangeDevice,
    pub(super) patience: Duration,
    pub(super) fork: ForkGuard,
    pub(super) monitor: Arc<Monitor>,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) pool: Arc<Pool>,
    pub(super) counters: Counters,
    pub(super) calls: Turn<Calls>,
    /// Ended by closing.
    pub(super) watch: Mutex<Option<Watch>>,
    pub(super) mesh: Arc<Mesh>,
}

/// What one call at a time may touch.
#[derive(Debug)]
pub(super) struct Calls {
    pub(super) plans: PlanCache,
    /// Of this session; from rank 0.
    pub(super) nonce: u64,
    /// Id of the next output; the same on every rank.
    pub(super) next_output: u64,
    /// A reset failed half way: the ranks no longer agree on the session.
    pub(super) beyond_repair: bool,
}

impl All2All {
    /// Begins to set up rank `rank` of `world`.
    pub fn builder(rank: usize, world: usize) -> All2AllBuilder {
        All2AllBuilder::new(rank, world)
    }

    /// `[B, N_r, H, D]` on rank r becomes `[B, ΣN, heads(r), D]`: every rank's tokens, this rank's heads.
    ///
    /// # Errors
    /// What the contract, the memory or the capacity refuses, on this rank or another, [`Error::Busy`], and everything
    /// that breaks a communicator ([`ExchangeFailure`]).
    pub fn send_recv_heads(
        &self,
        arrays: &[ExchangeArray],
        options: &CallOptions,
    ) -> Result<Vec<ExchangeResult>> {
        self.exchange(ExchangeOp::SendRecvHeads, arrays, options, Landing::Pool)
    }

    /// The inverse: `[B, ΣN, heads(r), D]` becomes `[B, N_r, H, D]`.
    ///
    /// # Errors
    /// As [`send_recv_heads`](Self::send_recv_heads).
    pub fn gather_heads(
        &self,
        arrays: &[ExchangeArray],
        options: &CallOptions,
    ) -> Result<Vec<ExchangeResult>> {
        self.exchange(ExchangeOp::GatherHeads, arrays, options, Landing::Pool)
    }

    /// Every rank gets the whole along `axis`.
    ///
    /// # Errors
    /// As [`send_recv_heads`](Self::send_recv_heads).
    pub fn allgather(
        &self,
        arrays: &[ExchangeArray],
        axis: GatherAxis,
        options: &CallOptions,
    ) -> Result<Vec<ExchangeResult>> {
        self.exchange(axis.op(), arrays, options, Landing::Pool)
    }

    /// Any of the operations, with a choice of where results go when no `out` is given.
    ///
    /// On the CPU the calling thread moves the bytes and the results are there on return. On a GPU the call is put on
    /// `options.stream`.
    ///
    /// # Errors
    /// As [`send_recv_heads`](Self::send_recv_heads).
    pub fn exchange(
        &self,
        op: ExchangeOp,
        arrays: &[ExchangeArray],
        options: &CallOptions,
        landing: Landing<'_>,
    ) -> Result<Vec<ExchangeResult>> {
        self.shared.exchange(op, arrays, options, landing)
    }

    /// Refuses the next call on behalf of a layer above, whose own checks failed: every rank then raises, instead of
    /// waiting for this one. Does nothing while the communicator is broken.
    ///
    /// # Errors
    /// A fork, or a closed communicator.
    pub fn refuse(&self, op: ExchangeOp, reason: &str, options: &CallOptions) -> Result<()> {
        self.shared.fork.check()?;
        let _calls = self.shared.turn(op.name())?;
        match self.shared.monitor.check() {
            Ok(()) => {
                let why = Error::Unsupported { what: op.to_string(), why: reason.to_owned() };
                self.shared.refuse(op, (Refusal::Caller, why), options);
                Ok(())
            }
            Err(Error::Exchange(_)) => Ok(()),
            Err(other) => Err(other),
        }
    }

    /// Memory for the results of calls with `out`: collective, every rank names its own results (shapes in the order B,
    /// N, H, D) in the same layout.
    ///
    /// It takes one buffer of the pool until it is dropped.
    ///
    /// # Errors
    /// On every rank, if one has no free buffer or asks for more than the capacity; a broken communicator.
    pub fn empty_output(&self, results: &[([u64; 4], Dtype)], layout: HeadLayout) -> Result<Output> {
        collective::empty_output(&self.shared, results, layout)
    }

    /// Says that work on `stream` reads a result: see [`ExchangeResult::record_stream`].
    pub fn record_stream(&self, result: &ExchangeResult, stream: kvferry_cuda::StreamHandle) {
        result.record_stream(stream);
    }

    /// Raises what has broken the communicator, if something has. On a GPU also what a finished kernel has found.
    ///
    /// # Errors
    /// As said; a fork; a closed communicator.
    pub fn check(&self) -> Result<()> {
        self.shared.fork.check()?;
        self.shared.monitor.check()
    }

    /// Breaks the communicator on every rank, within milliseconds, also under a running call. May be called from any
    /// thread. Does nothing if it is broken already.
    ///
    /// # Errors
    /// A fork, or a closed communicator.
    pub fn abort(&self, reason: &str) -> Result<()> {
        let shared = &self.shared;
        shared.fork.check()?;
        if shared.monitor.is_closed() {
            return Err(Error::ExchangeClosed);
        }
        let when = When { epoch: shared.backend.epoch(), op: None };
        let failure = ExchangeFailure::Aborted { rank: shared.rank, reason: reason.to_owned(), when };
        shared.monitor.fail(failure, Some(None));
        Ok(())
    }

    /// Makes a broken communicator usable again: collective, every rank calls it. Calls count from 1 again, outputs made
    /// before are refused, results held stay valid.
    ///
    /// # Errors
    /// A rank that died or closed (set up anew then), or does not come within the set-up's time. If the ranks got stuck
    /// half way, further resets are refused as well.
    pub fn reset(&self) -> Result<()> {
        collective::reset(&self.shared)
    }

    /// Closes in good order: waits briefly for the peers to close too, then lets go of their memory. Results stay valid as
    /// long as they are held. A second call does nothing.
    ///
    /// A call, `reset` or `empty_output` that another thread of this rank is in ends at once, with
    /// [`Error::ExchangeClosed`] unless it failed before; the peers then raise [`ExchangeFailure::PeerClosed`], as they do
    /// when they call on.
    ///
    /// # Errors
    /// What had broken the communicator, once everything is released.
    pub fn close(&self) -> Result<()> {
        collective::close(&self.shared)
    }

    /// Bound of every wait inside a call from now on, also of one that runs. Each rank's own.
    ///
    /// # Errors
    /// A timeout of zero; a fork, or a closed communicator.
    pub fn set_timeout(&self, timeout: Duration) -> Result<()> {
        self.shared.fork.check()?;
        if self.shared.monitor.is_closed() {
            return Err(Error::ExchangeClosed);
        }
        check_timeout(timeout)?;
        self.shared.backend.set_timeout(timeout);
        Ok(())
    }

    /// Counts so far.
    pub fn stats(&self) -> ExchangeStats {
        let Shared { counters, pool, backend, .. } = &*self.shared;
        ExchangeStats {
            calls: get(&counters.calls),
            bytes_sent: get(&counters.bytes_sent),
            bytes_received: get(&counters.bytes_received),
            copied_out: get(&counters.copied_out),
            busy: get(&counters.busy),
            buffers: pool.buffers(),
            buffers_free: pool.free() as u32,
            epoch: backend.epoch(),
            resets: get(&counters.resets),
            transport: backend.transport().clone(),
        }
    }

    /// Heads of this rank when `num_heads` are shared by default.
    ///
    /// # Errors
    /// Heads that cannot be shared.
    pub fn head_range(&self, num_heads: u64, query_heads: Option<u64>) -> Result<Range<u64>> {
        let ranges = exchange::head_ranges(num_heads, self.shared.world, query_heads)?;
        Ok(ranges.get(self.shared.rank).cloned().unwrap_or(0..0))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.shared.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.shared.world
    }

    /// Most bytes of one call's results on any rank.
    pub fn capacity(&self) -> u64 {
        self.shared.capacity
    }

    /// Where the ranks compute.
    pub fn device(&self) -> ExchangeDevice {
        self.shared.device
    }

    /// Calls finished, as far as the host knows.
    pub fn epoch(&self) -> u64 {
        self.shared.backend.epoch()
    }

    /// Whether `close` has been called.
    pub fn is_closed(&self) -> bool {
        self.shared.monitor.is_closed()
    }
}

pub(super) fn check_timeout(timeout: Duration) -> Result<()> {
    if timeout.is_zero() {
        return Err(Error::InvalidOption {
            option: "timeout",
            expected: "longer than nothing".to_owned(),
            value: format!("{timeout:?}"),
        });
    }
    Ok(())
}

impl Shared {
    /// Waits for the calls of other threads.
    pub(super) fn turn(&self, what: &str) -> Result<Turned<'_, Calls>> {
        self.calls.take(self.mesh.attend()).ok_or_else(|| self.monitor.interrupted(what))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // In a forked child the sockets and threads are the parent's.
        if self.fork.check().is_err() || !self.monitor.close() {
            return;
        }
        if !std::thread::panicking() {
            self.mesh.tell(Notice::Bye);
        }
        self.backend.close(false);
    }
}
