//! Buffers that are read on other streams when they are let go of, and calls on several streams.

use std::time::Duration;

use kvferry::all2all::{CallOptions, ExchangeFailure, ExchangeResult};
use kvferry::cuda::{BatchCopies, DeviceRegion, Flight, GpuMemory, Stream, StreamHandle, faults};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Region};

use ExchangeOp::{GatherHeads, SendRecvHeads};

use crate::calls::plain;
use crate::exchange::{Strides, Whole};
use crate::gpus::{Hold, Rank, gpus, on_gpus};

fn whole() -> Whole {
    Whole::new(2, &[3, 5], 6, 8, Dtype::Float16)
}

fn on(at: &Rank, whole: &Whole, op: ExchangeOp, stream: StreamHandle) -> ExchangeResult {
    let options = CallOptions { stream: Some(stream), ..whole.options(op, HeadLayout::Bnhd) };
    let input = at.input(whole, op, &Strides::default());
    at.comm.exchange(op, &[input], &options, kvferry::all2all::Landing::Pool).unwrap().remove(0)
}

/// A copy of a result, made on a stream that nobody told the library of.
struct Consumer {
    copy: DeviceRegion,
    flight: Flight,
}

impl Consumer {
    /// After `after` and what is on `stream` already.
    fn new(at: &Rank, result: &ExchangeResult, after: &Stream, stream: &Stream) -> Consumer {
        let Region::Device(region) = result.region() else { panic!("on a GPU") };
        let copy = at.upload(&vec![0xEE; region.len() as usize]);
        let cx = at.gpu.enter().unwrap();
        let event = at.gpu.event(&cx).unwrap();
        event.record(&cx, after.handle()).unwrap();
        at.gpu.wait_event(&cx, stream.handle(), &event).unwrap();
        let mut copies = BatchCopies::new(&[GpuMemory::of_device(region)], &[GpuMemory::of_device(&copy)]);
        copies.push(0, 0, 0, 0, region.len()).unwrap();
        let mut flight = Flight::new(&at.gpu, &cx).unwrap();
        copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
        flight.land(&cx, stream.handle()).unwrap();
        Consumer { copy, flight }
    }

    fn check(self, at: &Rank, whole: &Whole, op: ExchangeOp) {
        self.flight.wait().unwrap();
        let expected = whole.expected(op, at.rank, HeadLayout::Bnhd);
        let mut found = vec![0; expected.len()];
        self.copy.read(0, &mut found).unwrap();
        assert!(found == expected, "a consumer read what a later call had put there");
    }
}

#[test]
fn a_buffer_waits_for_its_consumers_on_all_streams_that_were_named() {
    if gpus(2).is_none() {
        return;
    }
    for (announced, other_call) in [(true, false), (true, true), (false, true), (false, false)] {
        on_gpus(
            2,
            |builder| builder.buffers(1),
            |at| {
                let whole = whole();
                let (b, c) = (Stream::new(&at.gpu).unwrap(), Stream::new(&at.gpu).unwrap());
                let y = on(at, &whole, SendRecvHeads, at.stream.handle());
                // The consumer is on a stream that is announced, or on the home stream itself.
                let reader = if announced { &b } else { &at.stream };
                // A free that waits for the hold would keep everybody from launching.
                kvferry::cuda::drain_deferred();
                let hold = (at.rank == 0).then(|| Hold::on(&at.gpu, reader));
                let consumer = Consumer::new(at, &y, &at.stream, reader);
                if announced {
                    at.comm.record_stream(&y, b.handle());
                }
                drop(y);
                // One buffer: this call gets the same one, on a stream of its own or on the home stream.
                let next = if other_call { &c } else { &at.stream };
                let z = on(at, &whole.seeded(2), SendRecvHeads, next.handle());
                // Long enough for bytes to be overwritten if nobody waits.
                std::thread::sleep(Duration::from_millis(60));
                if let Some(hold) = &hold {
                    hold.open();
                }
                consumer.check(at, &whole, SendRecvHeads);
                next.synchronize().unwrap();
                at.check(&whole.seeded(2), SendRecvHeads, HeadLayout::Bnhd, &z);
                at.comm.check().unwrap();
            },
        );
    }
}

#[test]
fn a_buffer_waits_for_its_consumers_also_after_a_call_that_was_not_launched() {
    if gpus(1).is_none() {
        return;
    }
    // Alone: a refused call breaks nothing.
    on_gpus(
        1,
        |builder| builder.buffers(1),
        |at| {
            let whole = Whole::new(2, &[5], 6, 8, Dtype::Float16);
            let (b, c) = (Stream::new(&at.gpu).unwrap(), Stream::new(&at.gpu).unwrap());
            let y = on(at, &whole, SendRecvHeads, at.stream.handle());
            kvferry::cuda::drain_deferred();
            let hold = Hold::on(&at.gpu, &b);
            let consumer = Consumer::new(at, &y, &at.stream, &b);
            at.comm.record_stream(&y, b.handle());
            drop(y);
            // It has made its stream wait for both readers when it fails: at the wait for the call before.
            let options =
                CallOptions { stream: Some(c.handle()), ..whole.options(SendRecvHeads, HeadLayout::Bnhd) };
            let input = at.input(&whole.seeded(1), SendRecvHeads, &Strides::default());
            faults::inject("cuStreamWaitEvent", 3, 700);
            let failed = at.comm.send_recv_heads(&[input], &options);
            assert_eq!(faults::clear(), 0);
            assert!(failed.is_err());
            let z = on(at, &whole.seeded(2), SendRecvHeads, at.stream.handle());
            std::thread::sleep(Duration::from_millis(60));
            hold.open();
            consumer.check(at, &whole, SendRecvHeads);
            at.check(&whole.seeded(2), SendRecvHeads, HeadLayout::Bnhd, &z);
            at.comm.check().unwrap();
        },
    );
}

