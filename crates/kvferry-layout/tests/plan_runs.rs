//! Plans have as few runs as their contract allows.
//!
//! The contract: a run is a box over some axes inside a block, the largest that is one stretch of bytes with one
//! order of elements on both sides; neighbours in the id lists (both ids one up, or both one down) whose boxes
//! join become one segment; a joined segment may make a larger box. Counted here by trying every set of axes on
//! the oracle's addresses.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::pairs::{Case, case};
use common::{Dims, Form, Made, cases, ids};
use kvferry_layout::{
    Axis, BlockDim, BlockId, CopyPlan, Dtype, KvOrder, LayoutKind, PairPlan, PairRequest, View,
};
use proptest::prelude::*;

type Address = (usize, usize);

/// Source and destination place of an element.
type Move = (Address, Address);

/// The block moves of a case in pages of the finer side.
struct Moves<'a> {
    case: &'a Case,
    pairs: Vec<(u64, u64)>,
    page: u64,
    extents: [u64; 5],
}

impl<'a> Moves<'a> {
    fn new(case: &'a Case) -> Moves<'a> {
        let (src_page, dst_page) = (case.src.oracle.page_size(), case.dst.oracle.page_size());
        let page = src_page.min(dst_page);
        let fine = |list: &[BlockId], parts: u64| -> Vec<u64> {
            list.iter().flat_map(|id| (0..parts).map(move |part| u64::from(id.0) * parts + part)).collect()
        };
        let src = fine(&case.src_ids, src_page / page);
        let dst = fine(&case.dst_ids, dst_page / page);
        let config = case.src.layout.config();
        let len = |range: &std::ops::Range<u64>| range.end - range.start;
        let extents = [len(&case.layers), config.outer_dim(), page, len(&case.heads), config.head_dim()];
        Moves { case, pairs: src.into_iter().zip(dst).collect(), page, extents }
    }

    /// Where element `at` (layer, outer, page, head, dim from the start of what is moved) of pair `index` moves.
    fn element(&self, index: usize, [layer, outer, page, head, dim]: [u64; 5]) -> Move {
        let side = |made: &Made, id: u64| {
            let parts = made.oracle.page_size() / self.page;
            let token = id % parts * self.page + page;
            let head = self.case.heads.start + head - made.oracle.heads().start;
            made.oracle.element(id / parts, self.case.layers.start + layer, outer, token, head, dim)
        };
        let (src, dst) = self.pairs[index];
        (side(&self.case.src, src), side(&self.case.dst, dst))
    }

    /// Every element of pair `index` on the axes of the set `axes`, 0 on the others.
    fn elements(&self, index: usize, axes: usize) -> Vec<Move> {
        let mut all = vec![[0u64; 5]];
        for axis in (0..5).filter(|axis| axes & (1 << axis) != 0) {
            all = all
                .into_iter()
                .flat_map(|at| {
                    (0..self.extents[axis]).map(move |value| {
                        let mut at = at;
                        at[axis] = value;
                        at
                    })
                })
                .collect();
        }
        all.into_iter().map(|at| self.element(index, at)).collect()
    }

    fn width(&self) -> usize {
        self.case.src.oracle.elem_bytes()
    }

    /// Whether these elements, in source order, are one stretch on both sides.
    fn one_run(&self, mut moves: Vec<Move>) -> bool {
        moves.sort_unstable();
        moves.windows(2).all(|w| follows(w[0], w[1], self.width()))
    }

    /// The set of axes with the largest box that is one run over all of `group`.
    fn largest_box(&self, group: &[usize]) -> (usize, u64) {
        (0..32)
            .filter(|&axes| self.one_run(group.iter().flat_map(|&i| self.elements(i, axes)).collect()))
            .map(|axes| (axes, (0..5).filter(|a| axes & (1 << a) != 0).map(|a| self.extents[a]).product()))
            .max_by_key(|&(_, size)| size)
            .expect("one element is a run")
    }

    /// The number of runs that the contract promises.
    fn promised(&self) -> u64 {
        if self.pairs.is_empty() {
            return 0;
        }
        let (axes, _) = self.largest_box(&[0]);
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for index in 0..self.pairs.len() {
            let (src, dst) = self.pairs[index];
            let joins = |low: usize, high: usize| {
                self.one_run([self.elements(low, axes), self.elements(high, axes)].concat())
            };
            if let Some(group) = groups.last_mut() {
                let (top, bottom) = (group[group.len() - 1], group[0]);
                if self.pairs[top] == (src.wrapping_sub(1), dst.wrapping_sub(1)) && joins(top, index) {
                    group.push(index);
                    continue;
                }
                if self.pairs[bottom] == (src + 1, dst + 1) && joins(index, bottom) {
                    group.insert(0, index);
                    continue;
                }
            }
            groups.push(vec![index]);
        }
        let block: u64 = self.extents.iter().product();
        groups.iter().map(|group| block / self.largest_box(group).1).sum()
    }

    /// The fewest copies there can be at all: breaks in destination order where either side jumps.
    fn fewest(&self) -> u64 {
        let mut moves: Vec<Move> = (0..self.pairs.len()).flat_map(|i| self.elements(i, 31)).collect();
        moves.sort_unstable_by_key(|&(_, dst)| dst);
        let joints = moves.windows(2).filter(|w| follows(w[0], w[1], self.width())).count();
        (moves.len() - joints) as u64
    }
}

fn follows(a: Move, b: Move, width: usize) -> bool {
    b.0 == (a.0.0, a.0.1 + width) && b.1 == (a.1.0, a.1.1 + width)
}

proptest! {
    #![proptest_config(cases(12_000))]

    #[test]
    fn as_few_as_promised(case in case(4)) {
        let plan = case.plan();
        let moves = Moves::new(&case);
        let runs = plan.runs().count() as u64;
        prop_assert_eq!(runs, moves.promised());
        prop_assert!(runs >= moves.fewest());
    }

    /// Without an order change, and with the block axis outside all others, the promise is the minimum.
    #[test]
    fn as_few_as_possible_for_rising_ids(mut case in case(4)) {
        if !case.regular {
            return Ok(());
        }
        let mut pairs: Vec<_> = case.dst_ids.iter().copied().zip(case.src_ids.iter().copied()).collect();
        pairs.sort_unstable();
        (case.dst_ids, case.src_ids) = pairs.into_iter().unzip();
        let plan = case.plan();
        let outermost = |view: &View| {
            let inside = |axis| view.region_stride(axis) == 0 && view.extent(axis) > 1;
            let block = view.stride(Axis::Block);
            !inside(Axis::Block) || Axis::IN_BLOCK.into_iter().all(|axis| !inside(axis) || view.stride(axis) < block)
        };
        if plan.pair().transforms() || !outermost(plan.pair().src()) || !outermost(plan.pair().dst()) {
            return Ok(());
        }
        prop_assert_eq!(plan.runs().count() as u64, Moves::new(&case).fewest());
    }
}

/// Blocks 0..n of one cache to another in every id order: how many runs each takes.
#[test]
fn rising_and_falling_ids_join_and_shuffled_ones_do_not() {
    let dims = Dims { blocks: 6, layers: 2, outer: 2, page: 3, heads: 2, dim: 5, dtype: Dtype::Float16 };
    let made = Made::new(dims.config(1), &Form::Own(LayoutKind::FullyContiguous { order: KvOrder::Nhd }));
    let pair =
        std::sync::Arc::new(PairPlan::new(&made.layout, &made.layout, &PairRequest::default()).unwrap());
    let runs = |src: &[u64], dst: &[u64]| {
        CopyPlan::new(pair.clone(), &ids(src.iter().copied()), &ids(dst.iter().copied()))
            .unwrap()
            .runs()
            .count()
    };
    assert_eq!(runs(&[0, 1, 2, 3, 4, 5], &[0, 1, 2, 3, 4, 5]), 1);
    assert_eq!(runs(&[5, 4, 3, 2], &[4, 3, 2, 1]), 1);
    assert_eq!(runs(&[2, 3, 1, 4], &[2, 3, 1, 4]), 1, "a segment grows at both ends");
    assert_eq!(runs(&[0, 1, 2], &[2, 1, 0]), 3);
    assert_eq!(runs(&[0, 2, 4], &[0, 1, 2]), 3);
    assert_eq!(runs(&[0, 0, 1], &[0, 1, 2]), 2);
    assert_eq!(runs(&[0, 2, 1, 3], &[0, 2, 1, 3]), 2, "2 and 1 join, then 3 follows 2");
    assert_eq!(runs(&[], &[]), 0);
}

/// Loops that are one loop on both sides are fused; loops over regions come first, then falling destination strides.
#[test]
fn loops_are_few_and_in_order() {
    use kvferry_layout::KvOrder::{Hnd, Nhd, Universal};
    let dims = Dims { blocks: 3, layers: 4, outer: 2, page: 3, heads: 2, dim: 5, dtype: Dtype::Int8 };
    let fc = |order| LayoutKind::FullyContiguous { order };
    let lw = |block_dim| LayoutKind::LayerSeparate { block_dim, order: Nhd };
    let table: [(LayoutKind, LayoutKind, &[u64], u64); 7] = [
        (fc(Nhd), fc(Nhd), &[], 240),
        (fc(Nhd), fc(Hnd), &[8, 2, 3], 5),
        (fc(Nhd), lw(BlockDim::BlockFirst), &[4], 60),
        (fc(Nhd), lw(BlockDim::OuterFirst), &[4, 2], 30),
        (fc(Nhd), LayoutKind::SplitKv { order: Nhd }, &[8], 30),
        (fc(Universal), lw(BlockDim::BlockFirst), &[4, 6, 2], 5),
        (fc(Universal), LayoutKind::SplitKv { order: Hnd }, &[8, 2], 15),
    ];
    for (src, dst, counts, run) in table {
        let [a, b] = [src, dst].map(|kind| Made::new(dims.config(1), &Form::Own(kind)).layout);
        let pair = PairPlan::new(&a, &b, &PairRequest::default()).unwrap();
        let got: Vec<u64> = pair.loops().iter().map(|l| l.count).collect();
        assert_eq!((&got[..], pair.run_bytes()), (counts, run), "{src:?} to {dst:?}");
    }
}

/// What the contract leaves out: two layouts re-addressed in parts that do not tile their blocks join the parts of a
/// block into one run, but not one block with the next.
#[test]
fn parts_join_up_to_their_block() {
    let dims = Dims { blocks: 2, layers: 1, outer: 1, page: 4, heads: 2, dim: 5, dtype: Dtype::Int8 };
    let made = Made::new(dims.config(1), &Form::Own(LayoutKind::FullyContiguous { order: KvOrder::Hnd }));
    let runs = |made: &Made, list| {
        let pair = PairPlan::new(&made.layout, &made.layout, &PairRequest::default()).unwrap();
        let list: Vec<_> = ids(list);
        CopyPlan::new(pair.into(), &list, &list).unwrap().runs().count()
    };
    assert_eq!(runs(&made, 0..2), 1);
    assert_eq!(runs(&made.with_page_size(2), 0..4), 2);
    assert_eq!(runs(&made.with_page_size(2), 1..3), 4);
}
