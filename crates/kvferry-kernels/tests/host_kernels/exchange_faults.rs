//! Exchanges that fail: every rank learns of it, nothing arrives, results are filled, later calls fill too.

use kvferry_kernels::{
    ExchangeLaunch, ExchangeParamBuffer, ExchangeProbeParams, ExchangeProbePeer, Kernel, POISON_OLD,
    PROBE_BYTES, ProbeReport, ProbeState, RecordKind, abort_word,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::exchange::plain;
use crate::exchange_case::{Case, Stage, Way};
use crate::ffi::Order;
use crate::world::{Event, Grant, World};

const WAYS: [Way; 3] = [Way::Whole, Way::Split, Way::Copy];

fn orders() -> impl Iterator<Item = Order> {
    [Order::Forward, Order::Reversed].into_iter().chain((0..8).map(Order::Random))
}

/// Every combination of a world of 2 or 3, a way for all ranks, and an order.
fn cases(calls: usize) -> impl Iterator<Item = Case> {
    let worlds = [2, 3].into_iter().flat_map(|world| WAYS.map(|way| (world, way)));
    worlds.flat_map(move |(world, way)| {
        orders().map(move |order| {
            let mut case = plain(world, calls, order);
            for rank in &mut case.ranks {
                rank.way = way;
            }
            case
        })
    })
}

/// The first `good` calls came out right; after them everything is filled and nobody was told of a call after the next.
fn check_failed(case: &Case, stage: &Stage, good: usize, ranks: &[usize]) {
    check_state(case, stage, good, ranks);
    // The copy engine knows nothing of faults: what was enqueued moves, over what is filled and over what a peer that
    // failed still reads.
    if case.ranks.iter().any(|rank| rank.way == Way::Copy) {
        return;
    }
    for &rank in ranks {
        for call in 0..good {
            assert_eq!(case.check_result(stage, call, rank), Ok(()), "{case:?}");
        }
        for call in good..case.calls.len() {
            assert_eq!(case.check_filled(stage, call, rank), Ok(()), "{case:?}");
        }
    }
}

/// As far as a rank can tell whose peers may not have failed with it: they write to where it said until they know.
fn check_state(case: &Case, stage: &Stage, good: usize, ranks: &[usize]) {
    assert!(!stage.other_faults(), "{case:?}: {:?}", stage.world.reports);
    assert!(stage.world.ended.iter().all(|ended| *ended), "{case:?}");
    for &rank in ranks {
        let state = stage.state(rank);
        assert_eq!((state.epoch, state.ticket, state.poison), (good as u64, 0, POISON_OLD), "{case:?}");
        for other in 0..case.world_size() {
            assert!(stage.told(other, rank).iter().all(|epoch| *epoch as usize <= good + 1), "{case:?}");
        }
    }
}

/// What the senders' states say they announced to a rank in calls that ran.
fn announced(case: &Case, stage: &Stage, to: usize) -> u64 {
    (0..case.world_size())
        .filter(|from| *from != to)
        .map(|from| stage.state(from).sent.iter().map(|row| row[to]).sum::<u64>())
        .sum()
}

#[test]
fn one_rank_refuses() {
    for case in cases(3) {
        let world = case.world_size();
        let refuser = world - 1;
        let mut stage = case.stage();
        for rank in 0..world {
            case.enqueue(&mut stage, 0, rank);
        }
        let mut buffer = ExchangeParamBuffer::new();
        let (state, page) = (stage.state_address(refuser), stage.page_address(refuser));
        let peers = stage.peers.clone();
        let mut refusal = ExchangeLaunch::refusal(refuser, &peers, state, page, 7, 41, &mut buffer).unwrap();
        let part = refusal.part(kvferry_kernels::ExchangeFlags::POST);
        stage.world.launch(refuser, refuser as u32, None, &part);
        for rank in 0..refuser {
            case.enqueue(&mut stage, 1, rank);
        }
        for rank in 0..world {
            case.enqueue(&mut stage, 2, rank);
        }
        stage.world.run(world, case.order);

        let others: Vec<_> = (0..refuser).collect();
        check_failed(&case, &stage, 1, &others);
        if case.ranks[refuser].way != Way::Copy {
            assert_eq!(case.check_filled(&stage, 2, refuser), Ok(()));
        }
        assert_eq!((stage.state(refuser).poison, stage.kind(refuser)), (POISON_OLD, None));
        for rank in 0..world {
            // Nobody pushed in the call that one rank refused.
            assert_eq!(stage.arrivals(rank), announced(&case, &stage, rank), "{case:?}");
        }
        for rank in others {
            let record = stage.page(rank).record;
            assert_eq!(stage.kind(rank), Some(RecordKind::Refused), "{case:?}");
            assert_eq!((record.peer, record.epoch, record.op, record.value), (refuser as u64, 2, 7, 41));
        }
    }
}

#[test]
fn one_rank_takes_the_call_for_another() {
    for case in cases(2) {
        let world = case.world_size();
        let mut stage = case.stage();
        stage.hash = |call, rank| if call == 0 && rank == 1 { 5 << 32 } else { 77 + call as u64 };
        for call in 0..2 {
            for rank in 0..world {
                case.enqueue(&mut stage, call, rank);
            }
        }
        stage.world.run(world, case.order);
        let all: Vec<_> = (0..world).collect();
        check_failed(&case, &stage, 0, &all);
        for rank in all {
            let record = stage.page(rank).record;
            assert_eq!(stage.kind(rank), Some(RecordKind::Mismatch), "{case:?}");
            assert_eq!((record.peer == 1, record.epoch), (rank != 1, 1));
            assert_eq!(record.value, if rank == 1 { 77 } else { 5 << 32 });
            assert_eq!(stage.arrivals(rank), 0, "{case:?}");
        }
    }
}

#[test]
fn a_rank_never_comes() {
    for case in cases(2) {
        let world = case.world_size();
        let mut stage = case.stage();
        stage.set_timeout(1_000_000_000);
        for rank in 0..world - 1 {
            case.enqueue(&mut stage, 0, rank);
            case.enqueue(&mut stage, 1, rank);
        }
        stage.world.run(world, case.order);
        let others: Vec<_> = (0..world - 1).collect();
        check_failed(&case, &stage, 0, &others);
        for rank in others {
            let record = stage.page(rank).record;
            assert_eq!(stage.kind(rank), Some(RecordKind::HeaderTimeout), "{case:?}");
            assert_eq!(
                (record.peer, record.epoch, record.seen, record.expected),
                (world as u64 - 1, 1, 0, 1)
            );
            assert_eq!(stage.arrivals(rank), 0);
        }
    }
}

#[test]
fn a_rank_stops_after_its_header() {
    for order in orders() {
        let case = plain(3, 2, order);
        let mut stage = case.stage();
        stage.set_timeout(1_000_000_000);
        for rank in 0..3 {
            case.enqueue(&mut stage, 0, rank);
        }
        for rank in 0..2 {
            case.enqueue(&mut stage, 1, rank);
        }
        // The first half of a split call.
        case.enqueue_as(&mut stage, 1, 2, Way::Open);
        stage.world.run(3, order);
        check_failed(&case, &stage, 1, &[0, 1]);
        for rank in 0..2 {
            let record = stage.page(rank).record;
            assert_eq!(stage.kind(rank), Some(RecordKind::ArrivalTimeout), "{case:?}");
            assert_eq!((record.peer, record.epoch), (2, 2));
            assert!(record.seen < record.expected);
        }
    }
}

#[test]
fn the_host_says_stop() {
    for case in cases(2) {
        let world = case.world_size();
        let mut stage = case.stage();
        let abort = abort_word(9, world as u32 - 1);
        for rank in 0..world - 1 {
            case.enqueue(&mut stage, 0, rank);
            case.enqueue(&mut stage, 1, rank);
            stage.world.events.push(Event {
                at_ns: 300_000,
                address: stage.page_address(rank),
                value: abort,
            });
        }
        stage.world.run(world, case.order);
        let others: Vec<_> = (0..world - 1).collect();
        check_failed(&case, &stage, 0, &others);
        for rank in others {
            assert_eq!(stage.kind(rank), Some(RecordKind::Aborted), "{case:?}");
            assert_eq!(stage.page(rank).record.value, abort);
        }
    }
}

/// Everybody is there, but the host of one rank has given up: the rank fails although nothing would have kept it.
#[test]
fn the_host_has_said_stop_before() {
    for case in cases(2) {
        let world = case.world_size();
        let mut stage = case.stage();
        stage.set_timeout(1_000_000_000);
        let page = stage.ranks[0].page;
        stage.world.blocks[page].set_word(0, abort_word(2, 1));
        for call in 0..2 {
            for rank in 0..world {
                case.enqueue(&mut stage, call, rank);
            }
        }
        stage.world.run(world, case.order);
        check_state(&case, &stage, 0, &[0]);
        assert_eq!(stage.kind(0), Some(RecordKind::Aborted), "{case:?}");
        for rank in 1..world {
            // They may have got what they need, or not; they cannot have got further.
            assert!(stage.state(rank).epoch <= 1, "{case:?}");
            if case.ranks[rank].way != Way::Copy {
                assert_eq!(case.check_filled(&stage, 1, rank), Ok(()), "{case:?}");
            }
        }
    }
}

#[test]
fn a_landing_place_outside_the_pool() {
    for order in orders() {
        let case = plain(2, 2, order);
        let mut stage = case.stage();
        stage.set_timeout(1_000_000_000);
        // Rank 1 believes that the pool of rank 0 ends one byte too early.
        let right = stage.peers[0].pool_bytes;
        stage.peers[0].pool_bytes = right - 1;
        for call in 0..2 {
            case.enqueue(&mut stage, call, 1);
        }
        stage.peers[0].pool_bytes = right;
        for call in 0..2 {
            case.enqueue(&mut stage, call, 0);
        }
        stage.world.run(2, order);
        check_failed(&case, &stage, 0, &[0]);
        check_state(&case, &stage, 0, &[1]);
        let record = stage.page(1).record;
        assert_eq!(stage.kind(1), Some(RecordKind::BadPlace));
        assert_eq!((record.peer, record.seen, record.expected), (0, right, right - 1));
        assert_eq!(record.value, case.place(0));
        assert_eq!(stage.arrivals(0), 0);
        assert_eq!(stage.kind(0), Some(RecordKind::ArrivalTimeout));
    }
}

fn probe(world_size: usize, present: usize, order: Order) -> (World, Vec<Vec<ProbeReport>>) {
    let mut world = World::default();
    let pool = PROBE_BYTES as usize * world_size;
    let control = kvferry_kernels::CONTROL_BYTES;
    let shared: Vec<_> = (0..world_size).map(|_| world.block(control as usize + pool, 0)).collect();
    let reports: Vec<_> = (0..world_size).map(|_| world.block(16 * world_size, 0)).collect();
    let peers: Vec<_> = shared
        .iter()
        .map(|block| {
            let control_at = world.blocks[*block].address();
            ExchangeProbePeer { control: control_at, pool: control_at + control }
        })
        .collect();
    for (rank, report) in reports.iter().enumerate() {
        for block in &shared {
            world.grant(rank, *block, Grant::READ | Grant::WRITE);
        }
        world.grant(rank, *report, Grant::WRITE);
    }
    for (rank, report) in reports.iter().enumerate().take(present) {
        let report = world.blocks[*report].address();
        let params = ExchangeProbeParams::new(rank, &peers, report, 0x5eed, 1_000_000_000);
        let geometry = kvferry_kernels::LaunchGeometry { block: 16, ..ExchangeProbeParams::GEOMETRY };
        world.small(Kernel::ExchangeProbe, rank, params.as_bytes(), geometry);
    }
    world.run(world_size, order);
    let read = reports.iter().map(|block| {
        let chunks = world.blocks[*block].bytes().chunks_exact(16);
        chunks.map(|chunk| ProbeReport::read_from_bytes(chunk).unwrap()).collect()
    });
    let read = read.collect();
    (world, read)
}

#[test]
fn the_probe_finds_peers_and_misses_the_absent() {
    for order in orders() {
        for (world_size, present) in [(2, 2), (4, 4), (3, 2), (1, 1)] {
            let (world, reports) = probe(world_size, present, order);
            assert!(world.reports.iter().all(crate::ffi::Report::is_clean), "{:?}", world.reports);
            for (rank, reports) in reports.iter().enumerate().take(present) {
                for (peer, report) in reports.iter().enumerate() {
                    let wanted = match () {
                        () if peer == rank => ProbeState::Unknown,
                        () if peer >= present => ProbeState::Timeout,
                        () => ProbeState::Good,
                    };
                    assert_eq!(report.outcome(), wanted, "{rank} about {peer}: {order:?}");
                }
            }
        }
    }
}
