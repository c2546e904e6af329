//! The memory that ranks share: each exports one allocation, `[control block | pool]`, and maps those of its peers.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvferry_kernels::CONTROL_BYTES;

use crate::context::ContextGuard;
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::gpu::{Gpu, StreamHandle};
use crate::memory::{DeviceBuffer, DeviceRegion, IpcHandle, IpcMapping, VmmBuffer};
use crate::raw;

/// How an allocation was made decides how peers map it.
#[derive(Debug)]
enum Own {
    /// Physical memory with a file descriptor.
    Shareable(VmmBuffer),
    /// Plain device memory, named by a CUDA IPC handle.
    Plain(DeviceBuffer),
}

/// This rank's exported allocation. Results are parts of it, so it lives as long as any of them.
#[derive(Debug)]
pub struct ExchangeMemory {
    own: Own,
    /// Bytes of the pool behind the control block.
    pool_bytes: u64,
    gpu: Arc<Gpu>,
}

impl ExchangeMemory {
    /// `pool_bytes` of pool on `gpu`, exportable as a file descriptor.
    ///
    /// # Errors
    /// Those of [`VmmBuffer::new`].
    pub fn shareable(gpu: &Arc<Gpu>, pool_bytes: u64) -> Result<Arc<ExchangeMemory>> {
        let own = Own::Shareable(VmmBuffer::new(whole(gpu, pool_bytes)?, gpu.ordinal())?);
        Ok(Arc::new(ExchangeMemory { own, pool_bytes, gpu: Arc::clone(gpu) }))
    }

    /// The same in memory of `cuMemAlloc`, for CUDA IPC.
    ///
    /// # Errors
    /// Those of [`DeviceBuffer::new`].
    pub fn plain(gpu: &Arc<Gpu>, pool_bytes: u64) -> Result<Arc<ExchangeMemory>> {
        let own = Own::Plain(DeviceBuffer::new(whole(gpu, pool_bytes)?, gpu.ordinal())?);
        Ok(Arc::new(ExchangeMemory { own, pool_bytes, gpu: Arc::clone(gpu) }))
    }

    /// A descriptor for peers to [`PeerMemory::import`].
    ///
    /// # Errors
    /// [`CudaError::SharingUnsupported`] for plain memory, or the driver's refusal.
    pub fn export(&self) -> Result<OwnedFd> {
        match &self.own {
            Own::Shareable(buffer) => buffer.export(),
            Own::Plain(_) => Err(CudaError::SharingUnsupported {
                what: "file descriptor for memory from cuMemAlloc",
                ordinal: self.gpu.ordinal(),
            }),
        }
    }

    /// A handle for peers to [`PeerMemory::open`].
    ///
    /// # Errors
    /// Those of [`IpcHandle::of`].
    pub fn ipc(self: &Arc<Self>) -> Result<IpcHandle> {
        IpcHandle::of(&self.region(0, self.len()))
    }

    /// First address, that of the control block.
    pub fn addr(&self) -> u64 {
        match &self.own {
            Own::Shareable(buffer) => buffer.addr(),
            Own::Plain(buffer) => buffer.addr(),
        }
    }

    /// Bytes of the allocation as peers must map it: control block, pool, and what rounding added.
    pub fn len(&self) -> u64 {
        match &self.own {
            Own::Shareable(buffer) => buffer.len() as u64,
            Own::Plain(buffer) => buffer.len() as u64,
        }
    }

    /// Never true.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// The pool, kept by this memory.
    pub fn pool(self: &Arc<Self>) -> DeviceRegion {
        self.region(CONTROL_BYTES, self.pool_bytes)
    }

