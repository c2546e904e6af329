//! The calls of one rank: each launched after the one before, whatever stream it is on.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_host::Owner;
use kvferry_kernels::{
    ExchangeArriveParams, ExchangeFlags, ExchangeLaunch, ExchangeLoop, ExchangeParamBuffer, ExchangePart,
    Kernel, LocalState, arrival_offset,
};

use super::boxes::{self, CopyBox};
use super::link::ExchangeLink;
use super::route::{ExchangeRoute, RouteInput};
use crate::capture::RelaxedCapture;
use crate::context::ContextGuard;
use crate::deferred::run_later;
use crate::error::{CudaError, Result};
use crate::flight::Flight;
use crate::gpu::{Capture, Event, Gpu, Stream, StreamHandle};
use crate::memory::DeviceRegion;
use crate::raw::{self, CUstream};

/// How often a wait without an end of its own looks.
const LOOK: Duration = Duration::from_micros(100);
/// The same where nobody waits.
const PATIENT_LOOK: Duration = Duration::from_millis(2);
/// Most calls whose inputs are kept one by one; beyond that those of two neighbours are let go of together.
const MOST_TRIPS: usize = 512;

/// How a call is put on its stream.
#[derive(Clone, Copy, Debug)]
pub enum ExchangeMode<'a> {
    /// One launch.
    Push,
    /// A one-CTA launch that waits for all headers, then the rest: a late peer does not hold the multiprocessors.
    OpenedPush,
    /// The same with the copy engine for what goes to peers. Where their results land must be known: by rank, in bytes
    /// from the start of their pools, the own entry being the landing place.
    CopyEngine(&'a [u64]),
}

/// A call that failed on the host.
#[derive(Debug)]
pub struct ExchangeStopped {
    /// Why.
    pub error: CudaError,
    /// Whether a part of it may be on the stream already: peers may then have seen its header.
    pub begun: bool,
}

impl From<CudaError> for ExchangeStopped {
    fn from(error: CudaError) -> ExchangeStopped {
        ExchangeStopped { error, begun: false }
    }
}

type Outcome = std::result::Result<(), ExchangeStopped>;

/// A call on its way, or a checkpoint after several.
struct Trip {
    event: Event,
    owners: Vec<Owner>,
}

/// One stretch of a copy out of the pool.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeOut<'a> {
    /// Bytes from the start of the pool to the first run.
    pub from: u64,
    /// Where it goes; memory of the link's device.
    pub to: RouteInput<'a>,
    /// Bytes of every run.
    pub run_bytes: u64,
    /// Loops around it: `src_stride` steps the pool, `dst_stride` the target.
    pub loops: &'a [ExchangeLoop],
}

/// What puts the calls of one rank on streams. A call waits for the one before it, on whatever stream that was, and holds
/// what its kernels use until they are done; in a graph, as long as the graph lives.
///
/// Inputs from [`DeviceRegion::from_stream_ordered`] are not held beyond the call.
pub struct ExchangeQueue {
    link: Arc<ExchangeLink>,
    buffer: ExchangeParamBuffer,
    trips: VecDeque<Trip>,
    /// The stream of the last call that was not captured. `None`: nothing is known of what came before.
    last: Option<StreamHandle>,
    /// The last captured call: its capture, its stream, and an event in that capture.
    captured: Option<(u64, StreamHandle, Event)>,
    /// A launch was not followed by an event.
    untracked: bool,
    /// For the own share beside the copy engine.
    side: Stream,
}

impl fmt::Debug for ExchangeQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExchangeQueue({:?}, {} on their way)", self.link, self.trips.len())
    }
}

/// A stream that a call is about to be put on, as [`ExchangeQueue::look`] found it.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeWay {
    stream: StreamHandle,
    handle: CUstream,
    /// The capture that it becomes part of.
    capture: Option<u64>,
}

impl ExchangeWay {
    /// The capture that the stream takes part in, by the driver's number of it.
    pub fn capture(&self) -> Option<u64> {
        self.capture
    }
}

