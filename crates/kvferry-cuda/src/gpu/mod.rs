//! One device in use: its context, its kernels, and the pools of things that calls need for a moment.

mod event;
mod graph;
mod kernels;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use event::{Event, EventHandle};
pub use graph::Graph;
pub(crate) use stream::capture_of;
pub use stream::{Capture, Stream, StreamHandle};

use crate::capture::RelaxedCapture;
use crate::context::{self, ContextGuard, PrimaryContext};
use crate::deferred::run_later;
use crate::device::DeviceInfo;
use crate::driver::Driver;
use crate::error::{CudaError, PEER_ALREADY_ENABLED, Result};
use crate::raw::{self, CUevent, CUstream};
use kernels::Kernels;

/// A device made ready for transfers: primary context retained, kernels loaded. One per device and process; everything
/// that may still run on the device holds an `Arc` of it.
///
/// Methods that put work on a stream take a [`ContextGuard`] of [`enter`](Self::enter) as proof that the context is
/// current. None of them waits for the device, unless it says so.
pub struct Gpu {
    info: DeviceInfo,
    /// Marks the streams made here: a handle that outlives this `Gpu` is recognised, not used.
    serial: u32,
    kernels: Kernels,
    /// Contexts this one was given access to, kept so that the access stays.
    peers: Mutex<BTreeMap<u32, Arc<PrimaryContext>>>,
    events: Mutex<Vec<CUevent>>,
    streams: Mutex<Vec<CUstream>>,
    /// For set-up copies and for forks of the legacy stream; made on first use.
    service: Mutex<Option<CUstream>>,
    context: Arc<PrimaryContext>,
}

// SAFETY: events, streams, modules and functions may be used from any thread while their context lives (CUDA driver API:
// driver calls are thread-safe and handles belong to a context, not to a thread); the context is retained by `context`.
unsafe impl Send for Gpu {}
// SAFETY: as for Send; the pools are behind locks, and the rest is never changed after `open`.
unsafe impl Sync for Gpu {}

/// Devices in use, by ordinal. Weak: a static must not own driver state, which may be gone when statics end.
static IN_USE: Mutex<BTreeMap<u32, Weak<Gpu>>> = Mutex::new(BTreeMap::new());
/// 0 marks foreign streams.
static SERIALS: AtomicU32 = AtomicU32::new(1);

