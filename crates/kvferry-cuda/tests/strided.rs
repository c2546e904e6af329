//! Strided copies by kernels, against a copy done byte by byte here.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::sync::Arc;

use common::{Gate, Graph, device, gpu_with_kernels, memory, pattern, pinned, read, read_host, region};
use kvferry_cuda::{
    BadId, BadIdReport, CudaError, DeviceBuffer, DeviceIds, Flight, Gpu, GpuMemory, PairRing, PairTable,
    Side, Stream, StridedCopy, StridedLoop, StridedShape, StridedSide, Walk,
};

/// A side with one region per layer, `blocks` blocks of `block` bytes in each.
fn layered(layers: u64, blocks: u64, block: u64) -> StridedSide {
    StridedSide {
        start_region: 0,
        start_offset: 0,
        parts: 1,
        part_stride: 0,
        block_stride: block,
        block_region: 0,
        blocks,
        regions: layers,
    }
}

/// Blocks of `layers` runs of `run` bytes: contiguous at the source, one region per layer at the destination.
fn fc_to_lw(layers: u64, src_blocks: u64, dst_blocks: u64, run: u64) -> StridedShape {
    StridedShape {
        src: StridedSide { regions: 1, ..layered(1, src_blocks, layers * run) },
        dst: layered(layers, dst_blocks, run),
        loops: vec![StridedLoop {
            count: layers,
            src_stride: run,
            dst_stride: 0,
            src_region: 0,
            dst_region: 1,
        }],
        run_bytes: run,
        walk: Walk::Source,
    }
}

fn place(side: &StridedSide, id: u64) -> (u64, u64) {
    let (block, part) = (id / side.parts, id % side.parts);
    let offset = side.start_offset + block * side.block_stride + part * side.part_stride;
    (side.start_region + block * side.block_region, offset)
}

/// What the copy must do, in the most literal way.
fn oracle(shape: &StridedShape, pairs: &[(u64, u64)], src: &[Vec<u8>], dst: &mut [Vec<u8>]) {
    for &(from, to) in pairs {
        let (mut places, step) = (vec![(place(&shape.src, from), place(&shape.dst, to))], &shape.loops);
        for l in step {
            places = places
                .iter()
                .flat_map(|&((sr, so), (dr, d))| {
                    (0..l.count).map(move |i| {
                        (
                            (sr + i * l.src_region, so + i * l.src_stride),
                            (dr + i * l.dst_region, d + i * l.dst_stride),
                        )
                    })
                })
                .collect();
        }
        for ((sr, so), (dr, d)) in places {
            let run = shape.run_bytes as usize;
            let bytes = src[sr as usize][so as usize..so as usize + run].to_vec();
            dst[dr as usize][d as usize..d as usize + run].copy_from_slice(&bytes);
        }
    }
}

/// A filled table of a ring that has room.
fn filled(ring: &Arc<PairRing>, pairs: &[u64]) -> PairTable {
    ring.lease(pairs.len()).unwrap().unwrap().fill(|room| room.copy_from_slice(pairs))
}

fn pack(pairs: &[(u64, u64)]) -> Vec<u64> {
    pairs.iter().map(|&(src, dst)| src | dst << 32).collect()
}

fn upload(gpu: &Gpu, regions: &[Vec<u8>]) -> (Vec<Arc<DeviceBuffer>>, Vec<GpuMemory>) {
    let buffers: Vec<_> = regions.iter().map(|bytes| device(gpu, bytes)).collect();
    let memory = buffers.iter().map(memory).collect();
    (buffers, memory)
}

fn check(buffers: &[Arc<DeviceBuffer>], expected: &[Vec<u8>], what: &str) {
    for (index, (buffer, expected)) in buffers.iter().zip(expected).enumerate() {
        assert!(read(buffer) == *expected, "{what}: region {index} differs");
    }
}

/// Sources and poisoned destinations of a shape, a little longer than it reaches.
fn regions(shape: &StridedShape, src_len: u64, dst_len: u64) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let make =
        |count: u64, len: u64, seed: u64| (0..count).map(|i| pattern(len as usize, seed + i)).collect();
    (make(shape.src.regions, src_len, 100), make(shape.dst.regions, dst_len, 9000))
}