impl ExchangeQueue {
    /// The queue of `link`. Makes what calls will need.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(link: &Arc<ExchangeLink>) -> Result<ExchangeQueue> {
        let side = Stream::new(link.gpu())?;
        Ok(ExchangeQueue {
            link: Arc::clone(link),
            buffer: ExchangeParamBuffer::new(),
            trips: VecDeque::with_capacity(16),
            last: None,
            captured: None,
            untracked: false,
            side,
        })
    }

    /// Whose calls these are.
    pub fn link(&self) -> &Arc<ExchangeLink> {
        &self.link
    }

    /// Room for the parameters of a route that is being checked.
    pub fn buffer(&mut self) -> &mut ExchangeParamBuffer {
        &mut self.buffer
    }

    /// Finds out what there is to know about a stream before a call is put on it.
    ///
    /// # Errors
    /// A guard or stream of another device, and those of [`Gpu::capture_id`].
    pub fn look(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<ExchangeWay> {
        let gpu = self.link.gpu();
        let handle = gpu.own_stream(cx, stream)?;
        Ok(ExchangeWay { stream, handle, capture: gpu.capture_id(cx, stream)? })
    }

    /// Puts a call on the stream of `way`: the inputs' bytes to where the peers' results land, peers' bytes to `place` of the own
    /// pool. `keep` is kept as the inputs are; under capture, as long as the graph.
    ///
    /// # Errors
    /// Before anything is on the stream: inputs out of their regions or on another device, places out of pools, a route
    /// of another link, a stream of another device, a spoiled capture. Later: the driver's refusal.
    #[expect(clippy::too_many_arguments, reason = "a call has this many facts")]
    pub fn call(
        &mut self,
        cx: &ContextGuard<'_>,
        way: &ExchangeWay,
        route: &mut ExchangeRoute,
        inputs: &[RouteInput<'_>],
        place: u64,
        hash: u64,
        mode: ExchangeMode<'_>,
        keep: Option<Owner>,
    ) -> Outcome {
        if !Arc::ptr_eq(route.link(), &self.link) {
            let (what, rule) = ("a route", "it must be of the queue's link");
            return Err(CudaError::Argument { what, value: route.op().into(), rule }.into());
        }
        route.place_inputs(inputs)?;
        if let ExchangeMode::CopyEngine(places) = mode {
            self.check_places(route, place, places)?;
        }
        // Whatever is wrong with the call is found before it touches the stream.
        let copy_engine = matches!(mode, ExchangeMode::CopyEngine(_));
        route.aim(&mut self.buffer, place, hash, copy_engine)?;
        self.set_out(cx, way)?;
        let owners = self.owners(inputs.iter().map(|input| input.region), keep);
        self.hold_for_graph(cx, way, &owners)?;
        let launched = self.launch(cx, way, route, place, hash, mode);
        let kept = self.arrive(cx, way, owners);
        launched.and(kept.map_err(|error| ExchangeStopped { error, begun: true }))
    }

    /// Posts `verdict` to all peers instead of the next call.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn refuse(&mut self, cx: &ContextGuard<'_>, way: &ExchangeWay, op: u32, verdict: u32) -> Outcome {
        if way.capture.is_some() {
            let what = "a refusal";
            return Err(CudaError::StreamIsCapturing { stream: way.stream.raw(), what }.into());
        }
        self.set_out(cx, way)?;
        let link = Arc::clone(&self.link);
        let (state, page) = (link.state(), link.page().device_addr());
        let buffer = &mut self.buffer;
        let refusal = ExchangeLaunch::refusal(link.rank(), link.table(), state, page, op, verdict, buffer);
        let mut refusal = refusal.map_err(CudaError::from)?;
        let launched = enqueue(&link, refusal.part(ExchangeFlags::POST), way.handle);
        let kept = self.arrive(cx, way, Vec::new());
        launched?;
        kept.map_err(|error| ExchangeStopped { error, begun: true })
    }

    /// Copies parts of the own pool out on `stream`, after the last call.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`], [`CudaError::WrongDevice`], [`CudaError::ReadOnlyMemory`] or [`CudaError::Argument`]
    /// before anything is copied; the driver's refusal.
    pub fn copy_out(
        &mut self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        outs: &[ExchangeOut<'_>],
    ) -> Result<()> {
        let mut copies = Vec::with_capacity(outs.len());
        for out in outs {
            self.check_out(out)?;
            let mut list = Vec::with_capacity(1);
            if !boxes::cut(0, 0, out.run_bytes, out.loops, &mut list) {
                let rule = "copies with fewer and longer runs are possible";
                return Err(CudaError::Argument {
                    what: "copies of one result",
                    value: list.len() as u64,
                    rule,
                });
            }
            copies.push(list);
        }
        let way = self.look(cx, stream)?;
        self.set_out(cx, &way)?;
        let owners = self.owners(outs.iter().map(|out| out.to.region), None);
        self.hold_for_graph(cx, &way, &owners)?;
        let pool = self.link.memory().addr() + kvferry_kernels::CONTROL_BYTES;
        let mut copied = Ok(());
        for (out, list) in outs.iter().zip(&copies) {
            let (src, dst) = (pool + out.from, out.to.region.addr() + out.to.offset);
            for one in list {
                // SAFETY: `check_out` found both sides inside their memory, which the trip (or the graph) holds until the
                // stream is done; the stream is one of the current context (`look`).
                copied = copied.and_then(|()| unsafe { one.enqueue(src, dst, way.handle) });
            }
        }
        let kept = self.arrive(cx, &way, owners);
        copied.and(kept)
    }

    /// Waits until nothing of this rank runs any more, at most `timeout`; false if something still does. Sleeps between
    /// looks, so that no driver lock is held. Says nothing about graphs.
    ///
    /// # Errors
    /// An asynchronous failure of the device.
    pub fn settle(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        if self.untracked {
            self.link.gpu().synchronize()?;
            self.untracked = false;
        }
        // Calls follow one another: the last one's end is the end of all.
        while let Some(trip) = self.trips.back() {
            if trip.event.query()? {
                self.trips.clear();
            } else if Instant::now() >= deadline {
                return Ok(false);
            } else {
                std::thread::sleep(LOOK);
            }
        }
        Ok(true)
    }

    /// Whether a call may be running, as far as is known without asking the driver.
    pub fn in_flight(&self) -> bool {
        self.untracked || !self.trips.is_empty()
    }

    /// Makes later work on `stream` come after everything that the queue has put on streams until now.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub fn wait_on(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        match self.trips.back() {
            Some(trip) => self.link.gpu().wait_event(cx, stream, &trip.event),
            None => Ok(()),
        }
    }

    /// Orders the next thing on the stream after the last one.
    fn set_out(&mut self, cx: &ContextGuard<'_>, way: &ExchangeWay) -> Result<()> {
        let (gpu, stream) = (self.link.gpu(), way.stream);
        // The guard must be of the context that `look` looked in, and a graph must own what becomes a part of it.
        if gpu.capture_id(cx, stream)? != way.capture {
            let what = "a call that was begun before the capture";
            return Err(CudaError::StreamIsCapturing { stream: stream.raw(), what });
        }
        match way.capture {
            Some(id) => {
                if let Some((of, on, event)) = &self.captured
                    && *of == id
                    && *on != stream
                {
                    gpu.wait_event(cx, stream, event)?;
                }
            }
            None => {
                // The per-thread stream is another one in another thread.
                let same = self.last == Some(stream) && stream != StreamHandle::PER_THREAD;
                if !same && let Some(trip) = self.trips.back() {
                    gpu.wait_event(cx, stream, &trip.event)?;
                }
            }
        }
        Ok(())
    }

    /// Notes the end of what was put on the way, and what is kept until then.
    fn arrive(&mut self, cx: &ContextGuard<'_>, way: &ExchangeWay, owners: Vec<Owner>) -> Result<()> {
        let gpu = Arc::clone(self.link.gpu());
        if let Some(id) = way.capture {
            let event = match self.captured.take() {
                Some((_, _, event)) => event,
                None => gpu.event(cx)?,
            };
            event.record(cx, way.stream)?;
            self.captured = Some((id, way.stream, event));
            return Ok(());
        }
        self.reap();
        let mut owners = owners;
        let event = if self.trips.len() < MOST_TRIPS { gpu.event(cx) } else { self.merge(&gpu, cx) };
        let recorded = event.and_then(|event| event.record(cx, way.stream).map(|()| event));
        match recorded {
            Ok(event) => {
                self.last = Some(way.stream);
                self.trips.push_back(Trip { event, owners });
                Ok(())
            }
            Err(error) => {
                // The owners' end is not known: they stay for good, as the work may use them.
                self.untracked = true;
                std::mem::forget(std::mem::take(&mut owners));
                Err(error)
            }
        }
    }

    /// Lets go of what calls that have ended held. Asks the driver only where something is held.
    fn reap(&mut self) {
        while let Some(first) = self.trips.front() {
            let newer = self.trips.len() > 1;
            if first.owners.is_empty() {
                if !newer {
                    break;
                }
            } else if !first.event.query().unwrap_or(false) {
                break;
            }
            self.trips.pop_front();
        }
    }

    /// The oldest trip's event, its owners handed to the next one.
    fn merge(&mut self, gpu: &Arc<Gpu>, cx: &ContextGuard<'_>) -> Result<Event> {
        let Some(first) = self.trips.pop_front() else { return gpu.event(cx) };
        if let Some(next) = self.trips.front_mut() {
            next.owners.extend(first.owners);
        }
        Ok(first.event)
    }

    /// Those that must be kept: not the own memory, which the link keeps, and not what is freed in stream order.
    fn owners<'a>(&self, regions: impl Iterator<Item = &'a DeviceRegion>, keep: Option<Owner>) -> Vec<Owner> {
        let memory = Arc::as_ptr(self.link.memory()).cast::<()>();
        let mut owners: Vec<Owner> = Vec::new();
        owners.extend(keep);
        for region in regions {
            let owner = region.owner();
            let known = owners.last().is_some_and(|last| Arc::ptr_eq(last, owner));
            if !region.stream_ordered() && !known && Arc::as_ptr(owner).cast::<()>() != memory {
                owners.push(Arc::clone(owner));
            }
        }
        owners
    }

    /// Gives the graph that the way leads into everything that its nodes will use.
    fn hold_for_graph(&self, cx: &ContextGuard<'_>, way: &ExchangeWay, owners: &[Owner]) -> Result<()> {
        if way.capture.is_none() {
            return Ok(());
        }
        let mut flight = Flight::new(self.link.gpu(), cx)?;
        flight.hold(Arc::clone(&self.link) as Owner);
        owners.iter().for_each(|owner| flight.hold(Arc::clone(owner)));
        flight.capture(cx, way.stream)
    }

    fn check_places(&self, route: &mut ExchangeRoute, place: u64, places: &[u64]) -> Result<()> {
        let refuse = |what, value, rule| Err(CudaError::Argument { what, value, rule });
        if route.copies().is_none() {
            return refuse("copies of a call", 4096, "the copy engine would need more than this");
        }
        if places.len() != self.link.world() || places.get(self.link.rank()) != Some(&place) {
            return refuse(
                "places of a call",
                places.len() as u64,
                "one per rank is needed, the own one among them",
            );
        }
        for ((peer, &at), &reach) in self.link.table().iter().zip(places).zip(route.reaches()) {
            if at.checked_add(reach).is_none_or(|end| end > peer.pool_bytes) {
                return refuse(
                    "the landing place of a peer",
                    at,
                    "it must leave room for the results in its pool",
                );
            }
        }
        Ok(())
    }

    fn check_out(&self, out: &ExchangeOut<'_>) -> Result<()> {
        let ordinal = self.link.gpu().ordinal();
        let region = out.to.region;
        if region.ordinal() != ordinal {
            return Err(CudaError::WrongDevice { what: "a target", found: region.ordinal(), ordinal });
        }
        if !region.writable() {
            return Err(CudaError::ReadOnlyMemory { addr: region.addr() });
        }
        let src = out.loops.iter().map(|l| (l.count, i128::from(l.src_stride)));
        let dst = out.loops.iter().map(|l| (l.count, i128::from(l.dst_stride)));
        let sides = [
            (boxes::span(out.from.into(), out.run_bytes, src)?, self.link.memory().pool_bytes()),
            (boxes::span(out.to.offset.into(), out.run_bytes, dst)?, region.len()),
        ];
        for (span, limit) in sides {
            if let Some((low, high)) = span
                && (low < 0 || high.unsigned_abs() > limit)
            {
                let (offset, len) =
                    (low.unsigned_abs() as usize, high.saturating_sub(low).unsigned_abs() as usize);
                return Err(CudaError::OutOfBounds { offset, len, limit: limit as usize });
            }
        }
        Ok(())
    }

    fn launch(
        &mut self,
        cx: &ContextGuard<'_>,
        way: &ExchangeWay,
        route: &mut ExchangeRoute,
        place: u64,
        hash: u64,
        mode: ExchangeMode<'_>,
    ) -> Outcome {
        let link = Arc::clone(&self.link);
        let begun = |error| ExchangeStopped { error, begun: true };
        match mode {
            ExchangeMode::Push => {
                let template = route.aim(&mut self.buffer, place, hash, false)?;
                Ok(enqueue(&link, template.part(ExchangeFlags::WHOLE), way.handle)?)
            }
            ExchangeMode::OpenedPush => {
                let template = route.aim(&mut self.buffer, place, hash, false)?;
                enqueue(&link, template.part(ExchangeFlags::OPEN), way.handle)?;
                enqueue(&link, template.part(ExchangeFlags::MOVE), way.handle).map_err(begun)
            }
            ExchangeMode::CopyEngine(places) => self.copies(cx, way, route, (place, hash), places),
        }
    }

    /// A call whose peers' shares the copy engine carries.
    fn copies(
        &mut self,
        cx: &ContextGuard<'_>,
        way: &ExchangeWay,
        route: &mut ExchangeRoute,
        (place, hash): (u64, u64),
        places: &[u64],
    ) -> Outcome {
        let (link, side) = (Arc::clone(&self.link), self.side.handle());
        let gpu = link.gpu();
        let beside = gpu.own_stream(cx, side)?;
        // The own share waits for nobody, and runs beside all the rest. The side stream comes back also after a failure,
        // or a capture that it has joined could not end.
        let (fork, join) = (gpu.event(cx)?, gpu.event(cx)?);
        let template = route.aim(&mut self.buffer, place, hash, true)?;
        fork.record(cx, way.stream)?;
        gpu.wait_event(cx, side, &fork)?;
        let own = enqueue(&link, template.part(ExchangeFlags::OWN), beside);
        let posted = own.and_then(|()| enqueue(&link, template.part(ExchangeFlags::OPEN), way.handle));
        let begun = posted.is_ok();
        let moved = posted.and_then(|()| self.payload(way, route, places));
        let joined = join.record(cx, side).and_then(|()| gpu.wait_event(cx, way.stream, &join));
        let closed = moved.and(joined).and_then(|()| self.tell(way, route));
        closed.map_err(|error| ExchangeStopped { error, begun })
    }

    /// What comes after own share and payload.
    fn tell(&self, way: &ExchangeWay, route: &mut ExchangeRoute) -> Result<()> {
        let params = route.arrive();
        let (kernel, geometry) = (Kernel::ExchangeArrive, ExchangeArriveParams::GEOMETRY);
        // SAFETY: the context is current and the stream one of it (`look`); the struct is that kernel's; it writes the
        // state only, which the link keeps.
        unsafe {
            self.link.gpu().kernels().launch(kernel, geometry, (&raw const params).cast(), way.handle)
        }?;
        self.flags(way)?;
        match route.aimed_copy() {
            Some(template) => enqueue(&self.link, template.part(ExchangeFlags::CLOSE), way.handle),
            None => Ok(()),
        }
    }

    fn payload(&self, way: &ExchangeWay, route: &ExchangeRoute, places: &[u64]) -> Result<()> {
        let targets = self.link.table().iter().zip(places).zip(route.boxes());
        for ((peer, &place), list) in targets {
            for (input, one) in list {
                let one: &CopyBox = one;
                let src = route.bases.get(*input).copied().unwrap_or(0);
                // SAFETY: `place_inputs` found the source inside its region, `check_places` the destination inside the
                // peer's pool; both are kept by the trip or the graph. The stream is one of the current context.
                unsafe { one.enqueue(src, peer.pool + place, way.handle) }?;
            }
        }
        Ok(())
    }

    /// Tells every peer of the arrival, by copies behind the payload: both parities' words, of which one says what it
    /// has said before.
    fn flags(&self, way: &ExchangeWay) -> Result<()> {
        let rank = self.link.rank();
        let staging = self.link.state() + std::mem::offset_of!(LocalState, staging) as u64;
        for (target, peer) in self.link.table().iter().enumerate().filter(|&(target, _)| target != rank) {
            for parity in 0..2 {
                let src = staging + 8 * (parity * kvferry_kernels::MAX_RANKS as u64 + target as u64);
                let dst = peer.control + arrival_offset(parity, rank);
                // SAFETY: a word of the state and a word of the peer's control block, both kept by the link; the stream
                // is one of the current context.
                unsafe { raw::cuMemcpyAsync(dst, src, 8, way.handle) }?;
            }
        }
        Ok(())
    }
}

