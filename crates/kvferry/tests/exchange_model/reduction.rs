//! The reduction loses nothing: scenarios with and without it have the same outcome.

use crate::correct::ranks;
use crate::faults::alike;
use crate::habits;
use crate::protocol::{Bump, Fence, Gate, Protocol, Refusal};
use crate::scenario::{Act, Call, Scenario, Timeouts, Word};
use crate::search::explore;

#[track_caller]
fn same(scenario: &Scenario) {
    let short = explore(scenario);
    let whole = explore(&scenario.clone().unreduced());
    let kind = |report: &crate::search::Report| report.violation.as_ref().map(|violation| violation.kind);
    assert_eq!(kind(&short), kind(&whole), "{}", scenario.name);
    assert!(kind(&whole).is_some() || short.ends == whole.ends, "{}", scenario.name);
    assert!(kind(&whole).is_some() || short.states < whole.states, "{}: nothing was reduced", scenario.name);
}

#[test]
fn outcomes_are_the_same_without_it() {
    for habit in habits::ALL {
        let ranks = ranks(&[1, 2], &[habit, habits::ALL[0]]);
        same(&Scenario::new(format!("reduction, {}", habit.0), ranks));
    }
    let pool = || alike(&[1, 2], |rank| rank.each([0, 1].map(Call::to)));
    same(&Scenario::new("reduction, timeouts", pool()).timeouts(Timeouts::Any));
    let mut refused = pool();
    refused[1].acts[3] = Act::Call(Call::to(1).word(Word::Refused));
    same(&Scenario::new("reduction, refusal", refused));

    let default = Protocol::default();
    let faults = [
        ("no gate", Protocol { gate: Gate::Nothing, ..default }),
        ("the waiter advances", Protocol { bump: Bump::Waiter, ..default }),
        ("one parity", Protocol { parities: 1, ..default }),
        ("no fence", Protocol { fence: Fence::Nothing, ..default }),
        ("pairs", Protocol { refusal: Refusal::Continue, gate: Gate::Target, ..default }),
    ];
    for (name, protocol) in faults {
        let ranks = alike(&[1, 2], habits::second_reader);
        same(&Scenario::new(format!("reduction, {name}"), ranks).under(protocol));
    }
}
