//! kvferry's protocol, explored to the end: no violation for any habit beside any other.

use std::time::Instant;

use crate::faults::holds;
use crate::habits::{self, Habit};
use crate::scenario::{Act, Rank, Scenario};

/// Larger bounds: `make soak`.
pub(crate) fn soak() -> bool {
    std::env::var_os("KVFERRY_SOAK").is_some_and(|value| value == "1")
}

/// Ranks with these grids and habits. Whoever has three CTAs or more sends its next rank two lanes.
pub(crate) fn ranks(grids: &[u8], habits: &[Habit]) -> Vec<Rank> {
    let world = grids.len();
    let rank = |(number, (&grid, habit)): (usize, (&u8, &Habit))| {
        let lanes = if grid > 2 { 2 } else { 1 };
        (habit.1)(Rank::new(grid, world).lanes((number + 1) % world, lanes))
    };
    grids.iter().zip(habits).enumerate().map(rank).collect()
}

/// Copies announce one arrival, so a rank that copies has one lane per target.
fn copies(habit: &Habit) -> bool {
    habit.0.starts_with("copy engine")
}

#[test]
fn two_ranks_every_pair_of_habits() {
    let start = Instant::now();
    let grids: &[[u8; 2]] = if soak() { &[[1, 2], [2, 2], [3, 2], [3, 3]] } else { &[[1, 2], [3, 2]] };
    for &grid in grids {
        for left in habits::ALL {
            for right in habits::ALL {
                let few = |grid: u8, habit: &Habit| if copies(habit) { grid.min(2) } else { grid };
                let grid = [few(grid[0], &left), few(grid[1], &right)];
                let name = format!("W=2 {grid:?} {} | {}", left.0, right.0);
                holds(&Scenario::new(name, ranks(&grid, &[left, right])));
            }
        }
    }
    println!("every pair of habits: {:.1} s", start.elapsed().as_secs_f64());
}

/// Each habit at each place among ranks that read at once and ranks that have one buffer.
#[test]
fn three_ranks() {
    let grids: &[[u8; 3]] = if soak() { &[[1, 2, 2], [2, 2, 2]] } else { &[[1, 1, 2]] };
    for habit in habits::ALL {
        for place in 0..3 {
            for grid in grids {
                let mut habits =
                    [("one buffer", habits::one_buffer as fn(Rank) -> Rank), habits::ALL[0], habits::ALL[1]];
                habits[place] = habit;
                let names = habits.map(|habit| habit.0).join(" | ");
                holds(&Scenario::new(format!("W=3 {grid:?} {names}"), ranks(grid, &habits)));
            }
        }
    }
}

#[test]
fn three_ranks_of_several_ctas() {
    let habits = |first| [first, habits::ALL[4], habits::ALL[0]];
    for first in [habits::ALL[1], habits::ALL[3], habits::ALL[5], habits::ALL[7]] {
        holds(&Scenario::new(format!("W=3 [2, 2, 1] {}", first.0), ranks(&[2, 2, 1], &habits(first))));
    }
    holds(&Scenario::new("W=3 [2, 2, 2]", ranks(&[2, 2, 2], &habits(habits::ALL[0]))));
}

#[test]
fn four_ranks() {
    let habits = [habits::ALL[0], habits::ALL[1], habits::ALL[3], habits::ALL[7]];
    let calls = if soak() { 3 } else { 2 };
    let short = |(number, (habit, grid)): (usize, (&Habit, &u8))| {
        let mut rank = ranks(&[*grid; 4], &[*habit; 4]).swap_remove(number);
        let mut seen = 0;
        let end = rank.acts.iter().position(|act| {
            seen += u8::from(matches!(act, Act::Call(_)));
            seen > calls
        });
        rank.acts.truncate(end.unwrap_or(rank.acts.len()));
        rank
    };
    let ranks = habits.iter().zip(&[1, 1, 1, 1]).enumerate().map(short).collect();
    holds(&Scenario::new(format!("W=4, one CTA each, {calls} calls"), ranks));
}
