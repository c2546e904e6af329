//! Host memory with an owner: the one door through which safe code moves bytes.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use crate::copy::{
    CopyHint, CopyNest, NestError, copy_bytes, copy_nest, copy_nest_unfenced, fence, fill_bytes, move_nest,
};
use crate::memory::HostBuffer;

/// Keeps memory alive for as long as a region of it exists.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// An access that would leave its region, or write where writing is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Bytes outside the region.
    #[error("bytes {start}..{end} lie outside a region of {len} bytes")]
    Bounds {
        /// First byte touched.
        start: i128,
        /// One past the last byte touched.
        end: i128,
        /// Length of the region.
        len: u64,
    },
    /// A write to memory that its owner lent for reading only.
    #[error("the region at {addr:#x} is read-only")]
    ReadOnly {
        /// First address of the region.
        addr: u64,
    },
    /// Loops that no address space can hold.
    #[error(transparent)]
    Nest(#[from] NestError),
}

/// A range of host memory that stays mapped while its owner lives.
///
/// Reads and writes are bounds-checked raw copies; no reference to the bytes is ever formed outside a call. Two calls
/// that touch the same bytes at the same time are not ordered by anything here: the bytes are then unspecified, as
/// with memory shared between processes. Planner and job order are what keep kvferry's own calls apart.
#[derive(Clone)]
pub struct HostRegion {
    addr: u64,
    len: u64,
    writable: bool,
    owner: Owner,
}

impl HostRegion {
    /// A region of somebody else's memory.
    ///
    /// # Safety
    /// `addr..addr + len` must stay mapped, readable and (if `writable`) writable, for as long as `owner` or a clone of
    /// it lives. No Rust reference to these bytes may be held across a call into this type that writes them.
    pub unsafe fn from_raw(addr: u64, len: u64, writable: bool, owner: Owner) -> HostRegion {
        HostRegion { addr, len, writable, owner }
    }

    /// All of a buffer.
    pub fn of_buffer(buffer: Arc<HostBuffer>) -> HostRegion {
        HostRegion { addr: buffer.addr(), len: buffer.len() as u64, writable: true, owner: buffer }
    }

    /// The part `start..start + len` of this region, under the same owner.
    ///
    /// # Errors
    /// A part that leaves the region.
    pub fn part(&self, start: u64, len: u64) -> Result<HostRegion, RegionError> {
        self.inside(i128::from(start), i128::from(start) + i128::from(len))?;
        Ok(HostRegion { addr: self.addr + start, len, ..self.clone() })
    }

    /// First address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the region holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether writes are allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// What keeps the memory alive.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    fn inside(&self, start: i128, end: i128) -> Result<(), RegionError> {
        if start < 0 || end > i128::from(self.len) || start > end {
            return Err(RegionError::Bounds { start, end, len: self.len });
        }
        Ok(())
    }

    /// Checks that `extent`, counted from `offset`, stays inside.
    fn reaches(&self, offset: u64, (first, end): (i64, i64)) -> Result<(), RegionError> {
        self.inside(i128::from(offset) + i128::from(first), i128::from(offset) + i128::from(end))
    }

    fn may_write(&self) -> Result<(), RegionError> {
        if self.writable { Ok(()) } else { Err(RegionError::ReadOnly { addr: self.addr }) }
    }

    /// Copies `into.len()` bytes starting at `offset` out of the region.
    ///
    /// # Errors
    /// Bytes outside the region.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RegionError> {
        self.inside(i128::from(offset), i128::from(offset) + into.len() as i128)?;
        let from = (self.addr + offset) as *const u8;
        // SAFETY: the source is in bounds (checked above) of memory that the owner keeps mapped and readable; `into` is
        // a live unique slice, so the two do not overlap unless the caller broke `from_raw`'s contract.
        unsafe { copy_bytes(from, into.as_mut_ptr(), into.len(), CopyHint::Temporal) };
        Ok(())
    }

    /// Copies `from` into the region at `offset`.
    ///
    /// # Errors
    /// Bytes outside the region, or a read-only region.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), RegionError> {
        self.may_write()?;
        self.inside(i128::from(offset), i128::from(offset) + from.len() as i128)?;
        let into = (self.addr + offset) as *mut u8;
        // SAFETY: the target is in bounds and writable (checked above) and kept mapped by the owner; `from` is a live
        // slice, so the two do not overlap unless the caller broke `from_raw`'s contract.
        unsafe { copy_bytes(from.as_ptr(), into, from.len(), CopyHint::Temporal) };
        Ok(())
    }

    /// Sets `len` bytes at `offset` to `value`.
    ///
    /// # Errors
    /// Bytes outside the region, or a read-only region.
    pub fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), RegionError> {
        self.may_write()?;
        self.inside(i128::from(offset), i128::from(offset) + i128::from(len))?;
        // SAFETY: in bounds and writable (checked above), kept mapped by the owner.
        unsafe { fill_bytes((self.addr + offset) as *mut u8, value, len as usize) };
        Ok(())
    }

    /// Reads what `nest` visits, from `offset` on, into a dense buffer: the nest's source is the region.
    ///
    /// # Errors
    /// A nest that reaches outside the region or the buffer. Nothing is copied then.
    pub fn gather(&self, offset: u64, nest: &CopyNest, into: &mut [u8]) -> Result<(), RegionError> {
        self.reaches(offset, nest.src_extent())?;
        within(into.len(), nest.dst_extent())?;
        let from = (self.addr + offset) as *const u8;
        // SAFETY: every byte read is inside the region and every byte written inside `into` (checked above). The owner
        // keeps the region mapped and readable; `into` is a live unique slice, so the two do not overlap.
        unsafe { copy_nest(from, into.as_mut_ptr(), nest, 0..nest.num_runs(), CopyHint::Temporal) };
        Ok(())
    }

    /// Writes a dense buffer to what `nest` visits, from `offset` on: the nest's destination is the region.
    ///
    /// # Errors
    /// A nest that reaches outside the region or the buffer, or a read-only region. Nothing is copied then.
    pub fn scatter(&self, offset: u64, nest: &CopyNest, from: &[u8]) -> Result<(), RegionError> {
        self.may_write()?;
        self.reaches(offset, nest.dst_extent())?;
        within(from.len(), nest.src_extent())?;
        let into = (self.addr + offset) as *mut u8;
        // SAFETY: every byte written is inside the region and every byte read inside `from` (checked above). The owner
        // keeps the region mapped, and it is writable; `from` is a live slice, so the two do not overlap unless the
        // caller broke `from_raw`'s contract.
        unsafe { copy_nest(from.as_ptr(), into, nest, 0..nest.num_runs(), CopyHint::Temporal) };
        Ok(())
    }
}

