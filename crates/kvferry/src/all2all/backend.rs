//! What differs between the CPU and a GPU.
//!
//! Everything above this trait is host bookkeeping that both share: contracts, buffers, failures, set-up. A backend owns
//! the exported memory of its rank and the mappings of its peers', carries out the steps of [`protocol`](super::protocol)
//! and orders them with whatever streams it knows.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_cuda::StreamHandle;

use super::error::Fault;
use super::mesh::Mesh;
use super::options::{ExchangeArray, ExchangeEngine};
use super::plan::Plan;
use super::pool::{Place, Pool};
use super::protocol::Refusal;
use super::result::OutputShared;
use super::state::Monitor;
use crate::error::{Error, Result};
use crate::memory::Region;
use kvferry_layout::exchange::ExchangeOp;

/// What a backend is made from. Every stage of making one ends in `mesh.agree`: all ranks arm or all raise.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) name: &'a str,
    /// Bytes of the pool, the same on every rank, a multiple of 4096.
    pub(crate) pool_bytes: u64,
    pub(crate) mesh: &'a Arc<Mesh>,
    /// Bound of every stage.
    pub(crate) patience: Duration,
    /// Bound of a wait inside a call, until [`Backend::set_timeout`] changes it.
    pub(crate) timeout: Duration,
}

/// One call.
#[derive(Debug)]
#[allow(dead_code, reason = "streams, engines and places known to all are for the CUDA backend")]
pub(crate) struct Launch<'a> {
    /// Contract and pieces. Backends keep what they derive from it in [`Plan::derived`].
    pub(crate) plan: &'a Arc<Plan>,
    /// Contract hash with the session's nonce and the output's id: what headers carry.
    pub(crate) hash: u64,
    /// One per tensor, checked: in bounds, of the backend's memory kind, not overlapping the landing place.
    pub(crate) inputs: &'a [ExchangeArray],
    /// Where the results land.
    pub(crate) place: Place,
    /// Set when the landing place is an output that every rank knows the places of.
    pub(crate) out: Option<&'a OutputShared>,
    pub(crate) stream: Option<StreamHandle>,
    pub(crate) num_sms: Option<u32>,
    pub(crate) engine: ExchangeEngine,
}

/// Why a call did not run, or not to its end.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Refused before anything was posted: the caller publishes a refusal and raises this.
    Refused(Error),
    /// A wait or a check of the protocol ended the call; the result has been filled with 0xFF.
    Fault(Fault),
}

/// Names one capture of a CUDA graph; its buffers are its own until the graph is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CaptureId(pub(crate) u64);

/// How the ranks reach one another's memory, for `stats()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Such as "shared memory", "vmm", "ipc".
    pub name: &'static str,
    /// Why this one and not a better one.
    pub why: String,
}

/// The part of a communicator that touches memory. Calls of `run`, `refuse`, `copy_out`, `quiesce` and `reset` are
/// serialised by the communicator; everything else may come at any time from any thread, `abort` and `set_timeout`
/// without taking a lock that a call holds.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// How peers' memory is reached.
    fn transport(&self) -> &Transport;

    /// This rank's pool: what places count from. It stays mapped while the region or a part of it lives, after
    /// [`close`](Self::close) too.
    fn pool(&self) -> &Region;

    /// Called once, before the first call: the pool whose places are launched (for buffers that graphs own), and where
    /// to report a fault that a thread of the backend finds between calls. Hold both weakly, they hold the backend.
    fn attach(&self, _pool: &Arc<Pool>, _monitor: &Arc<Monitor>) {}

    /// Whether the backend can read (or, for copy-out, write) memory of this kind.
    fn accepts(&self, region: &Region) -> Result<()>;

    /// The capture that `stream` is in, if it is in one.
    fn capture(&self, _stream: Option<StreamHandle>) -> Result<Option<CaptureId>> {
        Ok(None)
    }

    /// Carries out one call in the order of the protocol. Host: the result is there on return. CUDA: it is enqueued, and
    /// what goes wrong later is found by [`fault`](Self::fault). Waits, before the header of a place is posted, for what
    /// [`release`](Self::release) was told of that place.
    fn run(&self, launch: &Launch<'_>) -> std::result::Result<(), Trouble>;

    /// Posts headers with this verdict for the epoch that the call would have had. False if nothing was published (the
    /// stream is capturing): the communicator then stays usable.
    fn refuse(&self, op: ExchangeOp, refusal: Refusal, stream: Option<StreamHandle>) -> bool;

    /// Whether a refusal ends the waits of peers that are in the call by its header alone, at once. If not, the
    /// communicator tells them by message too, and their hosts may hear of it before they find out for themselves that
    /// they refuse the call as well.
    fn refusals_are_seen(&self) -> bool {
        false
    }

    /// Copies the results at `place` to `into`, ordered after the call that put them there.
    fn copy_out(
        &self,
        plan: &Plan,
        place: Place,
        into: &[ExchangeArray],
        stream: Option<StreamHandle>,
    ) -> Result<()>;

    /// Nobody on the host holds the results at this place any more. `streams`: those a consumer was announced on
    /// (`record_stream`); the home stream is the backend's to know. Called from `Drop`, also after `close`, during
    /// capture and at exit: it must not block and reports failures by `tracing` only.
    fn release(&self, place: Place, streams: &[StreamHandle]);

    /// Makes running and later calls end at once with [`FaultKind::Aborted`](super::error::FaultKind::Aborted). A plain
    /// store and a wake-up.
    fn abort(&self, code: u32, peer: usize);

    /// Bound of every wait from now on, those running included.
    fn set_timeout(&self, timeout: Duration);

    /// A peer has closed in good order: a call that still misses its header will never get it.
    fn peer_left(&self, peer: usize);

    /// What a call found after `run` had returned. Sticky until [`reset`](Self::reset).
    fn fault(&self) -> Option<Fault> {
        None
    }

    /// Calls finished, as far as the host knows.
    fn epoch(&self) -> u64;

    /// Returns when nothing of this rank is running any more.
    fn quiesce(&self) -> Result<()>;

    /// Zeroes this rank's control words, arrivals and state, abort word included. No rank is in a call.
    fn reset(&self) -> Result<()>;

    /// Lets go of the peers' memory, and of the own pool once no result is held. `all_gone`: every peer has closed or
    /// died, so that nobody maps the own pool any more. Quiet; may be called twice.
    fn close(&self, all_gone: bool);
}
