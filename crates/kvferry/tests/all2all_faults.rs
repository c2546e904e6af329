//! Ranks that disagree, refuse, are late, abort, go or are made anew: what every rank gets, and how soon.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod exchange;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use exchange::*;
use kvferry::all2all::{All2All, All2AllBuilder, CallOptions, ExchangeFailure, Landing, Output};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error, StreamHandle};

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

/// Far below the timeout of every communicator here: what was not waited for.
const SOON: Duration = Duration::from_secs(5);

fn plain(builder: All2AllBuilder) -> All2AllBuilder {
    builder
}

fn failure<T: std::fmt::Debug>(result: kvferry::Result<T>) -> ExchangeFailure {
    match result {
        Err(Error::Exchange(failure)) => failure,
        other => panic!("expected a failure of the exchange, got {other:?}"),
    }
}

/// What `check` says once word of a failure elsewhere has come.
fn hears(comm: &All2All) -> kvferry::Result<()> {
    let start = Instant::now();
    while start.elapsed() < SOON {
        comm.check()?;
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// Asserts that the communicator raises `failure` from now on, whatever is called.
fn stays_broken(comm: &All2All, failure: &ExchangeFailure, whole: &Whole) {
    for _ in 0..2 {
        assert_eq!(&self::failure(call(comm, whole, SendRecvHeads)), failure);
        assert_eq!(&self::failure(comm.check()), failure);
    }
    assert_eq!(&self::failure(comm.close()), failure);
    assert!(matches!(call(comm, whole, SendRecvHeads), Err(Error::ExchangeClosed)));
    comm.close().unwrap();
}

#[test]
fn ranks_that_disagree_all_name_the_one_that_differs() {
    let whole = Whole::new(1, &[3, 3, 3], 6, 8, Dtype::Float16);
    type Odd = fn(&Whole) -> Whole;
    let odd: [(&str, Odd); 6] = [
        ("dtype", |whole| Whole { dtype: Dtype::BFloat16, ..whole.clone() }),
        ("shapes", |whole| Whole { dim: 4, ..whole.clone() }),
        ("shapes", |whole| Whole { batch: 2, ..whole.clone() }),
        ("shapes", |whole| Whole { heads: 9, ranges: even(9, 3), ..whole.clone() }),
        ("token counts", |whole| Whole { tokens: vec![3, 4, 2], ..whole.clone() }),
        ("heads", |whole| Whole { ranges: vec![0..2, 2..5, 5..6], ..whole.clone() }),
    ];
    for (what, odd) in odd {
        for who in 1..3 {
            // Rank 0 has as many tokens in both.
            let start = Instant::now();
            ranks(3, plain, |comm| {
                let whole = if comm.rank() == who { odd(&whole) } else { whole.clone() };
                call(&comm, &Whole::new(1, &[1, 1, 1], 3, 1, Dtype::Int8), SendRecvHeads).unwrap();
                let found = failure(call(&comm, &whole, SendRecvHeads));
                let ExchangeFailure::Mismatch { rank, reason, when } = &found else { panic!("{found}") };
                assert_eq!((*rank, when.epoch), (who, 2), "{found}");
                assert!(reason.contains(what) && reason.contains("rank 0"), "{reason} should name {what}");
                stays_broken(&comm, &found, &whole);
            });
            assert!(start.elapsed() < SOON);
        }
    }
}

#[test]
fn ranks_in_different_operations_disagree() {
    let whole = Whole::new(1, &[2, 2], 4, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        let ops = [SendRecvHeads, GatherHeads, AllGatherTokens];
        let mine = ops[comm.rank()];
        let found = failure(call(&comm, &whole, mine));
        assert!(matches!(&found, ExchangeFailure::Mismatch { rank: 1, .. }), "{found}");
        stays_broken(&comm, &found, &whole);
    });
    // The layout of the results, and the number of tensors.
    for odd in 0..2 {
        ranks(2, plain, |comm| {
            let rank = comm.rank();
            let x = whole.input(SendRecvHeads, rank).array;
            let mut options = CallOptions::default();
            let mut arrays = vec![x];
            if rank == 1 && odd == 0 {
                options.layout = HeadLayout::Bhnd;
            } else if rank == 1 {
                arrays.push(arrays[0].clone());
            }
            let found = failure(comm.send_recv_heads(&arrays, &options));
            assert!(matches!(&found, ExchangeFailure::Mismatch { rank: 1, .. }), "{found}");
        });
    }
}

/// An output of the shape that `call` gives on this rank.
fn output(comm: &All2All, whole: &Whole, op: ExchangeOp) -> kvferry::Result<Output> {
    let (tokens, heads) = whole.after(op, comm.rank());
    let shape = [whole.batch, tokens.end - tokens.start, heads.end - heads.start, whole.dim];
    comm.empty_output(&[(shape, whole.dtype)], HeadLayout::Bnhd)
}

fn call_into(comm: &All2All, whole: &Whole, out: &Output) -> kvferry::Result<()> {
    let input = whole.input(SendRecvHeads, comm.rank());
    let options = CallOptions { out: Some(out.clone()), ..whole.options(SendRecvHeads, HeadLayout::Bnhd) };
    let results = comm.send_recv_heads(&[input.array], &options)?;
    whole.check(SendRecvHeads, comm.rank(), HeadLayout::Bnhd, &results[0]);
    Ok(())
}

#[test]
fn results_of_a_failed_call_are_filled() {
    let whole = Whole::new(1, &[3, 2], 4, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        let rank = comm.rank();
        let outs =
            [output(&comm, &whole, SendRecvHeads).unwrap(), output(&comm, &whole, SendRecvHeads).unwrap()];
        for out in &outs {
            call_into(&comm, &whole, out).unwrap();
        }
        // The same call into different outputs is not the same call.
        let found = failure(call_into(&comm, &whole.seeded(2), &outs[rank]));
        let ExchangeFailure::Mismatch { rank: 1, reason, .. } = &found else { panic!("{found}") };
        assert!(reason.contains("output"), "{reason}");
        let filled = bytes(&outs[rank].results().unwrap()[0]);
        assert!(filled.iter().all(|&byte| byte == 0xFF));
        let other = &outs[1 - rank].results().unwrap()[0];
        whole.check(SendRecvHeads, rank, HeadLayout::Bnhd, other);
        // Later calls fill too.
        assert_eq!(failure(call_into(&comm, &whole, &outs[1 - rank])), found);
    });
}

