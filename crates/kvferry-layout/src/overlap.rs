//! Do source and destination share memory?

use crate::error::{LayoutError, PlanError, Side};
use crate::layout::RegionSpan;
use crate::pair::PairPlan;
use crate::plan::CopyPlan;
use crate::view::Place;

/// Whether any source region meets any destination region. Id-free: worth keeping per layout pair.
pub(crate) fn regions_meet(src: &[RegionSpan], dst: &[RegionSpan]) -> bool {
    let mut spans: Vec<(u64, u64, bool)> = Vec::with_capacity(src.len() + dst.len());
    spans.extend(src.iter().map(|s| (s.addr, s.addr.saturating_add(s.len), false)));
    spans.extend(dst.iter().map(|d| (d.addr, d.addr.saturating_add(d.len), true)));
    spans.sort_unstable();
    let mut reach = [0u64; 2];
    for (start, end, is_dst) in spans {
        if start < reach[usize::from(!is_dst)] {
            return true;
        }
        let side = &mut reach[usize::from(is_dst)];
        *side = (*side).max(end);
    }
    false
}

impl PairPlan {
    /// Whether the two layouts' regions meet at all, so that plans between them need [`find_overlap`].
    pub fn may_overlap(&self, src: &[RegionSpan], dst: &[RegionSpan]) -> bool {
        regions_meet(src, dst)
    }
}

/// Finds a byte that `plan` both reads and writes. Exact: layouts that interleave in one allocation (K and V as two
/// views of one tensor) pass. Memory mapped twice at different addresses cannot be seen, and the regions of one
/// layout must not share bytes among themselves.
///
/// Same view of the same memory: a sort of the segments. Otherwise a sort of all runs, so ask
/// [`PairPlan::may_overlap`] first and keep its answer per layout pair.
///
/// # Errors
/// [`PlanError::Overlap`] with two blocks and an address they share, the lowest of all unless both sides are the same
/// view of the same memory; [`LayoutError::RegionCount`] in a [`PlanError::Range`] when there are fewer regions than
/// the plan names.
///
/// ```
/// use std::sync::Arc;
/// use kvferry_layout::{
///     BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest, PlanError, RegionSpan, find_overlap,
/// };
/// let cfg = LayoutConfig::builder()
///     .num_blocks(8).num_layers(1).page_size(16).num_heads(2).head_dim(32).dtype(Dtype::Float16)
///     .build()?;
/// let cache = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
/// let memory = [RegionSpan { addr: 0x1000, len: cache.region_bytes() }];
/// let pair = Arc::new(PairPlan::new(&cache, &cache, &PairRequest::default())?);
/// assert!(pair.may_overlap(&memory, &memory));
///
/// let apart = CopyPlan::new(pair.clone(), &[BlockId(0), BlockId(1)], &[BlockId(4), BlockId(5)])?;
/// find_overlap(&apart, &memory, &memory)?;
/// let shifted = CopyPlan::new(pair, &[BlockId(0), BlockId(1)], &[BlockId(1), BlockId(2)])?;
/// let error = find_overlap(&shifted, &memory, &memory).unwrap_err();
/// assert_eq!(error, PlanError::Overlap { src: 1, dst: 1, addr: 0x1000 + cfg.block_bytes() });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn find_overlap(plan: &CopyPlan, src: &[RegionSpan], dst: &[RegionSpan]) -> Result<(), PlanError> {
    let same_bases = src.len() == dst.len() && src.iter().zip(dst).all(|(a, b)| a.addr == b.addr);
    if plan.pair().same_view() && same_bases {
        return same_memory(plan, src);
    }
    // (start, end, block id, is destination)
    let mut spans: Vec<(u64, u64, u32, bool)> = Vec::new();
    let pair = plan.pair();
    for segment in plan.segments() {
        let runs = pair.runs_per_block();
        for block in 0..segment.count {
            let (s, d) = (segment.src + block, segment.dst + block);
            let (at_s, at_d) = (pair.src_place(s), pair.dst_place(d));
            for index in 0..runs {
                let (src_at, dst_at) = crate::plan::step(pair.loops(), index, at_s, at_d);
                let bytes = pair.run_bytes();
                let a = address(src, src_at, Side::Source)?;
                let b = address(dst, dst_at, Side::Destination)?;
                spans.push((a, a.saturating_add(bytes), s, false));
                spans.push((b, b.saturating_add(bytes), d, true));
            }
        }
    }
    spans.sort_unstable();
    // The farthest end seen so far on either side, and whose it is.
    let mut reach = [(0u64, 0u32); 2];
    for (start, end, id, is_dst) in spans {
        let (other_end, other_id) = reach[usize::from(!is_dst)];
        if start < other_end {
            let (s, d) = if is_dst { (other_id, id) } else { (id, other_id) };
            return Err(shared(pair, s, d, start));
        }
        let side = &mut reach[usize::from(is_dst)];
        if end > side.0 {
            *side = (end, id);
        }
    }
    Ok(())
}

/// The error, with blocks as the caller numbers them: plans count in the finer page.
fn shared(pair: &PairPlan, src: u32, dst: u32, addr: u64) -> PlanError {
    let own = |id: u32, parts: u64| u32::try_from(u64::from(id) / parts).unwrap_or(id);
    let (src_parts, dst_parts) = pair.parts();
    PlanError::Overlap { src: own(src, src_parts), dst: own(dst, dst_parts), addr }
}

fn address(regions: &[RegionSpan], place: Place, side: Side) -> Result<u64, PlanError> {
    match regions.get(place.region as usize) {
        Some(region) => Ok(region.addr.saturating_add(place.offset)),
        None => {
            let (expected, got) = (place.region + 1, regions.len() as u64);
            Err(PlanError::Range {
                side,
                source: LayoutError::RegionCount { kind: "the plan", expected, got },
            })
        }
    }
}

fn same_memory(plan: &CopyPlan, bases: &[RegionSpan]) -> Result<(), PlanError> {
    // Segments are id intervals, disjoint among the destinations: sort those and look every source up.
    let mut written: Vec<(u32, u32)> = plan.segments().iter().map(|s| (s.dst, s.count)).collect();
    written.sort_unstable();
    for segment in plan.segments() {
        let (first, end) = (u64::from(segment.src), u64::from(segment.src) + u64::from(segment.count));
        let next = written.partition_point(|&(start, count)| u64::from(start) + u64::from(count) <= first);
        if let Some(&(start, _)) = written.get(next)
            && u64::from(start) < end
        {
            let id = segment.src.max(start);
            let addr = address(bases, plan.pair().src_place(id), Side::Source)?;
            return Err(shared(plan.pair(), id, id, addr));
        }
    }
    Ok(())
}
