//! What layouts, views and regions refuse, with exact fields.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use kvferry_layout::{
    Axis, BlockDim, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig, LayoutError, LayoutKind, PerAxis,
    RegionSpan, View,
};

const MAX: u64 = i64::MAX as u64;

type Axes<'a> = &'a mut PerAxis<u64>;

fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .page_size(3)
        .num_heads(2)
        .head_dim(5)
        .dtype(Dtype::Float16)
        .alignment(64)
        .build()
        .unwrap()
}

#[test]
fn kinds_that_cannot_hold_an_order() {
    let order = KvOrder::Universal;
    let error = |kind| Err(LayoutError::OrderNotAllowed { kind, order });
    for block_dim in [BlockDim::BlockFirst, BlockDim::OuterFirst] {
        assert_eq!(Layout::layer_separate(config(), block_dim, order), error("LayerSeparate"));
    }
    assert_eq!(Layout::split_kv(config(), order), error("SplitKv"));
    assert_eq!(Layout::of_kind(config(), LayoutKind::Strided), Err(LayoutError::Missing { field: "order" }));
}

#[test]
fn padding_and_parts_that_leave_63_bits() {
    let big = |blocks, dim| {
        let config = LayoutConfig::builder().num_blocks(blocks).num_layers(1).outer_dim(1).page_size(1);
        config.inner_dim(dim).dtype(Dtype::UInt8).alignment(1 << 30).build().unwrap()
    };
    let region =
        Layout::fully_contiguous(big(u32::MAX.into(), (1 << 31) - 1), KvOrder::Nhd).map(|l| l.region_bytes());
    assert_eq!(region, Ok((u64::from(u32::MAX) - 1) * (1 << 31) + (1 << 31) - 1));
    let what = "bytes of a region";
    assert_eq!(
        Layout::fully_contiguous(big((1 << 32) - 3, (1 << 31) + 1), KvOrder::Nhd),
        Err(LayoutError::Overflow { what })
    );
    let error = LayoutError::Overflow { what: "block stride" };
    assert_eq!(Layout::fully_contiguous(big(1, MAX), KvOrder::Nhd), Err(error));

    let many = big(1 << 31, 1).to_builder().page_size(4).alignment(1).build().unwrap();
    let layout = Layout::fully_contiguous(many, KvOrder::Nhd).unwrap();
    assert_eq!(
        layout.with_page_size(2),
        Err(LayoutError::Size { field: "num_blocks", value: 1 << 32, min: 1, max: (1 << 32) - 1 })
    );
    for by in [0, 3, 8] {
        let error = LayoutError::NotDivisible { what: "page_size", value: 4, by };
        assert_eq!(layout.with_page_size(by), Err(error));
    }
}

#[test]
fn views_that_are_no_views() {
    let extents = PerAxis::from_fn(|axis| if axis == Axis::Block { 4 } else { 2 });
    // dim 1, head 2, page 4, outer 8, layer 16, block 32.
    let strides = PerAxis::from_fn(|axis| 32 >> (axis as u64));
    let none = PerAxis::splat(0);
    let new = |edit: &dyn Fn(Axes<'_>, Axes<'_>, Axes<'_>)| {
        let (mut e, mut s, mut r) = (extents, strides, none);
        edit(&mut e, &mut s, &mut r);
        View::new(Axis::ALL, e, s, r, 8)
    };
    assert!(new(&|_, _, _| ()).is_ok());
    let size = |field, value, min| Err(LayoutError::Size { field, value, min, max: MAX });
    assert_eq!(new(&|e, _, _| e[Axis::Page] = 0), size("page", 0, 1));
    let overlap = |axis, stride, span| Err(LayoutError::AxesOverlap { axis, stride, span });
    assert_eq!(new(&|_, s, _| s[Axis::Outer] = 7), overlap(Axis::Outer, 7, 8));
    assert_eq!(new(&|_, s, _| s[Axis::Dim] = 0), overlap(Axis::Dim, 0, 1));
    assert_eq!(new(&|_, s, _| s[Axis::Block] = 2), overlap(Axis::Head, 2, 8));
    let overflow = |what| Err(LayoutError::Overflow { what });
    assert_eq!(new(&|_, s, _| s[Axis::Block] = 1 << 62), overflow("span of a region"));
    assert_eq!(new(&|_, s, _| s[Axis::Layer] = MAX - 1), overflow("span of a region"));

    // Region axes: found here, all of these were accepted.
    let exclusive = |left, right| Err(LayoutError::Exclusive { left, right });
    let both = exclusive("a byte stride", "a region stride of the same axis");
    assert_eq!(new(&|_, _, r| r[Axis::Layer] = 1), both);
    for axis in [Axis::Page, Axis::Head, Axis::Dim] {
        let cut = new(&|_, s, r| (s[axis], r[axis]) = (0, 1));
        assert_eq!(cut, exclusive("the axes page, head and dim", "region strides"));
    }
    let by_layer_and_outer = |layer, outer| {
        new(&move |_, s, r| {
            (s[Axis::Layer], s[Axis::Outer]) = (0, 0);
            (r[Axis::Layer], r[Axis::Outer]) = (layer, outer);
        })
    };
    assert!(by_layer_and_outer(2, 1).is_ok() && by_layer_and_outer(1, 2).is_ok());
    assert_eq!(by_layer_and_outer(1, 1), size("region stride", 1, 2));
    assert_eq!(by_layer_and_outer(2, 2), size("region stride", 2, 3));
    assert!(by_layer_and_outer(3, 2).is_ok(), "a gap is no harm");
    assert_eq!(by_layer_and_outer(u64::MAX, 1), overflow("number of regions"));

    let twice = [Axis::Block, Axis::Layer, Axis::Outer, Axis::Page, Axis::Page, Axis::Dim];
    let error = Err(LayoutError::AxisTwice { axis: Axis::Page });
    assert_eq!(View::new(twice, extents, strides, none, 8), error);
    for bits in [0, 4, 12] {
        let error = LayoutError::NotDivisible { what: "element width in bits", value: bits.into(), by: 8 };
        assert_eq!(View::new(Axis::ALL, extents, strides, none, bits), Err(error));
    }
    let view = new(&|_, _, _| ()).unwrap();
    assert_eq!(view.reorder(twice), Err(LayoutError::AxisTwice { axis: Axis::Page }));
    assert_eq!(
        view.with_origin(Axis::Head, MAX - 1),
        Err(LayoutError::Overflow { what: "global coordinate" })
    );
    assert_eq!(
        view.shard(Axis::Page, 0, 0),
        Err(LayoutError::NotDivisible { what: "page", value: 2, by: 0 })
    );
    assert_eq!(
        view.shard(Axis::Block, 0, 3),
        Err(LayoutError::NotDivisible { what: "block", value: 4, by: 3 })
    );
    let error = LayoutError::Size { field: "rank", value: 2, min: 0, max: 1 };
    assert_eq!(view.shard(Axis::Block, 2, 2), Err(error));
}