#[test]
fn a_refused_argument_is_everybody_s_failure_at_once() {
    let whole = Whole::new(1, &[3, 3, 3], 6, 8, Dtype::Float16);
    type Bad = fn(&mut kvferry::all2all::ExchangeArray, &mut CallOptions);
    let bad: [(Bad, &str); 5] = [
        (|x, _| x.offset += 1 << 20, "memory"),
        (|x, _| x.strides[1] = 1 << 40, "memory"),
        (|x, _| x.shape[1] = 4, "arguments"),
        (|_, options| options.query_heads = Some(5), "arguments"),
        (|_, options| options.stream = Some(StreamHandle::LEGACY), "arguments"),
    ];
    for (bad, what) in bad {
        let start = Instant::now();
        ranks(3, plain, |comm| {
            let rank = comm.rank();
            call(&comm, &whole, SendRecvHeads).unwrap();
            let mut x = whole.input(SendRecvHeads, rank).array;
            let mut options = CallOptions { rank_tokens: Some(vec![vec![3; 3]]), ..CallOptions::default() };
            if rank == 2 {
                bad(&mut x, &mut options);
                let own = comm.send_recv_heads(&[x], &options).unwrap_err();
                assert!(!matches!(own, Error::Exchange(_)), "{own}");
            } else {
                let found = failure(comm.send_recv_heads(&[x], &options));
                let ExchangeFailure::Mismatch { rank: 2, reason, .. } = &found else { panic!("{found}") };
                assert!(reason.contains(what), "{reason} should name {what}");
            }
            let after = failure(comm.check());
            assert!(matches!(&after, ExchangeFailure::Mismatch { rank: 2, .. }), "{after}");
            stays_broken(&comm, &after, &whole);
        });
        assert!(start.elapsed() < SOON);
    }
}

#[test]
fn a_layer_above_can_refuse() {
    let whole = Whole::new(1, &[3, 3], 6, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        if comm.rank() == 0 {
            comm.refuse(SendRecvHeads, "the tensor requires grad", &CallOptions::default()).unwrap();
            let found = failure(call(&comm, &whole, SendRecvHeads));
            assert!(found.to_string().contains("requires grad"), "{found}");
        } else {
            let found = failure(call(&comm, &whole, SendRecvHeads));
            assert!(matches!(&found, ExchangeFailure::Mismatch { rank: 0, .. }), "{found}");
        }
    });
}

