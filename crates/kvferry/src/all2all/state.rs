//! Whether a communicator works, and what broke it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_layout::exchange::ExchangeOp;

use super::attend::Attend;
use super::backend::Backend;
use super::error::{ExchangeFailure, Fault, FaultKind, When};
use super::mesh::Mesh;
use super::protocol::Refusal;
#[cfg(test)]
use super::watch::DeathCause;
use super::watch::Event;
use super::wire::Notice;
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
    /// Calls begun since the last reset, so far as peers can know of them.
    begun: AtomicU64,
    /// A call was captured: graphs make calls that nobody counts.
    uncounted: AtomicBool,
    /// Number of resets.
    session: AtomicU32,
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
            begun: AtomicU64::new(0),
            uncounted: AtomicBool::new(false),
            session: AtomicU32::new(0),
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
            Some(fault) => Err(self.fault(fault)),
            None => Ok(()),
        }
    }

    /// Begins a call. Refuses one that somebody will not take part in, unless the call itself finds that out, and with it
    /// whatever the one that left may have said before.
    pub(crate) fn begin(&self, op: ExchangeOp) -> Result<Running<'_>> {
        self.check()?;
        self.running.store(op.code(), Ordering::Relaxed);
        let running = Running { monitor: self };
        let left = self.left.load(Ordering::Acquire);
        if left != 0 && self.backend.get().is_some_and(|backend| !backend.refusals_are_seen()) {
            return Err(self.closed_by(left.trailing_zeros() as usize).into());
        }
        Ok(running)
    }

    /// Counts a call, before anything of it is posted. Refuses it if a peer that has not made it waits for this rank in a
    /// step of all ranks.
    pub(crate) fn count(&self, captured: bool) -> Result<()> {
        if captured {
            self.uncounted.store(true, Ordering::SeqCst);
            return Ok(());
        }
        // Whichever comes last sees both, this or the event of the peer's part: each notes its own first.
        let calls = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        match self.mesh.get().and_then(|mesh| mesh.crossed_by(calls)) {
            Some((peer, step)) if !self.uncounted.load(Ordering::SeqCst) => {
                Err(self.cross(self.session.load(Ordering::Acquire), peer, Some(step)).into())
            }
            _ => Ok(()),
        }
    }

    /// Takes back a call of which nothing was posted.
    pub(crate) fn uncount(&self) {
        self.begun.fetch_sub(1, Ordering::SeqCst);
    }

    /// Calls begun, as steps of all ranks tell it: the highest number where that is not known.
    pub(crate) fn counted(&self) -> u64 {
        if self.uncounted.load(Ordering::SeqCst) { u64::MAX } else { self.begun.load(Ordering::SeqCst) }
    }

    /// A rank is in a step of all ranks where others are in a call, or have been.
    pub(crate) fn crossed_by(&self, peer: usize) -> ExchangeFailure {
        self.cross(self.session.load(Ordering::Acquire), peer, None)
    }

    /// The same, found in a session; those in the step learn that this rank will not come.
    fn cross(&self, session: u32, peer: usize, step: Option<u64>) -> ExchangeFailure {
        let reason = Refusal::Elsewhere.to_string();
        let failure = ExchangeFailure::Mismatch { rank: peer, reason, when: self.when() };
        self.fail_in(session, failure, Some(Some(Refusal::Elsewhere)), step)
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
        self.fail_in(self.session.load(Ordering::Acquire), failure, tell, None)
    }

    /// The same of what was found in a session; nothing breaks if that is over. `step`: one that this rank passes over.
    fn fail_in(
        &self,
        session: u32,
        failure: ExchangeFailure,
        tell: Option<Option<Refusal>>,
        step: Option<u64>,
    ) -> ExchangeFailure {
        {
            let mut first = lock(&self.failure);
            // Sessions change under this lock.
            if self.session.load(Ordering::Acquire) != session {
                return failure;
            }
            if let Some(first) = &*first {
                return first.clone();
            }
            // What peers do because this rank has closed is no failure of its own.
            if self.is_closed() {
                return failure;
            }
            *first = Some(failure.clone());
            // Before anybody here can know it: what a thread that does then sends, a goodbye for one, comes after this.
            if let Some(refusal) = tell
                && let Some(mesh) = self.mesh.get()
            {
                mesh.tell(notice_of(&failure, refusal, self.session.load(Ordering::Acquire) as u8));
            }
            // Before this rank can come to a later one.
            if let (Some(step), Some(mesh)) = (step, self.mesh.get()) {
                mesh.turn_down(step);
            }
            let _ = self.phase.compare_exchange(OPEN, BROKEN, Ordering::AcqRel, Ordering::Acquire);
            self.abort_backend();
        }
        tracing::warn!(rank = self.rank, %failure, "all2all communicator broken");
        failure
    }

    fn abort_backend(&self) {
        if let Some(backend) = self.backend.get() {
            backend.abort(1, self.rank);
        }
    }

    /// What ended a call becomes what broke the communicator.
    pub(crate) fn fault(&self, fault: Fault) -> Error {
        let Fault { kind, peer, epoch, op } = fault;
        // Closed under the call: what it found on its way out is no news.
        if self.is_closed() && self.broken_by().is_none() && !matches!(kind, FaultKind::Interrupted) {
            return Error::ExchangeClosed;
        }
        let when = When { epoch, op };
        let mismatch = |reason| ExchangeFailure::Mismatch { rank: peer, reason, when };
        // Every rank that is in the call has seen the same headers, and the others will when they call.
        let (failure, tell) = match kind {
            FaultKind::Mismatch { reason } => (mismatch(reason), None),
            FaultKind::Refused { code } => (mismatch(refusal_text(code)), None),
            FaultKind::BadPlace { place } => {
                (mismatch(format!("its landing place {place} lies outside its pool")), None)
            }
            FaultKind::HeaderTimeout { waited } | FaultKind::ArrivalTimeout { waited } => {
                (ExchangeFailure::PeerTimeout { peer, waited, when }, Some(None))
            }
            FaultKind::Failed { reason } => {
                (ExchangeFailure::Failed { rank: peer, reason, when }, Some(None))
            }
            FaultKind::Interrupted => return self.interrupted(op.map_or("a call", ExchangeOp::name)),
            FaultKind::Aborted => return self.failure().into(),
            FaultKind::PeerLeft => return self.closed_by(peer).into(),
        };
        self.fail(failure, tell).into()
    }

    /// A wait of this rank was interrupted: what it waited for will not be, so that the others need not wait for it.
    pub(crate) fn interrupted(&self, what: &str) -> Error {
        let failure = ExchangeFailure::Interrupted { rank: self.rank, when: self.when() };
        self.fail(failure, Some(None));
        Error::Interrupted { what: what.to_owned() }
    }

    /// Closes while another thread of this rank is in a call or a step of all ranks, which ends at once, as do those of
    /// the peers. False if it was closed before.
    pub(crate) fn close_now(&self) -> bool {
        let failure = lock(&self.failure);
        if !self.close() {
            return false;
        }
        if let Some(mesh) = self.mesh.get() {
            if failure.is_none() {
                let pid = std::process::id();
                let closed = ExchangeFailure::PeerClosed { peer: self.rank, pid, when: self.when() };
                mesh.tell(notice_of(&closed, None, self.session.load(Ordering::Acquire) as u8));
            }
            mesh.give_up();
        }
        self.abort_backend();
        true
    }

    fn closed_by(&self, peer: usize) -> ExchangeFailure {
        let failure = ExchangeFailure::PeerClosed { peer, pid: self.pid(peer), when: self.when() };
        self.fail(failure, None)
    }

    /// What the watching thread saw.
    pub(crate) fn event(&self, event: Event) {
        match event {
            Event::Abort { from, kind, peer, epoch } => {
                let word = NoticeWord::unpack(kind);
                // What an earlier session was told may be read after the reset that ended it.
                let session = self.session.load(Ordering::Acquire);
                if word.session == session as u8 && peer < self.world {
                    self.fail_in(session, word.failure(from, peer, epoch, self.pid(peer)), None, None);
                }
            }
            Event::Step { peer, sequence } => {
                let Some(mesh) = self.mesh.get() else { return };
                mesh.heard(peer, sequence);
                let session = self.session.load(Ordering::SeqCst);
                // Read before what the mesh holds: a call that comes after the step is begun after it.
                let calls = self.begun.load(Ordering::SeqCst);
                let open = self.phase.load(Ordering::Acquire) == OPEN;
                if let Some((peer, step)) = mesh.crossed_by(calls)
                    && open
                    && !self.uncounted.load(Ordering::SeqCst)
                {
                    self.cross(session, peer, Some(step));
                }
            }
            Event::Bye { peer } => {
                self.mark_gone(&self.left, peer);
                if let Some(backend) = self.backend.get() {
                    backend.peer_left(peer);
                }
            }
            Event::Death { peer, pid, .. } => {
                self.mark_gone(&self.dead, peer);
                if !self.is_closed() {
                    // Told to the others, though each sees it for itself: what this rank does next, closing for one, may
                    // reach them before a process that is still ending does.
                    self.fail(ExchangeFailure::PeerDied { peer, pid, when: self.when() }, Some(None));
                }
            }
        }
    }

    fn mark_gone(&self, who: &AtomicU64, peer: usize) {
        who.fetch_or(1 << peer, Ordering::AcqRel);
        let _guard = lock(&self.gone.0);
        self.gone.1.notify_all();
    }

    /// Waits until every peer has closed or died. False after `patience`; `None` if `attend` gives up.
    pub(crate) fn wait_for_all_gone(&self, patience: Duration, attend: &Attend) -> Option<bool> {
        let all = (u64::MAX >> (64 - self.world)) & !(1 << self.rank);
        let start = Instant::now();
        let mut attending = attend.begin();
        loop {
            let guard = lock(&self.gone.0);
            if (self.left.load(Ordering::Acquire) | self.dead.load(Ordering::Acquire)) & all == all {
                return Some(true);
            }
            let Some(rest) = patience.checked_sub(start.elapsed()).filter(|rest| !rest.is_zero()) else {
                return Some(false);
            };
            let nap = attending.nap(rest);
            drop(self.gone.1.wait_timeout(guard, nap).unwrap_or_else(PoisonError::into_inner));
            if attending.gives_up() {
                return None;
            }
        }
    }

    /// What stands in the way of a reset: a rank that cannot take part, as seen or as told.
    pub(crate) fn missing(&self) -> Option<ExchangeFailure> {
        let gone = |mask: u64| (mask != 0).then(|| mask.trailing_zeros() as usize);
        if let Some(peer) = gone(self.dead.load(Ordering::Acquire)) {
            return Some(ExchangeFailure::PeerDied { peer, pid: self.pid(peer), when: self.when() });
        }
        if let Some(peer) = gone(self.left.load(Ordering::Acquire)) {
            return Some(ExchangeFailure::PeerClosed { peer, pid: self.pid(peer), when: self.when() });
        }
        self.broken_by().filter(|failure| {
            matches!(failure, ExchangeFailure::PeerDied { .. } | ExchangeFailure::PeerClosed { .. })
        })
    }

    /// Makes a broken communicator whole: runs `clear`, which resets the backend, so that no failure can come between.
    pub(crate) fn mend(&self, clear: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut failure = lock(&self.failure);
        clear()?;
        self.session.fetch_add(1, Ordering::AcqRel);
        self.begun.store(0, Ordering::SeqCst);
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

/// Kinds of failure, as notices carry them.
mod kind {
    pub(super) const MISMATCH: u8 = 1;
    pub(super) const TIMEOUT: u8 = 2;
    pub(super) const DIED: u8 = 3;
    pub(super) const CLOSED: u8 = 4;
    pub(super) const ABORTED: u8 = 5;
    pub(super) const FAILED: u8 = 6;
    pub(super) const INTERRUPTED: u8 = 7;
}

/// What fits the code of a notice: four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NoticeWord {
    kind: u8,
    /// Code of the operation, or 0.
    op: u8,
    /// Code of the refusal, or 0.
    refusal: u8,
    /// Number of resets before, wrapping.
    session: u8,
}