/// Puts a part of a call on a stream of the current context.
fn enqueue(link: &ExchangeLink, part: ExchangePart<'_>, stream: CUstream) -> Result<()> {
    // SAFETY: callers got `stream` from `look` or `own_stream`, with the context current. The parameters were built for
    // this kernel from the link's own addresses, with inputs that `place_inputs` found inside their regions, a landing
    // place that `aim` found inside the own pool, and pieces whose reach the kernel compares with the peers' pools before
    // it writes. Link and inputs are kept until the stream is done (`arrive`), or by the graph (`hold_for_graph`).
    unsafe { link.gpu().kernels().launch(part.kernel, part.geometry, part.params.as_ptr(), stream) }
}

/// Work that outlives its queue, and what it uses.
struct Leftover {
    link: Arc<ExchangeLink>,
    trips: VecDeque<Trip>,
    untracked: bool,
}

impl Leftover {
    /// Lets go of everything when it is no longer used. Calls end by themselves: their waits are bounded.
    fn outlast(self) {
        // Not asleep in the driver: a kernel that waits for a peer may take its time, and others need the driver.
        let ended = match self.trips.back() {
            Some(last) if !self.untracked => loop {
                match last.event.query() {
                    Ok(false) => std::thread::sleep(PATIENT_LOOK),
                    Ok(true) => break Ok(()),
                    Err(error) => break Err(error),
                }
            },
            _ => self.link.gpu().synchronize(),
        };
        if let Err(error) = ended.or_else(|_| self.link.gpu().synchronize()) {
            error.log_on_drop("ending an exchange: its memory is leaked, it may still be in use. That");
            std::mem::forget(self);
        }
    }
}

