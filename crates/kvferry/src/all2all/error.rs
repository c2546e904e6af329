//! Why a communicator stopped working.

use std::fmt;
use std::time::Duration;

use kvferry_layout::exchange::ExchangeOp;

/// When something happened: in which call, or after which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct When {
    /// Number of the call, from 1; 0 before the first.
    pub epoch: u64,
    /// The operation, if a call was running.
    pub op: Option<ExchangeOp>,
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Some(op) => write!(f, "in {op}, call {}", self.epoch),
            None => write!(f, "outside calls, after call {}", self.epoch),
        }
    }
}

/// What broke a communicator. Every later call, `check()` and `close()` raise it again, until `reset()`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeFailure {
    /// The ranks do not mean the same call, or one of them refused its arguments. No byte was moved.
    #[error("rank {rank} broke the contract ({when}): {reason}")]
    Mismatch {
        /// The rank that refused, or that differs from the others.
        rank: usize,
        /// What is known of it.
        reason: String,
        /// The call.
        when: When,
    },
    /// A rank did not come in time.
    #[error("rank {peer} did not arrive {} ({when})", within(*waited))]
    PeerTimeout {
        /// The rank waited for.
        peer: usize,
        /// How long it was waited for; zero if another rank told of it.
        waited: Duration,
        /// The call.
        when: When,
    },
    /// A rank's process ended, or its thread, without closing.
    #[error("rank {peer} (process {pid}) died ({when})")]
    PeerDied {
        /// The rank.
        peer: usize,
        /// Its process.
        pid: u32,
        /// The call.
        when: When,
    },
    /// A rank has closed its communicator while this one still calls.
    #[error("rank {peer} (process {pid}) has closed its communicator ({when})")]
    PeerClosed {
        /// The rank.
        peer: usize,
        /// Its process.
        pid: u32,
        /// The call.
        when: When,
    },
    /// Somebody called `abort()`.
    #[error("rank {rank} aborted ({when}): {reason}")]
    Aborted {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
        /// The call.
        when: When,
    },
    /// A rank's wait was interrupted, such as by Ctrl-C.
    #[error("rank {rank} was interrupted ({when})")]
    Interrupted {
        /// The rank.
        rank: usize,
        /// The call.
        when: When,
    },
    /// A rank's device or system refused in the middle of a call.
    #[error("rank {rank} failed ({when}): {reason}")]
    Failed {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
        /// The call.
        when: When,
    },
}

fn within(waited: Duration) -> String {
    if waited.is_zero() { "in time".to_owned() } else { format!("within {:.3} s", waited.as_secs_f64()) }
}

/// What ended a call inside a backend, before the communicator knows the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: FaultKind,
    /// The rank concerned.
    pub(crate) peer: usize,
    pub(crate) epoch: u64,
    pub(crate) op: Option<ExchangeOp>,
}

/// As the records of the kernels tell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// No header within the time.
    HeaderTimeout { waited: Duration },
    /// Fewer arrivals than announced within the time.
    ArrivalTimeout { waited: Duration },
    /// Contract hashes differ; `reason` says in what, if that is known.
    Mismatch { reason: String },
    /// A header carried a verdict.
    Refused { code: u64 },
    /// A landing place outside its pool.
    BadPlace { place: u64 },
    /// The abort word was set: the communicator knows why.
    Aborted,
    /// Whoever looks after the waits of this rank has given up.
    Interrupted,
    /// The peer closed and its header is missing.
    PeerLeft,
    /// The device or the system said no.
    Failed { reason: String },
}