/// Copies between regions. Streaming stores are fenced once, when the copier is dropped: other threads may be told about
/// the bytes only after that. A copier stays on its thread, as its stores do.
#[derive(Debug)]
pub struct Copier {
    hint: CopyHint,
    // A fence orders the stores of the thread that executes it: not Send.
    thread: PhantomData<*const ()>,
}

impl Copier {
    /// A copier that writes through or around the caches.
    pub fn new(hint: CopyHint) -> Copier {
        Copier { hint, thread: PhantomData }
    }

    /// Carries out runs `range` of `nest`, from `src_offset` in `src` to `dst_offset` in `dst`.
    ///
    /// Where the two extents meet (a plan between interleaved views, or a caller's mistake) runs are moved one after
    /// another as by `memmove`: slower, and with overlapping bytes the outcome depends on their order, but no more.
    ///
    /// # Errors
    /// A nest that reaches outside either region, or a read-only destination. Nothing is copied then.
    #[inline]
    pub fn nest(
        &mut self,
        (src, src_offset): (&HostRegion, u64),
        (dst, dst_offset): (&HostRegion, u64),
        nest: &CopyNest,
        range: Range<u64>,
    ) -> Result<(), RegionError> {
        dst.may_write()?;
        let (read, written) = (nest.src_extent(), nest.dst_extent());
        src.reaches(src_offset, read)?;
        dst.reaches(dst_offset, written)?;
        let (from, to) = ((src.addr + src_offset) as *const u8, (dst.addr + dst_offset) as *mut u8);
        // Both extents lie in regions, so their ends are addresses.
        let ends = |base: u64, (first, end): (i64, i64)| {
            (base.wrapping_add_signed(first), base.wrapping_add_signed(end))
        };
        let (read, written) = (ends(src.addr + src_offset, read), ends(dst.addr + dst_offset, written));
        if read.0 < written.1 && written.0 < read.1 {
            // SAFETY: as below, and overlap is allowed.
            unsafe { move_nest(from, to, nest, range) };
        } else {
            // SAFETY: every byte the nest can touch is inside both regions (checked above), which their owners keep
            // mapped for the call; the destination is writable; no alignment is needed; the extents are apart. The
            // fence follows on this thread when the copier is dropped.
            unsafe { copy_nest_unfenced(from, to, nest, range, self.hint) };
        }
        Ok(())
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.hint.streams() {
            fence();
        }
    }
}

/// Checks that `extent` stays inside a buffer of `len` bytes.
fn within(len: usize, (first, end): (i64, i64)) -> Result<(), RegionError> {
    if first < 0 || i128::from(end) > len as i128 {
        return Err(RegionError::Bounds { start: first.into(), end: end.into(), len: len as u64 });
    }
    Ok(())
}

