//! The steps of [`protocol`], by one thread.

use std::sync::PoisonError;

use kvferry_host::{Copier, HostRegion, SharedWords};
use kvferry_kernels::{MAX_RANKS, arrival_offset, header_cell_offset};

use super::beat::Beats;
use super::wait::Wait;
use super::{CpuBackend, Local, Mapped, Ready, host, page};
use crate::all2all::backend::Launch;
use crate::all2all::error::FaultKind;
use crate::all2all::protocol::{self, Header, Refusal, parity};
use crate::error::Result;

type Failed = (usize, FaultKind);

/// Words of a header cell, in order.
mod cell {
    pub(super) const HASH: usize = 0;
    pub(super) const PLACE: usize = 1;
    pub(super) const ARRIVALS: usize = 2;
    pub(super) const VERDICT: usize = 3;
    pub(super) const DIGEST: usize = 4;
    pub(super) const EPOCH: usize = 7;
}

/// Index among a control block's words of the cell that `source` fills.
fn cell_index(epoch: u64, source: usize) -> usize {
    (header_cell_offset(parity(epoch), source) / 8) as usize
}

fn arrival_index(epoch: u64, source: usize) -> usize {
    (arrival_offset(parity(epoch), source) / 8) as usize
}

/// Writes a header: epoch last, with release.
fn post(words: &SharedWords, source: usize, epoch: u64, header: &Header) {
    let at = cell_index(epoch, source);
    words.store_relaxed(at + cell::HASH, header.hash);
    words.store_relaxed(at + cell::PLACE, header.place);
    words.store_relaxed(at + cell::ARRIVALS, header.arrivals);
    words.store_relaxed(at + cell::VERDICT, header.verdict);
    for (index, &digest) in header.digest.iter().enumerate() {
        words.store_relaxed(at + cell::DIGEST + index, digest);
    }
    words.store(at + cell::EPOCH, epoch);
}

/// Reads a header whose epoch has been seen, with acquire.
fn read(words: &SharedWords, source: usize, epoch: u64) -> Header {
    let at = cell_index(epoch, source);
    let word = |index: usize| words.load_relaxed(at + index);
    Header {
        hash: word(cell::HASH),
        place: word(cell::PLACE),
        arrivals: word(cell::ARRIVALS),
        verdict: word(cell::VERDICT),
        digest: [word(cell::DIGEST), word(cell::DIGEST + 1), word(cell::DIGEST + 2)],
    }
}

impl CpuBackend {
    fn wait<'a>(&'a self, peers: &'a [Option<Mapped>]) -> Wait<'a> {
        let beats = Beats { rank: self.rank, own: &self.own.words, peers };
        Wait { beats, bell: &self.own.bell, page: &self.page, attend: &self.attend, spin: self.spin }
    }

