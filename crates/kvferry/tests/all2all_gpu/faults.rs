//! Ranks that disagree, refuse, are late, abort, go or fail in the middle of a call.

use std::time::{Duration, Instant};

use kvferry::all2all::{CallOptions, ExchangeFailure, Landing};
use kvferry::cuda::faults;
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error};

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::calls::plain;
use crate::exchange::{Strides, Whole};
use crate::gpus::{Rank, bytes, gpus, on_gpus};
use crate::processes::{broken, in_processes};

/// Far below the timeout of every communicator here.
const SOON: Duration = Duration::from_secs(5);

fn whole() -> Whole {
    Whole::new(2, &[3, 5], 6, 8, Dtype::Float16)
}

/// Everything raises the same, fills with 0xFF, and works again after a reset of all.
fn broken_until_reset(at: &Rank, failure: &ExchangeFailure) {
    let again = |result: kvferry::Result<()>| match result {
        Err(Error::Exchange(again)) => assert_eq!(&again, failure),
        other => panic!("{other:?}"),
    };
    again(at.call(&whole(), SendRecvHeads).map(drop));
    again(at.comm.check());
    at.comm.reset().unwrap();
    assert_eq!(at.comm.epoch(), 0);
    for seed in 0..3 {
        at.checked(&whole().seeded(seed), SendRecvHeads);
        at.checked(&whole().seeded(seed), GatherHeads);
    }
}

#[test]
fn ranks_that_disagree_move_nothing() {
    if gpus(2).is_none() {
        return;
    }
    type Odd = fn(&Whole) -> Whole;
    let odd: [Odd; 3] = [
        |whole| Whole { dtype: Dtype::BFloat16, ..whole.clone() },
        |whole| Whole { dim: 4, ..whole.clone() },
        |whole| Whole { tokens: vec![2, 5], ..whole.clone() },
    ];
    on_gpus(2, plain, |at| {
        for odd in odd {
            at.checked(&whole(), SendRecvHeads);
            let mine = if at.rank == 1 { odd(&whole()) } else { whole() };
            let result = at.call(&mine, SendRecvHeads).unwrap();
            at.stream.synchronize().unwrap();
            assert!(bytes(&result).iter().all(|&byte| byte == 0xFF));
            let failure = broken(at, SOON);
            let ExchangeFailure::Mismatch { rank: 1, when, .. } = &failure else { panic!("{failure}") };
            assert_eq!((when.epoch, when.op), (2, Some(SendRecvHeads)));
            broken_until_reset(at, &failure);
            at.comm.reset().unwrap();
        }
    });
}

#[test]
fn one_rank_s_refusal_is_raised_by_both() {
    if gpus(2).is_none() {
        return;
    }
    for who in 0..2 {
        on_gpus(2, plain, |at| {
            at.checked(&whole(), SendRecvHeads);
            if at.rank == who {
                let mut input = at.input(&whole(), SendRecvHeads, &Strides::default());
                input.offset = u64::MAX / 2;
                let options = CallOptions {
                    stream: Some(at.stream.handle()),
                    ..whole().options(SendRecvHeads, HeadLayout::Bnhd)
                };
                let refused = at.comm.exchange(SendRecvHeads, &[input], &options, Landing::Pool);
                assert!(matches!(refused, Err(Error::ArrayBounds { .. })), "{refused:?}");
            } else {
                // Two calls may be on their way before this rank hears of it.
                let first = at.call(&whole(), SendRecvHeads).unwrap();
                at.stream.synchronize().unwrap();
                assert!(bytes(&first).iter().all(|&byte| byte == 0xFF));
            }
            let failure = broken(at, SOON);
            assert!(matches!(&failure, ExchangeFailure::Mismatch { rank, .. } if *rank == who), "{failure}");
            broken_until_reset(at, &failure);
        });
    }
}

#[test]
fn a_thread_that_does_not_come_is_named_in_time() {
    if gpus(2).is_none() {
        return;
    }
    let bound = Duration::from_millis(300);
    on_gpus(
        2,
        |builder| builder.timeout(bound),
        |at| {
            at.checked(&whole(), SendRecvHeads);
            let start = Instant::now();
            if at.rank == 0 {
                assert!(at.call(&whole(), SendRecvHeads).is_err());
                assert!(start.elapsed() >= bound && start.elapsed() < 2 * bound, "{:?}", start.elapsed());
            }
            let failure = broken(at, SOON);
            assert!(matches!(failure, ExchangeFailure::PeerTimeout { peer: 1, .. }), "{failure}");
            broken_until_reset(at, &failure);
        },
    );
}

#[test]
fn a_process_that_does_not_come_is_named_in_time() {
    in_processes("faults::a_process_that_does_not_come_is_named_in_time", 2, &[], |process| {
        let at = process.connect();
        at.checked(&whole(), SendRecvHeads);
        let bound = Duration::from_millis(400);
        at.comm.set_timeout(bound).unwrap();
        if process.rank == 0 {
            let start = Instant::now();
            let result = at.call(&whole(), SendRecvHeads).unwrap();
            at.stream.synchronize().unwrap();
            let took = start.elapsed();
            assert!(took >= bound && took < bound + Duration::from_millis(200), "{took:?}");
            assert!(bytes(&result).iter().all(|&byte| byte == 0xFF));
            // Later calls fill at once.
        }
        let failure = broken(&at, SOON);
        assert!(matches!(failure, ExchangeFailure::PeerTimeout { peer: 1, .. }), "{failure}");
        broken_until_reset(&at, &failure);
    });
}

