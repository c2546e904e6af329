use proptest::prelude::*;
use zerocopy::FromBytes;

use super::*;
use crate::{GeometryError, Kernel};

fn side(blocks: u64, block_stride: u64) -> StridedSide {
    StridedSide {
        start_region: 0,
        start_offset: 0,
        parts: 1,
        part_stride: 0,
        block_stride,
        block_region: 0,
        blocks,
        regions: 1,
    }
}

fn step(count: u64, src_stride: u64, dst_stride: u64) -> StridedLoop {
    StridedLoop { count, src_stride, dst_stride, src_region: 0, dst_region: 0 }
}

fn shape(run_bytes: u64, loops: Vec<StridedLoop>) -> StridedShape {
    let (src, dst) = (side(64, 1 << 24), side(64, 1 << 24));
    StridedShape { src, dst, loops, run_bytes, walk: Walk::Destination }
}

/// A block of an 8B model between a layer-separate and a fully contiguous layout: 64 runs of 32 KiB.
fn model() -> StridedCopyPlan {
    let run = 32 << 10;
    StridedCopyPlan::new(&shape(run, vec![step(64, run * 3, run * 2)]), 256, 256).unwrap()
}

fn plan(run_bytes: u64, loops: Vec<StridedLoop>) -> StridedCopyPlan {
    StridedCopyPlan::new(&shape(run_bytes, loops), 16, 16).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    #[test]
    fn a_divisor_divides(count in prop_oneof![1u64..200, 1u64..=1 << 31], n in 0u32..1 << 31) {
        let by = Divisor::new(count).unwrap();
        prop_assert_eq!(u64::from(by.divide(n)), u64::from(n) / count);
    }
}

#[test]
fn a_divisor_divides_at_the_edges() {
    let powers = (0..=31).map(|shift| 1_u64 << shift);
    let around = powers.flat_map(|power| [power.saturating_sub(1).max(1), power, (power + 1).min(1 << 31)]);
    for count in around.chain([3, 5, 7, 641, 6_700_417, 715_827_883, (1 << 31) / 3, 1_000_000_007]) {
        let by = Divisor::new(count).unwrap();
        assert_eq!(u64::from(by.count()), count);
        for multiple in [0, 1, 2, 3, (1 << 31) / count, (1 << 31) / count / 2] {
            for n in
                [multiple * count, (multiple * count).saturating_sub(1), multiple * count + 1, (1 << 31) - 1]
            {
                if n < 1 << 31 {
                    assert_eq!(u64::from(by.divide(n as u32)), n / count, "{n} / {count}");
                }
            }
        }
    }
    assert_eq!(Divisor::new(0), None);
    assert_eq!(Divisor::new((1 << 31) + 1), None);
    assert_eq!(Divisor::new(1), Some(Divisor::ONE));
}

#[test]
fn loops_that_continue_a_run_or_one_another_are_merged() {
    let merged =
        plan(64, vec![step(4, 4096, 8192), step(8, 64, 64), step(2, 512, 1024), step(4, 1024, 2048)]);
    assert_eq!((merged.run_bytes(), merged.runs_per_block()), (512, 32));
    // 2 x 512 is 1024, 4 x 1024 is 4096, on both sides: one loop of 32.
    assert_eq!(merged.loops.len(), 1);
    let region = StridedLoop { src_region: 1, ..step(3, 0, 64) };
    assert_eq!(plan_with_regions(vec![region]).run_bytes(), 64, "a loop over regions never continues a run");
}

fn plan_with_regions(loops: Vec<StridedLoop>) -> StridedCopyPlan {
    let mut shape = shape(64, loops);
    shape.src.regions = 3;
    StridedCopyPlan::new(&shape, 16, 16).unwrap()
}

#[test]
fn loops_follow_the_walk() {
    let (token, head) = (step(16, 1024, 128), step(8, 128, 2048));
    for (walk, inner) in [(Walk::Source, 128), (Walk::Destination, 1024)] {
        let shape = StridedShape { walk, ..shape(128, vec![token, head]) };
        let plan = StridedCopyPlan::new(&shape, 16, 16).unwrap();
        assert_eq!(plan.loops.last().unwrap().src_stride, inner, "{walk:?}");
    }
}

