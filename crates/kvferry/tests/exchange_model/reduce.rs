//! Steps that may be taken at once, before anybody else's, without losing a violation or a deadlock.
//!
//! If an agent's next step is enabled and independent of every step that others can take before it, then any schedule
//! that takes it later can be rearranged to take it now, with the same steps otherwise and the same states at every
//! step that a property looks at: a persistent set of one step (Godefroid; Peled's ample set). Programs are
//! straight-line, so the graph of states has no cycle and no step is put off for ever. Independent here, and no more
//! than this is used:
//!
//! - *Host: issue, drop, a satisfied sync or barrier.* They move the host's own counter, which others only compare with
//!   `>=`. "The host issues as far ahead as it can" therefore covers every slower host: a stream may always be slow.
//! - *Stream: record, a satisfied event wait.* As above.
//! - *Leave of a CTA that is not the last.* It moves the CTA's counter and clears registers that nobody else reads; the
//!   only readers of the counter are the leaves of the same kernel's other CTAs, and whichever comes last does the same.
//!   Not if the waiter advances the epoch or CTAs read it anew: there the order counts.
//!
//! Everything that a property looks at stays a step of its own: start, posts, header reads, input reads, own share,
//! pushes, signals, waits, consumers, the last leave. `reduction.rs` checks that outcomes are the same with and without.

use crate::model::{Agent, GO, Model, Op, Step};
use crate::protocol::{Bump, Latch};

impl Model {
    /// Per agent and instruction: whether it may be taken at once when it is enabled.
    pub(crate) fn at_once(&self) -> Vec<Vec<bool>> {
        let ordered = self.protocol.bump == Bump::Waiter || self.protocol.latch == Latch::EveryUse;
        let commutes = |op: Op| match op {
            Op::Issue | Op::Drop | Op::Sync(_) | Op::Barrier(_) | Op::Record | Op::WaitEvent { .. } => true,
            Op::Leave(_) => !ordered,
            _ => false,
        };
        let of = |agent: &Agent| agent.code.iter().map(|instr| self.reduced && commutes(instr.op)).collect();
        self.agents.iter().map(of).collect()
    }

    /// The first step of `steps` that may be taken alone.
    pub(crate) fn alone(&self, state: &[u8], steps: &[Step], at_once: &[Vec<bool>]) -> Option<Step> {
        steps.iter().copied().find(|step| {
            let agent = usize::from(step.agent);
            let pc = usize::from(state[self.shape.pc(agent)]);
            step.choice == GO && at_once[agent][pc] && !self.is_last_leave(state, agent)
        })
    }

    fn is_last_leave(&self, state: &[u8], agent: usize) -> bool {
        let Some(Op::Leave(kernel)) = self.next(state, agent).map(|instr| instr.op) else { return false };
        let members = &self.kernels[usize::from(kernel)].members;
        members
            .iter()
            .all(|member| member.agent == agent || state[self.shape.pc(member.agent)] > member.leave)
    }
}