#[test]
fn an_abort_ends_a_kernel_that_waits() {
    in_processes("faults::an_abort_ends_a_kernel_that_waits", 2, &[], |process| {
        let at = process.connect();
        at.checked(&whole(), SendRecvHeads);
        if process.rank == 0 {
            let result = at.call(&whole(), SendRecvHeads).unwrap();
            let again = at.call(&whole(), GatherHeads).unwrap();
            let comm = at.comm.clone();
            let aborter = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                comm.abort("a test's whim").unwrap();
            });
            let start = Instant::now();
            at.stream.synchronize().unwrap();
            assert!(start.elapsed() < SOON);
            aborter.join().unwrap();
            for result in [result, again] {
                assert!(bytes(&result).iter().all(|&byte| byte == 0xFF));
            }
        }
        let failure = broken(&at, SOON);
        assert!(matches!(&failure, ExchangeFailure::Aborted { rank: 0, .. }), "{failure}");
        broken_until_reset(&at, &failure);
    });
}

#[test]
fn an_abort_ends_the_wait_of_a_thread_for_another() {
    if gpus(2).is_none() {
        return;
    }
    on_gpus(2, plain, |at| {
        at.checked(&whole(), SendRecvHeads);
        if at.rank == 0 {
            let start = Instant::now();
            assert!(at.call(&whole(), SendRecvHeads).is_err());
            assert!(start.elapsed() < SOON);
        } else {
            std::thread::sleep(Duration::from_millis(50));
            at.comm.abort("a test's whim").unwrap();
        }
        let failure = broken(at, SOON);
        assert!(matches!(&failure, ExchangeFailure::Aborted { rank: 1, .. }), "{failure}");
        broken_until_reset(at, &failure);
    });
}

#[test]
fn a_rank_that_closes_strands_nobody() {
    in_processes("faults::a_rank_that_closes_strands_nobody", 2, &[], |process| {
        let at = process.connect();
        let last = at.checked(&whole(), SendRecvHeads);
        if process.rank == 1 {
            return at.comm.close().unwrap();
        }
        let start = Instant::now();
        // It may come before the goodbye, or after.
        let called = at.call(&whole(), SendRecvHeads);
        at.stream.synchronize().unwrap();
        let failure = broken(&at, SOON + SOON);
        assert!(start.elapsed() < SOON + SOON, "{:?}", start.elapsed());
        assert!(
            matches!(&failure, ExchangeFailure::PeerClosed { peer: 1, .. }),
            "{failure} after {called:?}"
        );
        at.check(&whole(), SendRecvHeads, HeadLayout::Bnhd, &last);
        assert!(at.comm.close().is_err());
    });
}

#[test]
fn a_call_that_fails_half_way_breaks_both_ranks() {
    in_processes("faults::a_call_that_fails_half_way_breaks_both_ranks", 2, &[], |process| {
        let at = crate::gpus::Rank::new(process.builder("one").capacity_bytes(16 << 20).connect().unwrap());
        // Large enough for two launches.
        let large = Whole::new(1, &[300, 300], 40, 256, Dtype::Float32);
        at.checked(&whole(), SendRecvHeads);
        if process.rank == 1 {
            faults::inject("cuLaunchKernel", 2, 700);
            let failed = at.call(&large, SendRecvHeads).unwrap_err();
            assert!(matches!(&failed, Error::Exchange(ExchangeFailure::Failed { rank: 1, .. })), "{failed}");
            assert_eq!(faults::clear(), 0);
        } else {
            // Unless the other one's failure is heard of first.
            drop(at.call(&large, SendRecvHeads));
        }
        let failure = broken(&at, SOON);
        assert!(matches!(&failure, ExchangeFailure::Failed { rank: 1, .. }), "{failure}");
        at.stream.synchronize().unwrap();
        broken_until_reset(&at, &failure);
        at.checked(&large, SendRecvHeads);
        // What fails before anything is launched is a refusal, which the peers are told of.
        if process.rank == 1 {
            faults::inject("cuStreamIsCapturing", 2, 999);
            assert!(at.call(&whole(), AllGatherTokens).is_err());
            faults::clear();
        } else {
            at.call(&whole(), AllGatherTokens).unwrap();
        }
        let failure = broken(&at, SOON);
        assert!(matches!(&failure, ExchangeFailure::Mismatch { rank: 1, .. }), "{failure}");
        at.stream.synchronize().unwrap();
        broken_until_reset(&at, &failure);
    });
}

#[test]
fn closing_raises_what_the_last_call_found() {
    if gpus(2).is_none() {
        return;
    }
    on_gpus(2, plain, |at| {
        let mine = if at.rank == 1 { Whole { dim: 4, ..whole() } } else { whole() };
        at.call(&mine, SendRecvHeads).unwrap();
        let closed = at.comm.close();
        assert!(matches!(&closed, Err(Error::Exchange(ExchangeFailure::Mismatch { .. }))), "{closed:?}");
        at.comm.close().unwrap();
    });
}

#[test]
fn a_death_ends_a_close_that_waits_for_the_last_call() {
    in_processes("faults::a_death_ends_a_close_that_waits_for_the_last_call", 2, &[], |process| {
        let at = process.connect();
        at.checked(&whole(), SendRecvHeads);
        if process.rank == 1 {
            std::thread::sleep(Duration::from_millis(300));
            std::process::exit(9);
        }
        at.call(&whole(), SendRecvHeads).unwrap();
        let start = Instant::now();
        let closed = at.comm.close();
        assert!(
            matches!(&closed, Err(Error::Exchange(ExchangeFailure::PeerDied { peer: 1, .. }))),
            "{closed:?}"
        );
        assert!(start.elapsed() < SOON);
    });
}
