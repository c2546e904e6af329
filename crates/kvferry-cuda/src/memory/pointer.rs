//! What kind of memory an address points to.

use std::ffi::c_void;

use cudarc::driver::sys::CUpointer_attribute_enum as Attribute;

use crate::error::{CudaError, NOT_INITIALIZED, Result};
use crate::raw;

/// The kind of memory behind an address, as the driver sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PointerKind {
    /// Memory the driver does not know: pageable host memory (or no memory at all).
    System,
    /// Page-locked host memory, allocated by the driver or registered with it; the driver does not tell the two apart.
    Pinned,
    /// Memory of the device with this ordinal.
    Device(u32),
    /// Managed memory, which moves between host and devices.
    Managed,
}

/// `CU_MEMORYTYPE_HOST`.
const HOST: u64 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u64 = 2;

/// Asks the driver what `addr` points to (`cuPointerGetAttributes`). Needs no current context, and does not initialise
/// CUDA: in a process that nobody has initialised it for, all memory is the system's, and the process may still fork.
///
/// # Errors
/// [`CudaError::DriverNotFound`] (all memory is the system's then; the caller decides), the driver's refusal, or
/// [`CudaError::UnknownMemoryType`].
pub fn pointer_kind(addr: u64) -> Result<PointerKind> {
    let mut asked = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32,
    ];
    // The attributes are four bytes or fewer; eight zeroed ones hold any of them on a little-endian machine.
    let (mut memory_type, mut is_managed, mut ordinal) = (0_u64, 0_u64, 0_u64);
    let mut values: [*mut c_void; 3] =
        [(&raw mut memory_type).cast(), (&raw mut is_managed).cast(), (&raw mut ordinal).cast()];
    // SAFETY: both arrays have three live entries, each value has room for its attribute, and any address may be asked
    // about: for one it does not know the driver stores nulls.
    let asked = unsafe { raw::cuPointerGetAttributes(3, asked.as_mut_ptr(), values.as_mut_ptr(), addr) };
    match asked {
        Err(CudaError::Driver { code: NOT_INITIALIZED, .. }) => return Ok(PointerKind::System),
        asked => asked?,
    }
    match (memory_type, is_managed & 0xFF) {
        (_, managed) if managed != 0 => Ok(PointerKind::Managed),
        (0, _) => Ok(PointerKind::System),
        (HOST, _) => Ok(PointerKind::Pinned),
        // An ordinal is a small non-negative int: the low half holds it.
        (DEVICE, _) => Ok(PointerKind::Device(ordinal as u32)),
        (value, _) => Err(CudaError::UnknownMemoryType { addr, value }),
    }
}

/// A stretch of pinned host memory.
pub(super) struct PinnedPiece {
    /// One past its last address, where the driver says so.
    pub(super) end: Option<u64>,
    /// The driver's number of the allocation or registration.
    pub(super) id: u64,
}

/// The pinned allocation or registration that `addr` lies in; `None` if it is no pinned host memory.
pub(super) fn pinned_piece(addr: u64) -> Result<Option<PinnedPiece>> {
    if pointer_kind(addr)? != PointerKind::Pinned {
        return Ok(None);
    }
    let mut asked = [
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID as u32,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as u32,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32,
    ];
    let (mut id, mut start, mut len) = (0_u64, 0_u64, 0_u64);
    let mut values: [*mut c_void; 3] = [(&raw mut id).cast(), (&raw mut start).cast(), (&raw mut len).cast()];
    // SAFETY: both arrays have three live entries and each value has the eight bytes of its attribute; what the driver
    // does not know about an address it leaves null.
    unsafe { raw::cuPointerGetAttributes(3, asked.as_mut_ptr(), values.as_mut_ptr(), addr) }?;
    let end = start.checked_add(len).filter(|&end| start <= addr && addr < end);
    Ok(Some(PinnedPiece { end, id }))
}

/// The address at which kernels of the current context reach pinned host memory.
pub(crate) fn device_alias(addr: u64) -> Result<u64> {
    let mut alias = 0_u64;
    let value = (&raw mut alias).cast();
    // SAFETY: `alias` has the eight bytes of the attribute; any address may be asked about.
    unsafe {
        raw::cuPointerGetAttribute(value, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as u32, addr)
    }?;
    Ok(alias)
}
