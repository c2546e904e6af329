//! Memory with an owner: pinned memory as a host region, device memory as a device region.

use std::fmt;
use std::sync::Arc;

use kvferry_host::{HostRegion, Owner};

use super::blocking::Blocking;
use super::{DeviceBuffer, PinnedBuffer};
use crate::context::PrimaryContext;
use crate::error::{CudaError, Result};

/// A range of device memory that stays allocated while its owner lives.
///
/// [`read`](Self::read), [`write`](Self::write) and [`fill`](Self::fill) are for set-up and checks. They run on the
/// legacy default stream of the device's primary context and have ended when they return: they are ordered after work on
/// blocking streams, and **not** after work on non-blocking ones (the library's own), which the caller must have
/// finished. During somebody's stream capture they happen at once, and become no part of the graph.
#[derive(Clone)]
pub struct DeviceRegion {
    addr: u64,
    len: u64,
    ordinal: u32,
    writable: bool,
    stream_ordered: bool,
    owner: Owner,
}

impl DeviceRegion {
    /// A region of somebody else's memory.
    ///
    /// # Safety
    /// `addr..addr + len` must be readable and (unless made [`read_only`](Self::read_only)) writable memory of device
    /// `ordinal`, for as long as `owner` or a clone of it lives: engines write there on the word of safe code.
    pub unsafe fn from_raw(addr: u64, len: u64, ordinal: u32, owner: Owner) -> DeviceRegion {
        DeviceRegion { addr, len, ordinal, writable: true, stream_ordered: false, owner }
    }

    /// The same region, of an owner that frees in stream order, such as a tensor of torch's caching allocator: whatever was on
    /// the stream before the owner let go still finds the memory. Calls that say so do not hold such an owner until their
    /// work is done, so that they do not keep memory from being used again.
    ///
    /// # Safety
    /// The life of `owner` is to be read in the order of every stream that the region is used on.
    pub unsafe fn in_stream_order(mut self) -> DeviceRegion {
        self.stream_ordered = true;
        self
    }

    /// All of a buffer.
    pub fn of_buffer(buffer: Arc<DeviceBuffer>) -> DeviceRegion {
        DeviceRegion {
            addr: buffer.addr(),
            len: buffer.len() as u64,
            ordinal: buffer.ordinal(),
            writable: true,
            stream_ordered: false,
            owner: buffer,
        }
    }

    /// The part `start..start + len` of this region, under the same owner; `None` if it leaves the region.
    pub fn part(&self, start: u64, len: u64) -> Option<DeviceRegion> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| DeviceRegion { addr: self.addr + start, len, ..self.clone() })
    }

    /// The same memory, not to be written: engines refuse it as a destination.
    #[must_use]
    pub fn read_only(mut self) -> DeviceRegion {
        self.writable = false;
        self
    }

    /// First address.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region holds no byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device.
    pub const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Whether writes are allowed.
    pub const fn writable(&self) -> bool {
        self.writable
    }

    /// Whether its owner frees it in stream order.
    pub const fn stream_ordered(&self) -> bool {
        self.stream_ordered
    }

    /// What keeps the memory allocated.
    pub const fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Copies `into.len()` bytes from `offset` on out of the region. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`] before anything is copied, those of [`PrimaryContext::get`], or the driver's refusal.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.blocking(|memory| memory.read(offset, into))
    }

    /// Copies `from` into the region at `offset`. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// [`CudaError::ReadOnlyMemory`], else as [`read`](Self::read).
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.may_write()?;
        self.blocking(|memory| memory.write(offset, from))
    }

    /// Sets `len` bytes from `offset` on to `value`. Blocks; see the type for ordering.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<()> {
        self.may_write()?;
        self.blocking(|memory| memory.fill(offset, len, value))
    }

    fn may_write(&self) -> Result<()> {
        if self.writable { Ok(()) } else { Err(CudaError::ReadOnlyMemory { addr: self.addr }) }
    }

    fn blocking(&self, access: impl FnOnce(Blocking<'_>) -> Result<()>) -> Result<()> {
        let context = PrimaryContext::get(self.ordinal)?;
        // SAFETY: the range is memory of this device while `self` holds its owner (the promise of `from_raw`, or a buffer
        // in whole or part), always readable; `may_write` comes before every write.
        access(unsafe { Blocking::new(self.addr, self.len, &context) })
    }
}

impl fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRegion({:#x}, {} bytes, device:{})", self.addr, self.len, self.ordinal)
    }
}

impl PinnedBuffer {
    /// All of the buffer as a host region that keeps it alive.
    pub fn into_region(self) -> HostRegion {
        let (addr, len) = (self.addr(), self.len() as u64);
        let owner = Arc::new(self);
        // SAFETY: the range is exactly the allocation, mapped read-write, and lives as long as `owner`; the buffer
        // itself gives out addresses only, so no Rust reference to these bytes exists.
        unsafe { HostRegion::from_raw(addr, len, true, owner) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_inside() {
        // SAFETY: never given to an engine; only arithmetic is tested.
        let region = unsafe { DeviceRegion::from_raw(1 << 32, 100, 1, Arc::new(())) };
        let part = region.part(90, 10).unwrap();
        assert_eq!((part.addr(), part.len(), part.ordinal()), ((1 << 32) + 90, 10, 1));
        assert!(
            region.writable()
                && part.writable()
                && !region.clone().read_only().part(0, 1).unwrap().writable()
        );
        assert!(region.part(90, 11).is_none() && region.part(u64::MAX, 2).is_none());
    }
}
