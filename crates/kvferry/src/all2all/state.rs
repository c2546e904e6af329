//! Whether a communicator works, and what broke it.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_layout::exchange::ExchangeOp;

use super::backend::Backend;
use super::error::{ExchangeFailure, Fault, FaultKind, When};
use super::mesh::{Event, Mesh, Notice};
use super::protocol::Refusal;
use crate::error::{Error, Result};
use crate::transfer::lock;

const OPEN: u8 = 0;
const BROKEN: u8 = 1;
const CLOSED: u8 = 2;

/// The state that calls, the watching thread and users' threads share.
///
/// The first failure wins: it is written before the phase says broken and before the abort word is set, so whoever finds
/// either finds the failure too.
#[derive(Debug)]
pub(crate) struct Monitor {
    rank: usize,
    world: usize,
    phase: AtomicU8,
    failure: Mutex<Option<ExchangeFailure>>,
    /// Ranks that have closed, and ranks that have died, by bit.
    left: AtomicU64,
    dead: AtomicU64,
    /// Changes of the two above.
    gone: (Mutex<()>, Condvar),
    /// Code of the operation that runs, or 0.
    running: AtomicU32,
    backend: OnceLock<Arc<dyn Backend>>,
    mesh: OnceLock<Arc<Mesh>>,
}

impl Monitor {
    pub(crate) fn new(rank: usize, world: usize) -> Monitor {
        Monitor {
            rank,
            world,
            phase: AtomicU8::new(OPEN),
            failure: Mutex::new(None),
            left: AtomicU64::new(0),
            dead: AtomicU64::new(0),
            gone: Default::default(),
            running: AtomicU32::new(0),
            backend: OnceLock::new(),
            mesh: OnceLock::new(),
        }
    }

    /// From here on failures reach the backend and the peers. What came earlier is passed on now.
    pub(crate) fn arm(&self, backend: Arc<dyn Backend>, mesh: Arc<Mesh>) {
        let failure = lock(&self.failure);
        // Armed once, by the thread that sets the communicator up.
        let _ = self.mesh.set(mesh);
        let _ = self.backend.set(backend);
        if failure.is_some() {
            self.abort_backend();
        }
    }

    /// The failure, if there is one; `Closed` after closing.
    ///
    /// # Errors
    /// As said.
    pub(crate) fn check(&self) -> Result<()> {
        match self.phase.load(Ordering::Acquire) {
            OPEN => {}
            BROKEN => return Err(self.failure().into()),
            _ => return Err(Error::ExchangeClosed),
        }
        match self.backend.get().and_then(|backend| backend.fault()) {
            Some(fault) => Err(self.fault(fault).into()),
            None => Ok(()),
        }
    }

