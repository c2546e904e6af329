//! Long and short lists of ids: what a plan holds is what it was given, and what is wrong is named.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::cases;
use kvferry_layout::{
    BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest, PlanError, Side,
};
use proptest::prelude::*;
use proptest::sample::Index;

const BLOCKS: u32 = 1 << 14;

/// Blocks that join where they are neighbours on both sides.
fn fc_to_fc() -> Arc<PairPlan> {
    let cfg = LayoutConfig::builder().num_blocks(BLOCKS.into()).num_layers(1).outer_dim(1).page_size(1);
    let fc = Layout::fully_contiguous(cfg.inner_dim(4).dtype(Dtype::UInt8).build().unwrap(), KvOrder::Nhd)
        .unwrap();
    Arc::new(PairPlan::new(&fc, &fc, &PairRequest::default()).unwrap())
}

fn words(src: &[BlockId], dst: &[BlockId]) -> Vec<u64> {
    src.iter().zip(dst).map(|(s, d)| u64::from(s.0) | u64::from(d.0) << 32).collect()
}

/// Pairs of a plan as sets: a falling segment comes in rising order.
fn sorted(mut words: Vec<u64>) -> Vec<u64> {
    words.sort_unstable();
    words
}

/// A list without ids given twice, in pieces of `piece` neighbours, rising or falling.
fn list(len: usize, stride: u32, seed: u32, piece: u32) -> Vec<BlockId> {
    let id = |at: u32| {
        let (group, inside) = (at / piece, at % piece);
        let inside = if group % 3 == 1 { piece - 1 - inside } else { inside };
        let groups = BLOCKS / piece;
        group.wrapping_mul(2 * stride + 1).wrapping_add(seed) % groups * piece + inside
    };
    (0..len as u32).map(|at| BlockId(id(at))).collect()
}

/// Lengths on both sides of where lists are packed in one pass.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![0_usize..40, 1000_usize..1100, 2000_usize..5000]
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn a_plan_holds_what_it_was_given(
        len in lengths(),
        strides in (any::<u16>(), any::<u16>()),
        seed in any::<u32>(),
        piece in prop_oneof![Just(1_u32), Just(2), Just(16)],
        (first, room) in (0_u32..6000, 0_usize..6000),
    ) {
        let (src, dst) = (list(len, strides.0.into(), seed, piece), list(len, strides.1.into(), 7, piece));
        let plan = CopyPlan::new(fc_to_fc(), &src, &dst).unwrap();
        prop_assert_eq!(plan.blocks() as usize, len);
        let mut all = vec![u64::MAX; len + 3];
        plan.pack(0, &mut all);
        prop_assert_eq!(&all[len..], &[u64::MAX; 3]);
        all.truncate(len);
        prop_assert_eq!(sorted(all.clone()), sorted(words(&src, &dst)));
        // Any window of it.
        let mut window = vec![u64::MAX; room];
        plan.pack(first, &mut window);
        let there = all.get(first as usize..).unwrap_or_default();
        let filled = there.len().min(room);
        prop_assert_eq!(&window[..filled], &there[..filled]);
        prop_assert!(window[filled..].iter().all(|&word| word == u64::MAX));
        // Segments, one after the other.
        prop_assert_eq!(plan.segments().len(), plan.num_segments());
        let mut before = 0;
        for (index, segment) in plan.segments().enumerate() {
            prop_assert_eq!((segment.before, plan.segment(index)), (before, segment));
            for block in before..before + segment.count {
                prop_assert_eq!(plan.segment_of(block), index);
                let at = block - before;
                let word = u64::from(segment.src + at) | u64::from(segment.dst + at) << 32;
                prop_assert_eq!(all[block as usize], word);
            }
            before += segment.count;
        }
        prop_assert_eq!(before, plan.blocks());
        prop_assert_eq!(plan.segment_of(before), plan.num_segments());
        if piece == 1 && len == 0 {
            prop_assert_eq!(plan.num_segments(), 0);
        }
    }

    #[test]
    fn what_is_wrong_with_a_list_is_named(
        len in prop_oneof![2_usize..40, 1000_usize..3000],
        stride in any::<u16>(),
        at in any::<Index>(),
        from in any::<Index>(),
        beyond in BLOCKS..=u32::MAX,
    ) {
        let good = list(len, stride.into(), 1, 1);
        let (at, from) = (at.index(len), from.index(len));
        let mut bad = good.clone();
        bad[at] = BlockId(beyond);
        for (side, src, dst) in [(Side::Source, &bad, &good), (Side::Destination, &good, &bad)] {
            let (value, limit) = (beyond.into(), BLOCKS.into());
            let expected = PlanError::BlockId { side, index: at, value, limit };
            prop_assert_eq!(CopyPlan::new(fc_to_fc(), src, dst).unwrap_err(), expected);
        }
        if at != from {
            let mut twice = good.clone();
            twice[at] = good[from];
            let (first, second) = (at.min(from), at.max(from));
            let expected = PlanError::DuplicateDestination { value: good[from].0, first, second };
            prop_assert_eq!(CopyPlan::new(fc_to_fc(), &good, &twice).unwrap_err(), expected);
            // One source for two destinations is legal.
            let plan = CopyPlan::new(fc_to_fc(), &twice, &good).unwrap();
            let mut all = vec![0; len];
            plan.pack(0, &mut all);
            prop_assert_eq!(sorted(all), sorted(words(&twice, &good)));
        }
    }
}
