//! The buffers that results land in, and who holds them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_cuda::StreamHandle;
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
        Pool { backend, step, buffers, newest_first, held: Mutex::new(held) }
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
    #[allow(dead_code, reason = "called by the CUDA backend")]
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
