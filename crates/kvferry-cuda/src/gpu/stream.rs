//! Streams: our own, other people's, and the two that every context has.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::{Gpu, lock};
use crate::capture::RelaxedCapture;
use crate::context::ContextGuard;
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::raw::{self, CUgraph, CUstream};

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const CAPTURE_IMPLICIT: i32 = 906;
/// `CU_STREAM_NON_BLOCKING`: not ordered against the legacy default stream.
const NON_BLOCKING: u32 = 1;

/// Names a stream. Two handles of one stream are equal.
#[derive(Clone, Copy, Debug)]
pub struct StreamHandle {
    raw: u64,
    /// Serial number of the [`Gpu`] that made it; 0 for foreign and implicit streams.
    home: u32,
    /// Never destroyed: events may be recorded on it at any later time.
    lasts: bool,
}

impl StreamHandle {
    /// The legacy default stream of the device it is used with: ordered against every blocking stream. Handle 0.
    pub const LEGACY: StreamHandle = StreamHandle { raw: 0, home: 0, lasts: true };
    /// The calling thread's own default stream on the device it is used with. Handle 2 (`CU_STREAM_PER_THREAD`).
    pub const PER_THREAD: StreamHandle = StreamHandle { raw: 2, home: 0, lasts: false };

    /// Somebody else's stream, by the value of its `CUstream` (the same as a `cudaStream_t`; 0 and 1 are the legacy
    /// stream, 2 the per-thread one).
    ///
    /// # Safety
    /// The stream exists during every call that takes the handle, and is not destroyed between such calls of one
    /// transfer. It may be destroyed with work pending: the driver finishes that.
    pub const unsafe fn from_raw(raw: u64) -> StreamHandle {
        StreamHandle { raw, home: 0, lasts: raw <= 1 }
    }

    /// As [`from_raw`](Self::from_raw), of a stream that lives as long as the process, such as those of torch's pools: what
    /// would be noted at once about another one may then be asked of it later.
    ///
    /// # Safety
    /// The stream is never destroyed.
    pub const unsafe fn lasting(raw: u64) -> StreamHandle {
        StreamHandle { raw, home: 0, lasts: raw != 2 }
    }

    /// Whether the stream is never destroyed, as far as is known.
    pub const fn lasts(self) -> bool {
        self.lasts
    }

    /// The value of the driver's handle.
    pub const fn raw(self) -> u64 {
        self.raw
    }

    /// Whether this is the legacy default stream, by either of its names.
    pub const fn is_legacy(self) -> bool {
        self.raw <= 1
    }

    /// Whether the handle means a stream of whatever context is current.
    pub(crate) const fn is_implicit(self) -> bool {
        self.raw <= 2
    }

    pub(crate) const fn home(self) -> u32 {
        self.home
    }

    pub(crate) fn own(stream: CUstream, home: u32) -> StreamHandle {
        StreamHandle { raw: stream.expose_provenance() as u64, home, lasts: false }
    }

    pub(crate) fn as_driver(self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.raw as usize)
    }
}

/// What a stream of the current context captures: the state, the capture's number and its graph.
pub(crate) fn capture_of(handle: CUstream) -> Result<(Capture, u64, CUgraph)> {
    let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
    // SAFETY: the three are live and of the driver's types; dependencies are not asked for. Callers got the handle from
    // `usable` or `own_stream`, with its context current.
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
    Ok((Capture::from_driver(status), id, graph))
}

impl PartialEq for StreamHandle {
    fn eq(&self, other: &StreamHandle) -> bool {
        self.raw == other.raw || (self.is_legacy() && other.is_legacy())
    }
}

impl Eq for StreamHandle {}

impl Hash for StreamHandle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (if self.is_legacy() { 0 } else { self.raw }).hash(state);
    }
}

/// What a stream is doing about graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// It runs what it is given.
    None,
    /// It records a graph: nothing runs now.
    Active,
    /// It records a graph that something has spoiled; only ending the capture helps.
    Invalidated,
}

/// A stream of the library's own, not ordered against the legacy default stream.
///
/// A dropped one is parked and handed out again when its work is done, so its handle stays a live stream for as long as
/// the `Gpu`; after that, calls refuse the handle.
#[derive(Debug)]
pub struct Stream {
    handle: StreamHandle,
    gpu: Arc<Gpu>,
}

