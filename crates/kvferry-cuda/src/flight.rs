//! What is in flight, and what must stay allocated until it has landed.

use std::ffi::c_void;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use kvferry_host::Owner;

use crate::capture::RelaxedCapture;
use crate::context::ContextGuard;
use crate::deferred::{self, Flying};
use crate::error::{CudaError, Result};
use crate::gpu::{Capture, Event, Gpu, StreamHandle, capture_of};
use crate::raw::{self, CUstream};

/// Owners of memory that device work uses, kept until that work is done.
///
/// Everything here that puts work on a stream takes a flight and notes in it the stream and the owners. [`land`](Self::land)
/// then records one event after all of it. Dropping a flight waits for that event if it must; forgetting one leaks its
/// owners. So memory is never freed under running work, whatever the caller does with the flight.
///
/// A flight that was used on a capturing stream does not land: [`capture`](Self::capture) hands its owners to the graph.
#[derive(Debug)]
pub struct Flight {
    event: Arc<Event>,
    cargo: Cargo,
    /// Streams that work of this flight was put on, each once.
    streams: Vec<StreamHandle>,
    /// The thread whose per-thread stream is among them.
    thread: Option<ThreadId>,
    /// Whether any of the streams was capturing.
    captured: bool,
    landed: bool,
    /// The event was seen done.
    finished: AtomicBool,
    /// While it carries something that no graph owns.
    flying: Option<Flying>,
}

/// Owners, and the device whose kernels and events they were used with.
pub(crate) struct Cargo {
    owners: Vec<Owner>,
    gpu: Arc<Gpu>,
}

impl std::fmt::Debug for Cargo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} owners of {:?}", self.owners.len(), self.gpu)
    }
}

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, the one flag there is; the driver asks for it.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the graph takes over our reference.
const MOVE: u32 = 1;

impl Flight {
    /// An empty flight of `gpu`.
    ///
    /// # Errors
    /// The driver's refusal to make an event.
    pub fn new(gpu: &Arc<Gpu>, cx: &ContextGuard<'_>) -> Result<Flight> {
        Ok(Flight {
            event: Arc::new(gpu.guard_event(cx)?),
            cargo: Cargo { owners: Vec::new(), gpu: Arc::clone(gpu) },
            streams: Vec::new(),
            thread: None,
            captured: false,
            landed: false,
            finished: AtomicBool::new(false),
            flying: None,
        })
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.cargo.gpu
    }

    /// Keeps `owner` until everything in flight is done.
    pub fn hold(&mut self, owner: Owner) {
        self.cargo.owners.push(owner);
    }

    /// Whether work of this flight was put on a capturing stream: then [`capture`](Self::capture) ends it.
    pub fn captured(&self) -> bool {
        self.captured
    }

    /// Notes that work is about to be put on `stream`, and gives the driver's handle. Every enqueueing call of this crate
    /// comes here first; what it holds is held before anything is enqueued.
    pub(crate) fn board(
        &mut self,
        gpu: &Gpu,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
    ) -> Result<CUstream> {
        if !std::ptr::eq(gpu, &*self.cargo.gpu) {
            let (what, found) = ("the flight", self.cargo.gpu.ordinal());
            return Err(CudaError::WrongDevice { what, found, ordinal: gpu.ordinal() });
        }
        self.same_thread(stream)?;
        let handle = if self.streams.contains(&stream) {
            gpu.usable(cx, stream)?
        } else {
            let handle = gpu.own_stream(cx, stream)?;
            let capture = gpu.capture_status(cx, stream)?;
            let refuse = |what| Err(CudaError::StreamIsCapturing { stream: stream.raw(), what });
            match capture {
                Capture::Invalidated => return refuse("work in a spoiled capture"),
                // The graph owns captured work, an event guards the rest: one flight cannot be both.
                Capture::Active if !self.streams.is_empty() && !self.captured => {
                    return refuse("the second half of a transfer");
                }
                Capture::None if self.captured => return refuse("half a transfer"),
                _ => self.captured = capture == Capture::Active,
            }
            self.streams.push(stream);
            handle
        };
        if !self.captured {
            self.flying.get_or_insert_with(Flying::new);
        }
        self.landed = false;
        *self.finished.get_mut() = false;
        Ok(handle)
    }

    /// The per-thread stream is another stream in another thread.
    fn same_thread(&mut self, stream: StreamHandle) -> Result<()> {
        if stream != StreamHandle::PER_THREAD {
            return Ok(());
        }
        let here = thread::current().id();
        if *self.thread.get_or_insert(here) != here {
            return Err(CudaError::WrongStream { stream: stream.raw(), ordinal: self.cargo.gpu.ordinal() });
        }
        Ok(())
    }

    /// Records the flight's event on `stream`, after everything the flight put on any stream: `stream` waits for the
    /// others. To be called last; work put on a stream afterwards needs another landing.
    ///
    /// # Errors
    /// [`CudaError::StreamIsCapturing`] if any work was captured, or the driver's refusal. Dropping the flight then waits
    /// for its streams.
    pub fn land(&mut self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        let gpu = Arc::clone(&self.cargo.gpu);
        self.board(&gpu, cx, stream)?;
        if self.captured {
            return Err(CudaError::StreamIsCapturing { stream: stream.raw(), what: "the end of a transfer" });
        }
        for &other in self.streams.iter().filter(|&&other| other != stream) {
            let join = gpu.event(cx)?;
            join.record(cx, other)?;
            gpu.wait_event(cx, stream, &join)?;
        }
        self.event.record_guard(cx, stream)?;
        self.landed = true;
        Ok(())
    }