impl Drop for ExchangeQueue {
    fn drop(&mut self) {
        if !self.in_flight() {
            return;
        }
        let (link, trips) = (Arc::clone(&self.link), std::mem::take(&mut self.trips));
        let leftover = Arc::new(Mutex::new(Some(Leftover { link, trips, untracked: self.untracked })));
        let take = |leftover: &Mutex<Option<Leftover>>| {
            leftover.lock().unwrap_or_else(PoisonError::into_inner).take().map(Leftover::outlast)
        };
        // Results of the last calls may be in use: the calls go on, and a thread of their own waits for them.
        let waiter = Arc::clone(&leftover);
        let started = std::thread::Builder::new().name("kvf-exchange-end".to_owned()).spawn(move || {
            let _relaxed = RelaxedCapture::enter();
            take(&waiter)
        });
        if started.is_err() {
            run_later(move || {
                take(&leftover);
            });
        }
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const CAPTURE_IMPLICIT: i32 = 906;

impl Gpu {
    /// The capture that `stream` takes part in, by the driver's number of it.
    ///
    /// # Errors
    /// [`CudaError::StreamIsCapturing`] for one that is spoiled, and for the legacy stream while a blocking stream of the
    /// device is captured: using it would spoil that capture. A guard or stream of another device; the driver's
    /// refusal.
    pub fn capture_id(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<Option<u64>> {
        if stream.is_legacy() {
            let (handle, mut status) = (self.usable(cx, stream)?, 0);
            // SAFETY: `status` is a live integer; the legacy stream of the current context always exists.
            return match unsafe { raw::cuStreamIsCapturing(handle, &mut status) } {
                Err(error) if error.code() == Some(CAPTURE_IMPLICIT) => {
                    let what = "work on the legacy stream beside a blocking stream";
                    Err(CudaError::StreamIsCapturing { stream: stream.raw(), what })
                }
                other => other.map(|()| None),
            };
        }
        match self.capture_status(cx, stream)? {
            Capture::None => return Ok(None),
            Capture::Invalidated => {
                let what = "a call in a spoiled capture";
                return Err(CudaError::StreamIsCapturing { stream: stream.raw(), what });
            }
            Capture::Active => {}
        }
        let handle = self.usable(cx, stream)?;
        let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
        // SAFETY: the three are live and of the driver's types; dependencies are not asked for.
        unsafe {
            raw::cuStreamGetCaptureInfo_v2(
                handle,
                &mut status,
                &mut id,
                &mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        }?;
        Ok((Capture::from_driver(status) == Capture::Active).then_some(id))
    }
}