impl fmt::Debug for HostRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = if self.writable { "rw" } else { "ro" };
        write!(f, "HostRegion({:#x}, {} bytes, {access})", self.addr, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::Loop;
    use crate::memory::HostOptions;

    fn region(len: usize) -> HostRegion {
        HostRegion::of_buffer(Arc::new(HostBuffer::new(len, HostOptions::default()).unwrap()))
    }

    #[test]
    fn reads_back_what_was_written_and_stays_inside() {
        let r = region(100);
        r.fill(0, 100, 7).unwrap();
        r.write(10, &[1, 2, 3]).unwrap();
        let mut out = [0; 5];
        r.read(9, &mut out).unwrap();
        assert_eq!(out, [7, 1, 2, 3, 7]);
        assert_eq!(r.write(98, &[0; 3]), Err(RegionError::Bounds { start: 98, end: 101, len: 100 }));
        assert!(r.read(u64::MAX, &mut out).is_err());
        assert!(r.fill(0, 101, 0).is_err());
        assert!(r.part(90, 11).is_err());
        assert_eq!(r.part(90, 10).unwrap().addr(), r.addr() + 90);
    }

    #[test]
    fn a_nest_that_leaves_either_region_copies_nothing() {
        let (src, dst) = (region(64), region(48));
        src.fill(0, 64, 1).unwrap();
        dst.fill(0, 48, 9).unwrap();
        let nest = CopyNest::new(16, &[Loop { count: 4, src_stride: 16, dst_stride: 16 }]).unwrap();
        let err = Copier::new(CopyHint::Temporal).nest((&src, 0), (&dst, 0), &nest, 0..4);
        assert_eq!(err, Err(RegionError::Bounds { start: 0, end: 64, len: 48 }));
        let mut out = [0; 48];
        dst.read(0, &mut out).unwrap();
        assert_eq!(out, [9; 48]);
    }

    #[test]
    fn extents_that_meet_are_moved_not_copied() {
        let r = region(64);
        let bytes: Vec<u8> = (0..64).collect();
        r.write(0, &bytes).unwrap();
        let mut out = [0; 64];
        for hint in [CopyHint::Temporal, CopyHint::NonTemporal, CopyHint::Relay] {
            // One run onto itself, three bytes on.
            r.write(0, &bytes).unwrap();
            let run = CopyNest::new(32, &[]).unwrap();
            Copier::new(hint).nest((&r, 0), (&r, 3), &run, 0..1).unwrap();
            r.read(0, &mut out).unwrap();
            assert_eq!((&out[3..35], &out[35..]), (&bytes[..32], &bytes[35..]));
            // Rows that interleave share no byte.
            r.write(0, &bytes).unwrap();
            let rows = CopyNest::new(4, &[Loop { count: 8, src_stride: 8, dst_stride: 8 }]).unwrap();
            Copier::new(hint).nest((&r, 0), (&r, 4), &rows, 0..8).unwrap();
            r.read(0, &mut out).unwrap();
            assert!(out.chunks(8).zip(bytes.chunks(8)).all(|(o, b)| o[..4] == b[..4] && o[4..] == b[..4]));
        }
    }

    #[test]
    fn strided_rows_are_gathered_and_scattered() {
        let r = region(64);
        let bytes: Vec<u8> = (0..64).collect();
        r.write(0, &bytes).unwrap();
        let gather = CopyNest::new(2, &[Loop { count: 3, src_stride: 20, dst_stride: 2 }]).unwrap();
        let mut row = [0; 6];
        r.gather(5, &gather, &mut row).unwrap();
        assert_eq!(row, [5, 6, 25, 26, 45, 46]);
        assert_eq!(r.gather(23, &gather, &mut row), Err(RegionError::Bounds { start: 23, end: 65, len: 64 }));
        assert_eq!(
            r.gather(0, &gather, &mut row[..5]),
            Err(RegionError::Bounds { start: 0, end: 6, len: 5 })
        );

        let scatter = CopyNest::new(2, &[Loop { count: 3, src_stride: 2, dst_stride: 20 }]).unwrap();
        r.scatter(22, &scatter, &row).unwrap();
        assert!(r.scatter(23, &scatter, &row).is_err() && r.scatter(0, &scatter, &row[..5]).is_err());
        let mut out = [0; 64];
        r.read(0, &mut out).unwrap();
        assert_eq!((&out[22..24], &out[42..44], &out[62..64]), (&row[..2], &row[2..4], &row[4..]));
        // SAFETY: the clone of the owner keeps the same memory mapped.
        let ro = unsafe { HostRegion::from_raw(r.addr(), 64, false, r.owner().clone()) };
        assert_eq!(ro.scatter(0, &scatter, &row), Err(RegionError::ReadOnly { addr: r.addr() }));
    }

    #[test]
    fn a_read_only_region_refuses_writes() {
        let r = region(8);
        // SAFETY: the clone of the owner keeps the same memory mapped.
        let ro = unsafe { HostRegion::from_raw(r.addr(), 8, false, r.owner().clone()) };
        assert_eq!(ro.write(0, &[1]), Err(RegionError::ReadOnly { addr: r.addr() }));
        assert!(ro.fill(0, 1, 1).is_err());
    }
}
