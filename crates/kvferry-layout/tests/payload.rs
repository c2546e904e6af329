//! Payload intervals and their inverse against the oracle, byte by byte.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashMap;

use common::{Dice, Dims, Form, Made, alignment, cases, dims, form, ids};
use kvferry_layout::{
    Axis, BlockId, Dtype, Layout, LayoutError, PerAxis, Place, PlanError, RegionPart, RegionSpan, Side,
};
use proptest::prelude::*;

/// Coordinates block, layer, outer, page, head, dim by address.
type Owners = HashMap<u64, [u64; 6]>;

fn owners(made: &Made, regions: &[RegionSpan]) -> Owners {
    let mut owners = HashMap::new();
    made.oracle.for_each(|at, (region, offset)| {
        for byte in 0..made.oracle.elem_bytes() as u64 {
            owners.insert(regions[region].addr + offset as u64 + byte, at);
        }
    });
    owners
}

/// Regions in random order of addresses, with room between and behind.
fn regions(layout: &Layout, dice: &mut Dice) -> Vec<RegionSpan> {
    let mut slots: Vec<u64> = (0..layout.num_regions()).collect();
    dice.shuffle(&mut slots);
    let align = layout.config().alignment();
    let len = layout.region_bytes();
    let step = (len + 40).next_multiple_of(align);
    slots
        .into_iter()
        .map(|slot| RegionSpan { addr: 4 * align + slot * step, len: len + dice.below(40) })
        .collect()
}

fn check(made: &Made, regions: &[RegionSpan], blocks: &[BlockId]) {
    let owners = owners(made, regions);
    let named = |addr: &u64| owners.get(addr).is_some_and(|at| blocks.contains(&BlockId(at[0] as u32)));
    let payload = made.layout.payload(regions, blocks).unwrap();
    assert!(payload.iter().all(|run| run.start < run.end));
    assert!(
        payload.windows(2).all(|pair| pair[0].end < pair[1].start),
        "sorted, disjoint and joined: {payload:?}"
    );
    let mut found: Vec<u64> = payload.iter().cloned().flatten().collect();
    let mut expected: Vec<u64> = owners.keys().copied().filter(named).collect();
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected);

    let outside = made.layout.outside_payload(regions, blocks).unwrap();
    assert!(outside.is_sorted_by_key(|part| (part.region, part.bytes.start)));
    for (index, span) in regions.iter().enumerate() {
        let kept: Vec<u64> =
            outside.iter().filter(|part| part.region == index).flat_map(|part| part.bytes.clone()).collect();
        let expected: Vec<u64> = (0..span.len).filter(|offset| !named(&(span.addr + offset))).collect();
        assert_eq!(kept, expected, "region {index}");
    }
}

fn locate(made: &Made, regions: &[RegionSpan]) {
    let mut known = HashMap::new();
    made.oracle.for_each(|at, (region, offset)| {
        for byte in 0..made.oracle.elem_bytes() {
            known.insert((region, offset + byte), at);
        }
    });
    for (region, span) in regions.iter().enumerate() {
        for offset in 0..span.len {
            let at = made.layout.view().locate(Place { region: region as u64, offset });
            let at = at.map(|at: PerAxis<u64>| Axis::ALL.map(|axis| at[axis]));
            assert_eq!(
                at,
                known.get(&(region, offset as usize)).copied(),
                "region {region}, offset {offset}"
            );
        }
    }
    let view = made.layout.view();
    assert_eq!(view.locate(Place { region: regions.len() as u64, offset: 0 }), None);
    assert_eq!(view.locate(Place { region: 0, offset: u64::MAX }), None);
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn intervals_and_their_inverse(
        dims in dims(4), form in form(), alignment in alignment(), split in 1u64..=3, seed: u64, count in 0usize..6,
    ) {
        let page = dims.page;
        let coarse = Made::new(Dims { page: page * split, ..dims }.config(alignment), &form);
        let mut dice = Dice(seed);
        let regions = regions(&coarse.layout, &mut dice);
        let made = coarse.with_page_size(page);
        // Repeats on purpose.
        let blocks = ids((0..count).map(|_| dice.below(made.oracle.num_blocks())));
        check(&made, &regions, &blocks);
        locate(&made, &regions);
    }
}

/// K and V as two views of one tensor [block, 2, ...]: each region spans the other's bytes.
#[test]
fn interleaved_regions_respect_each_other() {
    let sizes = Dims { blocks: 3, layers: 1, outer: 2, page: 2, heads: 1, dim: 4, dtype: Dtype::UInt8 };
    let mut strides = PerAxis::splat(0);
    (strides[Axis::Block], strides[Axis::Page], strides[Axis::Head], strides[Axis::Dim]) = (16, 4, 4, 1);
    let layout = Layout::strided(sizes.config(1), Axis::ALL, strides, &[Axis::Outer]).unwrap();
    let regions = [RegionSpan { addr: 100, len: 40 }, RegionSpan { addr: 108, len: 40 }];
    let payload = layout.payload(&regions, &ids([1])).unwrap();
    assert!(matches!(&payload[..], [one] if *one == (116..132)), "{payload:?}");
    let outside = layout.outside_payload(&regions, &ids([1])).unwrap();
    let part = |region, bytes| RegionPart { region, bytes };
    assert_eq!(outside, [part(0, 0..16), part(0, 32..40), part(1, 0..8), part(1, 24..40)]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let sizes = Dims { blocks: 3, layers: 1, outer: 1, page: 2, heads: 1, dim: 4, dtype: Dtype::UInt8 };
    let kind = common::own_kinds()[0];
    let layout = Made::new(sizes.config(1), &Form::Own(kind)).layout;
    let regions = [RegionSpan { addr: 0, len: 24 }];
    let error = layout.payload(&regions, &ids([0, 3])).unwrap_err();
    assert_eq!(error, PlanError::BlockId { side: Side::Source, index: 1, value: 3, limit: 3 });
    let short = [RegionSpan { addr: 0, len: 23 }];
    let source = LayoutError::RegionTooSmall { region: 0, needed: 24, got: 23 };
    assert_eq!(layout.payload(&short, &[]), Err(PlanError::Range { side: Side::Source, source }));
    assert_eq!(layout.outside_payload(&regions, &[]).unwrap(), [RegionPart { region: 0, bytes: 0..24 }]);
}