#[test]
fn units_are_as_wide_as_everything_allows() {
    let unit =
        |run, loops, src, dst| StridedCopyPlan::new(&shape(run, loops), src, dst).unwrap().unit_bytes();
    assert_eq!(unit(576, vec![], 16, 4096), 16);
    assert_eq!(unit(576, vec![], 16, 8), 8);
    assert_eq!(unit(584, vec![], 256, 256), 8);
    assert_eq!(unit(132, vec![], 256, 256), 4);
    assert_eq!(unit(128, vec![step(2, 160, 130)], 256, 256), 2);
    assert_eq!(unit(128, vec![], 1, 16), 1);
    // A step that is never taken does not count.
    let mut lone = shape(128, vec![step(1, 3, 3)]);
    (lone.src.blocks, lone.src.block_stride, lone.src.part_stride) = (1, 7, 7);
    assert_eq!(StridedCopyPlan::new(&lone, 16, 16).unwrap().unit_bytes(), 16);
}

#[test]
fn impossible_shapes_are_refused() {
    let refused = |edit: fn(&mut StridedShape)| {
        let mut shape = shape(64, vec![step(2, 64, 128), step(3, 1024, 4096)]);
        edit(&mut shape);
        StridedCopyPlan::new(&shape, 16, 16).unwrap_err()
    };
    let (source, destination) = (SideName::Source, SideName::Destination);
    let limit = 1 << 31;
    assert_eq!(refused(|s| s.run_bytes = 0), StridedError::EmptyRun);
    assert_eq!(refused(|s| s.loops[1].count = 0), StridedError::EmptyLoop { index: 1 });
    assert_eq!(refused(|s| s.src.parts = 0), StridedError::NoParts { side: source });
    assert_eq!(refused(|s| s.dst.blocks = 0), StridedError::NoBlocks { side: destination });
    assert_eq!(
        refused(|s| s.dst.blocks = (1 << 31) + 1),
        StridedError::TooMany { side: destination, what: "blocks", value: limit + 1, limit }
    );
    assert_eq!(
        refused(|s| s.src.start_region = 1),
        StridedError::RegionOutside { side: source, region: 1, regions: 1 }
    );
    assert_eq!(
        refused(|s| (s.dst.block_region, s.dst.regions) = (2, 126)),
        StridedError::RegionOutside { side: destination, region: 126, regions: 126 }
    );
    assert_eq!(
        refused(|s| s.loops[0].dst_region = u64::MAX),
        StridedError::RegionOutside { side: destination, region: u64::MAX, regions: 1 }
    );
    assert_eq!(refused(|s| s.src.block_stride = u64::MAX), StridedError::TooFar { side: source });
    assert_eq!(refused(|s| s.dst.start_offset = 1 << 62), StridedError::TooFar { side: destination });
    assert_eq!(
        refused(|s| (s.loops[0].count, s.run_bytes) = (1 << 31, 3)),
        StridedError::TooManyPieces { pieces: 3 << 31, limit: limit - 1 }
    );
    assert_eq!(
        StridedCopyPlan::new(&shape(64, vec![]), 16, 12),
        Err(StridedError::BadAlign { side: destination, align: 12 })
    );
    let many = (0..7).map(|i| step(2, 256 << (3 * i), 64 << (2 * i) | 7)).collect();
    assert_eq!(
        StridedCopyPlan::new(&shape(64, many), 16, 16),
        Err(StridedError::TooManyLoops { loops: 7, limit: 6 })
    );
}

#[test]
fn a_block_of_too_many_units_is_tiled() {
    // 2^31 units of one byte, but few runs.
    let mut wide = shape(511, vec![step(1 << 23, 513, 513)]);
    (wide.src.blocks, wide.dst.blocks) = (1, 1);
    let plan = StridedCopyPlan::new(&wide, 1, 1).unwrap();
    assert_eq!((plan.mode(), plan.max_pairs()), (StridedMode::Tile, 255));
    assert!(plan.with_mode(StridedMode::Word).is_err());
}