impl NoticeWord {
    const fn pack(self) -> u32 {
        u32::from_le_bytes([self.kind, self.op, self.refusal, self.session])
    }

    const fn unpack(word: u32) -> NoticeWord {
        let [kind, op, refusal, session] = word.to_le_bytes();
        NoticeWord { kind, op, refusal, session }
    }

    fn failure(self, from: usize, peer: usize, epoch: u64, pid: u32) -> ExchangeFailure {
        let when = When { epoch, op: ExchangeOp::from_code(self.op.into()) };
        let told = || format!("as rank {from} tells");
        match self.kind {
            kind::MISMATCH => {
                let reason = match Refusal::from_code(self.refusal.into()) {
                    Some(refusal) => refusal.to_string(),
                    None => format!("it differs from other ranks, {}", told()),
                };
                ExchangeFailure::Mismatch { rank: peer, reason, when }
            }
            kind::TIMEOUT => ExchangeFailure::PeerTimeout { peer, waited: Duration::ZERO, when },
            kind::DIED => ExchangeFailure::PeerDied { peer, pid, when },
            kind::CLOSED => ExchangeFailure::PeerClosed { peer, pid, when },
            kind::INTERRUPTED => ExchangeFailure::Interrupted { rank: peer, when },
            kind::ABORTED => ExchangeFailure::Aborted { rank: peer, reason: told(), when },
            _ => ExchangeFailure::Failed { rank: peer, reason: told(), when },
        }
    }
}

