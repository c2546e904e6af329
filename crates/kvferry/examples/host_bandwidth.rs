//! The host engine against plain `memcpy` with as many threads, in the same run.
//!
//! `cargo run --release -p kvferry --example host_bandwidth [blocks [threads [rounds]]]`: blocks of 2 MiB, 256 by default.
//! GB/s are 10^9 payload bytes per second, the best of the rounds on both sides; blocks move in scattered order.
#![allow(clippy::print_stdout, reason = "a program for people")]

use std::sync::Arc;
use std::time::Instant;

use kvferry::host::{Copier, CopyHint, CopyNest, HostBuffer, HostOptions, HostRegion};
use kvferry::{
    BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind, PhysicalLayout,
    TransferContext, TransferOptions,
};

const BLOCK_BYTES: u64 = 2 << 20;
const FC: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Nhd };
const HND: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Hnd };
const LW: LayoutKind = LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Nhd };

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let blocks = args.next().transpose()?.unwrap_or(256);
    let threads = args.next().transpose()?.map_or_else(kvferry::host::cpu::usable_cpus, |n| n as usize);
    let rounds = args.next().transpose()?.unwrap_or(7);
    let ctx = TransferContext::builder().threads(threads).build()?;
    // Heads of 256 bytes throughout; (layers, heads) make chunks of 32 KiB or 4 KiB.
    let config = |layers: u64, heads: u64| {
        LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(layers)
            .page_size(16)
            .num_heads(heads)
            .head_dim(128)
            .dtype(Dtype::BFloat16)
            .build()
    };
    println!("{blocks} blocks of 2 MiB, {threads} thread(s), best of {rounds}");
    println!("{:28}{:>10}{:>10}{:>8}", "", "kvferry", "memcpy", "ratio");
    for (name, layers, heads, src, dst) in [
        ("FC -> FC", 32, 8, FC, FC),
        ("FC -> LW, 32 KiB runs", 32, 8, FC, LW),
        ("LW -> FC, 32 KiB runs", 32, 8, LW, FC),
        ("FC -> LW, 4 KiB runs", 256, 1, FC, LW),
        ("LW -> FC, 4 KiB runs", 256, 1, LW, FC),
        ("NHD -> HND, 256 B rows", 32, 8, FC, HND),
        ("HND -> NHD, 256 B rows", 32, 8, HND, FC),
    ] {
        let config = config(layers, heads)?;
        let make = |kind, value| -> anyhow::Result<_> {
            let layout = PhysicalLayout::allocate(Layout::of_kind(config, kind)?, MemoryKind::System)?;
            layout.fill(value)?;
            Ok(layout)
        };
        let (src, dst) = (make(src, 1)?, make(dst, 2)?);
        // 97 is prime, so that multiples of it visit every block of a power-of-two count.
        let scattered =
            |step: u64| (0..blocks).map(|i| BlockId((i * step % blocks) as u32)).collect::<Vec<_>>();
        let (from, to) = (scattered(97), scattered(31));
        let flat = Flat::new(blocks * BLOCK_BYTES)?;
        let (mut ours, mut theirs) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..rounds {
            theirs = theirs.min(flat.copy(threads as u64)?);
            let start = Instant::now();
            // Not `wait`: it would help, and be one thread more.
            let (ended, end) = std::sync::mpsc::channel();
            let job = ctx.transfer(&src, &dst, &from, &to, &TransferOptions::default())?;
            job.on_complete(move |_| ended.send(()).unwrap_or_default());
            end.recv()?;
            ours = ours.min(start.elapsed().as_secs_f64());
        }
        let speed = |seconds: f64| (blocks * BLOCK_BYTES) as f64 / seconds / 1e9;
        println!("{name:28}{:>10.2}{:>10.2}{:>8.2}", speed(ours), speed(theirs), theirs / ours);
    }
    Ok(())
}

/// Two buffers for a plain copy, one share per thread.
struct Flat {
    src: HostRegion,
    dst: HostRegion,
}

impl Flat {
    fn new(bytes: u64) -> anyhow::Result<Flat> {
        let make = || -> anyhow::Result<HostRegion> {
            let region =
                HostRegion::of_buffer(Arc::new(HostBuffer::new(bytes as usize, HostOptions::default())?));
            region.fill(0, bytes, 3)?;
            Ok(region)
        };
        Ok(Flat { src: make()?, dst: make()? })
    }

    fn copy(&self, threads: u64) -> anyhow::Result<f64> {
        let share = self.src.len() / threads;
        let nest = CopyNest::new(share as usize, &[])?;
        let copy =
            |at: u64| Copier::new(CopyHint::Temporal).nest((&self.src, at), (&self.dst, at), &nest, 0..1);
        let start = Instant::now();
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|part| scope.spawn(move || copy(part * share))).collect();
            copy(0)?;
            others.into_iter().try_for_each(|other| other.join().unwrap_or(Ok(())))
        })?;
        Ok(start.elapsed().as_secs_f64())
    }
}
