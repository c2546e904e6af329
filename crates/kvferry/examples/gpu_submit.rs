//! What a GPU transfer costs the submitting thread, and how late its end is heard of. Prints a table; needs a GPU.
//!
//! `cargo run --release -p kvferry --example gpu_submit [device]`

#![allow(clippy::print_stdout, reason = "a program for people")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use kvferry::{
    BlockDim, BlockId, Dtype, Engine, KvOrder, Layout, LayoutConfig, MemoryKind, PhysicalLayout, Route,
    TransferContext, TransferOptions,
};

const REPEATS: usize = 101;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn config(blocks: u64, layers: u64) -> Result<LayoutConfig> {
    let cfg = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .page_size(16)
        .num_heads(8)
        .head_dim(128);
    Ok(cfg.dtype(Dtype::BFloat16).build()?)
}

/// Every third block, so that none join.
fn ids(count: u32) -> Vec<BlockId> {
    (0..count).map(|at| BlockId(3 * at)).collect()
}

/// Median microseconds of the call that submits, and of submission to the end.
fn time(route: &Route, src: &[BlockId], dst: &[BlockId], repeats: usize) -> Result<(f64, f64)> {
    for _ in 0..3 {
        route.submit(src, dst)?.wait(None)?;
    }
    let (mut submit, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        let start = Instant::now();
        let job = route.submit(src, dst)?;
        submit.push(start.elapsed().as_secs_f64() * 1e6);
        job.wait(None)?;
        whole.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok((median(submit), median(whole)))
}

fn pair(
    cfgs: [LayoutConfig; 2],
    kinds: [MemoryKind; 2],
    separate: [bool; 2],
) -> Result<[Arc<PhysicalLayout>; 2]> {
    let make = |at: usize| -> Result<Arc<PhysicalLayout>> {
        let layout = if separate[at] {
            Layout::layer_separate(cfgs[at], BlockDim::OuterFirst, KvOrder::Nhd)?
        } else {
            Layout::fully_contiguous(cfgs[at], KvOrder::Nhd)?
        };
        Ok(PhysicalLayout::allocate(layout, kinds[at])?)
    };
    Ok([make(0)?, make(1)?])
}

/// What the parts of a submission cost.
fn breakdown(ctx: &TransferContext, ordinal: u32) -> Result<()> {
    use kvferry::cuda::{
        Flight, Gpu, GpuMemory, Stream, StridedCopy, StridedLoop, StridedShape, StridedSide, Walk,
    };
    let each = |what: &str, mut call: Box<dyn FnMut() -> Result<()>>| -> Result<()> {
        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            call()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            std::thread::sleep(Duration::from_micros(30));
        }
        println!("  {what}: {:.2} us", median(times));
        Ok(())
    };
    let gpu = Gpu::open(ordinal)?;
    let stream = Arc::new(Stream::new(&gpu)?);
    println!("parts of a submission");
    let g = gpu.clone();
    each("enter and leave the context", Box::new(move || g.enter().map(drop).map_err(Into::into)))?;
    let outer = gpu.enter()?;
    let g = gpu.clone();
    each("enter and leave it when it is current", Box::new(move || g.enter().map(drop).map_err(Into::into)))?;
    let (g, s) = (gpu.clone(), stream.clone());
    each(
        "a flight that carries nothing: event, record, query",
        Box::new(move || {
            let cx = g.enter()?;
            let mut flight = Flight::new(&g, &cx)?;
            flight.land(&cx, s.handle())?;
            while !flight.done()? {}
            Ok(())
        }),
    )?;
    let memory = |_| -> Result<GpuMemory> {
        let buffer = Arc::new(kvferry::cuda::DeviceBuffer::new(1 << 20, ordinal)?);
        Ok(GpuMemory::of_device(&kvferry::cuda::DeviceRegion::of_buffer(buffer)))
    };
    let (a, b) = (memory(0)?, memory(1)?);
    let side = StridedSide {
        start_region: 0,
        start_offset: 0,
        parts: 1,
        part_stride: 0,
        block_stride: 4096,
        block_region: 0,
        blocks: 256,
        regions: 1,
    };
    let shape = StridedShape {
        src: side,
        dst: side,
        loops: Vec::<StridedLoop>::new(),
        run_bytes: 4096,
        walk: Walk::Source,
    };
    let copy = StridedCopy::new(&gpu, &shape, &[a], &[b])?;
    for count in [1u64, 64] {
        let (g, s, copy) = (gpu.clone(), stream.clone(), copy.clone());
        let pairs: Vec<u64> = (0..count).map(|at| at | (at << 32)).collect();
        let mut submits = Vec::new();
        for _ in 0..200 {
            let cx = g.enter()?;
            let mut flight = Flight::new(&g, &cx)?;
            let start = Instant::now();
            copy.launch(&cx, s.handle(), &pairs, 4, &mut flight)?;
            submits.push(start.elapsed().as_secs_f64() * 1e6);
            flight.land(&cx, s.handle())?;
            flight.wait()?;
            std::thread::sleep(Duration::from_micros(30));
        }
        println!("  the kernel launch alone, {count} pair(s): {:.2} us", median(submits));
    }
    drop(outer);
    let cfg = config(3 * 64, 32)?;
    let [src, dst] = pair([cfg, cfg], [MemoryKind::Device(ordinal); 2], [false, true])?;
    let options = TransferOptions { engine: Some(Engine::Kernel), ..TransferOptions::default() };
    let route = ctx.route(&src, &dst, &options)?;
    let ids = ids(8);
    each(
        "plan of 8 blocks",
        Box::new(move || {
            route.plan(&ids, &ids)?;
            Ok(())
        }),
    )
}

