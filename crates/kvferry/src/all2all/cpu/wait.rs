//! Waiting for words that other ranks write.

use std::time::{Duration, Instant};

use kvferry_host::{Bell, SharedWords};

use super::super::attend::Attend;
use super::super::error::FaultKind;
use super::beat::Beats;
use super::page;

/// Longest time a wait spins. A peer in lock step comes within it, without a system call on either side; a late one
/// costs no more than this before the thread sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// The same where the ranks outnumber the processors: whoever is waited for may need this one.
const SPIN_CROWDED: Duration = Duration::from_micros(2);
/// Looks at the words between two looks at the clock.
const LOOKS: u32 = 32;

/// How long to spin in a world of this size.
pub(super) fn spin_limit(world: usize) -> Duration {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if world <= processors { SPIN } else { SPIN_CROWDED }
}

/// One wait: for what, and what may end it early.
#[derive(Debug)]
pub(super) struct Wait<'a> {
    pub(super) bell: &'a Bell,
    pub(super) page: &'a SharedWords,
    pub(super) attend: &'a Attend,
    pub(super) spin: Duration,
    pub(super) beats: Beats<'a>,
}

impl Wait<'_> {
    /// Waits until `missing` names no rank. Otherwise the rank missed and why: `late` makes a fault of a time that is up.
    pub(super) fn until(
        &self,
        mut missing: impl FnMut() -> Option<usize>,
        late: impl FnOnce(Duration) -> FaultKind,
    ) -> Result<(), (usize, FaultKind)> {
        if missing().is_none() {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < self.spin {
            for _ in 0..LOOKS {
                if missing().is_none() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if self.page.load_relaxed(page::ABORT) != 0 {
                break;
            }
        }
        let (mut attending, mut listening) = (self.attend.begin(), self.beats.begin());
        loop {
            // Value first, then the words: a ring that comes between ends the sleep at once.
            let seen = self.bell.value();
            let left = self.page.load(page::LEFT);
            let aborted = self.page.load(page::ABORT) != 0;
            let Some(peer) = missing() else { return Ok(()) };
            if aborted {
                return Err((peer, FaultKind::Aborted));
            }
            // Who closes has posted and pushed all it ever will, and said so afterwards: `missing` was asked later still.
            if left >> peer & 1 == 1 {
                return Err((peer, FaultKind::PeerLeft));
            }
            let waited = start.elapsed();
            let limit = Duration::from_nanos(self.page.load(page::TIMEOUT));
            let Some(rest) = limit.checked_sub(waited).filter(|rest| !rest.is_zero()) else {
                return Err((listening.silent(peer), late(waited)));
            };
            listening.beat(peer, waited);
            self.bell.wait(seen, attending.nap(rest));
            if attending.gives_up() {
                return Err((peer, FaultKind::Interrupted));
            }
        }
    }
}
