//! The buffers that results land in, and who holds them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_cuda::StreamHandle;
use kvferry_host::ForkGuard;
use kvferry_layout::exchange::HeadLayout;

use super::backend::{Backend, CaptureId};
use super::result::{ExchangeResult, ResultShape};
use crate::error::Result;
use crate::memory::Region;

/// Buffers start at multiples of this: a page, so that two ranks never write one page of a third at a time for long.
pub(crate) const PLACE_ALIGN: u64 = 4096;

/// Which part of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Slot {
    /// A buffer that callers hold results in.
    Buffer(u32),
    /// The one buffer that is never handed out: what lands there is copied on.
    Landing,
}

/// Where the results of a call land.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) slot: Slot,
    /// Bytes from the start of the pool: what a header says.
    pub(crate) offset: u64,
}

/// `buffers` places of `capacity` bytes, and the landing place behind them.
#[derive(Debug)]
pub(crate) struct Pool {
    backend: Arc<dyn Backend>,
    /// Bytes from one place to the next.
    step: u64,
    buffers: u32,
    /// Hand out what was returned last (its pages are there and in the caches) rather than first (its readers on other
    /// streams are done).
    newest_first: bool,
    held: Mutex<Held>,
    /// In a forked child a lock may be held for ever, and nothing there is the child's to return.
    fork: ForkGuard,
}

#[derive(Debug)]
struct Held {
    free: VecDeque<u32>,
    /// The capture that a buffer belongs to, by buffer.
    owners: Vec<Option<CaptureId>>,
    /// Free buffers of captures. A capture without an entry has ended.
    captures: HashMap<CaptureId, Vec<u32>>,
}

/// Bytes of a pool, or `None` if no address space holds it.
pub(crate) fn pool_bytes(capacity: u64, buffers: u32) -> Option<u64> {
    let step = capacity.checked_next_multiple_of(PLACE_ALIGN)?;
    step.checked_mul(u64::from(buffers) + 1).filter(|&bytes| bytes <= i64::MAX as u64)
}

