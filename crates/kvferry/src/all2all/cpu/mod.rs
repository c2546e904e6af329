//! Ranks that are processes or threads of one host: their memory is shared, the calling threads move the bytes.

mod beat;
mod run;
mod setup;
mod wait;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::Duration;

use kvferry_cuda::StreamHandle;
use kvferry_host::{Bell, Copier, CopyHint, CopyNest, HostRegion, Loop, SharedWords};
use kvferry_kernels::{MAX_RANKS, abort_word};
use kvferry_layout::exchange::ExchangeOp;

use super::attend::Attend;
use super::backend::{Backend, Launch, Transport, Trouble};
use super::call::wrong_memory;
use super::error::{Fault, FaultKind};
use super::options::{ExchangeArray, ExchangeDevice};
use super::plan::Plan;
use super::pool::Place;
use super::protocol::Refusal;
use super::result::ResultShape;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::transfer::{hint, last_level_cache, lock};

pub(super) use setup::connect;

/// What ranks share of one rank's memory: its control block and its pool.
#[derive(Debug)]
pub(super) struct Mapped {
    /// All words of the control block.
    pub(super) words: SharedWords,
    /// Rung by whoever posts a header or adds an arrival there.
    pub(super) bell: Bell,
    pub(super) pool: HostRegion,
}

/// Words of the page through which other threads of this process reach a running call.
pub(super) mod page {
    /// 0, or an [`abort_word`](kvferry_kernels::abort_word).
    pub(in crate::all2all) const ABORT: usize = 0;
    /// Bound of a wait in nanoseconds.
    pub(in crate::all2all) const TIMEOUT: usize = 1;
    /// Ranks that have closed, by bit.
    pub(in crate::all2all) const LEFT: usize = 2;
    pub(in crate::all2all) const WORDS: usize = 3;
}

/// What a rank remembers from call to call.
#[derive(Debug)]
pub(super) struct Local {
    /// Calls finished.
    pub(super) epoch: u64,
    /// A call failed: nothing is signalled any more.
    pub(super) poisoned: bool,
    /// By parity and source: arrivals of the calls that ran.
    pub(super) expected: [[u64; MAX_RANKS]; 2],
}

impl Local {
    const fn new() -> Local {
        Local { epoch: 0, poisoned: false, expected: [[0; MAX_RANKS]; 2] }
    }
}

/// The CPU backend of one rank.
#[derive(Debug)]
pub(super) struct CpuBackend {
    rank: usize,
    world: usize,
    pool_bytes: u64,
    transport: Transport,
    pool: Region,
    own: Mapped,
    /// By rank, `None` for this one. Empty once closed.
    peers: RwLock<Vec<Option<Mapped>>>,
    page: SharedWords,
    local: Mutex<Local>,
    /// Calls finished, for who does not hold `local`.
    epoch: AtomicU64,
    spin: Duration,
    attend: Attend,
}

/// A piece, ready to be walked.
#[derive(Debug)]
struct ReadyPiece {
    tensor: usize,
    src_offset: i64,
    dst_offset: u64,
    nest: CopyNest,
}

/// What the CPU backend derives from a plan: pieces by receiving rank.
#[derive(Debug)]
struct Ready {
    pieces: Vec<Vec<ReadyPiece>>,
    hint: CopyHint,
}

impl Ready {
    fn of(plan: &Plan) -> Result<Ready> {
        let ready = |piece: &kvferry_layout::exchange::Piece| {
            let mut loops = [Loop::default(); 3];
            for (to, from) in loops.iter_mut().zip(&piece.loops) {
                let dst_stride = from.dst_stride as i64;
                *to = Loop { count: from.count, src_stride: from.src_stride, dst_stride };
            }
            let nest = nest(piece.run_bytes, loops.get(..piece.loops.len()).unwrap_or_default())?;
            Ok(ReadyPiece {
                tensor: piece.tensor,
                src_offset: piece.src_offset,
                dst_offset: piece.dst_offset,
                nest,
            })
        };
        let pieces = plan.pieces.iter().map(|list| list.iter().map(ready).collect::<Result<Vec<_>>>());
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        let shortest = plan.pieces.iter().flatten().map(|piece| piece.run_bytes).min().unwrap_or(0);
        let bytes = plan.bytes_to.iter().sum();
        Ok(Ready { pieces, hint: hint(bytes, shortest, last_level_cache()) })
    }
}

fn nest(run_bytes: u64, loops: &[Loop]) -> Result<CopyNest> {
    let run = usize::try_from(run_bytes).unwrap_or(usize::MAX);
    CopyNest::new(run, loops).map_err(|error| Error::Region(error.into()))
}

