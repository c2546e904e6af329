//! Which steps a state allows, and what the steps of hosts, native threads and streams do.

use crate::model::{GO, Instr, Model, Op, Role, SEE_ABORT, Step, TIME_OUT};
use crate::protocol::{Copies, Kind, Landing, Notice, Poisoned, Signal, Violation};
use crate::scenario::Timeouts;
use crate::state::{ABORT, FAULT, FILL, POISON, STAGED};

impl Model {
    /// Adds the steps that `agent` can take. With `patience_over`, every wait may time out.
    pub(crate) fn steps(&self, state: &[u8], agent: usize, patience_over: bool, out: &mut Vec<Step>) {
        let Some(instr) = self.next(state, agent) else { return };
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        let mut add = |choice| out.push(Step { agent: u8::try_from(agent).unwrap(), choice });
        let at = |(agent, position): (usize, u8)| state[s.pc(agent)] >= position;
        let Role::Cta(cta) = self.agents[agent].role else {
            let issued = self.agents[agent].role != Role::Stream || at((self.hosts[rank], instr.issued));
            let ready = match instr.op {
                Op::Sync(number) => self.syncs[usize::from(number)].iter().copied().all(at),
                Op::Barrier(number) => self.barriers[usize::from(number)].iter().copied().all(at),
                Op::AbortWhenTold => {
                    let failed = |peer: usize| state[s.flags(peer)] & (FAULT | POISON | ABORT) != 0;
                    let ours = |peer: usize| {
                        let same = state[s.session(peer)] == state[s.session(rank)];
                        same || self.protocol.notice == Notice::Untagged
                    };
                    let told = self.peers(rank).any(|peer| failed(peer) && ours(peer));
                    told && state[s.flags(rank)] & ABORT == 0
                }
                Op::Kernel => false,
                Op::WaitEvent { stream, position } => at((usize::from(stream), position)),
                _ => true,
            };
            if issued && ready {
                add(GO);
            }
            return;
        };
        let waits = match instr.op {
            Op::Enter(kernel) => {
                let kernel = &self.kernels[usize::from(kernel)];
                let launch = &self.agents[kernel.stream].code[usize::from(kernel.item)];
                let here = state[s.pc(kernel.stream)] == kernel.item;
                if here && at((self.hosts[rank], launch.issued)) {
                    add(GO);
                }
                return;
            }
            Op::Post { .. } => {
                let done = state[s.mask(cta)];
                self.peers(rank)
                    .filter(|peer| (done >> (2 * peer)) & 3 < 2)
                    .for_each(|peer| add(u8::try_from(peer).unwrap()));
                return;
            }
            Op::Signal { kernel, .. } => {
                let members = &self.kernels[usize::from(kernel)].members;
                let read = || members.iter().all(|member| at((member.agent, member.has_read)));
                if self.protocol.signal == Signal::EachForItself || read() {
                    add(GO);
                }
                return;
            }
            _ if self.passes_poisoned(state, rank, instr) => {
                add(GO);
                return;
            }
            Op::ReadHeaders => {
                let epoch = self.epoch_of(state, rank, cta);
                let mut missing = false;
                for peer in self.peers(rank).filter(|peer| state[s.mask(cta)] >> peer & 1 == 0) {
                    if state[s.posted(rank, epoch, peer)] >= epoch {
                        add(u8::try_from(peer).unwrap());
                    } else {
                        missing = true;
                    }
                }
                missing
            }
            Op::ReadHeader { target } => {
                let epoch = self.epoch_of(state, rank, cta);
                let missing = state[s.posted(rank, epoch, usize::from(target))] < epoch;
                if !missing {
                    add(target);
                }
                missing
            }
            Op::Wait => {
                let arrived =
                    self.peers(rank).all(|peer| self.surplus(state, rank, cta, peer, instr.call) >= 0);
                if arrived {
                    add(GO);
                }
                !arrived
            }
            _ => {
                add(GO);
                return;
            }
        };
        if waits && state[s.flags(rank)] & ABORT != 0 {
            add(SEE_ABORT);
        }
        let impatient = match self.timeouts {
            Timeouts::Never => false,
            Timeouts::Of(victim) => victim == rank || patience_over,
            Timeouts::Any => true,
        };
        if waits && impatient {
            add(TIME_OUT);
        }
    }

    /// Only under `Poisoned::Signals`: a poisoned kernel waits for nothing.
    fn passes_poisoned(&self, state: &[u8], rank: usize, instr: &Instr) -> bool {
        let waits = matches!(instr.op, Op::ReadHeaders | Op::ReadHeader { .. } | Op::Wait);
        let poisoned = state[self.shape.flags(rank)] & POISON != 0;
        self.protocol.poisoned == Poisoned::Signals && poisoned && waits
    }

