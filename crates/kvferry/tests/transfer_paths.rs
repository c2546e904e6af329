//! The ways a plan is cut: inline, many blocks to a task, several tasks to a block, runs in pieces.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::layouts::{Dice, ids, own_kinds};
use common::{Bound, FC, config, context, made};
use kvferry::host::CopyHint;
use kvferry::layout::oracle;
use kvferry::{
    BlockDim, BlockId, HostMode, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind, PhysicalLayout,
    TransferOptions, Transform,
};

const LW: LayoutKind = LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order: KvOrder::Nhd };
const UNIVERSAL: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Universal };

/// Bytes a task of the engine aims at.
const TASK: u64 = 512 << 10;

struct Shape {
    run_bytes: u64,
    block_bytes: u64,
    bytes: u64,
    inline: bool,
}

fn copy(config: LayoutConfig, kinds: [LayoutKind; 2], lists: [Vec<BlockId>; 2], threads: usize) -> Shape {
    let [src, dst] = kinds.map(|kind| Bound::new(made(config, kind), 3));
    let src_mem = src.fill_unique(7);
    let mut expected = dst.poisoned();
    let (layers, heads) = (0..config.num_layers(), 0..config.num_heads());
    oracle::copy(
        &src.made.oracle,
        &src_mem,
        &dst.made.oracle,
        &mut expected,
        &lists[0],
        &lists[1],
        layers,
        heads,
    );
    let ctx = context(threads);
    let options = TransferOptions::default();
    let route = ctx.route(&src.layout, &dst.layout, &options).unwrap();
    let plan = route.plan(&lists[0], &lists[1]).unwrap();
    // Nothing waits on the handle here, so the copy threads do all of it.
    let job = route.submit(&lists[0], &lists[1]).unwrap();
    common::eventually("the job ends", || job.done());
    assert!(dst.dump() == dst.image(&expected), "{kinds:?} with {threads} threads");
    let pair = plan.plan().pair();
    Shape {
        run_bytes: pair.run_bytes(),
        block_bytes: pair.block_bytes(),
        bytes: plan.stats().bytes,
        inline: plan.choice().host == HostMode::Inline,
    }
}

fn range(blocks: std::ops::Range<u64>) -> Vec<BlockId> {
    ids(blocks)
}

#[test]
fn every_pair_of_kinds_whole_and_pooled() {
    // 8 blocks of 15 KiB: more than inline, odd in every axis.
    let config = config(8, 3, 5, 4, 64);
    for src in own_kinds() {
        for dst in own_kinds() {
            let shape = copy(config, [src, dst], [ids([6, 7, 0, 3, 2, 1, 5]), ids([0, 1, 5, 4, 3, 2, 7])], 3);
            assert!(!shape.inline && shape.bytes == 7 * config.block_bytes());
        }
    }
}

#[test]
fn a_small_copy_is_inline_up_to_its_limit() {
    // 4 KiB blocks: eight of them are 32 KiB.
    let config = config(16, 1, 4, 4, 64);
    assert!(copy(config, [FC, FC], [range(0..8), range(8..16)], 1).inline);
    assert!(!copy(config, [FC, FC], [range(0..9), range(7..16)], 1).inline);
    // 32 rows per block: four blocks are 128 runs.
    assert!(copy(config, [FC, UNIVERSAL], [range(0..4), range(1..5)], 1).inline);
    assert!(!copy(config, [FC, UNIVERSAL], [range(0..5), range(1..6)], 1).inline);
}

