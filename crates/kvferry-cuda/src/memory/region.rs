//! Memory with an owner: pinned memory as a host region, device memory as a device region.

use std::fmt;
use std::sync::Arc;

use kvferry_host::{HostRegion, Owner};

use super::{DeviceBuffer, PinnedBuffer};

/// A range of device memory that stays allocated while its owner lives. An address for engines; the CPU never reads it.
#[derive(Clone)]
pub struct DeviceRegion {
    addr: u64,
    len: u64,
    ordinal: u32,
    owner: Owner,
}

impl DeviceRegion {
    /// A region of somebody else's memory.
    ///
    /// # Safety
    /// `addr..addr + len` must be readable and writable memory of device `ordinal`, for as long as `owner` or a clone of
    /// it lives: engines write there on the word of safe code.
    pub unsafe fn from_raw(addr: u64, len: u64, ordinal: u32, owner: Owner) -> DeviceRegion {
        DeviceRegion { addr, len, ordinal, owner }
    }

    /// All of a buffer.
    pub fn of_buffer(buffer: Arc<DeviceBuffer>) -> DeviceRegion {
        DeviceRegion {
            addr: buffer.addr(),
            len: buffer.len() as u64,
            ordinal: buffer.ordinal(),
            owner: buffer,
        }
    }

    /// The part `start..start + len` of this region, under the same owner; `None` if it leaves the region.
    pub fn part(&self, start: u64, len: u64) -> Option<DeviceRegion> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| DeviceRegion { addr: self.addr + start, len, ..self.clone() })
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

    /// What keeps the memory allocated.
    pub const fn owner(&self) -> &Owner {
        &self.owner
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
        assert!(region.part(90, 11).is_none() && region.part(u64::MAX, 2).is_none());
    }
}