#[test]
fn a_buffer_waits_for_calls_that_read_it() {
    if gpus(2).is_none() {
        return;
    }
    on_gpus(
        2,
        |builder| builder.buffers(2),
        |at| {
            let whole = whole();
            let b = Stream::new(&at.gpu).unwrap();
            for seed in 0..6 {
                let whole = whole.seeded(seed);
                let y = on(at, &whole, SendRecvHeads, at.stream.handle());
                let back =
                    CallOptions { stream: Some(b.handle()), ..whole.options(GatherHeads, HeadLayout::Bnhd) };
                let z = at.comm.gather_heads(&[y.array()], &back).unwrap().remove(0);
                drop(y);
                let w = on(at, &whole.seeded(100 + seed), SendRecvHeads, at.stream.handle());
                b.synchronize().unwrap();
                at.check(&whole, GatherHeads, HeadLayout::Bnhd, &z);
                at.check(&whole.seeded(100 + seed), SendRecvHeads, HeadLayout::Bnhd, &w);
            }
            at.comm.check().unwrap();
        },
    );
}

#[test]
fn calls_on_changing_streams_follow_one_another() {
    if gpus(2).is_none() {
        return;
    }
    on_gpus(2, plain, |at| {
        let whole = whole();
        let others: Vec<_> = (0..3).map(|_| Stream::new(&at.gpu).unwrap()).collect();
        let streams = [
            at.stream.handle(),
            StreamHandle::LEGACY,
            others[0].handle(),
            others[1].handle(),
            StreamHandle::PER_THREAD,
            others[2].handle(),
        ];
        let mut held = Vec::new();
        for seed in 0..30_u64 {
            // The ranks' streams have nothing to do with each other.
            let stream = streams[(seed as usize * (at.rank + 1)) % streams.len()];
            held.push((seed, on(at, &whole.seeded(seed), SendRecvHeads, stream)));
            if held.len() == 3 {
                at.gpu.synchronize().unwrap();
                for (seed, result) in held.drain(..) {
                    at.check(&whole.seeded(seed), SendRecvHeads, HeadLayout::Bnhd, &result);
                }
            }
        }
        at.comm.check().unwrap();
    });
}

#[test]
fn a_stream_of_another_device_is_refused() {
    if gpus(2).is_none() {
        return;
    }
    on_gpus(2, plain, |at| {
        let whole = whole();
        if at.rank == 0 {
            let other = Stream::new(&kvferry::cuda::Gpu::open(1).unwrap()).unwrap();
            let options = CallOptions { stream: Some(other.handle()), ..CallOptions::default() };
            let input = at.input(&whole, SendRecvHeads, &Strides::default());
            let refused = at.comm.send_recv_heads(&[input], &options);
            assert!(matches!(refused, Err(kvferry::Error::Cuda(_))), "{refused:?}");
        } else {
            // Unless the other one's refusal is heard of first.
            drop(at.call(&whole, SendRecvHeads));
        }
        let start = std::time::Instant::now();
        let failure = loop {
            match at.comm.check() {
                Err(kvferry::Error::Exchange(failure)) => break failure,
                other => assert!(start.elapsed().as_secs() < 5, "{other:?}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(matches!(failure, ExchangeFailure::Mismatch { rank: 0, .. }), "{failure}");
        at.stream.synchronize().unwrap();
        at.comm.reset().unwrap();
        at.checked(&whole, SendRecvHeads);
    });
}

#[test]
fn a_call_outlives_its_communicator() {
    crate::processes::in_processes("streams::a_call_outlives_its_communicator", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let hold = Hold::on(&at.gpu, &at.stream);
        let result = at.call(&whole, SendRecvHeads).unwrap();
        // Dropped, not closed, with the call on its way.
        let Rank { comm, gpu, stream, rank } = at;
        drop(comm);
        std::thread::sleep(Duration::from_millis(50));
        hold.open();
        stream.synchronize().unwrap();
        let Region::Device(region) = result.region() else { panic!("on a GPU") };
        let expected = whole.expected(SendRecvHeads, rank, HeadLayout::Bnhd);
        let mut found = vec![0; expected.len()];
        region.read(result.offset(), &mut found).unwrap();
        assert!(found == expected);
        drop(gpu);
    });
}
