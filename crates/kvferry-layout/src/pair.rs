//! The id-free part of a plan: two layouts, paired axis by axis.

use std::ops::Range;

use crate::axis::Axis;
use crate::error::{LayoutError, PlanError, Side};
use crate::layout::Layout;
use crate::view::{BlockStep, Place, View};

/// Whether a plan may change the order of a block's axes on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Transform {
    /// Change it where the two sides differ.
    #[default]
    Auto,
    /// Refuse layouts whose orders differ.
    Forbid,
}

/// Which part of the blocks to move.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct PairRequest {
    /// Layers to move; `None` is all.
    pub layers: Option<Range<u64>>,
    /// Heads to move, by global number; `None` is all that the two sides have in common.
    pub heads: Option<Range<u64>>,
    /// Order changes allowed?
    pub transform: Transform,
}

/// One loop around a run: how often, and how far both sides step each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Loop {
    /// Iterations.
    pub count: u64,
    /// Bytes the source steps.
    pub src_stride: u64,
    /// Bytes the destination steps.
    pub dst_stride: u64,
    /// Regions the source steps.
    pub src_region: u64,
    /// Regions the destination steps.
    pub dst_region: u64,
}

impl Loop {
    /// Whether the loop stays inside one region on both sides.
    pub const fn within_regions(&self) -> bool {
        self.src_region == 0 && self.dst_region == 0
    }

    /// Whether one step carries a run of `bytes` on, end to end on both sides.
    const fn continues(&self, bytes: u64) -> bool {
        self.within_regions() && self.src_stride == bytes && self.dst_stride == bytes
    }

    /// Whether one step of `self` is exactly all the steps of `inner`, on both sides.
    const fn wraps(&self, inner: &Loop) -> bool {
        self.src_stride == inner.src_stride * inner.count
            && self.dst_stride == inner.dst_stride * inner.count
            && self.src_region == inner.src_region * inner.count
            && self.dst_region == inner.dst_region * inner.count
    }
}

/// How blocks of one layout pair are copied, before any ids are known. Pure, and worth keeping per layout pair.
///
/// A run is the largest box over axes inside a block that is one stretch of bytes, with its elements in one order, on
/// both sides. Runs that merely happen to touch (the last row of one layer and the first of the next, where the order
/// changes) are not merged: loops stay uniform.
///
/// ```
/// use kvferry_layout::{BlockDim, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(64).num_layers(32).page_size(16).num_heads(8).head_dim(128).dtype(Dtype::BFloat16)
///     .build()?;
/// let fc = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
/// let lw = Layout::layer_separate(cfg, BlockDim::BlockFirst, KvOrder::Nhd)?;
/// let pair = PairPlan::new(&lw, &fc, &PairRequest { layers: Some(0..16), ..PairRequest::default() })?;
/// // K and V of a layer lie side by side in both, so one run per layer.
/// assert_eq!((pair.runs_per_block(), pair.run_bytes()), (16, 2 * cfg.chunk_bytes()));
///
/// // To a universal block, head rows are what both sides have in one piece; a shard takes its own heads.
/// let shard = Layout::fully_contiguous(cfg.shard_heads(3, 4)?, KvOrder::Universal)?;
/// let pair = PairPlan::new(&fc, &shard, &PairRequest::default())?;
/// assert!(pair.transforms());
/// assert_eq!((pair.runs_per_block(), pair.run_bytes()), (32 * 2 * 16 * 2, cfg.row_bytes()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairPlan {
    src: View,
    dst: View,
    src_step: BlockStep,
    dst_step: BlockStep,
    loops: Vec<Loop>,
    run_bytes: u64,
    block_bytes: u64,
    elementary_runs: u64,
    transforms: bool,
    src_parts: u64,
    dst_parts: u64,
    same_memory_rule: bool,
}

impl PairPlan {
    /// Pairs two layouts.
    ///
    /// The checks run in the order layer count, outer dimension, element type, head width, heads, page size, ranges,
    /// order. Where page sizes differ, the coarser side is read in pages of the finer one.
    ///
    /// # Errors
    /// The first of those that cannot be reconciled.
    pub fn new(src: &Layout, dst: &Layout, request: &PairRequest) -> Result<PairPlan, PlanError> {
        if let Some(reason) = incompatibilities(src, dst).into_iter().next() {
            return Err(reason);
        }
        let (mut s, mut d) = (src.view().clone(), dst.view().clone());
        let (src_page, dst_page) = (src.config().page_size(), dst.config().page_size());
        let page = src_page.min(dst_page);
        for (side, view) in [(Side::Source, &mut s), (Side::Destination, &mut d)] {
            let at = |source| PlanError::Range { side, source };
            *view = view.with_page_size(page).map_err(at)?;
            for (axis, range) in [(Axis::Layer, &request.layers), (Axis::Head, &request.heads)] {
                if let Some(range) = range {
                    *view = view.slice(axis, range.clone()).map_err(at)?;
                }
            }
        }
        let (head_a, head_b) = (s.range(Axis::Head), d.range(Axis::Head));
        let at = |source: LayoutError| PlanError::Range { side: Side::Source, source };
        let Some((s, d)) = s.intersect(&d).map_err(at)? else {
            return Err(PlanError::NoCommonHead {
                src_start: head_a.start,
                src_end: head_a.end,
                dst_start: head_b.start,
                dst_end: head_b.end,
            });
        };
        let transforms = s.order_differs(&d);
        if transforms && request.transform == Transform::Forbid {
            return Err(PlanError::TransformForbidden { src: names(&s), dst: names(&d) });
        }
        Ok(PairPlan::of_views(s, d, src_page / page, dst_page / page, transforms))
    }

