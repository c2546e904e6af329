//! `View` and the oracle agree on where every element lies.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashSet;

use common::{Dims, Form, Made, alignment, cases, dims, form, own_kinds};
use kvferry_layout::{Axis, BlockDim, Dtype, KvOrder, LayoutKind, Part, PerAxis, Place};
use proptest::prelude::*;

fn at([block, layer, outer, page, head, dim]: [u64; 6]) -> PerAxis<u64> {
    PerAxis::from_fn(|axis| match axis {
        Axis::Block => block,
        Axis::Layer => layer,
        Axis::Outer => outer,
        Axis::Page => page,
        Axis::Head => head,
        Axis::Dim => dim,
    })
}

fn agree(made: &Made) {
    let Made { layout, oracle } = made;
    assert_eq!(layout.num_regions(), oracle.num_regions() as u64);
    assert_eq!(layout.region_bytes(), oracle.region_bytes() as u64);
    let mut taken = HashSet::new();
    oracle.for_each(|coordinates, (region, offset)| {
        let place = layout.view().place(at(coordinates)).expect("in range");
        assert_eq!(place, Place { region: region as u64, offset: offset as u64 }, "at {coordinates:?}");
        assert!(place.region < layout.num_regions());
        assert!(place.offset + layout.view().elem_bytes() <= layout.region_bytes());
        assert!(taken.insert(place), "two elements at {place:?}");
    });
}

/// Addresses worked out by hand: blocks 3, layers 2, K and V, 4 tokens, 2 heads of 8 two-byte elements.
#[test]
fn known_addresses() {
    use BlockDim::{BlockFirst, OuterFirst};
    use KvOrder::{Hnd, Nhd, Universal};
    let sizes = Dims { blocks: 3, layers: 2, outer: 2, page: 4, heads: 2, dim: 8, dtype: Dtype::Float16 };
    let table = [
        (LayoutKind::FullyContiguous { order: Nhd }, 1, (0, 1482)),
        (LayoutKind::FullyContiguous { order: Hnd }, 1, (0, 1450)),
        (LayoutKind::FullyContiguous { order: Universal }, 1, (0, 1258)),
        (LayoutKind::FullyContiguous { order: Nhd }, 1024, (0, 2506)),
        (LayoutKind::LayerSeparate { block_dim: BlockFirst, order: Nhd }, 1, (1, 714)),
        (LayoutKind::LayerSeparate { block_dim: BlockFirst, order: Nhd }, 1024, (1, 2250)),
        (LayoutKind::LayerSeparate { block_dim: OuterFirst, order: Hnd }, 1, (1, 682)),
        (LayoutKind::LayerSeparate { block_dim: OuterFirst, order: Nhd }, 1024, (1, 5194)),
        (LayoutKind::SplitKv { order: Nhd }, 1, (3, 330)),
        (LayoutKind::BlockPool { order: Universal }, 1024, (2, 234)),
    ];
    for (kind, alignment, (region, offset)) in table {
        let made = Made::new(sizes.config(alignment), &Form::Own(kind));
        let place = made.layout.view().place(at([2, 1, 1, 2, 0, 5])).unwrap();
        assert_eq!((place.region, place.offset), (region, offset), "{kind:?} aligned to {alignment}");
        assert_eq!(made.oracle.element(2, 1, 1, 2, 0, 5), (region as usize, offset as usize));
    }
}

#[test]
fn every_kind_with_every_alignment_and_dtype() {
    let sizes = Dims { blocks: 3, layers: 2, outer: 2, page: 3, heads: 5, dim: 3, dtype: Dtype::UInt8 };
    for kind in own_kinds() {
        for log in 0..10 {
            for &dtype in Dtype::ALL {
                agree(&Made::new(Dims { dtype, ..sizes }.config(1 << log), &Form::Own(kind)));
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(384))]

    #[test]
    fn places_agree(dims in dims(7), form in form(), alignment in alignment()) {
        agree(&Made::new(dims.config(alignment), &form));
    }

    #[test]
    fn places_agree_in_smaller_pages(dims in dims(5), split in 1u64..=4, form in form(), alignment in alignment()) {
        let page = dims.page;
        let coarse = Made::new(Dims { page: page * split, ..dims }.config(alignment), &form);
        agree(&coarse.with_page_size(page));
    }

    /// A contiguous part is exactly the bytes of its elements; a part that is refused has a gap or another order.
    #[test]
    fn memory_regions_hold_their_elements(dims in dims(5), form in form(), alignment in alignment()) {
        let Made { layout, oracle } = Made::new(dims.config(alignment), &form);
        let chunk = layout.config().chunk_bytes();
        for (block, layer, outer) in
            (0..dims.blocks).flat_map(|b| (0..dims.layers).flat_map(move |l| (0..dims.outer).map(move |o| (b, l, o))))
        {
            let mut bytes = Vec::new();
            for (page, head, dim) in (0..dims.page)
                .flat_map(|p| (0..dims.heads).flat_map(move |h| (0..dims.dim).map(move |d| (p, h, d))))
            {
                bytes.push(oracle.element(block, layer, outer, page, head, dim));
            }
            bytes.sort_unstable();
            let width = oracle.elem_bytes();
            let contiguous = bytes.windows(2).all(|w| w[1] == (w[0].0, w[0].1 + width));
            match layout.memory_region(block, layer, outer) {
                Ok(Part { place, nbytes }) => {
                    prop_assert!(contiguous);
                    prop_assert_eq!((place.region as usize, place.offset as usize), bytes[0]);
                    prop_assert_eq!(nbytes, chunk);
                }
                Err(error) => prop_assert!(!contiguous, "{error}"),
            }
        }
    }
}
