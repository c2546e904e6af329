//! How a plan is cut into tasks: many small blocks to one task, or one large block into several.

use kvferry_layout::CopyPlan;

/// Bytes a task aims at: long enough to hide claiming it, short enough to balance threads.
pub(crate) const TASK_BYTES: u64 = 512 << 10;

/// Bytes of a cache line.
const LINE: u64 = 64;

/// One unit of work. Block numbers count through the plan's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Whole blocks `first..end`.
    Blocks { first: u32, end: u32 },
    /// Units `first..end` of one block. A unit is a run, or a piece of one: see [`Split::unit_bytes`].
    Units { block: u32, first: u64, end: u64 },
}

/// The cut. Tasks are computed from their number, so nothing is stored per task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    blocks: u32,
    blocks_per_task: u32,
    pieces_per_block: u64,
    units_per_block: u64,
    units_per_run: u64,
    unit_bytes: u64,
}

impl Split {
    pub(crate) fn new(plan: &CopyPlan, task_bytes: u64) -> Split {
        let (block, run) = (plan.pair().block_bytes(), plan.pair().run_bytes());
        let blocks = plan.blocks();
        let units_per_run = run.div_ceil(task_bytes);
        let units_per_block = plan.pair().runs_per_block() * units_per_run;
        let pieces_per_block = block.div_ceil(task_bytes).clamp(1, units_per_block);
        let blocks_per_task = (task_bytes / block).clamp(1, u64::from(u32::MAX)) as u32;
        Split {
            blocks,
            blocks_per_task,
            pieces_per_block,
            units_per_block,
            units_per_run,
            // On cache lines, so that two threads do not share one; never more than a task, which units per run assume.
            unit_bytes: run.div_ceil(units_per_run).next_multiple_of(LINE).min(task_bytes),
        }
    }

    pub(crate) fn tasks(&self) -> u64 {
        if self.pieces_per_block > 1 {
            u64::from(self.blocks) * self.pieces_per_block
        } else {
            u64::from(self.blocks.div_ceil(self.blocks_per_task))
        }
    }

    /// Largest piece of a run that is one unit.
    pub(crate) const fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    pub(crate) const fn units_per_run(&self) -> u64 {
        self.units_per_run
    }

    pub(crate) fn task(&self, index: u64) -> Task {
        if self.pieces_per_block > 1 {
            let (block, piece) = ((index / self.pieces_per_block) as u32, index % self.pieces_per_block);
            // Spread units evenly without overflow: the first `extra` pieces get one more.
            let (each, extra) =
                (self.units_per_block / self.pieces_per_block, self.units_per_block % self.pieces_per_block);
            let first = piece * each + piece.min(extra);
            return Task::Units { block, first, end: first + each + u64::from(piece < extra) };
        }
        let first = index as u32 * self.blocks_per_task;
        Task::Blocks { first, end: self.blocks.min(first.saturating_add(self.blocks_per_task)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_layout::{BlockId, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest};
    use proptest::prelude::*;
    use std::sync::Arc;

    proptest! {
        #[test]
        fn tasks_cover_every_unit_once(
            blocks in 1u32..40, layers in 1u64..4, page in 1u64..9, heads in 1u64..5, dim in 1u64..65,
            task_bytes in 1u64..5000, hnd: bool,
        ) {
            let cfg = LayoutConfig::builder().num_blocks(64).num_layers(layers).page_size(page).num_heads(heads)
                .head_dim(dim).dtype(Dtype::Float16).build().unwrap();
            let src = Layout::fully_contiguous(cfg, KvOrder::Nhd).unwrap();
            let dst = Layout::fully_contiguous(cfg, if hnd { KvOrder::Hnd } else { KvOrder::Nhd }).unwrap();
            let pair = Arc::new(PairPlan::new(&src, &dst, &PairRequest::default()).unwrap());
            let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
            let plan = CopyPlan::new(pair.clone(), &ids, &ids).unwrap();
            let split = Split::new(&plan, task_bytes);
            let (mut block, mut unit) = (0u32, 0u64);
            let units = pair.runs_per_block() * split.units_per_run();
            for index in 0..split.tasks() {
                match split.task(index) {
                    Task::Blocks { first, end } => {
                        prop_assert!(first == block && end > first && unit == 0);
                        block = end;
                    }
                    Task::Units { block: at, first, end } => {
                        prop_assert!(at == block && first == unit && end > first);
                        unit = end;
                        if unit == units {
                            (block, unit) = (block + 1, 0);
                        }
                    }
                }
            }
            prop_assert_eq!((block, unit), (blocks, 0));
            prop_assert!(split.unit_bytes() * split.units_per_run() >= pair.run_bytes());
            prop_assert!(split.unit_bytes() * (split.units_per_run() - 1) < pair.run_bytes());
        }
    }
}
