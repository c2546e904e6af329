//! The bodies of `strided_copy.cuh`: every byte of every run is stored once, nothing else is touched.

use kvferry_kernels::{Divisor, StridedHeader, StridedLoop, StridedMode, StridedReport, StridedSide, Walk};
use proptest::prelude::*;
use zerocopy::FromBytes;

use crate::copy_case::any_order;
use crate::ffi::Order;
use crate::strided_any::any_case;
use crate::strided_case::{IdSource, SidePlan, StridedCase};

const ORDERS: [Order; 3] = [Order::Forward, Order::Reversed, Order::Random(7)];
const MODES: [StridedMode; 2] = [StridedMode::Tile, StridedMode::Word];

/// As the library launches it, or in the other mode.
fn launched(
    case: &StridedCase,
    mode: Option<StridedMode>,
    sms: u32,
    max_ctas: u32,
    order: Order,
) -> Result<(), String> {
    let mut plan = case.plan();
    if let Some(mode) = mode {
        plan = plan.with_mode(mode).unwrap();
    }
    let launch = plan.launch(case.pairs.len() as u32, case.inline_words(), sms, max_ctas).unwrap();
    case.check(&launch, order)
}

/// A tile launch with a team, a chunk and a grid of our own.
fn forced(
    case: &StridedCase,
    grid: u32,
    block: u32,
    team_shift: u32,
    chunk: u64,
    order: Order,
) -> Result<StridedReport, String> {
    let plan = case.plan().with_mode(StridedMode::Tile).unwrap();
    let mut launch = plan.launch(case.pairs.len() as u32, case.inline_words(), 4, 4).unwrap();
    (launch.geometry.grid, launch.geometry.block) = (grid, block);
    case.check_with(&launch, order, |params| {
        let (header, _) = StridedHeader::mut_from_prefix(params).unwrap();
        let inner = plan.run_bytes().div_ceil(chunk);
        let per_pair = inner * plan.runs_per_block();
        header.chunk_bytes = chunk;
        header.lane_shift = team_shift;
        header.inner = Divisor::new(inner).unwrap();
        header.per_pair = Divisor::new(per_pair).unwrap();
        header.items = u32::try_from(per_pair * case.pairs.len() as u64).unwrap();
    })
}

proptest! {
    #[test]
    fn any_copy_as_it_is_launched(
        case in any_case(false), sms in 1u32..6, max_ctas in 1u32..8, order in any_order(),
        mode in prop::option::of(prop::sample::select(MODES.to_vec())),
    ) {
        prop_assert_eq!(launched(&case, mode, sms, max_ctas, order), Ok(()));
    }

    #[test]
    fn any_copy_with_any_team(
        case in any_case(false), grid in 1u32..6, (block, team) in (0u32..9).prop_flat_map(|b| (Just(b), 0..=b)),
        chunk in prop_oneof![1u64..8, 1u64..300], order in any_order(),
    ) {
        prop_assert_eq!(forced(&case, grid, 1 << block, team, chunk * 16, order).map(drop), Ok(()));
    }

    #[test]
    fn bad_ids_are_skipped_and_the_first_is_reported(
        case in any_case(true), max_ctas in 1u32..8, order in any_order(), mode in prop::sample::select(MODES.to_vec()),
    ) {
        prop_assert_eq!(launched(&case, Some(mode), 4, max_ctas, order), Ok(()));
    }

    #[test]
    fn the_reach_is_that_of_all_legal_ids(case in any_case(false)) {
        let plan = case.plan();
        prop_assert_eq!((plan.src_reach(), plan.dst_reach()), case.reach());
    }
}

/// Blocks one after the other in one region.
fn packed_side(blocks: u64, block_stride: u64, misaligned: usize) -> SidePlan {
    let side = StridedSide {
        start_region: 0,
        start_offset: 0,
        parts: 1,
        part_stride: 0,
        block_stride,
        block_region: 0,
        blocks,
        regions: 1,
    };
    SidePlan { side, shift: vec![0], misaligned }
}

/// Rows of `row` bytes, NHD to HND of `tokens` and `heads`, blocks reversed.
fn transposed(
    row: u64,
    tokens: u64,
    heads: u64,
    blocks: u64,
    misaligned: (usize, usize),
    walk: Walk,
) -> StridedCase {
    let block = row * tokens * heads;
    let token =
        StridedLoop { count: tokens, src_stride: heads * row, dst_stride: row, src_region: 0, dst_region: 0 };
    let head = StridedLoop { count: heads, src_stride: row, dst_stride: tokens * row, ..token };
    StridedCase {
        src: packed_side(blocks, block, misaligned.0),
        dst: packed_side(blocks, block, misaligned.1),
        loops: vec![token, head],
        run: row,
        walk,
        pairs: (0..blocks as i64).map(|id| (id, blocks as i64 - 1 - id)).collect(),
        ids: IdSource::Table,
        inline_bases: true,
    }
}

