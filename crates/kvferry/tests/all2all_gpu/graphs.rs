//! Calls in CUDA graphs.

use kvferry::Dtype;
use kvferry::all2all::{
    CallOptions, ExchangeArray, ExchangeEngine, ExchangeFailure, ExchangeResult, Landing,
};
use kvferry::cuda::Graph;
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Error, Region};

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::calls::plain;
use crate::exchange::{Strides, Whole};
use crate::gpus::{Rank, bytes, gpus, on_gpus};
use crate::processes::{broken, in_processes};

fn whole() -> Whole {
    Whole::new(2, &[3, 5], 6, 8, Dtype::Float16)
}

/// Puts the input of another seed where `array` is.
fn refill(at: &Rank, array: &ExchangeArray, whole: &Whole, op: ExchangeOp) {
    let fresh = at.input(whole, op, &Strides::default());
    let (Region::Device(from), Region::Device(to)) = (&fresh.region, &array.region) else {
        panic!("on GPUs")
    };
    let mut image = vec![0; from.len() as usize];
    from.read(0, &mut image).unwrap();
    to.write(0, &image).unwrap();
}

/// A graph of `count` calls, send and gather by turns, each with its result.
fn capture(
    at: &Rank,
    input: &[ExchangeArray; 2],
    whole: &Whole,
    count: usize,
) -> (Graph, Vec<ExchangeResult>) {
    let cx = at.gpu.enter().unwrap();
    let mut results = Vec::new();
    let graph = Graph::capture::<Error>(&cx, &at.stream, || {
        for index in 0..count {
            let op = [SendRecvHeads, GatherHeads][index % 2];
            let mut options = whole.options(op, HeadLayout::Bnhd);
            options.stream = Some(at.stream.handle());
            let input = std::slice::from_ref(&input[index % 2]);
            results.push(at.comm.exchange(op, input, &options, Landing::Pool)?.remove(0));
        }
        Ok(())
    });
    (graph.unwrap(), results)
}

fn inputs(at: &Rank, whole: &Whole) -> [ExchangeArray; 2] {
    [SendRecvHeads, GatherHeads].map(|op| at.input(whole, op, &Strides::default()))
}

fn replay(at: &Rank, graph: &Graph) {
    graph.launch(&at.gpu.enter().unwrap(), &at.stream).unwrap();
    at.stream.synchronize().unwrap();
}

#[test]
fn replays_see_changed_inputs_in_between_eager_calls() {
    in_processes("graphs::replays_see_changed_inputs_in_between_eager_calls", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let first = inputs(&at, &whole);
        // An odd number of calls, so that parities change from replay to replay; two graphs.
        let (one, results) = capture(&at, &first, &whole, 3);
        let second = inputs(&at, &whole);
        let (two, other) = capture(&at, &second, &whole, 1);
        assert_eq!((at.comm.stats().buffers_free, at.comm.epoch()), (0, 0));
        for seed in 10..16 {
            let whole = whole.seeded(seed);
            refill(&at, &first[0], &whole, SendRecvHeads);
            refill(&at, &first[1], &whole.seeded(seed + 100), GatherHeads);
            replay(&at, &one);
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &results[0]);
            at.check(&whole.seeded(seed + 100), GatherHeads, HeadLayout::Bnhd, &results[1]);
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &results[2]);
            refill(&at, &second[0], &whole.seeded(seed + 200), SendRecvHeads);
            replay(&at, &two);
            at.check(&whole.seeded(seed + 200), SendRecvHeads, HeadLayout::Bnhd, &other[0]);
            // The first graph's results are still there.
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &results[0]);
            at.comm.check().unwrap();
        }
        // With the graphs and the results, the buffers come back.
        drop((one, two));
        drop((results, other));
        assert!(kvferry::cuda::drain_deferred());
        until(|| at.comm.stats().buffers_free == 4);
        at.checked(&whole.seeded(99), AllGatherTokens);
        at.comm.close().unwrap();
    });
}

