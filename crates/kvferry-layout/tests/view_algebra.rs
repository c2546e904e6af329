//! Slicing, sharding, reordering, intersecting and re-paging views.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashSet;

use common::{Dice, Dims, Made, alignment, cases, dims, form};
use kvferry_layout::{Axis, KvOrder, Layout, LayoutError, PerAxis, Place, View};
use proptest::prelude::*;

/// Every local coordinate of a view.
fn coordinates(view: &View) -> Vec<PerAxis<u64>> {
    let mut all = vec![PerAxis::splat(0)];
    for axis in Axis::ALL {
        all = all
            .into_iter()
            .flat_map(|at| {
                (0..view.extent(axis)).map(move |value| {
                    let mut at = at;
                    at[axis] = value;
                    at
                })
            })
            .collect();
    }
    all
}

fn places(view: &View) -> Vec<Place> {
    coordinates(view).into_iter().map(|at| view.place(at).expect("in range")).collect()
}

/// Places with the global coordinates that lead to them.
fn global(view: &View) -> Vec<([u64; 6], Place)> {
    let origins = Axis::ALL.map(|axis| view.origin(axis));
    let name = |at: PerAxis<u64>| std::array::from_fn(|i| origins[i] + at[Axis::ALL[i]]);
    coordinates(view).into_iter().map(|at| (name(at), view.place(at).expect("in range"))).collect()
}

fn axis() -> impl Strategy<Value = Axis> {
    prop::sample::select(&Axis::ALL[..])
}

fn view(limit: u64) -> impl Strategy<Value = View> {
    (dims(limit), form(), alignment(), 0u64..9).prop_map(|(dims, form, align, first)| {
        let config =
            dims.config(align).to_builder().first_head(first).total_heads(first + dims.heads).build();
        Made::new(config.expect("shard"), &form).layout.view().clone()
    })
}

/// A slice of `view` on `axis` chosen by `seed`, in global coordinates.
fn cut(view: &View, axis: Axis, seed: u64) -> std::ops::Range<u64> {
    let inside = Dice(seed).range(view.extent(axis));
    view.origin(axis) + inside.start..view.origin(axis) + inside.end
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn a_slice_holds_exactly_its_coordinates(view in view(4), axis in axis(), seed in any::<u64>()) {
        let range = cut(&view, axis, seed);
        let sliced = view.slice(axis, range.clone()).unwrap();
        let mut expected = global(&view);
        expected.retain(|(at, _)| range.contains(&at[axis as usize]));
        prop_assert_eq!(global(&sliced), expected);
        prop_assert_eq!(sliced.range(axis), range);
    }

    #[test]
    fn a_slice_of_a_slice_is_a_slice(view in view(7), axis in axis(), seed in any::<[u64; 2]>()) {
        let outer = view.slice(axis, cut(&view, axis, seed[0])).unwrap();
        let range = cut(&outer, axis, seed[1]);
        prop_assert_eq!(outer.slice(axis, range.clone()).unwrap(), view.slice(axis, range).unwrap());
    }

    #[test]
    fn slices_of_two_axes_commute(view in view(7), axes in [axis(), axis()], seed in any::<[u64; 2]>()) {
        if axes[0] == axes[1] {
            return Ok(());
        }
        let (a, b) = (cut(&view, axes[0], seed[0]), cut(&view, axes[1], seed[1]));
        let one = view.slice(axes[0], a.clone()).unwrap().slice(axes[1], b.clone()).unwrap();
        prop_assert_eq!(one, view.slice(axes[1], b).unwrap().slice(axes[0], a).unwrap());
    }

    #[test]
    fn shards_partition(view in view(4), axis in axis(), pick in any::<u64>()) {
        let extent = view.extent(axis);
        let worlds: Vec<u64> = (1..=extent).filter(|&world| extent.is_multiple_of(world)).collect();
        let world = worlds[(pick % worlds.len() as u64) as usize];
        let shards: Vec<View> = (0..world).map(|rank| view.shard(axis, rank, world).unwrap()).collect();
        let parts: Vec<([u64; 6], Place)> = shards.iter().flat_map(global).collect();
        let whole: HashSet<([u64; 6], Place)> = global(&view).into_iter().collect();
        prop_assert_eq!(parts.len(), whole.len());
        prop_assert_eq!(parts.into_iter().collect::<HashSet<_>>(), whole);
        prop_assert!(shards.windows(2).all(|w| w[0].range(axis).end == w[1].range(axis).start));
    }

    #[test]
    fn reordering_moves_nothing(view in view(4), seed in any::<u64>()) {
        let mut order = Axis::ALL;
        Dice(seed).shuffle(&mut order);
        let other = view.reorder(order).unwrap();
        prop_assert_eq!(places(&other), places(&view));
        prop_assert_eq!(other.order(), order);
        prop_assert!(!view.order_differs(&other));
    }

    /// Against sets of global coordinates; blocks are paired by ids and not intersected.
    #[test]
    fn intersection_is_that_of_the_coordinates(
        views in [view(3), view(3)], axes in [axis(), axis()], seed in any::<[u64; 2]>(),
    ) {
        let [a, b] = [0, 1].map(|i| views[i].slice(axes[i], cut(&views[i], axes[i], seed[i])).unwrap());
        let inside = |view: &View| -> HashSet<[u64; 5]> {
            global(view).into_iter().map(|(at, _)| std::array::from_fn(|i| at[i + 1])).collect()
        };
        let (left, right) = (inside(&a), inside(&b));
        let expected: HashSet<[u64; 5]> = left.intersection(&right).copied().collect();
        match a.intersect(&b).unwrap() {
            None => prop_assert!(expected.is_empty()),
            Some((x, y)) => {
                prop_assert_eq!(&inside(&x), &expected);
                prop_assert_eq!(&inside(&y), &expected);
                let of_a: HashSet<_> = global(&a).into_iter().collect();
                prop_assert!(global(&x).into_iter().all(|at| of_a.contains(&at)));
                prop_assert_eq!(b.intersect(&a).unwrap(), Some((y, x)));
            }
        }
    }

    /// Page `p` of fine block `id` is token `id % parts * page + p` of block `id / parts`, however often it is split.
    #[test]
    fn smaller_pages_are_the_same_memory(
        dims in dims(3), split in [1u64..=3, 1u64..=3], form in form(), alignment in alignment(),
    ) {
        let parts = split[0] * split[1];
        let made = Made::new(Dims { page: dims.page * parts, ..dims }.config(alignment), &form);
        let whole = made.layout.view();
        let once = whole.with_page_size(dims.page).unwrap();
        let twice = whole.with_page_size(dims.page * split[1]).unwrap().with_page_size(dims.page).unwrap();
        prop_assert_eq!(&once, &twice);
        prop_assert_eq!(once.extent(Axis::Block), dims.blocks * parts);
        for at in coordinates(&once) {
            let mut coarse = at;
            coarse[Axis::Block] = at[Axis::Block] / parts;
            coarse[Axis::Page] = at[Axis::Block] % parts * dims.page + at[Axis::Page];
            prop_assert_eq!(once.place(at).unwrap(), whole.place(coarse).unwrap());
        }
        prop_assert_eq!(made.layout.with_page_size(dims.page).unwrap().region_bytes(), whole.region_span());
    }

    /// The span is tight, also of slices that cut a group of parts.
    #[test]
    fn spans_end_with_the_last_element(view in view(3), split in 1u64..=3, seed in any::<u64>(), axis in axis()) {
        let mut view = view;
        let page = view.extent(Axis::Page);
        if page.is_multiple_of(split) {
            view = view.with_page_size(page / split).unwrap();
        }
        let mut range = cut(&view, axis, seed);
        if axis == Axis::Block {
            let parts = view.block_step().parts;
            range.start -= range.start % parts;
        }
        let sliced = view.slice(axis, range).unwrap();
        let last = places(&sliced).into_iter().map(|place| place.offset + view.elem_bytes()).max().unwrap();
        prop_assert_eq!(sliced.region_span(), last);
    }
}

