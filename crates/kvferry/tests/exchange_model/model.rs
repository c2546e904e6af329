//! Agents and their programs. A program is straight-line code; a step is one instruction of one agent.

use crate::protocol::{Kind, Protocol, Violation};
use crate::scenario::{Call, Engine, Timeouts, Word};
use crate::state::Shape;

/// One atomic step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    // Host.
    Issue,
    Drop,
    /// Waits for the streams of `Model::syncs[0]`.
    Sync(u8),
    /// Waits for the hosts of `Model::barriers[0]`.
    Barrier(u8),
    Reset,
    // Native thread.
    Abort,
    AbortWhenTold,
    // Stream.
    /// Sits here until the kernel's last CTA has left.
    Kernel,
    Consume {
        place: u8,
    },
    Record,
    WaitEvent {
        stream: u8,
        position: u8,
    },
    Copy {
        target: u8,
    },
    Arrive,
    CopyFlag {
        target: u8,
    },
    // CTA.
    Enter(u8),
    /// Posts this call's header, or with `ahead` the next one's.
    Post {
        ahead: bool,
    },
    ReadHeaders,
    ReadHeader {
        target: u8,
    },
    ReadInput,
    Own {
        lane: u8,
    },
    Push {
        target: u8,
        lane: u8,
    },
    Signal {
        target: u8,
        kernel: u8,
    },
    Wait,
    Bump,
    Leave(u8),
}

/// An instruction: what, for which call of the rank, where to go when the call fails, how far the host must be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instr {
    pub(crate) op: Op,
    pub(crate) call: u8,
    pub(crate) skip: u8,
    pub(crate) issued: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Host,
    Watch,
    Stream,
    /// With the number of its registers.
    Cta(usize),
}

#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) role: Role,
    pub(crate) code: Vec<Instr>,
}

/// A launch: the stream it runs on and its CTAs.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    pub(crate) stream: usize,
    /// Position in that stream.
    pub(crate) item: u8,
    pub(crate) advances: bool,
    pub(crate) members: Vec<Member>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) agent: usize,
    /// Where the CTA stands once it has read all its input.
    pub(crate) has_read: u8,
    /// Its last instruction of this kernel.
    pub(crate) leave: u8,
}

/// A scenario made ready to run.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) protocol: Protocol,
    pub(crate) timeouts: Timeouts,
    pub(crate) ignored: Vec<Kind>,
    pub(crate) reduced: bool,
    pub(crate) shape: Shape,
    pub(crate) agents: Vec<Agent>,
    pub(crate) kernels: Vec<Kernel>,
    /// Per rank, in order; call k is at k - 1.
    pub(crate) calls: Vec<Vec<Call>>,
    /// Per rank and target, unless a call says otherwise.
    pub(crate) lanes_by_rank: Vec<Vec<u8>>,
    pub(crate) hosts: Vec<usize>,
    pub(crate) syncs: Vec<Vec<(usize, u8)>>,
    pub(crate) barriers: Vec<Vec<(usize, u8)>>,
}

/// A step that can be taken: an agent and, where its instruction leaves a choice, which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) agent: u8,
    pub(crate) choice: u8,
}

/// Choices that are not a peer.
pub(crate) const GO: u8 = 0x80;
pub(crate) const TIME_OUT: u8 = 0x81;
pub(crate) const SEE_ABORT: u8 = 0x82;

impl Model {
    pub(crate) fn ranks(&self) -> usize {
        self.shape.ranks
    }

    pub(crate) fn peers(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        (0..self.ranks()).filter(move |&peer| peer != rank)
    }

    /// Lanes, which are arrivals, from one rank to another in a call.
    pub(crate) fn lanes(&self, source: usize, target: usize, call: u8) -> u8 {
        match self.calls[source].get(usize::from(call) - 1) {
            Some(&Call { engine: Engine::Copy, .. }) => 1,
            Some(&Call { lanes: Some(lanes), .. }) if source != target => lanes,
            _ => self.lanes_by_rank[source][target],
        }
    }

    /// The call that `rank` numbers `call`.
    pub(crate) fn call(&self, rank: usize, call: u8) -> &Call {
        &self.calls[rank][usize::from(call) - 1]
    }

    /// The next instruction of an agent.
    pub(crate) fn next(&self, state: &[u8], agent: usize) -> Option<&Instr> {
        self.agents[agent].code.get(usize::from(state[self.shape.pc(agent)]))
    }

    /// Whether the headers of all ranks, taken together, say that this call must not run.
    pub(crate) fn must_refuse(&self, call: u8) -> bool {
        (0..self.ranks()).any(|rank| {
            self.calls[rank].get(usize::from(call) - 1).is_some_and(|call| call.word != Word::Fine)
        })
    }

    /// Everybody but the native threads, which may rest for ever, is done.
    pub(crate) fn is_final(&self, state: &[u8]) -> bool {
        let done = |(at, agent): (usize, &Agent)| {
            agent.role == Role::Watch || usize::from(state[self.shape.pc(at)]) == agent.code.len()
        };
        self.agents.iter().enumerate().all(done)
    }

    /// Reports a broken property, unless this scenario does not look for it.
    pub(crate) fn demand(
        &self,
        holds: bool,
        kind: Kind,
        what: impl FnOnce() -> String,
    ) -> Result<(), Violation> {
        if holds || self.ignored.contains(&kind) { Ok(()) } else { Err(Violation { kind, what: what() }) }
    }
}
