//! One rank's end of an exchange: what it shares, what its peers share, and what it remembers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_kernels::{
    ExchangePeer, ExchangeProbeParams, ExchangeProbePeer, Kernel, LocalState, MAX_RANKS, PROBE_BYTES,
    ProbeReport,
};

use super::memory::{ExchangeMemory, PeerMemory};
use super::page::ExchangePage;
use crate::context::ContextGuard;
use crate::error::{CudaError, Result};
use crate::gpu::{Event, Gpu};
use crate::memory::DeviceBuffer;
use crate::raw;

/// How often something that has no event of its own is looked at.
const LOOK: Duration = Duration::from_micros(100);

/// Memory of all ranks as this rank's device sees it. Whatever runs for an exchange holds it.
pub struct ExchangeLink {
    rank: usize,
    memory: Arc<ExchangeMemory>,
    /// By rank, the own one included.
    peers: Vec<PeerMemory>,
    /// The same for kernels.
    table: Vec<ExchangePeer>,
    /// A [`LocalState`].
    state: DeviceBuffer,
    page: Arc<ExchangePage>,
    gpu: Arc<Gpu>,
}

impl fmt::Debug for ExchangeLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExchangeLink(rank {} of {}, {:?})", self.rank, self.peers.len(), self.gpu)
    }
}

impl ExchangeLink {
    /// The link of `rank` to `peers`, by rank, of which its own entry is [`near`](PeerMemory::near) `memory`. Control
    /// block and state are undefined before [`zero`](Self::zero).
    ///
    /// # Errors
    /// [`CudaError::Argument`] for a world of none or too many ranks, a rank outside it, or an own entry of other memory;
    /// [`CudaError::WrongDevice`] for memory mapped for another device; [`CudaError::NoKernels`]; a failing allocation.
    pub fn new(
        rank: usize,
        memory: Arc<ExchangeMemory>,
        peers: Vec<PeerMemory>,
        page: Arc<ExchangePage>,
    ) -> Result<Arc<ExchangeLink>> {
        let gpu = Arc::clone(memory.gpu());
        let refuse = |what, value: usize, rule| Err(CudaError::Argument { what, value: value as u64, rule });
        if peers.is_empty() || peers.len() > MAX_RANKS {
            return refuse("the number of ranks", peers.len(), "1 to 64 are possible");
        }
        if !peers.get(rank).is_some_and(|own| own.is(&memory)) {
            return refuse("the rank", rank, "its entry among the peers must be its own memory");
        }
        if let Some(peer) = peers.iter().find(|peer| peer.ordinal() != gpu.ordinal()) {
            let (what, found) = ("a peer's mapping", peer.ordinal());
            return Err(CudaError::WrongDevice { what, found, ordinal: gpu.ordinal() });
        }
        if !gpu.has_kernels() {
            return Err(CudaError::NoKernels);
        }
        let table = peers.iter().map(|peer| ExchangePeer {
            control: peer.control(),
            pool: peer.pool(),
            pool_bytes: peer.pool_bytes(),
        });
        let table = table.collect();
        let state = DeviceBuffer::new(size_of::<LocalState>(), gpu.ordinal())?;
        Ok(Arc::new(ExchangeLink { rank, memory, peers, table, state, page, gpu }))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.peers.len()
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// What it exports.
    pub fn memory(&self) -> &Arc<ExchangeMemory> {
        &self.memory
    }

    /// Its page.
    pub fn page(&self) -> &Arc<ExchangePage> {
        &self.page
    }

    /// All ranks, for kernels.
    pub(super) fn table(&self) -> &[ExchangePeer] {
        &self.table
    }

    /// Address of the state.
    pub(super) fn state(&self) -> u64 {
        self.state.addr()
    }

    /// Puts zeroes into control block, state, abort word and record, and waits until they are there. No rank may be in a
    /// call, and none may begin one before all have done this.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn zero(&self) -> Result<()> {
        let cx = self.gpu.enter()?;
        let stream = self.gpu.service_stream(&cx)?;
        self.memory.zero_control(&cx, stream)?;
        let handle = self.gpu.own_stream(&cx, stream)?;
        // SAFETY: exactly the state's allocation, which `self` keeps; the stream is waited for below.
        unsafe { raw::cuMemsetD8Async(self.state(), 0, size_of::<LocalState>(), handle) }?;
        self.gpu.finish(&cx, stream)?;
        self.page.clear();
        Ok(())
    }

    /// Launches the probe: all ranks at the same time, on control blocks that are zero, in pools that hold nothing yet.
    /// `nonce` is the same on all ranks and not 0.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for a pool too small to probe, a guard of another device, or the driver's refusal.
    pub fn probe(
        self: &Arc<Self>,
        cx: &ContextGuard<'_>,
        nonce: u64,
        timeout: Duration,
    ) -> Result<ExchangeProbe> {
        if let Some(small) =
            self.peers.iter().find(|peer| peer.pool_bytes() < PROBE_BYTES * self.world() as u64)
        {
            let (what, value) = ("the bytes of a pool", small.pool_bytes());
            return Err(CudaError::Argument { what, value, rule: "at least 4096 per rank are needed" });
        }
        let stream = self.gpu.service_stream(cx)?;
        let event = self.gpu.event(cx)?;
        let handle = self.gpu.own_stream(cx, stream)?;
        let peers: Vec<_> = (self.table.iter())
            .map(|peer| ExchangeProbePeer { control: peer.control, pool: peer.pool })
            .collect();
        let wait = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let params = ExchangeProbeParams::new(self.rank, &peers, self.page.reports_addr(), nonce, wait);
        let (kernel, geometry) = (Kernel::ExchangeProbe, ExchangeProbeParams::GEOMETRY);
        // SAFETY: the context is current and the stream one of it (`own_stream`); the struct is that kernel's. It writes
        // `PROBE_BYTES` per rank at the beginning of each pool (checked above), a few words of each control block, and
        // the reports in the page; all of that is `self`'s, which the probe holds until it has ended.
        unsafe { self.gpu.kernels().launch(kernel, geometry, (&raw const params).cast(), handle) }?;
        let probe = ExchangeProbe { link: Arc::clone(self), event, ended: false };
        probe.event.record(cx, stream)?;
        Ok(probe)
    }
}

/// A probe that runs.
#[derive(Debug)]
pub struct ExchangeProbe {
    link: Arc<ExchangeLink>,
    event: Event,
    ended: bool,
}

impl ExchangeProbe {
    /// What was found about every rank, once that is known; the own entry says nothing.
    ///
    /// # Errors
    /// [`CudaError::Argument`] if it has not ended within `patience`, or an asynchronous failure: an address that the
    /// device cannot reach, for instance. The device is then lost to this process.
    pub fn finish(mut self, patience: Duration) -> Result<Vec<ProbeReport>> {
        let deadline = Instant::now() + patience;
        while !self.event.query()? {
            if Instant::now() >= deadline {
                let (what, value) = ("the time the probe has taken in ms", patience.as_millis() as u64);
                return Err(CudaError::Argument { what, value, rule: "it should have ended by itself" });
            }
            std::thread::sleep(LOOK);
        }
        self.ended = true;
        Ok((0..self.link.world()).map(|rank| self.link.page.report(rank)).collect())
    }
}

impl Drop for ExchangeProbe {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // It ends by itself: whoever frees memory waits for the device. The link must be let go of after that only.
        let link = Arc::clone(&self.link);
        crate::deferred::run_later(move || {
            if let Err(error) = link.gpu.synchronize() {
                error.log_on_drop("waiting for a probe: its memory is leaked. That");
                std::mem::forget(link);
            }
        });
    }
}
