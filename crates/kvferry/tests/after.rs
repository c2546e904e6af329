//! Jobs that follow others.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Gate, PATIENCE, after, context, first_bytes, small_job, small_pair};
use kvferry::{BlockId, PhysicalLayout, TransferCompleteNotification, TransferContext, TransferOptions};

const ONE: [BlockId; 1] = [BlockId(0)];

fn copy(
    ctx: &TransferContext,
    (from, to): (&Arc<PhysicalLayout>, &Arc<PhysicalLayout>),
    after_jobs: &[&TransferCompleteNotification],
) -> TransferCompleteNotification {
    ctx.transfer(from, to, &ONE, &ONE, &after(after_jobs)).unwrap()
}

fn holds(layout: &PhysicalLayout, value: u8) -> bool {
    first_bytes(layout, 512).iter().all(|&byte| byte == value)
}

#[test]
fn a_chain_hands_bytes_on() {
    for threads in 1..=4 {
        let ctx = context(threads);
        let gate = Gate::new();
        let stations: Vec<_> = (0..50).map(|_| small_pair().1).collect();
        let (source, _) = small_pair();
        let mut last = copy(&ctx, (&source, &stations[0]), &[&gate.job]);
        for pair in stations.windows(2) {
            last = copy(&ctx, (&pair[0], &pair[1]), &[&last]);
        }
        assert!(last.wait(Some(Duration::from_millis(2))).is_err());
        assert!(stations.iter().all(|station| holds(station, 0)));
        assert_eq!(ctx.in_flight(), 50);
        gate.open();
        last.wait(Some(PATIENCE)).unwrap();
        assert!(stations.iter().all(|station| holds(station, 1)));
        assert_eq!(ctx.in_flight(), 0);
    }
}

#[test]
fn a_diamond_waits_for_both_sides_in_two_contexts() {
    for _ in 0..50 {
        let (here, there) = (context(2), context(1));
        let gate = Gate::new();
        let (source, top) = small_pair();
        let ((_, left), (_, right), (_, bottom)) = (small_pair(), small_pair(), small_pair());
        let first = copy(&here, (&source, &top), &[&gate.job]);
        let l = copy(&here, (&top, &left), &[&first]);
        let r = copy(&there, (&top, &right), &[&first]);
        // Named twice, which must not count as one, nor as three.
        let last = copy(&here, (&right, &bottom), &[&l, &r, &r]);
        gate.open();
        last.wait(Some(PATIENCE)).unwrap();
        assert!(l.done() && r.done() && holds(&left, 1) && holds(&bottom, 1));
    }
}

#[test]
fn what_is_over_holds_nothing_up() {
    let ctx = context(1);
    let done = small_job(&ctx, &TransferOptions::default());
    for count in [1, 2, 5] {
        small_job(&ctx, &after(&vec![&done; count])).wait(Some(PATIENCE)).unwrap();
    }
}

#[test]
fn an_empty_job_follows_too() {
    let ctx = context(1);
    let gate = Gate::new();
    let (src, dst) = small_pair();
    let barrier = ctx.transfer(&src, &dst, &[], &[], &after(&[&gate.job])).unwrap();
    assert!(barrier.wait(Some(Duration::from_millis(1))).is_err());
    let behind = small_job(&ctx, &after(&[&barrier]));
    assert!(!behind.done());
    gate.open();
    assert_eq!(barrier.wait(Some(PATIENCE)).unwrap().bytes, 0);
    behind.wait(Some(PATIENCE)).unwrap();
    // Without anything to follow it is over at once, also without a copy thread.
    assert!(ctx.transfer(&src, &dst, &[], &[], &TransferOptions::default()).unwrap().done());
}

#[test]
fn a_long_chain_of_empty_jobs_does_not_recurse() {
    let ctx = context(1);
    let gate = Gate::new();
    let (src, dst) = small_pair();
    let mut last = gate.job.clone();
    for _ in 0..100_000 {
        last = ctx.transfer(&src, &dst, &[], &[], &after(&[&last])).unwrap();
    }
    gate.open();
    last.wait(Some(PATIENCE)).unwrap();
    assert_eq!(ctx.in_flight(), 0);
}

#[test]
fn a_job_may_follow_one_of_a_closed_or_dropped_context() {
    let gate = Gate::new();
    let old = context(1);
    let first = small_job(&old, &after(&[&gate.job]));
    let ctx = context(1);
    let second = small_job(&ctx, &after(&[&first]));
    assert!(old.close(Some(Duration::from_millis(1))).is_err());
    gate.open();
    old.close(Some(PATIENCE)).unwrap();
    drop(old);
    second.wait(Some(PATIENCE)).unwrap();
    small_job(&ctx, &after(&[&first])).wait(Some(PATIENCE)).unwrap();
}

#[test]
fn followers_start_before_callbacks_run() {
    // The callback waits for the follower, which only works if that has been started: by this very thread.
    let ctx = Arc::new(context(1));
    let gate = Gate::new();
    let first = small_job(&ctx, &after(&[&gate.job]));
    let (told, hears) = std::sync::mpsc::channel();
    let closing = ctx.clone();
    first.on_complete(move |_| told.send(closing.close(Some(PATIENCE)).is_ok()).unwrap());
    let followers: Vec<_> = (0..3).map(|_| small_job(&ctx, &after(&[&first]))).collect();
    let last = small_job(&ctx, &after(&followers.iter().collect::<Vec<_>>()));
    gate.open();
    assert_eq!(hears.recv_timeout(PATIENCE), Ok(true));
    assert!(last.done());
}
