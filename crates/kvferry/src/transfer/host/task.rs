//! One task, carried out with the host border's bounds-checked copies.

use kvferry_host::{CopyHint, CopyNest, HostRegion, Loop as NestLoop, NestError, RegionError};
use kvferry_layout::{CopyPlan, Loop, Place, Segment, step};

use super::split::{Split, Task};
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// What a job copies, shared by the threads that copy it.
pub(crate) struct Work {
    pub(crate) plan: CopyPlan,
    pub(crate) src: std::sync::Arc<PhysicalLayout>,
    pub(crate) dst: std::sync::Arc<PhysicalLayout>,
    pub(crate) split: Split,
    pub(crate) hint: CopyHint,
}

impl Work {
    pub(crate) fn run(&self, task: Task) -> Result<()> {
        #[cfg(test)]
        super::fault::strike(self, task)?;
        match task {
            Task::Blocks { first, end } => {
                let segments = self.plan.segments();
                let mut at = segments.partition_point(|s| s.before + s.count <= first);
                let mut block = first;
                while block < end {
                    let segment = &segments[at];
                    let stop = end.min(segment.before + segment.count);
                    self.blocks(segment, block - segment.before, stop - block)?;
                    (block, at) = (stop, at + 1);
                }
                Ok(())
            }
            Task::Units { block, first, end } => self.units(block, first, end),
        }
    }

    /// Blocks that a failed task leaves in an unknown state, as destination ids.
    pub(crate) fn blocks_of(&self, task: Task) -> Vec<u32> {
        let (first, end) = match task {
            Task::Blocks { first, end } => (first, end),
            Task::Units { block, .. } => (block, block + 1),
        };
        (first..end).map(|block| self.dst_id(block)).collect()
    }

    pub(crate) fn all_blocks(&self) -> Vec<u32> {
        (0..self.plan.blocks()).map(|block| self.dst_id(block)).collect()
    }

    fn dst_id(&self, block: u32) -> u32 {
        let segments = self.plan.segments();
        let at = segments.partition_point(|s| s.before + s.count <= block);
        segments[at].dst + (block - segments[at].before)
    }

    /// `count` joined blocks of a segment, from its block `skip` on.
    fn blocks(&self, segment: &Segment, skip: u32, count: u32) -> Result<()> {
        let pair = self.plan.pair();
        let (src, dst) = (pair.src_place(segment.src + skip), pair.dst_place(segment.dst + skip));
        let run = pair.run_bytes() * u64::from(count);
        let (outer, inner) = split_loops(pair.loops());
        let nest = nest(run, inner)?;
        self.nests(outer, src, dst, &nest, 0, u64::MAX)
    }

    /// Units `first..end` of one block, whose runs may be cut into equal pieces (the last one shorter).
    fn units(&self, block: u32, first: u64, end: u64) -> Result<()> {
        let pair = self.plan.pair();
        let segments = self.plan.segments();
        let at = segments.partition_point(|s| s.before + s.count <= block);
        let skip = block - segments[at].before;
        let (src, dst) = (pair.src_place(segments[at].src + skip), pair.dst_place(segments[at].dst + skip));
        let (outer, inner) = split_loops(pair.loops());
        let (per_run, unit) = (self.split.units_per_run(), self.split.unit_bytes());
        if per_run == 1 {
            return self.nests(outer, src, dst, &nest(pair.run_bytes(), inner)?, first, end);
        }
        // Long runs: a task is a few pieces; each is one flat copy.
        for index in first..end {
            let (run, piece) = (index / per_run, index % per_run);
            let start = piece * unit;
            let bytes = unit.min(pair.run_bytes() - start);
            let (mut s, mut d) = step(pair.loops(), run, src, dst);
            s.offset += start;
            d.offset += start;
            self.copy(s, d, &nest(bytes, &[])?, 0, 1)?;
        }
        Ok(())
    }

    /// Runs `first..end` of the flattened `outer` × `nest` loops.
    fn nests(
        &self,
        outer: &[Loop],
        src: Place,
        dst: Place,
        nest: &CopyNest,
        first: u64,
        end: u64,
    ) -> Result<()> {
        let inner = nest.num_runs();
        let total = inner * outer.iter().map(|l| l.count).product::<u64>();
        let end = end.min(total);
        let mut at = first;
        while at < end {
            let (index, from) = (at / inner, at % inner);
            let to = inner.min(from + (end - at));
            let (s, d) = step(outer, index, src, dst);
            self.copy(s, d, nest, from, to)?;
            at += to - from;
        }
        Ok(())
    }

    fn copy(&self, src: Place, dst: Place, nest: &CopyNest, from: u64, to: u64) -> Result<()> {
        let source: &HostRegion = self.src.host_region(src.region as usize)?;
        let target: &HostRegion = self.dst.host_region(dst.region as usize)?;
        HostRegion::copy_nest(source, src.offset, target, dst.offset, nest, from..to, self.hint)?;
        Ok(())
    }
}

/// Loops over regions (outermost by the planner's contract), and the plain strides inside them.
fn split_loops(loops: &[Loop]) -> (&[Loop], &[Loop]) {
    loops.split_at(loops.iter().take_while(|l| !l.within_regions()).count())
}

fn nest(run: u64, loops: &[Loop]) -> Result<CopyNest> {
    let mut lowered = [NestLoop::default(); kvferry_host::MAX_LOOPS];
    let refused = |error| Error::Region(RegionError::Nest(error));
    if loops.len() > lowered.len() {
        return Err(refused(NestError::TooManyLoops { loops: loops.len() }));
    }
    for (into, from) in lowered.iter_mut().zip(loops) {
        // Layout invariants keep strides within 63 bits.
        *into = NestLoop {
            count: from.count,
            src_stride: from.src_stride as i64,
            dst_stride: from.dst_stride as i64,
        };
    }
    CopyNest::new(run as usize, &lowered[..loops.len()]).map_err(refused)
}