fn until(condition: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < std::time::Duration::from_secs(10));
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn eager_calls_between_replays_and_one_rank_of_each_kind() {
    in_processes("graphs::eager_calls_between_replays_and_one_rank_of_each_kind", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let input = inputs(&at, &whole);
        at.checked(&whole.seeded(5), SendRecvHeads);
        let captured = (process.rank == 0).then(|| capture(&at, &input, &whole, 1));
        for seed in 20..29 {
            let whole = whole.seeded(seed);
            match &captured {
                // Rank 0 replays, rank 1 calls.
                Some((graph, results)) => {
                    refill(&at, &input[0], &whole, SendRecvHeads);
                    replay(&at, graph);
                    at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &results[0]);
                }
                None => drop(at.checked(&whole, SendRecvHeads)),
            }
            // Both call, an uneven number of times.
            for round in 0..seed % 3 {
                at.checked(&whole.seeded(1000 + round), GatherHeads);
            }
        }
        at.comm.check().unwrap();
    });
}

#[test]
fn a_dropped_result_serves_the_same_capture_again_and_no_other_call() {
    in_processes(
        "graphs::a_dropped_result_serves_the_same_capture_again_and_no_other_call",
        2,
        &[],
        |process| {
            let at = process.connect();
            let whole = whole();
            let input = inputs(&at, &whole);
            let places = std::sync::Mutex::new(Vec::new());
            let cx = at.gpu.enter().unwrap();
            let graph = Graph::capture::<Error>(&cx, &at.stream, || {
                let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
                options.stream = Some(at.stream.handle());
                for _ in 0..7 {
                    // Dropped at once: seven calls, one buffer.
                    let results = at.comm.send_recv_heads(&input[..1], &options)?;
                    places.lock().unwrap().push(results[0].region().span().addr);
                }
                Ok(())
            });
            let graph = graph.unwrap();
            let places = places.into_inner().unwrap();
            assert!(places.iter().all(|&place| place == places[0]));
            assert_eq!(at.comm.stats().buffers_free, 3);
            for seed in 0..4 {
                let held: Vec<_> =
                    (0..3).map(|call| at.checked(&whole.seeded(seed + call), SendRecvHeads)).collect();
                assert!(held.iter().all(|result| result.region().span().addr != places[0]));
                replay(&at, &graph);
                for (result, call) in held.iter().zip(0..) {
                    at.check(&whole.seeded(seed + call), SendRecvHeads, HeadLayout::Bnhd, result);
                }
            }
            // A capture that finds no buffer says so, and nothing is broken.
            let held: Vec<_> = (0..3).map(|call| at.checked(&whole.seeded(call), SendRecvHeads)).collect();
            let refused = Graph::capture::<Error>(&cx, &at.stream, || {
                let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
                options.stream = Some(at.stream.handle());
                at.comm.send_recv_heads(&input[..1], &options).map(drop)
            });
            assert!(matches!(&refused, Err(Error::Busy { .. })), "{refused:?}");
            drop(held);
            at.checked(&whole.seeded(77), SendRecvHeads);
            drop(graph);
            assert!(kvferry::cuda::drain_deferred());
            until(|| at.comm.stats().buffers_free == 4);
            at.comm.check().unwrap();
        },
    );
}

#[test]
fn outputs_and_copy_engines_and_copies_out_can_be_captured() {
    in_processes("graphs::outputs_and_copy_engines_and_copies_out_can_be_captured", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let input = inputs(&at, &whole);
        let (tokens, heads) = whole.after(SendRecvHeads, at.rank);
        let shape = [whole.batch, tokens.end, heads.end - heads.start, whole.dim];
        let out = at.comm.empty_output(&[(shape, whole.dtype)], HeadLayout::Bnhd).unwrap();
        let bytes_of_result = shape.iter().product::<u64>() * 2;
        let target = at.upload(&vec![0xEE; bytes_of_result as usize]);
        let cx = at.gpu.enter().unwrap();
        let graph = Graph::capture::<Error>(&cx, &at.stream, || {
            let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
            (options.stream, options.engine) = (Some(at.stream.handle()), ExchangeEngine::Copy);
            options.out = Some(out.clone());
            at.comm.send_recv_heads(&input[..1], &options)?;
            let options = CallOptions { out: None, engine: ExchangeEngine::Auto, ..options };
            let mut memory = |shapes: &[kvferry::all2all::ResultShape]| {
                let region = Region::Device(target.clone());
                let (shape, strides) = (shapes[0].shape, shapes[0].strides);
                Ok(vec![ExchangeArray { region, offset: 0, shape, strides, dtype: whole.dtype }])
            };
            at.comm.exchange(SendRecvHeads, &input[..1], &options, Landing::Copy(&mut memory)).map(drop)
        });
        let graph = graph.unwrap();
        // The graph keeps the output.
        let result = out.results().unwrap().remove(0);
        drop(out);
        for seed in 30..35 {
            let whole = whole.seeded(seed);
            refill(&at, &input[0], &whole, SendRecvHeads);
            replay(&at, &graph);
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &result);
            let mut copied = vec![0; bytes_of_result as usize];
            target.read(0, &mut copied).unwrap();
            assert!(copied == bytes(&result));
            at.checked(&whole.seeded(seed + 1000), GatherHeads);
        }
        at.comm.check().unwrap();
    });
}

