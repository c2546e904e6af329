//! The exchange plan: which bytes of an all2all call go where, and what its ranks must agree on.
//!
//! Every rank builds a [`Contract`] from what it alone knows (its tensors and the options of the call). Ranks that
//! agree build equal contracts, so one 64-bit [`Contract::hash`] tells whether they do. From the contract come the
//! shapes of every rank's results and, per pair of ranks, the [`Piece`]s: strided boxes that one rank copies into
//! the result of another.
//!
//! [`PairPlan`](crate::PairPlan) is not used here, though the merging is the same idea: its views are caches that are
//! written too (extents of at least one, strides that are positive and never overlap, global coordinates within one
//! layout), while inputs of an exchange may be empty, run backwards or repeat elements.
//!
//! ```
//! use kvferry_layout::{Contract, Dtype, ExchangeOp, ExchangeRequest, HeadLayout, TensorInput};
//! // Rank 0 of two holds 128 of 224 tokens with all 32 heads.
//! let x = TensorInput::contiguous([1, 128, 32, 64], HeadLayout::Bnhd, Dtype::BFloat16)?;
//! let tokens = [vec![128, 96]];
//! let mut request = ExchangeRequest::new(ExchangeOp::SendRecvHeads, 2, 0, std::slice::from_ref(&x));
//! request.rank_tokens = Some(&tokens);
//! let contract = Contract::new(&request)?;
//! assert_eq!(contract.result_shape(1, 0), [1, 224, 16, 64]);
//!
//! // What rank 0 writes into the result of rank 1: per token, the 16 heads of rank 1 in one run.
//! let pieces = contract.pieces(0, 1, &[x.strides]);
//! assert_eq!((pieces.len(), pieces[0].run_bytes, pieces[0].loops[0].count), (1, 16 * 64 * 2, 128));
//! # Ok::<(), kvferry_layout::ExchangeError>(())
//! ```

mod capacity;
mod contract;
mod error;
mod pieces;
mod request;
mod resolve;
mod splits;

pub use capacity::{CapacityRequest, GlobalTensor, capacity_for};
pub use contract::Contract;
pub use error::ExchangeError;
pub use pieces::{Piece, PieceLoop};
pub use request::{ExchangeOp, ExchangeRequest, HeadLayout, TensorInput};
pub use splits::head_ranges;

/// Most ranks of one communicator.
pub const MAX_RANKS: usize = 64;
/// Most tensors of one call.
pub const MAX_TENSORS: usize = 16;
/// Every tensor of a result starts at a multiple of this many bytes from the landing place.
pub const RESULT_ALIGN: u64 = 256;
