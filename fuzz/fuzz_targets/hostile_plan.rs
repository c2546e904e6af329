//! Legal sizes at the edge of 32 and 63 bits: nothing overflows, and every run lies inside its region.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use kvferry_fuzz::{check_any, inside, limit_allocations, own_kind, some_of, wild};
use kvferry_layout::{
    Axis, BlockId, CopyPlan, Dtype, Layout, LayoutConfig, PairPlan, PairRequest, PerAxis, RegionSpan,
    RowChunks, Transform, find_overlap, incompatibilities,
};
use libfuzzer_sys::{Corpus, fuzz_target};

/// Most runs that are listed one by one.
const FEW: u64 = 2000;

fuzz_target!(
    // A bitmap of the ids of 2^27 blocks takes 16 MiB.
    init: limit_allocations(17 << 20),
    |bytes: &[u8]| -> Corpus {
        match hostile(&mut Unstructured::new(bytes)) {
            Ok(()) => Corpus::Keep,
            Err(_) => Corpus::Reject,
        }
    }
);

fn hostile(u: &mut Unstructured<'_>) -> Result<()> {
    let Some(config) = config(u)? else { return Ok(()) };
    let Some(src) = layout(u, config)? else { return Ok(()) };
    let dst = if u.ratio(1, 3)? { Some(src.clone()) } else { related(u, config)? };
    let Some(dst) = dst else { return Ok(()) };
    for side in [&src, &dst] {
        let places = (0..4).map(|_| inside(u, side)).collect::<Result<Vec<_>>>()?;
        check_any(side, &places);
        rows(u, side)?;
    }
    let bounds = (src.config().first_head(), src.config().num_heads());
    let request = PairRequest {
        layers: if u.ratio(2, 3)? { None } else { Some(range(u, 0, src.config().num_layers())?) },
        heads: if u.ratio(2, 3)? { None } else { Some(range(u, bounds.0, bounds.1)?) },
        transform: if u.ratio(1, 8)? { Transform::Forbid } else { Transform::Auto },
    };
    let pair = match PairPlan::new(&src, &dst, &request) {
        Ok(pair) => Arc::new(pair),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let _ = incompatibilities(&src, &dst);
            return Ok(());
        }
    };
    assert!(incompatibilities(&src, &dst).is_empty());
    let Some((src_ids, dst_ids)) = ids(u, &src, &dst, pair.parts())? else { return Ok(()) };
    let plan = match CopyPlan::new(pair, &src_ids, &dst_ids) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return Ok(());
        }
    };
    assert!(src_ids.iter().all(|id| u64::from(id.0) < src.config().num_blocks()));
    assert!(dst_ids.iter().all(|id| u64::from(id.0) < dst.config().num_blocks()));
    let mut distinct = dst_ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), dst_ids.len(), "a destination is given twice");
    bounded(&plan, &src, &dst);

    let src_regions = regions(u, &src)?;
    let dst_regions = if u.arbitrary()? { src_regions.clone() } else { regions(u, &dst)? };
    let _ = plan.pair().may_overlap(&src_regions, &dst_regions);
    let _ = src.check_regions(&src_regions);
    let _ = dst.check_regions(&dst_regions);
    let _ = src.aliased_regions(&src_regions);
    let _ = dst.aliased_regions(&dst_regions);
    let per_block = u64::from(plan.blocks()).saturating_mul(plan.pair().runs_per_block());
    if per_block <= FEW {
        let _ = find_overlap(&plan, &src_regions, &dst_regions);
    }
    let alone = PairPlan::new(&src, &src, &PairRequest::default()).expect("a layout fits itself");
    if alone.runs_per_block().saturating_mul(src_ids.len() as u64 + 1) <= FEW
        && let Ok(payload) = src.payload(&src_regions, &src_ids)
    {
        assert!(payload.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(src.outside_payload(&src_regions, &src_ids).is_ok());
    }
    Ok(())
}