    /// Takes a step.
    pub(crate) fn apply(&self, state: &mut [u8], step: Step) -> Result<(), Violation> {
        let agent = usize::from(step.agent);
        let Some(&instr) = self.next(state, agent) else { return Ok(()) };
        if let Role::Cta(cta) = self.agents[agent].role {
            return self.apply_cta(state, agent, cta, instr, step.choice);
        }
        let rank = self.agents[agent].rank;
        let s = &self.shape;
        match instr.op {
            Op::Abort | Op::AbortWhenTold => state[s.flags(rank)] |= ABORT,
            Op::Reset => self.reset(state, rank),
            Op::Consume { place } => self.consume(state, rank, instr.call, place)?,
            Op::Copy { target } if self.copies_run(state, rank) => {
                self.check_input(state, rank, instr.call)?;
                let call = self.call(usize::from(target), instr.call);
                let to = (usize::from(target), call.named.unwrap_or(call.place));
                self.write(state, rank, to, 0, (state[s.epoch(rank)] + 1, instr.call))?;
            }
            Op::Arrive => {
                let flags = &mut state[s.flags(rank)];
                *flags = if *flags & POISON == 0 { *flags | STAGED } else { *flags & !STAGED };
            }
            // The copy stores the staged count, which is the old one again if the call has failed.
            Op::CopyFlag { target } if state[s.flags(rank)] & STAGED != 0 => {
                let epoch = state[s.epoch(rank)] + 1;
                self.signal(state, rank, usize::from(target), (epoch, instr.call))?;
            }
            _ => {}
        }
        state[s.pc(agent)] += 1;
        Ok(())
    }

    fn copies_run(&self, state: &[u8], rank: usize) -> bool {
        self.protocol.copies == Copies::Ungated || state[self.shape.flags(rank)] & POISON == 0
    }

    /// A reader of a result, at any time while it runs: bytes of its call, or of a failed call what failure leaves.
    fn consume(&self, state: &[u8], rank: usize, call: u8, place: u8) -> Result<(), Violation> {
        let s = &self.shape;
        let failed = state[s.failed(rank)];
        let after_failure = failed != 0 && call >= failed;
        for source in 0..self.ranks() {
            for lane in 0..self.lanes(source, rank, call) {
                let found = state[s.cell(rank, usize::from(place), source, usize::from(lane))];
                // A peer that read the header before this rank gave up may still write the bytes it was asked for.
                let right = if after_failure { found == FILL || found == failed } else { found == call };
                self.demand(right, Kind::WrongResult, || {
                    let bytes = bytes_of(found);
                    format!("r{rank} reads the result of call {call} and finds {bytes} from r{source}")
                })?;
            }
        }
        Ok(())
    }

    /// An input that is the result of an earlier call must still be that.
    pub(crate) fn check_input(&self, state: &[u8], rank: usize, call: u8) -> Result<(), Violation> {
        let Some(input) = self.call(rank, call).input else { return Ok(()) };
        let place = match self.protocol.landing {
            Landing::Posted => self.call(rank, input).place,
            Landing::Slots(count) => input % count,
        };
        for source in 0..self.ranks() {
            for lane in 0..self.lanes(source, rank, input) {
                let found = state[self.shape.cell(rank, usize::from(place), source, usize::from(lane))];
                let failed = state[self.shape.failed(rank)];
                self.demand(found == input || failed != 0 && input >= failed, Kind::WrongInput, || {
                    let bytes = bytes_of(found);
                    format!("r{rank} reads its input of call {call}, the result of call {input}, and finds {bytes}")
                })?;
            }
        }
        Ok(())
    }

    /// Zeroes what the rank owns. Stores of peers that come later are what a reset must not allow.
    fn reset(&self, state: &mut [u8], rank: usize) {
        let s = &self.shape;
        for parity in 0..self.protocol.parities {
            for source in 0..self.ranks() {
                state[s.payload(rank, parity, source)] = 0;
                state[s.posted(rank, parity, source)] = 0;
                state[s.arrivals(rank, parity, source)] = 0;
                state[s.expected(rank, parity, source)] = 0;
            }
        }
        for buffer in 0..s.buffers {
            state[s.owner(rank, buffer)] = 0;
        }
        state[s.epoch(rank)] = 0;
        state[s.flags(rank)] = 0;
        state[s.failed(rank)] = 0;
        state[s.session(rank)] += 1;
    }
}

/// What a region holds, in words.
pub(crate) fn bytes_of(cell: u8) -> String {
    match cell {
        0 => "what was never written".into(),
        FILL => "the fill of a failed call".into(),
        call => format!("bytes of call {call}"),
    }
}
