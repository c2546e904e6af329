//! Events: how work on one stream waits for work on another, and how the CPU learns that it is done.

use std::sync::Arc;

use super::{Gpu, StreamHandle, lock};
use crate::capture::RelaxedCapture;
use crate::context::ContextGuard;
use crate::error::{CudaError, NOT_READY, Result};
use crate::raw::{self, CUevent};

/// `CU_EVENT_BLOCKING_SYNC`: waiting for it sleeps.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record.
const DISABLE_TIMING: u32 = 2;
/// Spare events kept; more than this are destroyed.
const SPARE_EVENTS: usize = 4096;

/// Somebody else's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle(u64);

impl EventHandle {
    /// By the value of its `CUevent` (the same as a `cudaEvent_t`).
    ///
    /// # Safety
    /// The event exists during every call that takes the handle.
    pub const unsafe fn from_raw(raw: u64) -> EventHandle {
        EventHandle(raw)
    }

    /// The value of the driver's handle.
    pub const fn raw(self) -> u64 {
        self.0
    }
}

/// An event of one device, back in the device's pool when dropped. A stream that was told to wait for it still waits for
/// what it meant at that moment.
#[derive(Debug)]
pub struct Event {
    event: CUevent,
    timed: bool,
    /// Says when memory may be freed: nobody but its flight records it.
    guard: bool,
    gpu: Arc<Gpu>,
}

// SAFETY: an event may be used from any thread while its context lives, which `gpu` sees to; driver calls are
// thread-safe and the struct is never changed.
unsafe impl Send for Event {}
// SAFETY: as for Send.
unsafe impl Sync for Event {}

impl Gpu {
    /// An event without timing, from the pool; a CPU that waits for it sleeps. It means nothing before it is recorded.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn event(self: &Arc<Self>, cx: &ContextGuard<'_>) -> Result<Event> {
        self.pooled_event(cx, false)
    }

    /// An event that only this crate can record.
    pub(crate) fn guard_event(self: &Arc<Self>, cx: &ContextGuard<'_>) -> Result<Event> {
        self.pooled_event(cx, true)
    }

    fn pooled_event(self: &Arc<Self>, _cx: &ContextGuard<'_>, guard: bool) -> Result<Event> {
        // The lock is gone before the driver is called.
        let spare = lock(&self.events).pop();
        let event = match spare {
            Some(event) => event,
            None => create(self, BLOCKING_SYNC | DISABLE_TIMING)?,
        };
        Ok(Event { event, timed: false, guard, gpu: Arc::clone(self) })
    }

    /// An event that also takes the time.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn timed_event(self: &Arc<Self>, _cx: &ContextGuard<'_>) -> Result<Event> {
        let event = create(self, BLOCKING_SYNC)?;
        Ok(Event { event, timed: true, guard: false, gpu: Arc::clone(self) })
    }

    /// Lets work put on `stream` from now on wait for what `event`, of any device, was last recorded after.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub fn wait_event(&self, cx: &ContextGuard<'_>, stream: StreamHandle, event: &Event) -> Result<()> {
        let stream = self.usable(cx, stream)?;
        // SAFETY: both exist: the stream by `usable`, the event by its own life.
        unsafe { raw::cuStreamWaitEvent(stream, event.event, 0) }
    }

    /// As [`wait_event`](Self::wait_event), for somebody else's event.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub fn wait_foreign_event(
        &self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()> {
        let stream = self.usable(cx, stream)?;
        let event = std::ptr::with_exposed_provenance_mut(event.0 as usize);
        // SAFETY: the stream exists by `usable`, the event by the promise of `EventHandle::from_raw`.
        unsafe { raw::cuStreamWaitEvent(stream, event, 0) }
    }
}

impl Event {
    /// Records it on `stream`: it means everything put there until now.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for the event of a [`Flight`](crate::Flight), which only its landing records; a guard or
    /// stream of another device, or the driver's refusal.
    pub fn record(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        if self.guard {
            let (what, rule) =
                ("an event to record", "the event of a flight is recorded by its landing only");
            return Err(CudaError::Argument { what, value: 0, rule });
        }
        self.record_guard(cx, stream)
    }

    /// [`record`](Self::record), for flights too.
    pub(crate) fn record_guard(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        let stream = self.gpu.usable(cx, stream)?;
        // SAFETY: both exist: the stream by `usable`, the event by its own life.
        unsafe { raw::cuEventRecord(self.event, stream) }
    }

    /// Whether what it was last recorded after is done. Does not wait. To be asked after a first recording only: an event
    /// from the pool may still mean what its last user recorded.
    ///
    /// # Errors
    /// An earlier asynchronous failure, or the driver's refusal, for instance for an event recorded under capture.
    pub fn query(&self) -> Result<bool> {
        let _current = self.gpu.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the event exists while `self` does, and its context is current.
        match unsafe { raw::cuEventQuery(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.code() == Some(NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits, asleep, until what it was last recorded after is done.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.gpu.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the event exists while `self` does, and its context is current.
        unsafe { raw::cuEventSynchronize(self.event) }
    }

    /// Seconds on the device from `earlier` to this one. Both timed, of one device, and done.
    ///
    /// # Errors
    /// The driver's refusal: an event without timing, not recorded, not done, or of another device.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let _current = self.gpu.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is a live float; both events exist.
        unsafe { raw::cuEventElapsedTime(&mut milliseconds, earlier.event, self.event) }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// The device it belongs to.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.timed {
            let mut spare = lock(&self.gpu.events);
            if spare.len() < SPARE_EVENTS {
                return spare.push(self.event);
            }
        }
        match (self.gpu.enter(), RelaxedCapture::enter()) {
            (Ok(_current), Ok(_relaxed)) => destroy(self.event),
            (Err(error), _) | (_, Err(error)) => error.log_on_drop("entering a context to destroy an event"),
        }
    }
}

/// A new event of `gpu`.
fn create(gpu: &Gpu, flags: u32) -> Result<CUevent> {
    let _current = gpu.enter()?;
    let _relaxed = RelaxedCapture::enter()?;
    let mut event = std::ptr::null_mut();
    // SAFETY: `event` is a live pointer; the context is current.
    unsafe { raw::cuEventCreate(&mut event, flags) }?;
    Ok(event)
}

/// Gives an event back. Streams that wait for it still do.
pub(super) fn destroy(event: CUevent) {
    // SAFETY: made by `create`, in the context that is current, and forgotten by the caller.
    if let Err(error) = unsafe { raw::cuEventDestroy_v2(event) } {
        error.log_on_drop("destroying an event");
    }
}
