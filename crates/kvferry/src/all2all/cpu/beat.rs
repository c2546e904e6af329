//! Who is really silent when a wait ends in vain.
//!
//! A rank that waits says so every now and then, with whom it waits for, in a word of its own memory that its peers read.
//! So a peer that is missed because it waits itself is told from one that is stopped, or does something else.

use std::time::{Duration, Instant};

use kvferry_host::SharedWords;
use kvferry_kernels::BEAT_OFFSET;

use super::Mapped;
use crate::all2all::attend::Attend;

/// Index of the word: the rank waited for plus one in the low byte, and above it a count that grows with every beat.
const WORD: usize = (BEAT_OFFSET / 8) as usize;
/// A beat comes at least this often, as the longest nap of a wait has it.
const EVERY: Duration = Attend::EVERY;
/// How old a view of the others must be to tell whether they beat.
const AGE: Duration = Attend::EVERY.saturating_mul(2);

/// Whose beats a wait hears.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beats<'a> {
    pub(super) rank: usize,
    pub(super) own: &'a SharedWords,
    pub(super) peers: &'a [Option<Mapped>],
}

/// The words of all ranks at some time.
type View = (Instant, Vec<u64>);

/// One wait that beats and hears.
#[derive(Debug)]
pub(super) struct Listening<'a> {
    beats: Beats<'a>,
    last: Option<Instant>,
    old: Option<View>,
    new: Option<View>,
}

impl<'a> Beats<'a> {
    pub(super) fn begin(self) -> Listening<'a> {
        Listening { beats: self, last: None, old: None, new: None }
    }

    fn words(&self) -> Vec<u64> {
        let word = |peer: &Option<Mapped>| peer.as_ref().map_or(0, |peer| peer.words.load(WORD));
        self.peers.iter().map(word).collect()
    }
}

impl Listening<'_> {
    /// Says that this rank, having waited for `waited`, waits for `peer`.
    pub(super) fn beat(&mut self, peer: usize, waited: Duration) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now - last < EVERY / 2) {
            return;
        }
        self.last = Some(now);
        let own = self.beats.own;
        own.store(WORD, ((own.load_relaxed(WORD) >> 8).wrapping_add(1) << 8) | (peer as u64 + 1));
        // Short waits need no view of the others.
        if waited >= EVERY / 2 && self.new.as_ref().is_none_or(|(taken, _)| now - *taken >= AGE) {
            self.old = self.new.replace((now, self.beats.words()));
        }
    }

    /// The rank at the end of the chain of those that wait, which begins with `peer`; `peer` where that leads nowhere.
    pub(super) fn silent(&self, peer: usize) -> usize {
        let aged = |view: &&View| view.0.elapsed() >= EVERY + EVERY / 2;
        let Some((_, before)) = self.new.as_ref().filter(aged).or(self.old.as_ref()) else { return peer };
        let now = self.beats.words();
        let mut at = peer;
        for _ in 0..now.len() {
            let (Some(word), Some(then)) = (now.get(at), before.get(at)) else { return peer };
            let next = (word & 0xFF) as usize;
            if word == then || next == 0 || next - 1 == self.beats.rank {
                return at;
            }
            at = next - 1;
        }
        peer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvferry_host::{Bell, HostBuffer, HostOptions, HostRegion};
    use kvferry_kernels::CONTROL_BYTES;

    use super::*;

    fn mapped() -> Mapped {
        let buffer = HostBuffer::new(64, HostOptions::default()).unwrap();
        Mapped {
            words: SharedWords::local((CONTROL_BYTES / 8) as usize),
            bell: Bell::local(),
            pool: HostRegion::of_buffer(Arc::new(buffer)),
        }
    }

    /// What rank 0 of five finds when these ranks beat for those.
    fn found(waits: &[(usize, usize)], peer: usize) -> usize {
        let own = mapped();
        let peers: Vec<_> = (0..5).map(|rank| (rank > 0).then(mapped)).collect();
        let mut listening = Beats { rank: 0, own: &own.words, peers: &peers }.begin();
        let mut others: Vec<_> = waits
            .iter()
            .map(|&(rank, _)| {
                let own = &peers[rank].as_ref().unwrap().words;
                Beats { rank, own, peers: &[] }.begin()
            })
            .collect();
        let start = Instant::now();
        while start.elapsed() < AGE * 2 {
            listening.beat(peer, start.elapsed());
            for (other, &(_, waits_for)) in others.iter_mut().zip(waits) {
                other.beat(waits_for, start.elapsed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        listening.silent(peer)
    }

    #[test]
    fn the_end_of_the_chain_is_named() {
        let cases: [(&[(usize, usize)], usize); 5] = [
            (&[], 1),
            (&[(1, 3)], 3),
            (&[(1, 3), (3, 4)], 4),
            // It waits for this rank, which is there.
            (&[(1, 0)], 1),
            // Nobody is silent.
            (&[(1, 2), (2, 3), (3, 1)], 1),
        ];
        std::thread::scope(|scope| {
            let runs = cases.map(|(waits, silent)| scope.spawn(move || assert_eq!(found(waits, 1), silent)));
            runs.into_iter().for_each(|run| run.join().unwrap());
        });
    }

    #[test]
    fn who_has_stopped_beating_is_silent_whatever_it_said() {
        let (own, other) = (mapped(), mapped());
        other.words.store(WORD, 7 << 8 | 3);
        let peers = [None, Some(other), None];
        let mut listening = Beats { rank: 0, own: &own.words, peers: &peers }.begin();
        assert_eq!(listening.silent(1), 1, "nothing is known yet");
        listening.beat(1, EVERY);
        std::thread::sleep(AGE);
        listening.beat(1, EVERY + AGE);
        assert_eq!(listening.silent(1), 1);
    }
}
