//! Reading what peers send, for the watch, or without one for the thread in a collective step.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvferry_host::{Interest, Received, poll_fds};

use super::{Life, MAX_PENDING, MAX_WAITING, Mesh, Part, READS_PER_TURN, RETRY, Word, lock};
use crate::all2all::setup::SetupError;
use crate::all2all::watch::{DeathCause, Event};
use crate::all2all::wire::{Message, Notice};

impl Mesh {
    /// Reads the sockets while nobody else does, for at most `nap`.
    pub(super) fn read_unwatched(&self, nap: Duration) -> Result<(), SetupError> {
        let _reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(reading)) => reading.into_inner(),
            // A watch has just begun or is about to end.
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(nap.min(RETRY));
                return Ok(());
            }
        };
        let events = self.read(None, Some(nap)).map_err(SetupError::io("waiting for other ranks"))?;
        let mut state = lock(&self.state);
        let room = MAX_PENDING.saturating_sub(state.pending.len());
        state.pending.extend(events.into_iter().take(room));
        Ok(())
    }

    /// For the watch: events from before it began, else reads until `wake` rings or something happened.
    pub(in crate::all2all) fn read_watched(&self, wake: BorrowedFd<'_>) -> io::Result<Vec<Event>> {
        let _reading = lock(&self.reading);
        let pending = std::mem::take(&mut lock(&self.state).pending);
        if pending.is_empty() { self.read(Some(wake), None) } else { Ok(pending) }
    }

    /// For the watch: from now on collective steps read for themselves.
    pub(in crate::all2all) fn unwatched(&self) {
        // Under the lock, so that a step about to wait sees it.
        let _state = lock(&self.state);
        self.watched.store(false, Ordering::Release);
        self.news.notify_all();
    }

    /// Waits for any peer (or `wake`), then files every message that is there.
    fn read(&self, wake: Option<BorrowedFd<'_>>, timeout: Option<Duration>) -> io::Result<Vec<Event>> {
        let here = self.here();
        let mut fds = Vec::with_capacity(2 * here.len() + 1);
        // (rank, whether this is the descriptor of its process)
        let mut whose = Vec::with_capacity(fds.capacity());
        for rank in here {
            let Some(peer) = &self.peers[rank] else { continue };
            fds.push((peer.socket.as_fd(), Interest::Read));
            whose.push((rank, false));
            if let Some(watch) = &peer.watch {
                fds.push((watch.as_fd(), Interest::Read));
                whose.push((rank, true));
            }
        }
        fds.extend(wake.map(|wake| (wake, Interest::Read)));
        let found = poll_fds(&fds, timeout)?;
        let mut events = Vec::new();
        for (&(rank, exited), _) in whose.iter().zip(&found).filter(|(_, found)| found.readable) {
            self.read_peer(rank, exited, &mut events);
        }
        Ok(events)
    }

    /// Files what a peer sent. What it sent before its end is read first: a goodbye makes the end no death.
    fn read_peer(&self, rank: usize, exited: bool, events: &mut Vec<Event>) {
        let Some(peer) = &self.peers[rank] else { return };
        // After its end no more can come than its socket held.
        let reads = if exited { MAX_WAITING * READS_PER_TURN } else { READS_PER_TURN };
        for _ in 0..reads {
            if !self.is_here(rank) {
                return;
            }
            let cause = match peer.socket.try_recv() {
                Ok(Received::Message(bytes, fds)) => match self.file(rank, &bytes, fds) {
                    Ok(event) => {
                        events.extend(event);
                        continue;
                    }
                    Err(why) => {
                        tracing::warn!(rank, pid = peer.pid, %why, "a rank broke the protocol");
                        DeathCause::Garbled
                    }
                },
                Ok(Received::Nothing) if exited => DeathCause::Exited,
                Ok(Received::Nothing) => return,
                Ok(Received::HungUp) => DeathCause::HungUp,
                Err(error) => {
                    tracing::warn!(rank, pid = peer.pid, %error, "cannot read from a rank");
                    DeathCause::Garbled
                }
            };
            self.end(rank, Life::Dead);
            events.push(Event::Death { peer: rank, pid: peer.pid, how: cause });
            return;
        }
    }

    fn file(&self, rank: usize, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Option<Event>, String> {
        match Message::decode(bytes).map_err(|error| error.to_string())? {
            Message::Part { sequence, label, payload, counted } => {
                let calls = payload.last_chunk().filter(|_| counted).map(|calls| u64::from_le_bytes(*calls));
                let part = Part { bytes: payload, fd: fds.into_iter().next() };
                self.hold(rank, sequence, Word::Part { label, part, calls, heard: false })?;
                if calls.is_none() {
                    return Ok(None);
                }
                self.counted.fetch_max(sequence.saturating_add(1), Ordering::SeqCst);
                let ahead = sequence >= self.next.load(Ordering::SeqCst);
                Ok(ahead.then_some(Event::Step { peer: rank, sequence }))
            }
            Message::Withdraw { sequence, step, origin, culprit, reason } => {
                let (origin, culprit) = (origin as usize, culprit.map(|rank| rank as usize));
                self.hold(rank, sequence, Word::Withdrawn { step, origin, culprit, reason })
            }
            Message::Notice(Notice::Abort { kind, peer, epoch }) => {
                Ok(Some(Event::Abort { from: rank, kind, peer, epoch }))
            }
            Message::Notice(Notice::Bye) => {
                self.end(rank, Life::Left);
                Ok(Some(Event::Bye { peer: rank }))
            }
            Message::Hello(_) | Message::Welcome | Message::Refuse { .. } => {
                Err("a greeting after the greeting".to_owned())
            }
        }
    }

    /// Keeps a peer's word for a step; a later word for the same step replaces an earlier one.
    fn hold(&self, rank: usize, sequence: u64, word: Word) -> Result<Option<Event>, String> {
        let mut state = lock(&self.state);
        let waiting = &mut state.peers[rank].waiting;
        waiting.retain(|(number, _)| *number != sequence);
        if waiting.len() >= MAX_WAITING {
            return Err(format!("{MAX_WAITING} messages wait for steps that this rank has not taken"));
        }
        waiting.push_back((sequence, word));
        self.news.notify_all();
        Ok(None)
    }

    fn end(&self, rank: usize, life: Life) {
        lock(&self.state).peers[rank].life = life;
        self.news.notify_all();
    }
}
