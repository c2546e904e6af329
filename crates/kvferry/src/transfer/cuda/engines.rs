//! The three engines that put work on streams: strided copy kernel, driver batch copy, and both through the device ring.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_cuda::{
    BadIdReport, BatchCopies, ContextGuard, CudaError, DeviceIds, Event, Flight, PairLease, PairRing,
    PairTable, StreamHandle, StridedCopy,
};
use kvferry_layout::{CopyPlan, step};

use super::device::CudaDevice;
use super::lanes::{BACK_PRESSURE, Lanes};
use super::lower::{Lowered, Staged};
use crate::error::{Error, Result};
use crate::transfer::strategy::TransferStrategy;

/// What an engine needs to put a job on streams. `cx` proves that the GPU's context is current.
pub(super) struct Launch<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) lanes: &'a Lanes,
    pub(super) cx: &'a ContextGuard<'a>,
    pub(super) plan: &'a CopyPlan,
    pub(super) lowered: &'a Lowered,
    pub(super) strategy: TransferStrategy,
    pub(super) stream: StreamHandle,
    /// The stream is the caller's.
    pub(super) foreign: bool,
    /// What the job follows may take for ever: slots it uses may be held up.
    pub(super) uncertain: bool,
    pub(super) ordered: bool,
    pub(super) capturing: bool,
    /// Most CTAs of a kernel, whatever it takes to be fast.
    pub(super) max_ctas: u32,
}

/// How far an engine got before it failed: blocks up to there are on a stream.
pub(super) struct Stopped {
    pub(super) blocks: u32,
    /// Something of the blocks after those may have moved all the same.
    pub(super) begun: bool,
    pub(super) error: Error,
}

impl<E: Into<Error>> From<E> for Stopped {
    fn from(error: E) -> Self {
        Stopped { blocks: 0, begun: false, error: error.into() }
    }
}

impl Stopped {
    fn after(blocks: u32) -> impl FnOnce(CudaError) -> Stopped {
        move |error| Stopped { blocks, begun: blocks > 0, error: error.into() }
    }
}

/// What the link moves in a microsecond, and what the host needs to put a group and one more copy of it on a stream: the
/// sizes of the first groups follow from these (H200 behind PCIe 5; half or twice as much changes little).
const LINK_BYTES_PER_US: u64 = 55_000;
const GROUP_US: u64 = 20;
const COPY_TENTHS_US: u64 = 12;

/// Groups of a staged transfer. The first is one block, so that copies begin at once; each one after it is as large as can
/// be put in while the one before is on the link, and twice as large at least: the copy engine stands still for 5 us
/// between two groups.
fn ramped(
    mut pairs: &[u64],
    most: usize,
    block_bytes: u64,
    copies_per_block: u64,
) -> impl Iterator<Item = &[u64]> {
    let mut size = 1;
    std::iter::from_fn(move || {
        let (group, rest) = pairs.split_at_checked(size).unwrap_or((pairs, &[]));
        let link_us = block_bytes.saturating_mul(size as u64) / LINK_BYTES_PER_US;
        let copies = link_us.saturating_sub(GROUP_US).saturating_mul(10) / COPY_TENTHS_US;
        let blocks = copies / copies_per_block.max(1);
        (pairs, size) = (rest, usize::try_from(blocks).unwrap_or(most).max(2 * size).min(most));
        (!group.is_empty()).then_some(group)
    })
}

/// Id pairs that go with a launch rather than through a table. More cost the driver as much to copy as a table costs to
/// upload, and threads that want different words of the parameters wait for each other (3,000 pairs: 380 us with the
/// launch, 262 through a table, H200).
const FEW_PAIRS: usize = 1024;

/// Between two looks for a free table.
const LEASE_PAUSE: Duration = Duration::from_micros(50);

