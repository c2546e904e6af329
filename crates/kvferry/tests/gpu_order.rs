//! Order and ends of GPU jobs, where a review found them wrong once. Runs on a GPU or on the simulated driver.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::{Gate, PATIENCE, after};
use kvferry::cuda::{Driver, faults};
use kvferry::{
    BlockId, Dtype, Error, KvOrder, Layout, LayoutConfig, MemoryKind, PhysicalLayout, TransferContext,
    TransferOptions,
};

const DEVICE: MemoryKind = MemoryKind::Device(0);

fn gpu() -> bool {
    match Driver::get() {
        Ok(_) => true,
        Err(error) if std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("KVFERRY_REQUIRE_GPU=1 and there is no GPU: {error}")
        }
        Err(_) => false,
    }
}

fn context(ordered: bool) -> TransferContext {
    TransferContext::builder().device(0).threads(2).ordered(ordered).build().unwrap()
}

fn pair(kinds: [MemoryKind; 2], blocks: u64) -> [Arc<PhysicalLayout>; 2] {
    let cfg =
        LayoutConfig::builder().num_blocks(blocks).num_layers(2).outer_dim(1).page_size(1).inner_dim(64);
    let layout = Layout::fully_contiguous(cfg.dtype(Dtype::UInt8).build().unwrap(), KvOrder::Nhd).unwrap();
    kinds.map(|kind| PhysicalLayout::allocate(layout.clone(), kind).unwrap())
}

const ONE: [BlockId; 1] = [BlockId(0)];

#[test]
fn a_sleeping_waiter_hears_of_a_job_that_was_held() {
    if !gpu() {
        return;
    }
    let ctx = context(false);
    let [src, dst] = pair([MemoryKind::Pinned, DEVICE], 4);
    for round in 0..10 {
        let gate = Gate::new();
        let job = ctx.transfer(&src, &dst, &ONE, &ONE, &after(&[&gate.job])).unwrap();
        let waiter = {
            let job = job.clone();
            std::thread::spawn(move || job.wait(Some(PATIENCE)).map(|_| Instant::now()))
        };
        std::thread::sleep(Duration::from_millis(5 + round));
        let opened = Instant::now();
        gate.open();
        let heard = waiter.join().unwrap().unwrap();
        assert!(heard.duration_since(opened) < Duration::from_secs(5), "{round}");
    }
    // A handle dropped while its job is held: the layouts go when it ends, without anybody asking.
    let gate = Gate::new();
    let weak = Arc::downgrade(&dst);
    drop(ctx.transfer(&src, &dst, &ONE, &ONE, &after(&[&gate.job])).unwrap());
    drop(dst);
    gate.open();
    common::eventually("the job lets go", || weak.upgrade().is_none());
}

