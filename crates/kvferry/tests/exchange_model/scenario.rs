//! What the hosts do: their calls, consumers, drops, in issue order.

use crate::protocol::{Kind, Protocol};

/// How a call's bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// One kernel does it all.
    Push,
    /// A kernel of one CTA posts and waits for the headers, then the push kernel.
    HeaderKernelFirst,
    /// Header kernel, own share by a kernel, copies and flags on the copy stream, then a kernel that waits.
    Copy,
}

/// What a rank's header says about the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Fine,
    /// This rank's own arguments were refused.
    Refused,
    /// The same, but nobody is told: the rank leaves the call (hazard 12).
    Unsaid,
    /// This rank's contract differs from that of the others.
    Mismatched,
}

/// One call of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) stream: u8,
    /// Buffer of the own pool in which the result lands.
    pub(crate) place: u8,
    /// The call whose result is the input; `None`: memory outside the pool.
    pub(crate) input: Option<u8>,
    pub(crate) engine: Engine,
    pub(crate) word: Word,
    /// Lanes to each peer in this call; `None`: as `Rank::lanes` says.
    pub(crate) lanes: Option<u8>,
    /// The epoch frozen in the launch, for `Latch::Baked`.
    pub(crate) baked: Option<u8>,
    /// The place that others take for the landing place, if it is not the right one: a header posted ahead of its call
    /// (`Post::Ahead`), or copies to a rank that has passed another `out=`.
    pub(crate) named: Option<u8>,
}

impl Call {
    pub(crate) fn to(place: u8) -> Call {
        Call {
            stream: 0,
            place,
            input: None,
            engine: Engine::Push,
            word: Word::Fine,
            lanes: None,
            baked: None,
            named: None,
        }
    }
    pub(crate) fn on(self, stream: u8) -> Call {
        Call { stream, ..self }
    }
    pub(crate) fn of(self, call: u8) -> Call {
        Call { input: Some(call), ..self }
    }
    pub(crate) fn by(self, engine: Engine) -> Call {
        Call { engine, ..self }
    }
    pub(crate) fn lanes(self, lanes: u8) -> Call {
        Call { lanes: Some(lanes), ..self }
    }
    pub(crate) fn word(self, word: Word) -> Call {
        Call { word, ..self }
    }
}

/// One thing that a host does. Calls are numbered from 1 per rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    Call(Call),
    /// Enqueues a reader of the result of `call` on `stream`, which waits for that call if it ran elsewhere.
    Consume {
        call: u8,
        stream: u8,
    },
    Drop {
        call: u8,
    },
    /// Waits until everything issued so far has run.
    Sync,
    /// Waits until all hosts are here.
    Barrier,
    /// Zeroes the own control words, epoch, poison and abort word.
    Reset,
}

/// A rank's native thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    Absent,
    /// Sets the abort word at any time.
    AbortsAnyTime,
    /// Sets it at some time after another rank has failed or been aborted.
    AbortsWhenTold,
}

/// One rank.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) grid: u8,
    /// Lanes, which are arrivals, per target (the own rank included).
    pub(crate) lanes: Vec<u8>,
    pub(crate) acts: Vec<Act>,
    pub(crate) watch: Watch,
}

impl Rank {
    pub(crate) fn new(grid: u8, world: usize) -> Rank {
        Rank { grid, lanes: vec![1; world], acts: Vec::new(), watch: Watch::Absent }
    }
    pub(crate) fn lanes(mut self, target: usize, count: u8) -> Rank {
        self.lanes[target] = count;
        self
    }
    pub(crate) fn watch(mut self, watch: Watch) -> Rank {
        self.watch = watch;
        self
    }
    pub(crate) fn call(mut self, call: Call) -> Rank {
        self.acts.push(Act::Call(call));
        self
    }
    pub(crate) fn consume(mut self, call: u8) -> Rank {
        self.acts.push(Act::Consume { call, stream: 0 });
        self
    }
    pub(crate) fn consume_on(mut self, call: u8, stream: u8) -> Rank {
        self.acts.push(Act::Consume { call, stream });
        self
    }
    pub(crate) fn drop(mut self, call: u8) -> Rank {
        self.acts.push(Act::Drop { call });
        self
    }
    pub(crate) fn then(mut self, act: Act) -> Rank {
        self.acts.push(act);
        self
    }

    /// Call, read, drop, for each place in turn: results are used at once.
    pub(crate) fn each(mut self, calls: impl IntoIterator<Item = Call>) -> Rank {
        for call in calls {
            let number = self.count() + 1;
            self = self.call(call).consume(number).drop(number);
        }
        self
    }

    pub(crate) fn count(&self) -> u8 {
        self.acts.iter().map(|act| u8::from(matches!(act, Act::Call(_)))).sum()
    }
}

/// When a wait may end for want of patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timeouts {
    Never,
    /// At any time on this rank; elsewhere only when nobody can move.
    Of(usize),
    /// At any time on every rank.
    Any,
}

/// A protocol, what the hosts do with it, and what to look for.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) protocol: Protocol,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) timeouts: Timeouts,
    /// Kinds of violation that are not looked for, so that a fault's later harm can be shown.
    pub(crate) ignored: Vec<Kind>,
    /// Runs steps that commute with all others at once (see `reduce.rs`).
    pub(crate) reduced: bool,
}

impl Scenario {
    pub(crate) fn new(name: impl Into<String>, ranks: Vec<Rank>) -> Scenario {
        let protocol = Protocol::default();
        Scenario {
            name: name.into(),
            protocol,
            ranks,
            timeouts: Timeouts::Never,
            ignored: Vec::new(),
            reduced: true,
        }
    }
    pub(crate) fn under(mut self, protocol: Protocol) -> Scenario {
        self.protocol = protocol;
        self
    }
    pub(crate) fn timeouts(mut self, timeouts: Timeouts) -> Scenario {
        self.timeouts = timeouts;
        self
    }
    pub(crate) fn ignoring(mut self, kinds: &[Kind]) -> Scenario {
        self.ignored = kinds.to_vec();
        self
    }
    pub(crate) fn unreduced(mut self) -> Scenario {
        self.reduced = false;
        self
    }
}
