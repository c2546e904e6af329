//! The logical shape of a cache: sizes and element type, no strides and no memory.

use crate::arith::{MAX_BYTES, mul};
use crate::axis::{Axis, PerAxis};
use crate::dtype::Dtype;
use crate::error::LayoutError;

/// Largest number of blocks: ids are 32-bit in kernels and plans.
pub const MAX_BLOCKS: u64 = u32::MAX as u64;

/// Largest alignment, 1 GiB.
pub const MAX_ALIGNMENT: u64 = 1 << 30;

/// Logical shape of a KV cache, validated when built.
///
/// A tensor-parallel shard says which of the model's heads it holds
/// ([`shard_heads`](LayoutConfig::shard_heads)); transfers between shards then meet by global head number.
///
/// ```
/// use kvferry_layout::{Dtype, LayoutConfig};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(64).num_layers(32).outer_dim(2).page_size(16)
///     .num_heads(8).head_dim(128).dtype(Dtype::BFloat16)
///     .build()?;
/// assert_eq!(cfg.block_bytes(), 2 << 20);
/// # Ok::<(), kvferry_layout::LayoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutConfig {
    num_blocks: u64,
    num_layers: u64,
    outer_dim: u64,
    page_size: u64,
    num_heads: u64,
    head_dim: u64,
    dtype: Dtype,
    alignment: u64,
    first_head: u64,
    total_heads: u64,
    block_bytes: u64,
}

impl LayoutConfig {
    /// Starts a configuration. Required: blocks, layers, page size, heads × head_dim (or inner_dim), dtype.
    pub fn builder() -> LayoutConfigBuilder {
        LayoutConfigBuilder::default()
    }

    /// A builder holding this configuration's values, to change some of them.
    pub fn to_builder(&self) -> LayoutConfigBuilder {
        LayoutConfigBuilder {
            num_blocks: Some(self.num_blocks),
            num_layers: Some(self.num_layers),
            outer_dim: Some(self.outer_dim),
            page_size: Some(self.page_size),
            num_heads: Some(self.num_heads),
            head_dim: Some(self.head_dim),
            inner_dim: None,
            dtype: Some(self.dtype),
            alignment: Some(self.alignment),
            first_head: Some(self.first_head),
            total_heads: Some(self.total_heads),
        }
    }

    /// Number of blocks.
    pub const fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Number of layers.
    pub const fn num_layers(&self) -> u64 {
        self.num_layers
    }

    /// 2 for K and V, 1 for latent caches.
    pub const fn outer_dim(&self) -> u64 {
        self.outer_dim
    }

    /// Tokens in a block.
    pub const fn page_size(&self) -> u64 {
        self.page_size
    }

    /// KV heads held here (1 when only `inner_dim` was given).
    pub const fn num_heads(&self) -> u64 {
        self.num_heads
    }

    /// Elements in a head row (`inner_dim` when only that was given).
    pub const fn head_dim(&self) -> u64 {
        self.head_dim
    }

    /// Element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes every block starts at a multiple of.
    pub const fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Global number of the first head held here.
    pub const fn first_head(&self) -> u64 {
        self.first_head
    }

    /// Heads of the whole model; equals `num_heads` unless this is a shard.
    pub const fn total_heads(&self) -> u64 {
        self.total_heads
    }

    /// Payload bytes of one head row: head_dim × element width.
    pub const fn row_bytes(&self) -> u64 {
        self.head_dim * self.dtype.bytes()
    }

    /// Payload bytes of one (layer, outer) part of a block.
    pub const fn chunk_bytes(&self) -> u64 {
        self.page_size * self.num_heads * self.row_bytes()
    }

    /// Payload bytes of one block over all layers, without padding.
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Extents by axis.
    pub fn extents(&self) -> PerAxis<u64> {
        PerAxis::from_fn(|axis| match axis {
            Axis::Block => self.num_blocks,
            Axis::Layer => self.num_layers,
            Axis::Outer => self.outer_dim,
            Axis::Page => self.page_size,
            Axis::Head => self.num_heads,
            Axis::Dim => self.head_dim,
        })
    }

    /// The part that tensor-parallel rank `rank` of `world` holds, heads split evenly.
    ///
    /// # Errors
    /// `world` does not divide the heads, or `rank >= world`.
    pub fn shard_heads(&self, rank: u64, world: u64) -> Result<LayoutConfig, LayoutError> {
        if world == 0 || !self.num_heads.is_multiple_of(world) {
            return Err(LayoutError::NotDivisible { what: "num_heads", value: self.num_heads, by: world });
        }
        if rank >= world {
            return Err(LayoutError::Size { field: "rank", value: rank, min: 0, max: world - 1 });
        }
        let heads = self.num_heads / world;
        self.to_builder().num_heads(heads).first_head(self.first_head + rank * heads).build()
    }
}

