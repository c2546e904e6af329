//! Kinds of memory and regions of it.

mod alloc;

use std::fmt;

use kvferry_cuda::DeviceRegion;
use kvferry_host::HostRegion;
use kvferry_layout::RegionSpan;

use crate::error::Result;

pub(crate) use alloc::allocate;

/// Where memory lies. The kind decides the direction of a transfer and the engines that can carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Pageable host memory.
    System,
    /// Page-locked host memory that every GPU can address.
    Pinned,
    /// Memory of the GPU with this ordinal.
    Device(u32),
}

impl MemoryKind {
    /// Whether the CPU can address it.
    pub const fn is_host(self) -> bool {
        matches!(self, MemoryKind::System | MemoryKind::Pinned)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryKind::System => f.write_str("system"),
            MemoryKind::Pinned => f.write_str("pinned"),
            MemoryKind::Device(ordinal) => write!(f, "device:{ordinal}"),
        }
    }
}

/// A range of memory, kept alive by its owner.
#[derive(Clone, Debug)]
pub enum Region {
    /// Memory the CPU can address.
    Host(HostRegion),
    /// Memory of a GPU.
    Device(DeviceRegion),
}

impl Region {
    /// Address and length.
    pub fn span(&self) -> RegionSpan {
        match self {
            Region::Host(region) => RegionSpan { addr: region.addr(), len: region.len() },
            Region::Device(region) => RegionSpan { addr: region.addr(), len: region.len() },
        }
    }

    /// Whether it may be written.
    pub fn writable(&self) -> bool {
        match self {
            Region::Host(region) => region.writable(),
            Region::Device(region) => region.writable(),
        }
    }

    /// Sets every byte to `value`. Device memory: see [`DeviceRegion`] for ordering.
    pub(crate) fn fill(&self, value: u8) -> Result<()> {
        match self {
            Region::Host(region) => region.fill(0, region.len(), value)?,
            Region::Device(region) => region.fill(0, region.len(), value)?,
        }
        Ok(())
    }

    /// The host region, if the CPU can address it.
    pub const fn host(&self) -> Option<&HostRegion> {
        match self {
            Region::Host(region) => Some(region),
            Region::Device(_) => None,
        }
    }

    /// The kind of memory it is, pinned host memory counting as system memory.
    pub fn kind(&self) -> MemoryKind {
        match self {
            Region::Host(_) => MemoryKind::System,
            Region::Device(region) => MemoryKind::Device(region.ordinal()),
        }
    }

    /// Whether the region can belong to a layout of this kind.
    pub fn is_of(&self, kind: MemoryKind) -> bool {
        match self {
            Region::Host(_) => kind.is_host(),
            Region::Device(region) => kind == MemoryKind::Device(region.ordinal()),
        }
    }
}