    /// Whether everything is done: landed and arrived, or nothing was ever put on a stream. Does not wait.
    ///
    /// # Errors
    /// An earlier asynchronous failure, or the driver's refusal.
    pub fn done(&self) -> Result<bool> {
        if self.streams.is_empty() || self.finished.load(Ordering::Acquire) {
            return Ok(true);
        }
        let done = self.landed && self.event.query()?;
        if done {
            self.finished.store(true, Ordering::Release);
        }
        Ok(done)
    }

    /// Waits, asleep, until everything is done.
    ///
    /// # Errors
    /// An earlier asynchronous failure, the driver's refusal, or work that was captured: that never ends.
    pub fn wait(&self) -> Result<()> {
        if self.streams.is_empty() || self.finished.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.captured {
            let stream = self.streams.first().map_or(0, |stream| stream.raw());
            return Err(CudaError::StreamIsCapturing { stream, what: "waiting for a transfer" });
        }
        if self.landed { self.event.synchronize() } else { self.wait_for_streams() }?;
        self.finished.store(true, Ordering::Release);
        Ok(())
    }

    /// Waits without an event, by the streams or else by the whole context.
    fn wait_for_streams(&self) -> Result<()> {
        let gpu = &self.cargo.gpu;
        // Another thread's per-thread stream cannot be named here.
        if self.thread.is_none_or(|thread| thread == thread::current().id()) {
            let cx = gpu.enter()?;
            if self.streams.iter().try_for_each(|&stream| gpu.finish(&cx, stream)).is_ok() {
                return Ok(());
            }
        }
        gpu.synchronize()
    }

    /// The event that [`land`](Self::land) records; a clone can be waited for without the flight.
    pub fn event(&self) -> &Arc<Event> {
        &self.event
    }

    /// Drops the flight on the thread that may wait: for one that could not be landed, or that carries the rest of an
    /// operation that failed.
    pub fn drop_later(mut self) {
        // It must not hold up the thread that is to wait for it.
        self.flying = None;
        deferred::run_later(move || drop(self));
    }

    /// Hands the owners to the graph that `stream` is capturing: they live as long as it or an executable made from it.
    ///
    /// # Errors
    /// [`CudaError::NotCapturing`] if `stream` captures nothing, or the driver's refusal. Owners of captured work are then
    /// leaked: the graph may still be run.
    pub fn capture(mut self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        let gpu = Arc::clone(&self.cargo.gpu);
        let handle = gpu.own_stream(cx, stream)?;
        if stream.is_legacy() {
            return Err(CudaError::NotCapturing { stream: stream.raw() });
        }
        let (capture, _, graph) = capture_of(handle)?;
        if capture != Capture::Active {
            return Err(CudaError::NotCapturing { stream: stream.raw() });
        }
        let owners = mem::take(&mut self.cargo.owners);
        let cargo = Box::into_raw(Box::new(Cargo { owners, gpu }));
        let mut object = std::ptr::null_mut();
        // On a failure from here on the box is leaked, and with it its owners: the graph may hold work that uses them.
        // SAFETY: `object` is a live pointer; `unload` takes the box back once, when the last reference is gone.
        unsafe { raw::cuUserObjectCreate(&mut object, cargo.cast(), Some(unload), 1, NO_DESTRUCTOR_SYNC) }?;
        // SAFETY: the graph is being captured, so it exists; the object's one reference moves to it.
        unsafe { raw::cuGraphRetainUserObject(graph, object, 1, MOVE) }?;
        // The graph holds everything now: nothing is left to wait for.
        self.streams.clear();
        Ok(())
    }
}

/// What the driver calls when the last graph with the user object is gone: from a thread of its own or inside a call of
/// anybody's, where no driver function may be called and locks of the driver may be held.
unsafe extern "C" fn unload(cargo: *mut c_void) {
    // SAFETY: the pointer that `capture` made of a box, given back exactly once.
    let cargo = unsafe { Box::from_raw(cargo.cast::<Cargo>()) };
    deferred::run_later(move || drop(cargo));
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.streams.is_empty() || *self.finished.get_mut() {
            return;
        }
        let outcome = match self.wait() {
            // A lost event says nothing about the work: ask the device. Not under capture, where the work is yet to come.
            Err(error) if !self.captured => {
                error.log_on_drop("waiting for a transfer");
                let _relaxed = RelaxedCapture::enter();
                self.cargo.gpu.synchronize()
            }
            outcome => outcome,
        };
        if let Err(error) = outcome {
            error.log_on_drop("ending a transfer: its memory is leaked, it may still be in use. That");
            mem::forget(mem::take(&mut self.cargo.owners));
            mem::forget(Arc::clone(&self.cargo.gpu));
        }
    }
}
