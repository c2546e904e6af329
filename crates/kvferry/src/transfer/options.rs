//! What a caller may say about a transfer.

use std::ops::Range;

use kvferry_cuda::{EventHandle, StreamHandle};
use kvferry_layout::{PairRequest, Transform};

use super::completion::TransferCompleteNotification;
use super::strategy::{Engine, TransferStrategy};

/// Something that must have happened before a transfer starts.
#[derive(Clone, Debug)]
pub enum Dependency {
    /// A job is complete. If it fails, the transfer that follows it fails too.
    Job(TransferCompleteNotification),
    /// Everything put on this stream so far is done. The default streams are those of the GPU that carries the transfer:
    /// for a peer copy the destination's.
    Stream(StreamHandle),
    /// Everything put on this stream of this GPU so far is done: says whose default stream is meant.
    StreamOf {
        /// The GPU.
        ordinal: u32,
        /// Its stream.
        stream: StreamHandle,
    },
    /// What this event recorded last is done.
    Event(EventHandle),
}

impl From<TransferCompleteNotification> for Dependency {
    fn from(job: TransferCompleteNotification) -> Self {
        Dependency::Job(job)
    }
}

/// Options of one transfer. The default moves everything, with whatever engine fits, after nothing in particular.
#[derive(Clone, Debug, Default)]
pub struct TransferOptions {
    /// Layers to move; `None` is all.
    pub layers: Option<Range<u64>>,
    /// Heads to move, by global number; `None` is all that both sides hold.
    pub heads: Option<Range<u64>>,
    /// Whether the order of a block's axes may change on the way.
    pub transform: Transform,
    /// Engine to use; `None` lets the planner choose.
    pub engine: Option<Engine>,
    /// Direction to expect; one that contradicts the memory is an error.
    pub strategy: Option<TransferStrategy>,
    /// What must have happened before this transfer starts.
    pub after: Vec<Dependency>,
    /// Report the end of this job to [`crate::TransferContext::completed`] under this number.
    pub tag: Option<u64>,
    /// Copy layer by layer, lowest first, so that the handle can tell of each one
    /// ([`TransferCompleteNotification::layer`]). Runs then end at layers, even where both sides go on.
    pub per_layer: bool,
    /// The CUDA stream to run on, after everything put there before; what is put there later runs after the transfer.
    /// `None` is a stream of the context, ordered after nothing but `after`. GPU transfers only.
    pub stream: Option<StreamHandle>,
    /// Most CTAs of a kernel, one per multiprocessor or fewer; `None` is what the direction needs. GPU transfers only.
    pub num_sms: Option<u32>,
}

impl TransferOptions {
    pub(crate) fn pair_request(&self) -> PairRequest {
        PairRequest { layers: self.layers.clone(), heads: self.heads.clone(), transform: self.transform }
    }
}
