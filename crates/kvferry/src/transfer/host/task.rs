//! One task, carried out with the host border's bounds-checked copies.

use std::ops::Range;
use std::sync::Arc;

use kvferry_host::{Copier, CopyHint, CopyNest, Loop as NestLoop, NestError, RegionError};
use kvferry_layout::{CopyPlan, Loop, Place, step};

use super::split::{Split, Task};
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// What a job copies, shared by the threads that copy it.
pub(crate) struct Work {
    pub(crate) plan: CopyPlan,
    pub(crate) src: Arc<PhysicalLayout>,
    pub(crate) dst: Arc<PhysicalLayout>,
    pub(crate) split: Split,
    pub(crate) hint: CopyHint,
}

impl Work {
    pub(crate) fn run(&self, task: Task) -> Result<()> {
        #[cfg(test)]
        super::fault::strike(self, task)?;
        // One fence for the whole task, when this goes: a fence per block would stall every small one.
        let mut copier = Copier::new(self.hint);
        match task {
            Task::Blocks { first, end } => self.blocks(&mut copier, first, end),
            Task::Units { block, first, end } => self.units(&mut copier, block, first, end),
        }
    }

    /// Blocks that a failed task leaves in an unknown state, as ids of the destination layout (which may repeat, where
    /// the source's pages are finer).
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
        let segment = self.plan.segment(self.plan.segment_of(block));
        let (_, parts) = self.plan.pair().parts();
        // At most 2^32 parts make a block; one id of all is 0.
        u32::try_from(u64::from(segment.dst + (block - segment.before)) / parts).unwrap_or_default()
    }

    /// Blocks `first..end`, in joined pieces.
    fn blocks(&self, copier: &mut Copier, first: u32, end: u32) -> Result<()> {
        let pair = self.plan.pair();
        let (outer, inner) = pair.split_loops();
        // Neighbours in the list are mostly joined alike: one nest serves them all.
        let (mut joined, mut lowered) = (1, nest(pair.run_bytes(), inner)?);
        let mut at = self.plan.segment_of(first);
        let mut block = first;
        while block < end {
            let segment = self.plan.segment(at);
            let skip = block - segment.before;
            let stop = end.min(segment.before + segment.count);
            if stop - block != joined {
                joined = stop - block;
                lowered = nest(pair.run_bytes() * u64::from(joined), inner)?;
            }
            let (src, dst) = (pair.src_place(segment.src + skip), pair.dst_place(segment.dst + skip));
            self.nests(copier, outer, src, dst, &lowered, 0, u64::MAX)?;
            (block, at) = (stop, at + 1);
        }
        Ok(())
    }

    /// Units `first..end` of one block, whose runs may be cut into equal pieces (the last one shorter).
    fn units(&self, copier: &mut Copier, block: u32, first: u64, end: u64) -> Result<()> {
        let pair = self.plan.pair();
        let segment = self.plan.segment(self.plan.segment_of(block));
        let skip = block - segment.before;
        let (src, dst) = (pair.src_place(segment.src + skip), pair.dst_place(segment.dst + skip));
        let (outer, inner) = pair.split_loops();
        let (per_run, unit) = (self.split.units_per_run(), self.split.unit_bytes());
        if per_run == 1 {
            return self.nests(copier, outer, src, dst, &nest(pair.run_bytes(), inner)?, first, end);
        }
        // Long runs: a task is a few pieces; each is one flat copy.
        for index in first..end {
            let (run, piece) = (index / per_run, index % per_run);
            let start = piece * unit;
            let bytes = unit.min(pair.run_bytes() - start);
            let (mut s, mut d) = step(pair.loops(), run, src, dst);
            s.offset += start;
            d.offset += start;
            self.copy(copier, s, d, &nest(bytes, &[])?, 0..1)?;
        }
        Ok(())
    }

    /// Runs `first..end` of the flattened `outer` × `nest` loops.
    #[expect(clippy::too_many_arguments, reason = "two places, two loop levels and a range")]
    fn nests(
        &self,
        copier: &mut Copier,
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
            self.copy(copier, s, d, nest, from..to)?;
            at += to - from;
        }
        Ok(())
    }

    fn copy(
        &self,
        copier: &mut Copier,
        src: Place,
        dst: Place,
        nest: &CopyNest,
        runs: Range<u64>,
    ) -> Result<()> {
        let source = self.src.host_region(src.region as usize)?;
        let target = self.dst.host_region(dst.region as usize)?;
        copier.nest((source, src.offset), (target, dst.offset), nest, runs)?;
        Ok(())
    }
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