thread_local! {
    /// A list of a megabyte would be paid for in page faults every time.
    static PAIRS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with the packed ids of a plan.
fn with_pairs<T>(plan: &CopyPlan, f: impl FnOnce(&[u64]) -> T) -> T {
    let mut pairs = PAIRS.take();
    pairs.resize(plan.blocks() as usize, 0);
    plan.pack(0, &mut pairs);
    let result = f(&pairs);
    PAIRS.set(pairs);
    result
}

impl Launch<'_> {
    fn kernel(&self) -> Result<Arc<StridedCopy>> {
        self.lowered.kernel(&self.device.gpu, self.plan.pair(), self.strategy)
    }

    fn ctas(&self, copy: &StridedCopy) -> u32 {
        self.max_ctas.min(copy.enough_ctas())
    }

    /// The strided copy kernel between the layouts themselves. Few ids go with the launch, long lists through the ring, all
    /// of them or none.
    pub(super) fn by_kernel(&self, flight: &mut Flight) -> std::result::Result<(), Stopped> {
        let copy = self.kernel()?;
        let (ring, blocks) = (&self.device.pairs, self.plan.blocks() as usize);
        let chunk = ring.chunk_pairs();
        let chunks = (0..blocks).step_by(chunk).map(|first| (first as u32, chunk.min(blocks - first)));
        let fit_a_launch = blocks <= copy.inline_pairs();
        let room = if fit_a_launch && (self.capturing || blocks <= FEW_PAIRS) {
            None
        } else if fit_a_launch {
            // Better in a table, and nobody waits for one.
            ring.lease(blocks)?.map(|room| vec![room])
        } else if self.capturing {
            return self.captured_tables(&copy, chunks, flight);
        } else {
            Some(self.lease_all(chunks.clone().map(|(_, len)| len))?)
        };
        let Some(room) = room else {
            return with_pairs(self.plan, |pairs| {
                Ok(copy.launch(self.cx, self.stream, pairs, self.ctas(&copy), flight)?)
            });
        };
        for (room, (first, _)) in room.into_iter().zip(chunks) {
            let table = room.fill(|pairs| self.plan.pack(first, pairs));
            // On a stream of its own, so that the list does not wait for what this stream has to do before; the copies of
            // one chunk run while the next is written here.
            table.upload(self.cx, self.device.uploads(), flight).map_err(Stopped::after(first))?;
            self.launch_table(&copy, &table, flight).map_err(Stopped::after(first))?;
        }
        Ok(())
    }

    /// Replays read the tables as long as the graph lives, so they are the graph's own. All are made before anything is
    /// captured: half a transfer is no part of a graph.
    fn captured_tables(
        &self,
        copy: &Arc<StridedCopy>,
        chunks: impl Iterator<Item = (u32, usize)>,
        flight: &mut Flight,
    ) -> std::result::Result<(), Stopped> {
        with_pairs(self.plan, |pairs| {
            let own = |(first, len): (u32, usize)| {
                PairRing::own_table(&self.device.gpu, &pairs[first as usize..first as usize + len])
            };
            let tables = chunks.map(own).collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(tables.iter().try_for_each(|table| self.launch_table(copy, table, flight))?)
        })
    }

    fn launch_table(
        &self,
        copy: &Arc<StridedCopy>,
        table: &PairTable,
        flight: &mut Flight,
    ) -> std::result::Result<(), CudaError> {
        copy.launch_table(self.cx, self.stream, table, self.ctas(copy), flight)
    }

    /// Room for tables of so many pairs each. Waits briefly while the ring is leased, as a launch into a full queue does.
    fn lease_all(&self, tables: impl Iterator<Item = usize>) -> Result<Vec<PairLease>> {
        let (ring, blocks) = (&self.device.pairs, self.plan.blocks() as usize);
        let limit = ring.capacity_pairs();
        if blocks > limit {
            return Err(Error::Unsupported {
                what: format!("a list of {blocks} block ids on GPU {}", self.device.gpu.ordinal()),
                why: format!(
                    "the ring for long lists holds {limit}: raise staging_bytes and pinned_bytes, or split the list"
                ),
            });
        }
        let deadline = Instant::now() + BACK_PRESSURE;
        let lease = |pairs| loop {
            if let Some(room) = ring.lease(pairs)? {
                return Ok(room);
            }
            if Instant::now() >= deadline {
                return Err(Error::Busy { what: "the ring for long id lists", limit: limit as u64 });
            }
            // Jobs that nobody asks about keep their tables. Ended on the lanes' threads: this one may hold locks that
            // completion callbacks take.
            self.lanes.attend_each();
            std::thread::sleep(LEASE_PAUSE);
        };
        tables.map(lease).collect()
    }

    /// The strided copy kernel with ids that it reads from device memory when it runs.
    pub(super) fn by_device_ids(
        &self,
        (src, dst): (&DeviceIds, &DeviceIds),
        report: &Arc<BadIdReport>,
        flight: &mut Flight,
    ) -> Result<()> {
        let count = src.len();
        let copy = self.kernel()?;
        Ok(copy.launch_device_ids(self.cx, self.stream, src, dst, count, report, self.ctas(&copy), flight)?)
    }

    /// One driver batch copy per run.
    pub(super) fn by_batch(&self, flight: &mut Flight) -> std::result::Result<(), Stopped> {
        let mut copies = BatchCopies::between(&self.lowered.sides);
        for run in self.plan.runs() {
            copies.push(
                run.src.region as usize,
                run.src.offset,
                run.dst.region as usize,
                run.dst.offset,
                run.bytes,
            )?;
        }
        // Copies run in any order, so that no block is known to have moved if the driver stops in the middle.
        let stopped =
            |(done, error): (usize, CudaError)| Stopped { blocks: 0, begun: done > 0, error: error.into() };
        if !self.stream.is_legacy() {
            return copies.enqueue_counted(self.cx, self.stream, flight).map_err(stopped);
        }
        // The driver refuses its batch call on the legacy stream: a stream of ours takes it, between two events.
        let ours = self.device.stream(self.strategy, self.ordered);
        self.follow(ours, self.stream)?;
        // Landing on the legacy stream waits for ours.
        copies.enqueue_counted(self.cx, ours, flight).map_err(stopped)
    }

    /// Makes one stream wait for all that is on another.
    fn follow(&self, later: StreamHandle, earlier: StreamHandle) -> std::result::Result<(), CudaError> {
        let event = self.mark(earlier)?;
        self.device.gpu.wait_event(self.cx, later, &event)
    }

    fn mark(&self, stream: StreamHandle) -> std::result::Result<Arc<Event>, CudaError> {
        let event = self.device.gpu.event(self.cx)?;
        event.record(self.cx, stream)?;
        Ok(Arc::new(event))
    }

    /// Through the device ring: large copies across PCIe, and a kernel between the ring and the layout at the speed of
    /// the GPU's memory. Gives the stream whose end is the end of the job.
    ///
    /// On a caller's stream the kernels run there and the copies on a stream of ours; what the caller's stream held
    /// before is before both, and what comes there after is after both.
    pub(super) fn by_stage(&self, flight: &mut Flight) -> std::result::Result<StreamHandle, Stopped> {
        let staged = self.lowered.staged(self.device, self.plan.pair(), self.strategy)?;
        let up = self.strategy == TransferStrategy::CudaAsyncH2D;
        let (copying, scattering) = if self.foreign {
            (self.device.stream(self.strategy, self.ordered), self.stream)
        } else {
            (self.stream, self.device.scatter(self.ordered))
        };
        let (first, last) = if up { (copying, scattering) } else { (scattering, copying) };
        if first != self.stream {
            self.follow(first, self.stream)?;
        }
        let (mut done, mut begun) = (0, false);
        let progress = (&mut done, &mut begun);
        with_pairs(self.plan, |pairs| self.groups(&staged, pairs, (first, last), progress, flight))
            .map_err(|error| Stopped { blocks: done, begun, error })?;
        // Landing there waits for the other stream as well.
        Ok(if self.foreign { self.stream } else { last })
    }

    fn groups(
        &self,
        staged: &Staged,
        pairs: &[u64],
        (first, second): (StreamHandle, StreamHandle),
        (done, begun): (&mut u32, &mut bool),
        flight: &mut Flight,
    ) -> Result<()> {
        let gpu = &self.device.gpu;
        let up = self.strategy == TransferStrategy::CudaAsyncH2D;
        let mut slots = Vec::with_capacity(staged.group);
        // Held to the end, so that no other job puts its event into a slot between our wait and our use of it.
        let mut turn = staged.stage.turn();
        let (bytes, copies) = (staged.hop.block_bytes(), staged.hop.runs_per_block());
        for group in ramped(pairs, staged.group, bytes, copies) {
            let (slot, last_use, held_up) = turn.take();
            let uncertain = self.uncertain || held_up;
            let copies = match self.hop(staged, slot, group, up) {
                Ok(copies) => copies,
                Err(error) => {
                    last_use.into_iter().for_each(|event| turn.give(slot, event, uncertain));
                    return Err(error);
                }
            };
            if let Some(event) = last_use
                && let Err(error) = gpu.wait_event(self.cx, first, &event)
            {
                turn.give(slot, event, uncertain);
                return Err(error.into());
            }
            slots.clear();
            slots.extend(group.iter().zip(0u64..).map(|(&pair, at)| {
                // The ring's side of the kernel's pairs counts through the slot.
                if up { at | (pair & !0xFFFF_FFFF) } else { (pair & 0xFFFF_FFFF) | (at << 32) }
            }));
            let kernel = &staged.kernels[slot];
            let enqueued: std::result::Result<Arc<Event>, CudaError> = (|| {
                if up {
                    copies.enqueue_at_once(self.cx, first, flight)?;
                } else {
                    kernel.launch(self.cx, first, &slots, self.ctas(kernel), flight)?;
                }
                self.follow(second, first)?;
                // From here on the destination is written.
                *begun = true;
                if up {
                    kernel.launch(self.cx, second, &slots, self.ctas(kernel), flight)?;
                } else {
                    copies.enqueue_at_once(self.cx, second, flight)?;
                }
                self.mark(second)
            })();
            match enqueued {
                Ok(event) => turn.give(slot, event, uncertain),
                Err(error) => {
                    // Whatever was put on the streams may still use the slot.
                    match self.follow(second, first).and_then(|()| self.mark(second)) {
                        Ok(event) => turn.give(slot, event, uncertain),
                        Err(_) => gpu.synchronize()?,
                    }
                    return Err(error.into());
                }
            }
            *done += group.len() as u32;
        }
        Ok(())
    }

    /// The copies between the host side and a slot for one group of id pairs; blocks that are neighbours on the host are
    /// one copy.
    fn hop(&self, staged: &Staged, slot: usize, group: &[u64], up: bool) -> Result<BatchCopies> {
        let mut copies = BatchCopies::between(&staged.sides[slot]);
        let hop = &staged.hop;
        let whole = hop.whole_block();
        let mut at = 0;
        while at < group.len() {
            let host = |pair: u64| if up { pair as u32 } else { (pair >> 32) as u32 };
            let id = host(group[at]);
            let mut count = 1;
            if whole {
                let (src, dst) = hop.steps();
                let step = if up { src } else { dst };
                let joins = |n: usize| {
                    at + n < group.len()
                        && host(group[at + n]) == id.wrapping_add(n as u32)
                        && step.follows(u64::from(id) + n as u64 - 1, hop.block_bytes())
                };
                while joins(count) {
                    count += 1;
                }
            }
            let slot_id = at as u32;
            let (src, dst) = if up {
                (hop.src_place(id), hop.dst_place(slot_id))
            } else {
                (hop.src_place(slot_id), hop.dst_place(id))
            };
            let bytes = hop.run_bytes() * count as u64;
            for index in 0..hop.runs_per_block() {
                let (s, d) = step(hop.loops(), index, src, dst);
                copies.push(s.region as usize, s.offset, d.region as usize, d.offset, bytes)?;
            }
            at += count;
        }
        Ok(copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(blocks: usize, most: usize, block_bytes: u64) -> Vec<usize> {
        sizes_of(blocks, most, block_bytes, 1)
    }

    fn sizes_of(blocks: usize, most: usize, block_bytes: u64, copies: u64) -> Vec<usize> {
        let pairs: Vec<u64> = (0..blocks as u64).collect();
        let groups: Vec<&[u64]> = ramped(&pairs, most, block_bytes, copies).collect();
        assert_eq!(groups.concat(), pairs);
        groups.into_iter().map(<[u64]>::len).collect()
    }

    #[test]
    fn groups_grow_as_fast_as_the_link_allows() {
        assert_eq!(sizes(0, 12, 2 << 20), [0; 0]);
        // A large block keeps the link busy while all the rest of a group is put in.
        assert_eq!(sizes(8, 12, 2 << 20), [1, 7]);
        assert_eq!(sizes(64, 12, 2 << 20), [1, 12, 12, 12, 12, 12, 3]);
        // Unless it takes many copies.
        assert_eq!(sizes_of(16, 12, 2 << 20, 8), [1, 2, 5, 8]);
        // Small ones do not.
        assert_eq!(sizes(31, 400, 4096), [1, 2, 4, 8, 16]);
        assert_eq!(sizes(7, 1, 2 << 20), [1; 7]);
        assert_eq!(sizes(9, 4, u64::MAX), [1, 4, 4]);
    }
}
