//! Ranks that compute on GPUs of one host: kernels write into the peers' memory and wait for theirs.
//!
//! | file | what |
//! |---|---|
//! | `setup`, `share` | from a mesh to mapped memory, stage by stage, all ranks or none; the probe |
//! | `near`, `gate` | ranks that are threads of one process |
//! | `calls` | one call: route, engine, order |
//! | `fences` | when a buffer may be written again |
//! | `ticker` | finding out what a kernel recorded when nobody asks |
//!
//! Two processes may share a GPU, which takes turns between them: correct, and slow. Two threads may not.

mod calls;
mod fences;
mod gate;
mod near;
mod setup;
mod share;
mod ticker;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvferry_cuda::{
    ExchangeOut, ExchangePage, ExchangeQueue, Gpu, Record, RecordKind, RouteInput, StreamHandle, abort_word,
};
use kvferry_layout::ExchangeOp;

use super::attend::Attend;
use super::backend::{Backend, CaptureId, Launch, Transport, Trouble};
use super::call::wrong_memory;
use super::error::{Fault, FaultKind};
use super::options::{ExchangeArray, ExchangeDevice};
use super::plan::Plan;
use super::pool::{Place, Pool, Slot};
use super::protocol::Refusal;
use super::state::Monitor;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::transfer::lock;
use fences::Fences;
use gate::Gate;
use ticker::Ticker;

pub(super) use setup::connect;
pub use share::quarantined_bytes;

/// How long a call waits for a peer that has closed: only for what it said before.
const FAREWELL: Duration = Duration::from_secs(2);
/// What a call may take beyond its bound before it is no longer waited for.
const MARGIN: Duration = Duration::from_secs(2);

/// The CUDA backend of one rank.
pub(super) struct CudaBackend {
    rank: usize,
    world: usize,
    gpu: Arc<Gpu>,
    transport: Transport,
    pool: Region,
    page: Arc<ExchangePage>,
    /// `None` once closed.
    queue: Mutex<Option<ExchangeQueue>>,
    fences: Fences,
    /// Ranks of this process, if there are several.
    gate: Option<Arc<Gate>>,
    /// Bound of a wait, in nanoseconds.
    timeout: AtomicU64,
    /// Calls put on streams since the last reset.
    calls: AtomicU64,
    /// Ranks that have closed, by bit.
    left: AtomicU64,
    /// A call was captured: graphs may launch it without anybody's knowledge.
    captured: AtomicBool,
    /// No header can be posted any more.
    mute: AtomicBool,
    /// Captures whose graphs own buffers, by the driver's number.
    captures: Mutex<Vec<Weak<CaptureEnd>>>,
    attached: OnceLock<Attached>,
    ticker: OnceLock<Ticker>,
    attend: Attend,
}

/// What holds the backend.
struct Attached {
    pool: Weak<Pool>,
}

/// Kept by the graph of a capture: gives its buffers back.
struct CaptureEnd {
    pool: Weak<Pool>,
    id: CaptureId,
}

impl Drop for CaptureEnd {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            pool.end_capture(self.id);
        }
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CudaBackend(rank {} of {}, {:?}, {})",
            self.rank, self.world, self.gpu, self.transport.name
        )
    }
}

/// The stream of a call. The legacy stream comes after all work of libraries that know no streams.
fn stream_of(stream: Option<StreamHandle>) -> StreamHandle {
    stream.unwrap_or(StreamHandle::LEGACY)
}

