//! Layouts: a configuration, a kind, and the view and region table that follow from them.

use crate::arith::{add, mul, round_up};
use crate::axis::{Axis, PerAxis};
use crate::config::LayoutConfig;
use crate::dtype::Dtype;
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

/// One array of somebody else's memory: shape, byte strides and element type, no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignArray {
    /// Name used in errors, such as `tensors[3]` or a dict key.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Byte strides, one per extent.
    pub strides: Vec<i64>,
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

    /// Foreign arrays as a layout: `axes` names the dimensions of every array, outermost first. Arrays are the
    /// regions: one array, one per layer, or (`split_outer`) K and V of layer 0, K and V of layer 1, …
    ///
    /// An axis that is neither named nor a region axis has extent 1. All arrays must agree in shape and strides.
    /// With `expect`, every extent and the dtype must agree with it.
    ///
    /// # Errors
    /// No array, names that do not match the dimensions, arrays that differ from the first or from `expect`,
    /// strides that are negative or make elements overlap.
    pub fn from_arrays(
        arrays: &[ForeignArray],
        axes: &[Axis],
        split_outer: bool,
        dtype: Dtype,
        expect: Option<&LayoutConfig>,
    ) -> Result<Layout, LayoutError> {
        let kind = LayoutKind::Strided;
        let Some(first) = arrays.first() else {
            return Err(LayoutError::RegionCount { kind: kind.name(), expected: 1, got: 0 });
        };
        let per_layer = if split_outer { 2 } else { 1 };
        if !arrays.len().is_multiple_of(per_layer) {
            return Err(LayoutError::NotDivisible {
                what: "arrays of (K, V) pairs",
                value: arrays.len() as u64,
                by: 2,
            });
        }
        if let Some((_, &axis)) = axes.iter().enumerate().find(|&(index, axis)| axes[..index].contains(axis))
        {
            return Err(LayoutError::AxisTwice { axis });
        }
        let layers = (arrays.len() / per_layer) as u64;
        let regions = foreign_regions(axes, layers, split_outer)?;
        for array in arrays {
            for got in [array.shape.len(), array.strides.len()] {
                if got != axes.len() {
                    return Err(LayoutError::Rank { what: array.name.clone(), got, expected: axes.len() });
                }
            }
            same_geometry(first, array, axes)?;
        }
        let mut extents = PerAxis::splat(1u64);
        let mut strides = PerAxis::splat(0u64);
        for ((&axis, &extent), &stride) in axes.iter().zip(&first.shape).zip(&first.strides) {
            extents[axis] = extent;
            strides[axis] = match u64::try_from(stride) {
                Ok(stride) => stride,
                // NumPy leaves a negative stride on an axis of extent 1 that was flipped; it is never stepped.
                Err(_) if extent == 1 => 0,
                Err(_) => return Err(LayoutError::NegativeStride { what: first.name.clone(), axis, stride }),
            };
        }
        if regions.contains(&Axis::Layer) {
            extents[Axis::Layer] = layers;
        }
        if split_outer {
            extents[Axis::Outer] = 2;
        }
        let mut builder =
            expect.map_or_else(LayoutConfig::builder, |config| config.to_builder().alignment(1));
        builder = builder
            .num_blocks(extents[Axis::Block])
            .num_layers(extents[Axis::Layer])
            .outer_dim(extents[Axis::Outer])
            .page_size(extents[Axis::Page])
            .num_heads(extents[Axis::Head])
            .head_dim(extents[Axis::Dim])
            .dtype(dtype);
        if let Some(config) = expect {
            agree(&first.name, config, &extents, dtype)?;
        }
        let config = builder.build()?;
        let region_strides = region_strides(&regions, &extents)?;
        let mut listed: Vec<Axis> = regions;
        listed.extend(axes);
        listed.extend(Axis::ALL.into_iter().filter(|axis| !listed.contains(axis)).collect::<Vec<_>>());
        let mut order = [Axis::Block; 6];
        order.copy_from_slice(&listed);
        Layout::assemble(config, kind, View::new(order, extents, strides, region_strides, dtype.bits())?)
    }

    fn assemble(config: LayoutConfig, kind: LayoutKind, view: View) -> Result<Layout, LayoutError> {
        let mut num_regions = 1;
        for axis in Axis::ALL.into_iter().filter(|&axis| view.region_stride(axis) != 0) {
            num_regions = mul(num_regions, view.extent(axis), "number of regions")?;
        }
        let view = view.with_origin(Axis::Head, config.first_head())?;
        Ok(Layout { config, kind, view, num_regions })
    }

    /// The logical shape.
    pub const fn config(&self) -> &LayoutConfig {
        &self.config
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
        Ok(Layout { config, kind: self.kind, view, num_regions: self.num_regions })
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

fn foreign_regions(axes: &[Axis], layers: u64, split_outer: bool) -> Result<Vec<Axis>, LayoutError> {
    let mut regions = Vec::new();
    for needed in [Axis::Block, Axis::Dim] {
        if !axes.contains(&needed) {
            return Err(LayoutError::AxisMissing { axis: needed, why: "every array has blocks and rows" });
        }
    }
    if axes.contains(&Axis::Layer) {
        if layers > 1 {
            return Err(LayoutError::Exclusive {
                left: "a list of arrays (one per layer)",
                right: "the axis layer",
            });
        }
    } else {
        regions.push(Axis::Layer);
    }
    if split_outer {
        if axes.contains(&Axis::Outer) {
            return Err(LayoutError::Exclusive { left: "(K, V) pairs", right: "the axis outer" });
        }
        regions.push(Axis::Outer);
    }
    Ok(regions)
}

fn same_geometry(first: &ForeignArray, array: &ForeignArray, axes: &[Axis]) -> Result<(), LayoutError> {
    for (index, &axis) in axes.iter().enumerate() {
        if array.shape[index] != first.shape[index] {
            return Err(LayoutError::ExtentMismatch {
                what: format!("{} differs from {}", array.name, first.name),
                axis,
                got: array.shape[index],
                expected: first.shape[index],
            });
        }
        // The stride of an axis of extent 1 is never used, and frameworks put anything there.
        if first.shape[index] > 1 && array.strides[index] != first.strides[index] {
            return Err(LayoutError::StrideMismatch {
                what: format!("{} differs from {}", array.name, first.name),
                axis,
                got: array.strides[index],
                expected: first.strides[index],
            });
        }
    }
    Ok(())
}

fn agree(name: &str, config: &LayoutConfig, extents: &PerAxis<u64>, dtype: Dtype) -> Result<(), LayoutError> {
    let declared = config.extents();
    for axis in Axis::ALL {
        if extents[axis] != declared[axis] {
            return Err(LayoutError::ExtentMismatch {
                what: format!("{name} against the configuration"),
                axis,
                got: extents[axis],
                expected: declared[axis],
            });
        }
    }
    if dtype != config.dtype() {
        return Err(LayoutError::DtypeMismatch {
            what: name.to_owned(),
            got: dtype,
            expected: config.dtype(),
        });
    }
    Ok(())
}
