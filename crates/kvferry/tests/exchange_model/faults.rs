//! Seeded faults: each must be found, and as what it is, before "no violation" of the protocol counts.
//! The controls beside them show that it is this rule that matters. Schedules are printed with `--nocapture`.

use crate::protocol::{Bump, Fence, Gate, Kind, Latch, Post, Protocol, Refusal, Signal};
use crate::scenario::{Call, Rank, Scenario, Word};
use crate::search::explore;

/// A fault must be found, as one of `kinds`, by a schedule that ends in it.
#[track_caller]
pub(crate) fn finds(scenario: &Scenario, kinds: &[Kind]) {
    let report = explore(scenario);
    let Some(violation) = report.violation else { panic!("{}: nothing found", scenario.name) };
    assert!(kinds.contains(&violation.kind), "{}: {violation}, not one of {kinds:?}", scenario.name);
    assert!(!report.schedule.is_empty(), "{}: no schedule", scenario.name);
}

/// Every schedule keeps every property, and some schedule ends.
#[track_caller]
pub(crate) fn holds(scenario: &Scenario) {
    let report = explore(scenario);
    if let Some(violation) = report.violation {
        panic!("{}: {violation}", scenario.name);
    }
    assert!(report.ends > 0, "{}: no schedule ends", scenario.name);
}

/// Ranks with these grids that all do the same.
pub(crate) fn alike(grids: &[u8], plan: impl Fn(Rank) -> Rank) -> Vec<Rank> {
    grids.iter().map(|&grid| plan(Rank::new(grid, grids.len()))).collect()
}

/// Views that alternate between slots; a view is read `later` calls after its own.
fn views(grids: &[u8], calls: u8, later: u8) -> Vec<Rank> {
    alike(grids, |mut rank| {
        for call in 1..=calls {
            rank = rank.call(Call::to(0));
            if call > later {
                rank = rank.consume(call - later);
            }
        }
        rank
    })
}

#[test]
fn hazard_1_a_view_that_lives_until_the_call_after_next() {
    let two_slots = Protocol::slots(2);
    for grids in [&[2, 2][..], &[1, 1, 2]] {
        let scenario = Scenario::new("1: two slots, view read before call e+2", views(grids, 3, 1));
        finds(&scenario.under(two_slots), &[Kind::WrongResult]);
        let scenario = Scenario::new("1: control, view read before call e+1", views(grids, 4, 0));
        holds(&scenario.under(two_slots));
        let scenario = Scenario::new("1: control, three slots, before e+2", views(grids, 4, 1));
        holds(&scenario.under(Protocol::slots(3)));
    }
}

#[test]
fn hazard_3_out_without_waiting_for_the_header() {
    let protocol = Protocol { gate: Gate::Nothing, ..Protocol::default() };
    for grids in [&[1, 2][..], &[1, 1, 1]] {
        let ranks = alike(grids, |rank| rank.each([Call::to(0); 3]));
        let scenario = Scenario::new("3: out= without header wait", ranks).under(protocol);
        finds(&scenario, &[Kind::WriteUnposted]);
        finds(&scenario.ignoring(&[Kind::WriteUnposted, Kind::EarlyWake]), &[Kind::WrongResult]);
    }
}

#[test]
fn hazard_4_an_epoch_read_after_it_was_advanced() {
    let ranks = || alike(&[2, 2], |rank| rank.each((0..3).map(|call| Call::to(call % 2))));
    let waiter = Protocol { bump: Bump::Waiter, ..Protocol::default() };
    let scenario = Scenario::new("4: the waiter advances, late CTA latches the next epoch", ranks());
    finds(&scenario.under(waiter), &[Kind::Deadlock]);
    let scenario = Scenario::new("4: epoch read anew at every use, the waiter advances", ranks());
    let anew = Protocol { latch: Latch::EveryUse, ..waiter };
    finds(&scenario.clone().under(anew), &[Kind::WriteUnposted]);
    finds(&scenario.under(anew).ignoring(&[Kind::WriteUnposted]), &[Kind::Deadlock]);
    let slots = Protocol { bump: Bump::Waiter, ..Protocol::slots(2) };
    let scenario = Scenario::new("4: the same with slots", views(&[2, 2], 3, 0)).under(slots);
    finds(&scenario, &[Kind::WrongResult, Kind::Deadlock, Kind::EarlyWake]);
    let last = Protocol { latch: Latch::EveryUse, ..Protocol::default() };
    let scenario = Scenario::new("4: control, read anew but the last CTA advances", ranks()).under(last);
    holds(&scenario);
}

