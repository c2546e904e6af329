//! Memory is never freed under running work, whatever happens to the flight.
#![allow(clippy::print_stderr, reason = "tests say why they skip")]

mod common;

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use common::{Gate, Graph, Graveyard, device, gpu, memory, pattern, read};
use kvferry_cuda::{BatchCopies, CudaError, Flight, Stream, StreamHandle, drain_deferred};

#[test]
fn an_empty_flight_is_done() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let grave = Graveyard::default();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    flight.hold(grave.token());
    assert_eq!((flight.done(), flight.wait(), flight.captured()), (Ok(true), Ok(()), false));
    drop(flight);
    assert_eq!(grave.dropped(), 1);
}

#[test]
fn owners_live_until_the_event_and_dropping_waits() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    for landed in [true, false] {
        let (src, dst) = (device(&gpu, &pattern(4096, 1)), device(&gpu, &[0; 4096]));
        let grave = Graveyard::default();
        let mut flight = Flight::new(&gpu, &cx).unwrap();
        flight.hold(grave.token());
        let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
        copies.push(0, 0, 0, 0, 4096).unwrap();
        let gate = Gate::on(stream.handle());
        copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
        if landed {
            flight.land(&cx, stream.handle()).unwrap();
        }
        assert_eq!((flight.done(), grave.dropped()), (Ok(false), 0));
        let opener = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            gate.open();
        });
        drop(copies);
        let reader = Arc::clone(&dst);
        drop(dst);
        drop(flight);
        assert_eq!(grave.dropped(), 1);
        assert!(
            read(&reader) == pattern(4096, 1),
            "dropping a flight did not wait for its copy (landed: {landed})"
        );
        opener.join().unwrap();
    }
}

#[test]
fn a_forgotten_flight_leaks_its_owners() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let grave = Graveyard::default();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    flight.hold(grave.token());
    mem::forget(flight);
    assert_eq!(grave.dropped(), 0);
}

#[test]
fn landing_joins_every_stream() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (one, two) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let (src, dst) = (device(&gpu, &pattern(64, 2)), device(&gpu, &[0; 64]));
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 64).unwrap();
    let gate = Gate::on(one.handle());
    copies.enqueue_each(&cx, one.handle(), &mut flight).unwrap();
    // Landing on a stream that has nothing to do: it must wait for the other one.
    flight.land(&cx, two.handle()).unwrap();
    two_is_waiting(&flight);
    gate.open();
    flight.wait().unwrap();
    assert_eq!(flight.done(), Ok(true));
    assert!(read(&dst) == pattern(64, 2));
}

fn two_is_waiting(flight: &Flight) {
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(flight.done(), Ok(false));
    assert_eq!(flight.event().query(), Ok(false));
}

#[test]
fn nobody_else_records_the_event() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let flight = Flight::new(&gpu, &cx).unwrap();
    let refused = flight.event().record(&cx, StreamHandle::PER_THREAD);
    assert!(matches!(refused, Err(CudaError::Argument { .. })), "{refused:?}");
}

#[test]
fn a_flight_is_captured_or_not() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (stream, other) = (Stream::new(&gpu).unwrap(), Stream::new(&gpu).unwrap());
    let (src, dst) = (device(&gpu, &pattern(64, 3)), device(&gpu, &[0; 64]));
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 64).unwrap();
    let grave = Graveyard::default();
    let is_refused = |outcome: Result<(), CudaError>| {
        assert!(matches!(outcome, Err(CudaError::StreamIsCapturing { .. })), "{outcome:?}");
    };
    let graph = Graph::capture(&cx, &stream, |cx, capturing| {
        let mut flight = Flight::new(&gpu, cx).unwrap();
        flight.hold(grave.token());
        // The batch call is refused before anything is noted.
        is_refused(copies.enqueue(cx, capturing, &mut flight));
        assert!(!flight.captured());
        copies.enqueue_each(cx, capturing, &mut flight).unwrap();
        assert!(flight.captured());
        is_refused(copies.enqueue_each(cx, other.handle(), &mut flight));
        is_refused(flight.land(cx, capturing));
        is_refused(flight.wait());
        flight.capture(cx, capturing).unwrap();

        let mut eager = Flight::new(&gpu, cx).unwrap();
        copies.enqueue_each(cx, other.handle(), &mut eager).unwrap();
        is_refused(copies.enqueue_each(cx, capturing, &mut eager));
        let refused = Flight::new(&gpu, cx).unwrap().capture(cx, other.handle());
        assert_eq!(refused, Err(CudaError::NotCapturing { stream: other.handle().raw() }));
    });
    drop(copies);
    let reader = Arc::clone(&dst);
    drop((src, dst));
    reader.memset(0, 64, 0).unwrap();
    graph.run(&stream);
    stream.synchronize().unwrap();
    assert!(read(&reader) == pattern(64, 3), "the graph did not keep its memory, or did not run");
    drain_deferred();
    assert_eq!(grave.dropped(), 0);
    drop(graph);
    stream.synchronize().unwrap();
    // The driver may take its time with the destructor; it never frees by itself.
    for _ in 0..1000 {
        drain_deferred();
        if grave.dropped() == 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(grave.dropped(), 1, "the graph's owners never came back");
}

#[test]
fn a_captured_flight_that_is_dropped_leaks() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (src, dst) = (device(&gpu, &pattern(64, 4)), device(&gpu, &[0; 64]));
    let grave = Graveyard::default();
    let graph = Graph::capture(&cx, &stream, |cx, capturing| {
        let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
        copies.push(0, 0, 0, 0, 64).unwrap();
        let mut flight = Flight::new(&gpu, cx).unwrap();
        flight.hold(grave.token());
        copies.enqueue_each(cx, capturing, &mut flight).unwrap();
        drop(flight);
    });
    assert_eq!(grave.dropped(), 0);
    graph.run(&stream);
    stream.synchronize().unwrap();
    assert!(read(&dst) == pattern(64, 4));
}

#[test]
fn the_per_thread_stream_belongs_to_one_thread() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let (src, dst) = (device(&gpu, &pattern(64, 5)), device(&gpu, &[0; 64]));
    let mut copies = BatchCopies::new(&[memory(&src)], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 64).unwrap();
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    copies.enqueue_each(&cx, StreamHandle::PER_THREAD, &mut flight).unwrap();
    let (flight, refused) = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let cx = gpu.enter().unwrap();
                let refused = flight.land(&cx, StreamHandle::PER_THREAD);
                (flight, refused)
            })
            .join()
            .unwrap()
    });
    assert!(matches!(refused, Err(CudaError::WrongStream { .. })), "{refused:?}");
    drop(flight);
    assert!(read(&dst) == pattern(64, 5));
}
