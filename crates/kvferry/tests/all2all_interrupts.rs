//! Waits that end early: interrupted by whoever looks after them, or because another thread closes or aborts.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod exchange;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use exchange::*;
use kvferry::all2all::{All2All, Attend, ExchangeFailure, SetupError, rendezvous, rendezvous_attended};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error};

use ExchangeOp::SendRecvHeads;

/// Far below every timeout here.
const SOON: Duration = Duration::from_secs(2);

/// A flag that interrupts, and who looks at it.
fn interrupt() -> (Arc<AtomicBool>, Attend) {
    let flag = Arc::new(AtomicBool::new(false));
    let attend = Attend::new({
        let flag = Arc::clone(&flag);
        // As Python does: what was raised is raised once.
        move || flag.swap(false, Ordering::SeqCst)
    });
    (flag, attend)
}

fn after(delay: u64, then: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(delay));
        then();
    });
}

fn whole(world: usize) -> Whole {
    Whole::new(1, &vec![2; world], 6, 8, Dtype::Float16)
}

fn failure<T: std::fmt::Debug>(result: kvferry::Result<T>) -> ExchangeFailure {
    match result {
        Err(Error::Exchange(failure)) => failure,
        other => panic!("expected a failure of the exchange, got {other:?}"),
    }
}

fn output(comm: &All2All) -> kvferry::Result<()> {
    comm.empty_output(&[([1, 2, 2, 8], Dtype::Float16)], HeadLayout::Bnhd).map(|_| ())
}

type Wait = fn(&All2All) -> kvferry::Result<()>;

/// What a rank can wait for others in.
const WAITS: [(&str, Wait); 3] = [
    ("send_recv_heads", |comm| call(comm, &whole(comm.world()), SendRecvHeads).map(|_| ())),
    ("reset", |comm| comm.reset()),
    ("output", output),
];

#[test]
fn an_interrupted_wait_ends_at_once_and_the_others_hear_of_it() {
    for (name, wait) in WAITS {
        ranks_attended(3, |comm, flag| {
            call(&comm, &whole(3), SendRecvHeads).unwrap();
            let rank = comm.rank();
            if rank == 2 {
                // Never comes; and hears without asking anybody.
                let start = Instant::now();
                let found = loop {
                    if let Err(error) = comm.check() {
                        break failure::<()>(Err(error));
                    }
                    assert!(start.elapsed() < SOON);
                    std::thread::sleep(Duration::from_millis(1));
                };
                assert!(matches!(found, ExchangeFailure::Interrupted { rank: 1, .. }), "{found}");
                return;
            }
            let start = Instant::now();
            if rank == 1 {
                let flag = Arc::clone(flag);
                after(150, move || flag.store(true, Ordering::SeqCst));
            }
            let ended = wait(&comm);
            assert!(start.elapsed() < SOON, "{name}: {:?}", start.elapsed());
            match ended {
                Err(Error::Interrupted { what }) if rank == 1 => assert_eq!(what, name),
                // Of a step of all ranks they may hear either way.
                Err(Error::Setup(_)) if rank == 0 && name != "send_recv_heads" => {}
                Err(Error::Exchange(ExchangeFailure::Interrupted { rank: 1, .. })) if rank == 0 => {}
                other => panic!("{name} on rank {rank}: {other:?}"),
            }
            let again = failure(call(&comm, &whole(3), SendRecvHeads));
            assert!(matches!(again, ExchangeFailure::Interrupted { rank: 1, .. }), "{again}");
        });
    }
}

/// As `ranks`, each with a flag that interrupts it.
fn ranks_attended(world: usize, body: impl Fn(All2All, &Arc<AtomicBool>) + Sync) {
    let name = fresh_name();
    threads(world, |rank| {
        let (flag, attend) = interrupt();
        body(builder(rank, world, &name).attend(attend).connect().expect("set-up"), &flag);
    });
}

#[test]
fn after_an_interruption_a_reset_makes_all_whole() {
    ranks_attended(2, |comm, flag| {
        if comm.rank() == 0 {
            let flag = Arc::clone(flag);
            after(20, move || flag.store(true, Ordering::SeqCst));
            let ended = call(&comm, &whole(2), SendRecvHeads);
            assert!(matches!(ended, Err(Error::Interrupted { .. })), "{ended:?}");
        } else {
            std::thread::sleep(Duration::from_millis(400));
        }
        comm.reset().unwrap();
        call(&comm, &whole(2), SendRecvHeads).unwrap();
        comm.close().unwrap();
    });
}

#[test]
fn a_call_that_waits_for_another_thread_of_its_rank_is_interrupted_too() {
    ranks_attended(2, |comm, flag| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
            assert!(comm.check().is_err());
            return;
        }
        std::thread::scope(|scope| {
            // Whichever of the two is asked first ends, and with it the other.
            let both = [(); 2].map(|()| scope.spawn(|| call(&comm, &whole(2), SendRecvHeads)));
            std::thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            flag.store(true, Ordering::SeqCst);
            let ended = both.map(|thread| thread.join().unwrap().unwrap_err());
            assert!(start.elapsed() < SOON);
            let interrupted = ended.iter().filter(|error| matches!(error, Error::Interrupted { .. })).count();
            assert_eq!(interrupted, 1, "{ended:?}");
        });
    });
}

