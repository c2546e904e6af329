//! Which bytes of the regions belong to a block, and to which: payload as address intervals, and its inverse.

use std::ops::Range;
use std::sync::Arc;

use crate::axis::{Axis, PerAxis};
use crate::error::PlanError;
use crate::ids::BlockId;
use crate::layout::{Layout, RegionSpan};
use crate::pair::{PairPlan, PairRequest};
use crate::plan::CopyPlan;
use crate::view::{Place, View};

/// A part of one region, in byte offsets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegionPart {
    /// Region index.
    pub region: usize,
    /// Offsets inside it.
    pub bytes: Range<u64>,
}

impl Layout {
    /// Addresses of the payload of `blocks` (repeats count once): sorted, disjoint, joined where they touch. Padding
    /// and gaps between strides are left out. One interval per contiguous run, so element-strided layouts give one
    /// per element.
    ///
    /// # Errors
    /// Regions that do not fit the layout (as a [`PlanError::Range`]), or an id out of range.
    pub fn payload(&self, regions: &[RegionSpan], blocks: &[BlockId]) -> Result<Vec<Range<u64>>, PlanError> {
        let side = crate::error::Side::Source;
        self.check_regions(regions).map_err(|source| PlanError::Range { side, source })?;
        crate::ids::check_ids(side, blocks, self.view().extent(Axis::Block))?;
        let mut ids = blocks.to_vec();
        ids.sort_unstable();
        ids.dedup();
        // The plan that copies the blocks onto themselves visits their bytes in the longest runs.
        let pair = Arc::new(PairPlan::new(self, self, &PairRequest::default())?);
        let plan = CopyPlan::new(pair, &ids, &ids)?;
        let mut runs: Vec<Range<u64>> = plan
            .runs()
            .filter_map(|run| {
                let start = regions.get(run.src.region as usize)?.addr + run.src.offset;
                Some(start..start + run.bytes)
            })
            .collect();
        runs.sort_unstable_by_key(|run| run.start);
        // In place: `kept` intervals are final.
        let mut kept = 0;
        for index in 0..runs.len() {
            let run = runs[index].clone();
            if kept > 0 && run.start <= runs[kept - 1].end {
                runs[kept - 1].end = runs[kept - 1].end.max(run.end);
            } else {
                runs[kept] = run;
                kept += 1;
            }
        }
        runs.truncate(kept);
        Ok(runs)
    }

    /// Every byte of every region that is not payload of `blocks`, by region and offset. Regions that interleave in
    /// one allocation (K and V as two views of one tensor) respect each other's payload.
    ///
    /// ```
    /// use kvferry_layout::{BlockId, Dtype, KvOrder, Layout, LayoutConfig, RegionPart, RegionSpan};
    /// let cfg = LayoutConfig::builder()
    ///     .num_blocks(3).num_layers(1).page_size(5).num_heads(1).head_dim(2).dtype(Dtype::UInt8).alignment(32)
    ///     .build()?;
    /// let layout = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
    /// let memory = [RegionSpan { addr: 4096, len: 100 }];
    /// // Blocks of 20 bytes, 32 apart; the padding of block 1 is not its payload.
    /// assert_eq!(layout.payload(&memory, &[BlockId(1)])?, [4128..4148]);
    /// let outside: Vec<_> = layout.outside_payload(&memory, &[BlockId(1)])?;
    /// assert_eq!(outside, [0..32, 52..100].map(|bytes| RegionPart { region: 0, bytes }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Layout::payload`].
    pub fn outside_payload(
        &self,
        regions: &[RegionSpan],
        blocks: &[BlockId],
    ) -> Result<Vec<RegionPart>, PlanError> {
        let payload = self.payload(regions, blocks)?;
        let mut parts = Vec::new();
        for (region, span) in regions.iter().enumerate() {
            let end = span.addr + span.len;
            let mut at = span.addr;
            let mut part = |from: u64, to: u64| {
                if from < to {
                    parts.push(RegionPart { region, bytes: from - span.addr..to - span.addr });
                }
            };
            let first = payload.partition_point(|run| run.end <= at);
            for run in payload[first..].iter().take_while(|run| run.start < end) {
                part(at, run.start);
                at = run.end;
            }
            part(at, end);
        }
        Ok(parts)
    }
}

impl View {
    /// The local coordinates of the element that the byte at `place` belongs to; None for padding, gaps, and bytes
    /// outside the view. The inverse of [`View::place`].
    pub fn locate(&self, place: Place) -> Option<PerAxis<u64>> {
        let region = place.region.checked_sub(self.start().region)?;
        let offset = place.offset.checked_sub(self.start().offset)?;
        let step = self.block_step();
        let groups = self.extent(Axis::Block).div_ceil(step.parts);
        let extent = |axis: Axis| if axis == Axis::Block { groups } else { self.extent(axis) };
        // Every axis steps past all that smaller strides reach, so its coordinate is a plain quotient.
        let axes = Axis::ALL.into_iter().filter(|&axis| extent(axis) > 1);
        let (mut by_region, mut by_byte): (Vec<_>, Vec<_>) = axes
            .map(|axis| (Some(axis), self.region_stride(axis), self.stride(axis), extent(axis)))
            .partition(|&(_, region_stride, _, _)| region_stride != 0);
        if step.parts > 1 {
            // The pages of a stored block; no axis of its own.
            by_byte.push((None, 0, step.part_stride, step.parts));
        }
        let mut at = PerAxis::splat(0);
        let mut part = 0;
        let mut left = region;
        by_region.sort_unstable_by_key(|&(_, stride, _, _)| std::cmp::Reverse(stride));
        for (axis, stride, _, extent) in by_region {
            let index = left / stride;
            left %= stride;
            if index >= extent {
                return None;
            }
            if let Some(axis) = axis {
                at[axis] = index;
            }
        }
        if left != 0 {
            return None;
        }
        left = offset;
        by_byte.sort_unstable_by_key(|&(_, _, stride, _)| std::cmp::Reverse(stride));
        for (axis, _, stride, extent) in by_byte {
            let index = left / stride;
            left %= stride;
            if index >= extent {
                return None;
            }
            match axis {
                Some(axis) => at[axis] = index,
                None => part = index,
            }
        }
        at[Axis::Block] = at[Axis::Block] * step.parts + part;
        (left < self.elem_bytes() && at[Axis::Block] < self.extent(Axis::Block)).then_some(at)
    }
}