#[test]
fn every_way_to_hand_over_ids_copies_the_same_bytes() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let ring = PairRing::new(&gpu, 4096, 1, 2).unwrap();
    let report = BadIdReport::new(&gpu).unwrap();
    // Runs long and short, odd and even; 300 layers do not fit into parameters.
    for (layers, run) in [(4_u64, 4096_u64), (3, 100), (2, 656), (7, 2), (300, 48), (5, 584)] {
        let shape = fc_to_lw(layers, 9, 11, run);
        let (src, dst) = regions(&shape, 9 * layers * run + 13, 11 * run + 7);
        let pairs = [(8, 0), (0, 10), (3, 3), (5, 7), (1, 1)];
        let mut expected = dst.clone();
        oracle(&shape, &pairs, &src, &mut expected);
        let (_held, src_memory) = upload(&gpu, &src);
        let packed = pack(&pairs);
        for way in ["inline", "ring", "own table", "device ids"] {
            let (dst_buffers, dst_memory) = upload(&gpu, &dst);
            let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
            let mut flight = Flight::new(&gpu, &cx).unwrap();
            let at = stream.handle();
            match way {
                "inline" => copy.launch(&cx, at, &packed, 16, &mut flight).unwrap(),
                "ring" => {
                    let table = filled(&ring, &packed);
                    copy.launch_table(&cx, at, &table, 16, &mut flight).unwrap();
                }
                "own table" => {
                    let table = PairRing::own_table(&gpu, &packed).unwrap();
                    copy.launch_table(&cx, at, &table, 3, &mut flight).unwrap();
                }
                _ => {
                    let narrow: Vec<u8> = pairs.iter().flat_map(|p| (p.0 as i32).to_le_bytes()).collect();
                    let src = DeviceIds::new(region(&device(&gpu, &narrow)), 4).unwrap();
                    let wide: Vec<u64> = pairs.iter().map(|p| p.1).collect();
                    let dst = DeviceIds::upload(&gpu, &wide).unwrap();
                    copy.launch_device_ids(&cx, at, &src, &dst, 5, &report, 16, &mut flight).unwrap();
                }
            }
            flight.land(&cx, at).unwrap();
            drop((copy, dst_memory));
            flight.wait().unwrap();
            assert_eq!(report.take(), None);
            check(&dst_buffers, &expected, &format!("{way}, {layers} layers of {run} bytes"));
        }
    }
}

#[test]
fn pinned_memory_is_read_and_written_in_place() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (layers, blocks, run) = (3, 5, 1024);
    let shape = fc_to_lw(layers, blocks, blocks, run);
    let (src, dst) = regions(&shape, blocks * layers * run, blocks * run);
    let pairs = [(0, 4), (4, 0), (2, 1)];
    let mut expected = dst.clone();
    oracle(&shape, &pairs, &src, &mut expected);
    let (_host, source) = pinned(&gpu, &src[0]);
    let targets: Vec<_> = dst.iter().map(|bytes| pinned(&gpu, bytes)).collect();
    let target_memory: Vec<_> = targets.iter().map(|(_, memory)| memory.clone()).collect();
    let copy = StridedCopy::new(&gpu, &shape, &[source], &target_memory).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    copy.launch(&cx, stream.handle(), &pack(&pairs), 4, &mut flight).unwrap();
    flight.land(&cx, stream.handle()).unwrap();
    flight.wait().unwrap();
    for ((region, _), expected) in targets.iter().zip(&expected) {
        assert!(read_host(region) == *expected);
    }
}

