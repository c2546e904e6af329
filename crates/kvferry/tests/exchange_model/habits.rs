//! What programs do with results, as scripts for one rank. Any rank may have any habit beside any other's.

use crate::scenario::{Call, Engine, Rank};

/// A habit: its name and the script it adds to a rank.
pub(crate) type Habit = (&'static str, fn(Rank) -> Rank);

/// Reads each result at once and drops it; two buffers in turn.
pub(crate) fn at_once(rank: Rank) -> Rank {
    rank.each([0, 1, 0, 1].map(Call::to))
}

/// `out=`: one buffer for every call; also a graph replayed, whose landing place is baked.
pub(crate) fn one_buffer(rank: Rank) -> Rank {
    rank.each([Call::to(0); 4])
}

/// Replays of a graph with an eager call in between. The host counts no epochs: only the device knows them.
pub(crate) fn replays_and_eager(rank: Rank) -> Rank {
    rank.each([0, 1, 0, 0].map(Call::to))
}

/// q, k and v by three calls, all held until they are read together.
pub(crate) fn held_together(rank: Rank) -> Rank {
    let rank = rank.call(Call::to(0)).call(Call::to(1)).call(Call::to(2)).consume(1).consume(2).consume(3);
    rank.drop(1).drop(2).drop(3).call(Call::to(1)).consume(4)
}

/// The result of each call is the input of the next.
pub(crate) fn chained(rank: Rank) -> Rank {
    let rank = rank.call(Call::to(0)).call(Call::to(1).of(1)).consume(1).drop(1);
    rank.call(Call::to(0).of(2)).drop(2).call(Call::to(1).of(3)).consume(3).consume(4)
}

/// Reads results on a second stream and lets go of them at once.
pub(crate) fn second_reader(rank: Rank) -> Rank {
    let rank = rank.call(Call::to(0)).consume_on(1, 1).drop(1).call(Call::to(0)).consume(2).consume_on(2, 1);
    rank.drop(2).call(Call::to(1)).consume_on(3, 1).drop(3).call(Call::to(0)).consume(4)
}

/// Calls and reads on two streams in turn.
pub(crate) fn two_streams(rank: Rank) -> Rank {
    let rank = rank.call(Call::to(0)).consume(1).drop(1).call(Call::to(0).on(1)).consume_on(2, 1);
    let rank = rank.drop(2).call(Call::to(0)).consume(3).drop(3);
    rank.call(Call::to(1).on(1)).consume_on(4, 1)
}

/// Large messages: a kernel of one CTA waits for the headers, then the push.
pub(crate) fn header_first(rank: Rank) -> Rank {
    rank.each([0, 1, 0, 0].map(|place| Call::to(place).by(Engine::HeaderKernelFirst)))
}

/// The copy engine into one `out=`, with a push into another buffer in between.
pub(crate) fn copy_engine(rank: Rank) -> Rank {
    let copy = Call::to(0).by(Engine::Copy);
    rank.each([copy, copy, Call::to(1), copy])
}

/// The copy engine from a buffer of the pool.
pub(crate) fn copy_chained(rank: Rank) -> Rank {
    let copy = Call::to(1).by(Engine::Copy).of(1);
    let rank = rank.call(Call::to(0)).call(copy).consume(1).drop(1).consume(2);
    rank.call(Call::to(0).by(Engine::Copy).of(2)).drop(2).consume(3).call(Call::to(1)).consume(4)
}

/// Counts of arrivals that change from call to call; in one, this rank sends nothing.
pub(crate) fn changing_lanes(rank: Rank) -> Rank {
    let calls = [(0, 2), (1, 0), (0, 1), (1, 3)];
    rank.each(calls.map(|(place, lanes)| Call::to(place).lanes(lanes)))
}

pub(crate) const ALL: [Habit; 11] = [
    ("read at once", at_once),
    ("one buffer", one_buffer),
    ("replays, one eager call", replays_and_eager),
    ("three held together", held_together),
    ("result as next input", chained),
    ("reader on a second stream", second_reader),
    ("calls on two streams", two_streams),
    ("header kernel first", header_first),
    ("changing lanes", changing_lanes),
    ("copy engine", copy_engine),
    ("copy engine from the pool", copy_chained),
];
