//! Measures the CPU backend: latency of small calls, and 64 MB into an output against plain copies of the same bytes.
//!
//! `cargo run --release -p kvferry --example all2all_cpu [ranks]`; ranks are threads, the default is 2.
#![allow(clippy::print_stdout, reason = "this is its output")]

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use kvferry::all2all::{All2All, CallOptions, ExchangeArray, rendezvous};
use kvferry::host::{Copier, CopyNest};
use kvferry::host::{CopyHint, HostBuffer, HostRegion};
use kvferry::layout::exchange::HeadLayout;
use kvferry::{Dtype, HostOptions, Region};

const ROUNDS: usize = 15;

fn memory(len: u64) -> kvferry::Result<HostRegion> {
    let region = HostRegion::of_buffer(Arc::new(HostBuffer::new(len as usize, HostOptions::default())?));
    region.fill(0, len, 1)?;
    Ok(region)
}

fn array(region: &HostRegion, shape: [u64; 4]) -> ExchangeArray {
    let [_, tokens, heads, dim] = shape;
    let row = (dim * 2) as i64;
    let strides = [row * (tokens * heads) as i64, row * heads as i64, row];
    ExchangeArray { region: Region::Host(region.clone()), offset: 0, shape, strides, dtype: Dtype::BFloat16 }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What one rank measured.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    /// Of calls of one token of 8 KB.
    small: Duration,
    /// Of calls of 64 MB into an output.
    large: Duration,
    /// The same into owned results.
    owned: Duration,
    /// Of plain copies of the same bytes, the C library's, all ranks at once.
    plain: Duration,
    /// The same with streaming stores.
    streamed: Duration,
}

fn rank(rank: usize, world: usize, met: &Barrier) -> kvferry::Result<Measured> {
    let meet = rendezvous("memory://bench", rank, world, Duration::from_secs(10))?;
    let comm =
        All2All::builder(rank, world).rendezvous(meet).capacity_bytes(64 << 20).buffers(2).connect()?;
    let mut measured = Measured::default();

    let (heads, dim) = (32, 128);
    let small = array(&memory(heads * dim * 2)?, [1, 1, heads, dim]);
    let options = CallOptions::default();
    for _ in 0..200 {
        comm.send_recv_heads(std::slice::from_ref(&small), &options)?;
    }
    met.wait();
    let start = Instant::now();
    for _ in 0..2000 {
        comm.send_recv_heads(std::slice::from_ref(&small), &options)?;
    }
    measured.small = start.elapsed() / 2000;

    let bytes = 64 << 20;
    let tokens = bytes / (heads * dim * 2);
    let source = memory(bytes)?;
    let large = array(&source, [1, tokens, heads, dim]);
    let result = [1, tokens * world as u64, heads / world as u64, dim];
    let out = comm.empty_output(&[(result, Dtype::BFloat16)], HeadLayout::Bnhd)?;
    let into = CallOptions { out: Some(out), ..CallOptions::default() };
    let target = memory(bytes)?;
    let nest = CopyNest::new(bytes as usize, &[]).map_err(kvferry::host::RegionError::from)?;
    let copy = |hint: CopyHint| -> kvferry::Result<()> {
        Ok(Copier::new(hint).nest((&source, 0), (&target, 0), &nest, 0..1)?)
    };
    let call = |options: &CallOptions| comm.send_recv_heads(std::slice::from_ref(&large), options).map(drop);
    let timed = |what: &dyn Fn() -> kvferry::Result<()>| -> kvferry::Result<Duration> {
        met.wait();
        let start = Instant::now();
        what()?;
        Ok(start.elapsed())
    };
    // In turn, so that whatever else the machine does hits all of them.
    let mut times: [Vec<Duration>; 4] = Default::default();
    for round in 0..ROUNDS + 2 {
        let round_times = [
            timed(&|| call(&into))?,
            timed(&|| call(&options))?,
            timed(&|| copy(CopyHint::Temporal))?,
            timed(&|| copy(CopyHint::NonTemporal))?,
        ];
        // The first rounds touch the memory.
        if round >= 2 {
            times.iter_mut().zip(round_times).for_each(|(all, time)| all.push(time));
        }
    }
    [measured.large, measured.owned, measured.plain, measured.streamed] = times.map(median);
    comm.close()?;
    Ok(measured)
}

/// What a call costs beside the copying: three tensors of one token, alone.
fn overhead() -> kvferry::Result<Duration> {
    let comm = All2All::builder(0, 1).capacity_bytes(1 << 16).connect()?;
    let one = array(&memory(256)?, [1, 1, 1, 128]);
    let arrays = [one.clone(), one.clone(), one];
    let options = CallOptions::default();
    let mut best = Duration::MAX;
    for _ in 0..20 {
        let start = Instant::now();
        for _ in 0..1000 {
            comm.send_recv_heads(&arrays, &options)?;
        }
        best = best.min(start.elapsed() / 1000);
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let world = std::env::args().nth(1).map_or(Ok(2), |text| text.parse::<usize>())?;
    let met = Barrier::new(world);
    let all: Vec<Measured> = std::thread::scope(|scope| {
        let met = &met;
        let threads: Vec<_> = (0..world).map(|index| scope.spawn(move || rank(index, world, met))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a rank panicked")?.map_err(Into::into))
            .collect::<Result<Vec<_>, Box<dyn std::error::Error>>>()
    })?;
    let worst = |of: fn(&Measured) -> Duration| all.iter().map(of).max().unwrap_or_default();
    let (large, owned) = (worst(|m| m.large), worst(|m| m.owned));
    let (plain, streamed) = (worst(|m| m.plain), worst(|m| m.streamed));
    let ratio = |of: Duration, time: Duration| of.as_secs_f64() / time.as_secs_f64();
    println!("one rank alone       {:8.2} us a call of three tensors", overhead()?.as_secs_f64() * 1e6);
    println!("{world} ranks, the slowest of them counts");
    println!("8 KB per rank        {:8.2} us a call", worst(|m| m.small).as_secs_f64() * 1e6);
    for (what, time) in [("into an output", large), ("owned result", owned)] {
        let rate = (64 << 20) as f64 / time.as_secs_f64() / 1e9;
        println!(
            "64 MB, {what:<14}{:8.2} ms, {rate:5.2} GB/s per rank, {:.2} of memcpy, {:.2} of streaming copies",
            time.as_secs_f64() * 1e3,
            ratio(plain, time),
            ratio(streamed, time)
        );
    }
    println!(
        "memcpy {:.2} ms, streaming copy {:.2} ms",
        plain.as_secs_f64() * 1e3,
        streamed.as_secs_f64() * 1e3
    );
    Ok(())
}