#[test]
fn what_leaves_its_memory_is_refused_before_anything_runs() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let shape = fc_to_lw(2, 4, 4, 64);
    let (src, dst) = regions(&shape, 4 * 128, 4 * 64);
    let (_s, src_memory) = upload(&gpu, &src);
    let (dst_buffers, dst_memory) = upload(&gpu, &dst);
    let new = |shape: &StridedShape, src: &[GpuMemory], dst: &[GpuMemory]| {
        StridedCopy::new(&gpu, shape, src, dst).err()
    };
    assert_eq!(
        new(&shape, &src_memory, &dst_memory[..1]),
        Some(CudaError::Regions { side: Side::Destination, asked: 2, has: 1 })
    );
    let part = |buffer: &Arc<DeviceBuffer>, len| GpuMemory::of_device(&region(buffer).part(0, len).unwrap());
    let short = [dst_memory[0].clone(), part(&dst_buffers[1], 255)];
    let (side, region_) = (Side::Destination, 1);
    assert_eq!(
        new(&shape, &src_memory, &short),
        Some(CudaError::OutOfReach { side, region: region_, needs: 256, has: 255 })
    );
    let locked = [dst_memory[0].clone(), dst_memory[1].clone().read_only()];
    assert_eq!(new(&shape, &src_memory, &locked), Some(CudaError::ReadOnly { region: 1 }));
    let mut far = shape.clone();
    far.src.blocks = 5;
    let (side, region_) = (Side::Source, 0);
    assert_eq!(
        new(&far, &src_memory, &dst_memory),
        Some(CudaError::OutOfReach { side, region: region_, needs: 640, has: 512 })
    );
    let mut empty = shape.clone();
    empty.run_bytes = 0;
    assert!(matches!(new(&empty, &src_memory, &dst_memory), Some(CudaError::Shape(_))));

    let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    let at = stream.handle();
    let bad = pack(&[(0, 0), (3, 4)]);
    let refused = Err(CudaError::BlockId { side: Side::Destination, index: 1, value: 4, limit: 4 });
    assert_eq!(copy.launch(&cx, at, &bad, 4, &mut flight), refused);
    let ring = PairRing::new(&gpu, 8, 1, 1).unwrap();
    let table = filled(&ring, &bad);
    assert_eq!(copy.launch_table(&cx, at, &table, 4, &mut flight), refused);
    assert!(ring.lease(1).unwrap().is_none(), "the ring is at its cap");
    let limit = copy.inline_pairs();
    assert!((3000..4096).contains(&limit), "{limit}");
    let many = vec![0; limit + 1];
    let too_many = CudaError::TooManyPairs { pairs: many.len() as u64, limit: limit as u64 };
    assert_eq!(copy.launch(&cx, at, &many, 4, &mut flight), Err(too_many));
    assert_eq!(ring.lease(9).err(), Some(CudaError::TooManyPairs { pairs: 9, limit: 8 }));
    assert!(matches!(copy.launch(&cx, at, &[0], 0, &mut flight), Err(CudaError::Geometry(_))));
    assert_eq!(copy.launch(&cx, at, &[], 4, &mut flight), Ok(()));
    let ids = DeviceIds::upload(&gpu, &[0, 1]).unwrap();
    let report = BadIdReport::new(&gpu).unwrap();
    let short = Err(CudaError::TooManyPairs { pairs: 3, limit: 2 });
    assert_eq!(copy.launch_device_ids(&cx, at, &ids, &ids, 3, &report, 4, &mut flight), short);
    flight.land(&cx, at).unwrap();
    flight.wait().unwrap();
    check(&dst_buffers, &dst, "refused copies");
}

#[test]
fn bad_device_ids_are_skipped_and_named() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let shape = fc_to_lw(2, 6, 6, 640);
    let (src, dst) = regions(&shape, 6 * 1280, 6 * 640);
    let (_s, src_memory) = upload(&gpu, &src);
    let report = BadIdReport::new(&gpu).unwrap();
    for (bad, side) in [(-1_i64, Side::Source), (6, Side::Destination), (1 << 40, Side::Destination)] {
        let (dst_buffers, dst_memory) = upload(&gpu, &dst);
        let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
        let mut lists = [vec![0_i64, 1, 2, 3, 4], vec![5, 4, 3, 2, 1]];
        lists[(side == Side::Destination) as usize][3] = bad;
        let [a, b] = lists.map(|list| {
            let bytes: Vec<u8> = list.iter().flat_map(|id| id.to_le_bytes()).collect();
            DeviceIds::new(region(&device(&gpu, &bytes)), 8).unwrap()
        });
        let mut flight = Flight::new(&gpu, &cx).unwrap();
        copy.launch_device_ids(&cx, stream.handle(), &a, &b, 5, &report, 8, &mut flight).unwrap();
        flight.land(&cx, stream.handle()).unwrap();
        flight.wait().unwrap();
        assert_eq!(report.take(), Some(BadId { side, index: 3, value: bad, limit: 6 }));
        assert_eq!(report.take(), None);
        let mut expected = dst.clone();
        oracle(&shape, &[(0, 5), (1, 4), (2, 3), (4, 1)], &src, &mut expected);
        check(&dst_buffers, &expected, "the other ids");
    }
    let odd = region(&device(&gpu, &[0; 12]));
    assert!(matches!(DeviceIds::new(odd.clone(), 8), Err(CudaError::Argument { value: 12, .. })));
    assert!(matches!(DeviceIds::new(odd.clone(), 2), Err(CudaError::Argument { value: 2, .. })));
    assert!(DeviceIds::new(odd.part(2, 8).unwrap(), 4).is_err());
    assert_eq!(DeviceIds::new(odd, 4).unwrap().len(), 3);
}

