//! Many threads, many jobs, and ends of contexts in between.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::layouts::ids;
use common::{
    Gate, PATIENCE, after, context, eventually, first_bytes, occupy, pooled, small_job, small_pair,
};
use kvferry::{
    BlockId, Error, KvOrder, Layout, MemoryKind, PhysicalLayout, TransferContext, TransferOptions,
};

/// Copy threads and open descriptors of this process. Other tests run meanwhile, so only names of ours count.
fn copy_threads() -> usize {
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .flatten()
        .map(name)
        .filter(|name| name.starts_with("kvferry-copy"))
        .count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// 16 MiB in 8 blocks.
fn large_pair() -> (Arc<PhysicalLayout>, Arc<PhysicalLayout>) {
    let layout = Layout::fully_contiguous(common::config(8, 1, 32, 8, 2048), KvOrder::Nhd).unwrap();
    let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    let (src, dst) = (make(), make());
    src.fill(1).unwrap();
    (src, dst)
}

fn is_copied(layout: &PhysicalLayout) -> bool {
    let len = layout.layout().region_bytes() as usize;
    first_bytes(layout, len).iter().all(|&byte| byte == 1)
}

#[test]
fn eight_threads_share_a_context() {
    let ctx = context(2);
    let base = pooled();
    thread::scope(|scope| {
        for seed in 0..8u32 {
            let (ctx, base) = (&ctx, &base);
            scope.spawn(move || {
                let (src, dst) = small_pair();
                let route = ctx.route(&src, &dst, base).unwrap();
                let mut pending = Vec::new();
                for round in 0..400u32 {
                    let block = [BlockId((seed + round) % 4)];
                    let job = match round % 4 {
                        0 => ctx.transfer(&src, &dst, &block, &block, base).unwrap(),
                        1 => ctx.transfer(&src, &dst, &block, &block, &TransferOptions::default()).unwrap(),
                        _ => route.submit(&block, &block).unwrap(),
                    };
                    match round % 3 {
                        0 => drop(job.wait(Some(PATIENCE)).unwrap()),
                        1 => pending.push(job),
                        _ => drop(job),
                    }
                }
                for job in pending {
                    job.wait(Some(PATIENCE)).unwrap();
                }
            });
        }
    });
    eventually("nothing is in flight", || ctx.in_flight() == 0);
}

#[test]
fn ten_thousand_tiny_jobs_leave_nothing_behind() {
    let base = pooled();
    let fds = descriptors();
    for _ in 0..2 {
        let ctx = context(2);
        let (src, dst) = small_pair();
        let jobs: Vec<_> = (0..10_000u32)
            .map(|index| ctx.transfer(&src, &dst, &[BlockId(index % 4)], &[BlockId(0)], &base).unwrap())
            .collect();
        for job in &jobs {
            job.wait(Some(PATIENCE)).unwrap();
        }
        assert_eq!(ctx.in_flight(), 0);
        drop(ctx);
        assert_eq!(Arc::strong_count(&src), 1);
    }
    // Descriptors of tests that run meanwhile come and go; a leak of one per job would show.
    assert!(descriptors() < fds + 100);
}

#[test]
fn layouts_made_and_dropped_in_a_loop_do_not_pile_up() {
    let ctx = context(1);
    for _ in 0..2_000 {
        let (src, dst) = small_pair();
        ctx.transfer(&src, &dst, &[BlockId(0)], &[BlockId(1)], &TransferOptions::default()).unwrap();
        assert_eq!((Arc::strong_count(&src), Arc::strong_count(&dst)), (1, 1));
    }
}

#[test]
fn close_waits_for_jobs_in_flight() {
    let ctx = context(2);
    let pairs: Vec<_> = (0..4).map(|_| large_pair()).collect();
    for (src, dst) in &pairs {
        ctx.transfer(src, dst, &ids(0..8), &ids(0..8), &TransferOptions::default()).unwrap();
    }
    ctx.close(None).unwrap();
    assert_eq!(ctx.in_flight(), 0);
    assert!(pairs.iter().all(|(_, dst)| is_copied(dst)));
    ctx.close(None).unwrap();
}

#[test]
fn dropping_the_context_waits_too() {
    let ctx = context(2);
    let (src, dst) = large_pair();
    let job = ctx.transfer(&src, &dst, &ids(0..8), &ids(0..8), &TransferOptions::default()).unwrap();
    drop(ctx);
    assert!(job.done() && is_copied(&dst));
}

#[test]
fn close_with_a_timeout_gives_up_and_can_be_tried_again() {
    let ctx = context(1);
    let gate = Gate::new();
    let job = small_job(&ctx, &after(&[&gate.job]));
    let start = Instant::now();
    let limit = Duration::from_millis(20);
    assert!(matches!(ctx.close(Some(limit)), Err(Error::Timeout { .. })));
    assert!(start.elapsed() >= limit);
    assert!(matches!(ctx.close(Some(Duration::ZERO)), Err(Error::Timeout { .. })));
    let (src, dst) = small_pair();
    let refused = ctx.transfer(&src, &dst, &[], &[], &TransferOptions::default());
    assert!(matches!(refused, Err(Error::Closed)));
    gate.open();
    ctx.close(Some(PATIENCE)).unwrap();
    assert!(job.done());
}

#[test]
fn many_threads_close_at_once() {
    let ctx = context(3);
    let (src, dst) = large_pair();
    let job = ctx.transfer(&src, &dst, &ids(0..8), &ids(0..8), &TransferOptions::default()).unwrap();
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                ctx.close(Some(PATIENCE)).unwrap();
                assert!(job.done());
            });
        }
    });
}