    fn of_views(src: View, dst: View, src_parts: u64, dst_parts: u64, transforms: bool) -> PairPlan {
        let mut axes: Vec<Loop> = Axis::IN_BLOCK
            .into_iter()
            .filter(|&axis| src.extent(axis) > 1)
            .map(|axis| loop_over(&src, &dst, axis))
            .collect();
        let block_bytes = axes.iter().map(|l| l.count).product::<u64>() * src.elem_bytes();
        let mut chunk: Vec<Loop> = [Axis::Page, Axis::Head, Axis::Dim]
            .into_iter()
            .filter(|&axis| src.extent(axis) > 1)
            .map(|axis| loop_over(&src, &dst, axis))
            .collect();
        let elementary_runs = block_bytes / absorb_tail(&mut chunk, src.elem_bytes());
        let run_bytes = absorb_tail(&mut axes, src.elem_bytes());
        merge_loops(&mut axes);
        // Loops that change regions go outermost, so that all inside them is plain strides; then by falling
        // destination stride, so that writes advance.
        axes.sort_by_key(|l| {
            (l.within_regions(), std::cmp::Reverse((l.dst_region, l.dst_stride, l.src_region)))
        });
        let same_memory_rule = src == dst;
        PairPlan {
            src_step: normalise(src.block_step()),
            dst_step: normalise(dst.block_step()),
            src,
            dst,
            loops: axes,
            run_bytes,
            block_bytes,
            elementary_runs,
            transforms,
            src_parts,
            dst_parts,
            same_memory_rule,
        }
    }

    /// The source view after slicing.
    pub const fn src(&self) -> &View {
        &self.src
    }

    /// The destination view after slicing.
    pub const fn dst(&self) -> &View {
        &self.dst
    }

    /// Loops around a run, outermost first; loops over regions come before all others.
    pub fn loops(&self) -> &[Loop] {
        &self.loops
    }

    /// The same loops in two: those over regions, and the plain strides inside them.
    pub fn split_loops(&self) -> (&[Loop], &[Loop]) {
        self.loops.split_at(self.loops.iter().take_while(|l| !l.within_regions()).count())
    }

    /// Bytes of the longest run inside one block that is contiguous on both sides.
    pub const fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Bytes moved per block (of the finer page).
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Runs per block once the axes inside it are merged.
    pub const fn runs_per_block(&self) -> u64 {
        self.block_bytes / self.run_bytes
    }

    /// Copies per block that a caller would make by hand: one per (layer, outer) part, or one per head row where the
    /// part is not contiguous on both sides.
    pub const fn elementary_runs(&self) -> u64 {
        self.elementary_runs
    }

    /// Whether the order of a block's axes changes on the way.
    pub const fn transforms(&self) -> bool {
        self.transforms
    }

    /// Whether a block is one run on both sides (the whole-block path of the reference).
    pub fn whole_block(&self) -> bool {
        self.loops.is_empty()
    }

    /// Ids of the finer page per source block, and per destination block.
    pub const fn parts(&self) -> (u64, u64) {
        (self.src_parts, self.dst_parts)
    }

    /// How ids step, on the source side and on the destination side.
    pub const fn steps(&self) -> (BlockStep, BlockStep) {
        (self.src_step, self.dst_step)
    }

    /// This pair in two hops through `blocks` blocks of staging memory in one region, packed end to end in the order
    /// that one side has them in: source to stage, and stage to destination. Ids of the stage are its slots.
    ///
    /// The hop between `side` and the stage then has the longest runs that this side allows, whatever the other is.
    ///
    /// # Errors
    /// A stage beyond 63 bits.
    pub fn through_stage(&self, side: Side, blocks: u64) -> Result<(PairPlan, PairPlan), LayoutError> {
        let like = match side {
            Side::Source => &self.src,
            Side::Destination => &self.dst,
        };
        let stage = like.packed(blocks)?;
        let transforms = |a: &View, b: &View| a.order_differs(b);
        let first = PairPlan::of_views(self.src.clone(), stage.clone(), 1, 1, transforms(&self.src, &stage));
        let second = PairPlan::of_views(stage.clone(), self.dst.clone(), 1, 1, transforms(&stage, &self.dst));
        Ok((first, second))
    }

    /// Bytes of the longest run that one side alone allows: those of its hop to a stage.
    pub fn run_bytes_of(&self, side: Side) -> u64 {
        match side {
            Side::Source => self.src.packed_run(),
            Side::Destination => self.dst.packed_run(),
        }
    }

