//! The connections of a communicator: a socket for every pair of ranks, and the collective steps over them.

mod read;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_host::{ForkGuard, PeerSocket, ProcessWatch};

use super::attend::Attend;
use super::join;
use super::rendezvous::Rendezvous;
use super::setup::SetupError;
use super::watch::Event;
use super::wire::{self, MAX_GATHER, MAX_LABEL, Message, Notice, check_text, left};

/// Messages of one peer that wait for their step. An honest peer is one step ahead; one that gives up and tries again
/// while this rank does nothing adds one each time.
const MAX_WAITING: usize = 256;
/// Messages read from one peer before the others get their turn.
const READS_PER_TURN: usize = 64;
/// Events kept for a watch that has not started.
const MAX_PENDING: usize = 1024;
/// What a rank that is in a call withdraws from a step with.
pub(super) const CALL: &str = "a call";
/// How soon a full socket is tried again.
const RETRY: Duration = Duration::from_millis(2);

/// A rank's part of a collective step.
#[derive(Debug)]
pub struct Part {
    /// What it gave.
    pub bytes: Vec<u8>,
    /// The descriptor it gave, a copy of its own. Never there for this rank's part.
    pub fd: Option<OwnedFd>,
}

/// Another rank, as connected.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) socket: PeerSocket,
    /// Absent for a rank of this process, and where the kernel has no pidfds: then the socket alone tells.
    pub(crate) watch: Option<ProcessWatch>,
    pub(crate) pid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Here,
    Left,
    Dead,
}

/// What a peer sent for a collective step.
#[derive(Debug)]
enum Word {
    /// `calls`: begun before, where that was said. `heard`: the watch has told of it, and of all that came before it.
    Part {
        label: String,
        part: Part,
        calls: Option<u64>,
        heard: bool,
    },
    Withdrawn {
        step: String,
        origin: usize,
        culprit: Option<usize>,
        reason: String,
    },
}

#[derive(Debug)]
struct PeerState {
    life: Life,
    waiting: VecDeque<(u64, Word)>,
}

#[derive(Debug)]
struct State {
    peers: Vec<PeerState>,
    /// Events that a gather came across before anybody watched.
    pending: Vec<Event>,
}

