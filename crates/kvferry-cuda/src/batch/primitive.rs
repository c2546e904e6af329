//! The public batch copy between raw addresses, with the behaviour of the system it is named after.

use super::BATCH_CAP;
use super::submit::Copies;
use crate::context::ContextGuard;
use crate::error::{CudaError, Result};
use crate::gpu::{Capture, Gpu, StreamHandle};
use std::sync::Arc;

/// What [`memcpy_batch`] does where the driver has no batch copy, or does not take this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemcpyBatchMode {
    /// The batch call; one call per copy if the driver says "not supported". Any other refusal is an error.
    #[default]
    BatchedWithFallback,
    /// One call per copy, always.
    FallbackOnly,
    /// The batch call or an error.
    BatchWithoutFallback,
}

/// How [`memcpy_batch`] put its copies on the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemcpyBatchPath {
    /// There was nothing to copy.
    Nothing,
    /// By the batch call.
    Batched,
    /// By one call per copy.
    PerCopy,
}

/// Copies `sizes[i]` bytes from `src[i]` to `dst[i]` for every `i`, on `stream`, between any memory that the driver can
/// address. Empty copies are left out. Returns as soon as the copies are on the stream.
///
/// The copies are unordered among themselves. The legacy default stream, which the batch call does not take, is forked
/// to a stream of the library's and joined back: work before and after is ordered as if they were on it. On a capturing
/// stream, which it does not take either, each copy becomes a node of the graph; with
/// [`MemcpyBatchMode::BatchWithoutFallback`] that is an error.
///
/// # Errors
/// [`CudaError::ListLengths`] before anything is copied, [`CudaError::StreamIsCapturing`],
/// [`CudaError::BatchUnsupported`] (without fallback only), or the driver's refusal: then some copies may be on the stream.
///
/// # Safety
/// All addresses are valid for their sizes until the stream has done the copies, sources unchanged and destinations
/// untouched until then; no copy writes what another one reads or writes.
pub unsafe fn memcpy_batch(
    gpu: &Arc<Gpu>,
    src: &[u64],
    dst: &[u64],
    sizes: &[u64],
    stream: StreamHandle,
    mode: MemcpyBatchMode,
) -> Result<MemcpyBatchPath> {
    if src.len() != dst.len() || src.len() != sizes.len() {
        let (sources, destinations, sizes) = (src.len(), dst.len(), sizes.len());
        return Err(CudaError::ListLengths { sources, destinations, sizes });
    }
    let mut copies = Copies::default();
    copies.reserve(sizes.len());
    for ((&src, &dst), &len) in src.iter().zip(dst).zip(sizes).filter(|&(_, &len)| len > 0) {
        copies.push(src, dst, len);
    }
    let cx = gpu.enter()?;
    let handle = gpu.own_stream(&cx, stream)?;
    if copies.len() == 0 {
        return Ok(MemcpyBatchPath::Nothing);
    }
    let mut per_copy_from = None;
    if mode == MemcpyBatchMode::FallbackOnly {
        per_copy_from = Some(0);
    } else if gpu.capture_status(&cx, stream)? != Capture::None {
        if mode == MemcpyBatchMode::BatchWithoutFallback {
            let what = "the driver's batch copy";
            return Err(CudaError::StreamIsCapturing { stream: stream.raw(), what });
        }
        per_copy_from = Some(0);
    } else {
        let outcome = if stream.is_legacy() {
            forked(gpu, &cx, stream, |fork| {
                // SAFETY: the caller's promises hold until `stream` has done the copies, and `stream` waits for the fork,
                // which is a stream of the current context, neither legacy nor capturing.
                unsafe { copies.batch(fork.as_driver(), BATCH_CAP) }
            })
        } else {
            // SAFETY: the caller's promises; the stream is neither legacy nor capturing, and its context is current.
            unsafe { copies.batch(handle, BATCH_CAP) }
        };
        match outcome {
            Ok(()) => {}
            Err((done, CudaError::BatchUnsupported)) if mode == MemcpyBatchMode::BatchedWithFallback => {
                per_copy_from = Some(done);
            }
            Err((_, error)) => return Err(error),
        }
    }
    let Some(from) = per_copy_from else { return Ok(MemcpyBatchPath::Batched) };
    tracing::debug!(copies = copies.len() - from, "batch copy by one call per copy");
    // SAFETY: the caller's promises; the context is current.
    unsafe { copies.each(handle, from) }?;
    Ok(MemcpyBatchPath::PerCopy)
}

/// Runs `work` on a stream of the library's that waits for `stream`, and lets `stream` wait for it.
fn forked(
    gpu: &Arc<Gpu>,
    cx: &ContextGuard<'_>,
    stream: StreamHandle,
    work: impl FnOnce(StreamHandle) -> Result<(), (usize, CudaError)>,
) -> Result<(), (usize, CudaError)> {
    let none = |error| (0, error);
    let fork = gpu.service_stream(cx).map_err(none)?;
    // Both before anything is copied: what can fail for want of memory fails early.
    let (begin, end) = (gpu.event(cx).map_err(none)?, gpu.event(cx).map_err(none)?);
    begin.record(cx, stream).map_err(none)?;
    gpu.wait_event(cx, fork, &begin).map_err(none)?;
    let outcome = work(fork);
    // Joined also after a failure: some copies may be on their way.
    let joined = end.record(cx, fork).and_then(|()| gpu.wait_event(cx, stream, &end));
    if let Err(error) = joined {
        // The copies are then waited for here: nobody else could.
        let finished = gpu.finish(cx, fork);
        return outcome.and(Err(none(finished.err().unwrap_or(error))));
    }
    outcome
}
