//! Device memory that other processes can map: physical memory, an address for it, and a file descriptor to hand over.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUmemAccess_flags, CUmemAllocationHandleType,
    CUmemAllocationProp_st__bindgen_ty_1 as AllocFlags, CUmemAllocationType, CUmemLocation,
    CUmemLocationType,
};

use crate::capture::RelaxedCapture;
use crate::context::PrimaryContext;
use crate::deferred::run_later;
use crate::device::attribute;
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::raw::{self, CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: u32 = 1;

/// Device memory made of shareable physical memory, here or in another process, mapped here; unmapped on drop. The
/// physical memory lives until every process that mapped it has let go.
#[derive(Debug)]
pub struct VmmBuffer {
    addr: CUdeviceptr,
    len: usize,
    ordinal: u32,
    handle: CUmemGenericAllocationHandle,
    /// Of the device that the mapping was made through.
    context: Arc<PrimaryContext>,
}

impl VmmBuffer {
    /// At least `len` bytes on device `ordinal`, rounded up to the device's granularity (2 MiB as a rule), accessible to
    /// that device. Slow: never on a hot path.
    ///
    /// # Errors
    /// [`CudaError::ZeroLength`], [`CudaError::OutOfMemory`], [`CudaError::SharingUnsupported`], those of
    /// [`PrimaryContext::get`], or the driver's refusal.
    pub fn new(len: usize, ordinal: u32) -> Result<VmmBuffer> {
        if len == 0 {
            return Err(CudaError::ZeroLength { what: "shareable device" });
        }
        let context = PrimaryContext::get(ordinal)?;
        supported(ordinal)?;
        let properties = properties(ordinal)?;
        let _current = context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let mut granularity = 0;
        // SAFETY: `granularity` is a live integer and the properties are complete.
        unsafe { raw::cuMemGetAllocationGranularity(&mut granularity, &properties, RECOMMENDED) }?;
        let out_of_memory = CudaError::OutOfMemory { bytes: len, ordinal, call: "cuMemCreate" };
        let len = len.checked_next_multiple_of(granularity.max(1)).ok_or(out_of_memory)?;
        let mut handle = 0;
        // SAFETY: `handle` is a live integer; flags must be 0.
        let created = unsafe { raw::cuMemCreate(&mut handle, len, &properties, 0) };
        created.map_err(|error| error.for_allocation(len, ordinal))?;
        VmmBuffer::map(handle, len, ordinal, Arc::clone(&context), granularity)
    }

    /// Maps memory that another process exported: `len` bytes of device `located`, accessible to device `ordinal`. The
    /// descriptor stays the caller's. `len` is the exporter's [`len`](Self::len).
    ///
    /// # Errors
    /// As [`new`](Self::new); a descriptor of something else, or a `len` beyond it, is refused by the driver.
    pub fn import(fd: BorrowedFd<'_>, len: usize, located: u32, ordinal: u32) -> Result<VmmBuffer> {
        Driver::get()?.device(located)?;
        let mut buffer = VmmBuffer::import_unseen(fd, len, ordinal)?;
        buffer.ordinal = located;
        Ok(buffer)
    }

    /// As [`import`](Self::import), for memory of a device that this process need not see: whether `ordinal` reaches it
    /// is known by trying. [`ordinal`](Self::ordinal) is then that of the device it was mapped through.
    ///
    /// # Errors
    /// As [`import`](Self::import).
    pub fn import_unseen(fd: BorrowedFd<'_>, len: usize, ordinal: u32) -> Result<VmmBuffer> {
        if len == 0 {
            return Err(CudaError::ZeroLength { what: "shareable device" });
        }
        let context = PrimaryContext::get(ordinal)?;
        supported(ordinal)?;
        let _current = context.enter()?;
        let _relaxed = RelaxedCapture::enter()?;
        let mut handle = 0;
        let descriptor: *mut c_void = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: `handle` is a live integer; for this kind of handle the pointer's value is the descriptor.
        unsafe { raw::cuMemImportFromShareableHandle(&mut handle, descriptor, POSIX_FD) }?;
        VmmBuffer::map(handle, len, ordinal, Arc::clone(&context), 0)
    }

    /// Gives `handle` an address that its own device may use. Takes the handle, also on failure.
    fn map(
        handle: CUmemGenericAllocationHandle,
        len: usize,
        ordinal: u32,
        context: Arc<PrimaryContext>,
        alignment: usize,
    ) -> Result<VmmBuffer> {
        let mut addr = 0;
        // SAFETY: `addr` is a live integer; no address is wished for, flags must be 0.
        if let Err(error) = unsafe { raw::cuMemAddressReserve(&mut addr, len, alignment, 0, 0) } {
            release(handle);
            return Err(error);
        }
        // SAFETY: the range is reserved and empty, and as long as what is mapped; flags must be 0.
        if let Err(error) = unsafe { raw::cuMemMap(addr, len, 0, handle, 0) } {
            free_address(addr, len);
            release(handle);
            return Err(error);
        }
        // From here on dropping undoes everything.
        let accessor = context.ordinal();
        let buffer = VmmBuffer { addr, len, ordinal, handle, context };
        buffer.allow(accessor)?;
        Ok(buffer)
    }

    /// Lets device `ordinal` read and write the memory.
    ///
    /// # Errors
    /// [`CudaError::InvalidDevice`], or the driver's refusal where the device cannot reach the memory.
    pub fn allow(&self, ordinal: u32) -> Result<()> {
        let access = CUmemAccessDesc {
            location: location(ordinal)?,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: the range is mapped while `self` lives; one description is passed.
        unsafe { raw::cuMemSetAccess(self.addr, self.len, &access, 1) }
    }

    /// A file descriptor that names the physical memory, for another process to [`import`](Self::import). Close-on-exec;
    /// holding it keeps the memory allocated.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut fd: c_int = -1;
        let _relaxed = RelaxedCapture::enter()?;
        // SAFETY: `fd` has room for a descriptor, the handle is ours, flags must be 0.
        unsafe { raw::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, POSIX_FD, 0) }?;
        // SAFETY: the driver gave a new descriptor, which nobody else knows.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Device address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes, a multiple of the granularity.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device it lies on.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }
}

impl Drop for VmmBuffer {
    fn drop(&mut self) {
        // Unmapping may wait for all work of the device; whoever drops a buffer need not.
        let (addr, len, handle, context) = (self.addr, self.len, self.handle, Arc::clone(&self.context));
        run_later(move || match context.enter() {
            Ok(_current) => {
                // SAFETY: mapped by us, unmapped once.
                if let Err(error) = unsafe { raw::cuMemUnmap(addr, len) } {
                    // The address is still in use then: it is kept, and the memory with it.
                    return error.log_on_drop("unmapping shareable memory");
                }
                free_address(addr, len);
                release(handle);
            }
            Err(error) => error.log_on_drop("entering a context to unmap shareable memory"),
        });
    }
}

fn free_address(addr: CUdeviceptr, len: usize) {
    // SAFETY: reserved by us with this length, nothing is mapped there, and it is given up.
    if let Err(error) = unsafe { raw::cuMemAddressFree(addr, len) } {
        error.log_on_drop("freeing an address range");
    }
}

fn release(handle: CUmemGenericAllocationHandle) {
    // SAFETY: our one reference to the physical memory, given up.
    if let Err(error) = unsafe { raw::cuMemRelease(handle) } {
        error.log_on_drop("releasing shareable memory");
    }
}

fn location(ordinal: u32) -> Result<CUmemLocation> {
    let driver = Driver::get()?;
    driver.device(ordinal)?;
    let count = driver.device_count();
    let id = c_int::try_from(ordinal).map_err(|_| CudaError::InvalidDevice { ordinal, count })?;
    Ok(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id })
}

fn properties(ordinal: u32) -> Result<CUmemAllocationProp> {
    Ok(CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(ordinal)?,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: AllocFlags { compressionType: 0, gpuDirectRDMACapable: 0, usage: 0, reserved: [0; 4] },
    })
}

/// Ok if memory of device `ordinal` can be shared by file descriptor ([`VmmBuffer`]).
///
/// # Errors
/// [`CudaError::SharingUnsupported`] naming what is missing, [`CudaError::InvalidDevice`], or the driver's refusal.
pub fn vmm_supported(ordinal: u32) -> Result<()> {
    supported(ordinal)
}

/// Whether a device has what sharing by descriptor needs.
fn supported(ordinal: u32) -> Result<()> {
    let device = Driver::get()?.device(ordinal)?;
    for (which, what) in [
        (Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
        (
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            "memory file descriptors",
        ),
    ] {
        if attribute(device, which)? == 0 {
            return Err(CudaError::SharingUnsupported { what, ordinal });
        }
    }
    Ok(())
}