    /// Also refuses to begin a call that somebody will not take part in.
    pub(crate) fn begin(&self, op: ExchangeOp) -> Result<Running<'_>> {
        self.check()?;
        let left = self.left.load(Ordering::Acquire);
        self.running.store(op.code(), Ordering::Relaxed);
        let running = Running { monitor: self };
        if left != 0 {
            return Err(self.closed_by(left.trailing_zeros() as usize).into());
        }
        Ok(running)
    }

    /// The failure of a communicator that is broken.
    fn failure(&self) -> ExchangeFailure {
        let aborted = || ExchangeFailure::Aborted {
            rank: self.rank,
            reason: "the communicator was reset meanwhile".to_owned(),
            when: self.when(),
        };
        lock(&self.failure).clone().unwrap_or_else(aborted)
    }

    /// The failure, if the communicator is broken or was when it closed.
    pub(crate) fn broken_by(&self) -> Option<ExchangeFailure> {
        lock(&self.failure).clone()
    }

    fn when(&self) -> When {
        let op = ExchangeOp::from_code(self.running.load(Ordering::Relaxed));
        let finished = self.backend.get().map_or(0, |backend| backend.epoch());
        When { epoch: finished + u64::from(op.is_some()), op }
    }

    fn pid(&self, peer: usize) -> u32 {
        self.mesh.get().map_or(0, |mesh| mesh.pid(peer))
    }

    /// Breaks the communicator, unless it is broken already, and gives what broke it. `tell`: peers cannot know it yet;
    /// with the refusal it came from, if it came from one.
    pub(crate) fn fail(&self, failure: ExchangeFailure, tell: Option<Option<Refusal>>) -> ExchangeFailure {
        {
            let mut first = lock(&self.failure);
            if let Some(first) = &*first {
                return first.clone();
            }
            *first = Some(failure.clone());
            // A closed communicator stays closed.
            let _ = self.phase.compare_exchange(OPEN, BROKEN, Ordering::AcqRel, Ordering::Acquire);
            self.abort_backend();
        }
        tracing::warn!(rank = self.rank, %failure, "all2all communicator broken");
        if let Some(refusal) = tell
            && let Some(mesh) = self.mesh.get()
        {
            mesh.tell(notice_of(&failure, refusal));
        }
        failure
    }

    fn abort_backend(&self) {
        if let Some(backend) = self.backend.get() {
            backend.abort(1, self.rank);
        }
    }

    /// What ended a call becomes what broke the communicator.
    pub(crate) fn fault(&self, fault: Fault) -> ExchangeFailure {
        let Fault { kind, peer, epoch, op } = fault;
        let when = When { epoch, op };
        let mut refusal = None;
        let failure = match kind {
            FaultKind::HeaderTimeout { waited } | FaultKind::ArrivalTimeout { waited } => {
                ExchangeFailure::PeerTimeout { peer, waited, when }
            }
            FaultKind::Mismatch { reason } => ExchangeFailure::Mismatch { rank: peer, reason, when },
            FaultKind::Refused { code } => {
                refusal = Refusal::from_code(code);
                ExchangeFailure::Mismatch { rank: peer, reason: refusal_text(code), when }
            }
            FaultKind::BadPlace { place } => ExchangeFailure::Mismatch {
                rank: peer,
                reason: format!("its landing place {place} lies outside its pool"),
                when,
            },
            FaultKind::Aborted => return self.failure(),
            FaultKind::PeerLeft => return self.closed_by(peer),
            FaultKind::Failed { reason } => ExchangeFailure::Failed { rank: peer, reason, when },
        };
        self.fail(failure, Some(refusal))
    }

    fn closed_by(&self, peer: usize) -> ExchangeFailure {
        let failure = ExchangeFailure::PeerClosed { peer, pid: self.pid(peer), when: self.when() };
        self.fail(failure, None)
    }

    /// What the watching thread saw.
    pub(crate) fn event(&self, event: Event) {
        match event {
            Event::Abort { from, notice } => {
                let failure = failure_of(from, &notice, |peer| self.pid(peer));
                self.fail(failure, None);
            }
            Event::Bye { from } => {
                self.mark_gone(&self.left, from);
                if let Some(backend) = self.backend.get() {
                    backend.peer_left(from);
                }
            }
            Event::Death { peer } => {
                self.mark_gone(&self.dead, peer);
                if self.phase.load(Ordering::Acquire) != CLOSED {
                    let failure = ExchangeFailure::PeerDied { peer, pid: self.pid(peer), when: self.when() };
                    self.fail(failure, None);
                }
            }
        }
    }

    fn mark_gone(&self, who: &AtomicU64, peer: usize) {
        who.fetch_or(1 << peer, Ordering::AcqRel);
        let _guard = lock(&self.gone.0);
        self.gone.1.notify_all();
    }

    /// Waits until every peer has closed or died. False after `patience`.
    pub(crate) fn wait_for_all_gone(&self, patience: Duration) -> bool {
        let all = (u64::MAX >> (64 - self.world)) & !(1 << self.rank);
        let start = Instant::now();
        let mut guard = lock(&self.gone.0);
        loop {
            if (self.left.load(Ordering::Acquire) | self.dead.load(Ordering::Acquire)) & all == all {
                return true;
            }
            let Some(rest) = patience.checked_sub(start.elapsed()).filter(|rest| !rest.is_zero()) else {
                return false;
            };
            guard = self.gone.1.wait_timeout(guard, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What stands in the way of a reset: a rank that cannot take part.
    pub(crate) fn missing(&self) -> Option<ExchangeFailure> {
        let (dead, left) = (self.dead.load(Ordering::Acquire), self.left.load(Ordering::Acquire));
        let peer = |mask: u64| mask.trailing_zeros() as usize;
        if dead != 0 {
            let peer = peer(dead);
            return Some(ExchangeFailure::PeerDied { peer, pid: self.pid(peer), when: self.when() });
        }
        (left != 0).then(|| {
            let peer = peer(left);
            ExchangeFailure::PeerClosed { peer, pid: self.pid(peer), when: self.when() }
        })
    }

    /// Makes a broken communicator whole: runs `clear`, which resets the backend, so that no failure can come between.
    pub(crate) fn mend(&self, clear: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut failure = lock(&self.failure);
        clear()?;
        if self.dead.load(Ordering::Acquire) != 0 {
            // It died before `clear`, and the failure is still that, or it is found by the caller's next agreement.
            self.abort_backend();
            return Ok(());
        }
        *failure = None;
        let _ = self.phase.compare_exchange(BROKEN, OPEN, Ordering::AcqRel, Ordering::Acquire);
        Ok(())
    }

    /// Closes; false if it was closed before.
    pub(crate) fn close(&self) -> bool {
        self.phase.swap(CLOSED, Ordering::AcqRel) != CLOSED
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.phase.load(Ordering::Acquire) == CLOSED
    }
}

/// Says that a call runs, until it is dropped.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    monitor: &'a Monitor,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.monitor.running.store(0, Ordering::Relaxed);
    }
}

