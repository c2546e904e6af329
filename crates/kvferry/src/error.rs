//! The error type of the crate.

use kvferry_cuda::CudaError;
use kvferry_host::{ForkError, HostMemoryError, RegionError, SharedError};
use kvferry_layout::exchange::ExchangeError;
use kvferry_layout::{LayoutError, PlanError};

use crate::all2all::{ExchangeFailure, SetupError};
use crate::memory::MemoryKind;
use crate::transfer::{TransferFailure, TransferStrategy};
use crate::verify::{GuardBreach, Mismatch};

/// Result of kvferry's own calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong. What is refused is refused before anything moves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A layout cannot be what it claims.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Two layouts, or the ids given with them, cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Host memory could not be had.
    #[error(transparent)]
    HostMemory(#[from] HostMemoryError),
    /// An access left a region of host memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The CUDA driver said no, or is not there.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Regions of one layout lie in different kinds of memory.
    #[error("region {region} lies in {found} memory, the layout in {expected}")]
    MixedMemory {
        /// Region index.
        region: usize,
        /// Its kind.
        found: MemoryKind,
        /// Kind of the layout.
        expected: MemoryKind,
    },
    /// The strategy asked for contradicts the memory kinds.
    #[error("strategy {asked} was asked for, but a copy from {src} to {dst} memory is {derived}")]
    StrategyMismatch {
        /// Strategy given.
        asked: TransferStrategy,
        /// Strategy that follows from the memory.
        derived: TransferStrategy,
        /// Source memory.
        src: MemoryKind,
        /// Destination memory.
        dst: MemoryKind,
    },
    /// The destination's owner lent it for reading only.
    #[error("the destination layout is read-only (region {region})")]
    ReadOnlyDestination {
        /// First read-only region.
        region: usize,
    },
    /// Something kvferry does not do here, by name.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// Why not.
        why: String,
    },
    /// An option with an illegal value.
    #[error("{option} must be {expected}, got {value:?}")]
    InvalidOption {
        /// Option name.
        option: &'static str,
        /// What is legal.
        expected: String,
        /// Value given.
        value: String,
    },
    /// Too much of something is in flight; it works again when jobs have ended.
    #[error("{what} is full: {limit} entries are in flight")]
    Busy {
        /// What is full.
        what: &'static str,
        /// How much it holds.
        limit: u64,
    },
    /// The context has been closed.
    #[error("the transfer context is closed")]
    Closed,
    /// A context made before a fork was used in the child.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// A job failed; its blocks must be taken as not moved.
    #[error(transparent)]
    Transfer(#[from] TransferFailure),
    /// A block does not hold the pattern it should.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// A byte outside the expected blocks was written.
    #[error(transparent)]
    Guard(#[from] GuardBreach),
    /// A wait ran out of time; the job goes on.
    #[error("still not complete after {seconds} s")]
    Timeout {
        /// Seconds waited.
        seconds: f64,
    },
    /// Ranks did not find each other, or could not agree.
    #[error(transparent)]
    Setup(SetupError),
    /// Whoever looks after the waits of an all2all communicator ([`Attend`](crate::all2all::Attend)) gave up in one. The
    /// communicator is broken, or was not made.
    #[error("interrupted in {what}")]
    Interrupted {
        /// What was waited for.
        what: String,
    },
    /// The arguments of an all2all call make no contract.
    #[error(transparent)]
    Contract(#[from] ExchangeError),
    /// The all2all communicator is broken; the same until it is reset.
    #[error(transparent)]
    Exchange(#[from] ExchangeFailure),
    /// A result of a call would not fit its buffer.
    #[error("the result of rank {rank} takes {needed} bytes, the capacity is {capacity}: set capacity_bytes")]
    Capacity {
        /// The rank.
        rank: usize,
        /// Bytes of its result.
        needed: u64,
        /// Bytes of a buffer.
        capacity: u64,
    },
    /// An array of a call that leaves its memory.
    #[error("tensor {tensor} reaches bytes {start}..{end} of a region of {len} bytes")]
    ArrayBounds {
        /// The tensor.
        tensor: usize,
        /// First byte.
        start: i128,
        /// One past the last byte.
        end: i128,
        /// Length of the region.
        len: u64,
    },
    /// The communicator has been closed.
    #[error("the all2all communicator is closed")]
    ExchangeClosed,
    /// Memory shared with other processes could not be had.
    #[error(transparent)]
    Shared(#[from] SharedError),
    /// The system refused to start a thread.
    #[error("cannot start a copy thread: {0}")]
    Thread(#[source] std::io::Error),
}

impl From<SetupError> for Error {
    fn from(error: SetupError) -> Error {
        match error {
            SetupError::Interrupted { what } => Error::Interrupted { what },
            other => Error::Setup(other),
        }
    }
}