/// Collects the fields of a [`LayoutConfig`].
#[derive(Clone, Copy, Debug, Default)]
pub struct LayoutConfigBuilder {
    num_blocks: Option<u64>,
    num_layers: Option<u64>,
    outer_dim: Option<u64>,
    page_size: Option<u64>,
    num_heads: Option<u64>,
    head_dim: Option<u64>,
    inner_dim: Option<u64>,
    dtype: Option<Dtype>,
    alignment: Option<u64>,
    first_head: Option<u64>,
    total_heads: Option<u64>,
}

macro_rules! setters {
    ($($field:ident: $ty:ty, $doc:literal;)*) => {
        $(#[doc = $doc]
        #[must_use]
        pub const fn $field(mut self, value: $ty) -> Self {
            self.$field = Some(value);
            self
        })*
    };
}

impl LayoutConfigBuilder {
    setters! {
        num_blocks: u64, "Number of blocks, 1 to 2^32 - 1.";
        num_layers: u64, "Number of layers, at least 1.";
        outer_dim: u64, "2 for K and V (the default), 1 for latent caches such as MLA.";
        page_size: u64, "Tokens in a block, at least 1.";
        num_heads: u64, "KV heads held, at least 1.";
        head_dim: u64, "Elements in one head row, at least 1.";
        inner_dim: u64, "Elements of one token when heads are unknown or there are none: one head of this width.";
        dtype: Dtype, "Element type.";
        alignment: u64, "Alignment of every block in bytes: a power of two up to 1 GiB, default 1.";
        first_head: u64, "Global number of the first head, default 0.";
        total_heads: u64, "Heads of the whole model, default first_head + num_heads.";
    }

    /// Checks everything and builds the configuration.
    ///
    /// # Errors
    /// A missing field, a size out of range, or sizes whose product leaves 63 bits.
    pub fn build(self) -> Result<LayoutConfig, LayoutError> {
        let need = |value: Option<u64>, field| value.ok_or(LayoutError::Missing { field });
        let (num_heads, head_dim) = match (self.inner_dim, self.num_heads, self.head_dim) {
            (Some(_), Some(_), _) => {
                return Err(LayoutError::Exclusive { left: "inner_dim", right: "num_heads" });
            }
            (Some(_), _, Some(_)) => {
                return Err(LayoutError::Exclusive { left: "inner_dim", right: "head_dim" });
            }
            (Some(inner), None, None) => (1, inner),
            (None, heads, dim) => (need(heads, "num_heads")?, need(dim, "head_dim")?),
        };
        let outer_dim = self.outer_dim.unwrap_or(2);
        let alignment = self.alignment.unwrap_or(1);
        let first_head = self.first_head.unwrap_or(0);
        let num_blocks = need(self.num_blocks, "num_blocks")?;
        let num_layers = need(self.num_layers, "num_layers")?;
        let page_size = need(self.page_size, "page_size")?;
        let dtype = self.dtype.ok_or(LayoutError::Missing { field: "dtype" })?;

        let size = |field, value, min, max| {
            if value < min || value > max {
                Err(LayoutError::Size { field, value, min, max })
            } else {
                Ok(())
            }
        };
        size("num_blocks", num_blocks, 1, MAX_BLOCKS)?;
        size("num_layers", num_layers, 1, MAX_BYTES)?;
        size("outer_dim", outer_dim, 1, 2)?;
        size("page_size", page_size, 1, MAX_BYTES)?;
        size("num_heads", num_heads, 1, MAX_BYTES)?;
        size(if self.inner_dim.is_some() { "inner_dim" } else { "head_dim" }, head_dim, 1, MAX_BYTES)?;
        size("alignment", alignment, 1, MAX_ALIGNMENT)?;
        size("first_head", first_head, 0, MAX_BYTES - num_heads)?;
        if !alignment.is_power_of_two() {
            return Err(LayoutError::Alignment { value: alignment });
        }
        let total_heads = self.total_heads.unwrap_or(first_head + num_heads);
        size("total_heads", total_heads, first_head + num_heads, MAX_BYTES)?;

        let row = mul(head_dim, dtype.bytes(), "bytes of a head row")?;
        let token = mul(row, num_heads, "bytes of a token")?;
        let chunk = mul(token, page_size, "bytes of a page")?;
        let layer = mul(chunk, outer_dim, "bytes of a block in one layer")?;
        let block_bytes = mul(layer, num_layers, "bytes of a block")?;
        mul(block_bytes, num_blocks, "bytes of the cache")?;
        Ok(LayoutConfig {
            num_blocks,
            num_layers,
            outer_dim,
            page_size,
            num_heads,
            head_dim,
            dtype,
            alignment,
            first_head,
            total_heads,
            block_bytes,
        })
    }
}
