//! Copies by the copy engines, many to a call.

mod primitive;
mod submit;

use std::sync::Arc;

use kvferry_host::Owner;

pub use primitive::{MemcpyBatchMode, MemcpyBatchPath, memcpy_batch};

use crate::context::ContextGuard;
use crate::error::{CudaError, Result, Side};
use crate::flight::Flight;
use crate::gpu::{Capture, StreamHandle};
use crate::memory::GpuMemory;
use crate::raw;
use submit::{Copies, FIRST_CALL};

/// Most copies of one driver call: longer batches take several, so that the driver's working memory stays small and the
/// first copies begin while the last are handed over.
pub const BATCH_CAP: usize = 8192;

/// Whether libcuda has a batch copy (CUDA 12.8 and newer). False without a driver.
pub fn batch_supported() -> bool {
    raw::batch_form().is_some()
}

/// The two sets of memory that batches copy between; made once, used by many.
#[derive(Debug)]
pub struct BatchSides {
    src: Vec<GpuMemory>,
    dst: Vec<GpuMemory>,
}

impl BatchSides {
    /// Both region tables.
    pub fn new(src: &[GpuMemory], dst: &[GpuMemory]) -> Arc<BatchSides> {
        Arc::new(BatchSides { src: src.to_vec(), dst: dst.to_vec() })
    }
}

/// Copies between two sets of memory, each checked as it is pushed, put on a stream together. Their order is undefined:
/// no copy may write what another one reads or writes.
#[derive(Debug)]
pub struct BatchCopies {
    sides: Arc<BatchSides>,
    copies: Copies,
}

impl BatchCopies {
    /// No copies yet, from `src` to `dst`.
    pub fn new(src: &[GpuMemory], dst: &[GpuMemory]) -> BatchCopies {
        BatchCopies::between(&BatchSides::new(src, dst))
    }

    /// As [`new`](Self::new), for sides that are kept: costs one reference count.
    pub fn between(sides: &Arc<BatchSides>) -> BatchCopies {
        BatchCopies { sides: Arc::clone(sides), copies: Copies::default() }
    }

    /// Room for `more` copies without growing.
    pub fn reserve(&mut self, more: usize) {
        self.copies.reserve(more);
    }

    /// Adds the copy of `len` bytes from `src_at` in source region `src_region` to `dst_at` in destination region
    /// `dst_region`. No bytes: nothing is added. A copy across two registrations of host memory is added in parts.
    ///
    /// # Errors
    /// [`CudaError::Regions`] for a region that does not exist, [`CudaError::OutOfReach`], [`CudaError::ReadOnly`].
    pub fn push(
        &mut self,
        src_region: usize,
        src_at: u64,
        dst_region: usize,
        dst_at: u64,
        len: u64,
    ) -> Result<()> {
        let src = region(&self.sides.src, Side::Source, src_region, src_at, len)?;
        let dst = region(&self.sides.dst, Side::Destination, dst_region, dst_at, len)?;
        if !dst.writable() {
            return Err(CudaError::ReadOnly { region: dst_region });
        }
        let mut done = 0;
        while done < len {
            let (from, to, rest) = (src_at + done, dst_at + done, len - done);
            let src_part = src.seam_within(from, from + rest).map_or(rest, |seam| seam - from);
            let dst_part = dst.seam_within(to, to + rest).map_or(rest, |seam| seam - to);
            let part = src_part.min(dst_part);
            self.copies.push(src.addr() + from, dst.addr() + to, part);
            done += part;
        }
        Ok(())
    }

    /// Copies pushed, in the parts they are made in.
    pub fn len(&self) -> usize {
        self.copies.len()
    }

    /// Whether none was pushed.
    pub fn is_empty(&self) -> bool {
        self.copies.len() == 0
    }

    /// Forgets the copies, keeps the room.
    pub fn clear(&mut self) {
        self.copies.clear();
    }

    /// Puts all copies on `stream` by the driver's batch call, [`BATCH_CAP`] to a call. Sources are read in stream order.
    ///
    /// # Errors
    /// [`CudaError::LegacyStream`] and [`CudaError::StreamIsCapturing`]: the driver does not take these;
    /// [`CudaError::BatchUnsupported`]; a guard, stream or flight of another device; the driver's refusal. There is no
    /// fallback: [`enqueue_each`](Self::enqueue_each) is the caller's to choose. After an error some copies may be on
    /// the stream; the flight knows.
    pub fn enqueue(&self, cx: &ContextGuard<'_>, stream: StreamHandle, flight: &mut Flight) -> Result<()> {
        self.enqueue_counted(cx, stream, flight).map_err(|(_, error)| error)
    }

