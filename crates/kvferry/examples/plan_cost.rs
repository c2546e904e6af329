//! What submitting costs before a byte moves: ids checked, pairs planned, small jobs submitted and waited for.
//!
//! `cargo run --release -p kvferry --example plan_cost`. Every figure is the median of many rounds.
#![allow(clippy::print_stdout, reason = "a program for people")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvferry::layout::{Transform, check_ids};
use kvferry::{
    BlockDim, BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind, PairPlan,
    PairRequest, PhysicalLayout, Side, TransferContext, TransferOptions,
};

const FC: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Nhd };
const UNIVERSAL: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Universal };
const LW: LayoutKind = LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Nhd };

/// Median seconds of `rounds` calls, after a tenth as many to warm up.
fn median<T>(rounds: usize, mut call: impl FnMut() -> T) -> f64 {
    let mut times: Vec<f64> = (0..rounds + rounds / 10)
        .map(|_| {
            let start = Instant::now();
            black_box(call());
            start.elapsed().as_secs_f64()
        })
        .skip(rounds / 10)
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// `count` different ids below `limit`, in the order `order`.
fn ids(order: &str, count: u64, limit: u64) -> Vec<BlockId> {
    let mut state = count ^ limit;
    let mut below = |bound: u64| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 33) % bound
    };
    let step = limit / count;
    // One in each stretch of `step`, so that none comes twice; rising ids are neighbours, as a fresh pool gives them.
    let mut list: Vec<u64> = match order {
        "rising" => (0..count).collect(),
        "falling" => (0..count).rev().collect(),
        _ => (0..count).map(|at| at * step + below(step)).collect(),
    };
    if order == "random" {
        for at in (1..list.len()).rev() {
            list.swap(at, below(at as u64 + 1) as usize);
        }
    }
    list.into_iter().map(|id| BlockId(id as u32)).collect()
}

fn config(blocks: u64, layers: u64, heads: u64) -> anyhow::Result<LayoutConfig> {
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(layers).page_size(16);
    Ok(config.num_heads(heads).head_dim(128).dtype(Dtype::BFloat16).build()?)
}

fn validation() -> anyhow::Result<()> {
    println!("\nids, ns per id (limit 8); plan, ns per id pair beyond 2 us (limit 8)");
    println!(
        "{:>8} {:>9} {:<8} {:>8} {:>12} {:>14} {:>14}",
        "ids", "blocks", "order", "source", "destination", "plan FC-FC", "plan LW-univ"
    );
    for (count, limit) in [
        (16, 1 << 20),
        (17, 1 << 20),
        (64, 1 << 24),
        (1024, 1 << 13),
        (1024, 1 << 17),
        (1024, 1 << 20),
        (1024, 1 << 27),
        (131_072, 1 << 17),
        (131_072, 1 << 20),
        (131_072, 1 << 27),
    ] {
        for order in ["rising", "falling", "random"] {
            let (from, to) = (ids(order, count, limit), ids(order, count, limit));
            let rounds = (4_000_000 / count as usize).clamp(61, 4001);
            let check =
                |side| median(rounds, || check_ids(side, black_box(&from), limit)) * 1e9 / count as f64;
            let plan = |src, dst| -> anyhow::Result<f64> {
                let config = config(limit, 32, 8)?;
                let (src, dst) = (Layout::of_kind(config, src)?, Layout::of_kind(config, dst)?);
                let pair = Arc::new(PairPlan::new(&src, &dst, &PairRequest::default())?);
                let whole = median(rounds, || CopyPlan::new(pair.clone(), black_box(&from), black_box(&to)));
                Ok((whole - 2e-6).max(0.0) * 1e9 / count as f64)
            };
            println!(
                "{count:>8} {limit:>9} {order:<8} {:>8.2} {:>12.2} {:>14.2} {:>14.2}",
                check(Side::Source),
                check(Side::Destination),
                plan(FC, FC)?,
                plan(LW, UNIVERSAL)?,
            );
        }
    }
    Ok(())
}

fn pairs() -> anyhow::Result<()> {
    println!("\nid-free plan, us (limit 50)");
    for (name, src, dst) in [
        ("FC -> FC", FC, FC),
        ("LW -> FC", LW, FC),
        ("FC -> universal", FC, UNIVERSAL),
        (
            "split K/V -> pool",
            LayoutKind::SplitKv { order: KvOrder::Hnd },
            LayoutKind::BlockPool { order: KvOrder::Nhd },
        ),
    ] {
        for layers in [32, 128] {
            let config = config(4096, layers, 8)?;
            let (src, dst) = (Layout::of_kind(config, src)?, Layout::of_kind(config, dst)?);
            let request =
                PairRequest { layers: Some(1..layers - 1), heads: Some(1..7), transform: Transform::Auto };
            let whole = median(2001, || PairPlan::new(&src, &dst, &PairRequest::default())) * 1e6;
            let part = median(2001, || PairPlan::new(&src, &dst, &request)) * 1e6;
            println!("{name:<20} {layers:>4} layers {whole:>8.2}   with ranges {part:>8.2}");
        }
    }
    Ok(())
}

fn small_jobs() -> anyhow::Result<()> {
    println!("\none small job, us");
    println!("{:<34} {:>10} {:>14}", "", "submit", "submit + wait");
    let ctx = TransferContext::host()?;
    // One block of 4 KiB (run on the calling thread) and one of 64 KiB (handed to the copy threads).
    for (name, layers, heads) in
        [("4 KiB, on the calling thread", 1, 1), ("64 KiB, by the copy threads", 1, 8)]
    {
        let config =
            config(64, layers, heads)?.to_builder().page_size(if heads == 1 { 8 } else { 16 }).build()?;
        let make = |kind| -> anyhow::Result<_> {
            let layout = PhysicalLayout::allocate(Layout::of_kind(config, kind)?, MemoryKind::System)?;
            layout.fill(1)?;
            Ok(layout)
        };
        let (src, dst) = (make(LW)?, make(FC)?);
        let options = TransferOptions::default();
        let route = ctx.route(&src, &dst, &options)?;
        let one = [BlockId(7)];
        let mut jobs = Vec::with_capacity(64);
        let mut drain = || -> f64 {
            let start = Instant::now();
            for _ in 0..64 {
                jobs.extend(route.submit(&one, &one));
            }
            let seconds = start.elapsed().as_secs_f64() / 64.0;
            jobs.drain(..).for_each(|job| drop(job.wait(None)));
            seconds
        };
        let mut submits: Vec<f64> = (0..200).map(|_| drain()).collect();
        submits.sort_unstable_by(f64::total_cmp);
        let by_route = median(5001, || route.submit(&one, &one)?.wait(None)) * 1e6;
        println!("{:<34} {:>10.2} {by_route:>14.2}", format!("route, {name}"), submits[100] * 1e6);
        let by_call = median(5001, || ctx.transfer(&src, &dst, &one, &one, &options)?.wait(None)) * 1e6;
        println!("{:<34} {:>10} {by_call:>14.2}", format!("transfer, {name}"), "");
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    println!("{} CPUs, load {}", kvferry::host::cpu::usable_cpus(), load());
    validation()?;
    pairs()?;
    small_jobs()
}

/// The load of the last minute: with more than a few, the figures are those of a busy machine.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}