#[test]
fn callbacks_may_submit_to_an_ordered_context_and_close_it() {
    if !gpu() {
        return;
    }
    let ctx = Arc::new(context(true));
    let [src, dst] = pair([MemoryKind::Pinned, DEVICE], 4);
    let (told, ended) = mpsc::channel();
    for _ in 0..20 {
        let first = ctx.transfer(&src, &dst, &ONE, &ONE, &TransferOptions::default()).unwrap();
        let (inner, from, to, told) = (ctx.clone(), src.clone(), dst.clone(), told.clone());
        first.on_complete(move |_| {
            let next = inner.transfer(&from, &to, &ONE, &ONE, &TransferOptions::default());
            told.send(next.map(drop)).unwrap();
        });
        ctx.transfer(&src, &dst, &[BlockId(1)], &[BlockId(1)], &TransferOptions::default()).unwrap();
    }
    for _ in 0..20 {
        ended.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    let last = ctx.transfer(&src, &dst, &ONE, &ONE, &TransferOptions::default()).unwrap();
    let also = ctx.transfer(&src, &dst, &ONE, &ONE, &TransferOptions::default()).unwrap();
    let (inner, closed) = (ctx.clone(), told);
    last.on_complete(move |_| closed.send(inner.close(Some(PATIENCE))).unwrap());
    ended.recv_timeout(PATIENCE).unwrap().unwrap();
    also.wait(Some(PATIENCE)).unwrap();
}

#[test]
fn a_follower_of_a_transfer_by_layer_fails_with_it() {
    if !gpu() {
        return;
    }
    let ctx = context(false);
    let [src, dst] = pair([MemoryKind::Pinned, DEVICE], 4);
    // The second layer's launch is refused.
    let options = TransferOptions {
        per_layer: true,
        engine: Some(kvferry::Engine::Kernel),
        ..TransferOptions::default()
    };
    faults::inject("cuLaunchKernel", 2, 1);
    let first = ctx.transfer(&src, &dst, &ONE, &ONE, &options).unwrap();
    faults::clear();
    let second = ctx.transfer(&src, &dst, &ONE, &[BlockId(1)], &after(&[&first])).unwrap();
    let failure = second.wait(Some(PATIENCE)).unwrap_err();
    assert!(matches!(&failure, Error::Transfer(failure) if failure.reason.contains("follow")), "{failure}");
    assert!(first.wait(Some(PATIENCE)).is_err() && first.done());
    // One that has failed already is not even started.
    let third = ctx.transfer(&src, &dst, &ONE, &[BlockId(2)], &after(&[&first])).unwrap();
    assert!(third.done() && third.wait(None).is_err());
    assert_eq!(ctx.in_flight(), 0);
}

#[test]
fn a_failing_bounce_of_many_groups_unwinds_no_deeper() {
    if !gpu() {
        return;
    }
    let ctx = TransferContext::builder().device(0).threads(1).pinned_bytes(1 << 20).build().unwrap();
    // A slot holds one block: as many groups as blocks.
    let cfg =
        LayoutConfig::builder().num_blocks(4000).num_layers(1).outer_dim(1).page_size(1).inner_dim(100 << 10);
    let host = Layout::fully_contiguous(cfg.dtype(Dtype::UInt8).build().unwrap(), KvOrder::Nhd).unwrap();
    let src = PhysicalLayout::allocate(host.clone(), MemoryKind::System).unwrap();
    let dst = PhysicalLayout::allocate(host, DEVICE).unwrap();
    let ids: Vec<BlockId> = (0..4000).map(BlockId).collect();
    let failing = Arc::new(AtomicBool::new(true));
    faults::inject("cuEventRecord", 3, 1);
    let job = ctx.transfer(&src, &dst, &ids, &ids, &TransferOptions::default()).unwrap();
    let outcome = job.wait(Some(PATIENCE));
    faults::clear();
    let Err(Error::Transfer(failure)) = outcome else { panic!("{outcome:?}") };
    assert!(!failure.failed_blocks.is_empty() && failing.swap(false, Ordering::Relaxed));
    ctx.transfer(&src, &dst, &ids[..8], &ids[..8], &TransferOptions::default())
        .unwrap()
        .wait(Some(PATIENCE))
        .unwrap();
    assert_eq!(ctx.in_flight(), 0);
}

#[test]
fn a_lane_is_not_given_away_while_a_job_is_to_come() {
    if !gpu() {
        return;
    }
    let ctx = context(false);
    let [src, dst] = pair([MemoryKind::Pinned, DEVICE], 4);
    let gate = Gate::new();
    let held = ctx.transfer(&src, &dst, &ONE, &ONE, &after(&[&gate.job])).unwrap();
    // Other streams of the pool come by meanwhile.
    let others: Vec<_> = (0..16)
        .map(|_| ctx.transfer(&src, &dst, &ONE, &[BlockId(1)], &TransferOptions::default()).unwrap())
        .collect();
    let (told, heard) = mpsc::channel();
    held.on_complete(move |outcome| told.send(outcome.is_ok()).unwrap());
    gate.open();
    assert!(heard.recv_timeout(PATIENCE).unwrap());
    for job in others {
        job.wait(Some(PATIENCE)).unwrap();
    }
}

#[test]
fn long_id_lists_that_nobody_waits_for_do_not_use_up_the_ring() {
    if !gpu() {
        return;
    }
    let ctx = context(false);
    let [src, dst] = pair([MemoryKind::Pinned, DEVICE], 6000);
    // More pairs than a launch has parameters for: every job leases a table of the ring, which has fewer.
    let [forth, back]: [Vec<BlockId>; 2] =
        [(0..6000).map(BlockId).collect(), (0..6000).rev().map(BlockId).collect()];
    let options = TransferOptions { engine: Some(kvferry::Engine::Kernel), ..TransferOptions::default() };
    let jobs: Vec<_> = (0..40).map(|_| ctx.transfer(&src, &dst, &forth, &back, &options).unwrap()).collect();
    for job in jobs {
        job.wait(Some(PATIENCE)).unwrap();
    }
}
