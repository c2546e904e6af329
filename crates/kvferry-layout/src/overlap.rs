//! Do source and destination share memory?

use crate::error::{LayoutError, PlanError, Side};
use crate::layout::RegionSpan;
use crate::pair::{Loop, PairPlan};
use crate::plan::{CopyPlan, Segment, step};
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
/// Same view of the same memory: a sort of the segments. Otherwise a sort of one interval per segment and region, and
/// of the runs of those that meet; ask [`PairPlan::may_overlap`] first and keep its answer per layout pair.
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
    // Coarse first: one interval for what a segment covers in a region. Only those that meet are looked at run by run,
    // so that caches which share an allocation but not its blocks cost no more than a sort of the segments.
    let mut coarse = intervals(plan, src, dst)?;
    coarse.sort_unstable_by_key(|interval| (interval.start, interval.end, interval.is_dst));
    mark_meeting(&mut coarse);
    let mut fine: Vec<(u64, u64, u32, bool)> = Vec::new();
    for interval in coarse.iter().filter(|interval| interval.meets) {
        expand_runs(plan.pair(), interval, &mut fine);
    }
    fine.sort_unstable();
    // The farthest end seen so far on either side, and whose it is.
    let mut reach = [(0u64, 0u32); 2];
    for (start, end, id, is_dst) in fine {
        let (other_end, other_id) = reach[usize::from(!is_dst)];
        if start < other_end {
            let (s, d) = if is_dst { (other_id, id) } else { (id, other_id) };
            return Err(shared(plan.pair(), s, d, start));
        }
        let side = &mut reach[usize::from(is_dst)];
        if end > side.0 {
            *side = (end, id);
        }
    }
    Ok(())
}

/// What the blocks of one segment cover in one region, first byte to last, gaps included.
struct Interval {
    start: u64,
    end: u64,
    is_dst: bool,
    segment: Segment,
    /// Some interval of the other side shares addresses with it.
    meets: bool,
}

fn intervals(plan: &CopyPlan, src: &[RegionSpan], dst: &[RegionSpan]) -> Result<Vec<Interval>, PlanError> {
    let pair = plan.pair();
    let (outer, inner) = pair.split_loops();
    let reach = |stride: fn(&Loop) -> u64| inner.iter().map(|l| (l.count - 1) * stride(l)).sum::<u64>();
    let (src_reach, dst_reach) = (reach(|l| l.src_stride), reach(|l| l.dst_stride));
    let mut out = Vec::new();
    for segment in plan.segments() {
        // Joined blocks follow one another run by run.
        let run = pair.run_bytes().saturating_mul(segment.count.into());
        let (at_src, at_dst) = (pair.src_place(segment.src), pair.dst_place(segment.dst));
        for index in 0..outer.iter().map(|l| l.count).product() {
            let (s, d) = step(outer, index, at_src, at_dst);
            let (s, d) = (address(src, s, Side::Source)?, address(dst, d, Side::Destination)?);
            for (start, reach, is_dst) in [(s, src_reach, false), (d, dst_reach, true)] {
                let end = start.saturating_add(reach).saturating_add(run);
                out.push(Interval { start, end, is_dst, segment, meets: false });
            }
        }
    }
    Ok(out)
}

/// Marks every interval that meets one of the other side; they come sorted by their starts.
fn mark_meeting(sorted: &mut [Interval]) {
    let mut reach = [0u64; 2];
    for interval in sorted.iter_mut() {
        interval.meets = interval.start < reach[usize::from(!interval.is_dst)];
        let side = &mut reach[usize::from(interval.is_dst)];
        *side = (*side).max(interval.end);
    }
    let mut next = [u64::MAX; 2];
    for interval in sorted.iter_mut().rev() {
        interval.meets |= next[usize::from(!interval.is_dst)] < interval.end;
        next[usize::from(interval.is_dst)] = interval.start;
    }
}

/// The runs of one interval, block by block: (start, end, block id, is destination).
fn expand_runs(pair: &PairPlan, interval: &Interval, out: &mut Vec<(u64, u64, u32, bool)>) {
    let (_, inner) = pair.split_loops();
    let Segment { src, dst, count, .. } = interval.segment;
    let zero = Place { region: 0, offset: 0 };
    for index in 0..inner.iter().map(|l| l.count).product() {
        let (s, d) = step(inner, index, zero, zero);
        let (offset, first) = if interval.is_dst { (d.offset, dst) } else { (s.offset, src) };
        for block in 0..count {
            let start = interval.start.saturating_add(offset + u64::from(block) * pair.run_bytes());
            out.push((start, start.saturating_add(pair.run_bytes()), first + block, interval.is_dst));
        }
    }
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
    let mut written: Vec<(u32, u32)> = plan.segments().map(|s| (s.dst, s.count)).collect();
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