fn refusal_text(code: u64) -> String {
    match Refusal::from_code(code) {
        Some(refusal) => refusal.to_string(),
        None => format!("it refused the call with code {code}"),
    }
}

/// Kinds of failure, as notices carry them: the kind in the lowest byte, the operation in the next, and the code of a
/// refusal above.
mod kind {
    pub(super) const MISMATCH: u32 = 1;
    pub(super) const TIMEOUT: u32 = 2;
    pub(super) const DIED: u32 = 3;
    pub(super) const CLOSED: u32 = 4;
    pub(super) const ABORTED: u32 = 5;
    pub(super) const FAILED: u32 = 6;
}

fn notice_of(failure: &ExchangeFailure, refusal: Option<Refusal>) -> Notice {
    let (code, peer, when) = match failure {
        ExchangeFailure::Mismatch { rank, when, .. } => (kind::MISMATCH, *rank, when),
        ExchangeFailure::PeerTimeout { peer, when, .. } => (kind::TIMEOUT, *peer, when),
        ExchangeFailure::PeerDied { peer, when, .. } => (kind::DIED, *peer, when),
        ExchangeFailure::PeerClosed { peer, when, .. } => (kind::CLOSED, *peer, when),
        ExchangeFailure::Aborted { rank, when, .. } => (kind::ABORTED, *rank, when),
        ExchangeFailure::Failed { rank, when, .. } => (kind::FAILED, *rank, when),
    };
    let op = when.op.map_or(0, ExchangeOp::code);
    // Codes of refusals are small.
    let refusal = refusal.map_or(0, Refusal::code) as u32;
    Notice::Abort { kind: code | op << 8 | refusal << 16, peer, epoch: when.epoch }
}

fn failure_of(from: usize, (word, peer, epoch): (u32, usize, u64), pid: u32) -> ExchangeFailure {
    let when = When { epoch, op: ExchangeOp::from_code(word >> 8 & 0xFF) };
    let told = || format!("as rank {from} tells");
    match word & 0xFF {
        kind::MISMATCH => {
            let reason = match Refusal::from_code((word >> 16).into()) {
                Some(refusal) => refusal.to_string(),
                None => format!("it differs from the others, {}", told()),
            };
            ExchangeFailure::Mismatch { rank: peer, reason, when }
        }
        kind::TIMEOUT => ExchangeFailure::PeerTimeout { peer, waited: Duration::ZERO, when },
        kind::DIED => ExchangeFailure::PeerDied { peer, pid, when },
        kind::CLOSED => ExchangeFailure::PeerClosed { peer, pid, when },
        kind::ABORTED => ExchangeFailure::Aborted { rank: peer, reason: told(), when },
        _ => ExchangeFailure::Failed { rank: peer, reason: told(), when },
    }
}