#[test]
fn short_runs_go_unit_by_unit_where_that_is_faster() {
    let mode =
        |run, unit, link| StridedCopyPlan::new(&shape(run, vec![]), unit, 16).unwrap().with_link(link).mode();
    for (run, align, pcie, gpu) in [
        (16, 16, StridedMode::Word, StridedMode::Word),
        (32, 16, StridedMode::Word, StridedMode::Tile),
        (132, 16, StridedMode::Word, StridedMode::Tile),
        (256, 16, StridedMode::Tile, StridedMode::Tile),
        (256, 8, StridedMode::Word, StridedMode::Tile),
        (656, 16, StridedMode::Word, StridedMode::Tile),
        (1024, 1, StridedMode::Tile, StridedMode::Tile),
    ] {
        assert_eq!(mode(run, align, Link::Pcie), pcie, "{run} at {align}");
        assert_eq!(mode(run, align, Link::Gpu), gpu, "{run} at {align}");
    }
}

#[test]
fn the_kernel_is_the_smallest_that_holds_the_words() {
    let plan = model();
    for (words, kernel) in
        [(0, Kernel::StridedTile), (451, Kernel::StridedTile), (452, Kernel::StridedTileLarge)]
    {
        assert_eq!(plan.launch(8, words, 132, 16).unwrap().kernel, kernel);
    }
    assert_eq!(
        plan.launch(8, 4035, 132, 16),
        Err(GeometryError::TooManyWords { words: 4035, limit: INLINE_WORDS_LARGE })
    );
    assert_eq!((INLINE_WORDS_SMALL, INLINE_WORDS_LARGE), (451, 4034));
    assert_eq!(plan.inline_pairs(), 4032);
    let rows = plan_rows(128);
    assert_eq!(rows.launch(8, 451, 132, 16).unwrap().kernel, Kernel::StridedWord);
    assert_eq!(rows.launch(8, 452, 132, 16).unwrap().kernel, Kernel::StridedWordLarge);
}

/// NHD to HND rows.
fn plan_rows(row: u64) -> StridedCopyPlan {
    plan(row, vec![step(16, 8 * row, row), step(8, row, 16 * row)])
}

#[test]
fn little_work_is_spread_and_much_work_fills_every_cta() {
    let one = model().launch(1, 3, 132, 16).unwrap();
    assert_eq!((one.geometry.grid, one.geometry.block), (16, 1024));
    let tiny = plan(4096, vec![]).launch(1, 3, 132, 16).unwrap();
    assert!(tiny.geometry.grid <= 2 && tiny.geometry.block <= 256, "{tiny:?}");
    let many = model().launch(256, 258, 132, 16).unwrap();
    assert_eq!((many.geometry.grid, many.geometry.block), (16, 1024));
    let rows = plan_rows(64).launch(1, 3, 132, 16).unwrap();
    assert_eq!((rows.geometry.grid, rows.geometry.block), (4, 128));
    let gpu = plan_rows(64).with_link(Link::Gpu);
    assert_eq!(gpu.enough_ctas(132), 528);
    let many = gpu.launch(10_000, 0, 132, 528).unwrap();
    assert_eq!((many.kernel, many.geometry.grid, many.geometry.block), (Kernel::StridedTile, 528, 1024));
}

#[test]
fn impossible_launches_are_refused() {
    let plan = model();
    assert_eq!(plan.launch(1, 3, 0, 16), Err(GeometryError::NoMultiprocessors));
    assert_eq!(plan.launch(1, 3, 132, 0), Err(GeometryError::NoCtas));
    let limit = u64::from(plan.max_pairs());
    assert_eq!(
        plan.launch(plan.max_pairs() + 1, 3, 132, 16),
        Err(GeometryError::TooManyPairs { pairs: limit + 1, limit })
    );
    let launch = plan.launch(2, 4, 132, 16).unwrap();
    let mut out = ParamBuffer::new();
    let mut write = |src: &[u64], ids| {
        launch.write_params(Bases::Inline { src, dst: &[1] }, ids, &mut out).map(<[u8]>::len)
    };
    assert_eq!(write(&[1], Ids::Inline(&[0, 1])), Ok(4096));
    let wrong = |what, given, wanted| Err(GeometryError::WrongWords { what, given, wanted });
    assert_eq!(write(&[1, 2], Ids::Inline(&[0, 1])), wrong("source bases", 2, 1));
    assert_eq!(write(&[1], Ids::Inline(&[0])), wrong("pairs", 1, 2));
    let narrow = Ids::Separate { src: 8, src_width: 4, dst: 8, dst_width: 2, report: 8 };
    assert_eq!(write(&[1], narrow), Err(GeometryError::IdWidth { width: 2 }));
    // A launch for a table does not hold a long list.
    let plan = model();
    let ids = vec![0; 1000];
    let launch = plan.launch(1000, 2, 132, 16).unwrap();
    let bases = Bases::Inline { src: &[1], dst: &[1] };
    let refused = launch.write_params(bases, Ids::Inline(&ids), &mut out).map(<[u8]>::len);
    assert_eq!(refused, Err(GeometryError::TooManyWords { words: 1002, limit: 451 }));
}

