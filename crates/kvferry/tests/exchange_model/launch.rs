//! The programs of a kernel's CTAs.

use std::ops::Range;

use crate::compile::Compiler;
use crate::model::{Kernel, Member, Op};
use crate::protocol::{Bump, Gate, Landing, Post};
use crate::scenario::Call;

/// Parts of a launch, as the kernel's flags.
pub(crate) const POST: u8 = 1;
pub(crate) const WAIT_HEADERS: u8 = 2;
pub(crate) const OWN: u8 = 4;
pub(crate) const PUSH: u8 = 8;
pub(crate) const WAIT_ARRIVALS: u8 = 16;
pub(crate) const ADVANCE: u8 = 32;
pub(crate) const ALL: u8 = 63;

impl Compiler<'_> {
    /// The lanes of a CTA: the own share first, then the others in an order rotated by rank.
    fn lanes_of(&self, number: u8, cta: usize, grid: usize) -> Vec<(usize, u8)> {
        let (rank, world) = (self.rank, self.world);
        let all = (0..world).flat_map(|step| {
            let target = (rank + step) % world;
            (0..self.model.lanes(rank, target, number)).map(move |lane| (target, lane))
        });
        all.skip(cta).step_by(grid).collect()
    }

    pub(crate) fn kernel(&mut self, call: &Call, number: u8, parts: u8, ctas: Range<usize>) {
        let stream = self.streams[usize::from(call.stream)];
        let kernel = u8::try_from(self.model.kernels.len()).unwrap();
        let item = self.position(stream);
        self.emit(stream, Op::Kernel, number);
        let mut members = Vec::new();
        for cta in ctas.clone() {
            let agent = self.ctas[cta];
            let start = self.model.agents[agent].code.len();
            let lanes = self.lanes_of(number, cta - ctas.start, ctas.len());
            let has_read = self.cta(agent, call, number, (parts, kernel), &lanes, cta == ctas.start);
            let leave = self.position(agent) - 1;
            self.model.agents[agent].code[start..].iter_mut().for_each(|instr| instr.skip = leave);
            members.push(Member { agent, has_read, leave });
        }
        self.model.kernels.push(Kernel { stream, item, advances: parts & ADVANCE != 0, members });
    }

    /// The program of one CTA for one kernel; the first does what is done once. Returns where its last read is done.
    fn cta(
        &mut self,
        agent: usize,
        call: &Call,
        number: u8,
        (parts, kernel): (u8, u8),
        lanes: &[(usize, u8)],
        first: bool,
    ) -> u8 {
        let protocol = self.model.protocol;
        let posted = protocol.landing == Landing::Posted;
        let has = |part: u8| parts & part != 0;
        self.emit(agent, Op::Enter(kernel), number);
        if posted && first && has(POST) && (protocol.post != Post::Ahead || number == 1) {
            self.emit(agent, Op::Post { ahead: false }, number);
        }
        let mut read = 0;
        if has(OWN) {
            let rank = self.rank;
            for &(_, lane) in lanes.iter().filter(|lane| lane.0 == rank) {
                if call.input.is_some() {
                    self.emit(agent, Op::ReadInput, number);
                    read = self.position(agent);
                }
                self.emit(agent, Op::Own { lane }, number);
            }
        }
        let away: Vec<(usize, u8)> =
            lanes.iter().copied().filter(|&(target, _)| has(PUSH) && target != self.rank).collect();
        let headers = posted && has(WAIT_HEADERS) && (first || !away.is_empty());
        if headers && protocol.gate == Gate::All {
            self.emit(agent, Op::ReadHeaders, number);
        }
        let mut known = None;
        for (target, lane) in away {
            let target = u8::try_from(target).unwrap();
            if posted && protocol.gate == Gate::Target && known != Some(target) {
                self.emit(agent, Op::ReadHeader { target }, number);
                known = Some(target);
            }
            if call.input.is_some() {
                self.emit(agent, Op::ReadInput, number);
                read = self.position(agent);
            }
            self.emit(agent, Op::Push { target, lane }, number);
            self.emit(agent, Op::Signal { target, kernel }, number);
        }
        if headers && protocol.gate != Gate::All && first {
            self.emit(agent, Op::ReadHeaders, number);
        }
        if first && has(WAIT_ARRIVALS) {
            self.emit(agent, Op::Wait, number);
            if protocol.bump == Bump::Waiter {
                self.emit(agent, Op::Bump, number);
            }
            let more = usize::from(number) < self.model.calls[self.rank].len();
            if posted && protocol.post == Post::Ahead && more {
                self.emit(agent, Op::Post { ahead: true }, number);
            }
        }
        self.emit(agent, Op::Leave(kernel), number);
        read
    }
}
