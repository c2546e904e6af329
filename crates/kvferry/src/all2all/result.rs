//! What a call gives back.

use std::sync::Arc;

use kvferry_cuda::StreamHandle;
use kvferry_layout::Dtype;
use kvferry_layout::exchange::HeadLayout;

use super::options::ExchangeArray;
use super::pool::Lease;
use crate::error::Result;
use crate::memory::Region;

/// Shape and place of one result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultShape {
    /// Bytes from the landing place of the call to element `[0, 0, 0, 0]`.
    pub offset: u64,
    /// Extents of batch, tokens, heads and dim, in this order whatever the layout.
    pub shape: [u64; 4],
    /// Bytes from one batch entry, token and head to the next: contiguous in the call's layout.
    pub strides: [i64; 3],
    /// Element type.
    pub dtype: Dtype,
}

impl ResultShape {
    /// Bytes of the whole, without gaps.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// One result: contiguous in the call's layout, valid for as long as it is held, after `close` too.
///
/// The results of one call share a buffer of the pool, which is used again once all of them are dropped. The bytes are
/// kept by this value, not by the region alone: hold it (or a clone) as long as the bytes are read.
#[derive(Clone, Debug)]
pub struct ExchangeResult {
    /// The memory of this result alone.
    pub(crate) region: Region,
    pub(crate) shape: ResultShape,
    pub(crate) layout: HeadLayout,
    /// `None`: copied to the caller's memory, which `region` keeps.
    pub(crate) lease: Option<Arc<Lease>>,
    /// Bytes from the start of `region`.
    pub(crate) start: u64,
}

impl ExchangeResult {
    /// The memory it lies in, starting at element `[0, 0, 0, 0]` unless the result was copied out.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Bytes from the start of the region to element `[0, 0, 0, 0]`.
    pub fn offset(&self) -> u64 {
        self.start
    }

    /// Extents of batch, tokens, heads and dim.
    pub fn shape(&self) -> [u64; 4] {
        self.shape.shape
    }

    /// Bytes from one batch entry, token and head to the next.
    pub fn strides(&self) -> [i64; 3] {
        self.shape.strides
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.shape.dtype
    }

    /// Order of tokens and heads in memory.
    pub fn layout(&self) -> HeadLayout {
        self.layout
    }

    /// Whether it was copied to memory of the caller's instead of staying in the pool.
    pub fn copied(&self) -> bool {
        self.lease.is_none()
    }

    /// As an input of a further call. The result must be held until that call has read it.
    pub fn array(&self) -> ExchangeArray {
        ExchangeArray {
            region: self.region.clone(),
            offset: self.start,
            shape: self.shape.shape,
            strides: self.shape.strides,
            dtype: self.shape.dtype,
        }
    }

    /// Says that work on `stream` reads this result: its buffer is not written again before that work is done.
    pub fn record_stream(&self, stream: StreamHandle) {
        if let Some(lease) = &self.lease {
            lease.record_stream(stream);
        }
    }
}

/// Memory for the results of calls, known to every rank; made by [`All2All::empty_output`](super::All2All::empty_output).
///
/// It occupies one buffer of the pool until it and every result that lies in it are dropped. A call into it overwrites
/// what the last one put there.
#[derive(Clone, Debug)]
pub struct Output {
    pub(crate) shared: Arc<OutputShared>,
}

#[derive(Debug)]
#[allow(dead_code, reason = "places known to all are for copy engines")]
pub(crate) struct OutputShared {
    /// The same on every rank; part of the contract hash.
    pub(crate) id: u64,
    /// Session it was made in: `reset()` ends it.
    pub(crate) nonce: u64,
    /// Landing places by rank, in bytes from the start of that rank's pool.
    pub(crate) places: Vec<u64>,
    pub(crate) layout: HeadLayout,
    pub(crate) shapes: Vec<ResultShape>,
    pub(crate) lease: Arc<Lease>,
}

impl Output {
    /// Its number, the same on every rank.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// The arrays in it, as results, in order.
    ///
    /// # Errors
    /// None in practice: the places were checked when the output was made.
    pub fn results(&self) -> Result<Vec<ExchangeResult>> {
        let shared = &self.shared;
        shared.lease.results(&shared.shapes, shared.layout)
    }
}