    fn region(self: &Arc<Self>, start: u64, len: u64) -> DeviceRegion {
        // SAFETY: both callers stay inside the allocation, which is memory of this device, readable and writable, for as
        // long as the owner lives.
        unsafe { DeviceRegion::from_raw(self.addr() + start, len, self.gpu.ordinal(), Arc::clone(self) as _) }
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Puts zeroes into the control block, on `stream`.
    ///
    /// # Errors
    /// A guard or stream of another device, or the driver's refusal.
    pub(super) fn zero_control(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<()> {
        let handle = self.gpu.own_stream(cx, stream)?;
        // SAFETY: the control block is the beginning of this allocation; the caller keeps it until the stream is done.
        unsafe { raw::cuMemsetD8Async(self.addr(), 0, CONTROL_BYTES as usize, handle) }
    }
}

/// Bytes of control block and pool.
fn whole(gpu: &Gpu, pool_bytes: u64) -> Result<usize> {
    let bytes = CONTROL_BYTES.checked_add(pool_bytes).and_then(|bytes| usize::try_from(bytes).ok());
    let ordinal = gpu.ordinal();
    bytes.ok_or(CudaError::OutOfMemory { bytes: usize::MAX, ordinal, call: "cuMemCreate" })
}

/// The exported allocation of a rank as this rank's device sees it.
pub struct PeerMemory {
    kind: Kind,
    addr: u64,
    /// Bytes of the pool, as its owner told.
    pool_bytes: u64,
    /// The device that can use it.
    ordinal: u32,
}

#[expect(dead_code, reason = "held")]
enum Kind {
    /// Of this process.
    Near(Arc<ExchangeMemory>),
    Imported(VmmBuffer),
    Opened(IpcMapping),
}

impl PeerMemory {
    /// Memory of a rank of this process (also this rank itself), for kernels of `gpu`.
    ///
    /// # Errors
    /// [`CudaError::PeerAccess`] where the hardware cannot reach it, or the driver's refusal.
    pub fn near(memory: &Arc<ExchangeMemory>, gpu: &Gpu) -> Result<PeerMemory> {
        let (here, there) = (gpu.ordinal(), memory.gpu.ordinal());
        if here != there {
            match &memory.own {
                // Copy engines and, for plain memory, kernels go by the context's access; mapped memory has its own.
                Own::Plain(_) => gpu.peer_access(there)?,
                Own::Shareable(buffer) => {
                    gpu.can_access(there)?;
                    buffer.allow(here)?;
                }
            }
        }
        let (addr, pool_bytes) = (memory.addr(), memory.pool_bytes);
        Ok(PeerMemory { kind: Kind::Near(Arc::clone(memory)), addr, pool_bytes, ordinal: here })
    }

    /// Memory that another process exported as `fd`, for kernels of `gpu`: `len` is the exporter's
    /// [`ExchangeMemory::len`]. The device it lies on need not be visible here.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] if that many bytes cannot hold control block and pool; those of
    /// [`VmmBuffer::import_unseen`].
    pub fn import(fd: BorrowedFd<'_>, len: u64, pool_bytes: u64, gpu: &Gpu) -> Result<PeerMemory> {
        fits(len, pool_bytes)?;
        let mapped = VmmBuffer::import_unseen(fd, len as usize, gpu.ordinal())?;
        let addr = mapped.addr();
        Ok(PeerMemory { kind: Kind::Imported(mapped), addr, pool_bytes, ordinal: gpu.ordinal() })
    }

    /// Memory that another process named by `handle`, for kernels of `gpu`.
    ///
    /// # Errors
    /// As [`import`](Self::import), and those of [`IpcMapping::open`].
    pub fn open(handle: &IpcHandle, pool_bytes: u64, gpu: &Gpu) -> Result<PeerMemory> {
        fits(handle.len, pool_bytes)?;
        let mapped = IpcMapping::open(handle, gpu.ordinal())?;
        let addr = mapped.addr();
        Ok(PeerMemory { kind: Kind::Opened(mapped), addr, pool_bytes, ordinal: gpu.ordinal() })
    }

    /// Address of its control block.
    pub(super) fn control(&self) -> u64 {
        self.addr
    }

    /// Address of its pool.
    pub(super) fn pool(&self) -> u64 {
        self.addr + CONTROL_BYTES
    }

    /// Bytes of its pool.
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// The device that can use it.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Whether it is this very allocation.
    pub(super) fn is(&self, memory: &Arc<ExchangeMemory>) -> bool {
        matches!(&self.kind, Kind::Near(near) if Arc::ptr_eq(near, memory))
    }
}

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Near(_) => "near",
            Kind::Imported(_) => "imported",
            Kind::Opened(_) => "opened",
        };
        write!(f, "PeerMemory({kind}, {:#x}, pool of {} bytes)", self.addr, self.pool_bytes)
    }
}

/// The sizes come from somebody else.
fn fits(len: u64, pool_bytes: u64) -> Result<()> {
    match CONTROL_BYTES.checked_add(pool_bytes) {
        Some(end) if end <= len => Ok(()),
        _ => {
            let (offset, bytes) = (CONTROL_BYTES as usize, pool_bytes as usize);
            Err(CudaError::OutOfBounds { offset, len: bytes, limit: len as usize })
        }
    }
}

/// How well two devices reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerReach {
    /// The same device.
    Same,
    /// The driver says that kernels of one can use memory of the other; `atomics`: also by atomic operations.
    Direct {
        /// Native atomics over the link.
        atomics: bool,
    },
    /// The driver says no.
    None,
    /// The other device is not visible in this process: trying tells.
    Unknown,
}

impl Gpu {
    /// How kernels of this device reach memory of the device with this UUID (as
    /// [`DeviceInfo::uuid`](crate::DeviceInfo) has it).
    ///
    /// # Errors
    /// The driver's refusal to answer.
    pub fn reach(&self, uuid: &str) -> Result<PeerReach> {
        if uuid == self.info().uuid {
            return Ok(PeerReach::Same);
        }
        let found = crate::device::devices()?.into_iter().find(|device| device.uuid == uuid);
        let Some(there) = found else { return Ok(PeerReach::Unknown) };
        match self.can_access(there.ordinal) {
            Err(CudaError::PeerAccess { .. }) => return Ok(PeerReach::None),
            other => other?,
        }
        let driver = Driver::get()?;
        let (here, there) = (driver.device(self.ordinal())?, driver.device(there.ordinal)?);
        let mut atomics = 0;
        // SAFETY: `atomics` is a live integer; both devices came from the driver.
        unsafe { raw::cuDeviceGetP2PAttribute(&mut atomics, NATIVE_ATOMICS, here, there) }?;
        Ok(PeerReach::Direct { atomics: atomics != 0 })
    }
}

/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
const NATIVE_ATOMICS: u32 = 3;