impl Pool {
    pub(crate) fn new(backend: Arc<dyn Backend>, capacity: u64, buffers: u32, newest_first: bool) -> Pool {
        let held = Held {
            free: (0..buffers).collect(),
            owners: vec![None; buffers as usize],
            captures: HashMap::new(),
        };
        let step = capacity.next_multiple_of(PLACE_ALIGN);
        Pool { backend, step, buffers, newest_first, held: Mutex::new(held), fork: ForkGuard::new() }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Nothing in a critical section below can panic half way.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn buffers(&self) -> u32 {
        self.buffers
    }

    /// Buffers that an eager call could take now.
    pub(crate) fn free(&self) -> usize {
        self.held().free.len()
    }

    pub(crate) fn landing(&self) -> Place {
        Place { slot: Slot::Landing, offset: self.step * u64::from(self.buffers) }
    }

    /// The buffer that a byte of the pool belongs to.
    pub(crate) fn slot_at(&self, offset: u64) -> Option<Slot> {
        let index = offset.checked_div(self.step)?;
        match u32::try_from(index) {
            Ok(index) if index < self.buffers => Some(Slot::Buffer(index)),
            Ok(index) if index == self.buffers => Some(Slot::Landing),
            _ => None,
        }
    }

    /// A free buffer. A capture first takes what it has itself returned: within one graph the order of its nodes keeps
    /// uses apart, and no eager call may write what a replay writes.
    pub(crate) fn take(self: &Arc<Self>, capture: Option<CaptureId>) -> Option<Arc<Lease>> {
        let mut held = self.held();
        let own = capture.and_then(|id| held.captures.entry(id).or_default().pop());
        let index = match own {
            Some(index) => index,
            None if self.newest_first => held.free.pop_back()?,
            None => held.free.pop_front()?,
        };
        if let Some(owner) = held.owners.get_mut(index as usize) {
            *owner = capture;
        }
        drop(held);
        let place = Place { slot: Slot::Buffer(index), offset: self.step * u64::from(index) };
        Some(Arc::new(Lease { pool: Arc::clone(self), place, streams: Mutex::default() }))
    }

    fn give(&self, place: Place) {
        let Slot::Buffer(index) = place.slot else { return };
        let mut held = self.held();
        let owner = held.owners.get(index as usize).copied().flatten();
        match owner.and_then(|id| held.captures.get_mut(&id)) {
            Some(of_capture) => of_capture.push(index),
            None => held.free.push_back(index),
        }
    }

    /// A graph is gone: its buffers serve eager calls again. Makes no CUDA call, as the driver's callback asks.
    pub(crate) fn end_capture(&self, id: CaptureId) {
        let mut held = self.held();
        let freed = held.captures.remove(&id).unwrap_or_default();
        held.free.extend(freed);
    }
}

/// One buffer, held. Dropping the last clone returns it, once the backend has marked what must be waited for.
#[derive(Debug)]
pub(crate) struct Lease {
    pool: Arc<Pool>,
    place: Place,
    /// Streams that read the buffer, as far as they were announced.
    streams: Mutex<Vec<StreamHandle>>,
}

impl Lease {
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn record_stream(&self, stream: StreamHandle) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Whether this lease is of `pool`.
    pub(crate) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// The results that `shapes` describe in this buffer. Each keeps the buffer.
    pub(crate) fn results(
        self: &Arc<Self>,
        shapes: &[ResultShape],
        layout: HeadLayout,
    ) -> Result<Vec<ExchangeResult>> {
        let pool = self.pool.backend.pool();
        let one = |shape: &ResultShape| {
            let region = pool.part(self.place.offset + shape.offset, shape.bytes())?;
            Ok(ExchangeResult { region, shape: *shape, layout, start: 0, lease: Some(Arc::clone(self)) })
        };
        shapes.iter().map(one).collect()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.pool.fork.check().is_err() {
            return;
        }
        let streams = std::mem::take(self.streams.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.pool.backend.release(self.place, &streams);
        self.pool.give(self.place);
    }
}

impl Region {
    /// The part `start..start + len` of this region, under the same owner.
    pub(crate) fn part(&self, start: u64, len: u64) -> Result<Region> {
        match self {
            Region::Host(region) => Ok(Region::Host(region.part(start, len)?)),
            Region::Device(region) => match region.part(start, len) {
                Some(part) => Ok(Region::Device(part)),
                None => Err(kvferry_host::RegionError::Bounds {
                    start: start.into(),
                    end: i128::from(start) + i128::from(len),
                    len: region.len(),
                }
                .into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvferry_host::{HostBuffer, HostOptions, HostRegion};
    use kvferry_layout::Dtype;
    use kvferry_layout::exchange::ExchangeOp;

    use super::*;
    use crate::all2all::backend::{Launch, Transport, Trouble};
    use crate::all2all::options::ExchangeArray;
    use crate::all2all::plan::Plan;
    use crate::all2all::protocol::Refusal;
    use crate::transfer::lock;

    /// Has memory, and remembers what it was told of it.
    #[derive(Debug)]
    struct Memory {
        pool: Region,
        transport: Transport,
        released: Mutex<Vec<(Place, usize)>>,
    }

    impl Backend for Memory {
        fn transport(&self) -> &Transport {
            &self.transport
        }
        fn pool(&self) -> &Region {
            &self.pool
        }
        fn accepts(&self, _: &Region) -> Result<()> {
            Ok(())
        }
        fn run(&self, _: &Launch<'_>) -> std::result::Result<(), Trouble> {
            Ok(())
        }
        fn refuse(&self, _: ExchangeOp, _: Refusal, _: Option<StreamHandle>) -> bool {
            false
        }
        fn copy_out(&self, _: &Plan, _: Place, _: &[ExchangeArray], _: Option<StreamHandle>) -> Result<()> {
            Ok(())
        }
        fn release(&self, place: Place, streams: &[StreamHandle]) {
            lock(&self.released).push((place, streams.len()));
        }
        fn abort(&self, _: u32, _: usize) {}
        fn set_timeout(&self, _: Duration) {}
        fn peer_left(&self, _: usize) {}
        fn epoch(&self) -> u64 {
            0
        }
        fn quiesce(&self) -> Result<()> {
            Ok(())
        }
        fn reset(&self) -> Result<()> {
            Ok(())
        }
        fn close(&self, _: bool) {}
    }

    fn pool(capacity: u64, buffers: u32, newest_first: bool) -> (Arc<Memory>, Arc<Pool>) {
        let bytes = pool_bytes(capacity, buffers).unwrap() as usize;
        let buffer = HostBuffer::new(bytes, HostOptions::default()).unwrap();
        let memory = Arc::new(Memory {
            pool: Region::Host(HostRegion::of_buffer(Arc::new(buffer))),
            transport: Transport { name: "none", why: String::new() },
            released: Mutex::default(),
        });
        let pool = Arc::new(Pool::new(Arc::clone(&memory) as _, capacity, buffers, newest_first));
        (memory, pool)
    }

    fn slot(lease: &Lease) -> Slot {
        lease.place().slot
    }

    #[test]
    fn a_buffer_is_free_once_its_last_result_is_dropped_and_the_backend_told() {
        let (memory, pool) = pool(100, 2, true);
        let lease = pool.take(None).unwrap();
        let place = lease.place();
        let shape = |offset| ResultShape { offset, shape: [1, 1, 1, 8], strides: [8; 3], dtype: Dtype::Int8 };
        let results = lease.results(&[shape(0), shape(16)], HeadLayout::Bnhd).unwrap();
        assert!(lease.results(&[shape(1 << 20)], HeadLayout::Bnhd).is_err());
        drop(lease);
        let base = memory.pool.span().addr + place.offset;
        assert_eq!(results[1].region().span().addr, base + 16);
        results[1].record_stream(StreamHandle::LEGACY);
        results[1].record_stream(StreamHandle::LEGACY);
        let [first, second] = results.try_into().unwrap();
        drop(second);
        assert_eq!((pool.free(), lock(&memory.released).len()), (1, 0));
        drop(first.clone());
        drop(first);
        assert_eq!((pool.free(), lock(&memory.released).clone()), (2, vec![(place, 1)]));
    }

    #[test]
    fn places_are_pages_apart_and_the_landing_place_is_nobody_s() {
        let (memory, pool) = pool(4097, 3, true);
        let held: Vec<_> = (0..3).map(|_| pool.take(None).unwrap()).collect();
        assert!(pool.take(None).is_none());
        let mut offsets: Vec<u64> = held.iter().map(|lease| lease.place().offset).collect();
        offsets.push(pool.landing().offset);
        offsets.sort_unstable();
        assert_eq!(offsets, [0, 8192, 16384, 24576]);
        assert_eq!(memory.pool.span().len, 32768);
        assert_eq!(pool_bytes(u64::MAX, 1), None);
        assert_eq!(pool_bytes(1 << 62, 1), None);
    }

    #[test]
    fn hosts_reuse_the_newest_and_devices_the_oldest() {
        for (newest_first, expected) in [(true, Slot::Buffer(1)), (false, Slot::Buffer(0))] {
            let (_memory, pool) = pool(1, 2, newest_first);
            let taken = [pool.take(None).unwrap(), pool.take(None).unwrap()];
            let [zero, one] = if slot(&taken[0]) == Slot::Buffer(0) { [0, 1] } else { [1, 0] };
            let mut taken = taken.map(Some);
            taken[zero] = None;
            taken[one] = None;
            assert_eq!(slot(&pool.take(None).unwrap()), expected);
        }
    }

    #[test]
    fn buffers_of_a_capture_stay_with_its_graph() {
        let (_memory, pool) = pool(1, 3, true);
        let (one, two) = (Some(CaptureId(1)), Some(CaptureId(2)));
        let first = pool.take(one).unwrap();
        let place = first.place();
        drop(first);
        // Free for the same capture only.
        assert_eq!(pool.free(), 2);
        assert_ne!(pool.take(two).unwrap().place(), place);
        assert_ne!(pool.take(None).unwrap().place(), place);
        assert_eq!(pool.take(one).unwrap().place(), place);
        assert_eq!(pool.free(), 1);
        // A result held across the graph's end is free for all afterwards.
        let held = pool.take(one).unwrap();
        pool.end_capture(CaptureId(1));
        assert_eq!(pool.free(), 1);
        drop(held);
        assert_eq!(pool.free(), 2);
        pool.end_capture(CaptureId(2));
        pool.end_capture(CaptureId(2));
        assert_eq!(pool.free(), 3);
    }
}