#[test]
fn ranges_and_coordinates() {
    let shard = config().shard_heads(1, 2).unwrap();
    let layout = Layout::fully_contiguous(shard, KvOrder::Nhd).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "must be refused")]
    for range in [1..1, 2..1, 0..1, 0..2, 1..3, 2..3, 1..u64::MAX] {
        let (start, end) = (range.start, range.end);
        let error = LayoutError::Range { axis: Axis::Head, start, end, first: 1, limit: 2 };
        assert_eq!(layout.view().slice(Axis::Head, range), Err(error));
    }
    for (axis, limit) in
        [(Axis::Block, 4), (Axis::Layer, 2), (Axis::Outer, 2), (Axis::Page, 3), (Axis::Head, 1)]
    {
        for value in [limit, u64::MAX] {
            let mut at = PerAxis::splat(0);
            at[axis] = value;
            assert_eq!(layout.view().place(at), Err(LayoutError::Coordinate { axis, value, limit }));
        }
    }
    let error = LayoutError::Coordinate { axis: Axis::Layer, value: 2, limit: 2 };
    assert_eq!(layout.memory_region(0, 2, 0), Err(error));
}

#[test]
fn parts_that_are_not_contiguous() {
    let layout = Layout::fully_contiguous(config(), KvOrder::Universal).unwrap();
    // Heads step over layers and outers: 2 * 2 * 3 * 5 elements; one part holds 3 * 5.
    let (block, layer, outer, axis) = (3, 1, 0, Axis::Head);
    assert_eq!(
        layout.memory_region(block, layer, outer),
        Err(LayoutError::NotContiguous { block, layer, outer, axis, stride: 120, expected: 30 })
    );
}

#[test]
fn regions_that_do_not_fit() {
    let layout = Layout::layer_separate(config(), BlockDim::BlockFirst, KvOrder::Nhd).unwrap();
    let needed = layout.region_bytes();
    let span = |addr, len| RegionSpan { addr, len };
    let check = |regions: &[RegionSpan]| layout.check_regions(regions);
    assert_eq!(check(&[span(64, needed), span(0, needed + 1)]), Ok(()));
    for got in [0, 1, 3] {
        let regions = vec![span(64, needed); got as usize];
        let error = LayoutError::RegionCount { kind: "LayerSeparate", expected: 2, got };
        assert_eq!(check(&regions), Err(error));
    }
    let error = LayoutError::RegionTooSmall { region: 1, needed, got: needed - 1 };
    assert_eq!(check(&[span(64, needed), span(64, needed - 1)]), Err(error));
    let error = LayoutError::Misaligned { region: 1, addr: 96, alignment: 64 };
    assert_eq!(check(&[span(64, needed), span(96, needed)]), Err(error));
    for (addr, len) in [(u64::MAX - 63, needed), (64, u64::MAX), (MAX - 63, needed)] {
        let error = LayoutError::Overflow { what: "end of a region" };
        assert_eq!(check(&[span(addr, len), span(64, needed)]), Err(error));
    }
}

#[test]
fn every_error_says_what_it_holds() {
    let array = ForeignArray { name: "kv".into(), shape: vec![2, 2], strides: vec![1, 2] };
    let error =
        Layout::from_arrays(&[array], &[Axis::Block, Axis::Dim], false, Dtype::Float16, None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "axis block steps 1 bytes, but the axes inside it span 2: elements would overlap"
    );
}