#[test]
fn close_helps_when_every_copy_thread_is_busy() {
    let ctx = context(1);
    let busy = occupy(&ctx);
    let job = small_job(&ctx, &pooled());
    thread::scope(|scope| {
        let closing = scope.spawn(|| ctx.close(Some(PATIENCE)));
        eventually("the job ends", || job.done());
        // Its copy thread is still in the callback, and is waited for.
        thread::sleep(Duration::from_millis(5));
        assert!(!closing.is_finished());
        drop(busy);
        closing.join().unwrap().unwrap();
    });
}

#[test]
fn a_callback_may_submit() {
    let ctx = Arc::new(context(1));
    let (count, (done, wait)) = (Arc::new(AtomicUsize::new(0)), mpsc::channel());
    fn next(
        ctx: Arc<TransferContext>,
        count: Arc<AtomicUsize>,
        done: mpsc::Sender<()>,
        options: TransferOptions,
    ) {
        small_job(&ctx, &options).on_complete(move |_| {
            if count.fetch_add(1, Ordering::Relaxed) == 20_000 {
                return done.send(()).unwrap();
            }
            // Inline jobs end before their callback is registered: without care this is a recursion.
            let options =
                if count.load(Ordering::Relaxed) < 1_000 { options } else { TransferOptions::default() };
            next(ctx, count, done, options);
        });
    }
    next(ctx.clone(), count, done, pooled());
    wait.recv_timeout(PATIENCE).unwrap();
    eventually("nothing is in flight", || ctx.in_flight() == 0);
}

#[test]
fn a_callback_may_close_and_drop_its_context() {
    for threads in 1..=3 {
        for drops in [false, true] {
            let gate = Gate::new();
            let ctx = Arc::new(context(threads));
            let (told, hears) = mpsc::channel();
            let first = small_job(&ctx, &after(&[&gate.job]));
            // More jobs than threads, some behind the one whose callback closes.
            let jobs: Vec<_> = (0..8)
                .map(|index| match index % 2 {
                    0 => small_job(&ctx, &after(&[&gate.job])),
                    _ => small_job(&ctx, &after(&[&first])),
                })
                .collect();
            for job in jobs.iter().chain([&first]) {
                let (ctx, told) = (ctx.clone(), told.clone());
                job.on_complete(move |_| {
                    let closed = drops || ctx.close(None).is_ok();
                    drop(ctx);
                    told.send(closed).unwrap();
                });
            }
            drop(ctx);
            gate.open();
            for _ in 0..9 {
                assert_eq!(hears.recv_timeout(PATIENCE), Ok(true));
            }
            assert!(jobs.iter().all(|job| job.done()));
        }
    }
    eventually("the copy threads end", || copy_threads() < 40);
}

#[test]
fn a_context_without_pooled_jobs_has_no_threads() {
    let before = copy_threads();
    let contexts: Vec<_> = (0..200).map(|_| context(16)).collect();
    for ctx in &contexts {
        small_job(ctx, &TransferOptions::default());
    }
    // Far fewer than the 3,200 that these contexts could start; other tests have a few.
    assert!(copy_threads() < before + 100);
}

#[test]
fn threads_go_with_their_context() {
    for _ in 0..50 {
        let ctx = context(8);
        small_job(&ctx, &pooled()).wait(Some(PATIENCE)).unwrap();
    }
    // 400 threads were started.
    eventually("the copy threads end", || copy_threads() < 100);
}
