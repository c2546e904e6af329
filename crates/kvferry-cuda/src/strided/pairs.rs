//! Pairs of block ids too many for kernel parameters: tables in device memory.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_host::Owner;

use super::table;
use crate::context::ContextGuard;
use crate::error::{CudaError, Result, Side};
use crate::flight::Flight;
use crate::gpu::{Event, Gpu, StreamHandle};
use crate::memory::{DeviceBuffer, PinnedBuffer};
use crate::raw;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks guard is changed in single steps: valid after any panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The largest source and destination id of `pairs`.
fn largest(pairs: &[u64]) -> [u64; 2] {
    // Two plain maxima vectorise.
    let (src, dst) = pairs
        .iter()
        .fold((0, 0), |(src, dst): (u32, u32), &pair| (src.max(pair as u32), dst.max((pair >> 32) as u32)));
    [src.into(), dst.into()]
}

/// Refuses pairs with an id that is not below its side's number of blocks.
pub(super) fn check(pairs: &[u64], blocks: [u64; 2]) -> Result<()> {
    let [src, dst] = largest(pairs);
    if pairs.is_empty() || (src < blocks[0] && dst < blocks[1]) {
        Ok(())
    } else {
        Err(first_bad(pairs, blocks))
    }
}

#[cold]
fn first_bad(pairs: &[u64], blocks: [u64; 2]) -> CudaError {
    let ids = pairs.iter().zip(0..).flat_map(|(&pair, index)| {
        [
            (Side::Source, index, pair & 0xFFFF_FFFF, blocks[0]),
            (Side::Destination, index, pair >> 32, blocks[1]),
        ]
    });
    let bad = ids.into_iter().find(|&(_, _, value, limit)| value >= limit);
    // The caller has seen one; should it be gone, the error names the first id.
    let (side, index, value, limit) = bad.unwrap_or((Side::Source, 0, 0, blocks[0]));
    CudaError::BlockId { side, index, value, limit }
}

/// A pinned chunk and the device memory it is copied to.
struct Chunk {
    pinned: PinnedBuffer,
    device: DeviceBuffer,
}

impl Chunk {
    fn new(pairs: usize, ordinal: u32) -> Result<Chunk> {
        let limit = (usize::MAX / 8) as u64;
        let too_many = CudaError::TooManyPairs { pairs: pairs as u64, limit };
        let bytes = pairs.checked_mul(8).ok_or(too_many)?;
        Ok(Chunk { pinned: PinnedBuffer::new(bytes, ordinal)?, device: DeviceBuffer::new(bytes, ordinal)? })
    }
}

/// Chunks for long id lists, handed out as [`PairTable`]s. A chunk comes back when the last holder of its table is gone,
/// and flights hold tables, so a chunk in use by the device is never filled anew.
pub struct PairRing {
    gpu: Arc<Gpu>,
    chunk_pairs: usize,
    most: usize,
    state: Mutex<RingState>,
}

struct RingState {
    free: Vec<Chunk>,
    /// Chunks there are, leased ones included.
    made: usize,
}

impl fmt::Debug for PairRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        write!(
            f,
            "PairRing({:?}, {} of {} chunks of {} pairs, {} free)",
            self.gpu,
            state.made,
            self.most,
            self.chunk_pairs,
            state.free.len()
        )
    }
}

impl PairRing {
    /// `first` chunks of `chunk_pairs` pairs (8 bytes each, pinned and on the device), to grow up to `most` when all are
    /// leased.
    ///
    /// # Errors
    /// [`CudaError::ZeroLength`] for chunks of no pairs, or a failing allocation.
    pub fn new(gpu: &Arc<Gpu>, chunk_pairs: usize, first: usize, most: usize) -> Result<Arc<PairRing>> {
        let first = first.min(most);
        let free = (0..first).map(|_| Chunk::new(chunk_pairs, gpu.ordinal())).collect::<Result<Vec<_>>>()?;
        let state = Mutex::new(RingState { free, made: first });
        Ok(Arc::new(PairRing { gpu: Arc::clone(gpu), chunk_pairs, most, state }))
    }

    /// Most pairs of one table.
    pub fn chunk_pairs(&self) -> usize {
        self.chunk_pairs
    }

    /// Most pairs of all tables together.
    pub fn capacity_pairs(&self) -> usize {
        self.chunk_pairs.saturating_mul(self.most)
    }

