//! Writes into peers, arrivals, and the properties of both.

use crate::model::Model;
use crate::protocol::{Kind, Landing, Violation};
use crate::state::Header;
use crate::step::bytes_of;

impl Model {
    /// Rank `source` writes its lane of `call` into a buffer of a peer.
    pub(crate) fn write(
        &self,
        state: &mut [u8],
        source: usize,
        (target, place): (usize, u8),
        lane: u8,
        (epoch, call): (u8, u8),
    ) -> Result<(), Violation> {
        let s = &self.shape;
        let buffer = usize::from(place);
        self.demand(!self.must_refuse(call), Kind::ByteInRefusedCall, || {
            format!("r{source} writes to r{target} in call {call}, which a rank refuses")
        })?;
        let posted = buffer < s.buffers && state[s.owner(target, buffer)] == epoch;
        let slots = self.protocol.landing != Landing::Posted;
        self.demand(posted || slots, Kind::WriteUnposted, || {
            format!("r{source} writes into buffer {place} of r{target}, not posted for epoch {epoch}")
        })?;
        if buffer < s.buffers {
            state[s.cell(target, buffer, source, usize::from(lane))] = call;
        }
        Ok(())
    }

    /// Rank `source` adds an arrival at a peer.
    pub(crate) fn signal(
        &self,
        state: &mut [u8],
        source: usize,
        target: usize,
        (epoch, call): (u8, u8),
    ) -> Result<(), Violation> {
        let s = &self.shape;
        let failed = state[s.failed(source)];
        self.demand(failed == 0 || call <= failed, Kind::SignalAfterAbort, || {
            format!("r{source} gave up in call {failed} and signals r{target} in call {call}")
        })?;
        state[s.arrivals(target, epoch, source)] += 1;
        Ok(())
    }

    /// How many arrivals `source` announced for this epoch.
    pub(crate) fn announced(&self, state: &[u8], rank: usize, epoch: u8, source: usize, call: u8) -> u8 {
        match self.protocol.landing {
            Landing::Posted => Header::unpack(state[self.shape.payload(rank, epoch, source)]).arrivals,
            Landing::Slots(_) => self.lanes(source, rank, call),
        }
    }

    /// Arrivals from `peer` beyond those that this call needs.
    pub(crate) fn surplus(&self, state: &[u8], rank: usize, cta: usize, peer: usize, call: u8) -> i16 {
        let s = &self.shape;
        let epoch = self.epoch_of(state, rank, cta);
        let needed = state[s.expected(rank, epoch, peer)] + self.announced(state, rank, epoch, peer, call);
        i16::from(state[s.arrivals(rank, epoch, peer)]) - i16::from(needed)
    }

    /// The wait for arrivals is over: every byte of this call must be there, and no arrival more.
    pub(crate) fn check_arrivals(
        &self,
        state: &[u8],
        rank: usize,
        cta: usize,
        call: u8,
    ) -> Result<(), Violation> {
        let s = &self.shape;
        let place = match self.protocol.landing {
            Landing::Posted => self.call(rank, call).place,
            Landing::Slots(count) => call % count,
        };
        for peer in self.peers(rank) {
            for lane in 0..self.lanes(peer, rank, call) {
                let found = state[s.cell(rank, usize::from(place), peer, usize::from(lane))];
                self.demand(found == call, Kind::EarlyWake, || {
                    let bytes = bytes_of(found);
                    format!("r{rank} ends its wait of call {call} and has {bytes} from r{peer}")
                })?;
            }
            let surplus = self.surplus(state, rank, cta, peer, call);
            self.demand(surplus == 0, Kind::Overshoot, || {
                format!("r{rank} has {surplus} arrivals from r{peer} beyond those of call {call}")
            })?;
        }
        Ok(())
    }
}
