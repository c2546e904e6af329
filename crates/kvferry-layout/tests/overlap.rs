//! `find_overlap` against sets of bytes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::pairs::{Case, case};
use common::{Dice, Dims, Form, Made, cases, form, ids};
use kvferry_layout::{
    Axis, BlockId, CopyPlan, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig, LayoutError, PairPlan,
    PairRequest, PlanError, RegionSpan, Side, find_overlap,
};
use proptest::prelude::*;

/// Bytes read or written, each with the block of its own layout that it belongs to.
fn bytes_of(made: &Made, list: &[BlockId], case: &Case, bases: &[RegionSpan]) -> HashMap<u64, Vec<u32>> {
    let mut bytes: HashMap<u64, Vec<u32>> = HashMap::new();
    let oracle = &made.oracle;
    let first_head = oracle.heads().start;
    oracle.for_each(|[block, layer, _, _, head, _], (region, offset)| {
        if !list.contains(&BlockId(block as u32))
            || !case.layers.contains(&layer)
            || !case.heads.contains(&(head + first_head))
        {
            return;
        }
        let start = bases[region].addr + offset as u64;
        for addr in start..start + oracle.elem_bytes() as u64 {
            bytes.entry(addr).or_default().push(block as u32);
        }
    });
    bytes
}

/// Compares the verdict with the sets: same answer, and a true witness. `first`: the lowest shared address.
fn check(case: &Case, src: &[RegionSpan], dst: &[RegionSpan], first: bool) {
    let plan = case.plan();
    let read = bytes_of(&case.src, &case.src_ids, case, src);
    let written = bytes_of(&case.dst, &case.dst_ids, case, dst);
    let lowest = read.keys().filter(|addr| written.contains_key(addr)).min();
    match (find_overlap(&plan, src, dst), lowest) {
        (Ok(()), None) => {}
        (Err(PlanError::Overlap { src: s, dst: d, addr }), Some(&lowest)) => {
            // A joined segment is named by its first block or the one it is in.
            assert!(
                read.get(&addr).is_some_and(|blocks| blocks.contains(&s)),
                "block {s} does not read {addr}"
            );
            assert!(
                written.get(&addr).is_some_and(|blocks| blocks.contains(&d)),
                "block {d} does not write {addr}"
            );
            assert!(!first || addr == lowest, "first shared address is {lowest}, not {addr}");
        }
        (got, expected) => panic!("{got:?}, but the lowest shared address is {expected:?}"),
    }
    if lowest.is_some() {
        assert!(plan.pair().may_overlap(src, dst));
    }
}

/// Regions of one layout one after the other with gaps, from `base` up.
fn bind(made: &Made, base: u64, gap: u64) -> Vec<RegionSpan> {
    let len = made.layout.region_bytes();
    (0..made.layout.num_regions()).map(|index| RegionSpan { addr: base + index * (len + gap), len }).collect()
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn verdicts_match_byte_sets(case in case(3), seed in any::<u64>()) {
        let mut dice = Dice(seed);
        // Where the two lie: anywhere, one right behind the other, or interleaved region by region.
        let (src_len, dst_len) = (case.src.layout.region_bytes(), case.dst.layout.region_bytes());
        let (src, dst) = match dice.below(3) {
            0 => {
                let reach = src_len * case.src.layout.num_regions() + dst_len;
                (bind(&case.src, dst_len + 8, dice.below(8)), bind(&case.dst, dice.below(reach), dice.below(8)))
            }
            1 => {
                let src = bind(&case.src, 100, 0);
                let end = src.last().map_or(0, |span| span.addr + span.len);
                let dst = bind(&case.dst, end - dice.below(2), 0);
                (src, dst)
            }
            _ => (bind(&case.src, 64, dst_len), bind(&case.dst, 64 + src_len - dice.below(2), src_len)),
        };
        check(&case, &src, &dst, true);
    }

    #[test]
    fn one_cache_on_both_sides(dims in common::dims(5), form in form(), seed in any::<u64>(), gap in 0u64..4) {
        let mut dice = Dice(seed);
        let made = Made::new(dims.config(1), &form);
        let mut all: Vec<u64> = (0..dims.blocks).collect();
        if dice.below(2) == 0 {
            dice.shuffle(&mut all);
        }
        all.truncate(1 + dice.below(dims.blocks) as usize);
        let (start, spread) = (dice.below(dims.blocks), 1 + dice.below(dims.blocks));
        let src: Vec<u64> = (0..all.len() as u64).map(|i| (start + i % spread) % dims.blocks).collect();
        let layers = dice.range(dims.layers);
        let case = Case {
            src: made.clone(),
            dst: made.clone(),
            src_ids: ids(src),
            dst_ids: ids(all),
            request: PairRequest { layers: Some(layers.clone()), ..PairRequest::default() },
            layers,
            heads: 0..dims.heads,
            regular: true,
        };
        let regions = bind(&made, 4096, gap);
        check(&case, &regions, &regions, false);
    }
}

