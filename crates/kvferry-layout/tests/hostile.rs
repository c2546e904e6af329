//! Legal sizes at the edge of 63 bits: no overflow anywhere (the test profile traps it), and every run in bounds.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::{Dice, Form, Made, cases, ids, own_kinds};
use kvferry_layout::{
    Axis, CopyPlan, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig, LayoutError, PairPlan, PairRequest,
    PerAxis, RegionSpan, find_overlap,
};
use proptest::prelude::*;

/// Random extents whose product is close to `bits` bits.
fn huge(seed: u64, bits: u64, dtype: Dtype, align: u64) -> Option<LayoutConfig> {
    let mut dice = Dice(seed);
    let mut left = bits;
    let mut take = |most: u64| {
        let bits = dice.below(left.min(most) + 1);
        left -= bits;
        let value = 1u64 << bits;
        value + dice.below(value).min(value - 1) * dice.below(2)
    };
    let (blocks, layers, page, heads) = (take(31), take(40), take(30), take(40));
    let dim = take(62).max(1);
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(2)
        .page_size(page)
        .num_heads(heads)
        .head_dim(dim)
        .dtype(dtype)
        .alignment(align)
        .build()
        .ok()
}

fn in_bounds(plan: &CopyPlan, src: &Layout, dst: &Layout) {
    for segment in plan.segments() {
        let (run, loops) = plan.shape(&segment);
        let (mut s, mut d) = (plan.pair().src_place(segment.src), plan.pair().dst_place(segment.dst));
        for l in loops.iter() {
            s.region += (l.count - 1) * l.src_region;
            s.offset += (l.count - 1) * l.src_stride;
            d.region += (l.count - 1) * l.dst_region;
            d.offset += (l.count - 1) * l.dst_stride;
        }
        assert!(s.region < src.num_regions() && s.offset + run <= src.region_bytes());
        assert!(d.region < dst.num_regions() && d.offset + run <= dst.region_bytes());
    }
    let stats = plan.stats();
    assert_eq!(stats.bytes, plan.bytes());
    assert_eq!(stats.runs == 0, plan.blocks() == 0);
    assert_eq!(plan.runs().take(3).count() as u64, stats.runs.min(3));
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn sizes_near_63_bits(
        seed in any::<u64>(), bits in 52u64..=63, kinds in [0usize..12, 0usize..12], log in 0u32..31, wide in any::<bool>(),
    ) {
        let dtype = if wide { Dtype::Float64 } else { Dtype::UInt8 };
        let Some(config) = huge(seed, bits, dtype, 1 << log) else { return Ok(()) };
        let own = own_kinds();
        let make = |index: usize| Layout::of_kind(config, own[index]);
        let (Ok(src), Ok(dst)) = (make(kinds[0]), make(kinds[1])) else { return Ok(()) };
        // The last element lies where the oracle says, and ends the region.
        let last = PerAxis::from_fn(|axis| src.view().extent(axis) - 1);
        let place = src.view().place(last).unwrap();
        prop_assert_eq!(place.offset + dtype.bytes(), src.region_bytes());
        prop_assert_eq!(place.region + 1, src.num_regions());
        let oracle = Made::new(config, &Form::Own(own[kinds[0]])).oracle;
        let at = |axis| last[axis];
        let expected = oracle.element(
            at(Axis::Block), at(Axis::Layer), at(Axis::Outer), at(Axis::Page), at(Axis::Head), at(Axis::Dim),
        );
        prop_assert_eq!((place.region as usize, place.offset as usize), expected);
        let _ = src.total_bytes();

        let pair = Arc::new(PairPlan::new(&src, &dst, &PairRequest::default()).unwrap());
        let blocks = config.num_blocks();
        let few = blocks.min(40);
        // The last ids, rising, falling and mixed with the first.
        for list in [
            (blocks - few..blocks).collect::<Vec<_>>(),
            (blocks - few..blocks).rev().collect(),
            (0..few / 2).flat_map(|i| [blocks - 1 - i, i]).collect(),
        ] {
            let plan = CopyPlan::new(pair.clone(), &ids(list.clone()), &ids(list)).unwrap();
            in_bounds(&plan, &src, &dst);
        }
    }

    #[test]
    fn large_pages_in_parts(seed in any::<u64>(), bits in 40u64..=62, kinds in [0usize..12, 0usize..12], log in 0u32..31) {
        let Some(config) = huge(seed, bits, Dtype::Float16, 1 << log) else { return Ok(()) };
        let own = own_kinds();
        let page = config.page_size();
        let parts = (1..=64).rev().find(|&parts| page.is_multiple_of(parts)).unwrap();
        let fine = config.to_builder().page_size(page / parts).build().unwrap();
        let (Ok(src), Ok(dst)) = (Layout::of_kind(config, own[kinds[0]]), Layout::of_kind(fine, own[kinds[1]])) else {
            return Ok(());
        };
        let Ok(pair) = PairPlan::new(&src, &dst, &PairRequest::default()) else { return Ok(()) };
        let pair = Arc::new(pair);
        let groups = (fine.num_blocks() / parts).min(3);
        let coarse = config.num_blocks();
        let src_ids = ids((0..groups).map(|i| coarse - 1 - i % coarse));
        let dst_ids = ids((0..groups * parts).map(|i| fine.num_blocks() - groups * parts + i));
        let plan = CopyPlan::new(pair, &src_ids, &dst_ids).unwrap();
        in_bounds(&plan, &src, &dst);
    }
}

