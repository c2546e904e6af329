//! Regions of one layout that share bytes, against byte sets.
#![allow(clippy::unwrap_used, reason = "a test may fail loudly")]

use kvferry_layout::{Axis, Dtype, Layout, LayoutConfig, PerAxis, RegionSpan};
use proptest::prelude::*;
use std::collections::HashSet;

/// A layer-per-region layout with padded strides in any axis order, two layers.
fn layout(extents: [u64; 4], pads: [u64; 5], order: &[Axis], parts: bool) -> Layout {
    let config = LayoutConfig::builder()
        .num_blocks(extents[0])
        .num_layers(2)
        .outer_dim(1 + extents[3] % 2)
        .page_size(extents[1] * 2)
        .num_heads(extents[2])
        .head_dim(2)
        .dtype(Dtype::Float16)
        .build()
        .unwrap();
    let mut strides = PerAxis::splat(0);
    let mut step = 2;
    for (&axis, pad) in order.iter().zip(pads) {
        strides[axis] = step;
        step = step * config.extents()[axis] + pad;
    }
    let mut listed = vec![Axis::Layer];
    listed.extend(order.iter().rev());
    let order: [Axis; 6] = listed.try_into().unwrap();
    let layout = Layout::strided(config, order, strides, &[Axis::Layer]).unwrap();
    if parts { layout.with_page_size(extents[1]).unwrap() } else { layout }
}

fn bytes(layout: &Layout, base: u64) -> HashSet<u64> {
    let c = layout.config();
    let mut out = HashSet::new();
    let mut at = PerAxis::splat(0);
    for b in 0..c.num_blocks() {
        for o in 0..c.outer_dim() {
            for p in 0..c.page_size() {
                for h in 0..c.num_heads() {
                    for d in 0..c.head_dim() {
                        for (axis, value) in [
                            (Axis::Block, b),
                            (Axis::Outer, o),
                            (Axis::Page, p),
                            (Axis::Head, h),
                            (Axis::Dim, d),
                        ] {
                            at[axis] = value;
                        }
                        let place = layout.view().place(at).unwrap();
                        out.extend((0..2).map(|byte| base + place.offset + byte));
                    }
                }
            }
        }
    }
    out
}

proptest! {
    #[test]
    fn aliasing_is_found_exactly(
        extents in [1u64..4, 1u64..4, 1u64..4, 0u64..2],
        pads in [0u64..9, 0u64..9, 0u64..30, 0u64..30, 0u64..30],
        order in Just(vec![Axis::Dim, Axis::Head, Axis::Page, Axis::Outer, Axis::Block]).prop_shuffle(),
        delta in 0u64..400,
        parts: bool,
        swap: bool,
    ) {
        let layout = layout(extents, pads, &order, parts);
        let len = layout.region_bytes();
        let (a, b) = if swap { (5000 + delta, 5000) } else { (5000, 5000 + delta) };
        let shared = !bytes(&layout, a).is_disjoint(&bytes(&layout, b));
        let spans = [RegionSpan { addr: a, len }, RegionSpan { addr: b, len }];
        prop_assert_eq!(layout.aliased_regions(&spans).is_some(), shared);
    }
}

#[test]
fn a_tensor_given_for_two_layers_is_named_and_interleaved_kv_is_not() {
    let layout =
        layout([3, 2, 2, 0], [0; 5], &[Axis::Dim, Axis::Head, Axis::Page, Axis::Outer, Axis::Block], false);
    let len = layout.region_bytes();
    assert_eq!(layout.aliased_regions(&[RegionSpan { addr: 64, len }; 2]), Some((0, 1)));
    // [blocks, 2, page, heads, dim]: K and V as two strided halves of one allocation.
    let chunk = layout.view().stride(Axis::Block);
    let config = *layout.config();
    let mut strides = PerAxis::from_fn(|axis| layout.view().stride(axis));
    strides[Axis::Block] = 2 * chunk;
    let interleaved = Layout::strided(config, layout.view().order(), strides, &[Axis::Layer]).unwrap();
    let len = interleaved.region_bytes();
    assert_eq!(
        interleaved.aliased_regions(&[RegionSpan { addr: 0, len }, RegionSpan { addr: chunk, len }]),
        None
    );
    assert_eq!(
        interleaved.aliased_regions(&[RegionSpan { addr: 0, len }, RegionSpan { addr: chunk - 1, len }]),
        Some((0, 1))
    );
}
