//! Pinned host memory.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::deferred::{drain_deferred, run_later};
use crate::error::{CudaError, OUT_OF_MEMORY, Result};
use crate::raw;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context, not only for the one that allocated.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: kernels can reach it.
const DEVICEMAP: u32 = 2;

/// Page-locked host memory, reachable by every device, freed on drop.
///
/// Ordinary cached memory: write-combined memory would make reads by the CPU tens of times slower. Content is whatever
/// the driver hands out (usually zero); as with [`DeviceBuffer`](crate::DeviceBuffer) it gives out addresses, not slices.
#[derive(Debug)]
pub struct PinnedBuffer {
    base: NonNull<u8>,
    len: usize,
    device_addr: u64,
    context: Arc<PrimaryContext>,
}

// SAFETY: the allocation belongs to the process, and the driver frees it from any thread (driver calls are thread-safe).
unsafe impl Send for PinnedBuffer {}
// SAFETY: `&PinnedBuffer` gives out addresses only; every access to the bytes is an unsafe operation of the caller.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Pins exactly `len` bytes (the driver rounds up to pages) through the context of device `ordinal`
    /// (`cuMemHostAlloc`, portable and device-mapped). Slow, up to a second per few GB, and it may wait for the device:
    /// never on a hot path.
    ///
    /// # Errors
    /// [`CudaError::ZeroLength`], [`CudaError::OutOfMemory`], those of [`PrimaryContext::get`], or the driver's refusal.
    pub fn new(len: usize, ordinal: u32) -> Result<PinnedBuffer> {
        if len == 0 {
            return Err(CudaError::ZeroLength { what: "pinned" });
        }
        let context = PrimaryContext::get(ordinal)?;
        let (base, device_addr) = {
            let _current = context.enter()?;
            let _relaxed = RelaxedCapture::enter()?;
            let mut base = ptr::null_mut();
            let mut allocate = || {
                // SAFETY: `base` is a live pointer; the context is current.
                unsafe { raw::cuMemHostAlloc(&mut base, len, PORTABLE | DEVICEMAP) }
            };
            let outcome = match allocate() {
                // What was dropped before may not have been given back yet.
                Err(error) if error.code() == Some(OUT_OF_MEMORY) && drain_deferred() => allocate(),
                outcome => outcome,
            };
            outcome.map_err(|error| error.for_allocation(len, ordinal))?;
            let mut device_addr = 0;
            // SAFETY: `base` is the start of a device-mapped allocation; flags must be 0.
            let alias = unsafe { raw::cuMemHostGetDevicePointer_v2(&mut device_addr, base, 0) };
            if let Err(error) = alias {
                // SAFETY: allocated above, with the same context still current, and given up here.
                unsafe { free(base) };
                return Err(error);
            }
            (base, device_addr)
        };
        let base = NonNull::new(base.cast::<u8>());
        let base = base.ok_or(CudaError::OutOfMemory { bytes: len, ordinal, call: "cuMemHostAlloc" })?;
        Ok(PinnedBuffer { base, len, device_addr, context })
    }

    /// Host address of the first byte, a multiple of the page size.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Pointer to the first byte. Valid for [`len`](Self::len) bytes while the buffer lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Address of the first byte as kernels see it: equal to [`addr`](Self::addr) wherever addressing is unified.
    pub fn device_addr(&self) -> u64 {
        self.device_addr
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device whose context allocated it.
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let (base, context) = (self.base.as_ptr().expose_provenance(), Arc::clone(&self.context));
        run_later(move || match context.enter() {
            Ok(_current) => {
                // SAFETY: the buffer's own allocation, freed once, with its context current.
                unsafe { free(ptr::with_exposed_provenance_mut(base)) }
            }
            Err(error) => error.log_on_drop("entering a context to free pinned memory"),
        });
    }
}

/// Frees what `cuMemHostAlloc` gave. The driver waits for work that still uses it; copies started elsewhere are the
/// business of whoever kept only the address.
///
/// # Safety
/// `base` came from `cuMemHostAlloc`, is not used again, and its context is current.
unsafe fn free(base: *mut std::ffi::c_void) {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { raw::cuMemFreeHost(base) } {
        error.log_on_drop("freeing pinned memory");
    }
}
