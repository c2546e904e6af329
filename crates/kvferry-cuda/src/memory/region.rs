//! Pinned memory as a host region.

use std::sync::Arc;

use kvferry_host::HostRegion;

use super::PinnedBuffer;

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
