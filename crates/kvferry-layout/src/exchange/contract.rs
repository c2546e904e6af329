//! What all ranks of a call must agree on.

use std::ops::Range;

use super::error::ExchangeError;
use super::request::{ExchangeOp, ExchangeRequest, HeadLayout};
use super::resolve;
use super::splits::check_world;
use super::{MAX_TENSORS, RESULT_ALIGN};
use crate::arith::{add, round_up};
use crate::dtype::Dtype;

/// First word of every hashed contract: change it with the encoding.
const ENCODING: u64 = u64::from_le_bytes(*b"kvfx0001");

/// One tensor of a contract, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) batch: u64,
    pub(super) dim: u64,
    pub(super) dtype: Dtype,
    /// Tokens of all ranks together (of any one rank, where all have the same tokens).
    pub(super) tokens: u64,
    pub(super) heads: u64,
    pub(super) token_ranges: Vec<Range<u64>>,
    pub(super) head_ranges: Vec<Range<u64>>,
}

/// What all ranks of a call must agree on: operation, layout, element types, shapes, tokens and heads of every rank.
///
/// No rank and no strides are in it: each rank makes it from its own inputs, and two ranks that agree make equal ones.
/// All sizes have been checked to fit 63 bits. Methods panic, as slices do, when a rank or tensor is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contract {
    op: ExchangeOp,
    layout: HeadLayout,
    world: usize,
    tensors: Vec<Tensor>,
    /// Hash of all the above.
    digest: u64,
}

impl Contract {
    /// Checks a request and settles everything it leaves open. Takes microseconds: worth keeping for equal requests.
    ///
    /// # Errors
    /// The first argument that is refused, with its index, value and limit.
    pub fn new(request: &ExchangeRequest<'_>) -> Result<Contract, ExchangeError> {
        let ExchangeRequest { op, layout, world, rank, tensors: inputs, .. } = *request;
        check_world(world)?;
        if rank >= world {
            return Err(ExchangeError::Rank { value: rank, limit: world });
        }
        check_count(inputs.len())?;
        let tokens = resolve::tokens(request)?;
        let heads = resolve::heads(request)?;
        let tensors = inputs.iter().zip(tokens).zip(heads).map(|((input, tokens), heads)| Tensor {
            batch: input.shape[0],
            dim: input.shape[3],
            dtype: input.dtype,
            tokens: tokens.total,
            heads: heads.total,
            token_ranges: tokens.ranges,
            head_ranges: heads.ranges,
        });
        let contract = Contract::of(op, layout, world, tensors.collect())?;
        for (tensor, input) in inputs.iter().enumerate() {
            input.check_span(tensor)?;
        }
        Ok(contract)
    }

    /// A contract of settled parts: checks sizes only.
    pub(super) fn of(
        op: ExchangeOp,
        layout: HeadLayout,
        world: usize,
        tensors: Vec<Tensor>,
    ) -> Result<Contract, ExchangeError> {
        for (index, tensor) in tensors.iter().enumerate() {
            for (axis, extent) in [("batch", tensor.batch), ("heads", tensor.heads), ("dim", tensor.dim)] {
                if extent == 0 {
                    return Err(ExchangeError::EmptyAxis { tensor: index, axis });
                }
            }
            // All tokens with all heads bound every input and every result of this tensor.
            let whole = [tensor.batch, tensor.tokens, tensor.heads, tensor.dim];
            layout.strides(index, whole, tensor.dtype.bytes())?;
        }
        let mut contract = Contract { op, layout, world, tensors, digest: 0 };
        for rank in 0..world {
            let mut end = 0;
            for tensor in 0..contract.tensors.len() {
                end = round_up(end, RESULT_ALIGN, "")
                    .and_then(|at| add(at, contract.tensor_result_bytes(rank, tensor), ""))
                    .map_err(|_| ExchangeError::Overflow { tensor, what: "result" })?;
            }
        }
        contract.digest = contract.encode();
        Ok(contract)
    }

    /// A 64-bit hash of the contract with the nonce of its communicator and the id of its output (0 without `out=`).
    /// Equal on all ranks that agree; differs, but for chance, on any that do not.
    pub fn hash(&self, nonce: u64, out_id: u64) -> u64 {
        let mut bytes = [0; 24];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip([self.digest, nonce, out_id]) {
            *to = word.to_le_bytes();
        }
        twox_hash::XxHash3_64::oneshot(&bytes)
    }

    /// Canonical: lists have their lengths in front or are `world` long, so no two contracts encode alike.
    fn encode(&self) -> u64 {
        let mut bytes = Vec::with_capacity(32 + self.tensors.len() * (64 + 24 * self.world));
        let mut word = |value: u64| bytes.extend_from_slice(&value.to_le_bytes());
        for value in [
            ENCODING,
            self.op.code().into(),
            u64::from(self.layout == HeadLayout::Bhnd),
            self.world as u64,
            self.tensors.len() as u64,
        ] {
            word(value);
        }
        for tensor in &self.tensors {
            let name = tensor.dtype.name().as_bytes();
            word(name.len() as u64);
            name.iter().for_each(|&byte| word(byte.into()));
            for value in [tensor.batch, tensor.tokens, tensor.heads, tensor.dim] {
                word(value);
            }
            for range in tensor.token_ranges.iter().chain(&tensor.head_ranges) {
                word(range.start);
                word(range.end);
            }
        }
        twox_hash::XxHash3_64::oneshot(&bytes)
    }

    /// The operation.
    pub const fn op(&self) -> ExchangeOp {
        self.op
    }

    /// Order of axes in the results.
    pub const fn layout(&self) -> HeadLayout {
        self.layout
    }