#[test]
fn calls_on_two_streams_of_a_capture_follow_one_another() {
    in_processes("graphs::calls_on_two_streams_of_a_capture_follow_one_another", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let input = inputs(&at, &whole);
        let side = kvferry::cuda::Stream::new(&at.gpu).unwrap();
        let cx = at.gpu.enter().unwrap();
        let mut results = Vec::new();
        let graph = Graph::capture::<Error>(&cx, &at.stream, || {
            // The side stream joins the capture, and comes back at its end.
            let (fork, join) = (at.gpu.event(&cx)?, at.gpu.event(&cx)?);
            fork.record(&cx, at.stream.handle())?;
            at.gpu.wait_event(&cx, side.handle(), &fork)?;
            for (index, stream) in [&at.stream, &side, &side, &at.stream, &side].into_iter().enumerate() {
                let op = [SendRecvHeads, GatherHeads][index % 2];
                let mut options = whole.options(op, HeadLayout::Bnhd);
                options.stream = Some(stream.handle());
                let input = std::slice::from_ref(&input[index % 2]);
                let mut result = at.comm.exchange(op, input, &options, Landing::Pool)?;
                // Every second one is given back, for the next to use on another stream.
                if index % 2 == 0 {
                    results.push(result.remove(0));
                }
            }
            join.record(&cx, side.handle())?;
            at.gpu.wait_event(&cx, at.stream.handle(), &join)?;
            Ok(())
        });
        let graph = graph.unwrap();
        for seed in 1..6 {
            let whole = whole.seeded(seed);
            refill(&at, &input[0], &whole, SendRecvHeads);
            replay(&at, &graph);
            results.iter().for_each(|result| at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, result));
        }
        at.comm.check().unwrap();
    });
}

#[test]
fn a_timeout_in_a_replay_is_found_and_named() {
    in_processes("graphs::a_timeout_in_a_replay_is_found_and_named", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let input = inputs(&at, &whole);
        let (graph, results) = capture(&at, &input, &whole, 1);
        replay(&at, &graph);
        at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &results[0]);
        // The bound is read by the kernel, so it holds for graphs that were captured before.
        let bound = std::time::Duration::from_millis(300);
        at.comm.set_timeout(bound).unwrap();
        if process.rank == 0 {
            let start = std::time::Instant::now();
            replay(&at, &graph);
            assert!(start.elapsed() >= bound && start.elapsed() < 10 * bound, "{:?}", start.elapsed());
            assert!(bytes(&results[0]).iter().all(|&byte| byte == 0xFF));
            // Nobody has called anything: the thread that looks has told rank 1.
        }
        let failure = broken(&at, std::time::Duration::from_secs(10));
        assert!(matches!(failure, ExchangeFailure::PeerTimeout { peer: 1, .. }), "{failure}");
        // A replay of a broken communicator does not wait, and does not pass for a good one. Rank 1 may still push to the
        // place that rank 0 has posted; what rank 0 has filled is then its own share.
        replay(&at, &graph);
        let found = bytes(&results[0]);
        assert!(found.iter().filter(|&&byte| byte == 0xFF).count() >= found.len() / 4);
        // The graph's hash is of the session that ended: after a reset it disagrees with calls of the new one.
        at.comm.reset().unwrap();
        at.comm.set_timeout(std::time::Duration::from_secs(20)).unwrap();
        at.checked(&whole.seeded(3), SendRecvHeads);
        if process.rank == 0 {
            replay(&at, &graph);
        } else {
            at.call(&whole, SendRecvHeads).unwrap();
        }
        let failure = broken(&at, std::time::Duration::from_secs(10));
        assert!(matches!(failure, ExchangeFailure::Mismatch { .. }), "{failure}");
    });
}

