//! What a call does, worked out once and kept for the next call that looks the same.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use kvferry_layout::exchange::{
    Contract, ExchangeError, ExchangeOp, ExchangeRequest, HeadLayout, Piece, TensorInput,
};

use super::options::{CallOptions, ExchangeArray};
use super::result::ResultShape;

/// Plans kept. A model has a handful of shapes; a long-lived server with changing token counts must not grow.
const KEPT: usize = 128;

/// A contract and what follows from it on this rank.
pub(crate) struct Plan {
    pub(crate) op: ExchangeOp,
    pub(crate) layout: HeadLayout,
    pub(crate) contract: Contract,
    /// From this rank's inputs into each rank's result, by rank, the own share among them.
    pub(crate) pieces: Vec<Vec<Piece>>,
    /// Bytes from this rank into each rank's result.
    pub(crate) bytes_to: Vec<u64>,
    /// Bytes of each rank's landing place that its results span.
    pub(crate) result_bytes: Vec<u64>,
    /// Results of this rank, by tensor.
    pub(crate) results: Vec<ResultShape>,
    /// Digests of the parts of the contract, for the reason of a mismatch: what is called, shapes, heads.
    pub(crate) digest: [u64; 3],
    /// What the backend derives from it.
    pub(crate) derived: OnceLock<Box<dyn Any + Send + Sync>>,
    key: Key,
}

impl Plan {
    fn new(key: Key, rank: usize, world: usize) -> Result<Plan, ExchangeError> {
        let contract = Contract::new(&ExchangeRequest {
            op: key.op,
            layout: key.layout,
            world,
            rank,
            tensors: &key.tensors,
            rank_tokens: key.rank_tokens.as_deref(),
            num_heads: key.num_heads.as_deref(),
            query_heads: key.query_heads,
            head_splits: key.head_splits.as_deref(),
        })?;
        let strides: Vec<[i64; 3]> = key.tensors.iter().map(|tensor| tensor.strides).collect();
        let results = (0..contract.num_tensors()).map(|tensor| ResultShape {
            offset: contract.result_offset(rank, tensor),
            shape: contract.result_shape(rank, tensor),
            strides: contract.result_strides(rank, tensor),
            dtype: contract.dtype(tensor),
        });
        Ok(Plan {
            op: key.op,
            layout: key.layout,
            pieces: (0..world).map(|peer| contract.pieces(rank, peer, &strides)).collect(),
            bytes_to: (0..world).map(|peer| contract.sent_bytes(rank, peer)).collect(),
            result_bytes: (0..world).map(|peer| contract.result_bytes(peer)).collect(),
            results: results.collect(),
            digest: digest(&contract, &key),
            derived: OnceLock::new(),
            contract,
            key,
        })
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("op", &self.op).field("results", &self.results).finish_non_exhaustive()
    }
}

/// Everything a plan depends on.
#[derive(Debug)]
struct Key {
    quick: u64,
    op: ExchangeOp,
    layout: HeadLayout,
    tensors: Vec<TensorInput>,
    rank_tokens: Option<Vec<Vec<u64>>>,
    num_heads: Option<Vec<u64>>,
    query_heads: Option<u64>,
    head_splits: Option<Vec<Vec<Range<u64>>>>,
}

impl Key {
    fn of(quick: u64, op: ExchangeOp, arrays: &[ExchangeArray], options: &CallOptions) -> Key {
        Key {
            quick,
            op,
            layout: options.layout,
            tensors: arrays.iter().map(ExchangeArray::input).collect(),
            rank_tokens: options.rank_tokens.clone(),
            num_heads: options.num_heads.clone(),
            query_heads: options.query_heads,
            head_splits: options.head_splits.clone(),
        }
    }

    fn is(&self, op: ExchangeOp, arrays: &[ExchangeArray], options: &CallOptions) -> bool {
        let same = |(array, tensor): (&ExchangeArray, &TensorInput)| {
            array.shape == tensor.shape && array.strides == tensor.strides && array.dtype == tensor.dtype
        };
        self.op == op
            && self.layout == options.layout
            && self.tensors.len() == arrays.len()
            && arrays.iter().zip(&self.tensors).all(same)
            && self.rank_tokens == options.rank_tokens
            && self.num_heads == options.num_heads
            && self.query_heads == options.query_heads
            && self.head_splits == options.head_splits
    }
}

/// Plans by what was called, most recently used first.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    plans: VecDeque<Arc<Plan>>,
}

impl PlanCache {
    /// The plan of a call.
    ///
    /// # Errors
    /// A contract that cannot be made.
    pub(crate) fn get(
        &mut self,
        op: ExchangeOp,
        arrays: &[ExchangeArray],
        options: &CallOptions,
        (rank, world): (usize, usize),
    ) -> Result<Arc<Plan>, ExchangeError> {
        let quick = quick(op, arrays, options);
        let found =
            self.plans.iter().position(|plan| plan.key.quick == quick && plan.key.is(op, arrays, options));
        if let Some(index) = found {
            if index > 0
                && let Some(plan) = self.plans.remove(index)
            {
                self.plans.push_front(plan);
            }
            if let Some(plan) = self.plans.front() {
                return Ok(Arc::clone(plan));
            }
        }
        let plan = Arc::new(Plan::new(Key::of(quick, op, arrays, options), rank, world)?);
        self.plans.truncate(KEPT - 1);
        self.plans.push_front(Arc::clone(&plan));
        Ok(plan)
    }
}

