//! Carrying out a plan's runs gives exactly the oracle's bytes, padding and guards included.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::cases;
use common::pairs::{Case, case};
use kvferry_layout::CopyPlan;
use kvferry_layout::oracle::{self, OracleLayout};
use proptest::prelude::*;

/// Bytes behind every region that nobody may touch.
const GUARD: usize = 64;

fn guarded(layout: &OracleLayout) -> Vec<Vec<u8>> {
    let mut mem = layout.alloc();
    for region in &mut mem {
        region.resize(region.len() + GUARD, 0);
    }
    oracle::poison(&mut mem);
    mem
}

/// Executes `plan` with slice copies; every destination byte at most once, every run inside its regions.
fn execute(plan: &CopyPlan, case: &Case, src: &[Vec<u8>], dst: &mut [Vec<u8>]) {
    let mut written: Vec<Vec<bool>> = dst.iter().map(|region| vec![false; region.len()]).collect();
    let (src_len, dst_len) = (case.src.oracle.region_bytes(), case.dst.oracle.region_bytes());
    let mut total = 0;
    for run in plan.runs() {
        assert!(run.bytes > 0);
        let bytes = run.bytes as usize;
        let (from, to) = (run.src.offset as usize, run.dst.offset as usize);
        assert!(from + bytes <= src_len && to + bytes <= dst_len, "{run:?} leaves its region");
        for flag in &mut written[run.dst.region as usize][to..to + bytes] {
            assert!(!*flag, "{run:?} writes a byte again");
            *flag = true;
        }
        dst[run.dst.region as usize][to..to + bytes]
            .copy_from_slice(&src[run.src.region as usize][from..from + bytes]);
        total += run.bytes;
    }
    assert_eq!(total, plan.bytes());
}

fn check(case: &Case) {
    let mut src = guarded(&case.src.oracle);
    case.src.oracle.fill_unique(&mut src, 0x5EED);
    let mut expected = guarded(&case.dst.oracle);
    oracle::copy(
        &case.src.oracle,
        &src,
        &case.dst.oracle,
        &mut expected,
        &case.src_ids,
        &case.dst_ids,
        case.layers.clone(),
        case.heads.clone(),
    );
    let plan = case.plan();
    let mut got = guarded(&case.dst.oracle);
    execute(&plan, case, &src, &mut got);
    assert_eq!(got, expected);
    counts(&plan, case);
}

/// Every number a plan tells about itself.
fn counts(plan: &CopyPlan, case: &Case) {
    let pair = plan.pair();
    let runs: Vec<u64> = plan.runs().map(|run| run.bytes).collect();
    let stats = plan.stats();
    assert_eq!(stats.runs, runs.len() as u64);
    assert_eq!(stats.bytes, plan.bytes());
    assert_eq!(stats.shortest_run, runs.iter().copied().min().unwrap_or(0));
    assert_eq!(stats.longest_run, runs.iter().copied().max().unwrap_or(0));
    assert!(stats.elementary_runs >= stats.runs);
    assert_eq!(stats.blocks, u64::from(plan.blocks()));
    assert_eq!(plan.blocks(), plan.segments().map(|s| s.count).sum::<u32>());
    let mut before = 0;
    for segment in plan.segments() {
        assert_eq!(segment.before, before);
        before += segment.count;
    }
    let page = case.src.oracle.page_size().min(case.dst.oracle.page_size());
    assert_eq!(u64::from(plan.blocks()) * page, case.src_ids.len() as u64 * case.src.oracle.page_size());
    assert_eq!(pair.runs_per_block() * pair.run_bytes(), pair.block_bytes());
    assert_eq!(pair.whole_block(), pair.runs_per_block() == 1);
    let first_inside = pair.loops().iter().position(|l| l.within_regions()).unwrap_or(pair.loops().len());
    assert!(pair.loops()[first_inside..].iter().all(|l| l.within_regions()), "region loops come first");
}

proptest! {
    #![proptest_config(cases(40_000))]

    #[test]
    fn runs_move_what_the_oracle_moves(case in case(4)) {
        check(&case);
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn runs_move_what_the_oracle_moves_in_larger_caches(case in case(7)) {
        check(&case);
    }
}