impl Stream {
    /// A stream of `gpu` with nothing on it.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Stream> {
        let _current = gpu.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let parked = {
            let mut parked = lock(&gpu.streams);
            // SAFETY: parked streams are live until the `Gpu` is dropped, and their context is current.
            let idle = parked.iter().position(|&stream| unsafe { raw::cuStreamQuery(stream) }.is_ok());
            idle.map(|at| parked.swap_remove(at))
        };
        let stream = match parked {
            Some(stream) => stream,
            None => create()?,
        };
        Ok(Stream { handle: StreamHandle::own(stream, gpu.serial), gpu: Arc::clone(gpu) })
    }

    /// Its name.
    pub fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// The device it belongs to.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Waits until everything put on it is done.
    ///
    /// # Errors
    /// An earlier asynchronous failure, or the driver's refusal.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.finish(&self.gpu.enter()?, self.handle)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        lock(&self.gpu.streams).push(self.handle.as_driver());
    }
}

/// A new stream in the current context.
pub(super) fn create() -> Result<CUstream> {
    let _relaxed = RelaxedCapture::enter()?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: `stream` is a live pointer; the caller's context is current.
    unsafe { raw::cuStreamCreate(&mut stream, NON_BLOCKING) }?;
    Ok(stream)
}

/// Gives a stream back. Work on it ends first, without anybody waiting.
pub(super) fn destroy(stream: CUstream) {
    // SAFETY: made by `create`, in the context that is current, and forgotten by the caller.
    if let Err(error) = unsafe { raw::cuStreamDestroy_v2(stream) } {
        error.log_on_drop("destroying a stream");
    }
}

impl Gpu {
    /// Whether `stream` is capturing a graph. The legacy stream never is.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub fn capture_status(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<Capture> {
        let handle = self.usable(cx, stream)?;
        if stream.is_legacy() {
            return Ok(Capture::None);
        }
        let mut status = 0;
        // SAFETY: `status` is a live integer; the stream exists, see `usable`.
        unsafe { raw::cuStreamIsCapturing(handle, &mut status) }?;
        Ok(Capture::from_driver(status))
    }

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
        let (capture, id, _) = capture_of(handle)?;
        Ok((capture == Capture::Active).then_some(id))
    }

    /// The device that `stream` belongs to. The implicit streams belong to this one.
    ///
    /// # Errors
    /// A guard of another device, a library stream of another device, or the driver's refusal.
    pub fn stream_device(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<u32> {
        let handle = self.usable(cx, stream)?;
        if stream.is_implicit() || stream.home() != 0 {
            return Ok(self.ordinal());
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a live pointer; the stream exists by the promise of `from_raw`.
        unsafe { raw::cuStreamGetCtx(handle, &mut context) }?;
        if context == self.context.handle() {
            return Ok(self.ordinal());
        }
        // SAFETY: the stream's context lives as long as the stream.
        unsafe { raw::cuCtxPushCurrent_v2(context) }?;
        let mut device = -1;
        // SAFETY: `device` is a live integer and a context is current.
        let asked = unsafe { raw::cuCtxGetDevice(&mut device) };
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is a live pointer; takes off what was pushed above.
        unsafe { raw::cuCtxPopCurrent_v2(&mut popped) }?;
        asked?;
        Driver::get()?
            .ordinal(device)
            .ok_or(CudaError::WrongStream { stream: stream.raw(), ordinal: self.ordinal() })
    }

    /// Refuses a stream that is not of this device's primary context: events of ours could not be recorded on it.
    pub(crate) fn own_stream(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<CUstream> {
        let handle = self.usable(cx, stream)?;
        if stream.is_implicit() || stream.home() != 0 {
            return Ok(handle);
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is a live pointer; the stream exists by the promise of `from_raw`.
        unsafe { raw::cuStreamGetCtx(handle, &mut context) }?;
        if context != self.context.handle() {
            return Err(CudaError::WrongStream { stream: stream.raw(), ordinal: self.ordinal() });
        }
        Ok(handle)
    }
}

impl Capture {
    /// From the driver's `CUstreamCaptureStatus`.
    pub(crate) fn from_driver(status: u32) -> Capture {
        match status {
            0 => Capture::None,
            1 => Capture::Active,
            _ => Capture::Invalidated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_legacy_stream_has_two_names() {
        // SAFETY: never used.
        let (zero, one, two, high) =
            unsafe { [0, 1, 2, 0x1234_0000].map(|raw| StreamHandle::from_raw(raw)).into() };
        assert!(zero == StreamHandle::LEGACY && one == zero && one.is_legacy());
        assert!(two == StreamHandle::PER_THREAD && !two.is_legacy() && two.is_implicit());
        assert!(high != two && !high.is_implicit() && high.raw() == 0x1234_0000);
        let hash = |handle: StreamHandle| {
            let mut hasher = std::hash::DefaultHasher::new();
            handle.hash(&mut hasher);
            hasher.finish()
        };
        assert_eq!(hash(zero), hash(one));
    }
}
