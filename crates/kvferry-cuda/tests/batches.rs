//! Copies by the copy engines, and the public primitives.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::slice::from_ref;

use common::{Gate, Graph, device, gpu, gpu_with_kernels, memory, pattern, pinned, read, read_host};
use kvferry_cuda::{
    BATCH_CAP, BatchCopies, BatchSides, CudaError, Flight, MemcpyBatchMode, MemcpyBatchPath, Stream,
    StreamHandle, batch_supported, memcpy_batch, vectorized_copy,
};

#[test]
fn batches_copy_both_ways_and_beyond_one_call() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    assert!(batch_supported(), "driver 580 has the batch copy");
    // Twice the most of one call, and one copy more: 16-byte pieces in reversed order, a gap of 16 after each.
    let count = 2 * BATCH_CAP + 1;
    let data = pattern(count * 16, 1);
    let (_host, source) = pinned(&gpu, &data);
    let poison = pattern(count * 32, 2);
    let middle = device(&gpu, &poison);
    let (back, target) = pinned(&gpu, &pattern(count * 16, 3));
    for each in [false, true] {
        let mut flight = Flight::new(&gpu, &cx).unwrap();
        let mut up = BatchCopies::new(from_ref(&source), &[memory(&middle)]);
        let mut down = BatchCopies::between(&BatchSides::new(&[memory(&middle)], from_ref(&target)));
        up.reserve(count);
        for i in 0..count as u64 {
            let mirrored = (count as u64 - 1 - i) * 32;
            up.push(0, i * 16, 0, mirrored, 16).unwrap();
            down.push(0, mirrored, 0, i * 16, 16).unwrap();
        }
        assert_eq!(up.len(), count);
        for copies in [&up, &down] {
            if each {
                copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
            } else {
                copies.enqueue(&cx, stream.handle(), &mut flight).unwrap();
            }
        }
        flight.land(&cx, stream.handle()).unwrap();
        flight.wait().unwrap();
        assert!(read_host(&back) == data, "each: {each}");
        let gaps_kept =
            read(&middle).chunks(32).zip(poison.chunks(32)).all(|(now, was)| now[16..] == was[16..]);
        assert!(gaps_kept, "bytes between the copies were written");
        back.fill(0, back.len(), 0).unwrap();
        up.clear();
        assert!(up.is_empty());
        up.enqueue(&cx, stream.handle(), &mut flight).unwrap();
    }
}

#[test]
fn the_batch_call_refuses_the_legacy_stream() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (src, dst) = (device(&gpu, &pattern(64, 1)), device(&gpu, &[0; 64]));
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 64).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    // SAFETY: 1 is the legacy stream's other name.
    for legacy in [StreamHandle::LEGACY, unsafe { StreamHandle::from_raw(1) }] {
        assert_eq!(copies.enqueue(&cx, legacy, &mut flight), Err(CudaError::LegacyStream));
    }
    copies.enqueue_each(&cx, StreamHandle::LEGACY, &mut flight).unwrap();
    copies.enqueue(&cx, StreamHandle::PER_THREAD, &mut flight).unwrap();
    flight.land(&cx, StreamHandle::LEGACY).unwrap();
    flight.wait().unwrap();
    assert!(read(&dst) == pattern(64, 1));
}

const MODES: [MemcpyBatchMode; 3] = [
    MemcpyBatchMode::BatchedWithFallback,
    MemcpyBatchMode::FallbackOnly,
    MemcpyBatchMode::BatchWithoutFallback,
];

#[test]
fn the_primitive_copies_in_every_mode_on_every_stream() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let data = pattern(1000, 4);
    let src = device(&gpu, &data);
    for at in [stream.handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        for mode in MODES {
            let dst = device(&gpu, &[7; 1000]);
            let sources = [src.addr() + 500, src.addr(), src.addr() + 3];
            let targets = [dst.addr(), 0xDEAD_0000, dst.addr() + 900];
            // The empty copy is left out: its address is never looked at.
            // SAFETY: the other two lie inside the buffers, which outlive the wait below.
            let path = unsafe { memcpy_batch(&gpu, &sources, &targets, &[400, 0, 97], at, mode) };
            let each = mode == MemcpyBatchMode::FallbackOnly;
            assert_eq!(path, Ok(if each { MemcpyBatchPath::PerCopy } else { MemcpyBatchPath::Batched }));
            let done = gpu.event(&cx).unwrap();
            done.record(&cx, at).unwrap();
            done.synchronize().unwrap();
            let mut expected = vec![7; 1000];
            expected[..400].copy_from_slice(&data[500..900]);
            expected[900..997].copy_from_slice(&data[3..100]);
            assert!(read(&dst) == expected, "{mode:?}");
        }
    }
    // SAFETY: nothing is copied.
    let nothing = unsafe { memcpy_batch(&gpu, &[1], &[2], &[0], stream.handle(), MODES[0]) };
    assert_eq!(nothing, Ok(MemcpyBatchPath::Nothing));
    // SAFETY: nothing is copied.
    let uneven = unsafe { memcpy_batch(&gpu, &[1], &[2, 3], &[], stream.handle(), MODES[0]) };
    assert_eq!(uneven, Err(CudaError::ListLengths { sources: 1, destinations: 2, sizes: 0 }));
}

