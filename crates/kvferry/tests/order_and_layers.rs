//! Ordered contexts, tagged jobs, and transfers by layer.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::time::Duration;

use common::{
    Bound, FC, Gate, PATIENCE, after, config, context, first_bytes, made, pooled, small_job, small_pair,
};
use kvferry::layout::oracle;
use kvferry::{BlockDim, BlockId, KvOrder, LayoutKind, TransferContext, TransferOptions};

const ONE: [BlockId; 1] = [BlockId(0)];

fn ordered() -> TransferContext {
    TransferContext::builder().threads(3).ordered(true).build().unwrap()
}

#[test]
fn an_ordered_context_is_first_in_first_out() {
    let ctx = ordered();
    let gate = Gate::new();
    let (source, stations) = (small_pair().0, (0..40).map(|_| small_pair().1).collect::<Vec<_>>());
    let tagged = |tag, options| TransferOptions { tag: Some(tag), ..options };
    let first = tagged(0, after(&[&gate.job]));
    let mut jobs = vec![ctx.transfer(&source, &stations[0], &ONE, &ONE, &first).unwrap()];
    for (tag, pair) in (1..).zip(stations.windows(2)) {
        // Nothing is named: only the order of the context hands the bytes on.
        let options = tagged(tag, TransferOptions::default());
        jobs.push(ctx.transfer(&pair[0], &pair[1], &ONE, &ONE, &options).unwrap());
    }
    assert_eq!(ctx.in_flight(), 40);
    gate.open();
    jobs.last().unwrap().wait(Some(PATIENCE)).unwrap();
    assert!(first_bytes(stations.last().unwrap(), 512).iter().all(|&byte| byte == 1));
    assert!(ctx.completed().iter().map(|(tag, _)| *tag).eq(0..40));
}

#[test]
fn an_unordered_context_lets_jobs_pass() {
    let ctx = context(1);
    let gate = Gate::new();
    let (a, b) = small_pair();
    let held = ctx.transfer(&a, &b, &ONE, &ONE, &after(&[&gate.job])).unwrap();
    small_job(&ctx, &pooled()).wait(Some(PATIENCE)).unwrap();
    assert!(!held.done());
    gate.open();
    held.wait(Some(PATIENCE)).unwrap();
}

#[test]
fn tagged_jobs_are_told_of_once_and_in_order() {
    let ctx = ordered();
    assert!(ctx.completed().is_empty());
    let gate = Gate::new();
    let (a, b) = small_pair();
    for tag in [7, 3, 3] {
        let mut options = after(&[&gate.job]);
        options.tag = Some(tag);
        ctx.transfer(&a, &b, &ONE, &ONE, &options).unwrap();
    }
    small_job(&ctx, &TransferOptions::default());
    assert!(ctx.completed().is_empty());
    gate.open();
    common::eventually("all ends", || ctx.in_flight() == 0);
    let mut told = Vec::new();
    common::eventually("three tags", || {
        told.extend(ctx.completed());
        told.len() >= 3
    });
    let tags: Vec<u64> = told.iter().map(|(tag, _)| *tag).collect();
    assert_eq!(tags, [7, 3, 3]);
    assert!(told.iter().all(|(_, outcome)| outcome.as_ref().unwrap().bytes == 512));
    assert!(ctx.completed().is_empty());
    // One that runs at once, and an empty one.
    for ids in [&ONE[..], &[]] {
        let options = TransferOptions { tag: Some(9), ..TransferOptions::default() };
        ctx.transfer(&a, &b, ids, ids, &options).unwrap();
    }
    common::eventually("two more", || {
        told.extend(ctx.completed());
        told.len() == 5
    });
}

