//! How fast this machine copies: `cargo run --release -p kvferry-host --example copy_speed [MiB]`.
//!
//! Prints GB/s (10^9 payload bytes per second, read once and written once) as the best of several passes over buffers
//! larger than the caches, for a flat copy and for loop nests that exchange two axes around runs of several lengths.
#![allow(clippy::print_stdout, reason = "a program for people")]

use std::time::Instant;

use kvferry_host::copy::{CopyHint, CopyNest, Loop, copy_bytes, copy_nest};
use kvferry_host::{HostBuffer, HostOptions, cpu, memory_nodes};

const PASSES: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mib: usize = std::env::args().nth(1).map_or(Ok(512), |text| text.parse())?;
    let bytes = mib << 20;
    println!(
        "cpus {} nodes {} features {}",
        cpu::usable_cpus(),
        memory_nodes().map_or(1, |nodes| nodes.len()),
        cpu::features().join(" ")
    );
    let options = HostOptions { first_touch_threads: 2, ..HostOptions::default() };
    let (src, dst) = (HostBuffer::new(bytes, options)?, HostBuffer::new(bytes, options)?);

    println!("{mib} MiB, GB/s            1 thread          2 threads");
    println!("{:24}{:>9}{:>10}{:>9}{:>10}", "", "cached", "stream", "cached", "stream");
    let row = |name: &str, copy: &(dyn Fn(u64, u64, CopyHint) + Sync)| {
        let mut line = format!("{name:24}");
        for threads in [1, 2] {
            for hint in [CopyHint::Temporal, CopyHint::NonTemporal] {
                let best = (0..PASSES).map(|_| seconds(threads, hint, copy)).fold(f64::INFINITY, f64::min);
                line += &format!("{:>9.2} ", bytes as f64 / best / 1e9);
            }
        }
        println!("{line}");
    };
    row("flat", &|part, parts, hint| {
        let share = bytes / parts as usize;
        let at = part as usize * share;
        let (from, to) = (src.as_ptr().wrapping_add(at), dst.as_ptr().wrapping_add(at));
        // SAFETY: the parts are disjoint shares of two live buffers of `bytes` bytes.
        unsafe { copy_bytes(from, to, share, hint) };
    });
    for run in [64, 128, 256, 512, 4 << 10, 32 << 10, 2 << 20] {
        let nest = exchange(bytes, run)?;
        row(&format!("exchange, runs of {run}"), &|part, parts, hint| {
            let share = nest.num_runs() / parts;
            let range = part * share..(part + 1) * share;
            // SAFETY: the nest spans `bytes` bytes on both sides, and the ranges of the parts are disjoint.
            unsafe { copy_nest(src.as_ptr(), dst.as_ptr(), &nest, range, hint) };
        });
    }
    Ok(())
}

/// Within blocks of 16 pages: [page, head] to [head, page] (NHD to HND), 8 heads, `run` bytes each.
fn exchange(bytes: usize, run: usize) -> Result<CopyNest, Box<dyn std::error::Error>> {
    let (pages, heads) = (16, 8);
    let block = pages * heads * run;
    let step = |count: usize, src: usize, dst: usize| Loop {
        count: count as u64,
        src_stride: src as i64,
        dst_stride: dst as i64,
    };
    let loops =
        [step(bytes / block, block, block), step(heads, run, pages * run), step(pages, heads * run, run)];
    Ok(CopyNest::new(run, &loops)?)
}

fn seconds(threads: u64, hint: CopyHint, copy: &(dyn Fn(u64, u64, CopyHint) + Sync)) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in 1..threads {
            scope.spawn(move || copy(part, threads, hint));
        }
        copy(0, threads, hint);
    });
    start.elapsed().as_secs_f64()
}