fn notice_of(failure: &ExchangeFailure, refusal: Option<Refusal>, session: u8) -> Notice {
    let (kind, peer, when) = match failure {
        ExchangeFailure::Mismatch { rank, when, .. } => (kind::MISMATCH, *rank, when),
        ExchangeFailure::PeerTimeout { peer, when, .. } => (kind::TIMEOUT, *peer, when),
        ExchangeFailure::PeerDied { peer, when, .. } => (kind::DIED, *peer, when),
        ExchangeFailure::PeerClosed { peer, when, .. } => (kind::CLOSED, *peer, when),
        ExchangeFailure::Aborted { rank, when, .. } => (kind::ABORTED, *rank, when),
        ExchangeFailure::Failed { rank, when, .. } => (kind::FAILED, *rank, when),
        ExchangeFailure::Interrupted { rank, when } => (kind::INTERRUPTED, *rank, when),
    };
    // Codes of operations and refusals are small.
    let op = when.op.map_or(0, ExchangeOp::code) as u8;
    let refusal = refusal.map_or(0, Refusal::code) as u8;
    Notice::Abort { kind: NoticeWord { kind, op, refusal, session }.pack(), peer, epoch: when.epoch }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_told_is_the_failure_meant() {
        let when = When { epoch: 9, op: Some(ExchangeOp::GatherHeads) };
        let failures = [
            ExchangeFailure::PeerTimeout { peer: 2, waited: Duration::ZERO, when },
            ExchangeFailure::PeerDied { peer: 2, pid: 77, when },
            ExchangeFailure::PeerClosed { peer: 2, pid: 77, when },
            ExchangeFailure::Aborted { rank: 2, reason: "as rank 1 tells".to_owned(), when },
            ExchangeFailure::Interrupted { rank: 2, when },
            ExchangeFailure::Failed { rank: 2, reason: "as rank 1 tells".to_owned(), when },
            ExchangeFailure::Mismatch { rank: 2, reason: Refusal::Memory.to_string(), when },
        ];
        for failure in failures {
            let Notice::Abort { kind, peer, epoch } = notice_of(&failure, Some(Refusal::Memory), 3) else {
                panic!("a notice of another kind")
            };
            let word = NoticeWord::unpack(kind);
            assert_eq!(word.session, 3);
            assert_eq!(word.failure(1, peer, epoch, 77), failure);
        }
    }

    #[test]
    fn the_first_failure_wins_and_notices_of_an_earlier_session_do_not_count() {
        let monitor = Monitor::new(0, 2);
        let when = When { epoch: 1, op: None };
        let first = ExchangeFailure::Aborted { rank: 0, reason: "mine".to_owned(), when };
        let other = ExchangeFailure::PeerDied { peer: 1, pid: 5, when };
        assert_eq!(monitor.fail(first.clone(), None), first);
        assert_eq!(monitor.fail(other.clone(), None), first);
        assert!(matches!(monitor.check(), Err(Error::Exchange(found)) if found == first));
        monitor.mend(|| Ok(())).unwrap();
        monitor.check().unwrap();
        let Notice::Abort { kind, peer, epoch } = notice_of(&other, None, 0) else { panic!() };
        monitor.event(Event::Abort { from: 1, kind, peer, epoch });
        monitor.check().unwrap();
        let Notice::Abort { kind, peer, epoch } = notice_of(&other, None, 1) else { panic!() };
        monitor.event(Event::Abort { from: 1, kind, peer, epoch });
        assert!(matches!(monitor.check(), Err(Error::Exchange(ExchangeFailure::PeerDied { peer: 1, .. }))));
    }

    #[test]
    fn closing_waits_for_the_others() {
        let monitor = Monitor::new(1, 3);
        let nobody = Attend::default();
        assert_eq!(monitor.wait_for_all_gone(Duration::from_millis(5), &nobody), Some(false));
        monitor.event(Event::Bye { peer: 0 });
        monitor.close();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(10));
                monitor.event(Event::Death { peer: 2, pid: 1, how: DeathCause::HungUp });
            });
            assert_eq!(monitor.wait_for_all_gone(Duration::from_secs(60), &nobody), Some(true));
        });
        assert_eq!(monitor.broken_by(), None);
        assert_eq!(Monitor::new(0, 1).wait_for_all_gone(Duration::ZERO, &nobody), Some(true));
    }
}
