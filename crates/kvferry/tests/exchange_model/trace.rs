//! Steps in words.

use crate::model::{GO, Model, Op, Role, SEE_ABORT, Step, TIME_OUT};
use crate::state::ABORT;

impl Model {
    /// What a step does; nothing for a host's issuing, which would only be noise.
    pub(crate) fn say(&self, state: &[u8], step: Step) -> Option<String> {
        let agent = usize::from(step.agent);
        let instr = self.next(state, agent)?;
        let Step { choice, .. } = step;
        let call = instr.call;
        let what = match instr.op {
            _ if choice == TIME_OUT => format!("waits no longer (call {call}): poison"),
            _ if choice == SEE_ABORT => format!("sees the abort word (call {call}): poison"),
            Op::Issue | Op::Sync(_) | Op::Barrier(_) | Op::Kernel => return None,
            Op::Drop => format!("drops the result of call {call}"),
            Op::Reset => "resets the rank".into(),
            Op::Abort | Op::AbortWhenTold => "sets the abort word".into(),
            Op::Consume { place } => format!("consumes the result of call {call} in buffer {place}"),
            Op::Record => "records an event".into(),
            Op::WaitEvent { stream, .. } => {
                format!("gets past an event of {}", self.agents[usize::from(stream)].name)
            }
            Op::Copy { target } => format!("copies to r{target} (call {call})"),
            Op::Arrive => format!("stages the flags (call {call})"),
            Op::CopyFlag { target } => format!("copies the flag to r{target} (call {call})"),
            Op::Enter(_) => {
                let epoch = state[self.shape.epoch(self.agents[agent].rank)] + 1;
                format!("starts in call {call} and finds epoch {epoch}")
            }
            Op::Post { ahead } => {
                let half = if let Role::Cta(cta) = self.agents[agent].role {
                    (state[self.shape.mask(cta)] >> (2 * choice)) & 3
                } else {
                    0
                };
                let call = call + u8::from(ahead);
                format!("posts half {} of its header of call {call} to r{choice}", half + 1)
            }
            Op::ReadHeaders | Op::ReadHeader { .. } if choice == GO => {
                format!("reads no header (call {call})")
            }
            Op::ReadHeaders | Op::ReadHeader { .. } => {
                format!("reads the header of r{choice} (call {call})")
            }
            Op::ReadInput => format!("reads its input (call {call})"),
            Op::Own { lane } => format!("writes lane {lane} of its own share (call {call})"),
            Op::Push { target, lane } => format!("writes lane {lane} to r{target} (call {call})"),
            Op::Signal { target, .. } => format!("signals r{target} (call {call})"),
            Op::Wait => format!("has all arrivals (call {call})"),
            Op::Bump => format!("advances the epoch (call {call})"),
            Op::Leave(_) => format!("leaves (call {call})"),
        };
        Some(format!("{}: {what}", self.agents[agent].name))
    }

    /// Who waits for what in a deadlock.
    pub(crate) fn stuck(&self, state: &[u8]) -> String {
        let waiting = (0..self.agents.len()).filter_map(|agent| {
            let instr = self.next(state, agent)?;
            let waits = matches!(self.agents[agent].role, Role::Cta(_)) && !matches!(instr.op, Op::Enter(_));
            let aborted = state[self.shape.flags(self.agents[agent].rank)] & ABORT != 0;
            let note = if aborted { ", aborted" } else { "" };
            waits.then(|| {
                format!("{} in call {} at {:?}{note}", self.agents[agent].name, instr.call, instr.op)
            })
        });
        waiting.collect::<Vec<_>>().join("; ")
    }

    /// A step that a native thread may put off for ever.
    pub(crate) fn may_rest(&self, state: &[u8], step: Step) -> bool {
        self.next(state, usize::from(step.agent)).is_some_and(|instr| matches!(instr.op, Op::Abort))
    }
}
