//! What happens when a driver call fails. Faults are the process's own: these tests run one after the other.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{Gate, Graph, Graveyard, device, gpu, memory, pattern, read};
use kvferry_cuda::{
    BatchCopies, CudaError, DeviceBuffer, Flight, MemcpyBatchMode, MemcpyBatchPath, PairRing, PinnedBuffer,
    PointerKind, Stream, StreamHandle, faults, memcpy_batch, pointer_kind, register_in_chunks,
};
use kvferry_host::{HostBuffer, HostOptions, HostRegion};

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const NOT_SUPPORTED: i32 = 801;

/// Only one test at a time; no fault outlives its test.
struct Alone(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

fn alone() -> Alone {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    faults::clear();
    Alone(turn)
}

impl Drop for Alone {
    fn drop(&mut self) {
        faults::clear();
    }
}

#[test]
fn allocations_fail_with_their_size_and_leave_nothing() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    // Twice: what was dropped and not yet freed is waited for, and then it is tried again.
    faults::inject("cuMemAlloc_v2", 1, OUT_OF_MEMORY);
    drop(DeviceBuffer::new(4096, 0).unwrap());
    faults::inject("cuMemAlloc_v2", 1, OUT_OF_MEMORY);
    faults::inject("cuMemAlloc_v2", 2, OUT_OF_MEMORY);
    let (bytes, ordinal) = (4096, 0);
    let call = "cuMemAlloc_v2";
    assert_eq!(DeviceBuffer::new(4096, 0).err(), Some(CudaError::OutOfMemory { bytes, ordinal, call }));
    faults::inject("cuMemHostGetDevicePointer_v2", 1, INVALID_VALUE);
    assert_eq!(PinnedBuffer::new(4096, 0).err().and_then(|error| error.code()), Some(INVALID_VALUE));
    // A growing ring that fails may grow again.
    let ring = PairRing::new(&gpu, 16, 0, 1).unwrap();
    faults::inject("cuMemAlloc_v2", 1, OUT_OF_MEMORY);
    faults::inject("cuMemAlloc_v2", 2, OUT_OF_MEMORY);
    assert!(ring.lease(1).is_err());
    assert!(ring.lease(1).unwrap().is_some());
    assert_eq!(faults::clear(), 0);
}

#[test]
fn only_not_supported_falls_back() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    let stream = Stream::new(&gpu).unwrap();
    let data = pattern(4096, 1);
    let src = device(&gpu, &data);
    let copy = |dst: &DeviceBuffer, at, mode| {
        let n = 9000_usize;
        // Copies of a byte beyond one call's worth, so that the second call can be the one that fails.
        let (from, to): (Vec<u64>, Vec<u64>) =
            (0..n as u64).map(|i| (src.addr() + i % 4096, dst.addr() + i)).unzip();
        // SAFETY: all inside the buffers, which outlive the waits.
        unsafe { memcpy_batch(&gpu, &from, &to, &vec![1; n], at, mode) }
    };
    let batch = "cuMemcpyBatchAsync_v2";
    for at in [stream.handle(), StreamHandle::LEGACY] {
        for nth in [1, 2] {
            let dst = DeviceBuffer::new(9000, 0).unwrap();
            dst.memset(0, 9000, 0).unwrap();
            faults::inject(batch, nth, NOT_SUPPORTED);
            let path = copy(&dst, at, MemcpyBatchMode::BatchedWithFallback);
            assert_eq!(path, Ok(MemcpyBatchPath::PerCopy));
            gpu.synchronize().unwrap();
            let expected: Vec<u8> = (0..9000).map(|i| data[i % 4096]).collect();
            assert!(read(&dst) == expected, "fallback from call {nth}");
            faults::inject(batch, nth, NOT_SUPPORTED);
            let refused = copy(&dst, at, MemcpyBatchMode::BatchWithoutFallback);
            assert_eq!(refused, Err(CudaError::BatchUnsupported));
            faults::inject(batch, nth, INVALID_VALUE);
            let refused = copy(&dst, at, MemcpyBatchMode::BatchedWithFallback);
            assert_eq!(refused.err().and_then(|error| error.code()), Some(INVALID_VALUE));
            gpu.synchronize().unwrap();
        }
    }
}

