//! The calls of one rank: each launched after the one before, whatever stream it is on.

mod launch;
mod leftover;
mod out;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_host::Owner;
use kvferry_kernels::{ExchangeFlags, ExchangeLaunch, ExchangeParamBuffer};

pub use out::ExchangeOut;

use super::link::ExchangeLink;
use super::route::{ExchangeRoute, RouteInput};
use crate::context::ContextGuard;
use crate::error::{CudaError, Result};
use crate::flight::Flight;
use crate::gpu::{Event, Gpu, Stream, StreamHandle};
use crate::memory::DeviceRegion;
use crate::raw::CUstream;
use launch::enqueue;

/// How often a wait without an end of its own looks.
const LOOK: Duration = Duration::from_micros(100);
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

/// What puts the calls of one rank on streams. A call waits for the one before it, on whatever stream that was, and holds
/// what its kernels use until they are done; in a graph, as long as the graph lives.
///
/// Inputs that are [`in_stream_order`](DeviceRegion::in_stream_order) are not held beyond the call.
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
    /// The last call was not followed by an event because its stream lasts: one can be recorded when it is wanted.
    unmarked: bool,
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
            unmarked: false,
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
        if self.unmarked {
            let gpu = Arc::clone(self.link.gpu());
            let cx = gpu.enter()?;
            self.mark_last(&cx)?;
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
        self.untracked || self.unmarked || !self.trips.is_empty()
    }

    /// Orders the next thing on the stream after the last one.
    fn set_out(&mut self, cx: &ContextGuard<'_>, way: &ExchangeWay) -> Result<()> {
        let (gpu, stream) = (Arc::clone(self.link.gpu()), way.stream);
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
                if !same {
                    self.mark_last(cx)?;
                    if let Some(trip) = self.trips.back() {
                        gpu.wait_event(cx, stream, &trip.event)?;
                    }
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
        if owners.is_empty() && way.stream.lasts() {
            self.last = Some(way.stream);
            self.unmarked = true;
            return Ok(());
        }
        self.unmarked = false;
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

    /// An event after the last call, if it has none yet.
    fn mark_last(&mut self, cx: &ContextGuard<'_>) -> Result<()> {
        if !self.unmarked {
            return Ok(());
        }
        if let Some(stream) = self.last {
            // Recorded in a capture it would say nothing, and draw whoever waits for it into the graph.
            if self.link.gpu().capture_id(cx, stream)?.is_some() {
                let what = "a call elsewhere while the stream of the last call is captured";
                return Err(CudaError::StreamIsCapturing { stream: stream.raw(), what });
            }
            let event = self.link.gpu().event(cx)?;
            event.record(cx, stream)?;
            self.trips.push_back(Trip { event, owners: Vec::new() });
        }
        self.unmarked = false;
        Ok(())
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
}
