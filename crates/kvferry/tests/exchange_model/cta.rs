//! What the steps of a CTA do.

use crate::model::{GO, Instr, Model, Op, SEE_ABORT, TIME_OUT};
use crate::protocol::{Bump, Gate, Kind, Landing, Latch, Poisoned, Post, Refusal, Stop, Violation};
use crate::scenario::Word;
use crate::state::{ABORT, FAULT, FILL, Header, POISON, REFUSED};

impl Model {
    /// The epoch that a CTA works for.
    pub(crate) fn epoch_of(&self, state: &[u8], rank: usize, cta: usize) -> u8 {
        match self.protocol.latch {
            Latch::AtStart | Latch::Baked => state[self.shape.latch(cta)],
            Latch::EveryUse => state[self.shape.epoch(rank)] + 1,
        }
    }

    pub(crate) fn apply_cta(
        &self,
        state: &mut [u8],
        agent: usize,
        cta: usize,
        instr: Instr,
        choice: u8,
    ) -> Result<(), Violation> {
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        let pc = s.pc(agent);
        let poisoned = state[s.flags(rank)] & POISON != 0;
        if choice == TIME_OUT || choice == SEE_ABORT {
            self.give_up(state, rank, instr.call);
            state[s.mask(cta)] = 0;
            state[pc] = instr.skip;
            return Ok(());
        }
        let epoch = self.epoch_of(state, rank, cta);
        match instr.op {
            Op::Enter(_) => {
                let now = state[s.epoch(rank)] + 1;
                let baked = self.call(rank, instr.call).baked.filter(|_| self.protocol.latch == Latch::Baked);
                state[s.latch(cta)] = baked.unwrap_or(now);
                if state[s.flags(rank)] & (POISON | ABORT) != 0 {
                    self.give_up(state, rank, instr.call);
                    if self.protocol.poisoned == Poisoned::Silent {
                        state[pc] = instr.skip;
                        return Ok(());
                    }
                }
            }
            Op::Post { ahead } => {
                let of = (epoch + u8::from(ahead), instr.call + u8::from(ahead));
                return self.post(state, agent, cta, (instr, of), usize::from(choice));
            }
            Op::ReadHeaders | Op::ReadHeader { .. } if choice != GO => {
                return self.read_header(state, agent, cta, instr, usize::from(choice));
            }
            Op::ReadInput => self.check_input(state, rank, instr.call)?,
            Op::Own { lane } => {
                let place = self.landing(rank, instr.call, epoch);
                state[s.cell(rank, usize::from(place), rank, usize::from(lane))] = instr.call;
            }
            Op::Push { target, lane } if !(poisoned && self.protocol.poisoned == Poisoned::Signals) => {
                let target = usize::from(target);
                let place = match (self.protocol.landing, self.protocol.gate) {
                    (Landing::Slots(count), _) => epoch % count,
                    (Landing::Posted, Gate::Nothing) => self.call(target, instr.call).place,
                    (Landing::Posted, _) => state[s.places(cta)] >> (2 * target) & 3,
                };
                self.write(state, rank, (target, place), lane, (epoch, instr.call))?;
            }
            Op::Signal { target, .. } => {
                self.signal(state, rank, usize::from(target), (epoch, instr.call))?;
            }
            Op::Wait if !(poisoned && self.protocol.poisoned == Poisoned::Signals) => {
                self.check_arrivals(state, rank, cta, instr.call)?;
            }
            Op::Bump => self.advance(state, rank, (epoch, instr.call))?,
            Op::Leave(kernel) => return self.leave(state, agent, cta, instr, usize::from(kernel)),
            _ => {}
        }
        state[pc] += 1;
        Ok(())
    }

    /// Notes that the call has failed here and, the first time, writes the record.
    fn give_up(&self, state: &mut [u8], rank: usize, call: u8) {
        let s = &self.shape;
        state[s.flags(rank)] |= if self.protocol.stop == Stop::AtOnce { POISON } else { FAULT };
        if state[s.failed(rank)] == 0 {
            state[s.failed(rank)] = call;
        }
    }

    fn landing(&self, rank: usize, call: u8, epoch: u8) -> u8 {
        match self.protocol.landing {
            Landing::Posted => self.call(rank, call).place,
            Landing::Slots(count) => epoch % count,
        }
    }

    /// One store of one header: to `peer`, for an epoch and a call.
    fn post(
        &self,
        state: &mut [u8],
        agent: usize,
        cta: usize,
        (instr, (epoch, number)): (Instr, (u8, u8)),
        peer: usize,
    ) -> Result<(), Violation> {
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        let call = self.call(rank, number);
        let ahead = self.protocol.post == Post::Ahead && number > 1;
        let place = call.named.filter(|_| ahead).unwrap_or(call.place);
        let done = (state[s.mask(cta)] >> (2 * peer)) & 3;
        if done == 0 {
            let old = state[s.posted(peer, epoch, rank)];
            let read = old == 0 || old <= state[s.epoch(peer)];
            self.demand(read, Kind::HeaderLost, || {
                format!("r{rank} overwrites its header of epoch {old} at r{peer}, which still needs it")
            })?;
            if call.word != Word::Refused {
                state[s.owner(rank, usize::from(place))] = epoch;
            }
        }
        if (done == 0) == (self.protocol.post == Post::EpochFirst) {
            state[s.posted(peer, epoch, rank)] = epoch;
        } else {
            let header = Header {
                place,
                arrivals: self.lanes(rank, peer, number),
                refused: call.word == Word::Refused,
                hash: call.word == Word::Mismatched,
            };
            state[s.payload(peer, epoch, rank)] = header.pack();
        }
        state[s.mask(cta)] += 1 << (2 * peer);
        if self.peers(rank).all(|peer| state[s.mask(cta)] >> (2 * peer) & 3 == 2) {
            state[s.mask(cta)] = 0;
            state[s.pc(agent)] += 1;
            if call.word == Word::Refused && self.protocol.refusal == Refusal::Poison {
                self.give_up(state, rank, number);
                state[s.pc(agent)] = instr.skip;
            }
        }
        Ok(())
    }