/// Folds words into one: cheap, and only ever used to tell most different things apart.
#[derive(Clone, Copy)]
struct Fold(u64);

impl Fold {
    fn word(self, word: u64) -> Fold {
        Fold((self.0.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    fn words(self, words: impl IntoIterator<Item = u64>) -> Fold {
        words.into_iter().fold(self, Fold::word)
    }

    fn end(self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
}

fn quick(op: ExchangeOp, arrays: &[ExchangeArray], options: &CallOptions) -> u64 {
    let mut fold =
        Fold(u64::from(op.code())).word(options.layout as u64).word(options.query_heads.unwrap_or(0));
    for array in arrays {
        fold =
            fold.words(array.shape).words(array.strides.map(|stride| stride as u64)).word(array.dtype as u64);
    }
    for tokens in options.rank_tokens.iter().flatten() {
        fold = fold.words(tokens.iter().copied());
    }
    fold.words(options.num_heads.iter().flatten().copied()).end()
}

/// Digests of the three parts of a contract that users get wrong, equal on ranks that agree.
fn digest(contract: &Contract, key: &Key) -> [u64; 3] {
    let world = contract.world();
    let start = Fold(0x6B76_6665_7272_7921);
    let mut called =
        start.word(key.op.code().into()).word(key.layout as u64).word(contract.num_tensors() as u64);
    let (mut shapes, mut heads) = (start, start);
    for tensor in 0..contract.num_tensors() {
        called = called.word(contract.dtype(tensor) as u64);
        for rank in 0..world {
            shapes = shapes.words(contract.input_shape(rank, tensor));
            let range = contract.head_range(tensor, rank);
            heads = heads.word(range.start).word(range.end);
        }
    }
    [called.end(), shapes.end(), heads.end()]
}

/// What two digests differ in.
pub(crate) fn difference(mine: [u64; 3], theirs: [u64; 3]) -> &'static str {
    if mine[0] != theirs[0] {
        "operation, number of tensors, dtype or layout"
    } else if mine[1] != theirs[1] {
        "shapes or token counts"
    } else if mine[2] != theirs[2] {
        "the split of heads"
    } else {
        "the output, or the session"
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvferry_host::{HostBuffer, HostOptions, HostRegion};
    use kvferry_layout::Dtype;

    use super::*;
    use crate::memory::Region;

    fn array(tokens: u64) -> ExchangeArray {
        let buffer = HostBuffer::new(4096, HostOptions::default()).unwrap();
        ExchangeArray {
            region: Region::Host(HostRegion::of_buffer(Arc::new(buffer))),
            offset: 0,
            shape: [1, tokens, 4, 2],
            strides: [(tokens * 16) as i64, 16, 4],
            dtype: Dtype::Float16,
        }
    }

    #[test]
    fn a_call_that_looks_the_same_has_the_same_plan() {
        let mut cache = PlanCache::default();
        let options = CallOptions::default();
        let mut get =
            |tokens, options: &CallOptions, op| cache.get(op, &[array(tokens)], options, (0, 2)).unwrap();
        let send = ExchangeOp::SendRecvHeads;
        let first = get(3, &options, send);
        assert!(Arc::ptr_eq(&first, &get(3, &options, send)));
        assert!(!Arc::ptr_eq(&first, &get(4, &options, send)));
        assert!(!Arc::ptr_eq(&first, &get(3, &options, ExchangeOp::AllGatherTokens)));
        let other = CallOptions { head_splits: Some(vec![vec![0..3, 3..4]]), ..CallOptions::default() };
        assert!(!Arc::ptr_eq(&first, &get(3, &other, send)));
        assert!(Arc::ptr_eq(&first, &get(3, &options, send)));
        // Used now and then, it outlasts any number of others.
        for tokens in 0..3 * KEPT as u64 {
            get(10 + tokens, &options, send);
            assert!(Arc::ptr_eq(&first, &get(3, &options, send)));
        }
        assert_eq!(cache.plans.len(), KEPT);
    }

    #[test]
    fn a_refused_call_leaves_nothing() {
        let mut cache = PlanCache::default();
        let options = CallOptions { rank_tokens: Some(vec![vec![9, 9]]), ..CallOptions::default() };
        assert!(cache.get(ExchangeOp::SendRecvHeads, &[array(3)], &options, (0, 2)).is_err());
        assert!(cache.plans.is_empty());
    }

    #[test]
    fn a_difference_is_named() {
        assert!(difference([1, 2, 3], [0, 2, 3]).contains("dtype"));
        assert!(difference([1, 2, 3], [1, 0, 0]).contains("shapes"));
        assert!(difference([1, 2, 3], [1, 2, 0]).contains("heads"));
        assert!(difference([1, 2, 3], [1, 2, 3]).contains("output"));
    }
}