    /// Whether both sides are the same view, so that on the same memory equal ids are the only overlap.
    pub const fn same_view(&self) -> bool {
        self.same_memory_rule
    }

    /// Where block `id` (of the finer page) begins on the source side. Ids are those of a [`CopyPlan`](crate::CopyPlan),
    /// which has checked them; one out of range gives no place of the layout, or overflows.
    #[inline]
    pub fn src_place(&self, id: u32) -> Place {
        offset(self.src.start(), self.src_step.place(id.into()))
    }

    /// Where block `id` (of the finer page) begins on the destination side. Ids are those of a [`CopyPlan`](crate::CopyPlan),
    /// which has checked them; one out of range gives no place of the layout, or overflows.
    #[inline]
    pub fn dst_place(&self, id: u32) -> Place {
        offset(self.dst.start(), self.dst_step.place(id.into()))
    }

    /// Whether the runs of blocks (src, dst) and (src + 1, dst + 1) join end to end.
    #[inline]
    pub(crate) fn joins(&self, src: u32, dst: u32) -> bool {
        self.src_step.follows(src.into(), self.run_bytes) && self.dst_step.follows(dst.into(), self.run_bytes)
    }

    /// Whether blocks join here exactly where they join in `other`.
    pub(crate) fn joins_like(&self, other: &PairPlan) -> bool {
        self.run_bytes == other.run_bytes
            && (self.src_step, self.dst_step) == (other.src_step, other.dst_step)
    }

    /// Run length and remaining loops for `count` blocks joined end to end: a longer run may swallow a loop.
    pub fn joined(&self, count: u32) -> (u64, Vec<Loop>) {
        let mut loops = self.loops.clone();
        let run = absorb_tail(&mut loops, self.run_bytes * u64::from(count));
        (run, loops)
    }

    /// Whether `count` joined blocks keep the loops of one block.
    pub(crate) fn keeps_loops(&self, count: u32) -> bool {
        let run = self.run_bytes * u64::from(count);
        !self.loops.iter().any(|l| l.continues(run))
    }
}

/// Everything that keeps blocks from moving between two layouts, in the order layer count, outer dimension, element
/// type, head width, heads, page size. Empty when they fit; their orders may still differ.
pub fn incompatibilities(src: &Layout, dst: &Layout) -> Vec<PlanError> {
    let (a, b) = (src.config(), dst.config());
    let mut reasons = Vec::new();
    if a.num_layers() != b.num_layers() {
        reasons.push(PlanError::LayerCount { src: a.num_layers(), dst: b.num_layers() });
    }
    if a.outer_dim() != b.outer_dim() {
        reasons.push(PlanError::OuterDim { src: a.outer_dim(), dst: b.outer_dim() });
    }
    if a.dtype() != b.dtype() {
        reasons.push(PlanError::Dtype { src: a.dtype(), dst: b.dtype() });
    }
    if a.head_dim() != b.head_dim() {
        reasons.push(PlanError::HeadDim { src: a.head_dim(), dst: b.head_dim() });
    }
    if a.total_heads() != b.total_heads() {
        reasons.push(PlanError::TotalHeads { src: a.total_heads(), dst: b.total_heads() });
    }
    let (fine, coarse) = (a.page_size().min(b.page_size()), a.page_size().max(b.page_size()));
    if !coarse.is_multiple_of(fine) {
        reasons.push(PlanError::PageSize { src: a.page_size(), dst: b.page_size() });
    }
    reasons
}

fn loop_over(src: &View, dst: &View, axis: Axis) -> Loop {
    Loop {
        count: src.extent(axis),
        src_stride: src.stride(axis),
        dst_stride: dst.stride(axis),
        src_region: src.region_stride(axis),
        dst_region: dst.region_stride(axis),
    }
}

/// Grows a run over every loop that continues it on both sides; removes those loops and returns the run.
pub(crate) fn absorb_tail(loops: &mut Vec<Loop>, mut run: u64) -> u64 {
    while let Some(next) = loops.iter().position(|l| l.continues(run)) {
        run *= loops.remove(next).count;
    }
    run
}

/// Fuses loops that are one loop on both sides.
pub(crate) fn merge_loops(loops: &mut Vec<Loop>) {
    loop {
        let fused = (0..loops.len()).find_map(|outer| {
            let inner =
                (0..loops.len()).find(|&inner| inner != outer && loops[outer].wraps(&loops[inner]))?;
            Some((outer, inner))
        });
        let Some((outer, inner)) = fused else { return };
        loops[inner].count *= loops[outer].count;
        loops.remove(outer);
    }
}

/// Parts that tile their block evenly are plain blocks.
fn normalise(step: BlockStep) -> BlockStep {
    if step.parts > 1 && step.region_stride == 0 && step.stride == step.parts * step.part_stride {
        return BlockStep { parts: 1, part_stride: 0, stride: step.part_stride, region_stride: 0 };
    }
    step
}

fn offset(start: Place, by: Place) -> Place {
    Place { region: start.region + by.region, offset: start.offset + by.offset }
}

fn names(view: &View) -> String {
    view.stride_order().into_iter().map(Axis::name).collect::<Vec<_>>().join(" ")
}
