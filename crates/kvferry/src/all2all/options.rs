//! What a caller says about a communicator and about one call.

use std::fmt;
use std::ops::Range;

use kvferry_cuda::StreamHandle;
use kvferry_layout::Dtype;
use kvferry_layout::exchange::{HeadLayout, TensorInput};

use super::result::{Output, ResultShape};
use crate::error::Result;
use crate::memory::Region;

/// Where the ranks of a communicator compute. All ranks say the same kind; the ordinals are each rank's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExchangeDevice {
    /// Host memory, moved by the calling threads.
    Cpu,
    /// Memory of the GPU with this ordinal, as this process counts them.
    Gpu(u32),
}

impl fmt::Display for ExchangeDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExchangeDevice::Cpu => f.write_str("cpu"),
            ExchangeDevice::Gpu(ordinal) => write!(f, "gpu {ordinal}"),
        }
    }
}

/// Who moves the bytes between GPUs. The CPU backend has one engine and ignores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExchangeEngine {
    /// Whatever is measured to be faster for the message.
    #[default]
    Auto,
    /// A kernel that stores into the peers' memory.
    Push,
    /// The copy engines; needs `out`, as the landing place must be known to both hosts.
    Copy,
}

/// A strided array of one rank: batch, tokens, heads, dim, with dim contiguous.
#[derive(Clone, Debug)]
pub struct ExchangeArray {
    /// The memory it lies in.
    pub region: Region,
    /// Bytes from the start of the region to element `[0, 0, 0, 0]`.
    pub offset: u64,
    /// Extents of batch, tokens, heads and dim, in this order whatever the layout.
    pub shape: [u64; 4],
    /// Bytes from one batch entry, token and head to the next.
    pub strides: [i64; 3],
    /// Element type.
    pub dtype: Dtype,
}

impl ExchangeArray {
    /// The array without its memory, as contracts are made of.
    pub fn input(&self) -> TensorInput {
        TensorInput { shape: self.shape, strides: self.strides, dtype: self.dtype }
    }
}

/// Options of one call. The default: as many tokens on every rank, heads split as equally as possible, an owned result.
///
/// Everything but `stream`, `num_sms` and `engine` belongs to the contract of the call: all ranks must say the same.
#[derive(Clone, Debug, Default)]
pub struct CallOptions {
    /// Order of tokens and heads in the results.
    pub layout: HeadLayout,
    /// Tokens of every rank: one list for all tensors, or one per tensor. `None`: as many as mine on every rank.
    pub rank_tokens: Option<Vec<Vec<u64>>>,
    /// `gather_heads`: heads of the whole, per tensor, when they do not divide evenly. `None`: mine times the ranks.
    pub num_heads: Option<Vec<u64>>,
    /// Heads of the query that these tensors belong to, when it is not among them (grouped-query attention).
    pub query_heads: Option<u64>,
    /// Heads of every rank, per tensor, instead of the default split.
    pub head_splits: Option<Vec<Vec<Range<u64>>>>,
    /// Where the results go, from [`All2All::empty_output`](super::All2All::empty_output). `None`: a buffer of the pool.
    pub out: Option<Output>,
    /// CUDA stream of the call. Host calls run on the calling thread and refuse one.
    pub stream: Option<StreamHandle>,
    /// Most CTAs of the kernel.
    pub num_sms: Option<u32>,
    /// Who moves the bytes.
    pub engine: ExchangeEngine,
    /// Whatever else the ranks must agree on, as a number that enters the contract hash; 0: nothing. Python puts here the
    /// element types that have no [`Dtype`](kvferry_layout::Dtype).
    pub kinds: u64,
}

/// Gives one array per result of the same shape, in the order of the results, for a copy of them.
pub type CopyTarget<'a> = dyn FnMut(&[ResultShape]) -> Result<Vec<ExchangeArray>> + 'a;

/// Where a call without `out` puts its results.
#[derive(Default)]
#[non_exhaustive]
pub enum Landing<'a> {
    /// A buffer of the pool; [`Error::Busy`](crate::Error::Busy) when results are held in all of them.
    #[default]
    Pool,
    /// A buffer of the pool, or memory from here when there is no free one: then the results are copied there.
    PoolOrCopy(&'a mut CopyTarget<'a>),
    /// Always copied to memory from here.
    Copy(&'a mut CopyTarget<'a>),
}

impl fmt::Debug for Landing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Landing::Pool => "Pool",
            Landing::PoolOrCopy(_) => "PoolOrCopy",
            Landing::Copy(_) => "Copy",
        })
    }
}
