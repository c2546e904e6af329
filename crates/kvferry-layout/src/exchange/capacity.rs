//! How large a pool must be, from global shapes alone.

use std::ops::Range;

use super::contract::{Contract, Tensor, check_count};
use super::error::ExchangeError;
use super::request::{ExchangeOp, HeadLayout};
use super::resolve::{Axis, HeadSplit, check_rank_tokens, in_order, list_of, same_tokens};
use super::splits::{check_world, even_ranges};
use crate::dtype::Dtype;

/// A tensor over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GlobalTensor {
    /// Batch, tokens of all ranks together (of each, for `allgather_heads`), heads of all ranks together, dim.
    pub shape: [u64; 4],
    /// Element type.
    pub dtype: Dtype,
}

/// A call as it looks from outside, for [`capacity_for`]. Options are those of
/// [`ExchangeRequest`](super::ExchangeRequest).
#[derive(Clone, Copy, Debug)]
pub struct CapacityRequest<'a> {
    /// The operation.
    pub op: ExchangeOp,
    /// Number of ranks.
    pub world: usize,
    /// The tensors of one call.
    pub tensors: &'a [GlobalTensor],
    /// Tokens of every rank. `None`: as equal as possible.
    pub rank_tokens: Option<&'a [Vec<u64>]>,
    /// Query heads that KV heads are grouped by.
    pub query_heads: Option<u64>,
    /// Heads of every rank, in place of the default split.
    pub head_splits: Option<&'a [Vec<Range<u64>>]>,
}

impl<'a> CapacityRequest<'a> {
    /// A call with every option at its default.
    pub const fn new(op: ExchangeOp, world: usize, tensors: &'a [GlobalTensor]) -> Self {
        CapacityRequest { op, world, tensors, rank_tokens: None, query_heads: None, head_splits: None }
    }
}

/// Bytes of the largest result of a call on any rank: [`Contract::largest_result`] without the inputs.
///
/// ```
/// use kvferry_layout::{CapacityRequest, Dtype, ExchangeOp, GlobalTensor, capacity_for};
/// // 30 heads over 4 ranks: the first two get 8.
/// let x = [GlobalTensor { shape: [1, 4096, 30, 128], dtype: Dtype::BFloat16 }];
/// let request = CapacityRequest::new(ExchangeOp::SendRecvHeads, 4, &x);
/// assert_eq!(capacity_for(&request)?, 4096 * 8 * 128 * 2);
/// # Ok::<(), kvferry_layout::ExchangeError>(())
/// ```
///
/// # Errors
/// Those of [`Contract::new`], where they concern more than one rank's input.
pub fn capacity_for(request: &CapacityRequest<'_>) -> Result<u64, ExchangeError> {
    let CapacityRequest { op, world, tensors, rank_tokens, query_heads, head_splits } = *request;
    check_world(world)?;
    check_count(tensors.len())?;
    check_rank_tokens(rank_tokens, tensors.len(), world)?;
    let split = HeadSplit { op, world, tensors: tensors.len(), query_heads, head_splits };
    split.check()?;
    let totals: Vec<u64> = tensors.iter().map(|tensor| tensor.shape[2]).collect();
    let heads = split.settle(&totals, false)?;
    let mut settled = Vec::with_capacity(tensors.len());
    for (index, (tensor, heads)) in tensors.iter().zip(heads).enumerate() {
        let [batch, total, _, dim] = tensor.shape;
        let tokens = match (op, list_of(rank_tokens, index)) {
            (ExchangeOp::AllGatherHeads, Some(list)) => same_tokens(index, total, list)?,
            (ExchangeOp::AllGatherHeads, None) => Axis { total, ranges: vec![0..total; world] },
            (_, None) => Axis { total, ranges: even_ranges(total, world) },
            (_, Some(list)) => in_order(index, list)?,
        };
        if tokens.total != total {
            return Err(ExchangeError::TotalTokens { tensor: index, value: total, expected: tokens.total });
        }
        settled.push(Tensor {
            batch,
            dim,
            dtype: tensor.dtype,
            tokens: total,
            heads: heads.total,
            token_ranges: tokens.ranges,
            head_ranges: heads.ranges,
        });
    }
    Ok(Contract::of(op, HeadLayout::Bnhd, world, settled)?.largest_result())
}
