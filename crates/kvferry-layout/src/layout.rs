//! Layouts: a configuration, a kind, and the view and region table that follow from them.

use crate::arith::{add, mul, round_up};
use crate::axis::{Axis, PerAxis};
use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::kind::{BlockDim, KvOrder, LayoutKind};
use crate::view::{Place, View};

/// Address and length of one region of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionSpan {
    /// First byte.
    pub addr: u64,
    /// Length.
    pub len: u64,
}

/// A contiguous part of a layout, as [`Layout::memory_region`] finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Where it starts.
    pub place: Place,
    /// Its length in bytes.
    pub nbytes: u64,
}

/// An address-free layout.
///
/// ```
/// use kvferry_layout::{Axis, BlockDim, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(64).num_layers(32).outer_dim(2).page_size(16)
///     .num_heads(8).head_dim(128).dtype(Dtype::BFloat16)
///     .build()?;
/// let lw = Layout::layer_separate(cfg, BlockDim::BlockFirst, KvOrder::Nhd)?;
/// assert_eq!((lw.num_regions(), lw.region_bytes()), (32, 64 * 65536));
/// let values = lw.memory_region(3, 7, 1)?;
/// assert_eq!((values.place.region, values.place.offset, values.nbytes), (7, 3 * 65536 + 32768, 32768));
///
/// // What an engine allocated, one array per layer: [outer, block, page, head, dim].
/// let axes = Axis::parse_list("outer block page head dim")?;
/// let arrays: Vec<ForeignArray> = (0..32)
///     .map(|layer| ForeignArray {
///         name: format!("kv_caches[{layer}]"),
///         shape: vec![2, 64, 16, 8, 128],
///         strides: vec![64 * 32768, 32768, 2048, 256, 2],
///     })
///     .collect();
/// let wrapped = Layout::from_arrays(&arrays, &axes, false, Dtype::BFloat16, Some(&cfg))?;
/// let own = Layout::layer_separate(cfg, BlockDim::OuterFirst, KvOrder::Nhd)?;
/// assert_eq!(wrapped.view(), own.view());
/// # Ok::<(), kvferry_layout::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    config: LayoutConfig,
    // As constructed; `config` differs from it after `with_page_size`.
    stored: LayoutConfig,
    kind: LayoutKind,
    view: View,
    num_regions: u64,
}

impl Layout {
    /// One allocation, blocks outermost, each padded to the alignment.
    ///
    /// # Errors
    /// Sizes beyond 63 bits.
    pub fn fully_contiguous(config: LayoutConfig, order: KvOrder) -> Result<Layout, LayoutError> {
        Layout::of_kind(config, LayoutKind::FullyContiguous { order })
    }

    /// One allocation per layer.
    ///
    /// # Errors
    /// A universal order (heads outside layers cannot be cut by layer), or sizes beyond 63 bits.
    pub fn layer_separate(
        config: LayoutConfig,
        block_dim: BlockDim,
        order: KvOrder,
    ) -> Result<Layout, LayoutError> {
        Layout::of_kind(config, LayoutKind::LayerSeparate { block_dim, order })
    }

    /// One allocation per layer and per K or V; regions in order layer 0 K, layer 0 V, layer 1 K, …
    ///
    /// # Errors
    /// A universal order, or sizes beyond 63 bits.
    pub fn split_kv(config: LayoutConfig, order: KvOrder) -> Result<Layout, LayoutError> {
        Layout::of_kind(config, LayoutKind::SplitKv { order })
    }

    /// One allocation per block.
    ///
    /// # Errors
    /// Sizes beyond 63 bits.
    pub fn block_pool(config: LayoutConfig, order: KvOrder) -> Result<Layout, LayoutError> {
        Layout::of_kind(config, LayoutKind::BlockPool { order })
    }

    /// A layout of any kind of our own making.
    ///
    /// # Errors
    /// [`LayoutKind::Strided`] (see [`Layout::from_arrays`]), an order the kind cannot hold, sizes beyond 63 bits.
    pub fn of_kind(config: LayoutConfig, kind: LayoutKind) -> Result<Layout, LayoutError> {
        // (axes outermost first, region axes outermost first, the axis whose stride is padded to the alignment)
        let order = kind.order().ok_or(LayoutError::Missing { field: "order" })?;
        let inside = order.axes();
        let by_layer = matches!(kind, LayoutKind::LayerSeparate { .. } | LayoutKind::SplitKv { .. });
        if by_layer && order == KvOrder::Universal {
            return Err(LayoutError::OrderNotAllowed { kind: kind.name(), order });
        }
        let mut axes = vec![Axis::Block];
        axes.extend(inside);
        let regions: &[Axis] = match kind {
            LayoutKind::FullyContiguous { .. } | LayoutKind::Strided => &[],
            LayoutKind::LayerSeparate { block_dim, .. } => {
                axes.retain(|&axis| axis != Axis::Layer);
                axes.insert(0, Axis::Layer);
                if block_dim == BlockDim::OuterFirst {
                    axes.retain(|&axis| axis != Axis::Outer);
                    axes.insert(1, Axis::Outer);
                }
                &[Axis::Layer]
            }
            LayoutKind::SplitKv { .. } => {
                axes.retain(|&axis| axis != Axis::Layer && axis != Axis::Outer);
                axes.splice(0..0, [Axis::Layer, Axis::Outer]);
                &[Axis::Layer, Axis::Outer]
            }
            LayoutKind::BlockPool { .. } => &[Axis::Block],
        };
        let extents = config.extents();
        let mut strides = PerAxis::splat(0u64);
        let mut step = config.dtype().bytes();
        for &axis in axes.iter().rev().filter(|axis| !regions.contains(axis)) {
            if axis == Axis::Block {
                step = round_up(step, config.alignment(), "block stride")?;
            }
            strides[axis] = step;
            step = mul(step, extents[axis], "bytes of a region")?;
        }
        let region_strides = region_strides(regions, &extents)?;
        let mut listed = [Axis::Block; 6];
        listed.copy_from_slice(&axes);
        Layout::assemble(
            config,
            kind,
            View::new(listed, extents, strides, region_strides, config.dtype().bits())?,
        )
    }