#[test]
fn long_tables_take_several_launches() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let shape = fc_to_lw(2, 40, 40, 48);
    let (src, dst) = regions(&shape, 40 * 96, 40 * 48);
    let (_s, src_memory) = upload(&gpu, &src);
    let mut pairs: Vec<_> = (0..39).map(|id| (id, 39 - id)).collect();
    let packed = pack(&pairs);
    let report = BadIdReport::new(&gpu).unwrap();
    let ids = |side: fn(&(u64, u64)) -> u64, bad: Option<(usize, u64)>| {
        let mut list: Vec<u64> = pairs.iter().map(side).collect();
        bad.into_iter().for_each(|(at, value)| list[at] = value);
        DeviceIds::upload(&gpu, &list).unwrap()
    };
    let (a, b) = (ids(|pair| pair.0, None), ids(|pair| pair.1, Some((37, 40))));
    for way in ["inline", "table", "device ids"] {
        let (dst_buffers, dst_memory) = upload(&gpu, &dst);
        let copy = StridedCopy::in_parts(&gpu, &shape, &src_memory, &dst_memory, 4).unwrap();
        let mut flight = Flight::new(&gpu, &cx).unwrap();
        let at = stream.handle();
        match way {
            "inline" => copy.launch(&cx, at, &packed, 8, &mut flight).unwrap(),
            "table" => {
                let table = PairRing::own_table(&gpu, &packed).unwrap();
                copy.launch_table(&cx, at, &table, 8, &mut flight).unwrap();
            }
            _ => copy.launch_device_ids(&cx, at, &a, &b, 39, &report, 8, &mut flight).unwrap(),
        }
        flight.land(&cx, at).unwrap();
        flight.wait().unwrap();
        if way == "device ids" {
            let side = Side::Destination;
            assert_eq!(report.take(), Some(BadId { side, index: 37, value: 40, limit: 40 }));
            pairs.remove(37);
        }
        let mut expected = dst.clone();
        oracle(&shape, &pairs, &src, &mut expected);
        check(&dst_buffers, &expected, way);
    }
    // A report has room for 64 kernels.
    let (_d, dst_memory) = upload(&gpu, &dst);
    let copy = StridedCopy::in_parts(&gpu, &shape, &src_memory, &dst_memory, 1).unwrap();
    let many = DeviceIds::upload(&gpu, &[0; 65]).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    let refused = copy.launch_device_ids(&cx, stream.handle(), &many, &many, 65, &report, 8, &mut flight);
    assert_eq!(refused, Err(CudaError::TooManyPairs { pairs: 65, limit: 64 }));
}

#[test]
fn a_ring_chunk_returns_when_its_flight_is_over() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let ring = PairRing::new(&gpu, 16, 1, 1).unwrap();
    let shape = fc_to_lw(1, 4, 4, 512);
    let (src, dst) = regions(&shape, 2048, 2048);
    let (_s, src_memory) = upload(&gpu, &src);
    let (dst_buffers, dst_memory) = upload(&gpu, &dst);
    let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
    let gate = Gate::on(stream.handle());
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    let table = filled(&ring, &pack(&[(1, 2)]));
    copy.launch_table(&cx, stream.handle(), &table, 1, &mut flight).unwrap();
    flight.land(&cx, stream.handle()).unwrap();
    drop(table);
    assert!(ring.lease(1).unwrap().is_none(), "the device may still read the chunk");
    gate.open();
    flight.wait().unwrap();
    drop(flight);
    assert!(ring.lease(1).unwrap().is_some());
    let mut expected = dst.clone();
    oracle(&shape, &[(1, 2)], &src, &mut expected);
    check(&dst_buffers, &expected, "the copy behind the gate");
}

#[test]
fn an_upload_on_another_stream_is_waited_for() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let (copying, working) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let ring = PairRing::new(&gpu, 16, 1, 1).unwrap();
    let shape = fc_to_lw(1, 4, 4, 512);
    let (src, dst) = regions(&shape, 2048, 2048);
    let (_s, src_memory) = upload(&gpu, &src);
    let (dst_buffers, dst_memory) = upload(&gpu, &dst);
    let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
    let table = filled(&ring, &pack(&[(3, 0)]));
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    let gate = Gate::on(copying.handle());
    table.upload(&cx, copying.handle(), &mut flight).unwrap();
    copy.launch_table(&cx, working.handle(), &table, 1, &mut flight).unwrap();
    flight.land(&cx, working.handle()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert_eq!(flight.done(), Ok(false));
    gate.open();
    flight.wait().unwrap();
    let mut expected = dst.clone();
    oracle(&shape, &[(3, 0)], &src, &mut expected);
    check(&dst_buffers, &expected, "the copy after the upload");
}

