//! Why ranks did not find each other, or could not agree.

use std::io;
use std::time::Duration;

/// Lists ranks for a message: "rank 3", "ranks 0, 2 and 5".
fn ranks(list: &[usize]) -> String {
    match list {
        [] => "no rank".to_owned(),
        [one] => format!("rank {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
    }
}

/// Why ranks did not find each other, or could not agree. Always names whom or what it waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// An address that names no rendezvous.
    #[error("rendezvous {url:?}: {why}")]
    Url {
        /// As given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// A rank or world size outside the limits.
    #[error("{what} must be {expected}, got {value}")]
    Range {
        /// Name of the argument.
        what: &'static str,
        /// What is legal.
        expected: String,
        /// Value given.
        value: usize,
    },
    /// A name, key, value or message over its limit.
    #[error("{what} has {value} bytes, the limit is {limit}")]
    TooLarge {
        /// What is too large.
        what: String,
        /// Its bytes.
        value: usize,
        /// Most bytes it may have.
        limit: usize,
    },
    /// Rank 0 cannot serve the rendezvous: somebody else does already.
    #[error("{address} is in use: another run, or two ranks that both call themselves rank 0")]
    AddressInUse {
        /// Address asked for.
        address: String,
    },
    /// Rank 0 does not serve the rendezvous.
    #[error("rendezvous tcp://{address}: rank 0 does not answer within {:.1} s ({last})", waited.as_secs_f64())]
    Unreachable {
        /// Address asked for.
        address: String,
        /// How long this rank tried.
        waited: Duration,
        /// The last thing that went wrong.
        last: String,
    },
    /// A key that nobody set in time.
    #[error("nobody set {key:?} at the rendezvous within {:.1} s{}", waited.as_secs_f64(), detail(last))]
    RendezvousTimeout {
        /// Key waited for.
        key: String,
        /// How long.
        waited: Duration,
        /// The last thing that went wrong meanwhile.
        last: Option<String>,
    },
    /// Ranks that did not join in time.
    #[error("{} of {world} did not join within {:.1} s{}", ranks(missing), waited.as_secs_f64(), detail(last))]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// Number of ranks there should be.
        world: usize,
        /// How long this rank waited.
        waited: Duration,
        /// The last thing that went wrong meanwhile.
        last: Option<String>,
    },
    /// Ranks that did not take part in a collective step in time.
    #[error("{} did not take part in {what:?} within {:.1} s", ranks(missing), waited.as_secs_f64())]
    GatherTimeout {
        /// Name of the step.
        what: String,
        /// The ranks.
        missing: Vec<usize>,
        /// How long this rank waited.
        waited: Duration,
    },
    /// This rank's wait was interrupted: [`Attend`](super::Attend) gave up.
    #[error("interrupted during {what:?}")]
    Interrupted {
        /// What was waited for.
        what: String,
    },
    /// This rank's communicator was closed or broken while it waited.
    #[error("this rank has abandoned {what:?}")]
    Abandoned {
        /// What was waited for.
        what: String,
    },
    /// The communicator is watched already.
    #[error("the communicator is watched already")]
    Watched,
    /// Two ranks are in different collective steps: their programs have diverged.
    #[error("this rank is in {mine:?}, rank {rank} is in {theirs:?}: the ranks' calls have diverged")]
    Diverged {
        /// The other rank.
        rank: usize,
        /// Step of this rank.
        mine: String,
        /// Step of the other.
        theirs: String,
    },
    /// A rank gave up on a collective step.
    #[error("rank {rank} gave up on {what:?}: {reason}")]
    Withdrawn {
        /// The rank.
        rank: usize,
        /// Name of the step.
        what: String,
        /// Its reason.
        reason: String,
    },
    /// Two processes, or threads, call themselves the same rank.
    #[error("process {pid} joins as rank {rank} too: every rank is to be one process or thread")]
    Duplicate {
        /// The rank: this one's.
        rank: usize,
        /// The other's process.
        pid: u32,
    },
    /// A rank turned this one away.
    #[error("rank {rank} refused the connection: {reason}")]
    PeerRefused {
        /// The rank that refused.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// A rank's process belongs to another user.
    #[error("rank {rank} runs as user {uid}, this rank as user {own}")]
    WrongUser {
        /// The rank.
        rank: usize,
        /// Its user.
        uid: u32,
        /// User of this process.
        own: u32,
    },
    /// A rank failed in a step that all must pass, or contradicts this one.
    #[error("rank {rank}: {reason}")]
    Disagree {
        /// The rank.
        rank: usize,
        /// Its reason.
        reason: String,
    },
    /// A rank's process ended, or its communicator went without a goodbye.
    #[error("rank {rank} (process {pid}) died during {what:?}")]
    PeerDied {
        /// The rank.
        rank: usize,
        /// Its process id, 0 if unknown.
        pid: u32,
        /// Name of the step it was missed in.
        what: String,
    },
    /// A rank closed its communicator.
    #[error("rank {rank} has closed, {what:?} needs it")]
    PeerLeft {
        /// The rank.
        rank: usize,
        /// Name of the step it was missed in.
        what: String,
    },
    /// The rendezvous (a store of the caller's) failed.
    #[error("the rendezvous failed at {key:?}: {reason}")]
    Store {
        /// Key.
        key: String,
        /// What it said.
        reason: String,
    },
    /// The system refused the place where ranks are to meet.
    #[error("rendezvous {place}: {what}: {source}")]
    Place {
        /// Its URL.
        place: String,
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A communicator of another process: its forked parent.
    #[error(transparent)]
    Fork(#[from] kvferry_host::ForkError),
}

impl SetupError {
    /// Wraps the system's error with what was tried.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> SetupError {
        move |source| SetupError::Io { what: what.into(), source }
    }

    /// The same of the place where ranks are to meet.
    pub(crate) fn place(
        place: impl Into<String>,
        what: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> SetupError {
        move |source| SetupError::Place { place: place.into(), what: what.into(), source }
    }
}

fn detail(last: &Option<String>) -> String {
    last.as_ref().map_or_else(String::new, |last| format!(" ({last})"))
}
