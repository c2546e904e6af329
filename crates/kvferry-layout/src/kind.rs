//! Layout kinds, block orders and their names.

use std::fmt;
use std::str::FromStr;

use crate::axis::Axis;
use crate::error::LayoutError;

/// Order of the axes inside one block, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// layer, outer, page, head, dim: tokens outside heads (vLLM's common form).
    Nhd,
    /// layer, outer, head, page, dim: heads outside tokens (FlashInfer and others).
    Hnd,
    /// head, layer, outer, page, dim: one head's data in one run, so any tensor-parallel shard is contiguous.
    Universal,
}

impl KvOrder {
    /// Every order.
    pub const ALL: [KvOrder; 3] = [KvOrder::Nhd, KvOrder::Hnd, KvOrder::Universal];

    /// The axes inside a block, outermost first.
    pub const fn axes(self) -> [Axis; 5] {
        match self {
            KvOrder::Nhd => [Axis::Layer, Axis::Outer, Axis::Page, Axis::Head, Axis::Dim],
            KvOrder::Hnd => [Axis::Layer, Axis::Outer, Axis::Head, Axis::Page, Axis::Dim],
            KvOrder::Universal => [Axis::Head, Axis::Layer, Axis::Outer, Axis::Page, Axis::Dim],
        }
    }

    /// The name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            KvOrder::Nhd => "NHD",
            KvOrder::Hnd => "HND",
            KvOrder::Universal => "universal",
        }
    }
}

impl fmt::Display for KvOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvOrder {
    type Err = LayoutError;

    fn from_str(word: &str) -> Result<Self, LayoutError> {
        KvOrder::ALL.into_iter().find(|order| order.name() == word).ok_or_else(|| LayoutError::UnknownWord {
            option: "order",
            allowed: "\"NHD\", \"HND\", \"universal\"",
            value: word.to_owned(),
        })
    }
}

/// Where the block axis stands in a [`LayoutKind::LayerSeparate`] region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockDim {
    /// `[block, outer, …]`: K and V of a block side by side.
    BlockFirst,
    /// `[outer, block, …]`: all K blocks, then all V blocks.
    OuterFirst,
}

impl BlockDim {
    /// The name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            BlockDim::BlockFirst => "block_first",
            BlockDim::OuterFirst => "outer_first",
        }
    }
}

impl fmt::Display for BlockDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BlockDim {
    type Err = LayoutError;

    fn from_str(word: &str) -> Result<Self, LayoutError> {
        [BlockDim::BlockFirst, BlockDim::OuterFirst].into_iter().find(|dim| dim.name() == word).ok_or_else(
            || LayoutError::UnknownWord {
                option: "block_dim",
                allowed: "\"block_first\", \"outer_first\"",
                value: word.to_owned(),
            },
        )
    }
}

/// How a cache is cut into allocations, and the order of its axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayoutKind {
    /// One allocation, block outermost (FC).
    FullyContiguous {
        /// Order inside a block.
        order: KvOrder,
    },
    /// One allocation per layer (LW).
    LayerSeparate {
        /// Place of the block axis.
        block_dim: BlockDim,
        /// Order inside a block; not universal.
        order: KvOrder,
    },
    /// One allocation per layer for K and one for V.
    SplitKv {
        /// Order inside a block; not universal.
        order: KvOrder,
    },
    /// One allocation per block.
    BlockPool {
        /// Order inside a block.
        order: KvOrder,
    },
    /// Foreign memory with declared axes and strides of its own.
    Strided,
}

impl LayoutKind {
    /// Short name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            LayoutKind::FullyContiguous { .. } => "FullyContiguous",
            LayoutKind::LayerSeparate { .. } => "LayerSeparate",
            LayoutKind::SplitKv { .. } => "SplitKv",
            LayoutKind::BlockPool { .. } => "BlockPool",
            LayoutKind::Strided => "Strided",
        }
    }

    /// The block order, where the kind has one.
    pub const fn order(self) -> Option<KvOrder> {
        match self {
            LayoutKind::FullyContiguous { order }
            | LayoutKind::LayerSeparate { order, .. }
            | LayoutKind::SplitKv { order }
            | LayoutKind::BlockPool { order } => Some(order),
            LayoutKind::Strided => None,
        }
    }
}