#[test]
fn rows_of_engines() {
    for row in [1, 2, 6, 12, 16, 40, 64, 128, 132, 256, 512, 576, 584, 656, 1024, 1152] {
        for misaligned in [(0, 0), (8, 0), (4, 4), (1, 2)] {
            for walk in [Walk::Source, Walk::Destination] {
                for mode in MODES {
                    let case = transposed(row, 5, 3, 3, misaligned, walk);
                    for order in ORDERS {
                        assert_eq!(
                            launched(&case, Some(mode), 4, 3, order),
                            Ok(()),
                            "{row} {misaligned:?} {mode:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_team_size() {
    for (run, misaligned) in [(1000, (0, 0)), (4096, (0, 0)), (4099, (3, 5)), (33, (7, 7))] {
        let case = transposed(run, 3, 2, 2, misaligned, Walk::Destination);
        for team_shift in 0..=10 {
            for chunk in [64, 1024, 1 << 20] {
                let order = Order::Random(team_shift.into());
                assert_eq!(
                    forced(&case, 2, 1024, team_shift, chunk, order).map(drop),
                    Ok(()),
                    "{run} {team_shift} {chunk}"
                );
            }
        }
    }
}

/// One team meets the pairs in order; whoever is first keeps the report.
#[test]
fn the_first_bad_id_is_the_one_reported() {
    let mut case = transposed(64, 1, 1, 6, (0, 0), Walk::Source);
    case.ids = IdSource::Separate(8, 4);
    (case.pairs[2].1, case.pairs[3].0, case.pairs[5].0) = (-7, 1 << 32, 6);
    for order in ORDERS {
        let report = forced(&case, 1, 32, 5, 1024, order).unwrap();
        assert_eq!(report, StridedReport { state: 1, side: 1, index: 2, value: -7, limit: 6 }, "{order:?}");
    }
}

/// More runs than a grid may have in y, with an alignment that differs from run to run.
#[test]
fn more_than_65535_runs() {
    for (row, mode) in
        [(19, StridedMode::Tile), (19, StridedMode::Word), (20, StridedMode::Tile), (20, StridedMode::Word)]
    {
        let case = transposed(row, 16, 16, 260, (0, 0), Walk::Destination);
        assert!(case.pairs.len() * 256 > 65_535);
        assert_eq!(launched(&case, Some(mode), 132, 16, Order::Forward), Ok(()));
    }
}

#[test]
fn long_lists_travel_with_the_launch() {
    for pairs in [449, 450, 2000, 4032] {
        let mut case = transposed(8, 1, 1, pairs, (0, 0), Walk::Source);
        case.ids = IdSource::Inline;
        for mode in MODES {
            assert_eq!(launched(&case, Some(mode), 132, 4, Order::Reversed), Ok(()), "{pairs}");
        }
    }
}

/// As many regions as a model has layers, on both sides.
#[test]
fn many_regions() {
    let layers = 80;
    let region = |misaligned| {
        let mut side = packed_side(4, 48, misaligned);
        side.side.regions = layers;
        side.shift = vec![0; layers as usize];
        side
    };
    let layer = StridedLoop { count: layers, src_stride: 0, dst_stride: 0, src_region: 1, dst_region: 1 };
    for inline_bases in [true, false] {
        for mode in MODES {
            let case = StridedCase {
                src: region(0),
                dst: region(8),
                loops: vec![layer],
                run: 48,
                walk: Walk::Source,
                pairs: vec![(2, 1), (0, 3)],
                ids: IdSource::Inline,
                inline_bases,
            };
            assert_eq!(launched(&case, Some(mode), 132, 8, Order::Random(3)), Ok(()));
        }
    }
}

#[test]
fn nothing_to_copy_touches_nothing() {
    for mode in MODES {
        let mut case = transposed(16, 2, 2, 3, (0, 0), Walk::Source);
        case.pairs.clear();
        let mut launch =
            case.plan().with_mode(mode).unwrap().launch(0, case.inline_words(), 132, 16).unwrap();
        assert!(launch.geometry.is_empty());
        // The library launches nothing; the kernel does nothing if launched all the same.
        launch.geometry.grid = 2;
        assert_eq!(case.check(&launch, Order::Forward), Ok(()));
    }
}
