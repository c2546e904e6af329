//! Further seeded faults: every rule of the protocol that the hazards do not name, and every property, has one here.

use crate::faults::{alike, finds, holds};
use crate::protocol::{Copies, Gate, Kind, Latch, Notice, Poisoned, Post, Protocol, Refusal, Stop};
use crate::scenario::{Act, Call, Engine, Rank, Scenario, Timeouts, Watch, Word};

fn pool(calls: u8) -> impl Fn(Rank) -> Rank {
    move |rank| rank.each((0..calls).map(|call| Call::to(call % 2)))
}

#[test]
fn an_epoch_word_stored_before_its_payload() {
    let protocol = Protocol { post: Post::EpochFirst, ..Protocol::default() };
    let scenario = Scenario::new("epoch before payload", alike(&[1, 2], |rank| rank.each([Call::to(1); 2])));
    finds(&scenario.under(protocol), &[Kind::WriteUnposted]);
    let plan = |rank: Rank| rank.call(Call::to(0).word(Word::Refused));
    let mut ranks = alike(&[1, 2], |rank| rank.each([Call::to(0)]));
    ranks[0] = plan(Rank::new(1, 2));
    let scenario = Scenario::new("epoch before payload, a refusal is overlooked", ranks);
    finds(&scenario.under(protocol), &[Kind::DecidedApart]);
}

#[test]
fn one_parity() {
    let protocol = Protocol { parities: 1, ..Protocol::default() };
    for grids in [&[1, 2][..], &[1, 1, 2]] {
        // What is lost matters as soon as two calls announce different things.
        let ranks = alike(grids, |rank| rank.each([Call::to(0).lanes(2), Call::to(1)]));
        let scenario = Scenario::new("one header cell and arrival word per pair", ranks).under(protocol);
        finds(&scenario, &[Kind::HeaderLost]);
        finds(&scenario.ignoring(&[Kind::HeaderLost]), &[Kind::EarlyWake, Kind::Overshoot]);
    }
}

#[test]
fn no_header_where_nothing_is_sent() {
    // Rank 0 has no bytes for rank 1. Without its header nothing holds rank 1 back.
    let ranks = || {
        let mut ranks = alike(&[1, 2], pool(3));
        ranks[0].lanes[1] = 0;
        ranks
    };
    let scenario = Scenario::new("slots, a rank that sends nothing", ranks());
    finds(&scenario.under(Protocol::slots(2)), &[Kind::TooFarAhead, Kind::WrongResult]);
    holds(&Scenario::new("control, headers, a rank that sends nothing", ranks()));
}

#[test]
fn an_epoch_frozen_in_a_graph() {
    // One launch, replayed.
    let baked = |rank: Rank| {
        let replayed = Call { baked: Some(1), ..Call::to(0) };
        rank.each([replayed, replayed])
    };
    let protocol = Protocol { latch: Latch::Baked, ..Protocol::default() };
    let scenario = Scenario::new("epoch passed by value, replayed", alike(&[1, 2], baked)).under(protocol);
    finds(&scenario.clone(), &[Kind::HeaderLost]);
    let only_bytes = [Kind::WriteUnposted, Kind::HeaderLost, Kind::EarlyWake];
    finds(&scenario.ignoring(&only_bytes), &[Kind::WrongResult]);
}

#[test]
fn a_poisoned_rank_that_signals() {
    let protocol = Protocol { poisoned: Poisoned::Signals, ..Protocol::default() };
    let scenario = Scenario::new("a poisoned rank signals", alike(&[1, 2], pool(3))).under(protocol);
    let scenario = scenario.timeouts(Timeouts::Of(0));
    let before = [Kind::HeaderLost, Kind::TooFarAhead];
    finds(&scenario, &before);
    finds(&scenario.clone().ignoring(&before), &[Kind::SignalAfterAbort]);
    let broken = [before[0], before[1], Kind::SignalAfterAbort, Kind::EarlyWake, Kind::Overshoot];
    finds(&scenario.ignoring(&broken), &[Kind::WrongResult]);
}

#[test]
fn a_refusal_that_nobody_hears_of() {
    let mut ranks = alike(&[1, 2], pool(2));
    ranks[1].acts.truncate(3);
    ranks[1].acts.push(Act::Call(Call::to(1).word(Word::Unsaid)));
    finds(&Scenario::new("12: a refusal that is not published", ranks), &[Kind::Deadlock]);
}

#[test]
fn a_fault_that_stops_a_cta_not_yet_started() {
    // CTA 1 reads a peer's refusal before CTA 0 runs; CTA 0 then finds poison and never posts: the others see no
    // mismatch, they see nothing at all. Found by this model in the protocol as first written.
    let at_once = Protocol { stop: Stop::AtOnce, ..Protocol::default() };
    for (grids, word) in [(&[1, 2][..], Word::Mismatched), (&[1, 2, 1], Word::Refused)] {
        let mut ranks = alike(grids, pool(1));
        ranks[0] = Rank::new(1, grids.len()).each([Call::to(0).word(word)]);
        let scenario = Scenario::new("a fault stops CTA 0 before it posts", ranks);
        finds(&scenario.clone().under(at_once), &[Kind::Deadlock]);
        holds(&scenario);
    }
}