/// Extents whose product often comes close to 63 bits.
fn config(u: &mut Unstructured<'_>) -> Result<Option<LayoutConfig>> {
    let mut left = u.int_in_range(40..=63)?;
    let mut extents = [0u64; 5];
    let rough = u.ratio(1, 8)?;
    for slot in some_of(u, &[0usize, 1, 2, 3, 4], true)? {
        if rough {
            extents[slot] = wild(u)?;
            continue;
        }
        let bits = u.int_in_range(0..=if slot == 0 { left.min(32) } else { left })?;
        left -= bits;
        let value = 1u64 << bits;
        extents[slot] = match u.int_in_range(0..=3)? {
            0 => value,
            1 => (value - 1).max(1),
            2 => value - 1 + u.int_in_range(0..=2)?,
            _ => u.int_in_range(value / 2..=value)?,
        }
        .max(1);
    }
    let first_head = if u.ratio(1, 3)? { wild(u)? } else { 0 };
    let mut builder = LayoutConfig::builder()
        .num_blocks(extents[0])
        .num_layers(extents[1])
        .outer_dim(u.int_in_range(1..=2)?)
        .page_size(extents[2])
        .num_heads(extents[3])
        .head_dim(extents[4])
        .dtype(*u.choose(Dtype::ALL)?)
        .first_head(first_head);
    if u.ratio(1, 3)? {
        builder = builder.alignment(1 << u.int_in_range(0..=30)?);
    }
    if u.ratio(1, 3)? {
        builder = builder.total_heads(wild(u)?);
    }
    Ok(builder.build().ok())
}

/// The configuration on the other side: another shard, page size or number of blocks.
fn related(u: &mut Unstructured<'_>, config: LayoutConfig) -> Result<Option<Layout>> {
    let mut builder = config.to_builder();
    if u.arbitrary()? {
        let page = page(u, config.page_size())?;
        let blocks = config.num_blocks().saturating_mul(config.page_size() / page);
        builder = builder.page_size(page).num_blocks(blocks);
    }
    if u.ratio(1, 3)? {
        let skip = u.int_in_range(0..=config.num_heads() - 1)?;
        let heads = u.int_in_range(1..=config.num_heads() - skip)?;
        builder = builder.first_head(config.first_head() + skip).num_heads(heads);
    }
    if u.ratio(1, 4)? {
        builder = builder.num_blocks(wild(u)?);
    }
    match builder.build() {
        Ok(config) => layout(u, config),
        Err(_) => Ok(None),
    }
}

/// A divisor of `tokens`.
fn page(u: &mut Unstructured<'_>, tokens: u64) -> Result<u64> {
    let wanted = if u.arbitrary()? { u.int_in_range(1..=64)? } else { wild(u)? }.clamp(1, tokens);
    Ok(if tokens.is_multiple_of(wanted) {
        if u.arbitrary()? { wanted } else { tokens / wanted }
    } else {
        tokens >> u.int_in_range(0..=tokens.trailing_zeros())?
    })
}

fn layout(u: &mut Unstructured<'_>, config: LayoutConfig) -> Result<Option<Layout>> {
    let layout = if u.ratio(2, 3)? {
        Layout::of_kind(config, own_kind(u)?)
    } else {
        let config = config.to_builder().alignment(1).build().expect("a smaller alignment is legal");
        let extents = config.extents();
        let order = some_of(u, &Axis::ALL, true)?;
        let over = some_of(u, &[Axis::Block, Axis::Layer, Axis::Outer], false)?;
        let mut strides = PerAxis::splat(0);
        let mut span = config.dtype().bytes();
        for &axis in order.iter().rev().filter(|axis| !over.contains(axis)) {
            let room = (i64::MAX as u64).saturating_sub(span) / (extents[axis] - 1).max(1);
            strides[axis] = match u.int_in_range(0..=7)? {
                0..=3 => span,
                // As far as the region allows, or beyond.
                4 => room,
                5 => room.saturating_add(1),
                6 if room > span => u.int_in_range(span..=room)?,
                _ => wild(u)?,
            };
            span = span.saturating_add(strides[axis].saturating_mul(extents[axis] - 1));
        }
        let order: [Axis; 6] = order.try_into().expect("six axes");
        Layout::strided(config, order, strides, &over)
    };
    let Ok(layout) = layout else { return Ok(None) };
    if u.ratio(2, 3)? {
        return Ok(Some(layout));
    }
    let page = page(u, layout.config().page_size())?;
    Ok(layout.with_page_size(page).ok())
}

/// A part of `first..first + count`, now and then anything.
fn range(u: &mut Unstructured<'_>, first: u64, count: u64) -> Result<std::ops::Range<u64>> {
    if u.ratio(1, 8)? {
        return Ok(wild(u)?..wild(u)?);
    }
    let start = u.int_in_range(0..=count - 1)?;
    let end = u.int_in_range(start + 1..=count)?;
    Ok(first + start..first + end)
}

