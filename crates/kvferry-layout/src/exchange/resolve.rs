//! Settles what a request leaves open: tokens and heads of every rank.

use std::ops::Range;

use super::error::ExchangeError;
use super::request::{ExchangeOp, ExchangeRequest};
use super::splits::{check_splits, default_ranges, even_ranges};
use crate::arith::{add, mul};

/// One axis of one tensor over all ranks.
pub(super) struct Axis {
    pub(super) total: u64,
    pub(super) ranges: Vec<Range<u64>>,
}

/// Tokens of every rank, per tensor. The input of this rank agrees.
pub(super) fn tokens(request: &ExchangeRequest<'_>) -> Result<Vec<Axis>, ExchangeError> {
    let ExchangeRequest { op, world, rank, tensors, rank_tokens, .. } = *request;
    check_rank_tokens(rank_tokens, tensors.len(), world)?;
    let settle = |(tensor, value): (usize, u64)| {
        let Some(list) = list_of(rank_tokens, tensor) else {
            return default_tokens(op, world, tensor, value);
        };
        match op {
            ExchangeOp::AllGatherHeads => same_tokens(tensor, value, list),
            ExchangeOp::GatherHeads => {
                let axis = in_order(tensor, list)?;
                if axis.total != value {
                    return Err(ExchangeError::TotalTokens { tensor, value, expected: axis.total });
                }
                Ok(axis)
            }
            ExchangeOp::SendRecvHeads | ExchangeOp::AllGatherTokens => {
                if list[rank] != value {
                    return Err(ExchangeError::Tokens { tensor, rank, value, expected: list[rank] });
                }
                in_order(tensor, list)
            }
        }
    };
    tensors.iter().map(|input| input.shape[1]).enumerate().map(settle).collect()
}

/// What `rank_tokens=None` means to a rank with `value` tokens.
fn default_tokens(op: ExchangeOp, world: usize, tensor: usize, value: u64) -> Result<Axis, ExchangeError> {
    match op {
        ExchangeOp::AllGatherHeads => Ok(Axis { total: value, ranges: vec![0..value; world] }),
        ExchangeOp::GatherHeads if !value.is_multiple_of(world as u64) => {
            Err(ExchangeError::UnevenTokens { tensor, value, world })
        }
        ExchangeOp::GatherHeads => Ok(Axis { total: value, ranges: even_ranges(value, world) }),
        ExchangeOp::SendRecvHeads | ExchangeOp::AllGatherTokens => in_order(tensor, &vec![value; world]),
    }
}

/// Heads of every rank, per tensor. The input of this rank agrees.
pub(super) fn heads(request: &ExchangeRequest<'_>) -> Result<Vec<Axis>, ExchangeError> {
    let ExchangeRequest { op, world, rank, tensors, num_heads, query_heads, head_splits, .. } = *request;
    let split = HeadSplit { op, world, tensors: tensors.len(), query_heads, head_splits };
    split.check()?;
    if let Some(list) = num_heads {
        per_tensor("num_heads", list.len(), tensors.len())?;
    }
    let mut totals = Vec::with_capacity(tensors.len());
    for (tensor, value) in tensors.iter().map(|input| input.shape[2]).enumerate() {
        let given = num_heads.map(|list| list[tensor]);
        totals.push(match (given, head_splits) {
            (Some(expected), _) if !op.joins_heads() && expected != value => {
                return Err(ExchangeError::NumHeads { tensor, value, expected });
            }
            (Some(given), _) => given,
            (None, _) if !op.joins_heads() => value,
            (None, Some(splits)) => splits[tensor].iter().map(|split| split.end).max().unwrap_or(0),
            (None, None) => mul(value, world as u64, "")
                .map_err(|_| ExchangeError::Overflow { tensor, what: "number of heads" })?,
        });
    }
    // Ranks that all bring as many heads as this one leave nothing to derive, from query heads or otherwise.
    let equal = op.joins_heads() && num_heads.is_none() && query_heads.is_none() && head_splits.is_none();
    let axes = split.settle(&totals, equal)?;
    if op.joins_heads() {
        for (tensor, (input, axis)) in tensors.iter().zip(&axes).enumerate() {
            let share = &axis.ranges[rank];
            let (value, expected) = (input.shape[2], share.end - share.start);
            if value != expected {
                return Err(ExchangeError::Heads { tensor, rank, value, expected });
            }
        }
    }
    Ok(axes)
}