#[test]
fn many_blocks_to_a_task() {
    // 1.5 KiB blocks, 341 to a task; joined, falling and scattered.
    let config = config(1000, 2, 3, 4, 16);
    let mut order: Vec<u64> = (0..1000).collect();
    Dice(1).shuffle(&mut order);
    for (threads, kinds) in [(1, [FC, FC]), (4, [FC, LW]), (3, [LW, UNIVERSAL])] {
        let shape = copy(config, kinds, [range(0..800), range(200..1000)], threads);
        assert!(shape.block_bytes * 100 < TASK && shape.bytes > 2 * TASK);
        copy(config, kinds, [ids((0..900).rev()), ids((100..1000).rev())], threads);
        copy(config, kinds, [ids(order.iter().copied()), ids(order.iter().rev().copied())], threads);
    }
}

#[test]
fn several_tasks_to_a_block() {
    // 1.25 MiB and a row per block, in runs far below a task.
    let config = config(3, 4, 16, 8, 641);
    for (threads, kinds) in [(1, [FC, LW]), (2, [LW, FC]), (3, [FC, UNIVERSAL]), (4, [UNIVERSAL, LW])] {
        let shape = copy(config, kinds, [ids([2, 0]), ids([0, 1])], threads);
        assert!(shape.run_bytes < TASK && shape.block_bytes > 2 * TASK);
    }
}

#[test]
fn a_run_in_pieces() {
    // Runs of 641 KiB in each of two layers, and one of 1282 KiB.
    let config = config(3, 2, 16, 10, 1026);
    for threads in [1, 4] {
        let shape = copy(config, [FC, LW], [ids([2, 0]), ids([0, 1])], threads);
        assert!(shape.run_bytes > TASK && shape.run_bytes == config.block_bytes() / 2);
        let shape = copy(config, [FC, FC], [ids([1, 2, 0]), ids([0, 1, 2])], threads);
        assert!(shape.run_bytes > 2 * TASK && shape.run_bytes == config.block_bytes());
    }
}

#[test]
fn no_blocks_and_repeated_sources() {
    let config = config(4, 2, 4, 2, 8);
    assert_eq!(copy(config, [FC, LW], [vec![], vec![]], 1).bytes, 0);
    copy(config, [FC, LW], [ids([2, 2, 2]), ids([3, 0, 1])], 2);
}

#[test]
fn forbidding_an_order_change_allows_what_needs_none() {
    let config = config(4, 2, 4, 2, 8);
    let (src, dst) = (Bound::new(made(config, FC), 0), Bound::new(made(config, LW), 0));
    let options = TransferOptions { transform: Transform::Forbid, ..TransferOptions::default() };
    context(1).transfer(&src.layout, &dst.layout, &range(0..4), &range(0..4), &options).unwrap();
}

#[test]
fn a_large_transfer_streams_and_says_so() {
    // 40 MiB in rows of 256 bytes, and in rows too short to gain.
    for (heads, dim, hint) in [(8, 128, CopyHint::NonTemporal), (16, 64, CopyHint::Temporal)] {
        let config = config(20, 32, 16, heads, dim);
        let make = |kind| {
            let layout = Layout::of_kind(config, kind).unwrap();
            PhysicalLayout::allocate(layout, MemoryKind::System).unwrap()
        };
        let (src, dst) = (make(FC), make(UNIVERSAL));
        src.fill(1).unwrap();
        let ctx = context(2);
        let plan = ctx.plan(&src, &dst, &range(0..20), &range(0..20), &TransferOptions::default()).unwrap();
        assert_eq!(plan.choice().hint, hint);
        assert_eq!(
            plan.explain().contains("streaming stores"),
            hint == CopyHint::NonTemporal,
            "{}",
            plan.explain()
        );
        ctx.transfer(&src, &dst, &range(0..20), &range(0..20), &TransferOptions::default())
            .unwrap()
            .wait(None)
            .unwrap();
        let bytes = common::first_bytes(&dst, dst.layout().region_bytes() as usize);
        assert!(bytes.iter().all(|&byte| byte == 1));
        let few = ctx.plan(&src, &dst, &range(0..2), &range(0..2), &TransferOptions::default()).unwrap();
        assert_eq!(few.choice().hint, CopyHint::Temporal);
    }
}