/// hazards.md 26: torch's current stream is the legacy one by default.
#[test]
fn the_legacy_stream_is_forked_and_joined() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let data = pattern(4096, 5);
    let (src, middle, dst) = (device(&gpu, &data), device(&gpu, &[0; 4096]), device(&gpu, &[0; 4096]));
    let gate = Gate::on(StreamHandle::LEGACY);
    for (from, to) in [(&src, &middle), (&middle, &dst)] {
        // SAFETY: both live, and idle but for this.
        let path = unsafe {
            memcpy_batch(&gpu, &[from.addr()], &[to.addr()], &[4096], StreamHandle::LEGACY, MODES[0])
        };
        assert_eq!(path, Ok(MemcpyBatchPath::Batched));
    }
    let done = gpu.event(&cx).unwrap();
    done.record(&cx, StreamHandle::LEGACY).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert_eq!(done.query(), Ok(false), "the copies did not wait for the legacy stream, or it not for them");
    gate.open();
    done.synchronize().unwrap();
    assert!(read(&dst) == data);
}

#[test]
fn a_capturing_stream_gets_nodes_or_a_refusal() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (src, dst) = (device(&gpu, &pattern(64, 6)), device(&gpu, &[0; 64]));
    let graph = Graph::capture(&cx, &stream, |_, at| {
        let copy = |mode| {
            let (from, to) = (src.addr(), dst.addr());
            // SAFETY: both outlive the graph.
            unsafe { memcpy_batch(&gpu, &[from, from + 32], &[to, to + 32], &[32, 32], at, mode) }
        };
        let refused = copy(MemcpyBatchMode::BatchWithoutFallback);
        assert!(matches!(refused, Err(CudaError::StreamIsCapturing { .. })), "{refused:?}");
        assert_eq!(copy(MemcpyBatchMode::BatchedWithFallback), Ok(MemcpyBatchPath::PerCopy));
    });
    assert!(read(&dst) == [0; 64]);
    graph.run(&stream);
    stream.synchronize().unwrap();
    assert!(read(&dst) == pattern(64, 6));
}

#[test]
fn pointer_tables_are_copied_by_a_kernel() {
    let Some(gpu) = gpu_with_kernels() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let data = pattern(5000, 7);
    let (src, dst) = (device(&gpu, &data), device(&gpu, &[9; 5000]));
    let words =
        |base: u64, at: [u64; 3]| -> Vec<u8> { at.iter().flat_map(|at| (base + at).to_le_bytes()).collect() };
    let sources = device(&gpu, &words(src.addr(), [0, 1001, 3333]));
    let (_host, targets) = pinned(&gpu, &words(dst.addr(), [4001, 17, 2000]));
    for at in [stream.handle(), StreamHandle::LEGACY] {
        // SAFETY: the tables name three runs of 997 bytes inside buffers that outlive the wait.
        unsafe { vectorized_copy(&gpu, sources.addr(), targets.addr(), 3, 997, at, Some(4)) }.unwrap();
        let done = gpu.event(&cx).unwrap();
        done.record(&cx, at).unwrap();
        done.synchronize().unwrap();
    }
    let mut expected = vec![9; 5000];
    for (from, to) in [(0, 4001), (1001, 17), (3333, 2000)] {
        expected[to..to + 997].copy_from_slice(&data[from..from + 997]);
    }
    assert!(read(&dst) == expected);
    let launch = |table, pairs, ctas| {
        // SAFETY: refused, or nothing to do.
        unsafe { vectorized_copy(&gpu, table, targets.addr(), pairs, 1, stream.handle(), ctas) }
    };
    let odd = launch(sources.addr() + 4, 1, None);
    assert!(matches!(odd, Err(CudaError::Argument { .. })), "{odd:?}");
    assert_eq!(launch(0, 0, None), Ok(()));
    let none = launch(sources.addr(), 1, Some(0));
    assert!(matches!(none, Err(CudaError::Geometry(_))), "{none:?}");
}
