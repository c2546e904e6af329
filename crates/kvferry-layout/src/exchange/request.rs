//! What one rank brings to a call.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::error::ExchangeError;
use crate::arith::{add, mul};
use crate::dtype::Dtype;

/// Order of the token and head axes in memory of contiguous results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum HeadLayout {
    /// Batch, token, head, dim.
    #[default]
    Bnhd,
    /// Batch, head, token, dim.
    Bhnd,
}

impl HeadLayout {
    /// The name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            HeadLayout::Bnhd => "BNHD",
            HeadLayout::Bhnd => "BHND",
        }
    }

    /// Bytes per step of B, N and H of a contiguous tensor of `shape` (B, N, H, D). Extents of zero count as one.
    ///
    /// # Errors
    /// More than 63 bits of bytes.
    pub(crate) fn strides(self, tensor: usize, shape: [u64; 4], es: u64) -> Result<[i64; 3], ExchangeError> {
        let [batch, tokens, heads, dim] = shape.map(|extent| extent.max(1));
        let times = |a, b| mul(a, b, "").map_err(|_| ExchangeError::Overflow { tensor, what: "tensor" });
        let row = times(dim, es)?;
        let (token, head) = match self {
            HeadLayout::Bnhd => (times(row, heads)?, row),
            HeadLayout::Bhnd => (row, times(row, tokens)?),
        };
        let outer = times(times(row, heads)?, tokens)?;
        times(outer, batch)?;
        // `mul` keeps to 63 bits.
        Ok([outer, token, head].map(|stride| stride as i64))
    }
}

impl fmt::Display for HeadLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HeadLayout {
    type Err = ExchangeError;

    fn from_str(name: &str) -> Result<Self, ExchangeError> {
        [HeadLayout::Bnhd, HeadLayout::Bhnd]
            .into_iter()
            .find(|layout| layout.name() == name)
            .ok_or_else(|| ExchangeError::UnknownLayout { name: name.to_owned() })
    }
}

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExchangeOp {
    /// `[B, N_r, H, D]` on rank r becomes `[B, ΣN, heads(r), D]`.
    SendRecvHeads,
    /// The inverse: `[B, ΣN, heads(r), D]` becomes `[B, N_r, H, D]`.
    GatherHeads,
    /// `[B, N_r, H, D]` becomes `[B, ΣN, H, D]` on every rank.
    AllGatherTokens,
    /// `[B, N, heads(r), D]` becomes `[B, N, H, D]` on every rank.
    AllGatherHeads,
}

impl ExchangeOp {
    /// Every operation, in order of its code.
    pub const ALL: [ExchangeOp; 4] = [
        ExchangeOp::SendRecvHeads,
        ExchangeOp::GatherHeads,
        ExchangeOp::AllGatherTokens,
        ExchangeOp::AllGatherHeads,
    ];

    /// The name that messages use.
    pub const fn name(self) -> &'static str {
        match self {
            ExchangeOp::SendRecvHeads => "send_recv_heads",
            ExchangeOp::GatherHeads => "gather_heads",
            ExchangeOp::AllGatherTokens => "allgather_tokens",
            ExchangeOp::AllGatherHeads => "allgather_heads",
        }
    }

    /// A number that stands for the operation in records and hashes, and never changes. None is 0.
    pub const fn code(self) -> u32 {
        match self {
            ExchangeOp::SendRecvHeads => 1,
            ExchangeOp::GatherHeads => 2,
            ExchangeOp::AllGatherTokens => 3,
            ExchangeOp::AllGatherHeads => 4,
        }
    }

    /// The operation of a code.
    pub fn from_code(code: u32) -> Option<ExchangeOp> {
        ExchangeOp::ALL.into_iter().find(|op| op.code() == code)
    }

    /// Whether ranks come with their own heads only, and leave with all.
    pub(crate) const fn joins_heads(self) -> bool {
        matches!(self, ExchangeOp::GatherHeads | ExchangeOp::AllGatherHeads)
    }
}

impl fmt::Display for ExchangeOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor of a call as one rank sees it: its own input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorInput {
    /// Extents of B, N, H and D, in this order whatever the layout.
    pub shape: [u64; 4],
    /// Bytes per step of B, N and H. Elements along D are contiguous. Steps may be negative, zero, or overlap.
    pub strides: [i64; 3],
    /// Element type.
    pub dtype: Dtype,
}

impl TensorInput {
    /// A contiguous tensor of `shape` (B, N, H, D) with its axes in memory as `layout` has them.
    ///
    /// # Errors
    /// [`ExchangeError::Overflow`] for more than 2^63 - 1 bytes.
    pub fn contiguous(shape: [u64; 4], layout: HeadLayout, dtype: Dtype) -> Result<Self, ExchangeError> {
        Ok(TensorInput { shape, strides: layout.strides(0, shape, dtype.bytes())?, dtype })
    }

    /// Every element lies within 63 bits of bytes of the first, so that no offset computed later overflows.
    pub(crate) fn check_span(&self, tensor: usize) -> Result<(), ExchangeError> {
        if self.shape.contains(&0) {
            return Ok(());
        }
        let span = || {
            let mut bytes = mul(self.shape[3], self.dtype.bytes(), "")?;
            for (extent, stride) in self.shape.iter().zip(&self.strides) {
                bytes = add(bytes, mul(extent - 1, stride.unsigned_abs(), "")?, "")?;
            }
            Ok::<u64, crate::error::LayoutError>(bytes)
        };
        span().map(drop).map_err(|_| ExchangeError::Overflow { tensor, what: "span of the input" })
    }
}

/// A call as one rank asks for it, before anything is checked.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeRequest<'a> {
    /// The operation.
    pub op: ExchangeOp,
    /// Order of axes in the results.
    pub layout: HeadLayout,
    /// Number of ranks.
    pub world: usize,
    /// My rank.
    pub rank: usize,
    /// My inputs.
    pub tensors: &'a [TensorInput],
    /// Tokens of every rank: one list for all tensors, or one per tensor. `None`: as many as mine on every rank; for
    /// `gather_heads`, an equal share of my tokens for every rank.
    pub rank_tokens: Option<&'a [Vec<u64>]>,
    /// Heads of all ranks together, per tensor. `None`: those of my input, times the ranks where ranks bring their
    /// own heads (`gather_heads`, `allgather_heads`).
    pub num_heads: Option<&'a [u64]>,
    /// Query heads that KV heads are grouped by. `None`: the largest head count of the call.
    pub query_heads: Option<u64>,
    /// Heads of every rank, per tensor, in place of the default split.
    pub head_splits: Option<&'a [Vec<Range<u64>>]>,
}

impl<'a> ExchangeRequest<'a> {
    /// A call with every option at its default.
    pub const fn new(op: ExchangeOp, world: usize, rank: usize, tensors: &'a [TensorInput]) -> Self {
        ExchangeRequest {
            op,
            layout: HeadLayout::Bnhd,
            world,
            rank,
            tensors,
            rank_tokens: None,
            num_heads: None,
            query_heads: None,
            head_splits: None,
        }
    }
}