    /// Number of ranks.
    pub const fn world(&self) -> usize {
        self.world
    }

    /// Number of tensors.
    pub const fn num_tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Batch size of a tensor.
    pub fn batch(&self, tensor: usize) -> u64 {
        self.tensors[tensor].batch
    }

    /// Extent of D of a tensor.
    pub fn head_dim(&self, tensor: usize) -> u64 {
        self.tensors[tensor].dim
    }

    /// Element type of a tensor.
    pub fn dtype(&self, tensor: usize) -> Dtype {
        self.tensors[tensor].dtype
    }

    /// Heads of a tensor over all ranks, each counted once.
    pub fn num_heads(&self, tensor: usize) -> u64 {
        self.tensors[tensor].heads
    }

    /// Tokens of a tensor over all ranks; for `allgather_heads`, where all ranks have the same tokens, of one.
    pub fn total_tokens(&self, tensor: usize) -> u64 {
        self.tensors[tensor].tokens
    }

    /// Heads of a rank. All of them for `allgather_tokens`.
    pub fn head_range(&self, tensor: usize, rank: usize) -> Range<u64> {
        self.tensors[tensor].head_ranges[rank].clone()
    }

    /// Tokens of a rank. All of them for `allgather_heads`.
    pub fn token_range(&self, tensor: usize, rank: usize) -> Range<u64> {
        self.tensors[tensor].token_ranges[rank].clone()
    }

    /// Extents of B, N, H, D of what a rank brings.
    pub fn input_shape(&self, rank: usize, tensor: usize) -> [u64; 4] {
        let (all, mine) = self.extents(rank, tensor);
        match self.op {
            ExchangeOp::SendRecvHeads | ExchangeOp::AllGatherTokens => self.shape(tensor, mine.0, all.1),
            ExchangeOp::GatherHeads | ExchangeOp::AllGatherHeads => self.shape(tensor, all.0, mine.1),
        }
    }

    /// Extents of B, N, H, D of what a rank gets.
    pub fn result_shape(&self, rank: usize, tensor: usize) -> [u64; 4] {
        let (all, mine) = self.extents(rank, tensor);
        match self.op {
            ExchangeOp::SendRecvHeads => self.shape(tensor, all.0, mine.1),
            ExchangeOp::GatherHeads => self.shape(tensor, mine.0, all.1),
            ExchangeOp::AllGatherTokens | ExchangeOp::AllGatherHeads => self.shape(tensor, all.0, all.1),
        }
    }

    /// Bytes per step of B, N, H of what a rank gets: contiguous in the layout of the contract.
    pub fn result_strides(&self, rank: usize, tensor: usize) -> [i64; 3] {
        let shape = self.result_shape(rank, tensor);
        let es = self.tensors[tensor].dtype.bytes();
        // Bounded by the strides of the whole tensor, which `of` has computed.
        self.layout.strides(tensor, shape, es).unwrap_or([0; 3])
    }

    /// Where a tensor of a rank's result begins, in bytes from its landing place: a multiple of [`RESULT_ALIGN`].
    pub fn result_offset(&self, rank: usize, tensor: usize) -> u64 {
        (0..tensor).fold(0, |at, before| {
            (at + self.tensor_result_bytes(rank, before)).next_multiple_of(RESULT_ALIGN)
        })
    }

    /// Bytes of a rank's result, from its landing place to the end of the last tensor.
    pub fn result_bytes(&self, rank: usize) -> u64 {
        let last = self.tensors.len() - 1;
        self.result_offset(rank, last) + self.tensor_result_bytes(rank, last)
    }

    /// Bytes of the largest result of any rank: what every pool must hold.
    pub fn largest_result(&self) -> u64 {
        (0..self.world).map(|rank| self.result_bytes(rank)).max().unwrap_or(0)
    }

    /// Bytes that go from one rank to another (or to itself).
    pub fn sent_bytes(&self, from: usize, to: usize) -> u64 {
        (0..self.tensors.len())
            .map(|tensor| {
                let heads: u64 = self.head_spans(tensor, from, to).iter().map(|span| span.count).sum();
                let tokens = self.token_span(tensor, from, to).count;
                self.batch(tensor) * tokens * heads * self.row_bytes(tensor)
            })
            .sum()
    }

    pub(super) fn head_ranges_of(&self, tensor: usize) -> &[Range<u64>] {
        &self.tensors[tensor].head_ranges
    }

    /// Bytes of one head of one token.
    pub(super) fn row_bytes(&self, tensor: usize) -> u64 {
        self.tensors[tensor].dim * self.tensors[tensor].dtype.bytes()
    }

    fn tensor_result_bytes(&self, rank: usize, tensor: usize) -> u64 {
        self.result_shape(rank, tensor).iter().product::<u64>() * self.tensors[tensor].dtype.bytes()
    }

    /// (tokens, heads) of all ranks, and of one.
    fn extents(&self, rank: usize, tensor: usize) -> ((u64, u64), (u64, u64)) {
        let tensor = &self.tensors[tensor];
        let length = |range: &Range<u64>| range.end - range.start;
        let mine = (length(&tensor.token_ranges[rank]), length(&tensor.head_ranges[rank]));
        ((tensor.tokens, tensor.heads), mine)
    }

    fn shape(&self, tensor: usize, tokens: u64, heads: u64) -> [u64; 4] {
        [self.tensors[tensor].batch, tokens, heads, self.tensors[tensor].dim]
    }
}

pub(super) fn check_count(tensors: usize) -> Result<(), ExchangeError> {
    if tensors == 0 || tensors > MAX_TENSORS {
        return Err(ExchangeError::TensorCount { value: tensors, limit: MAX_TENSORS });
    }
    Ok(())
}
