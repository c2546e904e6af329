//! Exchanges with one rule broken must be found out. What passes with the real body fails here for some seed.

use crate::exchange::plain;
use crate::exchange_case::{Case, Stage};
use crate::ffi::Order;

/// Seeds for which the runs of a body go wrong.
fn found(case: impl Fn(Order) -> Case, body: Option<&'static str>, seeds: u64) -> usize {
    (0..seeds)
        .filter(|seed| {
            let case = case(Order::Random(*seed));
            let mut stage = case.stage();
            stage.body = body;
            for call in 0..case.calls.len() {
                for rank in 0..case.world_size() {
                    case.enqueue(&mut stage, call, rank);
                }
            }
            case.check_stage(&mut stage).is_err()
        })
        .count()
}

fn two(order: Order) -> Case {
    plain(2, 5, order)
}

fn three(order: Order) -> Case {
    plain(3, 5, order)
}

#[test]
fn the_real_one_is_never_at_fault() {
    assert_eq!(found(two, None, 40), 0);
    assert_eq!(found(three, None, 20), 0);
}

#[test]
fn an_epoch_that_advances_before_all_have_left() {
    assert!(found(two, Some("exchange_first_advances"), 40) > 0);
    assert!(found(three, Some("exchange_first_advances"), 40) > 0);
}

#[test]
fn arrivals_that_are_not_added_up() {
    assert!(found(two, Some("exchange_forgets"), 40) > 0);
}

#[test]
fn a_signal_before_the_barrier() {
    assert!(found(two, Some("exchange_signals_early"), 40) > 0);
}

#[test]
fn a_header_of_an_earlier_call() {
    assert!(found(two, Some("exchange_any_header"), 40) > 0);
}

/// Pushing after the target's header alone is right as long as all agree; when one of three refuses, bytes move all the
/// same. With two ranks it cannot show.
#[test]
fn a_push_before_all_headers_are_read() {
    let moved = |world: usize, body: Option<&'static str>| {
        (0..40)
            .filter(|seed| {
                let case = plain(world, 1, Order::Random(*seed));
                let mut stage: Stage = case.stage();
                stage.body = body;
                // One rank takes the call for another.
                stage.hash = |_, rank| rank as u64 / 2;
                if world == 2 {
                    stage.hash = |_, rank| rank as u64;
                }
                stage.set_timeout(1_000_000_000);
                for rank in 0..world {
                    case.enqueue(&mut stage, 0, rank);
                }
                stage.world.run(world, case.order);
                (0..world).any(|rank| stage.arrivals(rank) > 0)
            })
            .count()
    };
    assert_eq!(moved(3, None), 0);
    assert_eq!(moved(2, Some("exchange_reads_target")), 0);
    assert!(moved(3, Some("exchange_reads_target")) > 0);
}
