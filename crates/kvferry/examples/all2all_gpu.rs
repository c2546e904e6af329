//! First calls between GPUs, checked, and what they cost: one process per GPU.
//!
//! `cargo run --release -p kvferry --example all2all_gpu [ranks [log2 of the largest size]]`; every GPU (at most 8) and 29
//! unless said otherwise. For each size: host time of a call, device time of a call in a graph of 20, and the rate of the
//! bytes that leave a rank, by the kernel and, from 16 MB up, by the copy engine into an output.
//! `KVFERRY_ALL2ALL_TRANSPORT=ipc` measures the other transport.
#![allow(clippy::print_stdout, reason = "this is its output")]

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::all2all::{
    All2All, CallOptions, ExchangeArray, ExchangeDevice, ExchangeEngine, Output, rendezvous,
};
use kvferry::cuda::{DeviceBuffer, DeviceRegion, Driver, Gpu, Graph, Stream};
use kvferry::layout::exchange::HeadLayout;
use kvferry::{Dtype, Error, Region};

type Failure = Box<dyn std::error::Error>;

const HEADS: u64 = 32;
const DIM: u64 = 128;
/// Calls of one graph.
const CALLS: usize = 20;
const ROUNDS: usize = 7;

struct Rank {
    comm: All2All,
    gpu: Arc<Gpu>,
    stream: Stream,
}

