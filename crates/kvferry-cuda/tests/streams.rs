//! Devices, streams and events.
#![allow(clippy::print_stderr, reason = "tests say why they skip")]

mod common;

use std::sync::Arc;

use common::{Gate, Graph, as_stream, gpu};
use cudarc::driver::sys;
use kvferry_cuda::{
    Capture, CudaError, Driver, EventHandle, Gpu, KERNELS_NEED, PrimaryContext, Stream, StreamHandle,
};

#[test]
fn a_device_is_opened_once_and_kernels_need_a_new_driver() {
    let Some(gpu) = gpu() else { return };
    assert!(Arc::ptr_eq(&gpu, &Gpu::open(0).unwrap()));
    assert!(Driver::get().unwrap().driver_version() >= KERNELS_NEED);
    assert_eq!(gpu.info().ordinal, gpu.ordinal());
    assert!(gpu.sm_count() >= 1);
    let count = Driver::get().unwrap().device_count();
    assert_eq!(Gpu::open(count).err(), Some(CudaError::InvalidDevice { ordinal: count, count }));
    assert_eq!(gpu.peer_access(0), Ok(()));
    assert_eq!(gpu.has_kernels(), kvferry_kernels::available());
}

#[test]
fn events_order_streams_and_tell_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (one, two) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let (first, second) = (gpu.event(&cx).unwrap(), gpu.event(&cx).unwrap());
    let gate = Gate::on(one.handle());
    first.record(&cx, one.handle()).unwrap();
    gpu.wait_event(&cx, two.handle(), &first).unwrap();
    second.record(&cx, two.handle()).unwrap();
    assert_eq!((first.query(), second.query()), (Ok(false), Ok(false)));
    gate.open();
    // On another thread, where no context is current.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            second.synchronize().unwrap();
            assert_eq!((first.query(), second.query()), (Ok(true), Ok(true)));
        });
    });
}

#[test]
fn a_dropped_event_is_still_waited_for() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (one, two) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let gate = Gate::on(one.handle());
    let event = gpu.event(&cx).unwrap();
    event.record(&cx, one.handle()).unwrap();
    gpu.wait_event(&cx, two.handle(), &event).unwrap();
    drop(event);
    // Whoever gets the event next may record it elsewhere.
    let idle = Stream::new(&gpu).unwrap();
    let again: Vec<_> = (0..8).map(|_| gpu.event(&cx).unwrap()).collect();
    again.iter().for_each(|event| event.record(&cx, idle.handle()).unwrap());
    let after = gpu.event(&cx).unwrap();
    after.record(&cx, two.handle()).unwrap();
    assert_eq!(after.query(), Ok(false));
    gate.open();
    after.synchronize().unwrap();
}

#[test]
fn timed_events_take_the_time() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (begin, end) = (gpu.timed_event(&cx).unwrap(), gpu.timed_event(&cx).unwrap());
    begin.record(&cx, stream.handle()).unwrap();
    let gate = Gate::on(stream.handle());
    end.record(&cx, stream.handle()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    gate.open();
    end.synchronize().unwrap();
    let seconds = end.seconds_since(&begin).unwrap();
    assert!((0.001..10.0).contains(&seconds), "{seconds}");
    let untimed = gpu.event(&cx).unwrap();
    untimed.record(&cx, stream.handle()).unwrap();
    assert!(untimed.seconds_since(&begin).is_err());
}

#[test]
fn foreign_and_implicit_streams_are_told_apart() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let mut raw = std::ptr::null_mut();
    // SAFETY: a live pointer; the context is current.
    assert_eq!(unsafe { sys::cuStreamCreate(&mut raw, 1) } as u32, 0);
    // SAFETY: the stream lives until the end of the test.
    let foreign = unsafe { StreamHandle::from_raw(raw.expose_provenance() as u64) };
    let own = Stream::new(&gpu).unwrap();
    for stream in [foreign, own.handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
        assert_eq!(gpu.stream_device(&cx, stream), Ok(0));
        assert_eq!(gpu.capture_status(&cx, stream), Ok(Capture::None));
        let event = gpu.event(&cx).unwrap();
        event.record(&cx, stream).unwrap();
        event.synchronize().unwrap();
    }
    let mut event = std::ptr::null_mut();
    // SAFETY: a live pointer; the context is current.
    assert_eq!(unsafe { sys::cuEventCreate(&mut event, 0) } as u32, 0);
    let gate = Gate::on(foreign);
    // SAFETY: both live.
    assert_eq!(unsafe { sys::cuEventRecord(event, raw) } as u32, 0);
    // SAFETY: lives until the end of the test.
    let handle = unsafe { EventHandle::from_raw(event.expose_provenance() as u64) };
    gpu.wait_foreign_event(&cx, own.handle(), handle).unwrap();
    let after = gpu.event(&cx).unwrap();
    after.record(&cx, own.handle()).unwrap();
    assert_eq!(after.query(), Ok(false));
    gate.open();
    own.synchronize().unwrap();
    // SAFETY: made above, idle, destroyed once.
    unsafe { sys::cuEventDestroy_v2(event) };
    // SAFETY: made above, idle, destroyed once.
    unsafe { sys::cuStreamDestroy_v2(raw) };
}