#[test]
fn one_block_of_almost_everything() {
    let config = LayoutConfig::builder().num_blocks(1).num_layers(1).outer_dim(1).page_size(1);
    let config = config.inner_dim(i64::MAX as u64).dtype(Dtype::UInt8).build().unwrap();
    let (src, dst) = (
        Layout::fully_contiguous(config, KvOrder::Nhd).unwrap(),
        Layout::block_pool(config, KvOrder::Universal).unwrap(),
    );
    let pair = Arc::new(PairPlan::new(&src, &dst, &PairRequest::default()).unwrap());
    assert!(pair.whole_block());
    let plan = CopyPlan::new(pair, &ids([0]), &ids([0])).unwrap();
    assert_eq!(plan.bytes(), i64::MAX as u64);
    in_bounds(&plan, &src, &dst);
    let (low, high) = ([RegionSpan { addr: 0, len: 1 << 62 }], [RegionSpan { addr: u64::MAX, len: 1 << 62 }]);
    assert!(find_overlap(&plan, &low, &high).is_ok(), "no wrap-around");
    assert!(plan.pair().may_overlap(&low, &low));
}

/// Found here: a page axis of two tokens 2^62 bytes apart was refused by every plan, because re-paging it to its own
/// page size multiplied the two.
#[test]
fn strides_near_63_bits_need_no_product() {
    let array = ForeignArray { name: "a".into(), shape: vec![3, 2, 4], strides: vec![8, 1 << 62, 2] };
    let axes = [Axis::Block, Axis::Page, Axis::Dim];
    let layout = Layout::from_arrays(&[array], &axes, false, Dtype::Float16, None).unwrap();
    let pair = Arc::new(PairPlan::new(&layout, &layout, &PairRequest::default()).unwrap());
    let plan = CopyPlan::new(pair, &ids([0, 1, 2]), &ids([0, 1, 2])).unwrap();
    in_bounds(&plan, &layout, &layout);
    assert_eq!(plan.stats().runs, 2);
    assert_eq!(layout.with_page_size(1).unwrap().view().block_step().part_stride, 1 << 62);
    // The unused stride of an axis of extent 1 may be anything.
    let array = ForeignArray { name: "a".into(), shape: vec![1, 1, 4], strides: vec![i64::MAX, i64::MAX, 2] };
    let layout = Layout::from_arrays(&[array], &axes, false, Dtype::Float16, None).unwrap();
    let pair = Arc::new(PairPlan::new(&layout, &layout, &PairRequest::default()).unwrap());
    in_bounds(&CopyPlan::new(pair, &ids([0]), &ids([0])).unwrap(), &layout, &layout);
}

#[test]
fn region_tables_beyond_63_bits_are_refused() {
    let config = LayoutConfig::builder().num_blocks(1).num_layers(1 << 62).outer_dim(1).page_size(1);
    let config = config.inner_dim(1).dtype(Dtype::UInt8).build().unwrap();
    assert_eq!(Layout::split_kv(config, KvOrder::Nhd).map(|layout| layout.num_regions()), Ok(1 << 62));
    let config =
        config.to_builder().num_layers(1 << 33).num_blocks(1 << 29).alignment(1 << 30).build().unwrap();
    let layout = Layout::split_kv(config, KvOrder::Nhd).unwrap();
    assert_eq!(layout.total_bytes(), Err(LayoutError::Overflow { what: "bytes of all regions" }));
}