/// Matching lists of at most a few ids, near either end of the range or anywhere; None where one id is too many.
fn ids(
    u: &mut Unstructured<'_>,
    src: &Layout,
    dst: &Layout,
    (src_parts, dst_parts): (u64, u64),
) -> Result<Option<(Vec<BlockId>, Vec<BlockId>)>> {
    if src_parts.max(dst_parts) > 512 {
        return Ok(None);
    }
    let groups = u.int_in_range(0..=4)?;
    let mut list = |layout: &Layout, count: u64| -> Result<Vec<BlockId>> {
        let blocks = layout.config().num_blocks();
        let mut id = match u.int_in_range(0..=3)? {
            0 => 0,
            1 => blocks.saturating_sub(count),
            2 => blocks - 1,
            _ => u.int_in_range(0..=blocks - 1)?,
        };
        let mut list = Vec::new();
        let step = *u.choose(&[1, 1, u64::from(u32::MAX), 2])?;
        for _ in 0..count {
            list.push(BlockId(id as u32));
            id = if u.ratio(1, 64)? { wild(u)? } else { id.wrapping_add(step) % (1 << 32) };
        }
        Ok(list)
    };
    Ok(Some((list(src, groups * dst_parts)?, list(dst, groups * src_parts)?)))
}

/// Addresses for a few regions; fewer than a layout of many has.
fn regions(u: &mut Unstructured<'_>, layout: &Layout) -> Result<Vec<RegionSpan>> {
    let count = layout.num_regions().min(6);
    let align = layout.config().alignment();
    (0..count)
        .map(|_| {
            let addr = wild(u)?;
            let addr = if u.ratio(3, 4)? { addr & !(align - 1) } else { addr };
            Ok(RegionSpan { addr, len: layout.region_bytes().saturating_add(u.int_in_range(0..=1)?) })
        })
        .collect()
}

/// Last byte of every run in bounds, in wider arithmetic.
fn bounded(plan: &CopyPlan, src: &Layout, dst: &Layout) {
    for segment in plan.segments() {
        let (run, loops) = plan.shape(&segment);
        let total: u128 = loops.iter().map(|l| u128::from(l.count)).product();
        assert_eq!(
            total * u128::from(run),
            u128::from(segment.count) * u128::from(plan.pair().block_bytes()),
            "{segment:?}"
        );
        let sum = |start: u64, per: fn(&kvferry_layout::Loop) -> u64| {
            loops.iter().map(|l| u128::from(l.count - 1) * u128::from(per(l))).sum::<u128>()
                + u128::from(start)
        };
        let (s, d) = (plan.pair().src_place(segment.src), plan.pair().dst_place(segment.dst));
        assert!(sum(s.offset, |l| l.src_stride) + u128::from(run) <= u128::from(src.region_bytes()));
        assert!(sum(d.offset, |l| l.dst_stride) + u128::from(run) <= u128::from(dst.region_bytes()));
        assert!(sum(s.region, |l| l.src_region) < u128::from(src.num_regions()));
        assert!(sum(d.region, |l| l.dst_region) < u128::from(dst.num_regions()));
    }
    let stats = plan.stats();
    assert_eq!(stats.bytes, plan.bytes());
    assert_eq!(stats.runs == 0, plan.blocks() == 0);
    assert!(stats.runs <= stats.elementary_runs && stats.elementary_runs <= stats.bytes);
    assert_eq!(plan.runs().take(3).count() as u64, stats.runs.min(3));
}

/// Row chunks of a layout, where its coordinates fit their word.
fn rows(u: &mut Unstructured<'_>, layout: &Layout) -> Result<()> {
    let Ok(chunks) = RowChunks::new(layout.view(), wild(u)?) else { return Ok(()) };
    let block = u.int_in_range(0..=layout.config().num_blocks() - 1)?;
    for index in [0, u.int_in_range(0..=chunks.per_block() - 1)?, chunks.per_block() - 1] {
        let chunk = chunks.chunk(BlockId(block as u32), index);
        assert!(chunk.tokens >= 1 && chunk.tokens <= chunks.max_tokens());
        assert!(chunk.place.region < layout.num_regions() && chunk.place.offset < layout.region_bytes());
        let (run, loops) = chunks.gather(chunk.tokens);
        let total = loops.iter().map(|l| u128::from(l.count)).product::<u128>() * u128::from(run);
        assert_eq!(total, u128::from(chunks.chunk_bytes(chunk.tokens)));
        let far: u128 = loops.iter().map(|l| u128::from(l.count - 1) * u128::from(l.src_stride)).sum();
        assert!(u128::from(chunk.place.offset) + far + u128::from(run) <= u128::from(layout.region_bytes()));
        assert_eq!(chunks.rows(&chunk).next().map(|row| row.head), Some(chunk.first.head));
    }
    Ok(())
}