#[test]
fn a_capture_is_seen_and_survives_our_calls() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let busy = Stream::new(&gpu).unwrap();
    let graph = Graph::capture(&cx, &stream, |cx, capturing| {
        assert_eq!(gpu.capture_status(cx, capturing), Ok(Capture::Active));
        assert_eq!(gpu.capture_status(cx, busy.handle()), Ok(Capture::None));
        assert_eq!(gpu.stream_device(cx, capturing), Ok(0));
        // Everything that would spoil a capture in global mode, here and on a thread of ours.
        let potentially_unsafe = || {
            let cx = gpu.enter().unwrap();
            let events: Vec<_> = (0..64).map(|_| gpu.event(&cx).unwrap()).collect();
            for event in &events {
                event.record(&cx, busy.handle()).unwrap();
                event.query().unwrap();
                event.synchronize().unwrap();
            }
            busy.synchronize().unwrap();
            drop(gpu.timed_event(&cx).unwrap());
            drop(Stream::new(&gpu).unwrap());
            drop(kvferry_cuda::PinnedBuffer::new(4096, 0).unwrap());
            drop(kvferry_cuda::DeviceBuffer::new(4096, 0).unwrap());
        };
        potentially_unsafe();
        std::thread::scope(|scope| {
            scope.spawn(potentially_unsafe);
        });
    });
    graph.run(&stream);
    stream.synchronize().unwrap();
}

#[test]
fn parked_streams_stay_usable_and_come_back() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let handle = stream.handle();
    drop(stream);
    // A stale handle is a live stream of the same device.
    let event = gpu.event(&cx).unwrap();
    event.record(&cx, handle).unwrap();
    event.synchronize().unwrap();
    assert_ne!(as_stream(handle), std::ptr::null_mut());
}

#[test]
fn guards_and_streams_of_other_devices_are_refused() {
    let Some(gpu) = gpu() else { return };
    let last = Driver::get().unwrap().device_count() - 1;
    if last == 0 {
        eprintln!("skipped in part: there is one device");
        return;
    }
    let other = Gpu::open(last).unwrap();
    let (stream, theirs) = (Stream::new(&gpu).unwrap(), Stream::new(&other).unwrap());
    let their_cx = other.enter().unwrap();
    let wrong_context = Some(CudaError::WrongContext { ordinal: 0 });
    assert_eq!(gpu.capture_status(&their_cx, stream.handle()).err(), wrong_context);
    let cx = gpu.enter().unwrap();
    let wrong = Some(CudaError::WrongStream { stream: theirs.handle().raw(), ordinal: 0 });
    assert_eq!(gpu.capture_status(&cx, theirs.handle()).err(), wrong);
    // SAFETY: the same stream as a stranger would hand it in; it lives.
    let foreign = unsafe { StreamHandle::from_raw(theirs.handle().raw()) };
    assert_eq!(gpu.stream_device(&cx, foreign), Ok(last));
    // Another context made current inside the guard: implicit streams would be the other device's.
    {
        let inner = PrimaryContext::get(last).unwrap();
        let _inner = inner.enter().unwrap();
        assert_eq!(gpu.capture_status(&cx, StreamHandle::PER_THREAD).err(), wrong_context);
    }
    // An event crosses devices.
    let event = gpu.event(&cx).unwrap();
    event.record(&cx, stream.handle()).unwrap();
    let their_cx = other.enter().unwrap();
    other.wait_event(&their_cx, theirs.handle(), &event).unwrap();
    theirs.synchronize().unwrap();
    match (gpu.peer_access(last), gpu.peer_access(last)) {
        (Ok(()), again) => assert_eq!(again, Ok(())),
        (Err(error), _) => assert_eq!(error, CudaError::PeerAccess { from: 0, to: last }),
    }
}
