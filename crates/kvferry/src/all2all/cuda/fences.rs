//! When a buffer of the pool may be written again: after the work that read it, on whatever stream that was.
//!
//! A buffer has a home, the stream of the call that filled it. Letting go of its results records an event there and on
//! the streams that consumers were announced on; the next call into the buffer waits for them. On a stream that lasts the
//! event is only recorded if that next call is on another one. A stream that is being captured takes no such event: the
//! buffer then waits for its turn until the capture is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use kvferry_cuda::{Capture, ContextGuard, CudaError, Event, Gpu, StreamHandle};

use crate::all2all::pool::Slot;
use crate::error::{Error, Result};
use crate::transfer::lock;

/// How often an event is looked at that a capture must wait for on the host.
const LOOK: Duration = Duration::from_micros(50);

/// Something that must be over.
#[derive(Debug)]
enum Fence {
    /// What the event was recorded after, on this stream.
    Event(StreamHandle, Event),
    /// The same, in a capture.
    Captured(u64, StreamHandle, Event),
    /// All that will be on this stream by the time it is asked: it lasts, or is in a capture that has to end first.
    Late(StreamHandle),
}

#[derive(Debug, Default)]
struct Slots {
    by_slot: Vec<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Stream, capture and thread of the call that filled it.
    home: Option<(StreamHandle, Option<u64>, ThreadId)>,
    /// Other streams of calls that read it.
    readers: Vec<StreamHandle>,
    fences: Vec<Fence>,
}

/// The fences of all buffers of a pool.
#[derive(Debug)]
pub(super) struct Fences {
    gpu: Arc<Gpu>,
    slots: Mutex<Slots>,
    shut: AtomicBool,
}

/// A stream is named differently in each thread, or it is the same.
fn same(a: StreamHandle, b: StreamHandle) -> bool {
    a == b && a != StreamHandle::PER_THREAD
}

impl Slots {
    fn of(&mut self, slot: Slot) -> &mut State {
        // The landing place comes first.
        let index = match slot {
            Slot::Landing => 0,
            Slot::Buffer(index) => 1 + index as usize,
        };
        if self.by_slot.len() <= index {
            self.by_slot.resize_with(index + 1, State::default);
        }
        &mut self.by_slot[index]
    }
}

impl Fences {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Fences {
        Fences { gpu: Arc::clone(gpu), slots: Mutex::default(), shut: AtomicBool::new(false) }
    }

    /// Makes `stream` wait until the buffer may be written. In a capture, what lies outside of it is waited for here, at
    /// most `patience`.
    pub(super) fn open(
        &self,
        cx: &ContextGuard<'_>,
        slot: Slot,
        stream: StreamHandle,
        capture: Option<u64>,
        patience: Duration,
    ) -> Result<()> {
        let fences = std::mem::take(&mut lock(&self.slots).of(slot).fences);
        let mut fences = fences.into_iter();
        while let Some(fence) = fences.next() {
            if let Err(error) = self.wait(cx, &fence, stream, capture, patience) {
                // Nothing has been written: what was to be waited for still is.
                lock(&self.slots).of(slot).fences.extend(std::iter::once(fence).chain(fences));
                return Err(error);
            }
        }
        // Should the call fail before it is launched, what was to be waited for is what `stream` waits for now.
        lock(&self.slots).of(slot).home.get_or_insert((stream, capture, thread::current().id()));
        Ok(())
    }

    /// Notes who has filled the buffer.
    pub(super) fn filled(&self, slot: Slot, stream: StreamHandle, capture: Option<u64>) {
        let mut slots = lock(&self.slots);
        let state = slots.of(slot);
        state.home = Some((stream, capture, thread::current().id()));
        state.readers.clear();
    }

    /// Notes a call that reads the buffer.
    pub(super) fn read(&self, slot: Slot, stream: StreamHandle) {
        let mut slots = lock(&self.slots);
        let state = slots.of(slot);
        if !state.home.is_some_and(|(home, ..)| home == stream) && !state.readers.contains(&stream) {
            state.readers.push(stream);
        }
    }

    /// No call will come any more. Streams may be gone from now on, and are not asked.
    pub(super) fn shut(&self) {
        self.shut.store(true, Ordering::Release);
    }