#[test]
fn too_large_a_result_on_any_rank_is_refused_on_all_naming_bytes() {
    // Rank 1's result is the large one; the others' would fit.
    let mut whole = Whole::new(1, &[8, 8, 8], 10, 16, Dtype::Float32);
    whole.ranges = vec![0..1, 1..9, 9..10];
    let needed = 24 * 8 * 16 * 4;
    ranks(
        3,
        |builder| builder.capacity_bytes(needed - 1),
        |comm| {
            let refused = call(&comm, &whole, SendRecvHeads);
            match refused {
                Err(Error::Capacity { rank: 1, needed: found, capacity }) => {
                    assert_eq!((found, capacity), (needed, needed - 1));
                }
                other => panic!("{other:?}"),
            }
            comm.reset().unwrap();
        },
    );
    ranks(
        3,
        |builder| builder.capacity_bytes(needed),
        |comm| {
            call(&comm, &whole, SendRecvHeads).unwrap();
        },
    );
}

#[test]
fn an_output_is_checked() {
    let whole = Whole::new(1, &[2, 2], 4, 8, Dtype::Float16);
    let other = Whole { dim: 4, ..whole.clone() };
    // Another shape.
    ranks(2, plain, |comm| {
        let out = output(&comm, &other, SendRecvHeads).unwrap();
        let refused = call_into(&comm, &whole, &out);
        assert!(matches!(refused, Err(Error::InvalidOption { option: "out", .. })), "{refused:?}");
    });
    // An input in it: the result of the last call.
    ranks(2, plain, |comm| {
        let out = output(&comm, &whole, SendRecvHeads).unwrap();
        call_into(&comm, &whole, &out).unwrap();
        let mut x = out.results().unwrap()[0].array();
        let elements = whole.input(SendRecvHeads, comm.rank()).array;
        (x.shape, x.strides) = (elements.shape, elements.strides);
        let options = CallOptions { out: Some(out), ..CallOptions::default() };
        let refused = comm.send_recv_heads(&[x], &options);
        assert!(matches!(refused, Err(Error::InvalidOption { option: "out", .. })), "{refused:?}");
    });
    // An owned result may come from the pool itself, again and again.
    ranks(2, plain, |comm| {
        let mut result = call(&comm, &whole, SendRecvHeads).unwrap();
        for _ in 0..20 {
            let back = comm.gather_heads(&[result.array()], &whole.options(GatherHeads, HeadLayout::Bnhd));
            let back = back.unwrap().remove(0);
            whole.check(GatherHeads, comm.rank(), HeadLayout::Bnhd, &back);
            let again =
                comm.send_recv_heads(&[back.array()], &whole.options(SendRecvHeads, HeadLayout::Bnhd));
            result = again.unwrap().remove(0);
            whole.check(SendRecvHeads, comm.rank(), HeadLayout::Bnhd, &result);
        }
    });
}

#[test]
fn a_rank_that_does_not_call_is_named_at_the_set_time() {
    let whole = Whole::new(1, &[3, 3, 3], 6, 8, Dtype::Float16);
    let limit = Duration::from_millis(400);
    let over = Barrier::new(3);
    ranks(
        3,
        |builder| builder.timeout(limit),
        |comm| {
            call(&comm, &whole, SendRecvHeads).unwrap();
            let found = if comm.rank() == 2 {
                over.wait();
                // It learns what was said of it.
                failure(hears(&comm))
            } else {
                let start = Instant::now();
                let found = failure(call(&comm, &whole, SendRecvHeads));
                let waited = start.elapsed();
                assert!(waited.as_secs_f64() > 0.9 * limit.as_secs_f64(), "{waited:?}");
                assert!(waited.as_secs_f64() < 1.1 * limit.as_secs_f64() + 0.05, "{waited:?}");
                over.wait();
                found
            };
            let ExchangeFailure::PeerTimeout { peer, when, .. } = &found else { panic!("{found}") };
            assert_eq!((*peer, when.epoch, when.op), (2, 2, Some(SendRecvHeads)));
            stays_broken(&comm, &found, &whole);
        },
    );
}

