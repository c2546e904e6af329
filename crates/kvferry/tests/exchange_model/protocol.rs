//! What the protocol says, as switches: the default is the protocol that kvferry runs, every other value is a seeded
//! fault or a control.

use std::fmt;

/// The rules of the exchange. `Protocol::default()` is kvferry's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Protocol {
    pub(crate) landing: Landing,
    pub(crate) post: Post,
    pub(crate) gate: Gate,
    pub(crate) latch: Latch,
    pub(crate) bump: Bump,
    pub(crate) signal: Signal,
    pub(crate) stop: Stop,
    pub(crate) refusal: Refusal,
    pub(crate) poisoned: Poisoned,
    pub(crate) copies: Copies,
    pub(crate) fence: Fence,
    pub(crate) notice: Notice,
    /// Header cells and arrival words per pair of ranks; epoch e uses number e mod this.
    pub(crate) parities: u8,
}

/// Where results land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// Where the receiver's header of this epoch says.
    Posted,
    /// In slot e mod n, no headers at all: the protocol of the probes, base of hazards 1, 4 and 6.
    Slots(u8),
}

/// How a header is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Post {
    /// Payload words, then the epoch with release.
    PayloadFirst,
    EpochFirst,
    /// Hazard 57: the header of the next call is posted when a call ends.
    Ahead,
}

/// Which headers a CTA reads before it writes into a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    All,
    /// Hazard 52: only the header of the rank it writes to.
    Target,
    /// Hazard 3: none; the place is known from the call itself (`out=`).
    Nothing,
}

/// Where the epoch of a call comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Latch {
    AtStart,
    /// Hazard 4: read anew at every use.
    EveryUse,
    /// A number passed by value, frozen in a graph (`Call::baked`).
    Baked,
}

/// Who advances the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bump {
    LastCta,
    /// Hazard 4: CTA 0, as soon as its waiting is over.
    Waiter,
}

/// When a CTA signals that its part has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    EachForItself,
    /// Only after every CTA of the grid has read its input (what hazard 6 asks of slots).
    AfterWholeGridRead,
}

/// When a fault that a CTA finds stops CTAs that have not started yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The last CTA to leave sets the poison: all CTAs of a kernel find the same at their start.
    LastCta,
    /// The CTA itself does: then CTA 0 may start after a sibling has read a refusal, and its header is never posted.
    AtOnce,
}

/// What a refused or mismatched call leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Poison,
    /// The call counts as run, later calls go on: only so can hazard 52 be seen in later bytes.
    Continue,
}

/// What kernels of a poisoned rank do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poisoned {
    Silent,
    /// Posts and signals as ever, and pushes nothing.
    Signals,
}

/// Copies by the copy engine after a header kernel that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// They do not run.
    Gated,
    /// They run: a copy in a stream knows no condition.
    Ungated,
}

/// What the host records when a result is dropped; the call that reuses its buffer waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// An event on every stream that used the result.
    EveryStream,
    /// Only on the buffer's home stream.
    HomeStream,
    Nothing,
}

/// What an abort notice from a peer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// It names its session: one of a session that this rank has left is void, one of a session to come waits.
    OfSession,
    Untagged,
}

impl Default for Protocol {
    fn default() -> Protocol {
        Protocol {
            landing: Landing::Posted,
            post: Post::PayloadFirst,
            gate: Gate::All,
            latch: Latch::AtStart,
            bump: Bump::LastCta,
            signal: Signal::EachForItself,
            stop: Stop::LastCta,
            refusal: Refusal::Poison,
            poisoned: Poisoned::Silent,
            copies: Copies::Gated,
            fence: Fence::EveryStream,
            notice: Notice::OfSession,
            parities: 2,
        }
    }
}

impl Protocol {
    /// Alternating slots without headers.
    pub(crate) fn slots(count: u8) -> Protocol {
        Protocol { landing: Landing::Slots(count), ..Protocol::default() }
    }
}

/// Ways in which a schedule can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A consumer reads bytes of another call, or bytes that nobody wrote.
    WrongResult,
    /// A sender reads an input in the pool that is no longer, or not yet, what it was given.
    WrongInput,
    /// A write into memory that its owner has not posted for this epoch.
    WriteUnposted,
    /// A header was overwritten before its receiver was through with it.
    HeaderLost,
    /// A wait for arrivals ended although bytes were missing.
    EarlyWake,
    /// More arrivals than the headers announced: they would satisfy a later wait.
    Overshoot,
    /// A rank judged a call otherwise than its headers, taken together, demand.
    DecidedApart,
    /// Bytes moved to a peer in a call that a rank had refused.
    ByteInRefusedCall,
    /// An arrival was signalled by a rank that had given up in an earlier call.
    SignalAfterAbort,
    /// A rank finished two calls more than another.
    TooFarAhead,
    /// Nobody can move, and not everybody is done.
    Deadlock,
}

/// A broken property.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) kind: Kind,
    pub(crate) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}