fn example() -> Layout {
    let dims = Dims {
        blocks: 3,
        layers: 2,
        outer: 2,
        page: 8,
        heads: 2,
        dim: 4,
        dtype: kvferry_layout::Dtype::Float16,
    };
    Layout::fully_contiguous(dims.config(1), KvOrder::Hnd).unwrap()
}

/// Found here: the origin of the block axis stayed in coarse blocks, and a page origin survived the split.
#[test]
fn split_slices_count_in_the_new_pages() {
    let view = example().view().slice(Axis::Block, 1..3).unwrap().slice(Axis::Page, 4..8).unwrap();
    let split = view.with_page_size(2).unwrap();
    assert_eq!(split.range(Axis::Block), 2..6);
    assert_eq!(split.range(Axis::Page), 0..2);
    assert_eq!(split.start(), view.start());
}

/// Found here: a group of parts cut short counted as whole.
#[test]
fn a_group_cut_short_ends_early() {
    let fine = example().view().with_page_size(2).unwrap();
    let one = fine.slice(Axis::Block, 0..1).unwrap();
    // Layers 2 x outer 2 x heads 2 x 8 tokens of 8 bytes; the last head row of page 0 ends 6 tokens early.
    assert_eq!(one.region_span(), 2 * 2 * 2 * 8 * 8 - 6 * 8);
    assert_eq!(
        fine.slice(Axis::Block, 2..4),
        Err(LayoutError::NotDivisible { what: "first block", value: 2, by: 4 })
    );
}

#[test]
fn a_view_re_paged_to_its_own_page_is_itself() {
    let layout = example();
    assert_eq!(layout.with_page_size(8), Ok(layout.clone()));
    let cut = layout.view().with_page_size(4).unwrap().slice(Axis::Page, 1..3).unwrap();
    assert_eq!(cut.with_page_size(2), Ok(cut.clone()));
    // Its parts are no longer whole pages.
    let error = LayoutError::NotDivisible { what: "page_size of a sliced page", value: 2, by: 1 };
    assert_eq!(cut.with_page_size(1), Err(error));
}

#[test]
fn orders_differ_only_where_bytes_do() {
    let view =
        |order, page, kind: fn(kvferry_layout::LayoutConfig, KvOrder) -> Result<Layout, LayoutError>| {
            let dims = Dims {
                blocks: 3,
                layers: 2,
                outer: 2,
                page,
                heads: 3,
                dim: 4,
                dtype: kvferry_layout::Dtype::Int8,
            };
            kind(dims.config(1), order).unwrap().view().clone()
        };
    let (nhd, hnd) =
        (view(KvOrder::Nhd, 4, Layout::fully_contiguous), view(KvOrder::Hnd, 4, Layout::fully_contiguous));
    assert!(nhd.order_differs(&hnd) && hnd.order_differs(&nhd) && !nhd.order_differs(&nhd));
    assert!(!view(KvOrder::Nhd, 1, Layout::fully_contiguous).order_differs(&view(
        KvOrder::Hnd,
        1,
        Layout::block_pool
    )));
    // Regions have no order against strides: layers outside or inside, the block's rows come alike.
    assert!(!nhd.order_differs(&view(KvOrder::Nhd, 4, Layout::split_kv)));
    let universal = view(KvOrder::Universal, 4, Layout::fully_contiguous);
    assert!(universal.order_differs(&hnd));
    assert!(!universal.order_differs(&view(KvOrder::Hnd, 4, Layout::split_kv)));
}