/// Locks a pool. Pools are changed by single pushes and pops, so they are valid after any panic.
fn lock<T>(pool: &Mutex<T>) -> MutexGuard<'_, T> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// The device `ordinal`, shared with every other user of it in this process. The first opening loads every kernel, so
    /// that no later call loads code (loading waits for running kernels, which a spinning one would never let happen).
    ///
    /// # Errors
    /// Those of [`Driver::get`], [`CudaError::DriverTooOld`], [`CudaError::InvalidDevice`], and a failing context or
    /// module load. A build without kernels opens; launches then give [`CudaError::NoKernels`].
    pub fn open(ordinal: u32) -> Result<Arc<Gpu>> {
        Driver::get()?.require_kernels()?;
        let mut in_use = lock(&IN_USE);
        if let Some(gpu) = in_use.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let context = PrimaryContext::get(ordinal)?;
        let kernels = {
            let _current = context.enter()?;
            let _relaxed = RelaxedCapture::enter()?;
            Kernels::load()?
        };
        let gpu = Arc::new(Gpu::made(DeviceInfo::get(ordinal)?, context, kernels));
        in_use.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    /// The device `ordinal` for events on its streams only: as it is if somebody has opened it, else without kernels,
    /// whose loading would wait for all work of the device.
    ///
    /// # Errors
    /// Those of [`Driver::get`], [`CudaError::InvalidDevice`], and a failing context.
    pub fn bystander(ordinal: u32) -> Result<Arc<Gpu>> {
        if let Some(gpu) = lock(&IN_USE).get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let info = DeviceInfo::get(ordinal)?;
        Ok(Arc::new(Gpu::made(info, PrimaryContext::get(ordinal)?, Kernels::default())))
    }

    fn made(info: DeviceInfo, context: Arc<PrimaryContext>, kernels: Kernels) -> Gpu {
        Gpu {
            info,
            serial: SERIALS.fetch_add(1, Relaxed),
            kernels,
            peers: Mutex::default(),
            events: Mutex::default(),
            streams: Mutex::default(),
            service: Mutex::default(),
            context,
        }
    }

    /// Device number.
    pub fn ordinal(&self) -> u32 {
        self.info.ordinal
    }

    /// Streaming multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.info.sm_count
    }

    /// What the device is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Whether this build has kernels to launch.
    pub fn has_kernels(&self) -> bool {
        self.kernels.loaded()
    }

    /// Makes the device's context current for the calling thread until the guard is dropped.
    ///
    /// # Errors
    /// The driver's refusal, for instance in a forked child.
    pub fn enter(&self) -> Result<ContextGuard<'_>> {
        self.context.enter()
    }

    /// Lets kernels of this device read and write memory of device `other`, for good. Cheap when done before.
    ///
    /// # Errors
    /// [`CudaError::PeerAccess`] if the hardware cannot, [`CudaError::InvalidDevice`], or the driver's refusal.
    pub fn peer_access(&self, other: u32) -> Result<()> {
        if other == self.ordinal() || lock(&self.peers).contains_key(&other) {
            return Ok(());
        }
        self.can_access(other)?;
        let peer = PrimaryContext::get(other)?;
        let _current = self.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: our context is current and the peer's is retained by `peer`; flags must be 0.
        match unsafe { raw::cuCtxEnablePeerAccess(peer.handle(), 0) } {
            Err(error) if error.code() != Some(PEER_ALREADY_ENABLED) => return Err(error),
            _ => {}
        }
        lock(&self.peers).insert(other, peer);
        Ok(())
    }

    /// Ok if kernels of this device could be given access to memory of device `other`.
    pub(crate) fn can_access(&self, other: u32) -> Result<()> {
        let driver = Driver::get()?;
        let (here, there) = (driver.device(self.ordinal())?, driver.device(other)?);
        let mut can = 0;
        // SAFETY: `can` is a live integer; both devices came from the driver.
        unsafe { raw::cuDeviceCanAccessPeer(&mut can, here, there) }?;
        if can == 0 { Err(CudaError::PeerAccess { from: self.ordinal(), to: other }) } else { Ok(()) }
    }

    /// Waits until everything on the device's primary context is done, other libraries' work included. Spoils a capture
    /// that any stream of the context has begun, whatever the thread's capture mode: for tests and emergencies.
    ///
    /// # Errors
    /// An earlier asynchronous failure, or the driver's refusal, for instance while one of its streams captures a graph.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the context is current.
        unsafe { raw::cuCtxSynchronize() }
    }

    /// The driver's handle of `stream`, once it is sure that the guard is ours and that the stream exists.
    pub(crate) fn usable(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<CUstream> {
        let wrong = || CudaError::WrongContext { ordinal: self.ordinal() };
        if !std::ptr::eq(cx.context(), &*self.context) {
            return Err(wrong());
        }
        // The implicit streams are those of whatever context is current.
        if stream.is_implicit() && context::current()? != self.context.handle() {
            return Err(wrong());
        }
        if stream.home() != 0 && stream.home() != self.serial {
            return Err(CudaError::WrongStream { stream: stream.raw(), ordinal: self.ordinal() });
        }
        Ok(stream.as_driver())
    }

    /// A stream of the library's own for work in passing: set-up copies, forks of the legacy stream.
    pub(crate) fn service_stream(&self, _cx: &ContextGuard<'_>) -> Result<StreamHandle> {
        let mut service = lock(&self.service);
        let stream = match *service {
            Some(stream) => stream,
            None => *service.insert(stream::create()?),
        };
        Ok(StreamHandle::own(stream, self.serial))
    }

    /// Waits for what was put on `stream`. Other threads' captures stay whole.
    pub(crate) fn finish(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        let stream = self.usable(cx, stream)?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the stream exists, see `usable`.
        unsafe { raw::cuStreamSynchronize(stream) }
    }

    /// The loaded kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }
}

/// What a closed device gives back to the driver.
struct Remains {
    kernels: Kernels,
    events: Vec<CUevent>,
    streams: Vec<CUstream>,
    context: Arc<PrimaryContext>,
}

// SAFETY: as for `Gpu`, whose parts these are.
unsafe impl Send for Remains {}

impl Remains {
    fn give_back(mut self) {
        let _current = match self.context.enter() {
            Ok(current) => current,
            Err(error) => return error.log_on_drop("entering a context to give back its events and streams"),
        };
        self.events.into_iter().for_each(event::destroy);
        self.streams.into_iter().for_each(stream::destroy);
        self.kernels.unload();
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let remains = Remains {
            kernels: mem::take(&mut self.kernels),
            events: mem::take(&mut lock(&self.events)),
            streams: lock(&self.streams).drain(..).chain(lock(&self.service).take()).collect(),
            context: Arc::clone(&self.context),
        };
        // Unloading waits for all work of the device; whoever drops the last handle need not.
        run_later(move || remains.give_back());
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.info.ordinal, self.info.name)
    }
}
