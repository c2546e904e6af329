//! Where ranks that are threads of one process meet before they launch.
//!
//! A kernel that spins for a peer must not be on a GPU while the thread of that peer may still be in a driver call that
//! waits for the GPU (a free, an allocation, a copy of pageable memory), or neither would ever end. So all of them are
//! here first, inside their calls. Nothing of the library is freed from the first launch to the last.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_cuda::FreesPaused;

use crate::transfer::lock;

/// How often a waiting thread looks whether the communicator was aborted.
const LOOK: Duration = Duration::from_millis(20);

/// The meeting place of the ranks of one communicator in this process.
pub(super) struct Gate {
    /// The ranks, by bit.
    members: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Times that all were here.
    round: u64,
    /// Who is here, by bit.
    arrived: u64,
    /// Who is not waited for: they have refused a call or left.
    absent: u64,
    /// Launches of this round that are still to come.
    launching: u32,
    pause: Option<FreesPaused>,
}

/// Why a rank did not get through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stuck {
    /// It was told to give up.
    GivenUp,
    /// This rank did not come in time.
    Late(usize),
}

/// This rank may launch; all others are doing so.
pub(super) struct Through<'a> {
    gate: &'a Gate,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({:#x})", self.members)
    }
}

impl Gate {
    /// For these ranks, by bit.
    pub(super) fn new(members: u64) -> Gate {
        Gate { members, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits for the others.
    pub(super) fn pass(
        &self,
        rank: usize,
        timeout: Duration,
        mut give_up: impl FnMut() -> bool,
    ) -> Result<Through<'_>, Stuck> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = lock(&self.state);
        state.arrived |= 1 << rank;
        if self.complete(&mut state) {
            return Ok(Through { gate: self });
        }
        let round = state.round;
        loop {
            let left = deadline.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()).min(LOOK));
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            if state.round != round {
                return Ok(Through { gate: self });
            }
            let late = deadline.is_some_and(|at| Instant::now() >= at);
            // Asked without the lock, as it may wait for Python, whose holder may be closing.
            drop(state);
            let gives_up = give_up();
            state = lock(&self.state);
            if state.round != round {
                return Ok(Through { gate: self });
            }
            if late || gives_up {
                state.arrived &= !(1 << rank);
                let missing = self.members & !state.arrived & !state.absent & !(1 << rank);
                return Err(if late {
                    Stuck::Late(missing.trailing_zeros() as usize)
                } else {
                    Stuck::GivenUp
                });
            }
        }
    }

    /// Opens the gate if everybody is here.
    fn complete(&self, state: &mut State) -> bool {
        if state.arrived | state.absent != self.members || state.arrived == 0 {
            return false;
        }
        state.round += 1;
        state.launching = state.arrived.count_ones();
        state.arrived = 0;
        // On behalf of all who launch now. What is being freed this moment waits only for calls that all have launched.
        state.pause = Some(FreesPaused::begin());
        self.changed.notify_all();
        true
    }

    /// Nobody waits for this rank from now on.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = lock(&self.state);
        state.absent |= self.members & 1 << rank;
        self.complete(&mut state);
    }

    /// This rank counts again. No rank is in a call.
    pub(super) fn come_back(&self, rank: usize) {
        let mut state = lock(&self.state);
        state.absent &= !(1 << rank);
        state.arrived &= !(1 << rank);
    }
}

impl Drop for Through<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.gate.state);
        state.launching = state.launching.saturating_sub(1);
        if state.launching == 0 {
            state.pause = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn nobody_launches_before_all_are_there() {
        let gate = Arc::new(Gate::new(0b1011));
        let came = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = [0, 1, 3]
            .map(|rank| {
                let (gate, came) = (Arc::clone(&gate), Arc::clone(&came));
                std::thread::spawn(move || {
                    for round in 1..=200 {
                        came.fetch_add(1, Ordering::SeqCst);
                        let through =
                            gate.pass(rank, LONG, || false).map_err(|stuck| format!("{stuck:?}")).unwrap();
                        assert!(came.load(Ordering::SeqCst) >= 3 * round);
                        drop(through);
                    }
                })
            })
            .into();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn who_is_late_is_named_and_who_left_is_not_waited_for() {
        let gate = Gate::new(0b111);
        let stuck = |result: Result<Through<'_>, Stuck>| result.err();
        assert_eq!(stuck(gate.pass(1, Duration::from_millis(5), || false)), Some(Stuck::Late(0)));
        let told = AtomicBool::new(false);
        let give_up = || told.swap(true, Ordering::SeqCst);
        assert_eq!(stuck(gate.pass(1, LONG, give_up)), Some(Stuck::GivenUp));
        gate.leave(0);
        assert_eq!(stuck(gate.pass(1, Duration::from_millis(5), || false)), Some(Stuck::Late(2)));
        gate.leave(2);
        assert_eq!(stuck(gate.pass(1, LONG, || false)), None);
        gate.come_back(2);
        assert_eq!(stuck(gate.pass(1, Duration::from_millis(5), || false)), Some(Stuck::Late(2)));
    }
}