#[test]
fn the_timeout_can_be_changed_under_a_running_call() {
    let whole = Whole::new(1, &[3, 3], 6, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        if comm.rank() == 0 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    comm.set_timeout(Duration::from_millis(200)).unwrap();
                });
                let start = Instant::now();
                let found = failure(call(&comm, &whole, SendRecvHeads));
                assert!(matches!(found, ExchangeFailure::PeerTimeout { peer: 1, .. }), "{found}");
                assert!((150..1000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
            });
            assert!(comm.set_timeout(Duration::ZERO).is_err());
        } else {
            failure(hears(&comm));
        }
    });
}

#[test]
fn an_abort_ends_running_calls_everywhere() {
    let whole = Whole::new(1, &[3, 3, 3], 6, 8, Dtype::Float16);
    ranks(3, plain, |comm| {
        let rank = comm.rank();
        if rank == 2 {
            std::thread::sleep(Duration::from_millis(50));
            comm.abort("the request was cancelled").unwrap();
            comm.abort("again").unwrap();
            let found = failure(comm.check());
            assert!(found.to_string().contains("cancelled"), "{found}");
        } else {
            let start = Instant::now();
            let found = failure(call(&comm, &whole, SendRecvHeads));
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
            assert!(matches!(found, ExchangeFailure::Aborted { rank: 2, .. }), "{found}");
            stays_broken(&comm, &found, &whole);
        }
    });
}

#[test]
fn a_reset_makes_a_broken_communicator_whole() {
    let whole = Whole::new(1, &[3, 2, 1], 6, 8, Dtype::Float16);
    let called = Barrier::new(3);
    ranks(3, plain, |comm| {
        let rank = comm.rank();
        let held = call(&comm, &whole.seeded(9), SendRecvHeads).unwrap();
        for round in 0..20 {
            let out = output(&comm, &whole, SendRecvHeads).unwrap();
            for seed in 0..round % 4 {
                call(&comm, &whole.seeded(seed), GatherHeads).unwrap();
            }
            // An abort may end calls that others have not left.
            called.wait();
            match round % 3 {
                0 => {
                    let op = if rank == 1 { SendRecvHeads } else { GatherHeads };
                    failure(call(&comm, &whole, op));
                }
                1 if rank == 2 => comm.abort("over").unwrap(),
                1 => {
                    failure(call(&comm, &whole, SendRecvHeads));
                }
                // A healthy one may be reset too.
                _ => {}
            }
            comm.reset().unwrap();
            comm.check().unwrap();
            assert_eq!((comm.epoch(), comm.stats().resets), (0, round + 1));
            call_into(&comm, &whole, &output(&comm, &whole, SendRecvHeads).unwrap()).unwrap();
            if round == 19 {
                // An output of the session before.
                let refused = call_into(&comm, &whole, &out);
                assert!(matches!(refused, Err(Error::InvalidOption { option: "out", .. })), "{refused:?}");
            }
        }
        whole.seeded(9).check(SendRecvHeads, rank, HeadLayout::Bnhd, &held);
    });
}

#[test]
fn a_reset_that_not_all_ranks_make_fails_and_may_be_tried_again() {
    let whole = Whole::new(1, &[3, 2], 6, 8, Dtype::Float16);
    ranks(
        2,
        |builder| builder.setup_timeout(Duration::from_millis(300)),
        |comm| {
            if comm.rank() == 0 {
                comm.abort("over").unwrap();
                let failed = comm.reset();
                assert!(matches!(failed, Err(Error::Setup(_))), "{failed:?}");
                assert!(matches!(comm.check(), Err(Error::Exchange(ExchangeFailure::Aborted { .. }))));
            } else {
                std::thread::sleep(Duration::from_millis(500));
                // The other rank's withdrawal was for this step.
                assert!(comm.reset().is_err());
            }
            comm.reset().unwrap();
            call(&comm, &whole, SendRecvHeads).unwrap();
        },
    );
}