impl CudaBackend {
    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    /// What a kernel recorded, as the communicator tells it.
    fn fault_of(&self, record: &Record) -> Fault {
        let waited = self.timeout();
        let peer = (record.peer as usize).min(self.world - 1);
        let left = self.left.load(Ordering::Acquire) & 1 << peer != 0;
        let kind = match RecordKind::from_code(record.kind) {
            Some(RecordKind::HeaderTimeout) if left => FaultKind::PeerLeft,
            Some(RecordKind::HeaderTimeout) => FaultKind::HeaderTimeout { waited },
            Some(RecordKind::ArrivalTimeout) => FaultKind::ArrivalTimeout { waited },
            Some(RecordKind::Mismatch) => FaultKind::Mismatch {
                reason: format!(
                    "rank {peer} differs from rank {} in what is called, with which shapes",
                    self.rank
                ),
            },
            Some(RecordKind::Refused) => FaultKind::Refused { code: record.value },
            Some(RecordKind::BadPlace) => FaultKind::BadPlace { place: record.value },
            Some(RecordKind::Aborted) => FaultKind::Aborted,
            _ => FaultKind::Failed { reason: format!("a kernel recorded fault {}", record.kind) },
        };
        // Of two ranks that differ the second counts as the odd one on both.
        let odd = matches!(kind, FaultKind::Mismatch { .. }) && self.world == 2;
        let op = u32::try_from(record.op).ok().and_then(ExchangeOp::from_code);
        Fault { kind, peer: if odd { 1 } else { peer }, epoch: record.epoch, op }
    }

    /// What the driver said in the middle of a call.
    fn failed(&self, error: &dyn fmt::Display, op: ExchangeOp) -> Fault {
        let kind = FaultKind::Failed { reason: error.to_string() };
        Fault { kind, peer: self.rank, epoch: self.epoch() + 1, op: Some(op) }
    }

    /// The part of the pool that a region lies in, if it does.
    fn slot_of(&self, region: &Region) -> Option<Slot> {
        let (own, it) = (self.pool.span(), region.span());
        let offset = it.addr.checked_sub(own.addr).filter(|&offset| offset < own.len)?;
        self.attached.get()?.pool.upgrade()?.slot_at(offset)
    }
}

impl Backend for CudaBackend {
    fn transport(&self) -> &Transport {
        &self.transport
    }

    fn pool(&self) -> &Region {
        &self.pool
    }

    fn attach(&self, pool: &Arc<Pool>, monitor: &Arc<Monitor>) {
        // Attached once.
        let _ = self.attached.set(Attached { pool: Arc::downgrade(pool) });
        let (page, monitor) = (Arc::clone(&self.page), Arc::downgrade(monitor));
        let started = Ticker::start(move || {
            if page.record().is_none() {
                return true;
            }
            if let Some(monitor) = monitor.upgrade() {
                // Breaks the communicator, with all that follows.
                let _ = monitor.check();
            }
            false
        });
        match started {
            Ok(ticker) => drop(self.ticker.set(ticker)),
            // Calls, waits and checks look too.
            Err(error) => tracing::warn!(%error, "nobody looks for faults between all2all calls"),
        }
    }

    fn accepts(&self, region: &Region) -> Result<()> {
        match region {
            Region::Device(device) if device.ordinal() == self.gpu.ordinal() => Ok(()),
            _ => Err(wrong_memory(region, ExchangeDevice::Gpu(self.gpu.ordinal()))),
        }
    }

    fn capture(&self, stream: Option<StreamHandle>) -> Result<Option<CaptureId>> {
        let Some(stream) = stream else { return Ok(None) };
        let cx = self.gpu.enter()?;
        Ok(self.gpu.capture_id(&cx, stream)?.map(CaptureId))
    }

    fn run(&self, launch: &Launch<'_>) -> std::result::Result<(), Trouble> {
        self.call(launch)
    }

    fn refuse(&self, op: ExchangeOp, refusal: Refusal, stream: Option<StreamHandle>) -> bool {
        self.publish(op, refusal, stream_of(stream))
    }

    fn refusals_are_seen(&self) -> bool {
        !self.mute.load(Ordering::Relaxed)
    }

