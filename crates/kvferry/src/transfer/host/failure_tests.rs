//! Jobs that fail: what they name, what follows them, and who hears of it.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_layout::{BlockId, Dtype, KvOrder, Layout, LayoutConfig};

use super::fault::{Fault, set};
use crate::transfer::lock;
use crate::{
    Engine, Error, MemoryKind, PhysicalLayout, TransferCompleteNotification, TransferContext,
    TransferFailure, TransferOptions,
};

const BLOCKS: u32 = 8;
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));

/// Blocks of 1 MiB in one run: two tasks each.
fn layouts(dim: u64) -> (Arc<PhysicalLayout>, Arc<PhysicalLayout>) {
    let cfg = LayoutConfig::builder()
        .num_blocks(BLOCKS.into())
        .num_layers(1)
        .page_size(16)
        .num_heads(8)
        .head_dim(dim)
        .dtype(Dtype::BFloat16)
        .build()
        .unwrap();
    let layout = Layout::fully_contiguous(cfg, KvOrder::Nhd).unwrap();
    let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    let (src, dst) = (make(), make());
    src.fill(1).unwrap();
    (src, dst)
}

const LARGE: u64 = 2048;
const SMALL: u64 = 1;

fn context(threads: usize) -> TransferContext {
    TransferContext::builder().threads(threads).build().unwrap()
}

fn submit(
    ctx: &TransferContext,
    (src, dst): &(Arc<PhysicalLayout>, Arc<PhysicalLayout>),
    after: &[TransferCompleteNotification],
) -> TransferCompleteNotification {
    let ids: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let rotated: Vec<BlockId> = (0..BLOCKS).map(|id| BlockId((id + 3) % BLOCKS)).collect();
    let options = TransferOptions {
        after: after.iter().cloned().map(Into::into).collect(),
        ..TransferOptions::default()
    };
    ctx.transfer(src, dst, &ids, &rotated, &options).unwrap()
}

fn failure(job: &TransferCompleteNotification) -> TransferFailure {
    match job.wait(PATIENCE) {
        Err(Error::Transfer(failure)) => failure,
        other => panic!("expected a failed transfer, got {other:?}"),
    }
}

fn first_byte(layout: &PhysicalLayout, block: u64) -> u8 {
    let mut byte = [0];
    let place = layout.memory_region(block, 0, 0).unwrap().addr - layout.spans()[0].addr;
    layout.host_region(0).unwrap().read(place, &mut byte).unwrap();
    byte[0]
}

#[test]
fn a_failed_job_names_its_blocks_and_only_those() {
    for (threads, fault, reason) in [
        (1, Fault::Error(5), "it is a test"),
        (3, Fault::Error(5), "it is a test"),
        (2, Fault::Panic(5), "panicked"),
    ] {
        let ctx = context(threads);
        let pair = layouts(LARGE);
        set(&pair.1, fault);
        let job = submit(&ctx, &pair, &[]);
        let failure = failure(&job);
        assert_eq!((failure.engine, &failure.failed_blocks[..]), (Engine::Host, &[5][..]));
        assert!(failure.reason.contains(reason), "{failure}");
        assert!(failure.to_string().contains("not moved: 5"), "{failure}");
        // The rest went on, and the context still works.
        for block in (0..u64::from(BLOCKS)).filter(|&block| block != 5) {
            assert_eq!(first_byte(&pair.1, block), 1);
        }
        assert_eq!(job.outcome(), Some(Err(failure)));
        assert_eq!(ctx.in_flight(), 0);
        submit(&ctx, &layouts(LARGE), &[]).wait(PATIENCE).unwrap();
    }
}

#[test]
fn failed_blocks_are_ids_of_the_destination_whatever_the_page_of_the_source() {
    let (ctx, (src, dst)) = (context(2), layouts(LARGE));
    let src = src.with_page_size(4).unwrap();
    set(&dst, Fault::Error(5));
    let from: Vec<BlockId> = (4..12).map(BlockId).collect();
    let to = [BlockId(5), BlockId(6)];
    let job = ctx.transfer(&src, &dst, &from, &to, &TransferOptions::default()).unwrap();
    assert_eq!(failure(&job).failed_blocks, [5]);
}

