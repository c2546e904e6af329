//! CUDA IPC: naming an allocation of this process in another one. The older way, for memory from `cuMemAlloc`.

use std::ffi::c_char;
use std::sync::Arc;

use super::DeviceRegion;
use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::deferred::run_later;
use crate::error::{CudaError, NOT_SUPPORTED, Result};
use crate::raw::{self, CUdeviceptr, CUipcMemHandle};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;

/// A part of an allocation, for another process. Plain bytes: it may travel any way. It keeps nothing allocated; the
/// exporter must outlive every use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    /// The driver's name of the *allocation* that the part lies in.
    pub bytes: [u8; 64],
    /// Where the part begins in the allocation.
    pub offset: u64,
    /// Bytes of the part.
    pub len: u64,
}

impl IpcHandle {
    /// A handle for `region`.
    ///
    /// # Errors
    /// [`CudaError::SharingUnsupported`] for memory without an IPC handle (from a stream-ordered pool, or mapped: share
    /// that by [`VmmBuffer`](super::VmmBuffer)), or the driver's refusal.
    pub fn of(region: &DeviceRegion) -> Result<IpcHandle> {
        let context = PrimaryContext::get(region.ordinal())?;
        let _current = context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: both are live integers; any address may be asked about.
        unsafe { raw::cuMemGetAddressRange_v2(&mut base, &mut size, region.addr()) }?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: `handle` is live; the address is the start of an allocation.
        let named = unsafe { raw::cuIpcGetMemHandle(&mut handle, base) };
        named.map_err(|error| match error.code() {
            Some(INVALID_VALUE | NOT_SUPPORTED) => CudaError::SharingUnsupported {
                what: "CUDA IPC for memory that is not from cuMemAlloc",
                ordinal: region.ordinal(),
            },
            _ => error,
        })?;
        let bytes = handle.reserved.map(|byte| byte as u8);
        Ok(IpcHandle { bytes, offset: region.addr().saturating_sub(base), len: region.len() })
    }
}

/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;

/// Another process's memory, mapped here until dropped.
#[derive(Debug)]
pub struct IpcMapping {
    base: CUdeviceptr,
    offset: u64,
    len: u64,
    ordinal: u32,
    context: Arc<PrimaryContext>,
}

impl IpcMapping {
    /// Maps what `handle` names through device `ordinal`; peer access is enabled where the memory lies elsewhere.
    ///
    /// # Errors
    /// The driver's refusal: a handle of this very process, of memory that is gone, or of a device out of reach.
    pub fn open(handle: &IpcHandle, ordinal: u32) -> Result<IpcMapping> {
        let context = PrimaryContext::get(ordinal)?;
        let name = CUipcMemHandle { reserved: handle.bytes.map(|byte| byte as c_char) };
        let mut base = 0;
        {
            let _current = context.enter()?;
            let _relaxed = RelaxedCapture::enter()?;
            // SAFETY: `base` is a live integer; the driver checks the handle.
            unsafe { raw::cuIpcOpenMemHandle_v2(&mut base, name, LAZY_PEER_ACCESS) }?;
        }
        let mapping = IpcMapping { base, offset: handle.offset, len: handle.len, ordinal, context };
        // The sizes came from somebody else: the mapping must hold them.
        let has = mapping.mapped_len()?;
        match handle.offset.checked_add(handle.len) {
            Some(end) if end <= has => Ok(mapping),
            end => {
                let (offset, len) = (handle.offset as usize, handle.len as usize);
                tracing::debug!(?end, has, "an IPC handle reaches beyond its allocation");
                Err(CudaError::OutOfBounds { offset, len, limit: has as usize })
            }
        }
    }

    fn mapped_len(&self) -> Result<u64> {
        let _current = self.context.enter()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: both are live integers; any address may be asked about.
        unsafe { raw::cuMemGetAddressRange_v2(&mut base, &mut size, self.base) }?;
        Ok(size as u64)
    }

    /// Device address of the first byte of the part.
    pub fn addr(&self) -> u64 {
        self.base + self.offset
    }

    /// Bytes of the part.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the part holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device it was mapped through.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        // Closing waits for all work of the device; whoever drops a mapping need not.
        let (base, context) = (self.base, Arc::clone(&self.context));
        run_later(move || match context.enter() {
            Ok(_current) => {
                // SAFETY: opened by us, closed once, in the same context.
                if let Err(error) = unsafe { raw::cuIpcCloseMemHandle(base) } {
                    error.log_on_drop("closing an IPC handle");
                }
            }
            Err(error) => error.log_on_drop("entering a context to close an IPC handle"),
        });
    }
}
