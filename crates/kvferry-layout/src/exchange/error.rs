//! Calls that are refused: what, where, how much.

use super::request::ExchangeOp;

/// A call that no contract can be made for. Tensors and ranks are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// Number of ranks out of range.
    #[error("world size must be between 1 and {limit}, got {value}")]
    World {
        /// Value given.
        value: usize,
        /// Largest legal value.
        limit: usize,
    },
    /// A rank outside the world.
    #[error("rank {value} is out of range: there are {limit} ranks")]
    Rank {
        /// Value given.
        value: usize,
        /// Number of ranks.
        limit: usize,
    },
    /// No tensors, or too many.
    #[error("a call takes between 1 and {limit} tensors, got {value}")]
    TensorCount {
        /// Tensors given.
        value: usize,
        /// Largest legal number.
        limit: usize,
    },
    /// An axis that must not be empty.
    #[error("tensor {tensor}: {axis} must be at least 1, got 0")]
    EmptyAxis {
        /// Tensor.
        tensor: usize,
        /// Name of the axis.
        axis: &'static str,
    },
    /// An option with another number of entries than there are tensors.
    #[error("{option} has {value} entries for {limit} tensors")]
    ListCount {
        /// Option name.
        option: &'static str,
        /// Entries given.
        value: usize,
        /// Entries needed: one per tensor.
        limit: usize,
    },
    /// A list with another number of entries than there are ranks.
    #[error("{option}[{index}] has {value} entries for {limit} ranks")]
    ListLength {
        /// Option name.
        option: &'static str,
        /// Which of its lists.
        index: usize,
        /// Entries given.
        value: usize,
        /// Entries needed: one per rank.
        limit: usize,
    },
    /// An option that the operation has no use for.
    #[error("{op} does not take {option}")]
    UnusedOption {
        /// Option name.
        option: &'static str,
        /// The operation.
        op: ExchangeOp,
    },
    /// Two options that exclude each other.
    #[error("{left} and {right} exclude each other")]
    Exclusive {
        /// First option.
        left: &'static str,
        /// Second option.
        right: &'static str,
    },
    /// The tokens of an input are not what `rank_tokens` says.
    #[error("tensor {tensor} has {value} tokens, but rank_tokens of rank {rank} is {expected}")]
    Tokens {
        /// Tensor.
        tensor: usize,
        /// Rank whose entry disagrees.
        rank: usize,
        /// Tokens of the input.
        value: u64,
        /// Tokens declared.
        expected: u64,
    },
    /// The tokens of all ranks together are not those of the input.
    #[error("tensor {tensor} has {value} tokens, but rank_tokens sum to {expected}")]
    TotalTokens {
        /// Tensor.
        tensor: usize,
        /// Tokens of the input.
        value: u64,
        /// Sum declared.
        expected: u64,
    },
    /// Tokens that do not divide among the ranks, and no `rank_tokens`.
    #[error("tensor {tensor}: {value} tokens do not divide among {world} ranks: give rank_tokens")]
    UnevenTokens {
        /// Tensor.
        tensor: usize,
        /// Tokens of the input.
        value: u64,
        /// Number of ranks.
        world: usize,
    },
    /// The heads of an input are not this rank's share.
    #[error("tensor {tensor} has {value} heads, but the share of rank {rank} is {expected}")]
    Heads {
        /// Tensor.
        tensor: usize,
        /// This rank.
        rank: usize,
        /// Heads of the input.
        value: u64,
        /// Heads of its share.
        expected: u64,
    },
    /// An input that holds all heads has another number of them than `num_heads` says.
    #[error("tensor {tensor} has {value} heads, but num_heads is {expected}")]
    NumHeads {
        /// Tensor.
        tensor: usize,
        /// Heads of the input.
        value: u64,
        /// Heads declared.
        expected: u64,
    },
    /// Fewer query heads than a tensor has heads.
    #[error("query_heads is {value}, but tensor {tensor} has {limit} heads")]
    QueryHeads {
        /// Tensor.
        tensor: usize,
        /// Query heads given.
        value: u64,
        /// Heads of the tensor.
        limit: u64,
    },
    /// KV heads that do not divide the query heads.
    #[error(
        "tensor {tensor}: {heads} heads do not divide the {query_heads} query heads into groups: give head_splits"
    )]
    NotGrouped {
        /// Tensor.
        tensor: usize,
        /// Its heads.
        heads: u64,
        /// Query heads.
        query_heads: u64,
    },
    /// A rank's query heads cut through a group, without lying inside it.
    #[error(
        "tensor {tensor}: query heads {start}..{end} of rank {rank} cut through groups of {group}: give head_splits"
    )]
    GroupCut {
        /// Tensor of KV heads.
        tensor: usize,
        /// First rank concerned.
        rank: usize,
        /// First query head of the rank.
        start: u64,
        /// End of its query heads.
        end: u64,
        /// Query heads per KV head.
        group: u64,
    },
    /// Fewer heads than ranks, and no whole number of ranks per head.
    #[error(
        "tensor {tensor}: {heads} heads cannot be shared evenly by {world} ranks: give query_heads or head_splits"
    )]
    FewHeads {
        /// Tensor.
        tensor: usize,
        /// Its heads.
        heads: u64,
        /// Number of ranks.
        world: usize,
    },
    /// A reversed split, or one beyond the heads.
    #[error("head_splits[{tensor}][{rank}] is {start}..{end}, which is not a part of 0..{limit}")]
    Split {
        /// Tensor.
        tensor: usize,
        /// Rank.
        rank: usize,
        /// Start given.
        start: u64,
        /// End given.
        end: u64,
        /// Number of heads.
        limit: u64,
    },
    /// Splits that leave out a head.
    #[error("head_splits[{tensor}] give head {head} of {limit} to no rank")]
    SplitGap {
        /// Tensor.
        tensor: usize,
        /// First head left out.
        head: u64,
        /// Number of heads.
        limit: u64,
    },
    /// Sizes beyond 63 bits.
    #[error("tensor {tensor}: {what} exceeds the addressable 2^63 - 1")]
    Overflow {
        /// Tensor.
        tensor: usize,
        /// Quantity that overflowed.
        what: &'static str,
    },
    /// Unknown layout name.
    #[error("unknown layout {name:?}; known: BNHD, BHND")]
    UnknownLayout {
        /// Name given.
        name: String,
    },
}
