//! What putting one strided copy on a stream costs the CPU: `cargo run --release -p kvferry-cuda --example launch_cost`.
#![allow(clippy::print_stdout, reason = "it prints what it measured")]

use std::sync::Arc;
use std::time::Instant;

use kvferry_cuda::{
    DeviceBuffer, DeviceRegion, Flight, Gpu, GpuMemory, PairRing, Result, Stream, StridedCopy, StridedLoop,
    StridedShape, StridedSide, Walk,
};

const ROUNDS: u32 = 2000;

fn main() -> Result<()> {
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(&gpu)?;
    let (layers, blocks, run) = (80, 4096, 512);
    let side = |regions, block| StridedSide {
        start_region: 0,
        start_offset: 0,
        parts: 1,
        part_stride: 0,
        block_stride: block,
        block_region: 0,
        blocks,
        regions,
    };
    let shape = StridedShape {
        src: side(1, layers * run),
        dst: side(layers, run),
        loops: vec![StridedLoop {
            count: layers,
            src_stride: run,
            dst_stride: 0,
            src_region: 0,
            dst_region: 1,
        }],
        run_bytes: run,
        walk: Walk::Source,
    };
    let memory = |bytes: u64| -> Result<GpuMemory> {
        let buffer = DeviceBuffer::new(bytes as usize, 0)?;
        Ok(GpuMemory::of_device(&DeviceRegion::of_buffer(Arc::new(buffer))))
    };
    let src = [memory(layers * run * blocks)?];
    let dst = (0..layers).map(|_| memory(run * blocks)).collect::<Result<Vec<_>>>()?;
    let copy = StridedCopy::new(&gpu, &shape, &src, &dst)?;
    let ring = PairRing::new(&gpu, 4096, 4, 4)?;
    for count in [1_u64, 64, 256, 1024, 3000] {
        let pairs: Vec<u64> = (0..count).map(|id| id | (count - 1 - id) << 32).collect();
        for table in [false, true] {
            let mut steps = [0.0; 5];
            for round in 0..ROUNDS + 100 {
                let begin = Instant::now();
                let cx = gpu.enter()?;
                let entered = begin.elapsed();
                let mut flight = Flight::new(&gpu, &cx)?;
                let made = begin.elapsed();
                if table {
                    match ring.lease(pairs.len())? {
                        Some(room) => {
                            let table = room.fill(|room| room.copy_from_slice(&pairs));
                            copy.launch_table(&cx, stream.handle(), &table, 16, &mut flight)?;
                        }
                        None => println!("the ring is full"),
                    }
                } else {
                    copy.launch(&cx, stream.handle(), &pairs, 16, &mut flight)?;
                }
                let launched = begin.elapsed();
                flight.land(&cx, stream.handle())?;
                let landed = begin.elapsed();
                flight.wait()?;
                let waited = begin.elapsed();
                if round >= 100 {
                    let times =
                        [entered, made - entered, launched - made, landed - launched, waited - landed];
                    for (sum, time) in steps.iter_mut().zip(times) {
                        *sum += time.as_secs_f64() * 1e6 / f64::from(ROUNDS);
                    }
                }
            }
            let [enter, new, launch, land, wait] = steps;
            println!(
                "{count} pairs{}: enter {enter:.2}, flight {new:.2}, launch {launch:.2}, land {land:.2}: submit {:.2}; wait {wait:.2} µs",
                if table { " in a table" } else { "" },
                enter + new + launch + land
            );
        }
    }
    Ok(())
}
