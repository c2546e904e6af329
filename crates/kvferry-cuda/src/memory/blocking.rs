//! Device memory read and written by the host, which waits: the one implementation for buffers and regions.

use std::ffi::c_void;

use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::error::{CudaError, Result};
use crate::raw::{self, CUdeviceptr, CUstream};

/// The legacy default stream.
const LEGACY: CUstream = std::ptr::null_mut();

/// A range of device memory for copies that have ended when the call returns.
///
/// They run on the legacy default stream of the device's primary context: after work on blocking streams, and **not**
/// after work on non-blocking ones. They never become part of a graph that somebody captures, nor spoil one.
pub(super) struct Blocking<'a> {
    addr: CUdeviceptr,
    len: u64,
    context: &'a PrimaryContext,
}

impl<'a> Blocking<'a> {
    /// The range `addr..addr + len`.
    ///
    /// # Safety
    /// While the value lives, the range is memory of the context's device that may be read, and written by whoever calls
    /// [`write`](Self::write) or [`fill`](Self::fill).
    pub(super) unsafe fn new(addr: u64, len: u64, context: &'a PrimaryContext) -> Blocking<'a> {
        Blocking { addr, len, context }
    }

    /// Copies the bytes from `offset` on into `into`.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.run(offset, into.len() as u64, |at| {
            // SAFETY: `at` and the length lie inside the range (checked by `run`), which is readable; `into` is
            // exclusively ours for its length; the context is current, and the copy has ended when the call returns.
            unsafe { raw::cuMemcpyDtoH_v2(into.as_mut_ptr().cast::<c_void>(), at, into.len()) }
        })
    }

    /// Copies `from` to the bytes from `offset` on.
    pub(super) fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.run(offset, from.len() as u64, |at| {
            // SAFETY: `at` and the length lie inside the range (checked by `run`), which is writable; `from` is readable
            // for its length; the context is current. Device memory is nobody's Rust reference: nothing is aliased.
            unsafe { raw::cuMemcpyHtoD_v2(at, from.as_ptr().cast::<c_void>(), from.len()) }
        })
    }

    /// Sets `len` bytes from `offset` on to `value`.
    pub(super) fn fill(&self, offset: u64, len: u64, value: u8) -> Result<()> {
        self.run(offset, len, |at| {
            // SAFETY: `at` and `len` lie inside the range (checked by `run`), which is writable; the context is current.
            unsafe { raw::cuMemsetD8_v2(at, value, len as usize) }
        })
    }

    /// Runs `operation` on the device address of `offset` and waits for the legacy stream: uploads and fills return
    /// before their last byte has landed (CUDA driver API, API synchronization behavior).
    fn run(&self, offset: u64, len: u64, operation: impl FnOnce(CUdeviceptr) -> Result<()>) -> Result<()> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside {
            // A usize has 64 bits wherever CUDA runs.
            let [offset, len, limit] = [offset, len, self.len].map(|value| value as usize);
            return Err(CudaError::OutOfBounds { offset, len, limit });
        }
        if len == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        operation(self.addr + offset)?;
        // SAFETY: the legacy stream of the current context always exists.
        unsafe { raw::cuStreamSynchronize(LEGACY) }
    }
}
