//! Handles: polling, waiting, awaiting, calling back, and letting go.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use common::{
    Gate, PATIENCE, after, context, eventually, first_bytes, occupy, pooled, small_job, small_pair,
};
use kvferry::{
    BlockId, Engine, Error, Layout, MemoryKind, PhysicalLayout, TransferOptions, TransferStrategy,
};

struct Unpark(Thread, AtomicUsize);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.unpark();
    }
}

/// The smallest executor: polls, parks until woken, polls again.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current(), AtomicUsize::new(0))));
    let mut cx = Context::from_waker(&waker);
    let start = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        assert!(start.elapsed() < PATIENCE, "nobody woke the future");
        thread::park_timeout(PATIENCE);
    }
}

#[test]
fn an_inline_copy_is_complete_when_the_call_returns() {
    let job = small_job(&context(1), &TransferOptions::default());
    assert!(job.done());
    let result = job.outcome().unwrap().unwrap();
    assert_eq!((result.bytes, result.blocks), (512, 1));
    assert_eq!((result.engine, result.strategy), (Engine::Host, TransferStrategy::Memcpy));
    assert!(result.seconds >= 0.0 && result.seconds < 1.0);
    assert_eq!(job.wait(Some(Duration::ZERO)).unwrap(), result);
    assert_eq!(block_on(job.clone()), Ok(result));
    assert!(format!("{job:?}").contains("done"));
}

#[test]
fn a_pending_job_times_out_and_goes_on() {
    let gate = Gate::new();
    let ctx = context(1);
    let job = small_job(&ctx, &after(&[&gate.job]));
    assert!(!job.done() && job.outcome().is_none() && ctx.in_flight() == 1);
    assert!(format!("{job:?}").contains("pending"));
    for limit in [Duration::ZERO, Duration::from_micros(30), Duration::from_millis(20)] {
        let start = Instant::now();
        let error = job.wait(Some(limit)).unwrap_err();
        assert!(start.elapsed() >= limit && start.elapsed() < PATIENCE);
        assert!(matches!(error, Error::Timeout { seconds } if seconds == limit.as_secs_f64()), "{error:?}");
    }
    gate.open();
    assert_eq!(job.wait(Some(PATIENCE)).unwrap().bytes, 512);
    assert_eq!(ctx.in_flight(), 0);
}

#[test]
fn limits_beyond_the_clock_are_no_limit() {
    let ctx = context(1);
    small_job(&ctx, &pooled()).wait(Some(Duration::MAX)).unwrap();
    ctx.close(Some(Duration::MAX)).unwrap();
}

#[test]
fn clones_on_many_threads_see_one_end() {
    let gate = Gate::new();
    let ctx = context(2);
    let job = small_job(&ctx, &after(&[&gate.job]));
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..8)
            .map(|index| {
                let job = job.clone();
                scope.spawn(move || match index % 2 {
                    0 => job.wait(Some(PATIENCE)).unwrap(),
                    _ => block_on(job).unwrap(),
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(5));
        gate.open();
        let results: Vec<_> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
        assert!(results.iter().all(|result| *result == results[0]));
    });
}

#[test]
fn waiting_helps_when_every_copy_thread_is_busy() {
    let ctx = context(2);
    let busy = occupy(&ctx);
    let job = small_job(&ctx, &pooled());
    thread::sleep(Duration::from_millis(2));
    assert!(!job.done());
    assert_eq!(job.wait(Some(PATIENCE)).unwrap().bytes, 512);
    drop(busy);
}