    /// Reads the header of `peer`; judges once all that are asked for are read.
    fn read_header(
        &self,
        state: &mut [u8],
        agent: usize,
        cta: usize,
        instr: Instr,
        peer: usize,
    ) -> Result<(), Violation> {
        const BAD: u8 = 0x80;
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        let epoch = self.epoch_of(state, rank, cta);
        let found = state[s.posted(rank, epoch, peer)];
        self.demand(found == epoch, Kind::HeaderLost, || {
            format!("r{rank} looks for r{peer}'s header of epoch {epoch} and finds that of {found}")
        })?;
        let header = Header::unpack(state[s.payload(rank, epoch, peer)]);
        let word = self.call(rank, instr.call).word;
        let bad = header.refused || header.hash != (word == Word::Mismatched) || word == Word::Refused;
        let places = &mut state[s.places(cta)];
        *places = (*places & !(3 << (2 * peer))) | (header.place << (2 * peer));
        let all = matches!(instr.op, Op::ReadHeaders);
        let mut mask = state[s.mask(cta)] | (1 << peer) | if bad { BAD } else { 0 };
        if !all || self.peers(rank).all(|peer| mask >> peer & 1 == 1) {
            let refuse = mask & BAD != 0;
            self.demand(!all || refuse == self.must_refuse(instr.call), Kind::DecidedApart, || {
                format!("r{rank} takes call {} for {}", instr.call, if refuse { "refused" } else { "good" })
            })?;
            mask = 0;
            state[s.pc(agent)] += 1;
            if refuse {
                match self.protocol.refusal {
                    Refusal::Poison => self.give_up(state, rank, instr.call),
                    Refusal::Continue => state[s.flags(rank)] |= REFUSED,
                }
                state[s.pc(agent)] = instr.skip;
            }
        }
        state[s.mask(cta)] = mask;
        Ok(())
    }

    /// Ends the CTA's part in a kernel; the last to leave ends the kernel.
    fn leave(
        &self,
        state: &mut [u8],
        agent: usize,
        cta: usize,
        instr: Instr,
        kernel: usize,
    ) -> Result<(), Violation> {
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        let kernel = &self.kernels[kernel];
        let epoch = self.epoch_of(state, rank, cta);
        let mut others = kernel.members.iter().filter(|member| member.agent != agent);
        state[s.pc(agent)] += 1;
        // Registers end with the kernel; keeping their last values would only tell equal states apart.
        state[s.latch(cta)] = 0;
        state[s.places(cta)] = 0;
        if !others.all(|member| state[s.pc(member.agent)] > member.leave) {
            return Ok(());
        }
        state[s.pc(kernel.stream)] += 1;
        let flags = &mut state[s.flags(rank)];
        if *flags & FAULT != 0 {
            *flags = *flags & !FAULT | POISON;
        }
        if !kernel.advances {
            return Ok(());
        }
        let place = usize::from(self.landing(rank, instr.call, epoch));
        if state[s.flags(rank)] & POISON != 0 {
            for source in 0..self.ranks() {
                for lane in 0..self.lanes(source, rank, instr.call) {
                    state[s.cell(rank, place, source, usize::from(lane))] = FILL;
                }
            }
            return Ok(());
        }
        if state[s.owner(rank, place)] == epoch {
            state[s.owner(rank, place)] = 0;
        }
        if self.protocol.bump == Bump::Waiter {
            Ok(())
        } else {
            self.advance(state, rank, (epoch, instr.call))
        }
    }

    /// Counts what has arrived, if the call ran, and makes the epoch the rank's.
    fn advance(&self, state: &mut [u8], rank: usize, (epoch, call): (u8, u8)) -> Result<(), Violation> {
        let s = &self.shape;
        if state[s.flags(rank)] & REFUSED == 0 {
            for peer in self.peers(rank) {
                state[s.expected(rank, epoch, peer)] += self.announced(state, rank, epoch, peer, call);
            }
        }
        state[s.flags(rank)] &= !REFUSED;
        for peer in self.peers(rank) {
            self.demand(epoch <= state[s.epoch(peer)] + 1, Kind::TooFarAhead, || {
                format!("r{rank} finishes epoch {epoch} while r{peer} is at {}", state[s.epoch(peer)])
            })?;
        }
        state[s.epoch(rank)] = epoch;
        Ok(())
    }
}