/// The connected ranks of a communicator. Shared by every thread of this rank; collective steps are taken one after
/// another, in the same order on all ranks.
#[derive(Debug)]
pub struct Mesh {
    rank: usize,
    name: String,
    timeout: Duration,
    nonce: u64,
    /// By rank; `None` is this one.
    peers: Vec<Option<Peer>>,
    state: Mutex<State>,
    /// Told whenever `state` changes, and when a watch ends.
    news: Condvar,
    /// Held during a collective step.
    turn: Mutex<()>,
    /// Number of the next one.
    next: AtomicU64,
    /// One past the highest step that a peer has sent a counted part for.
    counted: AtomicU64,
    /// Held by whoever reads the sockets: the watch, or without one the thread in a collective step.
    reading: Mutex<()>,
    pub(super) watched: AtomicBool,
    /// This rank has closed under a step.
    over: AtomicBool,
    attend: Attend,
    fork: ForkGuard,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mesh {
    /// Connects this rank to all others, which call this too with the same `world` and `name`. Returns when every rank
    /// is connected to every other one, or raises on all of them.
    ///
    /// `name` separates communicators that meet at one rendezvous; one name may be used again when the ranks have
    /// joined or given up.
    ///
    /// # Errors
    /// A rank or world out of range, ranks that do not come, contradict or fail, a refusing system. Every error about a
    /// rank names it.
    pub fn join(
        rank: usize,
        world: usize,
        store: &dyn Rendezvous,
        name: &str,
        timeout: Duration,
    ) -> Result<Arc<Mesh>, SetupError> {
        Mesh::join_attended(rank, world, store, name, timeout, &Attend::default())
    }

    /// As [`join`](Self::join), with somebody who looks after this and every later wait of the mesh.
    ///
    /// # Errors
    /// As [`join`](Self::join), and [`SetupError::Interrupted`].
    pub fn join_attended(
        rank: usize,
        world: usize,
        store: &dyn Rendezvous,
        name: &str,
        timeout: Duration,
        attend: &Attend,
    ) -> Result<Arc<Mesh>, SetupError> {
        let start = Instant::now();
        let peers = join::connect(rank, world, store, name, timeout, attend)?;
        let mut mesh = Mesh::new(rank, name, timeout, peers, attend.clone());
        let own = kvferry_host::random_bytes::<8>().map_err(SetupError::io("random bytes"))?;
        // To get here is to agree; a rank that failed withdraws from this step.
        let parts = mesh.gather("join", &own, left(start, timeout))?;
        let first = parts.first().and_then(|bytes| bytes.as_slice().try_into().ok());
        mesh.nonce = u64::from_le_bytes(first.ok_or_else(|| SetupError::Disagree {
            rank: 0,
            reason: "its part of the set-up is malformed".to_owned(),
        })?);
        Ok(Arc::new(mesh))
    }

    fn new(rank: usize, name: &str, timeout: Duration, peers: Vec<Option<Peer>>, attend: Attend) -> Mesh {
        let state = peers
            .iter()
            .map(|_| PeerState { life: Life::Here, waiting: VecDeque::new() })
            .collect::<Vec<_>>();
        Mesh {
            rank,
            name: name.to_owned(),
            timeout,
            nonce: 0,
            peers,
            state: Mutex::new(State { peers: state, pending: Vec::new() }),
            news: Condvar::new(),
            turn: Mutex::default(),
            next: AtomicU64::new(0),
            counted: AtomicU64::new(0),
            reading: Mutex::new(()),
            watched: AtomicBool::new(false),
            over: AtomicBool::new(false),
            attend,
            fork: ForkGuard::new(),
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.peers.len()
    }

    /// Name of the communicator.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A random number that all ranks of this mesh share and no other mesh has.
    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Who looks after the waits of this rank.
    pub(super) fn attend(&self) -> &Attend {
        &self.attend
    }

    /// Ends the collective step that another thread of this rank is in, and every later one.
    pub(super) fn give_up(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Process id of a rank, as this process sees it; 0 if it cannot.
    pub fn pid(&self, rank: usize) -> u32 {
        if rank == self.rank {
            return std::process::id();
        }
        self.peers.get(rank).and_then(Option::as_ref).map_or(0, |peer| peer.pid)
    }

    /// Whether a rank lives in this process.
    pub fn same_process(&self, rank: usize) -> bool {
        self.pid(rank) == std::process::id()
    }

    /// Whether a rank has neither said goodbye nor died, as far as this rank has heard. True for itself; false in a
    /// forked child.
    pub fn is_here(&self, rank: usize) -> bool {
        // A lock may be held for ever in a child.
        self.fork.check().is_ok()
            && lock(&self.state).peers.get(rank).is_some_and(|peer| peer.life == Life::Here)
    }

    /// Every rank gets every rank's bytes, in rank order. All ranks must call it with the same `what`, which is at most
    /// [`MAX_LABEL`] bytes long; their bytes may differ in length, up to [`MAX_GATHER`].
    ///
    /// A rank that fails withdraws, so that the others fail too instead of waiting, and all are then at the same step
    /// again. Death of a rank ends the wait at once, even if its bytes have come.
    ///
    /// # Errors
    /// [`GatherTimeout`](SetupError::GatherTimeout) naming those who did not call, [`PeerDied`](SetupError::PeerDied),
    /// [`PeerLeft`](SetupError::PeerLeft), [`Withdrawn`](SetupError::Withdrawn), [`Diverged`](SetupError::Diverged),
    /// [`TooLarge`](SetupError::TooLarge).
    pub fn gather(&self, what: &str, mine: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, SetupError> {
        Ok(self.swap(what, mine, None, timeout)?.into_iter().map(|part| part.bytes).collect())
    }

    /// As [`gather`](Self::gather), of a step between calls: the last eight bytes of `mine` say how many of them this rank
    /// has begun. For as long as `goes_on` says so; it is asked ten times a second.
    ///
    /// # Errors
    /// As [`gather`](Self::gather), and [`Abandoned`](SetupError::Abandoned).
    pub(super) fn gather_while(
        &self,
        what: &str,
        mine: &[u8],
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, SetupError> {
        let parts = self.swap_while(what, mine, None, timeout, Some(goes_on))?;
        Ok(parts.into_iter().map(|part| part.bytes).collect())
    }

    /// As [`gather`](Self::gather), with a descriptor: every other rank gets a copy of it.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn swap(
        &self,
        what: &str,
        mine: &[u8],
        fd: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<Vec<Part>, SetupError> {
        self.swap_while(what, mine, fd, timeout, None)
    }

    fn swap_while(
        &self,
        what: &str,
        mine: &[u8],
        fd: Option<BorrowedFd<'_>>,
        timeout: Duration,
        counted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Part>, SetupError> {
        self.fork.check()?;
        check_text("the name of a collective step", what, MAX_LABEL)?;
        let _turn = lock(&self.turn);
        let sequence = self.next.fetch_add(1, Ordering::SeqCst);
        let result = if mine.len() > MAX_GATHER {
            Err(SetupError::TooLarge { what: what.to_owned(), value: mine.len(), limit: MAX_GATHER })
        } else {
            self.step(sequence, what, mine, fd, timeout, counted)
        };
        if let Err(error) = &result {
            self.send_to_all(&withdrawal(self.rank, sequence, what, error));
        }
        result
    }

    /// Every other rank gets a copy of `mine`, and this rank one of each of theirs, by rank; `None` at its own.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn exchange_fds(
        &self,
        mine: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Vec<Option<OwnedFd>>, SetupError> {
        let parts = self.swap("descriptors", &[], Some(mine), timeout)?;
        if let Some(rank) = (0..self.world()).find(|&rank| rank != self.rank && parts[rank].fd.is_none()) {
            return Err(SetupError::Disagree { rank, reason: "it sent no descriptor".to_owned() });
        }
        Ok(parts.into_iter().map(|part| part.fd).collect())
    }

    /// A rank, and the step it is in, which this rank has not begun though it has begun more calls than the other: that
    /// rank waits for this one in the step, and this one for it in a call.
    pub(super) fn crossed_by(&self, calls: u64) -> Option<(usize, u64)> {
        let next = self.next.load(Ordering::SeqCst);
        if self.counted.load(Ordering::SeqCst) <= next {
            return None;
        }
        let state = lock(&self.state);
        state.peers.iter().enumerate().find_map(|(rank, peer)| {
            let crossed = |(sequence, word): &&(u64, Word)| {
                let behind = |word: &Word| matches!(word, Word::Part { calls: Some(theirs), heard: true, .. } if *theirs < calls);
                *sequence >= next && behind(word)
            };
            peer.waiting.iter().find(crossed).map(|(sequence, _)| (rank, *sequence))
        })
    }

    /// Passes over a step, unless this rank has come to it meanwhile, and tells those that are in it.
    pub(super) fn turn_down(&self, sequence: u64) {
        let passed = |next: u64| (next <= sequence).then_some(sequence.saturating_add(1));
        if self.next.fetch_update(Ordering::SeqCst, Ordering::SeqCst, passed).is_err() {
            return;
        }
        let reason = "it is in a call".to_owned();
        let (step, origin) = (CALL.to_owned(), self.rank as u32);
        self.send_to_all(&Message::Withdraw { sequence, step, origin, culprit: None, reason });
    }

    /// The watch has told of a peer's part in a step.
    pub(super) fn heard(&self, rank: usize, sequence: u64) {
        let mut state = lock(&self.state);
        for (number, word) in state.peers.get_mut(rank).into_iter().flat_map(|peer| &mut peer.waiting) {
            if let (Word::Part { heard, .. }, true) = (word, *number == sequence) {
                *heard = true;
            }
        }
    }

    /// All ranks pass a step, or all raise: the ranks that failed their own error, the others what the lowest of those
    /// said. The timeout is the one of [`join`](Self::join).
    ///
    /// # Errors
    /// This rank's own, [`Disagree`](SetupError::Disagree) with another's, or as [`gather`](Self::gather).
    pub fn agree(&self, what: &str, outcome: crate::Result<()>) -> crate::Result<()> {
        let mine = match &outcome {
            Ok(()) => vec![0],
            // Whoever is to stop waits for nobody.
            Err(crate::Error::Interrupted { what: wait }) => {
                let _turn = lock(&self.turn);
                let sequence = self.next.fetch_add(1, Ordering::SeqCst);
                let error = SetupError::Interrupted { what: wait.clone() };
                self.send_to_all(&withdrawal(self.rank, sequence, what, &error));
                return outcome;
            }
            Err(error) => [&[1], cut(&error.to_string()).as_bytes()].concat(),
        };
        let parts = self.gather(what, &mine, self.timeout);
        outcome?;
        for (rank, part) in parts?.iter().enumerate() {
            match part.as_slice() {
                [0] => {}
                [_, reason @ ..] => {
                    let reason = String::from_utf8_lossy(reason).into_owned();
                    return Err(SetupError::Disagree { rank, reason }.into());
                }
                [] => return Err(SetupError::Disagree { rank, reason: "it sent nothing".to_owned() }.into()),
            }
        }
        Ok(())
    }

    /// Tells all ranks that have not died, as far as their sockets have room. Never waits.
    ///
    /// Those that have left are told too: one that closes waits for the goodbyes of the others.
    pub fn tell(&self, notice: Notice) {
        if self.fork.check().is_ok() {
            self.send_to(self.ranks(|life| life != Life::Dead), &Message::Notice(notice));
        }
    }

    fn send_to_all(&self, message: &Message) {
        self.send_to(self.here(), message);
    }

    fn send_to(&self, ranks: Vec<usize>, message: &Message) {
        let frame = message.encode();
        for rank in ranks {
            if let Some(peer) = &self.peers[rank]
                && let Err(error) = peer.socket.try_send(&frame, &[])
            {
                tracing::debug!(rank, %error, ?message, "could not tell a rank");
            }
        }
    }

    /// The other ranks that are here.
    fn here(&self) -> Vec<usize> {
        self.ranks(|life| life == Life::Here)
    }

    fn ranks(&self, which: impl Fn(Life) -> bool) -> Vec<usize> {
        let state = lock(&self.state);
        (0..self.world()).filter(|&rank| rank != self.rank && which(state.peers[rank].life)).collect()
    }

    fn step(
        &self,
        sequence: u64,
        what: &str,
        mine: &[u8],
        fd: Option<BorrowedFd<'_>>,
        timeout: Duration,
        counted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Part>, SetupError> {
        let start = Instant::now();
        let mut attending = self.attend.begin();
        let frame = wire::part(sequence, what, mine, counted.is_some());
        let mut unsent = self.here();
        loop {
            unsent.retain(|&rank| {
                let Some(peer) = &self.peers[rank] else { return false };
                let sent = peer.socket.try_send(&frame, fd.as_slice());
                // Any other failure is the peer's end, which reading it tells in its order.
                matches!(sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            });
            // Asked without the lock; counts only where parts are missing.
            let ended = counted.is_some_and(|goes_on| !goes_on()) || self.over.load(Ordering::Acquire);
            let mut state = lock(&self.state);
            let missing = self.missing(&state, sequence, what)?;
            if missing.is_empty() && unsent.is_empty() {
                return Ok(self.take(&mut state, sequence, mine));
            }
            if ended {
                return Err(SetupError::Abandoned { what: what.to_owned() });
            }
            let left = left(start, timeout);
            if left.is_zero() {
                let missing = if missing.is_empty() { unsent } else { missing };
                return Err(SetupError::GatherTimeout { what: what.to_owned(), missing, waited: timeout });
            }
            let nap = attending.nap(if unsent.is_empty() { left } else { left.min(RETRY) });
            if self.watched.load(Ordering::Acquire) {
                // Checked under the lock that the watch takes before it tells, so no news is lost.
                drop(self.news.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner));
            } else {
                drop(state);
                self.read_unwatched(nap)?;
            }
            if attending.gives_up() {
                return Err(SetupError::Interrupted { what: what.to_owned() });
            }
        }
    }

    /// The ranks whose part has not come, or why waiting for them is in vain.
    fn missing(&self, state: &State, sequence: u64, what: &str) -> Result<Vec<usize>, SetupError> {
        let mut missing = Vec::new();
        let mut lost = None;
        for (rank, peer) in state.peers.iter().enumerate().filter(|&(rank, _)| rank != self.rank) {
            let died = || SetupError::PeerDied { rank, pid: self.pid(rank), what: what.to_owned() };
            match peer.waiting.iter().find(|(number, _)| *number == sequence) {
                Some((_, Word::Part { label, .. })) if label != what => {
                    return Err(SetupError::Diverged { rank, mine: what.to_owned(), theirs: label.clone() });
                }
                Some((_, Word::Part { .. })) => {
                    if peer.life == Life::Dead {
                        lost.get_or_insert_with(died);
                    }
                }
                Some((_, Word::Withdrawn { step, origin, culprit, reason })) => {
                    let other = |&rank: &usize| rank != self.rank && rank < self.world();
                    return Err(match culprit.filter(other) {
                        Some(rank) => {
                            SetupError::PeerDied { rank, pid: self.pid(rank), what: what.to_owned() }
                        }
                        None => SetupError::Withdrawn {
                            rank: Some(*origin).filter(other).unwrap_or(rank),
                            what: step.clone(),
                            reason: reason.clone(),
                        },
                    });
                }
                None if peer.life == Life::Dead => return Err(died()),
                None if peer.life == Life::Left => {
                    return Err(SetupError::PeerLeft { rank, what: what.to_owned() });
                }
                None => missing.push(rank),
            }
        }
        // With all parts here a death is the next step's trouble.
        match lost {
            Some(lost) if !missing.is_empty() => Err(lost),
            _ => Ok(missing),
        }
    }

    /// Takes the parts of a step that has all of them, and drops what is left of earlier steps.
    fn take(&self, state: &mut State, sequence: u64, mine: &[u8]) -> Vec<Part> {
        let own = || Part { bytes: mine.to_vec(), fd: None };
        let mut parts: Vec<Part> = Vec::with_capacity(self.world());
        for peer in &mut state.peers {
            let mut part = None;
            peer.waiting.retain_mut(|(number, word)| {
                if let (Word::Part { part: found, .. }, true) = (&mut *word, *number == sequence) {
                    part = Some(Part { bytes: std::mem::take(&mut found.bytes), fd: found.fd.take() });
                }
                *number > sequence
            });
            parts.push(part.unwrap_or_else(own));
        }
        parts
    }
}

/// What a rank tells the others when it fails in a step. A failure passed on keeps its origin and its step.
fn withdrawal(own: usize, sequence: u64, step: &str, error: &SetupError) -> Message {
    let (origin, culprit, reason) = match error {
        SetupError::PeerDied { rank, .. } => (own, Some(*rank as u32), cut(&error.to_string())),
        SetupError::Withdrawn { rank, reason, .. } => (*rank, None, cut(reason)),
        error => (own, None, cut(&error.to_string())),
    };
    // Told from one that failed: nobody need fail for it who was not in it.
    let dead = match error {
        SetupError::Abandoned { .. } | SetupError::Diverged { .. } => true,
        SetupError::Withdrawn { what, .. } => what == CALL,
        _ => false,
    };
    let step = match error {
        _ if dead => format!("an abandoned {step}"),
        SetupError::Withdrawn { what, .. } => what.clone(),
        _ => step.to_owned(),
    };
    Message::Withdraw { sequence, step, origin: origin as u32, culprit, reason }
}

/// Step 0 is the one that ends set-up: a rank that fails before tells those it is connected to.
pub(super) fn withdraw_from_join(own: usize, socket: &PeerSocket, error: &SetupError) {
    if let Err(error) = socket.try_send(&withdrawal(own, 0, "join", error).encode(), &[]) {
        tracing::debug!(%error, "could not tell a rank why set-up failed");
    }
}

/// A reason short enough to send to 63 ranks.
fn cut(text: &str) -> String {
    text.chars().take(512).collect()
}