    /// As [`enqueue`](Self::enqueue); an error comes with the number of copies that are on the stream all the same.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn enqueue_counted(
        &self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        flight: &mut Flight,
    ) -> Result<(), (usize, CudaError)> {
        self.submit(cx, stream, flight, FIRST_CALL)
    }

    /// As [`enqueue`](Self::enqueue), in calls as large as the driver takes: for copies of which others are under way.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn enqueue_at_once(
        &self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        flight: &mut Flight,
    ) -> Result<()> {
        self.submit(cx, stream, flight, BATCH_CAP).map_err(|(_, error)| error)
    }

    fn submit(
        &self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        flight: &mut Flight,
        first_call: usize,
    ) -> Result<(), (usize, CudaError)> {
        let none = |error| (0, error);
        let gpu = Arc::clone(flight.gpu());
        if stream.is_legacy() {
            return Err(none(CudaError::LegacyStream));
        }
        if gpu.capture_status(cx, stream).map_err(none)? != Capture::None {
            let what = "the driver's batch copy";
            return Err(none(CudaError::StreamIsCapturing { stream: stream.raw(), what }));
        }
        if self.is_empty() {
            return Ok(());
        }
        let handle = flight.board(&gpu, cx, stream).map_err(none)?;
        flight.hold(Arc::clone(&self.sides) as Owner);
        if self.len() == 1 {
            // By itself it starts 4 us sooner than as a batch of one (H200).
            // SAFETY: as for the batch below: the same bytes, flight, stream and context; this call takes any stream.
            return unsafe { self.copies.each(handle, 0) }.map_err(none);
        }
        // SAFETY: every copy was found inside both of its regions (`push`), the destination writable; the flight holds
        // the regions until the stream has done the work. The context is current and the stream is one of it, neither
        // legacy nor capturing.
        unsafe { self.copies.batch(handle, first_call) }
    }

    /// Puts all copies on `stream` by one driver call each, in the order pushed. Takes every stream; on a capturing one
    /// each copy becomes a node of the graph.
    ///
    /// # Errors
    /// A guard, stream or flight of another device; the driver's refusal. After an error some copies may be on the
    /// stream; the flight knows.
    pub fn enqueue_each(
        &self,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        flight: &mut Flight,
    ) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let gpu = Arc::clone(flight.gpu());
        let handle = flight.board(&gpu, cx, stream)?;
        flight.hold(Arc::clone(&self.sides) as Owner);
        // SAFETY: as in `enqueue`; this call takes any stream.
        unsafe { self.copies.each(handle, 0) }
    }
}

/// The region `index`, if `at..at + len` lies inside it.
fn region(memory: &[GpuMemory], side: Side, index: usize, at: u64, len: u64) -> Result<&GpuMemory> {
    let missing =
        || CudaError::Regions { side, asked: (index as u64).saturating_add(1), has: memory.len() as u64 };
    let region = memory.get(index).ok_or_else(missing)?;
    match at.checked_add(len) {
        Some(end) if end <= region.len() => Ok(region),
        end => Err(CudaError::OutOfReach {
            side,
            region: index,
            needs: end.unwrap_or(u64::MAX),
            has: region.len(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::DeviceRegion;

    fn memory(addr: u64, len: u64) -> GpuMemory {
        // SAFETY: never given to a device.
        GpuMemory::of_device(&unsafe { DeviceRegion::from_raw(addr, len, 0, Arc::new(())) })
    }

    #[test]
    fn pushes_are_checked_and_split_at_seams() {
        let (src, dst) = ([memory(0x1000, 100), memory(0x2000, 50)], [memory(0x3000, 100)]);
        let mut copies = BatchCopies::new(&src, &dst);
        copies.push(1, 50, 0, 100, 0).unwrap();
        assert!(copies.is_empty());
        copies.push(1, 10, 0, 60, 40).unwrap();
        let reach = |side, region, needs, has| Err(CudaError::OutOfReach { side, region, needs, has });
        assert_eq!(copies.push(1, 10, 0, 60, 41), reach(Side::Source, 1, 51, 50));
        assert_eq!(copies.push(0, 0, 0, 60, 41), reach(Side::Destination, 0, 101, 100));
        assert_eq!(copies.push(0, u64::MAX, 0, 0, 2), reach(Side::Source, 0, u64::MAX, 100));
        assert_eq!(
            copies.push(2, 0, 0, 0, 1),
            Err(CudaError::Regions { side: Side::Source, asked: 3, has: 2 })
        );
        let missing = Err(CudaError::Regions { side: Side::Destination, asked: 2, has: 1 });
        assert_eq!(copies.push(0, 0, 1, 0, 1), missing);
        assert_eq!(copies.len(), 1, "a refused copy is not pushed");

        let mut locked = BatchCopies::new(&src, &[memory(0x3000, 100).read_only()]);
        assert_eq!(locked.push(0, 0, 0, 0, 1), Err(CudaError::ReadOnly { region: 0 }));

        let (src, dst) = ([src[0].clone().with_seams(&[30, 60])], [dst[0].clone().with_seams(&[40])]);
        let mut copies = BatchCopies::new(&src, &dst);
        copies.push(0, 20, 0, 0, 70).unwrap();
        let parts = [(0x1014, 0x3000, 10), (0x101E, 0x300A, 30), (0x103C, 0x3028, 30)];
        assert_eq!(copies.copies.list(), parts);
    }
}