#[test]
fn a_flight_whose_calls_fail_still_waits() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    for call in ["cuEventRecord", "cuEventSynchronize", "cuEventQuery", "cuStreamSynchronize"] {
        let (src, dst) = (device(&gpu, &pattern(256, 2)), device(&gpu, &[0; 256]));
        let grave = Graveyard::default();
        let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
        copies.push(0, 0, 0, 0, 256).unwrap();
        let mut flight = Flight::new(&gpu, &cx).unwrap();
        flight.hold(grave.token());
        let gate = Gate::on(stream.handle());
        copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
        faults::inject(call, 1, 999);
        let landed = call != "cuStreamSynchronize" && flight.land(&cx, stream.handle()).is_ok();
        assert_eq!(landed, call.starts_with("cuEvent") && call != "cuEventRecord");
        if call == "cuEventQuery" {
            assert_eq!(flight.done().err().and_then(|error| error.code()), Some(999));
        }
        let opener = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            gate.open();
        });
        drop(flight);
        assert_eq!(grave.dropped(), 1, "{call}");
        assert!(read(&dst) == pattern(256, 2), "{call}: memory was let go of before the copy was done");
        opener.join().unwrap();
        assert_eq!(faults::clear(), 0, "{call} was never made");
    }
}

#[test]
fn a_flight_that_cannot_wait_leaks() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (src, dst) = (device(&gpu, &[1; 64]), device(&gpu, &[0; 64]));
    let grave = Graveyard::default();
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 64).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    flight.hold(grave.token());
    copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
    flight.land(&cx, stream.handle()).unwrap();
    faults::inject("cuEventSynchronize", 1, 999);
    faults::inject("cuCtxSynchronize", 1, 999);
    drop(flight);
    assert_eq!((grave.dropped(), faults::clear()), (0, 0));
    gpu.synchronize().unwrap();
}

#[test]
fn a_failed_copy_leaves_a_flight_that_ends() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (src, dst) = (device(&gpu, &pattern(64, 3)), device(&gpu, &[0; 64]));
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 32).unwrap();
    copies.push(0, 32, 0, 32, 32).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    faults::inject("cuMemcpyAsync", 2, 719);
    let failed = copies.enqueue_each(&cx, stream.handle(), &mut flight).err();
    let failed = failed.map(|error| (error.code(), error.call()));
    assert_eq!(failed, Some((Some(719), Some("cuMemcpyAsync"))));
    // The first copy is on its way all the same: landing and waiting cover it.
    flight.land(&cx, stream.handle()).unwrap();
    flight.wait().unwrap();
    assert!(read(&dst)[..32] == pattern(64, 3)[..32]);
}

#[test]
fn a_failed_capture_leaks_instead_of_dangling() {
    let _alone = alone();
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    for call in ["cuStreamGetCaptureInfo_v2", "cuUserObjectCreate", "cuGraphRetainUserObject"] {
        let (src, dst) = (device(&gpu, &pattern(64, 4)), device(&gpu, &[0; 64]));
        let grave = Graveyard::default();
        let graph = Graph::capture(&cx, &stream, |cx, at| {
            let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
            copies.push(0, 0, 0, 0, 64).unwrap();
            let mut flight = Flight::new(&gpu, cx).unwrap();
            flight.hold(grave.token());
            copies.enqueue_each(cx, at, &mut flight).unwrap();
            faults::inject(call, 1, OUT_OF_MEMORY);
            assert_eq!(flight.capture(cx, at).err().and_then(|error| error.code()), Some(OUT_OF_MEMORY));
        });
        kvferry_cuda::drain_deferred();
        assert_eq!(grave.dropped(), 0, "{call}");
        graph.run(&stream);
        stream.synchronize().unwrap();
        assert!(read(&dst) == pattern(64, 4));
    }
}

#[test]
fn a_registration_that_fails_half_way_is_rolled_back() {
    let _alone = alone();
    let Some(_gpu) = gpu() else { return };
    let page = 4096;
    let region = HostRegion::of_buffer(std::sync::Arc::new(
        HostBuffer::new(6 * page, HostOptions::default()).unwrap(),
    ));
    let chunk = 2 * page as u64;
    faults::inject("cuMemHostRegister_v2", 3, OUT_OF_MEMORY);
    let failed = register_in_chunks(&region, 0, chunk).err();
    let (bytes, ordinal, call) = (6 * page, 0, "cuMemHostRegister_v2");
    assert_eq!(failed, Some(CudaError::OutOfMemory { bytes, ordinal, call }));
    for at in 0..6 {
        assert_eq!(pointer_kind(region.addr() + at * page as u64), Ok(PointerKind::System));
    }
    faults::inject("cuPointerGetAttribute", 2, INVALID_VALUE);
    assert!(register_in_chunks(&region, 0, chunk).is_err());
    assert_eq!(pointer_kind(region.addr() + 2 * page as u64), Ok(PointerKind::System));
    drop(register_in_chunks(&region, 0, chunk).unwrap());
}
