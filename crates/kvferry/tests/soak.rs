//! Many tiny jobs from eight threads, each followed in a randomly chosen way: every byte is right, and nothing is left.
//!
//! `make soak` runs the million (`cargo test --release -p kvferry --test soak -- --ignored --nocapture`).
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]
#![allow(clippy::print_stdout, reason = "the figures of a run")]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use common::layouts::Dice;
use common::{PATIENCE, after, context, eventually, pooled, small_job};
use kvferry::{
    BlockDim, BlockId, Error, KvOrder, Layout, LayoutKind, MemoryKind, PhysicalLayout, PlanError, Route,
    TransferCompleteNotification, TransferContext, TransferOptions,
};

const THREADS: u64 = 8;
const SOURCES: u64 = 64;
const UNTOUCHED: u8 = 0xEE;

/// What /proc says of this process: resident KiB, open descriptors, copy threads.
#[derive(Clone, Copy, Debug)]
struct Usage {
    rss_kib: u64,
    fds: usize,
    threads: usize,
}

impl Usage {
    fn now() -> Usage {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let list = |path: &str| std::fs::read_dir(path).unwrap().flatten();
        let is_ours = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("kvferry"))
        };
        Usage {
            rss_kib: line.split_whitespace().nth(1).unwrap().parse().unwrap(),
            fds: list("/proc/self/fd").count(),
            threads: list("/proc/self/task").filter(is_ours).count(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn awaited(mut job: TransferCompleteNotification) -> bool {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match Pin::new(&mut job).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcome) => return outcome.is_ok(),
            Poll::Pending => thread::park(),
        }
    }
}

/// Everything the threads share.
struct Arena {
    free: TransferContext,
    ordered: TransferContext,
    done: TransferCompleteNotification,
    /// Times that a tag was told of in this round, by its number.
    told: Vec<AtomicU8>,
    tagged: AtomicU64,
    called: Arc<AtomicU64>,
    expected_calls: AtomicU64,
    jobs: AtomicU64,
}