/// One 16-token page copied inside a 64-token block: the views differ, the memory is the same.
#[test]
fn pages_of_one_block_on_the_same_memory() {
    let dims = Dims { blocks: 3, layers: 2, outer: 2, page: 8, heads: 2, dim: 4, dtype: Dtype::Float16 };
    let coarse = Made::new(
        dims.config(64),
        &Form::Own(kvferry_layout::LayoutKind::FullyContiguous { order: KvOrder::Hnd }),
    );
    let fine = coarse.with_page_size(2);
    let memory = bind(&coarse, 1 << 20, 0);
    for src in 0..12 {
        for dst in 0..12 {
            let case = Case {
                src: fine.clone(),
                dst: fine.clone(),
                src_ids: ids([src]),
                dst_ids: ids([dst]),
                request: PairRequest::default(),
                layers: 0..2,
                heads: 0..2,
                regular: false,
            };
            check(&case, &memory, &memory, true);
        }
    }
    // A coarse block read while some of its own pages are written.
    let case = Case {
        src: coarse,
        dst: fine,
        src_ids: ids([1]),
        dst_ids: ids([0, 7, 2, 11]),
        request: PairRequest::default(),
        layers: 0..2,
        heads: 0..2,
        regular: false,
    };
    check(&case, &memory, &memory, true);
}

fn half(blocks: u64) -> Layout {
    // One plane (K or V) of a tensor [blocks, 2, page 4, heads 2, dim 8] of two-byte elements.
    let array =
        ForeignArray { name: "kv".into(), shape: vec![blocks, 4, 2, 8], strides: vec![256, 32, 16, 2] };
    let axes = [Axis::Block, Axis::Page, Axis::Head, Axis::Dim];
    Layout::from_arrays(&[array], &axes, false, Dtype::Float16, None).unwrap()
}

#[test]
fn k_and_v_of_one_tensor_do_not_overlap() {
    let layout = half(6);
    let pair = Arc::new(PairPlan::new(&layout, &layout, &PairRequest::default()).unwrap());
    let (k, v) = ([RegionSpan { addr: 4096, len: 1408 }], [RegionSpan { addr: 4096 + 128, len: 1408 }]);
    assert!(pair.may_overlap(&k, &v));
    let all = ids(0..6);
    let plan = CopyPlan::new(pair.clone(), &all, &all).unwrap();
    assert_eq!(find_overlap(&plan, &k, &v), Ok(()));
    // One byte closer, and the end of every K plane lies in its V plane.
    let near = [RegionSpan { addr: 4096 + 127, len: 1408 }];
    assert_eq!(find_overlap(&plan, &k, &near), Err(PlanError::Overlap { src: 0, dst: 0, addr: 4096 + 127 }));
    // On the same memory, equal ids overlap and others do not.
    let moved = CopyPlan::new(pair.clone(), &ids([0, 1]), &ids([2, 3])).unwrap();
    assert_eq!(find_overlap(&moved, &k, &k), Ok(()));
    let crossed = CopyPlan::new(pair, &ids([4, 1]), &ids([2, 4])).unwrap();
    assert_eq!(
        find_overlap(&crossed, &k, &k),
        Err(PlanError::Overlap { src: 4, dst: 4, addr: 4096 + 4 * 256 })
    );
}

#[test]
fn regions_apart_never_meet() {
    let layout = half(2);
    let pair = PairPlan::new(&layout, &layout, &PairRequest::default()).unwrap();
    let at = |addr| [RegionSpan { addr, len: 384 }];
    assert!(!pair.may_overlap(&at(0), &at(384)));
    assert!(!pair.may_overlap(&at(384), &at(0)));
    assert!(pair.may_overlap(&at(383), &at(0)));
    assert!(pair.may_overlap(&at(0), &at(0)));
    assert!(!pair.may_overlap(&at(0), &[]));
    // Many regions: one long region over a short one that starts later.
    let (long, short) = (RegionSpan { addr: 0, len: 1000 }, RegionSpan { addr: 10, len: 1 });
    assert!(pair.may_overlap(&[long], &[RegionSpan { addr: 2000, len: 1 }, short]));
    assert!(!pair.may_overlap(&[long, short], &[RegionSpan { addr: 1000, len: 5 }]));
}

#[test]
fn missing_regions_are_an_error() {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(1).outer_dim(1).page_size(1);
    let config = config.num_heads(1).head_dim(8).dtype(Dtype::UInt8).build().unwrap();
    let (src, dst) = (
        Layout::fully_contiguous(config, KvOrder::Nhd).unwrap(),
        Layout::block_pool(config, KvOrder::Nhd).unwrap(),
    );
    let pair = Arc::new(PairPlan::new(&src, &dst, &PairRequest::default()).unwrap());
    let plan = CopyPlan::new(pair, &ids([0, 1]), &ids([3, 0])).unwrap();
    let spans = [RegionSpan { addr: 0, len: 32 }, RegionSpan { addr: 64, len: 32 }];
    assert_eq!(
        find_overlap(&plan, &spans, &spans),
        Err(PlanError::Range {
            side: Side::Destination,
            source: LayoutError::RegionCount { kind: "the plan", expected: 4, got: 2 }
        })
    );
    // Addresses near the top of the address space saturate instead of wrapping.
    let high = [RegionSpan { addr: u64::MAX - 4, len: 32 }];
    assert!(find_overlap(&plan, &high, &spans.repeat(2)).is_ok());
}