    fn copy_out(
        &self,
        plan: &Plan,
        place: Place,
        into: &[ExchangeArray],
        stream: Option<StreamHandle>,
    ) -> Result<()> {
        let mut parts = Vec::with_capacity(into.len());
        for (shape, array) in plan.results.iter().zip(into) {
            let Region::Device(region) = &array.region else {
                return Err(wrong_memory(&array.region, ExchangeDevice::Gpu(self.gpu.ordinal())));
            };
            let to = RouteInput { region, offset: array.offset };
            parts.push((place.offset + shape.offset, to, calls::loops_out(shape, array)));
        }
        let outs: Vec<_> = (parts.iter())
            .map(|(from, to, (run_bytes, loops))| ExchangeOut {
                from: *from,
                to: *to,
                run_bytes: *run_bytes,
                loops,
            })
            .collect();
        let mut queue = lock(&self.queue);
        let queue = queue.as_mut().ok_or(Error::ExchangeClosed)?;
        let cx = self.gpu.enter()?;
        Ok(queue.copy_out(&cx, stream_of(stream), &outs)?)
    }

    fn release(&self, place: Place, streams: &[StreamHandle]) {
        self.fences.close(place.slot, streams);
    }

    fn abort(&self, code: u32, peer: usize) {
        self.page.abort(abort_word(code.max(1), peer as u32));
    }

    fn set_timeout(&self, timeout: Duration) {
        let nanoseconds = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.timeout.store(nanoseconds, Ordering::Relaxed);
        if self.left.load(Ordering::Acquire) == 0 {
            self.page.set_timeout(timeout);
        }
    }

    fn peer_left(&self, peer: usize) {
        self.left.fetch_or(1 << peer, Ordering::AcqRel);
        // What it has sent is here or on its way; what it has not, never comes.
        self.page.set_timeout(self.timeout().min(FAREWELL));
        if let Some(gate) = &self.gate {
            gate.leave(peer);
        }
    }

    fn fault(&self) -> Option<Fault> {
        self.page.record().map(|record| self.fault_of(&record))
    }

    fn epoch(&self) -> u64 {
        self.calls.load(Ordering::Acquire)
    }

    fn quiesce(&self) -> Result<()> {
        let mut queue = lock(&self.queue);
        let Some(queue) = queue.as_mut() else { return Ok(()) };
        let patience = self.timeout().saturating_add(MARGIN);
        let start = Instant::now();
        let mut attending = self.attend.begin();
        loop {
            let left = patience.saturating_sub(start.elapsed());
            if queue.settle(attending.nap(left))? {
                break;
            }
            if attending.gives_up() {
                return Err(Error::Interrupted { what: "a wait for the device".to_owned() });
            }
            if left.is_zero() {
                return Err(Error::Timeout { seconds: patience.as_secs_f64() });
            }
        }
        // Of graphs only the device knows. A broken communicator's calls end at once, so this does not wait for peers.
        if self.captured.load(Ordering::Relaxed) && (self.page.aborted() != 0 || self.page.record().is_some())
        {
            self.gpu.synchronize()?;
        }
        Ok(())
    }

    fn reset(&self) -> Result<()> {
        let queue = lock(&self.queue);
        let queue = queue.as_ref().ok_or(Error::ExchangeClosed)?;
        queue.link().zero()?;
        self.page.set_timeout(self.timeout());
        self.calls.store(0, Ordering::Release);
        self.mute.store(false, Ordering::Relaxed);
        if let Some(gate) = &self.gate {
            gate.come_back(self.rank);
        }
        // Graphs live on.
        if let Some(ticker) = self.ticker.get() {
            ticker.resume();
        }
        Ok(())
    }

    fn close(&self, all_gone: bool) {
        self.fences.shut();
        let queue = lock(&self.queue).take();
        if let Some(gate) = &self.gate {
            gate.leave(self.rank);
        }
        if let Some(queue) = queue
            && !all_gone
            && self.transport.name == share::IPC
        {
            share::quarantine(queue.link().memory());
        }
    }
}