#[test]
fn graphs_are_watched_after_a_reset_as_before() {
    in_processes("graphs::graphs_are_watched_after_a_reset_as_before", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let input = inputs(&at, &whole);
        let (graph, _results) = capture(&at, &input, &whole, 1);
        let told = std::env::temp_dir().join(format!("kvf-gpu-told-{}", std::os::unix::process::parent_id()));
        at.comm.set_timeout(std::time::Duration::from_millis(300)).unwrap();
        let patience = std::time::Duration::from_secs(10);
        for session in 0..2 {
            if process.rank == 0 {
                replay(&at, &graph);
                // Nobody asks here until rank 1 has been told, which only the thread that looks can do.
                let start = std::time::Instant::now();
                while !told.exists() {
                    assert!(start.elapsed() < patience, "session {session}: rank 1 was not told");
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                std::fs::remove_file(&told).unwrap();
            }
            let failure = broken(&at, patience);
            assert!(matches!(failure, ExchangeFailure::PeerTimeout { peer: 1, .. }), "{failure}");
            if process.rank == 1 {
                std::fs::write(&told, []).unwrap();
            }
            at.comm.reset().unwrap();
        }
    });
}

#[test]
fn a_refused_call_in_a_capture_is_told_to_nobody() {
    in_processes("graphs::a_refused_call_in_a_capture_is_told_to_nobody", 2, &[], |process| {
        let at = process.connect();
        let whole = whole();
        let cx = at.gpu.enter().unwrap();
        let refused = Graph::capture::<Error>(&cx, &at.stream, || {
            // More than the capacity.
            let big = Whole::new(1, &[3000, 3000], 6, 64, Dtype::Float64);
            let mut array = at.input(&whole, SendRecvHeads, &Strides::default());
            (array.shape, array.strides) = ([1, 3000, 6, 64], [0, 0, 0]);
            let mut options = big.options(SendRecvHeads, HeadLayout::Bnhd);
            options.stream = Some(at.stream.handle());
            array.offset = 0;
            at.comm.send_recv_heads(&[array], &options).map(drop)
        });
        assert!(refused.is_err());
        at.comm.check().unwrap();
        at.checked(&whole.seeded(4), SendRecvHeads);
    });
}

#[test]
fn threads_cannot_capture_calls_and_a_lone_rank_can() {
    if gpus(2).is_none() {
        return;
    }
    let whole = whole();
    on_gpus(2, plain, |at| {
        let input = inputs(at, &whole);
        // One after the other: a capture in global mode forbids much to the other threads.
        for turn in 0..2 {
            if turn == at.rank {
                let cx = at.gpu.enter().unwrap();
                let refused = Graph::capture::<Error>(&cx, &at.stream, || {
                    let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
                    options.stream = Some(at.stream.handle());
                    at.comm.send_recv_heads(&input[..1], &options).map(drop)
                });
                assert!(matches!(&refused, Err(Error::Unsupported { .. })), "{refused:?}");
                at.comm.check().unwrap();
            }
            at.checked(&whole.seeded(4), SendRecvHeads);
        }
    });
    let whole = Whole::new(1, &[4], 6, 8, Dtype::Float16);
    on_gpus(1, plain, |at| {
        let input = inputs(at, &whole);
        let (graph, results) = capture(at, &input, &whole, 2);
        for seed in 0..3 {
            refill(at, &input[0], &whole.seeded(seed), SendRecvHeads);
            replay(at, &graph);
            at.check(&whole.seeded(seed), SendRecvHeads, HeadLayout::Bnhd, &results[0]);
        }
    });
}