#[test]
fn a_rank_that_closes_is_told_from_one_that_dies() {
    let whole = Whole::new(1, &[3, 2, 2], 6, 8, Dtype::Float16);
    for panics in [false, true] {
        let name = fresh_name();
        let met = Barrier::new(3);
        threads(3, |rank| {
            let comm = builder(rank, 3, &name).connect().unwrap();
            call(&comm, &whole, SendRecvHeads).unwrap();
            met.wait();
            if rank == 1 {
                let gone = std::thread::spawn(move || {
                    let _comm = comm;
                    if panics {
                        panic!("a rank is meant to die here");
                    }
                });
                assert_eq!(gone.join().is_err(), panics);
                return;
            }
            let start = Instant::now();
            let found = failure(call(&comm, &whole, SendRecvHeads));
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
            let pid = std::process::id();
            match &found {
                ExchangeFailure::PeerDied { peer: 1, pid: found, .. } if panics => assert_eq!(*found, pid),
                ExchangeFailure::PeerClosed { peer: 1, pid: found, .. } if !panics => assert_eq!(*found, pid),
                other => panic!("{other}"),
            }
            let refused = comm.reset();
            assert!(matches!(refused, Err(Error::Exchange(_))), "{refused:?}");
            stays_broken(&comm, &found, &whole);
        });
    }
}

#[test]
fn closing_waits_for_the_last_call_of_others() {
    // The first rank to leave must not take from the others what they still need.
    let whole = Whole::new(1, &[30, 30, 30], 6, 64, Dtype::Float32);
    for _ in 0..30 {
        ranks(3, plain, |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(2));
            }
            call(&comm, &whole, AllGatherTokens).unwrap();
            if comm.rank() != 2 {
                comm.close().unwrap();
            }
        });
    }
}

#[test]
fn ranks_that_were_built_differently_do_not_begin() {
    let differ = |change: fn(All2AllBuilder) -> All2AllBuilder, what: &str| {
        let name = fresh_name();
        threads(3, |rank| {
            let builder = builder(rank, 3, &name);
            let error = if rank == 1 { change(builder) } else { builder }.connect().unwrap_err();
            let text = error.to_string();
            assert!(text.contains(what), "rank {rank}: {text}");
            assert!(text.contains("rank 1") || rank == 1, "rank {rank}: {text}");
        });
    };
    differ(|builder| builder.capacity_bytes(1 << 19), "capacity_bytes");
    differ(|builder| builder.buffers(3), "buffers");
    differ(|builder| builder.buffers(0), "buffers");
    differ(|builder| builder.capacity_bytes(0), "capacity_bytes");
    differ(|builder| builder.capacity_bytes(u64::MAX / 2), "capacity_bytes");
    differ(|builder| builder.timeout(Duration::ZERO), "timeout");
    for (rank, world) in [(0, 0), (2, 2), (0, 65)] {
        let refused = All2All::builder(rank, world).connect();
        assert!(matches!(refused, Err(Error::InvalidOption { .. })), "{refused:?}");
    }
    assert!(All2All::builder(0, 2).connect().is_err());
}

#[test]
fn a_failing_copy_target_is_a_refusal() {
    let whole = Whole::new(1, &[3, 2], 6, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        let rank = comm.rank();
        let x = whole.input(SendRecvHeads, rank).array;
        let mut target = |_: &[kvferry::all2all::ResultShape]| {
            if rank == 0 { Err(Error::Closed) } else { Ok(Vec::new()) }
        };
        let options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
        let refused = comm.exchange(SendRecvHeads, &[x], &options, Landing::Copy(&mut target));
        match (rank, &refused) {
            (0, Err(Error::Closed)) | (1, Err(Error::InvalidOption { .. })) => {}
            other => panic!("{other:?}"),
        }
        failure(comm.check());
    });
}

#[test]
fn a_forked_child_is_refused() {
    let whole = Whole::new(1, &[3, 2], 6, 8, Dtype::Float16);
    ranks(2, plain, |comm| {
        if comm.rank() == 0 {
            // SAFETY: the child makes calls that end at their first check, an atomic load, and leaves by `_exit`.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let refused = [
                    comm.check().is_err(),
                    comm.reset().is_err(),
                    comm.abort("x").is_err(),
                    comm.close().is_err(),
                ];
                let code = if refused == [true; 4] { 41 } else { 1 };
                // SAFETY: ends the child at once, without the harness's handlers.
                unsafe { libc::_exit(code) };
            }
            let mut status = 0;
            // SAFETY: our own child, a live integer.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 41, "{status}");
        }
        call(&comm, &whole, SendRecvHeads).unwrap();
    });
}

#[test]
fn an_endless_timeout_is_a_timeout() {
    let whole = Whole::new(1, &[3, 2], 6, 8, Dtype::Float16);
    ranks(
        2,
        |builder| builder.timeout(Duration::MAX),
        |comm| {
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(20));
            }
            call(&comm, &whole, SendRecvHeads).unwrap();
        },
    );
}
