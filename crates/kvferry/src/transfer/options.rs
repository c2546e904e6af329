//! What a caller may say about a transfer.

use std::ops::Range;

use kvferry_layout::{PairRequest, Transform};

use super::completion::TransferCompleteNotification;
use super::strategy::{Engine, TransferStrategy};

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
    /// Jobs that must be complete before this one starts. If one fails, this one fails too.
    pub after: Vec<TransferCompleteNotification>,
    /// Report the end of this job to [`crate::TransferContext::completed`] under this number.
    pub tag: Option<u64>,
    /// Copy layer by layer, lowest first, so that the handle can tell of each one
    /// ([`TransferCompleteNotification::layer`]). Runs then end at layers, even where both sides go on.
    pub per_layer: bool,
}

impl TransferOptions {
    pub(crate) fn pair_request(&self) -> PairRequest {
        PairRequest { layers: self.layers.clone(), heads: self.heads.clone(), transform: self.transform }
    }
}