#[test]
fn callbacks_run_once_in_order_before_or_after_the_end() {
    let gate = Gate::new();
    let ctx = context(1);
    let job = small_job(&ctx, &after(&[&gate.job]));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = |number: u32| {
        let seen = seen.clone();
        move |outcome: &kvferry::Outcome| seen.lock().unwrap().push((number, outcome.clone().unwrap().bytes))
    };
    job.on_complete(note(1));
    job.on_complete(|_| panic!("a test's panic, which hurts nobody"));
    job.clone().on_complete(note(2));
    assert!(seen.lock().unwrap().is_empty());
    gate.open();
    job.wait(Some(PATIENCE)).unwrap();
    eventually("both callbacks", || seen.lock().unwrap().len() == 2);
    let here = thread::current().id();
    let (ran, where_to) = mpsc::channel();
    job.on_complete(move |_| ran.send(thread::current().id()).unwrap());
    assert_eq!(where_to.try_recv(), Ok(here));
    assert_eq!(*seen.lock().unwrap(), [(1, 512), (2, 512)]);
}

#[test]
fn a_callback_finds_the_job_ended() {
    for _ in 0..200 {
        let (ctx, (told, hears)) = (context(1), mpsc::channel());
        let job = small_job(&ctx, &pooled());
        let handle = job.clone();
        job.on_complete(move |_| told.send((handle.done(), handle.outcome().is_some())).unwrap());
        assert_eq!(hears.recv_timeout(PATIENCE), Ok((true, true)));
    }
}

#[test]
fn polling_again_replaces_the_waker_and_dropping_removes_it() {
    let gate = Gate::new();
    let ctx = context(1);
    let job = small_job(&ctx, &after(&[&gate.job]));
    let wakers: Vec<Arc<Unpark>> =
        (0..100).map(|_| Arc::new(Unpark(thread::current(), AtomicUsize::new(0)))).collect();
    let poll = |future: &mut kvferry::TransferCompleteNotification, unpark: &Arc<Unpark>| {
        let waker = Waker::from(unpark.clone());
        std::pin::Pin::new(future).poll(&mut Context::from_waker(&waker)).is_pending()
    };
    let mut future = job.clone();
    assert!(wakers.iter().all(|unpark| poll(&mut future, unpark)));
    // All but the last are forgotten.
    assert!(wakers[..99].iter().all(|unpark| Arc::strong_count(unpark) == 1));
    let mut dropped = job.clone();
    assert!(poll(&mut dropped, &wakers[0]));
    drop(dropped);
    assert_eq!(Arc::strong_count(&wakers[0]), 1);
    gate.open();
    eventually("the waker is called", || wakers[99].1.load(Ordering::Relaxed) == 1);
    assert!(wakers[..99].iter().all(|unpark| unpark.1.load(Ordering::Relaxed) == 0));
    assert!(block_on(future).is_ok());
}

#[test]
fn dropped_handles_still_complete() {
    let ctx = context(1);
    let (src, dst) = small_pair();
    let gate = Gate::new();
    drop(ctx.transfer(&src, &dst, &[BlockId(1)], &[BlockId(0)], &after(&[&gate.job])).unwrap());
    assert_eq!(ctx.in_flight(), 1);
    gate.open();
    ctx.close(Some(PATIENCE)).unwrap();
    assert!(first_bytes(&dst, 512).iter().all(|&byte| byte == 1));
}

#[test]
fn an_ended_job_lets_its_layouts_go_before_it_says_so() {
    let ctx = context(3);
    let layout = Layout::fully_contiguous(common::config(8, 1, 16, 8, 2048), kvferry::KvOrder::Nhd).unwrap();
    let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    let ids: Vec<BlockId> = (0..8).map(BlockId).collect();
    for round in 0..30 {
        let (src, dst) = (make(), make());
        let weak = [Arc::downgrade(&src), Arc::downgrade(&dst)];
        let job = ctx.transfer(&src, &dst, &ids, &ids, &TransferOptions::default()).unwrap();
        drop((src, dst));
        match round % 3 {
            0 => drop(job.wait(Some(PATIENCE)).unwrap()),
            1 => drop(block_on(job.clone()).unwrap()),
            _ => eventually("the job ends", || job.done()),
        }
        assert!(weak.iter().all(|layout| layout.upgrade().is_none()), "held in round {round}");
        assert_eq!(ctx.in_flight(), 0);
    }
}
