//! Block ids that lie on the device, and what the kernel says about bad ones.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_host::Owner;

use super::table::upload;
use crate::error::{CudaError, Result, Side};
use crate::gpu::Gpu;
use crate::memory::{DeviceBuffer, DeviceRegion, PinnedBuffer};

/// Signed block ids in device memory, read when a kernel runs.
#[derive(Clone, Debug)]
pub struct DeviceIds {
    region: DeviceRegion,
    width: u8,
    len: u32,
}

impl DeviceIds {
    /// All of `region` as signed integers of `width` bytes, 4 or 8.
    ///
    /// # Errors
    /// [`CudaError::Argument`] for another width, an address or length that is no multiple of it, or 2^32 ids and more.
    pub fn new(region: DeviceRegion, width: u8) -> Result<DeviceIds> {
        let argument = |what, value, rule| Err(CudaError::Argument { what, value, rule });
        if width != 4 && width != 8 {
            return argument("the width of device ids", width.into(), "it must be 4 or 8 bytes");
        }
        let rule = "it must be a multiple of the width of an id";
        if !region.addr().is_multiple_of(u64::from(width)) {
            return argument("the address of device ids", region.addr(), rule);
        }
        if !region.len().is_multiple_of(u64::from(width)) {
            return argument("the length of device ids in bytes", region.len(), rule);
        }
        let len = region.len() / u64::from(width);
        match u32::try_from(len) {
            Ok(len) => Ok(DeviceIds { region, width, len }),
            Err(_) => argument("the number of device ids", len, "it must be below 2^32"),
        }
    }

    /// A copy of `ids` in new memory of `gpu`, for a launch whose other side lies on the device. Allocates and waits for
    /// the upload. No ids: no memory.
    ///
    /// # Errors
    /// [`CudaError::TooManyPairs`] for 2^32 ids and more, or a failing allocation or upload.
    pub fn upload(gpu: &Arc<Gpu>, ids: &[u64]) -> Result<DeviceIds> {
        let limit = u64::from(u32::MAX);
        let len = u32::try_from(ids.len());
        let len = len.map_err(|_| CudaError::TooManyPairs { pairs: ids.len() as u64, limit })?;
        let buffer = if ids.is_empty() { DeviceBuffer::new(8, gpu.ordinal())? } else { upload(gpu, ids)? };
        Ok(DeviceIds { region: DeviceRegion::of_buffer(Arc::new(buffer)), width: 8, len })
    }

    /// Ids there are.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Device they lie on.
    pub fn ordinal(&self) -> u32 {
        self.region.ordinal()
    }

    pub(super) fn width(&self) -> u8 {
        self.width
    }

    pub(super) fn addr_of(&self, index: usize) -> u64 {
        self.region.addr() + u64::from(self.width) * index as u64
    }

    pub(super) fn owner(&self) -> Owner {
        Arc::clone(self.region.owner())
    }

    pub(super) fn reachable(&self, gpu: &Gpu) -> Result<()> {
        gpu.peer_access(self.region.ordinal())
    }
}

/// The first bad id that a kernel met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadId {
    /// The side it is an id of.
    pub side: Side,
    /// Index in the array of ids.
    pub index: u64,
    /// The id.
    pub value: i64,
    /// Ids are below this.
    pub limit: u64,
}

/// Bytes of one kernel's report: state and side (32 bits each), index, value, limit (64 bits each).
pub(super) const SLOT_BYTES: u64 = 32;
/// Kernels that one job of device ids may take.
const SLOTS: u32 = 64;

/// Where kernels leave word of a bad id: pinned memory, read by the CPU when the work is done. For one job at a time.
pub struct BadIdReport {
    memory: PinnedBuffer,
    gpu: Arc<Gpu>,
    /// Pairs per kernel of the job in hand, and its kernels; 0 of both when there is none.
    job: Mutex<(u32, u32)>,
}

impl fmt::Debug for BadIdReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BadIdReport({:?})", self.gpu)
    }
}

impl BadIdReport {
    /// An empty report for kernels of `gpu`. Pins memory: keep it for further jobs.
    ///
    /// # Errors
    /// A failing allocation, or [`CudaError::AliasDiffers`].
    pub fn new(gpu: &Arc<Gpu>) -> Result<Arc<BadIdReport>> {
        let memory = PinnedBuffer::new((u64::from(SLOTS) * SLOT_BYTES) as usize, gpu.ordinal())?;
        let (addr, alias) = (memory.addr(), memory.device_addr());
        if addr != alias {
            return Err(CudaError::AliasDiffers { addr, alias });
        }
        let report = BadIdReport { memory, gpu: Arc::clone(gpu), job: Mutex::default() };
        for slot in 0..SLOTS {
            report.clear(slot);
        }
        Ok(Arc::new(report))
    }

    /// Begins a job of `count` pairs, `per_launch` in each kernel, and gives the address of the first kernel's slot.
    pub(super) fn reserve(&self, gpu: &Arc<Gpu>, count: u32, per_launch: u32) -> Result<u64> {
        if !Arc::ptr_eq(gpu, &self.gpu) {
            let (what, found) = ("the report of bad ids", self.gpu.ordinal());
            return Err(CudaError::WrongDevice { what, found, ordinal: gpu.ordinal() });
        }
        let launches = count.div_ceil(per_launch);
        if launches > SLOTS {
            let limit = u64::from(SLOTS) * u64::from(per_launch);
            return Err(CudaError::TooManyPairs { pairs: count.into(), limit });
        }
        let mut job = self.job.lock().unwrap_or_else(PoisonError::into_inner);
        *job = (per_launch, launches.max(if job.0 == per_launch { job.1 } else { 0 }));
        Ok(self.memory.device_addr())
    }

    /// The first bad id of the job, lowest kernel first, and makes the report empty. To be called when the job's flight is
    /// done: before that, it may miss one.
    pub fn take(&self) -> Option<BadId> {
        let (per_launch, launches) =
            std::mem::take(&mut *self.job.lock().unwrap_or_else(PoisonError::into_inner));
        let mut first = None;
        for slot in 0..launches {
            let found = self.read(slot, u64::from(per_launch) * u64::from(slot));
            first = first.or(found);
            self.clear(slot);
        }
        first
    }

    /// A 64-bit word of a slot. The CPU shares these bytes with a device, so they are only ever touched as atomics.
    fn word(&self, slot: u32, word: usize) -> &AtomicU64 {
        let at = slot as usize * SLOT_BYTES as usize + word * 8;
        // SAFETY: inside the buffer: `slot` is below SLOTS and `word` below 4.
        let pointer = unsafe { self.memory.as_ptr().add(at) }.cast::<u64>();
        // SAFETY: aligned (pages, steps of 8), allocated while `self` lives, and on this side touched as atomics only.
        unsafe { AtomicU64::from_ptr(pointer) }
    }

    fn clear(&self, slot: u32) {
        for word in 0..SLOT_BYTES as usize / 8 {
            self.word(slot, word).store(0, Ordering::Relaxed);
        }
    }

    fn read(&self, slot: u32, base: u64) -> Option<BadId> {
        let head = self.word(slot, 0).load(Ordering::Acquire);
        if head as u32 == 0 {
            return None;
        }
        let [index, value, limit] = [1, 2, 3].map(|word| self.word(slot, word).load(Ordering::Relaxed));
        let side = if head >> 32 == 0 { Side::Source } else { Side::Destination };
        Some(BadId { side, index: base + index, value: value as i64, limit })
    }
}
