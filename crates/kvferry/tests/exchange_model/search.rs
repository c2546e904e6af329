//! Breadth-first search over all states, each kept whole; a violation comes with the shortest schedule.

use std::time::Instant;

use crate::compile::compile;
use crate::model::{Model, Step};
use crate::protocol::{Kind, Violation};
use crate::scenario::Scenario;

/// Far above what any bound here needs; a scenario that gets there has outgrown its test.
const MOST_STATES: usize = 60_000_000;

/// What a search found.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) states: usize,
    pub(crate) steps: usize,
    /// States in which everybody is done.
    pub(crate) ends: usize,
    pub(crate) violation: Option<Violation>,
    pub(crate) schedule: Vec<String>,
}

/// States by number, in one arena, found again through an open-addressed table of numbers.
struct States {
    size: usize,
    bytes: Vec<u8>,
    table: Vec<u32>,
    count: usize,
}

const EMPTY: u32 = u32::MAX;

impl States {
    fn new(size: usize) -> States {
        States { size, bytes: Vec::new(), table: vec![EMPTY; 1 << 16], count: 0 }
    }

    fn get(&self, number: usize) -> &[u8] {
        &self.bytes[number * self.size..][..self.size]
    }

    fn hash(state: &[u8]) -> usize {
        let mut hash = 0u64;
        let mut mix = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let words = state.chunks_exact(8);
        let rest = words.remainder();
        words.for_each(|word| mix(u64::from_le_bytes(word.try_into().unwrap())));
        rest.iter().for_each(|&byte| mix(u64::from(byte)));
        usize::try_from(hash >> 24).unwrap()
    }

    /// Adds a state; false if it is known.
    fn add(&mut self, state: &[u8]) -> bool {
        if self.count * 3 > self.table.len() * 2 {
            self.grow();
        }
        let mask = self.table.len() - 1;
        let mut at = Self::hash(state) & mask;
        while self.table[at] != EMPTY {
            if self.get(self.table[at] as usize) == state {
                return false;
            }
            at = (at + 1) & mask;
        }
        self.table[at] = u32::try_from(self.count).unwrap();
        self.bytes.extend_from_slice(state);
        self.count += 1;
        true
    }

    fn grow(&mut self) {
        let mask = self.table.len() * 2 - 1;
        let mut table = vec![EMPTY; mask + 1];
        for number in 0..self.count {
            let mut at = Self::hash(self.get(number)) & mask;
            while table[at] != EMPTY {
                at = (at + 1) & mask;
            }
            table[at] = u32::try_from(number).unwrap();
        }
        self.table = table;
    }
}

/// Explores a scenario to the end, or to its first violation, and prints one line about it.
pub(crate) fn explore(scenario: &Scenario) -> Report {
    let model = compile(scenario);
    let start = Instant::now();
    let report = search(&model, &scenario.name);
    let outcome = report.violation.as_ref().map_or("no violation".to_owned(), ToString::to_string);
    let Report { states, steps, ends, .. } = report;
    println!(
        "{:60} {states:9} states {steps:10} steps {ends:5} ends {:6.2} s: {outcome}",
        scenario.name,
        start.elapsed().as_secs_f64()
    );
    for line in &report.schedule {
        println!("    {line}");
    }
    report
}

fn search(model: &Model, name: &str) -> Report {
    let at_once = model.at_once();
    let mut states = States::new(model.shape.size);
    let mut parents: Vec<(u32, Step)> = Vec::new();
    let mut state = vec![0u8; model.shape.size];
    states.add(&state);
    parents.push((EMPTY, Step { agent: 0, choice: 0 }));
    let (mut steps, mut ends, mut number) = (0, 0, 0);
    let mut open: Vec<Step> = Vec::new();
    let mut scratch = state.clone();
    while number < states.count {
        assert!(number < MOST_STATES, "{name}: more states than its bounds promise");
        state.copy_from_slice(states.get(number));
        open.clear();
        for agent in 0..model.agents.len() {
            model.steps(&state, agent, false, &mut open);
        }
        let mut violation = None;
        // A native thread that may act may also rest for ever: the others must get on without it.
        let stuck = |open: &[Step], state: &[u8]| open.iter().all(|step| model.may_rest(state, *step));
        if stuck(&open, &state) {
            if model.is_final(&state) {
                ends += 1;
            } else {
                // Time passes only now: patience is long against everything that can still happen.
                open.clear();
                for agent in 0..model.agents.len() {
                    model.steps(&state, agent, true, &mut open);
                }
                if stuck(&open, &state) {
                    violation = model.demand(false, Kind::Deadlock, || model.stuck(&state)).err();
                }
            }
        }
        if let Some(step) = model.alone(&state, &open, &at_once) {
            open.clear();
            open.push(step);
        }
        let mut last = None;
        for &step in &open {
            if violation.is_some() {
                break;
            }
            steps += 1;
            scratch.copy_from_slice(&state);
            violation = model.apply(&mut scratch, step).err();
            last = Some(step);
            if violation.is_none() && states.add(&scratch) {
                parents.push((u32::try_from(number).unwrap(), step));
            }
        }
        if violation.is_some() {
            let schedule = schedule(model, &parents, number, last);
            return Report { states: states.count, steps, ends, violation, schedule };
        }
        number += 1;
    }
    Report { states: states.count, steps, ends, violation: None, schedule: Vec::new() }
}

/// The steps that lead to a state, and the one that breaks the property there, in words.
fn schedule(model: &Model, parents: &[(u32, Step)], number: usize, last: Option<Step>) -> Vec<String> {
    let mut steps: Vec<Step> = last.into_iter().collect();
    let mut at = number;
    while parents[at].0 != EMPTY {
        steps.push(parents[at].1);
        at = parents[at].0 as usize;
    }
    let mut state = vec![0u8; model.shape.size];
    let mut lines = Vec::new();
    for step in steps.into_iter().rev() {
        if let Some(line) = model.say(&state, step) {
            lines.push(line);
        }
        // The last step breaks a property; what it leaves is not looked at.
        let _ = model.apply(&mut state, step);
    }
    lines
}