fn main() -> Result<()> {
    let ordinal = std::env::args().nth(1).map_or(Ok(0), |word| word.parse())?;
    let ctx = TransferContext::builder().device(ordinal).build()?;
    let (device, pinned) = (MemoryKind::Device(ordinal), MemoryKind::Pinned);
    let forced = |engine| TransferOptions { engine, ..TransferOptions::default() };
    let engines = [Some(Engine::Kernel), Some(Engine::Batch), Some(Engine::Staged), None];

    breakdown(&ctx, ordinal)?;
    println!("FC host <-> LW device, 32 KiB runs; microseconds: submit, end to end");
    println!("{:>6} {:>6} {:>5} {:>10} {:>10} {:>10}", "layers", "blocks", "to", "engine", "submit", "end");
    for layers in [32, 80] {
        let cfg = config(3 * 64, layers)?;
        for (name, kinds, separate) in
            [("d", [pinned, device], [false, true]), ("h", [device, pinned], [true, false])]
        {
            let [src, dst] = pair([cfg, cfg], kinds, separate)?;
            for engine in engines {
                let route = ctx.route(&src, &dst, &forced(engine))?;
                for blocks in [1, 8, 64] {
                    let ids = ids(blocks);
                    let repeats = if blocks == 64 { 21 } else { REPEATS };
                    let (submit, whole) = time(&route, &ids, &ids, repeats)?;
                    let chosen = route.plan(&ids, &ids)?.choice().engine;
                    let label = if engine.is_none() { format!("auto={chosen}") } else { chosen.to_string() };
                    println!("{layers:>6} {blocks:>6} {name:>5} {label:>10} {submit:>10.2} {whole:>10.1}");
                }
            }
        }
        let [src, dst] = pair([cfg, cfg], [device, device], [false, true])?;
        let route = ctx.route(&src, &dst, &forced(Some(Engine::Kernel)))?;
        for blocks in [1, 8, 64] {
            let (submit, whole) = time(&route, &ids(blocks), &ids(blocks), REPEATS)?;
            println!("{layers:>6} {blocks:>6} {:>5} {:>10} {submit:>10.2} {whole:>10.1}", "d2d", "kernel");
        }
    }

    // Token slots: 131,072 ids of 2 KiB in random order.
    let slots = 1u32 << 17;
    let cfg =
        LayoutConfig::builder().num_blocks(2 * u64::from(slots)).num_layers(1).outer_dim(1).page_size(1);
    let cfg = cfg.inner_dim(1024).dtype(Dtype::BFloat16).build()?;
    let shuffled = |salt: u32| -> Vec<BlockId> {
        (0..slots)
            .map(|at| BlockId(2 * (at.wrapping_mul(0x9E37_79B1).wrapping_add(salt) & (slots - 1))))
            .collect()
    };
    for (name, kinds) in [("h2d", [pinned, device]), ("d2h", [device, pinned]), ("d2d", [device, device])] {
        let [src, dst] = pair([cfg, cfg], kinds, [false, false])?;
        let route = ctx.route(&src, &dst, &forced(None))?;
        let (submit, whole) = time(&route, &shuffled(1), &shuffled(7), 9)?;
        let gbps = f64::from(slots) * 2048.0 / whole / 1e3;
        println!(
            "131,072 ids of 2 KiB {name}: submit {submit:.0} us, end to end {whole:.0} us, {gbps:.1} GB/s"
        );
    }

    // How late waiters hear of the end: against asking without pause.
    println!("wait() beyond asking without pause, microseconds (median of {REPEATS})");
    let cfg = config(3 * 256, 32)?;
    let [src, dst] = pair([cfg, cfg], [pinned, device], [false, true])?;
    let route = ctx.route(&src, &dst, &forced(None))?;
    for blocks in [1, 8, 64, 256] {
        let ids = ids(blocks);
        let mut late = Vec::new();
        for _ in 0..if blocks > 8 { 31 } else { REPEATS } {
            let start = Instant::now();
            let job = route.submit(&ids, &ids)?;
            while !job.done() {
                std::hint::spin_loop();
            }
            let spun = start.elapsed();
            let start = Instant::now();
            route.submit(&ids, &ids)?.wait(None)?;
            late.push((start.elapsed().as_secs_f64() - spun.as_secs_f64()) * 1e6);
        }
        println!("  {blocks} blocks: {:.1}", median(late));
    }
    println!("memory: {:?}", ctx.cost_model().map(|model| model.source));
    Ok(())
}
