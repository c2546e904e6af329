//! Device memory.

use std::ffi::c_void;
use std::sync::Arc;

use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::error::{CudaError, Result};
use crate::raw::{self, CUdeviceptr, StreamHandle};

/// Memory of one device, freed on drop.
///
/// From `cuMemAlloc`, not from a stream-ordered pool: such memory has an IPC handle and belongs to no stream.
///
/// The copying methods are for tests, fills and set-up. They run on the legacy default stream and block until the bytes
/// have arrived, so they are ordered after work on blocking streams, and **not** after work on non-blocking ones (the
/// library's own), which the caller must have finished.
#[derive(Debug)]
pub struct DeviceBuffer {
    addr: CUdeviceptr,
    len: usize,
    context: Arc<PrimaryContext>,
}

/// The legacy default stream.
const LEGACY: StreamHandle = std::ptr::null_mut();

impl DeviceBuffer {
    /// Allocates exactly `len` bytes on device `ordinal` (`cuMemAlloc`), 256-byte aligned or better. The content is
    /// undefined. May wait for the device: never on a hot path.
    ///
    /// # Errors
    /// [`CudaError::ZeroLength`], [`CudaError::OutOfMemory`], those of [`PrimaryContext::get`], or the driver's refusal.
    pub fn new(len: usize, ordinal: u32) -> Result<DeviceBuffer> {
        if len == 0 {
            return Err(CudaError::ZeroLength { what: "device" });
        }
        let context = PrimaryContext::get(ordinal)?;
        let mut addr = 0;
        {
            let _current = context.enter()?;
            let _relaxed = RelaxedCapture::enter()?;
            // SAFETY: `addr` is a live integer; the context is current.
            let outcome = unsafe { raw::cuMemAlloc_v2(&mut addr, len) };
            outcome.map_err(|error| error.for_allocation(len, ordinal))?;
        }
        Ok(DeviceBuffer { addr, len, context })
    }

    /// Device address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device it lies on.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    /// Copies the bytes from `offset` on into `dst`. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is copied, or the driver's refusal.
    pub fn copy_to_host(&self, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.blocking(offset, dst.len(), |at| {
            // SAFETY: `at` and the length lie inside this live allocation, `dst` is exclusively ours for its length,
            // the context is current, and the copy has ended when the call returns.
            unsafe { raw::cuMemcpyDtoH_v2(dst.as_mut_ptr().cast::<c_void>(), at, dst.len()) }
        })
    }

    /// Copies `src` to the bytes from `offset` on. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is copied, or the driver's refusal.
    pub fn copy_from_host(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.blocking(offset, src.len(), |at| {
            // SAFETY: `at` and the length lie inside this live allocation, `src` is readable for its length, and the
            // context is current. Device memory is nobody's Rust reference, so writing through `&self` aliases nothing.
            unsafe { raw::cuMemcpyHtoD_v2(at, src.as_ptr().cast::<c_void>(), src.len()) }
        })
    }

    /// Sets `len` bytes from `offset` on to `value`. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is written, or the driver's refusal.
    pub fn memset(&self, offset: usize, len: usize, value: u8) -> Result<()> {
        self.blocking(offset, len, |at| {
            // SAFETY: `at` and `len` lie inside this live allocation and the context is current.
            unsafe { raw::cuMemsetD8_v2(at, value, len) }
        })
    }

    /// Runs `operation` on the device address of `offset` and waits for the legacy stream: uploads and fills return
    /// before their last byte has landed (CUDA driver API, API synchronization behavior).
    fn blocking(
        &self,
        offset: usize,
        len: usize,
        operation: impl FnOnce(CUdeviceptr) -> Result<()>,
    ) -> Result<()> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside {
            return Err(CudaError::OutOfBounds { offset, len, limit: self.len });
        }
        if len == 0 {
            return Ok(());
        }
        let _current = self.context.enter()?;
        operation(self.addr + offset as u64)?;
        // SAFETY: the legacy stream of the current context always exists.
        unsafe { raw::cuStreamSynchronize(LEGACY) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        match (self.context.enter(), RelaxedCapture::enter()) {
            (Ok(_current), Ok(_relaxed)) => {
                // SAFETY: the address is our own allocation, freed once, with its context current. The driver waits for
                // running work first.
                if let Err(error) = unsafe { raw::cuMemFree_v2(self.addr) } {
                    error.log_on_drop("freeing device memory");
                }
            }
            (Err(error), _) | (_, Err(error)) => {
                error.log_on_drop("entering a context to free device memory")
            }
        }
    }
}