    /// Room for a table of `pairs` pairs. `None` if the ring is at its cap and every chunk is leased: the caller says that
    /// it is busy; nothing waits here. Allocates only while the ring grows.
    ///
    /// # Errors
    /// [`CudaError::TooManyPairs`] beyond [`chunk_pairs`](Self::chunk_pairs), or a failing allocation.
    pub fn lease(self: &Arc<Self>, pairs: usize) -> Result<Option<PairLease>> {
        if pairs > self.chunk_pairs {
            let limit = self.chunk_pairs as u64;
            return Err(CudaError::TooManyPairs { pairs: pairs as u64, limit });
        }
        let chunk = self.chunk()?;
        Ok(chunk.map(|chunk| PairLease {
            lease: Lease { chunk: Some(chunk), ring: Arc::clone(self) },
            len: pairs,
        }))
    }

    /// A chunk out of the ring, grown if it must be and may.
    fn chunk(&self) -> Result<Option<Chunk>> {
        {
            let mut state = lock(&self.state);
            if let Some(chunk) = state.free.pop() {
                return Ok(Some(chunk));
            }
            if state.made >= self.most {
                return Ok(None);
            }
            state.made += 1;
        }
        // Outside the lock: pinning takes its time.
        let grown = Chunk::new(self.chunk_pairs, self.gpu.ordinal());
        if grown.is_err() {
            lock(&self.state).made -= 1;
        }
        grown.map(Some)
    }

    /// A table outside any ring, uploaded already: for a graph, which owns it through the flight. Allocates and waits for
    /// the upload.
    ///
    /// # Errors
    /// [`CudaError::ZeroLength`] for no pairs, or a failing allocation or upload.
    pub fn own_table(gpu: &Arc<Gpu>, pairs: &[u64]) -> Result<PairTable> {
        let device = table::upload(gpu, pairs)?;
        Ok(PairTable::new(gpu, Store::Owned { device, pairs: pairs.into() }, pairs.len(), largest(pairs)))
    }
}

/// Room in a ring, to be filled with pairs.
pub struct PairLease {
    lease: Lease,
    len: usize,
}

impl fmt::Debug for PairLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PairLease({} pairs, {:?})", self.len, self.lease.ring.gpu)
    }
}

impl PairLease {
    /// The table, not yet uploaded, with the pairs that `write` leaves in the room it is given: they are written once,
    /// where the device copies them from. What was there before are pairs of other tables.
    pub fn fill(self, write: impl FnOnce(&mut [u64])) -> PairTable {
        let room = match &self.lease.chunk {
            // SAFETY: the chunk has room for `len` pairs (`lease`), page-aligned and initialised by the operating system.
            // It is out of the ring, the device does not read it (flights hold what they use), and `self` is given up here:
            // there is no other reference.
            Some(chunk) => unsafe {
                std::slice::from_raw_parts_mut(chunk.pinned.as_ptr().cast::<u64>(), self.len)
            },
            // Only a dropped lease has none.
            None => &mut [],
        };
        write(room);
        let (largest, gpu) = (largest(room), Arc::clone(&self.lease.ring.gpu));
        PairTable::new(&gpu, Store::Leased(self.lease), self.len, largest)
    }
}

/// A chunk that goes back to its ring.
struct Lease {
    /// Taken on drop only.
    chunk: Option<Chunk>,
    ring: Arc<PairRing>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.ring.state).free.extend(self.chunk.take());
    }
}

/// Where a table's pairs are.
enum Store {
    Leased(Lease),
    /// On the device since it was made.
    Owned {
        device: DeviceBuffer,
        pairs: Box<[u64]>,
    },
}

/// Pairs of ids in device memory, or on their way there.
pub struct PairTable {
    shared: Arc<Shared>,
    gpu: Arc<Gpu>,
    len: usize,
    largest: [u64; 2],
    /// The stream of the upload, and an event after it.
    uploaded: Mutex<Option<(StreamHandle, Event)>>,
}

/// What flights hold.
struct Shared(Store);

impl fmt::Debug for PairTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PairTable({} pairs, {:?})", self.len, self.gpu)
    }
}

impl PairTable {
    fn new(gpu: &Arc<Gpu>, store: Store, len: usize, largest: [u64; 2]) -> PairTable {
        let (shared, gpu) = (Arc::new(Shared(store)), Arc::clone(gpu));
        PairTable { shared, gpu, len, largest, uploaded: Mutex::default() }
    }

    /// Pairs there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts the copy to the device on `stream`. Launches do so themselves; calling it earlier, or on another stream, lets
    /// the copy run beside other work. A second call does nothing.
    ///
    /// # Errors
    /// A guard, stream or flight of another device, or the driver's refusal.
    pub fn upload(&self, cx: &ContextGuard<'_>, stream: StreamHandle, flight: &mut Flight) -> Result<()> {
        self.ready(&self.gpu, cx, stream, flight).map(|_| ())
    }

