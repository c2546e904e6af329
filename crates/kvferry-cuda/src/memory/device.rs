//! Device memory.

use std::sync::Arc;

use super::blocking::Blocking;
use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::deferred::{drain_deferred, run_later};
use crate::error::{CudaError, OUT_OF_MEMORY, Result};
use crate::raw::{self, CUdeviceptr};

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
            let mut allocate = || {
                // SAFETY: `addr` is a live integer; the context is current.
                unsafe { raw::cuMemAlloc_v2(&mut addr, len) }
            };
            let outcome = match allocate() {
                // What was dropped before may not have been given back yet.
                Err(error) if error.code() == Some(OUT_OF_MEMORY) && drain_deferred() => allocate(),
                outcome => outcome,
            };
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
        self.blocking().read(offset as u64, dst)
    }

    /// Copies `src` to the bytes from `offset` on. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is copied, or the driver's refusal.
    pub fn copy_from_host(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.blocking().write(offset as u64, src)
    }

    /// Sets `len` bytes from `offset` on to `value`. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is written, or the driver's refusal.
    pub fn memset(&self, offset: usize, len: usize, value: u8) -> Result<()> {
        self.blocking().fill(offset as u64, len as u64, value)
    }

    fn blocking(&self) -> Blocking<'_> {
        // SAFETY: exactly our live allocation, readable and writable, made in this context.
        unsafe { Blocking::new(self.addr, self.len as u64, &self.context) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let (addr, context) = (self.addr, Arc::clone(&self.context));
        run_later(move || match context.enter() {
            Ok(_current) => {
                // SAFETY: the buffer's own allocation, freed once, with its context current. The driver waits for
                // running work first.
                if let Err(error) = unsafe { raw::cuMemFree_v2(addr) } {
                    error.log_on_drop("freeing device memory");
                }
            }
            Err(error) => error.log_on_drop("entering a context to free device memory"),
        });
    }
}
