//! Plans for people: what will be copied, in how many runs, by which engine, and why.

use std::fmt;
use std::sync::Arc;

use kvferry_layout::{Axis, BlockId, CopyPlan, Layout, LayoutKind, PairPlan, PlanStats, View};

use super::choose::{Asked, Choice, GpuAsked, choose, strategy};
use super::context::default_threads;
use super::options::TransferOptions;
use super::strategy::TransferStrategy;
use crate::error::Result;
use crate::memory::MemoryKind;

/// One side of a plan, without its memory.
#[derive(Clone, Debug)]
pub(super) struct PlanSide {
    layout: Layout,
    memory: MemoryKind,
}

impl PlanSide {
    pub(super) fn new(layout: Layout, memory: MemoryKind) -> PlanSide {
        PlanSide { layout, memory }
    }
}

impl fmt::Display for PlanSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.layout.kind();
        f.write_str(kind.name())?;
        match kind {
            LayoutKind::Strided => {
                let view = self.layout.view();
                let (outside, inside): (Vec<Axis>, Vec<Axis>) = view
                    .order()
                    .into_iter()
                    .filter(|&axis| view.extent(axis) > 1)
                    .partition(|&axis| view.region_stride(axis) != 0);
                if !outside.is_empty() {
                    write!(f, ", a region per {}", joined(&outside, " and "))?;
                }
                write!(f, " [{}]", joined(&inside, " "))?;
            }
            LayoutKind::LayerSeparate { block_dim, order } => write!(f, " {block_dim} {order}")?,
            _ => {
                if let Some(order) = kind.order() {
                    write!(f, " {order}")?;
                }
            }
        }
        write!(f, " ({})", self.memory)
    }
}

fn joined(axes: &[Axis], between: &str) -> String {
    axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(between)
}

/// A validated plan with its engine: what `explain()` speaks of. Holds no memory.
#[derive(Clone, Debug)]
pub struct TransferPlan {
    src: PlanSide,
    dst: PlanSide,
    plan: CopyPlan,
    choice: Choice,
}

/// Plans a transfer between two layouts that need not exist in memory; overlap is not looked for.
///
/// # Errors
/// As [`crate::TransferContext::plan`], but for what concerns memory.
pub fn plan_layouts(
    (src, src_memory): (&Layout, MemoryKind),
    (dst, dst_memory): (&Layout, MemoryKind),
    src_blocks: &[BlockId],
    dst_blocks: &[BlockId],
    options: &TransferOptions,
) -> Result<TransferPlan> {
    let pair = Arc::new(PairPlan::new(src, dst, &options.pair_request())?);
    let plan = CopyPlan::new(pair, src_blocks, dst_blocks)?;
    let direction = strategy(src_memory, dst_memory, options.strategy)?;
    let gpu = (direction != TransferStrategy::Memcpy).then(GpuAsked::by_default);
    let asked = Asked { waits: !options.after.is_empty(), threads: default_threads(), gpu };
    let choice = choose(&plan, (src_memory, dst_memory), direction, options, asked)?;
    let side = |layout: &Layout, memory| PlanSide::new(layout.clone(), memory);
    Ok(TransferPlan::new(side(src, src_memory), side(dst, dst_memory), plan, choice))
}

impl TransferPlan {
    pub(super) fn new(src: PlanSide, dst: PlanSide, plan: CopyPlan, choice: Choice) -> TransferPlan {
        TransferPlan { src, dst, plan, choice }
    }

    /// The copy plan.
    pub const fn plan(&self) -> &CopyPlan {
        &self.plan
    }

    /// The engine and why.
    pub const fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Counts.
    pub fn stats(&self) -> PlanStats {
        self.plan.stats()
    }

    /// What will be copied, in how many runs, by which engine and why, for people.
    pub fn explain(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TransferPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        let pair = self.plan.pair();
        writeln!(f, "{} -> {}", self.src, self.dst)?;
        writeln!(
            f,
            "blocks: {} of {} bytes, {} bytes in all",
            stats.blocks,
            pair.block_bytes(),
            stats.bytes
        )?;
        if pair.transforms() {
            let order = |view: &View| joined(&view.stride_order(), " ");
            writeln!(f, "order: {} -> {}, changed in flight", order(pair.src()), order(pair.dst()))?;
        } else {
            writeln!(f, "order: the same on both sides")?;
        }
        let lengths = if stats.shortest_run == stats.longest_run {
            format!("{} bytes each", stats.longest_run)
        } else {
            format!("{} to {} bytes", stats.shortest_run, stats.longest_run)
        };
        writeln!(f, "runs: {} copies merged into {}, {lengths}", stats.elementary_runs, stats.runs)?;
        writeln!(f, "  {}", why(pair, self.plan.num_segments() as u64, stats.blocks))?;
        for l in pair.loops() {
            let across = if l.within_regions() { "" } else { ", across regions" };
            writeln!(
                f,
                "  loop of {}: source steps {} bytes, destination {} bytes{across}",
                l.count, l.src_stride, l.dst_stride
            )?;
        }
        write!(f, "{}", self.choice)
    }
}

/// Why runs are no longer than they are.
fn why(pair: &PairPlan, segments: u64, blocks: u64) -> String {
    if segments < blocks {
        return format!(
            "neighbouring blocks join end to end on both sides: {blocks} blocks in {segments} piece(s)"
        );
    }
    if pair.whole_block() {
        return "a block is one run on both sides, and no two named blocks are neighbours on both".to_owned();
    }
    let next = |view: &View| {
        Axis::ALL
            .into_iter()
            .find(|&axis| {
                view.extent(axis) > 1
                    && view.region_stride(axis) == 0
                    && view.stride(axis) == pair.run_bytes()
            })
            .map_or_else(|| "padding or another region".to_owned(), |axis| format!("the next {axis}"))
    };
    format!(
        "a run ends after {} bytes: the source goes on with {}, the destination with {}",
        pair.run_bytes(),
        next(pair.src()),
        next(pair.dst())
    )
}