/// A host array of a call; others were refused before.
fn host(array: &ExchangeArray) -> Result<&HostRegion> {
    array.region.host().ok_or_else(|| wrong_memory(&array.region, ExchangeDevice::Cpu))
}

impl Backend for CpuBackend {
    fn transport(&self) -> &Transport {
        &self.transport
    }

    fn pool(&self) -> &Region {
        &self.pool
    }

    fn accepts(&self, region: &Region) -> Result<()> {
        match region {
            Region::Host(_) => Ok(()),
            Region::Device(_) => Err(wrong_memory(region, ExchangeDevice::Cpu)),
        }
    }

    fn run(&self, launch: &Launch<'_>) -> std::result::Result<(), Trouble> {
        let ready = Ready::of_launch(launch).map_err(Trouble::Refused)?;
        let mut local = lock(&self.local);
        let outcome = self.steps(&mut local, launch, ready);
        self.epoch.store(local.epoch, Ordering::Release);
        outcome.map_err(|(peer, kind)| {
            local.poisoned = true;
            self.spoil(launch);
            let epoch = local.epoch + 1;
            Trouble::Fault(Fault { kind, peer, epoch, op: Some(launch.plan.op) })
        })
    }

    fn refuse(&self, _op: ExchangeOp, refusal: Refusal, _stream: Option<StreamHandle>) -> bool {
        let mut local = lock(&self.local);
        if !std::mem::replace(&mut local.poisoned, true) {
            self.post_refusal(local.epoch + 1, refusal);
        }
        true
    }

    fn refusals_are_seen(&self) -> bool {
        true
    }

    fn copy_out(
        &self,
        plan: &Plan,
        place: Place,
        into: &[ExchangeArray],
        _stream: Option<StreamHandle>,
    ) -> Result<()> {
        let mut copier = Copier::new(CopyHint::Temporal);
        for (shape, array) in plan.results.iter().zip(into) {
            if shape.bytes() > 0 {
                let nest = copy_of(shape, array)?;
                let from = (&self.own.pool, place.offset + shape.offset);
                copier.nest(from, (host(array)?, array.offset), &nest, 0..nest.num_runs())?;
            }
        }
        Ok(())
    }

    fn release(&self, _place: Place, _streams: &[StreamHandle]) {}

    fn abort(&self, code: u32, peer: usize) {
        self.page.store(page::ABORT, abort_word(code, peer as u32));
        self.own.bell.ring();
    }

    fn set_timeout(&self, timeout: Duration) {
        self.page.store(page::TIMEOUT, nanoseconds(timeout));
        self.own.bell.ring();
    }

    fn peer_left(&self, peer: usize) {
        // Only the watching thread writes this word.
        self.page.store(page::LEFT, self.page.load(page::LEFT) | 1 << peer);
        self.own.bell.ring();
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn quiesce(&self) -> Result<()> {
        // A call has ended when it returns, and the communicator runs one thing at a time.
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        let mut local = lock(&self.local);
        for index in 0..self.own.words.len() {
            if !setup::is_bell(index) {
                self.own.words.store(index, 0);
            }
        }
        *local = Local::new();
        self.epoch.store(0, Ordering::Release);
        self.page.store(page::ABORT, 0);
        Ok(())
    }

    fn close(&self, _all_gone: bool) {
        let mut peers = self.peers.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        peers.clear();
    }
}

impl CpuBackend {
    /// Nobody shall mistake what a failed call left for its result.
    fn spoil(&self, launch: &Launch<'_>) {
        let bytes = launch.plan.result_bytes.get(self.rank).copied().unwrap_or(0);
        if let Err(error) = self.own.pool.fill(launch.place.offset, bytes, 0xFF) {
            tracing::error!(%error, "cannot fill the result of a failed call");
        }
    }

    fn fault(&self, kind: FaultKind) -> (usize, FaultKind) {
        (self.rank, kind)
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}

/// A contiguous result to an array of the same shape: one run where both are contiguous, loops where the array is not.
fn copy_of(shape: &ResultShape, array: &ExchangeArray) -> Result<CopyNest> {
    if array.strides == shape.strides {
        return nest(shape.bytes(), &[]);
    }
    let mut loops = [Loop::default(); 3];
    for (axis, to) in loops.iter_mut().enumerate() {
        let count = shape.shape.get(axis).copied().unwrap_or(1);
        let stride = |strides: &[i64; 3]| strides.get(axis).copied().unwrap_or(0);
        *to = Loop { count, src_stride: stride(&shape.strides), dst_stride: stride(&array.strides) };
    }
    nest(shape.shape[3] * shape.dtype.bytes(), &loops)
}