#[test]
fn several_failures_are_one_list() {
    let pair = layouts(SMALL);
    set(&pair.1, Fault::Error(6));
    set(&pair.1, Fault::Panic(2));
    // One inline task of all blocks: all of them are in doubt.
    assert_eq!(failure(&submit(&context(1), &pair, &[])).failed_blocks, (0..BLOCKS).collect::<Vec<_>>());
    let pair = layouts(LARGE);
    set(&pair.1, Fault::Error(6));
    set(&pair.1, Fault::Panic(2));
    assert_eq!(failure(&submit(&context(2), &pair, &[])).failed_blocks, [2, 6]);
}

#[test]
fn what_follows_a_failed_job_fails_whole_and_does_not_move() {
    let ctx = context(2);
    let (top, left, right, bottom) = (layouts(LARGE), layouts(LARGE), layouts(SMALL), layouts(LARGE));
    set(&top.1, Fault::Error(0));
    let first = submit(&ctx, &top, &[]);
    let l = submit(&ctx, &left, std::slice::from_ref(&first));
    let r = submit(&ctx, &right, std::slice::from_ref(&first));
    let last = submit(&ctx, &bottom, &[l.clone(), r.clone(), first.clone()]);
    let all: Vec<u32> = (0..BLOCKS).collect();
    for (job, pair) in [(&last, &bottom), (&r, &right), (&l, &left)] {
        let failure = failure(job);
        assert_eq!(failure.failed_blocks, all);
        assert!(failure.reason.contains("follow") && failure.reason.contains("it is a test"), "{failure}");
        assert!(all.iter().all(|&block| first_byte(&pair.1, block.into()) == 0));
    }
    // Also when the failure is old news.
    assert_eq!(failure(&submit(&ctx, &layouts(SMALL), &[first])).failed_blocks, all);
    ctx.close(PATIENCE).unwrap();
}

#[test]
fn a_long_chain_fails_without_recursion_and_with_one_reason() {
    let ctx = context(1);
    let bad = layouts(SMALL);
    set(&bad.1, Fault::Error(0));
    let shared = layouts(SMALL);
    // A second failing job keeps the chain held until it stands; its block is what the reason is about.
    let start = submit(&ctx, &layouts(LARGE), &[]);
    let mut last = submit(&ctx, &bad, &[start]);
    for _ in 0..20_000 {
        last = submit(&ctx, &shared, &[last]);
    }
    let failure = failure(&last);
    assert!(failure.reason.len() < 200, "{}", failure.reason);
    ctx.close(PATIENCE).unwrap();
    assert_eq!(ctx.in_flight(), 0);
}

/// Keeps the messages of errors.
struct Log;

static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        lock(&LOGGED).push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_failure_that_nobody_looks_at_is_logged_once() {
    // The only subscriber of this test binary; other tests look at their failures or fail other blocks.
    tracing::subscriber::set_global_default(Log).unwrap();
    let logged = |text: &str| lock(&LOGGED).iter().filter(|line| line.contains(text)).count();
    let ctx = context(1);
    let pair = layouts(SMALL);
    // A list of ids that no other test gives.
    let doubtful = [BlockId(7), BlockId(1)];
    let marker = "not moved: 1, 7";
    set(&pair.1, Fault::Error(7));
    let submit =
        || ctx.transfer(&pair.0, &pair.1, &doubtful, &doubtful, &TransferOptions::default()).unwrap();

    let looked = submit();
    looked.outcome().unwrap().unwrap_err();
    drop(looked);
    assert_eq!(logged(marker), 0);

    let (job, other) = (submit(), submit());
    let clone = job.clone();
    drop(job);
    other.on_complete(|outcome| assert!(outcome.is_err()));
    assert_eq!(logged(marker), 0);
    drop(clone);
    assert_eq!(logged(marker), 1);
    drop(other);
    assert_eq!(logged(marker), 2);
}
