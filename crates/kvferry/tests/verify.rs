//! Checksums, patterns and guard checks over memory, against formulas written out anew.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::layouts::pairs::case;
use common::layouts::{Dims, Made, alignment, cases, dims, form, ids};
use common::{Bound, FC, config, context, made, pooled};
use kvferry::host::HostRegion;
use kvferry::layout::oracle::POISON;
use kvferry::layout::{RowAt, mix64, row_checksum};
use kvferry::{
    BlockId, Error, GuardBreach, KvOrder, LayoutError, LayoutKind, MemoryKind, Mismatch, PhysicalLayout,
    PlanError, Region, Side, TransferOptions,
};
use proptest::prelude::*;

/// Byte `index` of a row of the pattern.
fn pattern(seed: u64, block: u64, at: RowAt, index: u64) -> u8 {
    let word = at.head + (at.token << 20) + (at.layer << 44) + (at.outer << 60);
    let key = mix64(mix64(mix64(seed) ^ block) ^ word);
    let word = mix64(key.wrapping_add((index / 8 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    word.to_le_bytes()[(index % 8) as usize]
}

/// The regions with the pattern in all blocks and poison elsewhere.
fn patterned(made: &Made, seed: u64) -> Vec<Vec<u8>> {
    let mut mem = made.oracle.alloc();
    kvferry::layout::oracle::poison(&mut mem);
    let width = made.oracle.elem_bytes();
    let first = made.oracle.heads().start;
    made.oracle.for_each(|[block, layer, outer, token, head, dim], (region, offset)| {
        let at = RowAt { layer, outer, token, head: first + head };
        for byte in 0..width {
            mem[region][offset + byte] = pattern(seed, block, at, dim * width as u64 + byte as u64);
        }
    });
    mem
}

fn all(layout: &PhysicalLayout) -> Vec<BlockId> {
    ids(0..layout.layout().config().num_blocks())
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn the_pattern_is_its_formula_and_leaves_padding_alone(
        dims in dims(5), form in form(), alignment in alignment(), split in 1u64..=3, skew in 0u64..16, seed: u64,
    ) {
        let page = dims.page;
        let stored = Made::new(Dims { page: page * split, ..dims }.config(alignment), &form);
        // The alignment is of stored blocks: memory is laid out for them, then addressed in pages.
        let bound = Bound::new(stored.clone(), skew);
        let layout = bound.layout.with_page_size(page).unwrap();
        layout.fill_pattern(seed, None).unwrap();
        prop_assert!(bound.dump() == bound.image(&patterned(&stored.with_page_size(page), seed)));
        layout.verify_pattern(seed, None, None, None).unwrap();
        layout.check_fill(POISON, &all(&layout)).unwrap();
        let refused = layout.verify_pattern(seed ^ 1, None, None, None);
        prop_assert!(matches!(refused, Err(Error::Mismatch(_))), "{refused:?}");
    }

    /// What the transfer tests would find with the oracle, the checks find without it.
    #[test]
    fn transfers_pass_all_checks(case in case(5), seed: u64, through_pool: bool) {
        let (src_page, dst_page) = (case.src.layout.config().page_size(), case.dst.layout.config().page_size());
        let (src, dst) = (Bound::new(case.src.clone(), 3), Bound::new(case.dst.clone(), 0));
        let page = src_page.min(dst_page);
        // The pattern is written and looked for in pages of the finer side.
        let fine = |layout: &PhysicalLayout, of: u64, list: &[BlockId]| {
            let parts = of / page;
            let list = list.iter().flat_map(|id| (0..parts).map(move |part| u64::from(id.0) * parts + part));
            (layout.with_page_size(page).unwrap(), ids(list))
        };
        let (fine_src, from) = fine(&src.layout, src_page, &case.src_ids);
        let (fine_dst, to) = fine(&dst.layout, dst_page, &case.dst_ids);
        fine_src.fill_pattern(seed, None).unwrap();
        let base = if through_pool { pooled() } else { TransferOptions::default() };
        let options = TransferOptions {
            layers: case.request.layers.clone(),
            heads: case.request.heads.clone(),
            transform: case.request.transform,
            ..base
        };
        let ctx = context(2);
        ctx.transfer(&src.layout, &dst.layout, &case.src_ids, &case.dst_ids, &options)
            .unwrap()
            .wait(Some(common::PATIENCE))
            .unwrap();
        dst.layout.check_fill(POISON, &case.dst_ids).unwrap();
        if case.heads == case.dst.oracle.heads() {
            fine_dst.verify_pattern(seed, Some(&to), Some(&from), Some(case.layers.clone())).unwrap();
            if case.heads == case.src.oracle.heads() {
                let sums = fine_src.checksum(&from, Some(case.layers.clone())).unwrap();
                prop_assert_eq!(fine_dst.checksum(&to, Some(case.layers)).unwrap(), sums);
            }
        }
    }

    /// One wrong byte anywhere is found, and named, by the check it belongs to and by no other.
    #[test]
    fn any_one_byte_is_found(dims in dims(4), form in form(), alignment in alignment(), seed: u64) {
        let bound = Bound::new(Made::new(dims.config(alignment), &form), 0);
        let layout = &bound.layout;
        layout.fill_pattern(seed, None).unwrap();
        let blocks = all(layout);
        let sums = layout.checksum(&blocks, None).unwrap();
        let region = (seed % layout.regions().len() as u64) as usize;
        let memory = layout.host_region(region).unwrap();
        let offset = (seed >> 8) % memory.len();
        let mut byte = [0];
        memory.read(offset, &mut byte).unwrap();
        let found = byte[0] ^ 0x10;
        memory.write(offset, &[found]).unwrap();
        let mut owner = None;
        let width = bound.made.oracle.elem_bytes() as u64;
        bound.made.oracle.for_each(|at, (r, o)| {
            if r == region && (o as u64..o as u64 + width).contains(&offset) {
                owner = Some((at, at[5] * width + offset - o as u64));
            }
        });
        let verified = layout.verify_pattern(seed, None, None, None);
        let guarded = layout.check_fill(POISON, &blocks);
        let now = layout.checksum(&blocks, None).unwrap();
        let changed: Vec<usize> = (0..sums.len()).filter(|&i| sums[i] != now[i]).collect();
        match owner {
            Some(([block, layer, outer, token, head, _], offset)) => {
                let id = BlockId(block as u32);
                let rows = dims.blocks * dims.layers * dims.outer * dims.page * dims.heads;
                let at = RowAt { layer, outer, token, head };
                let expected = Mismatch {
                    block: id, as_block: id, at, offset, expected: byte[0], found, bad_rows: 1, rows,
                };
                prop_assert!(matches!(verified, Err(Error::Mismatch(m)) if m == expected), "{verified:?}");
                prop_assert!(guarded.is_ok());
                prop_assert_eq!(changed, [block as usize]);
            }
            None => {
                let expected = GuardBreach { region, offset, block: None, expected: POISON, found };
                prop_assert!(matches!(guarded, Err(Error::Guard(g)) if g == expected), "{guarded:?}");
                prop_assert!(verified.is_ok() && changed.is_empty());
            }
        }
    }
}

/// Large enough for several threads and chunks: the sum of the formula, block by block.
#[test]
fn large_layouts_are_summed_by_the_formula() {
    let sizes = config(12, 3, 40, 8, 640);
    for order in KvOrder::ALL {
        let kind = LayoutKind::FullyContiguous { order };
        let layout = Bound::new(made(sizes, kind), 1).layout;
        layout.fill_pattern(5, None).unwrap();
        // Ids may repeat and come in any order.
        let blocks = ids([11, 0, 4, 4, 7, 1, 2, 3, 5, 6, 8, 9, 10]);
        let sums = layout.checksum(&blocks, Some(1..3)).unwrap();
        for (block, sum) in blocks.iter().zip(sums) {
            let mut expected = 0u64;
            for (layer, outer) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
                for (token, head) in (0..40).flat_map(|token| (0..8).map(move |head| (token, head))) {
                    let at = RowAt { layer, outer, token, head };
                    let row: Vec<u8> = (0..1280).map(|index| pattern(5, block.0.into(), at, index)).collect();
                    expected = expected.wrapping_add(row_checksum(&row, at));
                }
            }
            assert_eq!(sum, expected, "{order:?}, block {block}");
        }
        // The last byte of the first bad row among many, found by several threads.
        layout.verify_pattern(5, None, None, None).unwrap();
        let refused = layout.verify_pattern(5, Some(&ids([3, 9, 2])), Some(&ids([3, 2, 2])), Some(0..2));
        let Err(Error::Mismatch(found)) = refused else { panic!("{refused:?}") };
        assert_eq!((found.block, found.as_block), (BlockId(9), BlockId(2)));
        assert_eq!(found.at, RowAt { layer: 0, outer: 0, token: 0, head: 0 });
        assert_eq!((found.bad_rows, found.rows), (2 * 2 * 40 * 8, 3 * 2 * 2 * 40 * 8));
    }
}

#[test]
fn shards_verify_by_global_head_and_add_up() {
    let whole = config(2, 2, 4, 4, 8);
    let all_heads = Bound::new(made(whole, FC), 0).layout;
    all_heads.fill_pattern(1, None).unwrap();
    let total = all_heads.checksum(&ids([1]), None).unwrap()[0];
    let ctx = context(1);
    let mut sum = 0u64;
    for rank in 0..2 {
        let shard = Bound::new(made(whole.shard_heads(rank, 2).unwrap(), FC), 0).layout;
        let options = TransferOptions::default();
        ctx.transfer(&all_heads, &shard, &ids([1]), &ids([0]), &options).unwrap().wait(None).unwrap();
        shard.verify_pattern(1, Some(&ids([0])), Some(&ids([1])), None).unwrap();
        sum = sum.wrapping_add(shard.checksum(&ids([0]), None).unwrap()[0]);
    }
    assert_eq!(sum, total);
}

#[test]
fn a_guard_names_the_block_that_was_written() {
    let layout = Bound::new(made(config(4, 2, 2, 2, 16), FC), 0).layout;
    layout.fill(0x11).unwrap();
    layout.fill_pattern(1, Some(&ids([2]))).unwrap();
    layout.check_fill(0x11, &ids([2, 2])).unwrap();
    let refused = layout.check_fill(0x11, &ids([0]));
    let Err(Error::Guard(breach)) = refused else { panic!("{refused:?}") };
    assert_eq!((breach.region, breach.offset, breach.block), (0, 2 * 512, Some(BlockId(2))));
    let text = breach.to_string();
    assert!(
        text.starts_with("byte 1024 of region 0 (in block 2) is 0x") && text.ends_with("expected 0x11"),
        "{text}"
    );
}

#[test]
fn what_is_refused_writes_nothing() {
    let bound = Bound::new(made(config(4, 2, 2, 2, 16), FC), 0);
    let layout = &bound.layout;
    let before = bound.dump();
    let id_error = |side, index| PlanError::BlockId { side, index, value: 4, limit: 4 };
    let plan_error = |result: Result<(), Error>| match result {
        Err(Error::Plan(error)) => error,
        other => panic!("{other:?}"),
    };
    let beyond = ids([1, 4]);
    assert_eq!(plan_error(layout.fill_pattern(1, Some(&beyond))), id_error(Side::Destination, 1));
    assert_eq!(plan_error(layout.checksum(&beyond, None).map(drop)), id_error(Side::Source, 1));
    assert_eq!(plan_error(layout.verify_pattern(1, Some(&beyond), None, None)), id_error(Side::Source, 1));
    assert_eq!(plan_error(layout.check_fill(1, &beyond)), id_error(Side::Source, 1));
    let twice = plan_error(layout.fill_pattern(1, Some(&ids([2, 0, 2]))));
    assert_eq!(twice, PlanError::DuplicateDestination { value: 2, first: 0, second: 2 });
    let counts = plan_error(layout.verify_pattern(1, Some(&ids([1])), Some(&ids([1, 2])), None));
    assert_eq!(counts, PlanError::IdCount { src: 2, src_page: 2, dst: 1, dst_page: 2 });
    for layers in [0..3, 1..1] {
        let refused = layout.checksum(&ids([0]), Some(layers));
        assert!(matches!(refused, Err(Error::Layout(LayoutError::Range { .. }))), "{refused:?}");
    }
    assert!(layout.checksum(&[], None).unwrap().is_empty());
    layout.verify_pattern(1, Some(&[]), None, None).unwrap();

    // Lent for reading only: checks work, filling does not.
    let regions: Vec<Region> = (layout.regions().iter())
        .map(|region| {
            let region = region.host().unwrap();
            // SAFETY: the same memory under the same owner.
            Region::Host(unsafe {
                HostRegion::from_raw(region.addr(), region.len(), false, region.owner().clone())
            })
        })
        .collect();
    let lent = PhysicalLayout::from_regions(layout.layout().clone(), MemoryKind::System, regions).unwrap();
    assert_eq!(lent.checksum(&ids([0]), None).unwrap(), layout.checksum(&ids([0]), None).unwrap());
    lent.check_fill(POISON, &[]).unwrap();
    let refused = lent.fill_pattern(1, None);
    assert!(matches!(refused, Err(Error::ReadOnlyDestination { region: 0 })), "{refused:?}");

    // One tensor given twice.
    let shared = made(config(4, 2, 2, 2, 16), LayoutKind::SplitKv { order: KvOrder::Nhd }).layout;
    let region = bound.layout.host_region(0).unwrap().part(0, shared.region_bytes()).unwrap();
    let regions = vec![Region::Host(region); shared.num_regions() as usize];
    let shared = PhysicalLayout::from_regions(shared, MemoryKind::System, regions).unwrap();
    let refused = shared.fill_pattern(1, None);
    assert!(matches!(refused, Err(Error::Layout(LayoutError::RegionsAlias { .. }))), "{refused:?}");
    assert!(bound.dump() == before);
}