/// The options that say how heads are split.
pub(super) struct HeadSplit<'a> {
    pub(super) op: ExchangeOp,
    pub(super) world: usize,
    pub(super) tensors: usize,
    pub(super) query_heads: Option<u64>,
    pub(super) head_splits: Option<&'a [Vec<Range<u64>>]>,
}

impl HeadSplit<'_> {
    /// Options that fit the operation and each other, with as many entries as they need.
    pub(super) fn check(&self) -> Result<(), ExchangeError> {
        let given =
            [("query_heads", self.query_heads.is_some()), ("head_splits", self.head_splits.is_some())];
        if self.op == ExchangeOp::AllGatherTokens
            && let Some((option, _)) = given.into_iter().find(|(_, given)| *given)
        {
            return Err(ExchangeError::UnusedOption { option, op: self.op });
        }
        let Some(splits) = self.head_splits else { return Ok(()) };
        if self.query_heads.is_some() {
            return Err(ExchangeError::Exclusive { left: "query_heads", right: "head_splits" });
        }
        per_tensor("head_splits", splits.len(), self.tensors)?;
        splits
            .iter()
            .enumerate()
            .try_for_each(|(index, list)| per_rank("head_splits", index, list.len(), self.world))
    }

    /// The heads of every rank, from those of all ranks together. `equal` ranges are all of one length.
    pub(super) fn settle(&self, totals: &[u64], equal: bool) -> Result<Vec<Axis>, ExchangeError> {
        let largest = totals.iter().copied().max().unwrap_or(0);
        let query_heads = self.query_heads.unwrap_or(largest);
        let ranges = |(tensor, &total): (usize, &u64)| {
            if total == 0 {
                return Err(ExchangeError::EmptyAxis { tensor, axis: "heads" });
            }
            let ranges = match self.head_splits {
                _ if self.op == ExchangeOp::AllGatherTokens => vec![0..total; self.world],
                Some(splits) => {
                    check_splits(tensor, total, &splits[tensor])?;
                    splits[tensor].clone()
                }
                None if equal => even_ranges(total, self.world),
                None => default_ranges(tensor, total, self.world, query_heads)?,
            };
            Ok(Axis { total, ranges })
        };
        totals.iter().enumerate().map(ranges).collect()
    }
}

/// One list for all tensors or one per tensor, each with an entry per rank.
pub(super) fn check_rank_tokens(
    lists: Option<&[Vec<u64>]>,
    tensors: usize,
    world: usize,
) -> Result<(), ExchangeError> {
    let Some(lists) = lists else { return Ok(()) };
    if lists.len() != 1 {
        per_tensor("rank_tokens", lists.len(), tensors)?;
    }
    lists.iter().enumerate().try_for_each(|(index, list)| per_rank("rank_tokens", index, list.len(), world))
}

/// The list of a tensor, among lists that were checked.
pub(super) fn list_of(lists: Option<&[Vec<u64>]>, tensor: usize) -> Option<&[u64]> {
    lists.map(|lists| if lists.len() == 1 { &lists[0][..] } else { &lists[tensor][..] })
}

/// Tokens of ranks one after another.
pub(super) fn in_order(tensor: usize, list: &[u64]) -> Result<Axis, ExchangeError> {
    let mut total = 0;
    let mut ranges = Vec::with_capacity(list.len());
    for &tokens in list {
        let end = add(total, tokens, "")
            .map_err(|_| ExchangeError::Overflow { tensor, what: "number of tokens" })?;
        ranges.push(total..end);
        total = end;
    }
    Ok(Axis { total, ranges })
}

/// The same tokens on every rank, where a list says so too.
pub(super) fn same_tokens(tensor: usize, value: u64, list: &[u64]) -> Result<Axis, ExchangeError> {
    match list.iter().position(|&tokens| tokens != value) {
        Some(rank) => Err(ExchangeError::Tokens { tensor, rank, value, expected: list[rank] }),
        None => Ok(Axis { total: value, ranges: vec![0..value; list.len()] }),
    }
}

fn per_tensor(option: &'static str, value: usize, limit: usize) -> Result<(), ExchangeError> {
    if value != limit {
        return Err(ExchangeError::ListCount { option, value, limit });
    }
    Ok(())
}

fn per_rank(option: &'static str, index: usize, value: usize, limit: usize) -> Result<(), ExchangeError> {
    if value != limit {
        return Err(ExchangeError::ListLength { option, index, value, limit });
    }
    Ok(())
}