#[test]
fn tags_of_an_ordered_context_come_in_its_order() {
    let ctx = ordered();
    let (a, b) = small_pair();
    let (mut told, by_threads) = (Vec::new(), pooled());
    for tag in 0..20_000 {
        // Some by the copy threads, whose ends are raced by jobs that run at once, some by layer.
        let mut options = if tag % 3 == 0 { by_threads.clone() } else { TransferOptions::default() };
        options.tag = Some(tag);
        options.per_layer = tag % 7 == 0;
        let job = ctx.transfer(&a, &b, &ONE, &ONE, &options).unwrap();
        if tag % 5 == 0 {
            job.wait(Some(PATIENCE)).unwrap();
            told.extend(ctx.completed());
            // What has ended has been told of.
            assert_eq!(told.last().unwrap().0, tag);
        }
    }
    ctx.close(Some(PATIENCE)).unwrap();
    told.extend(ctx.completed());
    assert!(told.iter().map(|(tag, _)| *tag).eq(0..20_000));
}

#[test]
fn layers_are_told_of_one_by_one_and_together_are_the_whole() {
    for kind in [
        FC,
        LayoutKind::FullyContiguous { order: KvOrder::Universal },
        LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Hnd },
        LayoutKind::SplitKv { order: KvOrder::Nhd },
    ] {
        for (range, ids) in [(None, vec![4, 5, 6, 1]), (Some(1..4), vec![0, 7, 2]), (Some(2..3), vec![])] {
            let src = Bound::new(made(config(8, 5, 3, 2, 8), kind), 0);
            let dst = Bound::new(
                made(
                    config(9, 5, 3, 2, 8),
                    LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order: KvOrder::Nhd },
                ),
                1,
            );
            let from = src.fill_unique(5);
            let ids: Vec<BlockId> = ids.into_iter().map(BlockId).collect();
            let to: Vec<BlockId> = ids.iter().map(|id| BlockId(id.0 + 1)).collect();
            let ctx = context(2);
            let options =
                TransferOptions { layers: range.clone(), per_layer: true, ..TransferOptions::default() };
            let job = ctx.transfer(&src.layout, &dst.layout, &ids, &to, &options).unwrap();
            let layers = range.clone().unwrap_or(0..5);
            assert!(job.layer(layers.start.wrapping_sub(1)).is_none() && job.layer(layers.end).is_none());
            let row_bytes = 2 * 3 * 2 * 8 * 2 * ids.len() as u64;
            for layer in layers.clone().rev() {
                let part = job.layer(layer).unwrap().wait(Some(PATIENCE)).unwrap();
                assert_eq!((part.bytes, part.blocks), (row_bytes, ids.len() as u64));
            }
            let whole = job.wait(Some(PATIENCE)).unwrap();
            assert_eq!(whole.bytes, row_bytes * (layers.end - layers.start));
            assert_eq!(whole.blocks, ids.len() as u64);
            let mut expected = dst.poisoned();
            oracle::copy(&src.made.oracle, &from, &dst.made.oracle, &mut expected, &ids, &to, layers, 0..2);
            assert_eq!(dst.dump(), dst.image(&expected));
            assert_eq!(ctx.in_flight(), 0);
        }
    }
}

#[test]
fn a_layer_can_be_waited_for_while_others_are_held_and_refusals_leave_nothing() {
    let ctx = context(1);
    let gate = Gate::new();
    let (a, b) = small_pair();
    let mut options = after(&[&gate.job]);
    options.per_layer = true;
    let job = ctx.transfer(&a, &b, &ONE, &ONE, &options).unwrap();
    assert!(job.wait(Some(Duration::from_millis(2))).is_err());
    assert!(!job.layer(0).unwrap().done());
    assert_eq!(ctx.in_flight(), 2);
    // A job that follows the whole follows every layer.
    let (_, c) = small_pair();
    let next = ctx.transfer(&b, &c, &ONE, &ONE, &after(&[&job])).unwrap();
    gate.open();
    next.wait(Some(PATIENCE)).unwrap();
    assert!(job.done());
    assert!(first_bytes(&c, 256).iter().all(|&byte| byte == 1));
    assert!(small_job(&ctx, &TransferOptions::default()).layer(0).is_none());
    ctx.close(Some(PATIENCE)).unwrap();
    assert!(ctx.transfer(&a, &b, &ONE, &ONE, &options).is_err());
    assert_eq!(ctx.in_flight(), 0);
}