fn main() -> ExitCode {
    let outcome = match std::env::var("KVF_RANK") {
        Ok(rank) => rank.parse().map_err(Failure::from).and_then(one),
        Err(_) => all(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the ranks.
fn all() -> Result<(), Failure> {
    let count = Driver::get()?.device_count().min(8);
    let world: u32 = std::env::args().nth(1).map_or(Ok(count), |world| world.parse())?;
    let most = std::env::args().nth(2).unwrap_or_else(|| "29".to_owned());
    let url = format!("file://{}/kvferry-all2all-{}", std::env::temp_dir().display(), std::process::id());
    let start = |rank: u32| {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("KVF_RANK", rank.to_string()).env("KVF_WORLD", world.to_string()).env("KVF_URL", &url);
        command.env("KVF_MOST", &most);
        command.spawn()
    };
    let ranks = (0..world).map(start).collect::<Result<Vec<_>, _>>()?;
    for mut rank in ranks {
        if !rank.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn one(rank: u32) -> Result<(), Failure> {
    let (world, url): (usize, _) = (std::env::var("KVF_WORLD")?.parse()?, std::env::var("KVF_URL")?);
    let gpus = Driver::get()?.device_count();
    let gpu = Gpu::open(rank % gpus)?;
    let patience = Duration::from_secs(60);
    let start = Instant::now();
    let meet = rendezvous(&url, rank as usize, world, patience)?;
    let comm = All2All::builder(rank as usize, world)
        .rendezvous(meet)
        .device(ExchangeDevice::Gpu(gpu.ordinal()))
        .capacity_bytes(1 << 29)
        .buffers(4)
        .timeout(Duration::from_secs(20))
        .connect()?;
    let took = start.elapsed();
    let stream = Stream::new(&gpu)?;
    let at = Rank { comm, gpu, stream };
    if rank == 0 {
        let transport = at.comm.stats().transport;
        println!(
            "{world} ranks on {} by {} ({}), set up in {took:.1?}",
            at.gpu.info().name,
            transport.name,
            transport.why
        );
        println!(
            "{:>10} {:>7} {:>12} {:>12} {:>10}",
            "bytes", "engine", "host/call", "in a graph", "GB/s out"
        );
    }
    at.check()?;
    let most: u32 = std::env::var("KVF_MOST")?.parse()?;
    let logs = [10, 12, 14, 16, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29];
    for log in logs.into_iter().filter(|&log| log <= most) {
        at.measure(1 << log, ExchangeEngine::Push)?;
        if log >= 24 {
            at.measure(1 << log, ExchangeEngine::Copy)?;
        }
    }
    at.comm.close()?;
    Ok(())
}

impl Rank {
    fn array(&self, region: DeviceRegion, tokens: u64) -> ExchangeArray {
        let row = (DIM * 2) as i64;
        let strides = [row * (HEADS * tokens) as i64, row * HEADS as i64, row];
        let (shape, dtype) = ([1, tokens, HEADS, DIM], Dtype::BFloat16);
        ExchangeArray { region: Region::Device(region), offset: 0, shape, strides, dtype }
    }

    fn options(&self, out: Option<Output>, engine: ExchangeEngine) -> CallOptions {
        CallOptions { stream: Some(self.stream.handle()), out, engine, ..CallOptions::default() }
    }

    /// Exchanges and gathers uneven tokens by every engine, and compares every byte.
    fn check(&self) -> Result<(), Failure> {
        let (rank, world) = (self.comm.rank(), self.comm.world());
        let tokens: Vec<u64> = (0..world as u64).map(|rank| 100 + 7 * rank).collect();
        let first: u64 = tokens[..rank].iter().sum();
        let byte = |token: u64, head: u64, at: u64| (token * 131 + head * 31 + at * 7 + (token >> 3)) as u8;
        let row = DIM * 2;
        let bytes = |tokens: std::ops::Range<u64>, heads: std::ops::Range<u64>| -> Vec<u8> {
            let heads = &heads;
            tokens
                .flat_map(|token| {
                    heads.clone().flat_map(move |head| (0..row).map(move |at| byte(token, head, at)))
                })
                .collect()
        };
        let mine = bytes(first..first + tokens[rank], 0..HEADS);
        let buffer = DeviceBuffer::new(mine.len(), self.gpu.ordinal())?;
        buffer.copy_from_host(0, &mine)?;
        let x = self.array(DeviceRegion::of_buffer(Arc::new(buffer)), tokens[rank]);
        let heads = self.comm.head_range(HEADS, None)?;
        let total: u64 = tokens.iter().sum();
        let wanted = bytes(0..total, heads.clone());
        let shape = [1, total, heads.end - heads.start, DIM];
        let out = self.comm.empty_output(&[(shape, Dtype::BFloat16)], HeadLayout::Bnhd)?;
        for (out, engine) in [
            (None, ExchangeEngine::Push),
            (Some(out.clone()), ExchangeEngine::Push),
            (Some(out.clone()), ExchangeEngine::Copy),
        ] {
            let mut options = self.options(out, engine);
            options.rank_tokens = Some(vec![tokens.clone()]);
            let y = self.comm.send_recv_heads(std::slice::from_ref(&x), &options)?.remove(0);
            let back = CallOptions {
                out: None,
                engine: ExchangeEngine::Auto,
                num_heads: Some(vec![HEADS]),
                ..options
            };
            let z = self.comm.gather_heads(&[y.array()], &back)?.remove(0);
            self.stream.synchronize()?;
            self.comm.check()?;
            for (result, wanted) in [(&y, &wanted), (&z, &mine)] {
                let Region::Device(region) = result.region() else {
                    return Err("a result on the host".into());
                };
                let mut found = vec![0; wanted.len()];
                region.read(result.offset(), &mut found)?;
                if found != *wanted {
                    return Err(format!("wrong bytes on rank {rank} by {engine:?}").into());
                }
            }
        }
        Ok(())
    }

    /// Calls with `bytes` of input per rank.
    fn measure(&self, bytes: u64, engine: ExchangeEngine) -> Result<(), Failure> {
        let world = self.comm.world() as u64;
        // Small calls have fewer heads' worth of bytes than one token of the usual shape: they take a shorter row.
        let tokens = (bytes / (HEADS * DIM * 2)).max(1);
        let dim = (bytes / tokens / HEADS / 2).max(1);
        let buffer = DeviceBuffer::new(bytes.max(HEADS * 2) as usize, self.gpu.ordinal())?;
        buffer.memset(0, buffer.len(), 1)?;
        let mut x = self.array(DeviceRegion::of_buffer(Arc::new(buffer)), tokens);
        x.shape[3] = dim;
        x.strides = [(dim * 2 * HEADS * tokens) as i64, (dim * 2 * HEADS) as i64, (dim * 2) as i64];
        let heads = self.comm.head_range(HEADS, None)?;
        let shape = [1, tokens * world, heads.end - heads.start, dim];
        let out = match engine {
            ExchangeEngine::Copy => Some(self.comm.empty_output(&[(shape, x.dtype)], HeadLayout::Bnhd)?),
            _ => None,
        };
        let options = self.options(out, engine);
        let call = || self.comm.send_recv_heads(std::slice::from_ref(&x), &options).map(drop);
        let cx = self.gpu.enter()?;

        for _ in 0..5 {
            call()?;
        }
        self.stream.synchronize()?;
        let eager = if bytes < 1 << 24 { 200 } else { 20 };
        let start = Instant::now();
        for _ in 0..eager {
            call()?;
        }
        let host = start.elapsed() / eager;
        self.stream.synchronize()?;

        let graph = Graph::capture::<Error>(&cx, &self.stream, || (0..CALLS).try_for_each(|_| call()))?;
        let (first, last) = (self.gpu.timed_event(&cx)?, self.gpu.timed_event(&cx)?);
        let mut times = Vec::with_capacity(ROUNDS);
        for round in 0..=ROUNDS {
            first.record(&cx, self.stream.handle())?;
            graph.launch(&cx, &self.stream)?;
            last.record(&cx, self.stream.handle())?;
            self.stream.synchronize()?;
            // The first one warms up.
            if round > 0 {
                times.push(last.seconds_since(&first)? / CALLS as f64);
            }
        }
        self.comm.check()?;
        times.sort_by(f64::total_cmp);
        let time = times[times.len() / 2];
        if self.comm.rank() == 0 {
            let sent = (bytes * (world - 1)) as f64 / world as f64;
            let rate = sent / time * 1e-9;
            println!(
                "{bytes:>10} {:>7} {:>9.2} us {:>9.2} us {rate:>10.1}",
                format!("{engine:?}").to_lowercase(),
                host.as_secs_f64() * 1e6,
                time * 1e6
            );
        }
        Ok(())
    }
}