#[test]
fn set_up_is_interrupted_wherever_it_waits() {
    let place = fresh_name();
    let soon = |error: Error, start: Instant| {
        assert!(matches!(error, Error::Interrupted { .. }), "{error:?}");
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    };
    // For a lower rank, for a higher one, and for rank 0's server.
    for rank in 0..2 {
        let (flag, attend) = interrupt();
        after(150, move || flag.store(true, Ordering::SeqCst));
        let start = Instant::now();
        soon(builder(rank, 2, &place).attend(attend).connect().unwrap_err(), start);
    }
    let (flag, attend) = interrupt();
    after(150, move || flag.store(true, Ordering::SeqCst));
    let start = Instant::now();
    let opened = rendezvous_attended("tcp://127.0.0.1:9", 1, 2, PATIENCE, &attend);
    soon(opened.map(|_| ()).unwrap_err().into(), start);
    // A rank that has met the interrupted one learns of it at once.
    let place = fresh_name();
    threads(2, |rank| {
        let (flag, attend) = interrupt();
        if rank == 1 {
            after(300, move || flag.store(true, Ordering::SeqCst));
        }
        let start = Instant::now();
        let error = builder(rank, 3, &place).attend(attend).connect().unwrap_err();
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        match rank {
            1 => soon(error, start),
            _ => assert!(matches!(error, Error::Setup(_)) && error.to_string().contains("rank 1"), "{error}"),
        }
    });
    // Nothing of all that is in the way of the next.
    threads(2, |rank| builder(rank, 2, &place).connect().unwrap().close().unwrap());
}

#[test]
fn closing_does_not_wait_for_peers_when_interrupted() {
    let name = fresh_name();
    let met = std::sync::Barrier::new(2);
    threads(2, |rank| {
        let (flag, attend) = interrupt();
        let comm = builder(rank, 2, &name).attend(attend).connect().unwrap();
        if rank == 0 {
            flag.store(true, Ordering::SeqCst);
            let start = Instant::now();
            let closed = comm.close();
            assert!(matches!(closed, Err(Error::Interrupted { .. })), "{closed:?}");
            assert!(start.elapsed() < Duration::from_secs(1));
            assert!(comm.is_closed());
            comm.close().unwrap();
        }
        met.wait();
    });
}

#[test]
fn closing_ends_what_another_thread_of_the_rank_waits_in() {
    for (name, wait) in WAITS {
        ranks(
            3,
            |builder| builder,
            |comm| {
                call(&comm, &whole(3), SendRecvHeads).unwrap();
                if comm.rank() == 1 {
                    std::thread::scope(|scope| {
                        let waiting = scope.spawn(|| wait(&comm));
                        std::thread::sleep(Duration::from_millis(100));
                        let start = Instant::now();
                        comm.close().unwrap();
                        assert!(start.elapsed() < Duration::from_secs(1), "{name}: {:?}", start.elapsed());
                        let ended = waiting.join().unwrap();
                        assert!(matches!(ended, Err(Error::ExchangeClosed)), "{name}: {ended:?}");
                    });
                    assert!(comm.is_closed());
                    comm.close().unwrap();
                    return;
                }
                // Rank 2 never comes: rank 0 does not wait for it, as rank 1 has told why.
                let start = Instant::now();
                if comm.rank() == 0 {
                    let ended = wait(&comm);
                    match ended {
                        Err(Error::Exchange(ExchangeFailure::PeerClosed { peer: 1, .. })) => {}
                        Err(Error::Setup(_)) if name != "send_recv_heads" => {}
                        other => panic!("{name}: {other:?}"),
                    }
                }
                while comm.check().is_ok() {
                    assert!(start.elapsed() < SOON, "{name}");
                    std::thread::sleep(Duration::from_millis(1));
                }
                assert!(start.elapsed() < SOON, "{name}");
                let found = failure(comm.check());
                assert!(matches!(found, ExchangeFailure::PeerClosed { peer: 1, .. }), "{name}: {found}");
            },
        );
    }
}

#[test]
fn an_abort_ends_a_step_of_all_ranks() {
    ranks(
        2,
        |builder| builder,
        |comm| {
            if comm.rank() == 0 {
                let start = Instant::now();
                let found = failure(output(&comm));
                assert!(matches!(found, ExchangeFailure::Aborted { rank: 1, .. }), "{found}");
                assert!(start.elapsed() < SOON);
            } else {
                std::thread::sleep(Duration::from_millis(50));
                comm.abort("enough").unwrap();
                std::thread::sleep(Duration::from_millis(300));
            }
            // Rank 0 gave up a step that rank 1 was not in: the reset meets in the next one.
            comm.reset().unwrap();
            call(&comm, &whole(2), SendRecvHeads).unwrap();
        },
    );
}