    /// Every rank but this one, the next first: no receiver is hit by all at once.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, world) = (self.rank, self.world);
        (1..world).map(move |step| (rank + step) % world)
    }

    /// One call. What it returns in error is the rank concerned and why; the caller poisons.
    pub(super) fn steps(
        &self,
        local: &mut Local,
        launch: &Launch<'_>,
        ready: &Ready,
    ) -> std::result::Result<(), Failed> {
        // Step 0.
        if local.poisoned || self.page.load(page::ABORT) != 0 {
            return Err(self.fault(FaultKind::Aborted));
        }
        let plan = launch.plan;
        let epoch = local.epoch + 1;
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let peer = |rank: usize| peers.get(rank).and_then(Option::as_ref);
        let arrivals = |rank: usize| u64::from(plan.bytes_to.get(rank).is_some_and(|&bytes| bytes > 0));
        let mine = Header {
            hash: launch.hash,
            place: launch.place.offset,
            arrivals: 0,
            verdict: 0,
            digest: plan.digest,
        };

        // Step 1.
        for to in self.others() {
            let Some(Mapped { words, bell, .. }) = peer(to) else { continue };
            post(words, self.rank, epoch, &Header { arrivals: arrivals(to), ..mine });
            bell.ring();
        }

        // Step 2.
        self.copy(launch, ready, self.rank, &self.own.pool, mine.place)?;

        // Step 3.
        let headers = self.headers(epoch, mine, &peers)?;
        let headers = headers.get(..self.world).unwrap_or_default();
        if let Some(found) = protocol::judge(headers, &plan.result_bytes, self.pool_bytes) {
            return Err(found);
        }

        // Step 4.
        for to in self.others() {
            let (Some(peer), Some(header)) = (peer(to), headers.get(to)) else { continue };
            if arrivals(to) > 0 {
                self.copy(launch, ready, to, &peer.pool, header.place)?;
                peer.words.add(arrival_index(epoch, self.rank), 1);
                peer.bell.ring();
            }
        }

        // Step 5.
        let Some(expected) = local.expected.get_mut(parity(epoch) as usize) else { return Ok(()) };
        let arrived = |from: usize| self.own.words.load(arrival_index(epoch, from));
        let awaited = |from: usize, expected: &[u64; MAX_RANKS]| {
            expected.get(from).zip(headers.get(from)).map_or(0, |(before, header)| before + header.arrivals)
        };
        let mut next = 0;
        let missing = || {
            while next < self.world {
                if next != self.rank && arrived(next) < awaited(next, expected) {
                    return Some(next);
                }
                next += 1;
            }
            None
        };
        self.wait(&peers).until(missing, |waited| FaultKind::ArrivalTimeout { waited })?;

        // Step 6.
        for (count, (from, header)) in expected.iter_mut().zip(headers.iter().enumerate()) {
            if from != self.rank {
                *count += header.arrivals;
            }
        }
        local.epoch = epoch;
        Ok(())
    }

    /// Waits for the headers of all ranks, and gives them with the own one in its place. A refusal ends the wait before
    /// all are there: with it nobody pushes, whatever the others say.
    fn headers(
        &self,
        epoch: u64,
        mine: Header,
        peers: &[Option<Mapped>],
    ) -> std::result::Result<[Header; MAX_RANKS], Failed> {
        let words = &self.own.words;
        let here = |rank: usize| words.load(cell_index(epoch, rank) + cell::EPOCH) >= epoch;
        let verdict = |rank: usize| words.load_relaxed(cell_index(epoch, rank) + cell::VERDICT);
        let mut refused = None;
        let mut next = 0;
        let missing = || {
            while next < self.world && (next == self.rank || here(next)) {
                next += 1;
            }
            if next == self.world {
                return None;
            }
            let others = (0..self.world).filter(|&rank| rank != self.rank);
            refused = others.filter(|&rank| here(rank)).find(|&rank| verdict(rank) != 0);
            if refused.is_some() { None } else { Some(next) }
        };
        self.wait(peers).until(missing, |waited| FaultKind::HeaderTimeout { waited })?;
        if let Some(peer) = refused {
            return Err((peer, FaultKind::Refused { code: verdict(peer) }));
        }
        let mut headers = [mine; MAX_RANKS];
        for (rank, header) in headers.iter_mut().enumerate().take(self.world) {
            if rank != self.rank {
                *header = read(words, rank, epoch);
            }
        }
        Ok(headers)
    }

    /// Copies what `to` gets to its landing place. The streaming stores are fenced when the copier is dropped, before
    /// anything is signalled.
    fn copy(
        &self,
        launch: &Launch<'_>,
        ready: &Ready,
        to: usize,
        pool: &HostRegion,
        place: u64,
    ) -> std::result::Result<(), Failed> {
        let pieces = ready.pieces.get(to).map_or(&[][..], Vec::as_slice);
        if pieces.is_empty() {
            return Ok(());
        }
        let mut copier = Copier::new(ready.hint);
        let mut copy = || -> Result<()> {
            for piece in pieces {
                let Some(array) = launch.inputs.get(piece.tensor) else { continue };
                let from = array.offset.wrapping_add_signed(piece.src_offset);
                let runs = 0..piece.nest.num_runs();
                copier.nest((host(array)?, from), (pool, place + piece.dst_offset), &piece.nest, runs)?;
            }
            Ok(())
        };
        // Inputs and places were checked: this does not happen.
        copy().map_err(|error| self.fault(FaultKind::Failed { reason: error.to_string() }))
    }

    /// Tells every peer that call `epoch` will not be.
    pub(super) fn post_refusal(&self, epoch: u64, refusal: Refusal) {
        let verdict = refusal.code();
        let header = Header { hash: 0, place: 0, arrivals: 0, verdict, digest: [0; 3] };
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        for Mapped { words, bell, .. } in peers.iter().flatten() {
            post(words, self.rank, epoch, &header);
            bell.ring();
        }
    }
}

impl Ready {
    pub(super) fn of_launch<'a>(launch: &Launch<'a>) -> Result<&'a Ready> {
        let derived = &launch.plan.derived;
        if derived.get().is_none() {
            let ready = Ready::of(launch.plan)?;
            // Calls are serialised: nobody else sets it meanwhile, and if so, to the same.
            let _ = derived.set(Box::new(ready));
        }
        let ready = derived.get().and_then(|derived| derived.downcast_ref::<Ready>());
        ready.ok_or_else(|| crate::error::Error::Unsupported {
            what: "this plan".to_owned(),
            why: "it was made for another backend".to_owned(),
        })
    }
}