    /// Nobody on the host holds the buffer any more. Never waits for the device.
    pub(super) fn close(&self, slot: Slot, streams: &[StreamHandle]) {
        if self.shut.load(Ordering::Acquire) {
            return;
        }
        let mut slots = lock(&self.slots);
        let state = slots.of(slot);
        // Taken: the next to hold the buffer may let go of it without a call, when these streams may be gone.
        let (home, readers) = (state.home.take(), std::mem::take(&mut state.readers));
        let capture = home.and_then(|(_, capture, _)| capture);
        let home = home.map(|(home, _, thread)| {
            // Another thread's per-thread stream cannot be named here; the legacy stream comes after all of those.
            let elsewhere = home == StreamHandle::PER_THREAD && thread != thread::current().id();
            if elsewhere { StreamHandle::LEGACY } else { home }
        });
        let mut all = Vec::new();
        for stream in home.iter().chain(&readers).chain(streams) {
            if !all.contains(stream) {
                all.push(*stream);
            }
        }
        if capture.is_none() {
            // An event costs the stream a microsecond, and one more that waits for it; mostly the buffer's next call is on
            // the same stream, which needs none.
            let (lasting, rest) = all.into_iter().partition(|stream| stream.lasts());
            all = rest;
            state.fences.extend(Vec::into_iter(lasting).map(Fence::Late));
        }
        if all.is_empty() {
            return;
        }
        let outcome = self.gpu.enter().map_err(Error::from).and_then(|cx| {
            for &stream in &all {
                state.fences.push(self.mark(&cx, stream, capture)?);
            }
            Ok(())
        });
        if let Err(error) = outcome {
            // Also at exit. Whatever is not marked is waited for as well as it can be.
            tracing::warn!(%error, "cannot mark the end of a result's use");
            state.fences.extend(home.map(Fence::Late));
        }
    }

    /// An event after all that is on `stream`.
    fn mark(&self, cx: &ContextGuard<'_>, stream: StreamHandle, home: Option<u64>) -> Result<Fence> {
        let owner = self.gpu.stream_device(cx, stream)?;
        if owner != self.gpu.ordinal() {
            // Only its device can record on it.
            let other = Gpu::bystander(owner)?;
            let cx = other.enter()?;
            if other.capture_status(&cx, stream)? != Capture::None {
                return Ok(Fence::Late(stream));
            }
            let event = other.event(&cx)?;
            event.record(&cx, stream)?;
            return Ok(Fence::Event(stream, event));
        }
        let id = match self.gpu.capture_id(cx, stream) {
            Ok(id) => id,
            Err(CudaError::StreamIsCapturing { .. }) => return Ok(Fence::Late(stream)),
            Err(error) => return Err(error.into()),
        };
        match id {
            // Between uses of the same graph an event of that graph keeps the order.
            Some(id) if home == Some(id) => {
                let event = self.gpu.event(cx)?;
                event.record(cx, stream)?;
                Ok(Fence::Captured(id, stream, event))
            }
            Some(_) => Ok(Fence::Late(stream)),
            None => {
                let event = self.gpu.event(cx)?;
                event.record(cx, stream)?;
                Ok(Fence::Event(stream, event))
            }
        }
    }

    fn wait(
        &self,
        cx: &ContextGuard<'_>,
        fence: &Fence,
        stream: StreamHandle,
        capture: Option<u64>,
        patience: Duration,
    ) -> Result<()> {
        match fence {
            Fence::Event(on, _) if same(*on, stream) && capture.is_none() => Ok(()),
            Fence::Event(_, event) if capture.is_none() => Ok(self.gpu.wait_event(cx, stream, event)?),
            // A graph cannot wait for what lies outside of it.
            Fence::Event(_, event) => over(event, patience),
            Fence::Captured(id, on, event) => {
                if capture == Some(*id) && !same(*on, stream) {
                    self.gpu.wait_event(cx, stream, event)?;
                }
                // Of another graph, which is gone: the buffer came back with its end.
                Ok(())
            }
            // What came before on the stream of a capture comes before its graph.
            Fence::Late(on) if same(*on, stream) => Ok(()),
            Fence::Late(on) => match self.mark(cx, *on, None)? {
                Fence::Event(_, event) if capture.is_none() => Ok(self.gpu.wait_event(cx, stream, &event)?),
                Fence::Event(_, event) => over(&event, patience),
                Fence::Captured(..) | Fence::Late(_) => Err(Error::Busy {
                    what: "a buffer of the exchange pool whose last reader is on a stream that is being captured",
                    limit: 1,
                }),
            },
        }
    }
}

/// Waits on the host.
fn over(event: &Event, patience: Duration) -> Result<()> {
    let start = Instant::now();
    while !event.query()? {
        if start.elapsed() >= patience {
            return Err(Error::Busy {
                what: "a buffer of the exchange pool that is still being read",
                limit: 1,
            });
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