#[test]
fn params_say_where_everything_is() {
    let plan = model();
    let mut out = ParamBuffer::new();
    let launch = plan.launch(2, 4, 132, 16).unwrap();
    let bases = Bases::Inline { src: &[0x10], dst: &[0x20] };
    let bytes = launch.write_params(bases, Ids::Inline(&[5, 7]), &mut out).unwrap();
    let (header, tail) = StridedHeader::ref_from_prefix(bytes).unwrap();
    let word = |at: u32| u64::read_from_prefix(&tail[at as usize * 8..]).unwrap().0;
    assert_eq!([word(header.src.bases_at), word(header.dst.bases_at)], [0x10, 0x20]);
    assert_eq!([word(header.ids_at), word(header.ids_at + 1)], [5, 7]);
    assert_eq!((header.src.bases, header.dst.bases), (0, 0));
    // What an earlier launch wrote does not shine through.
    let launch = plan.launch(2, 0, 132, 16).unwrap();
    let separate = Ids::Separate { src: 1, src_width: 4, dst: 2, dst_width: 8, report: 3 };
    let bytes = launch.write_params(Bases::Table { src: 4, dst: 5 }, separate, &mut out).unwrap();
    let (header, _) = StridedHeader::ref_from_prefix(bytes).unwrap();
    assert_eq!((header.src.ids, header.src.id_bytes, header.dst.ids, header.dst.id_bytes), (1, 4, 2, 8));
    assert_eq!((header.report, header.src.bases, header.dst.bases, header.ids_at), (3, 4, 5, 0));
}

proptest! {
    #[test]
    fn launches_are_legal_at_any_size(
        run in prop_oneof![1u64..1000, 1u64..10_000_000], align in 0u32..5, count in 1u64..5000,
        share in 0.0f64..=1.0, few in prop::option::of(0u32..20), sms in 1u32..200, max_ctas in 1u32..70_000,
    ) {
        let mut shape = shape(run, vec![step(count, run + 16, run + 48)]);
        (shape.src.block_stride, shape.dst.block_stride) = (1 << 40, 1 << 40);
        let plan = StridedCopyPlan::new(&shape, 1 << align, 16).unwrap();
        let pairs = few.unwrap_or((f64::from(plan.max_pairs()) * share) as u32).min(plan.max_pairs());
        let launch = plan.launch(pairs, 0, sms, max_ctas).unwrap();
        let geometry = launch.geometry;
        prop_assert_eq!(geometry.grid == 0, pairs == 0);
        prop_assert!(geometry.grid <= max_ctas.min(65_535));
        prop_assert!(geometry.block.is_power_of_two() && (128..=1024).contains(&geometry.block));
        let mut out = ParamBuffer::new();
        let bytes = launch.write_params(Bases::Table { src: 8, dst: 8 }, Ids::Table(8), &mut out).unwrap();
        let (header, _) = StridedHeader::ref_from_prefix(bytes).unwrap();
        let pieces = u64::from(header.inner.count());
        prop_assert_eq!(u64::from(header.items), u64::from(pairs) * plan.runs_per_block() * pieces);
        prop_assert!(header.items < 1 << 31);
        match plan.mode() {
            StridedMode::Tile => {
                prop_assert!(1 << header.lane_shift <= geometry.block);
                prop_assert!(pieces * header.chunk_bytes >= plan.run_bytes());
                prop_assert!((pieces - 1) * header.chunk_bytes < plan.run_bytes());
                prop_assert!(pieces == 1 || header.chunk_bytes % 16 == 0);
            }
            StridedMode::Word => prop_assert_eq!(pieces << header.lane_shift, plan.run_bytes()),
        }
        // No CTA without work, but for the last turn of a piece.
        let per_cta = match plan.mode() {
            StridedMode::Tile => geometry.block >> header.lane_shift,
            StridedMode::Word => geometry.block,
        };
        prop_assert!(u64::from(geometry.grid.saturating_sub(1)) * u64::from(per_cta) < u64::from(header.items).max(1));
    }
}