#[test]
fn closing_and_calling_at_once_hangs_nobody() {
    for round in 0..60_u64 {
        let name = fresh_name();
        threads(2, |rank| {
            let meet = rendezvous(&format!("memory://{name}"), rank, 2, PATIENCE).unwrap();
            let comm = All2All::builder(rank, 2).capacity_bytes(1 << 16).rendezvous(meet).connect().unwrap();
            let start = Instant::now();
            std::thread::scope(|scope| {
                if rank == 0 {
                    let comm = &comm;
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_micros(20 * round));
                        let _ = comm.close();
                    });
                }
                while call(&comm, &whole(2), SendRecvHeads).is_ok() {}
            });
            assert!(start.elapsed() < 2 * SOON, "round {round}: {:?}", start.elapsed());
        });
    }
}

/// Steps that are not calls.
const STEPS: [(&str, Wait); 2] = [("reset", |comm| comm.reset()), ("output", output)];

#[test]
fn a_call_against_a_step_of_all_ranks_is_recognised_by_all() {
    for (name, step) in STEPS {
        // Who is in the step, and how much later than the callers it comes, in milliseconds.
        for (who, delay) in [(0, 0), (1, 0), (2, 0), (1, 60), (1, -60)] {
            ranks(
                3,
                |builder| builder,
                |comm| {
                    call(&comm, &whole(3), SendRecvHeads).unwrap();
                    let rank = comm.rank();
                    let late: i64 = if rank == who { delay } else { -delay };
                    std::thread::sleep(Duration::from_millis(late.max(0) as u64));
                    let start = Instant::now();
                    let named = |found: ExchangeFailure| {
                        let ExchangeFailure::Mismatch { rank: named, reason, .. } = &found else {
                            panic!("{found}")
                        };
                        assert_eq!(*named, who, "{name} on {rank}: {found}");
                        assert!(reason.contains("reset()") && reason.contains("empty_output()"), "{found}");
                    };
                    match if rank == who {
                        step(&comm)
                    } else {
                        call(&comm, &whole(3), SendRecvHeads).map(drop)
                    } {
                        Err(Error::Exchange(found)) => named(found),
                        // It may hear of one caller from the other, or see one in its reset.
                        Err(Error::Setup(SetupError::Withdrawn { .. } | SetupError::Diverged { .. }))
                            if rank == who => {}
                        other => panic!("{name} on {rank}: {other:?}"),
                    }
                    assert!(start.elapsed() < SOON, "{name}: {:?}", start.elapsed());
                    named(failure(call(&comm, &whole(3), SendRecvHeads)));
                    // The step that not all were in is in nobody's way.
                    comm.reset().unwrap();
                    call(&comm, &whole(3), SendRecvHeads).unwrap();
                    output(&comm).unwrap();
                    comm.close().unwrap();
                },
            );
        }
    }
}

#[test]
fn ranks_that_are_ahead_in_a_step_are_not_crossed() {
    ranks(
        3,
        |builder| builder,
        |comm| {
            for round in 0..200_u64 {
                // Somebody is late for the call that the others have done when they come to the step.
                if round % 3 == comm.rank() as u64 && round % 5 == 0 {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let result = call(&comm, &whole(3), SendRecvHeads);
                // One tells of its failure and resets at once, while the others may still call, or wait in this call.
                let aborts = round % 40 == 1;
                if aborts && comm.rank() != 1 {
                    if result.is_ok() {
                        while call(&comm, &whole(3), SendRecvHeads).is_ok() {}
                    }
                    comm.reset().unwrap();
                    continue;
                }
                drop(result.unwrap());
                if round % 2 == 0 {
                    output(&comm).unwrap();
                }
                if aborts {
                    comm.abort("over").unwrap();
                }
                if round % 20 == 1 {
                    comm.reset().unwrap();
                }
            }
            comm.close().unwrap();
        },
    );
}

#[test]
fn a_refusal_is_not_taken_for_a_crossing() {
    for round in 0..100 {
        ranks(
            2,
            |builder| builder,
            |comm| {
                if comm.rank() == 0 {
                    comm.refuse(SendRecvHeads, "no", &Default::default()).unwrap();
                } else {
                    if round % 2 == 0 {
                        std::thread::yield_now();
                    }
                    let found = failure(call(&comm, &whole(2), SendRecvHeads));
                    assert!(
                        matches!(&found, ExchangeFailure::Mismatch { rank: 0, reason, .. } if reason.contains("caller")),
                        "{found}"
                    );
                }
                comm.reset().unwrap();
                call(&comm, &whole(2), SendRecvHeads).unwrap();
            },
        );
    }
}

#[test]
fn a_busy_rank_may_still_come_to_the_step() {
    ranks(
        2,
        |builder| builder.buffers(1),
        |comm| {
            let held = call(&comm, &whole(2), SendRecvHeads).unwrap();
            assert!(matches!(call(&comm, &whole(2), SendRecvHeads), Err(Error::Busy { .. })));
            drop(held);
            output(&comm).unwrap();
            call(&comm, &whole(2), SendRecvHeads).unwrap();
        },
    );
}