impl Arena {
    fn collect(&self) {
        for (tag, outcome) in self.free.completed() {
            assert!(outcome.is_ok());
            self.told[tag as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn idle(&self) -> bool {
        self.free.in_flight() == 0 && self.ordered.in_flight() == 0
    }
}

/// Blocks of one layout that were written in this round, and the source blocks they come from.
#[derive(Default)]
struct Written {
    blocks: Vec<BlockId>,
    from: Vec<BlockId>,
}

/// What one thread owns: a source full of a pattern and two targets whose blocks are written once per round.
struct Worker<'a> {
    arena: &'a Arena,
    dice: Dice,
    seed: u64,
    source: Arc<PhysicalLayout>,
    near: Arc<PhysicalLayout>,
    far: Arc<PhysicalLayout>,
    route: Route,
    pooled: TransferOptions,
    order: Vec<u64>,
    next: usize,
    near_written: Written,
    far_written: Written,
    kept: Vec<TransferCompleteNotification>,
    jobs: u64,
}

/// Blocks of 512 bytes in two layers.
fn layout(blocks: u64, kind: LayoutKind) -> Arc<PhysicalLayout> {
    let config = common::config(blocks, 2, 4, 2, 8);
    PhysicalLayout::allocate(Layout::of_kind(config, kind).unwrap(), MemoryKind::System).unwrap()
}

impl<'a> Worker<'a> {
    fn new(arena: &'a Arena, number: u64, jobs_a_round: u64) -> Worker<'a> {
        let kinds = common::layouts::own_kinds();
        let kind = |at: u64| kinds[((number + at) % kinds.len() as u64) as usize];
        // A job writes at most three blocks of a layout.
        let blocks = 3 * jobs_a_round + 16;
        let source = layout(
            SOURCES,
            LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Nhd },
        );
        let (near, far) = (layout(blocks, kind(0)), layout(blocks, kind(5)));
        source.fill_pattern(number, None).unwrap();
        let pooled = TransferOptions { after: vec![arena.done.clone().into()], ..TransferOptions::default() };
        Worker {
            route: arena.free.route(&source, &near, &pooled).unwrap(),
            arena,
            dice: Dice(number),
            seed: number,
            source,
            near,
            far,
            pooled,
            order: (0..blocks).collect(),
            next: 0,
            near_written: Written::default(),
            far_written: Written::default(),
            kept: Vec::new(),
            jobs: 0,
        }
    }

    /// Source blocks, and as many blocks that nothing has written in this round.
    fn ids(&mut self) -> (Vec<BlockId>, Vec<BlockId>) {
        let count = 1 + self.dice.below(3);
        let from = (0..count).map(|_| BlockId(self.dice.below(SOURCES) as u32)).collect();
        let to = self.order[self.next..][..count as usize].iter().map(|&id| BlockId(id as u32)).collect();
        self.next += count as usize;
        (from, to)
    }

    /// From the source to the near target.
    fn load(
        &mut self,
        ctx: &TransferContext,
        options: &TransferOptions,
    ) -> (TransferCompleteNotification, Vec<BlockId>, Vec<BlockId>) {
        let (from, to) = self.ids();
        let job = ctx.transfer(&self.source, &self.near, &from, &to, options).unwrap();
        self.near_written.blocks.extend(&to);
        self.near_written.from.extend(&from);
        self.jobs += 1;
        (job, from, to)
    }

    /// From the near target, whose blocks `at` hold source blocks `from`, to the same blocks of the far one.
    fn forward(
        &mut self,
        ctx: &TransferContext,
        (from, at): (&[BlockId], &[BlockId]),
        options: &TransferOptions,
    ) -> TransferCompleteNotification {
        let job = ctx.transfer(&self.near, &self.far, at, at, options).unwrap();
        self.far_written.blocks.extend(at);
        self.far_written.from.extend(from);
        self.jobs += 1;
        job
    }

    fn keep_or_drop(&mut self, job: TransferCompleteNotification) {
        if self.dice.below(2) == 0 {
            self.kept.push(job);
        }
    }

    fn one(&mut self) {
        let Arena { free, ordered, .. } = self.arena;
        let options = self.pooled.clone();
        match self.dice.below(14) {
            0 => drop(self.load(free, &options).0.wait(Some(PATIENCE)).unwrap()),
            1 => {
                let job = self.load(free, &options).0;
                while job.outcome().is_none() {
                    thread::yield_now();
                }
            }
            2 => drop(self.load(free, &options)),
            3 => {
                let (job, ..) = self.load(free, &options);
                self.arena.expected_calls.fetch_add(1, Ordering::Relaxed);
                let called = self.arena.called.clone();
                job.on_complete(move |outcome| {
                    called.fetch_add(outcome.is_ok().into(), Ordering::Relaxed);
                });
            }
            4 => {
                let (first, from, at) = self.load(free, &options);
                let second = self.forward(free, (&from, &at), &after(&[&first]));
                // Back into the near target: bytes of one layout moved within it.
                let (_, to) = self.ids();
                let pairs = at.len().min(to.len());
                let third =
                    free.transfer(&self.near, &self.near, &at[..pairs], &to[..pairs], &after(&[&first]));
                self.near_written.blocks.extend(&to[..pairs]);
                self.near_written.from.extend(&from[..pairs]);
                self.jobs += 1;
                self.keep_or_drop(second);
                self.keep_or_drop(third.unwrap());
            }
            5 => {
                let tag = self.arena.tagged.fetch_add(1, Ordering::Relaxed);
                drop(self.load(free, &TransferOptions { tag: Some(tag), ..options }));
                if self.dice.below(16) == 0 {
                    self.arena.collect();
                }
            }
            6 => {
                let (job, ..) = self.load(free, &TransferOptions { per_layer: true, ..options });
                let layer = self.dice.below(3);
                match job.layer(layer) {
                    Some(part) => drop(part.wait(Some(PATIENCE)).unwrap()),
                    None => assert_eq!(layer, 2),
                }
                self.keep_or_drop(job);
            }
            7 => {
                // Nothing is named: the order of the context is what hands the bytes on.
                let (first, from, at) = self.load(ordered, &options);
                drop(first);
                let second = self.forward(ordered, (&from, &at), &TransferOptions::default());
                self.keep_or_drop(second);
            }
            8 => assert!(self.load(free, &TransferOptions::default()).0.done()),
            9 => assert!(awaited(self.load(free, &options).0)),
            10 => {
                // Polled once and left.
                let mut job = self.load(free, &options).0;
                let _ = Pin::new(&mut job).poll(&mut Context::from_waker(Waker::noop()));
                self.keep_or_drop(job);
            }
            11 => {
                let (from, to) = self.ids();
                let job = self.route.submit(&from, &to).unwrap();
                self.near_written.blocks.extend(&to);
                self.near_written.from.extend(&from);
                self.jobs += 1;
                self.keep_or_drop(job);
            }
            12 => {
                let job = free.transfer(&self.source, &self.near, &[], &[], &options).unwrap();
                self.jobs += 1;
                self.keep_or_drop(job);
            }
            _ => {
                // Refused, so that nothing is to show for it.
                let (bad, two) = ([BlockId(SOURCES as u32)], [BlockId(1), BlockId(1)]);
                let refused = free.transfer(&self.source, &self.near, &bad, &[BlockId(0)], &options);
                assert!(matches!(refused, Err(Error::Plan(PlanError::BlockId { .. }))));
                let refused = ordered.transfer(&self.source, &self.near, &two, &two, &options);
                assert!(matches!(refused, Err(Error::Plan(PlanError::DuplicateDestination { .. }))));
            }
        }
        if self.kept.len() > 64 {
            for job in self.kept.drain(..) {
                job.wait(Some(PATIENCE)).unwrap();
            }
        }
    }

    /// Begins a round: all targets untouched, blocks in a new order.
    fn begin(&mut self) {
        for target in [&self.near, &self.far] {
            target.fill(UNTOUCHED).unwrap();
        }
        self.dice.shuffle(&mut self.order);
        self.next = 0;
        self.jobs = 0;
    }

    /// Ends a round, when nothing is in flight: every byte is what it should be.
    fn check(&mut self) {
        self.kept.clear();
        for (target, written) in [(&self.near, &mut self.near_written), (&self.far, &mut self.far_written)] {
            target.verify_pattern(self.seed, Some(&written.blocks), Some(&written.from), None).unwrap();
            target.check_fill(UNTOUCHED, &written.blocks).unwrap();
            written.blocks.clear();
            written.from.clear();
        }
        self.source.verify_pattern(self.seed, None, None, None).unwrap();
        self.arena.jobs.fetch_add(self.jobs, Ordering::Relaxed);
    }
}

/// `rounds` rounds of at least `jobs_a_round` jobs from each thread. The first `warm_up` rounds may still grow.
fn soak(rounds: usize, jobs_a_round: u64, warm_up: usize) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap();
    let (start, before) = (Instant::now(), Usage::now());
    let done = small_job(&context(1), &TransferOptions::default());
    let arena = Arena {
        free: context(2),
        ordered: TransferContext::builder().threads(2).ordered(true).build().unwrap(),
        done,
        told: (0..THREADS * (jobs_a_round + 3)).map(|_| AtomicU8::new(0)).collect(),
        tagged: AtomicU64::new(0),
        called: Arc::default(),
        expected_calls: AtomicU64::new(0),
        jobs: AtomicU64::new(0),
    };
    let mut workers: Vec<Worker<'_>> =
        (0..THREADS).map(|number| Worker::new(&arena, number, jobs_a_round)).collect();
    let mut usage = Vec::new();
    for _ in 0..rounds {
        thread::scope(|scope| {
            for worker in &mut workers {
                scope.spawn(move || {
                    worker.begin();
                    // A context that comes and goes with a job in flight.
                    let brief = context(1);
                    let job = small_job(&brief, &pooled());
                    while worker.jobs < jobs_a_round {
                        worker.one();
                    }
                    drop(brief);
                    assert!(job.done());
                });
            }
        });
        eventually("nothing is in flight", || arena.idle());
        // Tags and callbacks come right after the end that they tell of.
        let tags = arena.tagged.swap(0, Ordering::Relaxed) as usize;
        eventually("every tag is told of once", || {
            arena.collect();
            arena.told[..tags].iter().all(|count| count.load(Ordering::Relaxed) == 1)
        });
        eventually("every callback has run", || {
            arena.called.load(Ordering::Relaxed) == arena.expected_calls.load(Ordering::Relaxed)
        });
        assert!(arena.told[tags..].iter().all(|count| count.load(Ordering::Relaxed) == 0));
        arena.told.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        thread::scope(|scope| {
            for worker in &mut workers {
                scope.spawn(move || worker.check());
            }
        });
        eventually("only the threads of the two contexts are left", || Usage::now().threads == 4);
        usage.push(Usage::now());
    }
    let (first, last) = (usage[warm_up], usage[rounds - 1]);
    let most = usage[warm_up..].iter().map(|usage| usage.rss_kib).max().unwrap();
    println!(
        "{} jobs in {:.1} s; after round {warm_up}: {first:?}, at the end: {last:?}, most resident: {most} KiB",
        arena.jobs.load(Ordering::Relaxed),
        start.elapsed().as_secs_f64(),
    );
    assert_eq!(last.fds, first.fds);
    assert!(most < first.rss_kib + (8 << 10), "memory grows: {usage:?}");
    drop(workers);
    drop(arena);
    eventually("no thread and no descriptor is left", || {
        let left = Usage::now();
        (left.fds, left.threads) == (before.fds, 0)
    });
}

#[test]
fn ten_thousand_jobs_from_eight_threads() {
    soak(5, 250, 2);
}

#[test]
#[ignore = "minutes: make soak"]
fn a_million_jobs_from_eight_threads() {
    soak(50, 2_500, 5);
}