    /// A layout with strides of its own: `order` lists the axes outermost first (for printing and array export),
    /// `region_axes` those that step regions, outermost first. Byte strides of region axes must be 0.
    ///
    /// # Errors
    /// As [`View::new`], and a configuration with an alignment above 1, which strides of one's own do not promise.
    pub fn strided(
        config: LayoutConfig,
        order: [Axis; 6],
        strides: PerAxis<u64>,
        region_axes: &[Axis],
    ) -> Result<Layout, LayoutError> {
        if config.alignment() != 1 {
            return Err(LayoutError::Exclusive { left: "strides of one's own", right: "alignment" });
        }
        let extents = config.extents();
        let region_strides = region_strides(region_axes, &extents)?;
        let view = View::new(order, extents, strides, region_strides, config.dtype().bits())?;
        Layout::assemble(config, LayoutKind::Strided, view)
    }

    fn assemble(config: LayoutConfig, kind: LayoutKind, view: View) -> Result<Layout, LayoutError> {
        let mut num_regions = 1;
        for axis in Axis::ALL.into_iter().filter(|&axis| view.region_stride(axis) != 0) {
            num_regions = mul(num_regions, view.extent(axis), "number of regions")?;
        }
        let view = view.with_origin(Axis::Head, config.first_head())?;
        Ok(Layout { config, stored: config, kind, view, num_regions })
    }

    /// The logical shape.
    pub const fn config(&self) -> &LayoutConfig {
        &self.config
    }

    /// The logical shape as constructed, before [`Layout::with_page_size`].
    pub const fn stored_config(&self) -> &LayoutConfig {
        &self.stored
    }

    /// The kind.
    pub const fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The strided view over all of it.
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// Number of separate allocations.
    pub const fn num_regions(&self) -> u64 {
        self.num_regions
    }

    /// Bytes each region must hold at least; all regions are of one size.
    pub fn region_bytes(&self) -> u64 {
        self.view.region_span()
    }

    /// Bytes of all regions together.
    ///
    /// # Errors
    /// A sum beyond 63 bits.
    pub fn total_bytes(&self) -> Result<u64, LayoutError> {
        mul(self.region_bytes(), self.num_regions, "bytes of all regions")
    }

    /// The contiguous bytes that hold (block, layer, outer).
    ///
    /// # Errors
    /// A coordinate out of range, or a part that is not contiguous (a universal block's layers never are).
    pub fn memory_region(&self, block: u64, layer: u64, outer: u64) -> Result<Part, LayoutError> {
        let mut at = PerAxis::splat(0);
        at[Axis::Block] = block;
        at[Axis::Layer] = layer;
        at[Axis::Outer] = outer;
        let place = self.view.place(at)?;
        let mut inner = [Axis::Page, Axis::Head, Axis::Dim];
        inner.sort_by_key(|&axis| self.view.stride(axis));
        let mut expected = self.view.elem_bytes();
        for axis in inner.into_iter().filter(|&axis| self.view.extent(axis) > 1) {
            let stride = self.view.stride(axis);
            if stride != expected {
                return Err(LayoutError::NotContiguous { block, layer, outer, axis, stride, expected });
            }
            expected *= self.view.extent(axis);
        }
        Ok(Part { place, nbytes: expected })
    }

    /// The same memory re-addressed in pages of `page_size` tokens: `id = parts · block + part`.
    ///
    /// # Errors
    /// `page_size` does not divide this layout's, or there would be more than 2^32 - 1 ids.
    pub fn with_page_size(&self, page_size: u64) -> Result<Layout, LayoutError> {
        let view = self.view.with_page_size(page_size)?;
        if page_size == self.config.page_size() {
            return Ok(self.clone());
        }
        // The alignment was of whole blocks; parts start wherever their first token does.
        let config = self
            .config
            .to_builder()
            .num_blocks(view.extent(Axis::Block))
            .page_size(page_size)
            .alignment(1)
            .build()?;
        Ok(Layout { config, view, ..self.clone() })
    }

    /// Checks that `regions` can hold this layout: their number, lengths and alignment, and that none wraps around.
    ///
    /// # Errors
    /// The first region that does not fit, with its index.
    pub fn check_regions(&self, regions: &[RegionSpan]) -> Result<(), LayoutError> {
        let got = regions.len() as u64;
        if got != self.num_regions {
            return Err(LayoutError::RegionCount { kind: self.kind.name(), expected: self.num_regions, got });
        }
        let needed = self.region_bytes();
        for (index, span) in regions.iter().enumerate() {
            let region = index as u64;
            if span.len < needed {
                return Err(LayoutError::RegionTooSmall { region, needed, got: span.len });
            }
            add(span.addr, span.len, "end of a region")?;
            if !span.addr.is_multiple_of(self.config.alignment()) {
                let alignment = self.config.alignment();
                return Err(LayoutError::Misaligned { region, addr: span.addr, alignment });
            }
        }
        Ok(())
    }
}

fn region_strides(regions: &[Axis], extents: &PerAxis<u64>) -> Result<PerAxis<u64>, LayoutError> {
    let mut strides = PerAxis::splat(0u64);
    let mut step = 1u64;
    for &axis in regions.iter().rev() {
        strides[axis] = step;
        step = mul(step, extents[axis], "number of regions")?;
    }
    Ok(strides)
}