    /// Sees to it that work put on `stream` from now on finds the pairs at the address given back.
    pub(super) fn ready(
        &self,
        gpu: &Arc<Gpu>,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        flight: &mut Flight,
    ) -> Result<u64> {
        if !Arc::ptr_eq(gpu, &self.gpu) {
            let (what, found) = ("the table of id pairs", self.gpu.ordinal());
            return Err(CudaError::WrongDevice { what, found, ordinal: gpu.ordinal() });
        }
        let handle = flight.board(gpu, cx, stream)?;
        flight.hold(Arc::clone(&self.shared) as Owner);
        let chunk = match &self.shared.0 {
            Store::Owned { device, .. } => return Ok(device.addr()),
            Store::Leased(lease) => match &lease.chunk {
                Some(chunk) => chunk,
                // Only a dropped lease has none.
                None => return Err(CudaError::ZeroLength { what: "id table" }),
            },
        };
        if self.len == 0 {
            return Ok(chunk.device.addr());
        }
        let copy = || {
            let from = chunk.pinned.as_ptr().cast::<c_void>();
            // SAFETY: both buffers have room for `len` pairs; the flight holds them until the stream has done the copy.
            // Nobody writes the pinned one before that.
            unsafe { raw::cuMemcpyHtoDAsync_v2(chunk.device.addr(), from, self.len * 8, handle) }
        };
        if flight.captured() {
            // A graph brings its own upload: one outside of it says nothing about when the graph runs, and one inside
            // has not run yet.
            copy()?;
            return Ok(chunk.device.addr());
        }
        let mut uploaded = lock(&self.uploaded);
        match &*uploaded {
            // The per-thread stream of this thread may be another one.
            Some((there, _)) if *there == stream && stream != StreamHandle::PER_THREAD => {}
            Some((_, event)) => gpu.wait_event(cx, stream, event)?,
            None => {
                let event = gpu.event(cx)?;
                copy()?;
                event.record(cx, stream)?;
                *uploaded = Some((stream, event));
            }
        }
        Ok(chunk.device.addr())
    }

    /// Refuses a table with an id that is not below its side's number of blocks.
    pub(super) fn check(&self, blocks: [u64; 2]) -> Result<()> {
        if self.len == 0 || (self.largest[0] < blocks[0] && self.largest[1] < blocks[1]) {
            return Ok(());
        }
        let pairs = match &self.shared.0 {
            Store::Owned { pairs, .. } => pairs,
            Store::Leased(Lease { chunk: Some(chunk), .. }) => {
                // SAFETY: the chunk holds `len` pairs, written before the table was made and by nobody since; the table
                // keeps it leased.
                unsafe { std::slice::from_raw_parts(chunk.pinned.as_ptr().cast::<u64>(), self.len) }
            }
            Store::Leased(_) => &[][..],
        };
        Err(first_bad(pairs, blocks))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pair(src: u32, dst: u32) -> u64 {
        u64::from(src) | u64::from(dst) << 32
    }

    #[test]
    fn bad_ids_are_named() {
        let pairs = [pair(0, 0), pair(9, 3), pair(4, 7), pair(10, 8)];
        assert_eq!(check(&pairs[..3], [10, 8]), Ok(()));
        let (side, index, value, limit) = (Side::Source, 3, 10, 10);
        assert_eq!(check(&pairs, [10, 8]), Err(CudaError::BlockId { side, index, value, limit }));
        let (side, index, value, limit) = (Side::Destination, 2, 7, 7);
        assert_eq!(check(&pairs, [11, 7]), Err(CudaError::BlockId { side, index, value, limit }));
        assert_eq!(check(&[], [0, 0]), Ok(()));
        assert!(check(&[0], [0, 1]).is_err() && check(&[0], [1, 0]).is_err());
        assert_eq!(check(&[pair(u32::MAX, u32::MAX)], [1 << 32, 1 << 32]), Ok(()));
    }

    proptest! {
        #[test]
        fn the_fast_check_agrees_with_looking_at_every_id(
            ids in prop::collection::vec((0_u32..20, 0_u32..20), 0..40),
            blocks in (0_u64..22, 0_u64..22),
        ) {
            let pairs: Vec<_> = ids.iter().map(|&(src, dst)| pair(src, dst)).collect();
            let good = ids.iter().all(|&(src, dst)| u64::from(src) < blocks.0 && u64::from(dst) < blocks.1);
            prop_assert_eq!(check(&pairs, [blocks.0, blocks.1]).is_ok(), good);
        }
    }
}
