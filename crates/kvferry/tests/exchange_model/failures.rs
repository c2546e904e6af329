//! kvferry's protocol when calls fail: refusal, mismatch, timeout, abort, death.

use crate::correct::{ranks, soak};
use crate::faults::{alike, holds};
use crate::habits;
use crate::scenario::{Act, Call, Engine, Rank, Scenario, Timeouts, Watch, Word};

type Plan = (&'static str, fn(Rank, u8) -> Rank);

/// Calls of each engine, all results read.
const PLANS: [Plan; 4] = [
    ("two buffers", |rank, calls| rank.each((0..calls).map(|call| Call::to(call % 2)))),
    ("one buffer", |rank, calls| rank.each((0..calls).map(|_| Call::to(0)))),
    ("header kernel first", |rank, calls| {
        rank.each((0..calls).map(|call| Call::to(call % 2).by(Engine::HeaderKernelFirst)))
    }),
    ("copy engine", |rank, calls| rank.each((0..calls).map(|_| Call::to(0).by(Engine::Copy)))),
];

/// Grids, and how many calls can be explored with them when ranks may fail at any time: kernels of a failed rank wait
/// for nobody, so they multiply the states, and the copy engine has seven agents per rank. It also uses one CTA only.
fn bounds(plan: &Plan) -> Vec<(&'static [u8], u8)> {
    let copies = plan.0 == "copy engine";
    let mut bounds: Vec<(&[u8], u8)> = match copies {
        true => vec![(&[1, 1], 2), (&[1, 1, 1], 1)],
        false => vec![(&[1, 2], 3), (&[2, 2], 3), (&[1, 1, 1], 2), (&[1, 1, 2], 2)],
    };
    if soak() {
        bounds.extend(match copies {
            true => vec![(&[1, 1][..], 3)],
            false => vec![(&[2, 3][..], 4), (&[1, 2], 4), (&[2, 2, 1], 2), (&[1, 1, 1], 3)],
        });
    }
    bounds
}

/// Makes call `number` of a rank differ.
fn spoil(rank: &mut Rank, number: usize, word: Word) {
    let calls =
        rank.acts.iter_mut().filter_map(|act| if let Act::Call(call) = act { Some(call) } else { None });
    calls.skip(number - 1).take(1).for_each(|call| *call = call.word(word));
}

#[test]
fn a_refusal_or_a_mismatch_stops_every_rank_alike() {
    for plan in PLANS {
        for (grids, calls) in [(&[1, 2][..], 3), (&[2, 2], 3), (&[1, 1, 2], 2), (&[1, 2, 2], 2)] {
            for culprit in 0..grids.len() {
                for (number, word) in [(1, Word::Refused), (2, Word::Refused), (2, Word::Mismatched)] {
                    let mut ranks = alike(grids, |rank| plan.1(rank, calls));
                    spoil(&mut ranks[culprit], number, word);
                    holds(&Scenario::new(
                        format!("{word:?} {grids:?} r{culprit}, call {number}, {}", plan.0),
                        ranks,
                    ));
                }
            }
        }
    }
}

#[test]
fn a_timeout_of_one_rank() {
    for plan in PLANS {
        for (grids, calls) in bounds(&plan) {
            for victim in 0..grids.len() {
                let ranks = alike(grids, |rank| plan.1(rank, calls));
                let name = format!("timeout of r{victim} {grids:?} {}", plan.0);
                holds(&Scenario::new(name, ranks).timeouts(Timeouts::Of(victim)));
            }
        }
    }
}

/// A rank that dies takes no more steps, and whoever waits for it times out. Timeouts anywhere at any time cover that,
/// and ranks that are stopped and go on.
#[test]
fn timeouts_anywhere() {
    for plan in PLANS {
        for (grids, calls) in bounds(&plan) {
            let name = format!("timeouts anywhere {grids:?} {}", plan.0);
            holds(&Scenario::new(name, alike(grids, |rank| plan.1(rank, calls))).timeouts(Timeouts::Any));
        }
    }
}

#[test]
fn timeouts_of_two_ranks_with_any_habit() {
    for habit in habits::ALL {
        let name = format!("timeouts anywhere, {} beside read at once", habit.0);
        let ranks = ranks(&[2, 2], &[habit, habits::ALL[0]]);
        holds(&Scenario::new(name, ranks).timeouts(Timeouts::Any));
    }
}

#[test]
fn an_abort_reaches_every_rank() {
    for plan in PLANS {
        for (grids, calls) in bounds(&plan) {
            // A notice may come at any time, which costs another factor.
            if !soak() && (grids == [1, 1, 2] || grids.len() == 3 && plan.0 == "copy engine") {
                continue;
            }
            for first in 0..grids.len() {
                let mut ranks = alike(grids, |rank| plan.1(rank, calls));
                for (number, rank) in ranks.iter_mut().enumerate() {
                    rank.watch = if number == first { Watch::AbortsAnyTime } else { Watch::AbortsWhenTold };
                }
                holds(&Scenario::new(format!("abort by r{first} {grids:?} {}", plan.0), ranks));
            }
        }
    }
}