/// hazards.md 23: ids of a captured transfer are not those of a later one.
#[test]
fn a_graph_keeps_its_ids_and_memory() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let ring = PairRing::new(&gpu, 16, 1, 1).unwrap();
    let shape = fc_to_lw(2, 4, 4, 512);
    let (src, dst) = regions(&shape, 4096, 2048);
    for way in ["inline", "own table", "ring"] {
        let (src_buffers, src_memory) = upload(&gpu, &src);
        let (dst_buffers, dst_memory) = upload(&gpu, &dst);
        let copy = StridedCopy::new(&gpu, &shape, &src_memory, &dst_memory).unwrap();
        let pairs = pack(&[(1, 2), (0, 3)]);
        let graph = Graph::capture(&cx, &stream, |cx, at| {
            let mut flight = Flight::new(&gpu, cx).unwrap();
            match way {
                "inline" => copy.launch(cx, at, &pairs, 4, &mut flight).unwrap(),
                "ring" => {
                    let table = filled(&ring, &pairs);
                    copy.launch_table(cx, at, &table, 4, &mut flight).unwrap();
                }
                _ => {
                    let table = PairRing::own_table(&gpu, &pairs).unwrap();
                    copy.launch_table(cx, at, &table, 4, &mut flight).unwrap();
                }
            }
            flight.capture(cx, at).unwrap();
        });
        drop((copy, src_memory, dst_memory, src_buffers));
        if way == "ring" {
            assert!(ring.lease(1).unwrap().is_none(), "the graph reads the chunk at every run");
        }
        // Other work takes whatever was freed.
        let _noise: Vec<_> = (0..8).map(|i| device(&gpu, &pattern(4096, 77 + i))).collect();
        let mut expected = dst.clone();
        oracle(&shape, &[(1, 2), (0, 3)], &src, &mut expected);
        for _ in 0..2 {
            for (buffer, bytes) in dst_buffers.iter().zip(&dst) {
                buffer.copy_from_host(0, bytes).unwrap();
            }
            graph.run(&stream);
            stream.synchronize().unwrap();
            check(&dst_buffers, &expected, way);
        }
    }
}

#[test]
fn a_kernel_reads_and_writes_a_peer() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let last = kvferry_cuda::Driver::get().unwrap().device_count() - 1;
    if last == 0 {
        eprintln!("skipped: there is one device");
        return;
    }
    let other = Gpu::open(last).unwrap();
    let shape = fc_to_lw(2, 5, 5, 1040);
    let (src, dst) = regions(&shape, 5 * 2080, 5 * 1040);
    let pairs = [(0, 4), (3, 1)];
    let mut expected = dst.clone();
    oracle(&shape, &pairs, &src, &mut expected);
    // The kernel runs on the device of the destination, then on that of the source.
    for runner in [&*gpu, &other] {
        let cx = runner.enter().unwrap();
        let stream = Stream::new(runner).unwrap();
        let (_s, src_memory) = upload(&other, &src);
        let (dst_buffers, dst_memory) = upload(&gpu, &dst);
        let copy = match StridedCopy::new(runner, &shape, &src_memory, &dst_memory) {
            Err(CudaError::PeerAccess { .. }) => return eprintln!("skipped: no peer access"),
            copy => copy.unwrap(),
        };
        let stranger = if runner.ordinal() == 0 { &other } else { &*gpu };
        let mut theirs = Flight::new(stranger, &stranger.enter().unwrap()).unwrap();
        let refused = copy.launch(&cx, stream.handle(), &pack(&pairs), 16, &mut theirs);
        assert!(matches!(refused, Err(CudaError::WrongDevice { .. })), "{refused:?}");
        let mut flight = Flight::new(runner, &cx).unwrap();
        copy.launch(&cx, stream.handle(), &pack(&pairs), 16, &mut flight).unwrap();
        flight.land(&cx, stream.handle()).unwrap();
        flight.wait().unwrap();
        check(&dst_buffers, &expected, "peer copy");
    }
}
