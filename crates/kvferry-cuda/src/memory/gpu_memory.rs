//! Memory a GPU can address, with its owner.

use std::fmt;
use std::sync::Arc;

use kvferry_host::{HostRegion, Owner};

use super::{DeviceRegion, pointer, register};
use crate::error::{CudaError, Result};

/// A range that device work may read, and write if it is writable, for as long as its owner lives: device memory, or
/// host memory that the driver has pinned.
#[derive(Clone)]
pub struct GpuMemory {
    addr: u64,
    len: u64,
    writable: bool,
    /// The device it lies on; `None` for host memory.
    ordinal: Option<u32>,
    /// Offsets at which one registration ends and the next begins: no copy-engine copy may reach across.
    seams: Arc<[u64]>,
    owner: Owner,
}

impl GpuMemory {
    /// Device memory.
    pub fn of_device(region: &DeviceRegion) -> GpuMemory {
        GpuMemory {
            addr: region.addr(),
            len: region.len(),
            writable: region.writable(),
            ordinal: Some(region.ordinal()),
            seams: Arc::default(),
            owner: Arc::clone(region.owner()),
        }
    }

    /// Host memory that the driver knows in whole: pinned, or registered in one or several adjoining ranges. A range that
    /// [`register_host`](crate::register_host) registered stays registered while this lives.
    ///
    /// # Errors
    /// [`CudaError::NotPinned`] naming the first address the driver does not know, those of
    /// [`pointer_kind`](crate::pointer_kind).
    pub fn of_host(region: &HostRegion) -> Result<GpuMemory> {
        let (addr, len) = (region.addr(), region.len());
        let mut owner = Arc::clone(region.owner());
        let seams = match register::find(addr, len) {
            Some(pages) => {
                let seams = pages.seams_within(addr, len);
                owner = Arc::new((owner, pages));
                seams
            }
            None => pinned_seams(addr, len)?,
        };
        Ok(GpuMemory { addr, len, writable: region.writable(), ordinal: None, seams: seams.into(), owner })
    }

    /// The same memory, not to be written.
    #[must_use]
    pub fn read_only(mut self) -> GpuMemory {
        self.writable = false;
        self
    }

    /// First address, the same for kernels, copy engines and (host memory) the CPU.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether writes are allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The device it lies on; `None` for host memory.
    pub fn ordinal(&self) -> Option<u32> {
        self.ordinal
    }

    /// What keeps it allocated.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    #[cfg(test)]
    pub(crate) fn with_seams(mut self, seams: &[u64]) -> GpuMemory {
        self.seams = seams.into();
        self
    }

    /// The first seam strictly inside `start..end`, offsets of this memory.
    pub(crate) fn seam_within(&self, start: u64, end: u64) -> Option<u64> {
        let next = self.seams.partition_point(|&seam| seam <= start);
        self.seams.get(next).copied().filter(|&seam| seam < end)
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuMemory({:#x}, {} bytes, ", self.addr, self.len)?;
        match self.ordinal {
            Some(ordinal) => write!(f, "device:{ordinal})"),
            None => write!(f, "pinned)"),
        }
    }
}

/// Whether the driver knows all of a range as pinned memory.
pub(super) fn pinned_in_whole(addr: u64, len: u64) -> Result<bool> {
    match pinned_seams(addr, len) {
        Ok(_) => Ok(true),
        Err(CudaError::NotPinned { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Most adjoining registrations that one region may span.
const MOST_PIECES: usize = 1 << 16;

/// Offsets at which one pinned allocation ends and the next begins, in a range that the driver must know in whole.
fn pinned_seams(addr: u64, len: u64) -> Result<Vec<u64>> {
    let end = addr.checked_add(len).ok_or(CudaError::NotPinned { addr })?;
    let mut seams = Vec::new();
    let mut at = addr;
    while at < end {
        let piece = pointer::pinned_piece(at)?.ok_or(CudaError::NotPinned { addr: at })?;
        at = match piece.end {
            Some(piece_end) if piece_end > at => piece_end.min(end),
            // The driver names no range: the last byte must then be of the same allocation.
            _ => match pointer::pinned_piece(end - 1)? {
                Some(last) if last.id == piece.id => end,
                _ => return Err(CudaError::NotPinned { addr: end - 1 }),
            },
        };
        if at < end {
            seams.push(at - addr);
        }
        if seams.len() > MOST_PIECES {
            return Err(CudaError::NotPinned { addr: at });
        }
    }
    Ok(seams)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seams_are_found_strictly_inside() {
        // SAFETY: never given to a device.
        let region = unsafe { DeviceRegion::from_raw(1 << 40, 1000, 1, Arc::new(())) };
        let memory = GpuMemory::of_device(&region);
        assert_eq!((memory.seam_within(0, 1000), memory.writable(), memory.ordinal()), (None, true, Some(1)));
        let memory = memory.with_seams(&[100, 200]);
        let found = [(0, 100), (0, 101), (100, 200), (100, 201), (150, 1000), (200, 1000)]
            .map(|(start, end)| memory.seam_within(start, end));
        assert_eq!(found, [None, Some(100), None, Some(200), Some(200), None]);
        assert!(!GpuMemory::of_device(&region.read_only()).writable());
    }
}
