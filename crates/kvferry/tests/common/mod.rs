//! Layouts bound to guarded memory, each with its oracle, and contexts whose threads can be kept busy.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

// The generator of random layouts and transfers is the one that tests the planner.
#[path = "../../../kvferry-layout/tests/common/mod.rs"]
pub mod layouts;

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kvferry::host::{HostBuffer, HostOptions, HostRegion, HugePages};
use kvferry::layout::oracle::{self, POISON};
use kvferry::{
    BlockId, Dtype, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind, PhysicalLayout, Region,
    TransferCompleteNotification, TransferContext, TransferOptions,
};
use layouts::Made;

/// Long enough for anything that is not a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Poisoned bytes before, between and behind the regions.
const GUARD: u64 = 96;

/// A layout in guarded memory of ours.
pub struct Bound {
    pub made: Made,
    pub layout: Arc<PhysicalLayout>,
    pub whole: HostRegion,
    starts: Vec<u64>,
}

impl Bound {
    /// Regions start `skew` bytes off where the alignment leaves the choice.
    pub fn new(made: Made, skew: u64) -> Bound {
        let (count, len) = (made.layout.num_regions(), made.layout.region_bytes());
        let alignment = made.layout.config().alignment();
        let first = if alignment == 1 { GUARD + skew } else { GUARD.next_multiple_of(alignment) };
        let step = (len + GUARD).next_multiple_of(alignment);
        let options = HostOptions { huge_pages: HugePages::Off, ..HostOptions::default() };
        let total = (first + count * step) as usize;
        let whole = HostRegion::of_buffer(Arc::new(HostBuffer::new(total, options).unwrap()));
        whole.fill(0, whole.len(), POISON).unwrap();
        let starts: Vec<u64> = (0..count).map(|index| first + index * step).collect();
        let regions =
            starts.iter().map(|&start| Region::Host(whole.part(start, len).unwrap())).collect::<Vec<_>>();
        let layout = PhysicalLayout::from_regions(made.layout.clone(), MemoryKind::System, regions).unwrap();
        Bound { made, layout, whole, starts }
    }

    /// Every byte, guards included.
    pub fn dump(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.whole.len() as usize];
        self.whole.read(0, &mut bytes).unwrap();
        bytes
    }

    /// What `dump` gives when the regions hold `mem`.
    pub fn image(&self, mem: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![POISON; self.whole.len() as usize];
        for (region, &start) in mem.iter().zip(&self.starts) {
            bytes[start as usize..][..region.len()].copy_from_slice(region);
        }
        bytes
    }

    /// Fills every element with its own value; gives back the regions.
    pub fn fill_unique(&self, seed: u64) -> Vec<Vec<u8>> {
        let mut mem = self.poisoned();
        self.made.oracle.fill_unique(&mut mem, seed);
        self.whole.write(0, &self.image(&mem)).unwrap();
        mem
    }

    pub fn poisoned(&self) -> Vec<Vec<u8>> {
        let mut mem = self.made.oracle.alloc();
        oracle::poison(&mut mem);
        mem
    }
}

pub fn config(blocks: u64, layers: u64, page: u64, heads: u64, dim: u64) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .page_size(page)
        .num_heads(heads)
        .head_dim(dim)
        .dtype(Dtype::BFloat16)
        .build()
        .unwrap()
}

pub fn made(config: LayoutConfig, kind: LayoutKind) -> Made {
    Made::new(config, &layouts::Form::Own(kind))
}

pub const FC: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Nhd };

/// Two small caches, 4 blocks of 256 bytes each, the source filled with ones.
pub fn small_pair() -> (Arc<PhysicalLayout>, Arc<PhysicalLayout>) {
    let layout = Layout::fully_contiguous(config(4, 2, 2, 2, 16), KvOrder::Nhd).unwrap();
    let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    let (src, dst) = (make(), make());
    src.fill(1).unwrap();
    (src, dst)
}

pub fn first_bytes(layout: &PhysicalLayout, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    layout.host_region(0).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

pub fn context(threads: usize) -> TransferContext {
    TransferContext::builder().threads(threads).build().unwrap()
}

/// Options that make even the smallest job go through the pool.
pub fn pooled() -> TransferOptions {
    let done = small_job(&context(1), &TransferOptions::default());
    TransferOptions { after: vec![done.into()], ..TransferOptions::default() }
}

pub fn after(jobs: &[&TransferCompleteNotification]) -> TransferOptions {
    TransferOptions {
        after: jobs.iter().map(|&job| job.clone().into()).collect(),
        ..TransferOptions::default()
    }
}

/// Copies block 0 of a small pair.
pub fn small_job(ctx: &TransferContext, options: &TransferOptions) -> TransferCompleteNotification {
    let (src, dst) = small_pair();
    ctx.transfer(&src, &dst, &[BlockId(0)], &[BlockId(0)], options).unwrap()
}

/// Keeps copy threads in callbacks until dropped.
pub struct Busy(#[allow(dead_code, reason = "dropping them is the signal")] Vec<mpsc::Sender<()>>);

/// Blocks every copy thread of `ctx`.
pub fn occupy(ctx: &TransferContext) -> Busy {
    let layout = Layout::fully_contiguous(config(8, 1, 16, 8, 2048), KvOrder::Nhd).unwrap();
    let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    let (src, dst) = (make(), make());
    let ids: Vec<BlockId> = (0..8).map(BlockId).collect();
    let mut busy = Vec::new();
    while busy.len() < ctx.threads() {
        let job = ctx.transfer(&src, &dst, &ids, &ids, &TransferOptions::default()).unwrap();
        let (hold, held) = mpsc::channel::<()>();
        let (entered, inside) = mpsc::channel();
        let caller = std::thread::current().id();
        job.on_complete(move |_| {
            let late = std::thread::current().id() == caller;
            entered.send(late).unwrap();
            if !late {
                let _ = held.recv();
            }
        });
        // The job (8 MiB) may have ended before the callback was there: then it ran here, and we try again.
        if !inside.recv_timeout(PATIENCE).unwrap() {
            busy.push(hold);
        }
    }
    Busy(busy)
}

/// A job that does not start before `open`.
pub struct Gate {
    pub job: TransferCompleteNotification,
    busy: Busy,
    // Closing it waits for the job.
    ctx: TransferContext,
}

impl Gate {
    pub fn new() -> Gate {
        let ctx = context(1);
        let busy = occupy(&ctx);
        let job = small_job(&ctx, &pooled());
        Gate { job, busy, ctx }
    }

    pub fn open(self) {
        drop(self.busy);
        self.ctx.close(Some(PATIENCE)).unwrap();
    }
}

/// Waits until `met`, or fails.
pub fn eventually(what: &str, mut met: impl FnMut() -> bool) {
    let start = Instant::now();
    while !met() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}