#[test]
fn copies_that_run_after_a_failed_header_kernel() {
    // The peer is slow and still reads its `out=` of the call before.
    let copies = |rank: Rank| rank.each([Call::to(0).by(Engine::Copy); 2]);
    let ungated = Protocol { copies: Copies::Ungated, ..Protocol::default() };
    let scenario = || Scenario::new("copies do not know of the timeout", alike(&[1, 1], copies));
    let late = || scenario().under(ungated).timeouts(Timeouts::Of(0));
    finds(&late(), &[Kind::WriteUnposted]);
    finds(&late().ignoring(&[Kind::WriteUnposted, Kind::EarlyWake]), &[Kind::WrongResult]);
    holds(&scenario().timeouts(Timeouts::Of(0)));
    // The same by a mismatch: the peer passes another buffer, and one that it still reads is hit.
    let ranks = || {
        let copy = |place| Call::to(place).by(Engine::Copy);
        let odd = Call { named: Some(0), ..copy(1).word(Word::Mismatched) };
        let first = Rank::new(1, 2).each([copy(0), copy(0)]);
        vec![first, Rank::new(1, 2).call(copy(0)).call(odd).consume(1)]
    };
    let scenario = || Scenario::new("copies do not know of the mismatch", ranks());
    finds(&scenario().under(ungated), &[Kind::ByteInRefusedCall]);
    let late = [Kind::ByteInRefusedCall, Kind::WriteUnposted];
    finds(&scenario().under(ungated).ignoring(&late), &[Kind::WrongResult]);
    holds(&scenario());
}

#[test]
fn a_result_that_lands_in_its_own_input() {
    let ranks = alike(&[1, 2], |rank| rank.call(Call::to(0)).call(Call::to(0).of(1)));
    finds(&Scenario::new("out= is the input", ranks), &[Kind::WrongInput]);
}

/// A rank gives up at any time; all drain, meet, zero their words, meet, and go on.
fn reset(acts: &[Act]) -> Vec<Rank> {
    let plan = |rank: Rank, watch| {
        let rank = rank.watch(watch).each([0, 1].map(Call::to));
        let rank = acts.iter().fold(rank, |rank, &act| rank.then(act));
        rank.each([Call::to(0)])
    };
    vec![plan(Rank::new(1, 2), Watch::AbortsAnyTime), plan(Rank::new(2, 2), Watch::AbortsWhenTold)]
}

#[test]
fn a_reset_that_does_not_drain_or_meet() {
    use Act::{Barrier, Reset, Sync};
    let scenario = |name, acts: &[Act]| Scenario::new(name, reset(acts));
    holds(&scenario("reset", &[Sync, Barrier, Reset, Barrier]));
    let untagged = Protocol { notice: Notice::Untagged, ..Protocol::default() };
    let acts = [Sync, Barrier, Reset, Barrier];
    finds(&scenario("reset, notices name no session", &acts).under(untagged), &[Kind::Deadlock]);
    let any = [
        Kind::Deadlock,
        Kind::HeaderLost,
        Kind::EarlyWake,
        Kind::WriteUnposted,
        Kind::WrongResult,
        Kind::TooFarAhead,
        Kind::Overshoot,
    ];
    finds(&scenario("reset, nobody drains", &[Barrier, Reset, Barrier]), &any);
    finds(&scenario("reset, no meeting before", &[Sync, Reset, Barrier]), &any);
    finds(&scenario("reset, no meeting after", &[Sync, Barrier, Reset]), &any);
}

#[test]
fn refused_calls_whose_arrivals_pile_up() {
    // Hazard 52 again, seen as arrivals that a later wait takes for its own.
    let plan = |rank: Rank, word| {
        let rank = rank.call(Call::to(0).word(word)).drop(1);
        rank.call(Call::to(1)).drop(2).call(Call::to(0))
    };
    let words = [Word::Fine, Word::Fine, Word::Refused];
    let ranks = words.map(|word| plan(Rank::new(2, 3), word)).to_vec();
    let protocol = Protocol { gate: Gate::Target, refusal: Refusal::Continue, ..Protocol::default() };
    let scenario =
        Scenario::new("52: arrivals of a refused call satisfy a later wait", ranks).under(protocol);
    let scenario = scenario.ignoring(&[Kind::ByteInRefusedCall, Kind::WriteUnposted]);
    finds(&scenario, &[Kind::EarlyWake]);
    let scenario = scenario.ignoring(&[Kind::ByteInRefusedCall, Kind::WriteUnposted, Kind::EarlyWake]);
    finds(&scenario, &[Kind::Overshoot]);
}