#[test]
fn hazard_6_a_view_as_input_with_a_signal_per_cta() {
    let ranks = |lanes: u8| {
        let chain =
            |rank: Rank| (1..4).fold(rank.call(Call::to(0)), |rank, call| rank.call(Call::to(0).of(call)));
        let mut ranks = alike(&[2, 2], chain);
        ranks.iter_mut().for_each(|rank| rank.lanes = vec![lanes; 2]);
        ranks
    };
    let scenario = Scenario::new("6: slots, view as input, each CTA signals", ranks(1));
    finds(&scenario.under(Protocol::slots(2)), &[Kind::WrongInput]);
    let whole = Protocol { signal: Signal::AfterWholeGridRead, ..Protocol::slots(2) };
    holds(&Scenario::new("6: control, signals after the whole grid has read", ranks(1)).under(whole));
}

#[test]
fn hazard_52_a_push_after_reading_only_the_targets_header() {
    let ranks = |world: usize| {
        // The last rank refuses call 1; calls 2 and 3 are good.
        let plan = |rank: Rank, word| {
            let rank = rank.call(Call::to(0).word(word)).drop(1);
            rank.call(Call::to(1)).consume(2).drop(2).call(Call::to(0)).consume(3)
        };
        let word = |rank| if rank + 1 == world { Word::Refused } else { Word::Fine };
        (0..world).map(|rank| plan(Rank::new(2, world), word(rank))).collect::<Vec<_>>()
    };
    let all = Protocol { refusal: Refusal::Continue, ..Protocol::default() };
    let pairs = Protocol { gate: Gate::Target, ..all };
    let scenario = Scenario::new("52: W=3, only the target's header is read", ranks(3));
    finds(&scenario.clone().under(pairs), &[Kind::ByteInRefusedCall]);
    let late = [Kind::ByteInRefusedCall, Kind::WriteUnposted, Kind::EarlyWake, Kind::Overshoot];
    finds(&scenario.clone().under(pairs).ignoring(&late), &[Kind::WrongResult]);
    let closing = Protocol { refusal: Refusal::Poison, ..pairs };
    finds(&scenario.clone().under(closing), &[Kind::ByteInRefusedCall]);
    holds(&Scenario::new("52: W=2 does not show it", ranks(2)).under(pairs));
    holds(&Scenario::new("52: control, W=2, all headers", ranks(2)).under(all));
    holds(&Scenario::new("52: control, W=3, all headers", ranks(3)).under(all));
}

#[test]
fn hazard_54_a_buffer_dropped_under_its_reader() {
    let other_reader = || {
        alike(&[1, 2], |rank| rank.call(Call::to(0)).consume_on(1, 1).drop(1).call(Call::to(0)).consume(2))
    };
    let other_caller = || {
        alike(&[1, 2], |rank| {
            rank.call(Call::to(0)).consume(1).drop(1).call(Call::to(0).on(1)).consume_on(2, 1)
        })
    };
    let fence = |fence| Protocol { fence, ..Protocol::default() };
    let scenario = Scenario::new("54a: reader on a second stream, drop without event", other_reader());
    finds(&scenario.under(fence(Fence::Nothing)), &[Kind::WrongResult]);
    let scenario = Scenario::new("54a: event on the home stream only", other_reader());
    finds(&scenario.under(fence(Fence::HomeStream)), &[Kind::WrongResult]);
    let scenario = Scenario::new("54b: next call on a second stream, drop without event", other_caller());
    finds(&scenario.under(fence(Fence::Nothing)), &[Kind::WrongResult]);
    holds(&Scenario::new("54a: control, an event on every stream", other_reader()));
    holds(&Scenario::new("54b: control, an event on every stream", other_caller()));
    let scenario = Scenario::new("54b: control, an event on the home stream", other_caller());
    holds(&scenario.under(fence(Fence::HomeStream)));
}

#[test]
fn hazard_57_a_header_posted_before_its_call() {
    let protocol = Protocol { post: Post::Ahead, ..Protocol::default() };
    let ranks = alike(&[1, 2], |rank| rank.each([Call::to(0); 2]));
    let scenario =
        Scenario::new("57: the reader sits between the header and its call", ranks).under(protocol);
    finds(&scenario, &[Kind::WrongResult]);
    let other = Call { named: Some(1), ..Call::to(2) };
    let ranks = alike(&[1, 2], |rank| rank.each([Call::to(0), other]));
    let scenario = Scenario::new("57: the call takes another buffer than its header says", ranks);
    finds(&scenario.clone().under(protocol), &[Kind::EarlyWake]);
    finds(&scenario.under(protocol).ignoring(&[Kind::EarlyWake]), &[Kind::WrongResult]);
}
