//! A pair in two hops through packed staging blocks moves exactly what the pair itself moves.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::cases;
use common::pairs::{Case, case};
use kvferry_layout::oracle;
use kvferry_layout::{Axis, BlockId, CopyPlan, Side};
use proptest::prelude::*;

fn execute(plan: &CopyPlan, src: &[Vec<u8>], dst: &mut [Vec<u8>]) {
    for run in plan.runs() {
        let (from, to, bytes) = (run.src.offset as usize, run.dst.offset as usize, run.bytes as usize);
        let read = &src[run.src.region as usize][from..from + bytes];
        dst[run.dst.region as usize][to..to + bytes].copy_from_slice(read);
    }
}

/// Both hops for all ids, `group` at a time as a ring would take them.
fn check(case: &Case, side: Side, group: usize) -> Result<(), TestCaseError> {
    let plan = case.plan();
    let pair = plan.pair();
    let mut src = case.src.oracle.alloc();
    oracle::poison(&mut src);
    case.src.oracle.fill_unique(&mut src, 0x5EED);
    let mut expected = case.dst.oracle.alloc();
    oracle::poison(&mut expected);
    let mut found = expected.clone();
    let (from, to) = (&case.src.oracle, &case.dst.oracle);
    let (layers, heads) = (case.layers.clone(), case.heads.clone());
    oracle::copy(from, &src, to, &mut expected, &case.src_ids, &case.dst_ids, layers, heads);

    let (first, second) = pair.through_stage(side, group as u64).unwrap();
    let stage_bytes = group as u64 * pair.block_bytes();
    prop_assert_eq!(first.dst().region_span(), stage_bytes);
    prop_assert_eq!((first.block_bytes(), second.block_bytes()), (pair.block_bytes(), pair.block_bytes()));
    prop_assert_eq!(second.src().extent(Axis::Block), group as u64);
    // The hop next to `side` has the runs that this side alone allows.
    let near = if side == Side::Source { &first } else { &second };
    prop_assert_eq!(near.run_bytes(), pair.run_bytes_of(side));
    prop_assert!(near.run_bytes() >= pair.run_bytes());
    let (first, second) = (Arc::new(first), Arc::new(second));
    let each = |start: fn(&kvferry_layout::Segment) -> u32| -> Vec<BlockId> {
        plan.segments().flat_map(|s| (start(&s)..start(&s) + s.count).map(BlockId)).collect()
    };
    let (src_ids, dst_ids) = (each(|s| s.src), each(|s| s.dst));
    let mut stage = vec![vec![0xEE; stage_bytes as usize]];
    for (from, to) in src_ids.chunks(group).zip(dst_ids.chunks(group)) {
        stage[0].fill(0xEE);
        let slots: Vec<BlockId> = (0..from.len() as u32).map(BlockId).collect();
        execute(&CopyPlan::new(first.clone(), from, &slots).unwrap(), &src, &mut stage);
        execute(&CopyPlan::new(second.clone(), &slots, to).unwrap(), &stage, &mut found);
    }
    prop_assert!(found == expected, "wrong bytes through {side:?}'s stage of {group}");
    Ok(())
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn two_hops_are_one_copy(case in case(6), from_source: bool, group in 1usize..5) {
        check(&case, if from_source { Side::Source } else { Side::Destination }, group)?;
    }
}
