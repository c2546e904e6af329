//! Strided views: named axes, extents, byte strides, and a table of regions.
//!
//! A view is free of addresses. A place in it is a region index and a byte offset; whoever owns the memory binds
//! region indexes to base addresses. The *region axes* step the region index instead of the offset: none (one
//! allocation), layer, layer and outer, or block.

use std::ops::Range;

use crate::arith::{MAX_BYTES, add, mul};
use crate::axis::{Axis, PerAxis};
use crate::error::LayoutError;

/// A byte position: which region, and how far into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Index into the region table.
    pub region: u64,
    /// Byte offset inside the region.
    pub offset: u64,
}

/// How block ids become places: `id = parts · group + part`, so a 64-token block read as 16-token pages has four parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockStep {
    /// Ids per stored block.
    pub parts: u64,
    /// Bytes from one part to the next.
    pub part_stride: u64,
    /// Bytes from one stored block to the next.
    pub stride: u64,
    /// Regions from one stored block to the next.
    pub region_stride: u64,
}

impl BlockStep {
    /// Where block `id` starts, relative to block 0.
    #[inline]
    pub fn place(&self, id: u64) -> Place {
        if self.parts == 1 {
            return Place { region: id * self.region_stride, offset: id * self.stride };
        }
        let (group, part) = (id / self.parts, id % self.parts);
        Place { region: group * self.region_stride, offset: group * self.stride + part * self.part_stride }
    }

    /// Whether block `id + 1` starts `bytes` after block `id` in the same region.
    #[inline]
    pub fn follows(&self, id: u64, bytes: u64) -> bool {
        if self.parts == 1 || (id + 1).is_multiple_of(self.parts) {
            let last = (self.parts - 1) * self.part_stride;
            self.region_stride == 0 && self.stride == last + bytes
        } else {
            self.part_stride == bytes
        }
    }
}

/// Named axes over strided memory.
///
/// Invariants, checked by every constructor: extents ≥ 1; every offset of every element fits 63 bits; no two
/// elements share a byte.
///
/// ```
/// use kvferry_layout::{Axis, Dtype, KvOrder, Layout, LayoutConfig, PerAxis};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(10).num_layers(4).page_size(64).num_heads(8).head_dim(128).dtype(Dtype::Float16)
///     .build()?;
/// let layout = Layout::fully_contiguous(cfg, KvOrder::Hnd)?;
/// // Heads 4..6 of layers 1..3, read in 16-token pages: ids 0..40, four to a block.
/// let part = layout.view().with_page_size(16)?.slice(Axis::Layer, 1..3)?.slice(Axis::Head, 4..6)?;
/// assert_eq!((part.extent(Axis::Block), part.extent(Axis::Page)), (40, 16));
///
/// let mut at = PerAxis::splat(0);
/// at[Axis::Block] = 7; // block 1, tokens 48..64
/// let place = part.place(at)?;
/// assert_eq!(place.offset, cfg.block_bytes() + 2 * cfg.chunk_bytes() + (4 * 64 + 48) * cfg.row_bytes());
/// # Ok::<(), kvferry_layout::LayoutError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    order: [Axis; 6],
    extents: PerAxis<u64>,
    strides: PerAxis<u64>,
    region_strides: PerAxis<u64>,
    origins: PerAxis<u64>,
    start: Place,
    block_parts: u64,
    part_stride: u64,
    elem_bits: u32,
}

impl View {
    /// A view from extents and byte strides. `order` lists the axes outermost first and only serves printing and
    /// array export. Block, layer and outer may be region axes; those have byte stride 0.
    ///
    /// # Errors
    /// Zero extents, offsets beyond 63 bits, elements that share bytes, an axis named twice, a page, head or dim
    /// axis over regions, an axis that steps both bytes and regions.
    pub fn new(
        order: [Axis; 6],
        extents: PerAxis<u64>,
        strides: PerAxis<u64>,
        region_strides: PerAxis<u64>,
        elem_bits: u32,
    ) -> Result<View, LayoutError> {
        for (index, axis) in order.iter().enumerate() {
            if order[..index].contains(axis) {
                return Err(LayoutError::AxisTwice { axis: *axis });
            }
        }
        if elem_bits == 0 || !elem_bits.is_multiple_of(8) {
            return Err(LayoutError::NotDivisible {
                what: "element width in bits",
                value: elem_bits.into(),
                by: 8,
            });
        }
        let view = View {
            order,
            extents,
            strides,
            region_strides,
            origins: PerAxis::splat(0),
            start: Place { region: 0, offset: 0 },
            block_parts: 1,
            part_stride: 0,
            elem_bits,
        };
        view.check()?;
        Ok(view)
    }

    fn check(&self) -> Result<(), LayoutError> {
        for axis in Axis::ALL {
            if self.extents[axis] == 0 {
                return Err(LayoutError::Size { field: axis.name(), value: 0, min: 1, max: MAX_BYTES });
            }
            if self.region_strides[axis] == 0 {
                continue;
            }
            // Parts of a block are stepped in bytes, so its tokens must lie in one region.
            if matches!(axis, Axis::Page | Axis::Head | Axis::Dim) {
                return Err(LayoutError::Exclusive {
                    left: "the axes page, head and dim",
                    right: "region strides",
                });
            }
            if self.strides[axis] != 0 {
                return Err(LayoutError::Exclusive {
                    left: "a byte stride",
                    right: "a region stride of the same axis",
                });
            }
        }
        self.check_regions()?;
        // Sorted by stride, every axis must step past all that the axes inside it reach. Sufficient, and what every
        // real cache satisfies; interleavings that happen not to collide are refused with the rest.
        let mut by_stride: Vec<(Axis, u64, u64)> = Axis::ALL
            .into_iter()
            .filter(|&axis| self.extents[axis] > 1 && self.region_strides[axis] == 0)
            .map(|axis| (axis, self.extents[axis], self.strides[axis]))
            .collect();
        by_stride.sort_by_key(|&(_, _, stride)| stride);
        let mut span = self.elem_bytes();
        for (axis, extent, stride) in by_stride {
            if stride < span {
                return Err(LayoutError::AxesOverlap { axis, stride, span });
            }
            span = add(span, mul(extent - 1, stride, "span of a region")?, "span of a region")?;
        }
        Ok(())
    }

    /// No two coordinates of the region axes may meet in one region: the rule of `check`, in regions.
    fn check_regions(&self) -> Result<(), LayoutError> {
        let mut regions: Vec<(u64, u64)> = Axis::ALL
            .into_iter()
            .filter(|&axis| self.extents[axis] > 1 && self.region_strides[axis] != 0)
            .map(|axis| (self.region_strides[axis], self.extents[axis]))
            .collect();
        regions.sort_unstable();
        let mut span = 1;
        for (stride, extent) in regions {
            if stride < span {
                return Err(LayoutError::Size {
                    field: "region stride",
                    value: stride,
                    min: span,
                    max: MAX_BYTES,
                });
            }
            span = add(span, mul(extent - 1, stride, "number of regions")?, "number of regions")?;
        }
        Ok(())
    }

    /// Axes outermost first, as declared.
    pub const fn order(&self) -> [Axis; 6] {
        self.order
    }

    /// Number of coordinates on `axis`.
    pub fn extent(&self, axis: Axis) -> u64 {
        self.extents[axis]
    }

    /// Byte stride of `axis`; 0 on region axes. For a block axis with parts, the stride between stored blocks.
    pub fn stride(&self, axis: Axis) -> u64 {
        self.strides[axis]
    }

    /// Regions stepped per coordinate of `axis`; 0 where the axis stays inside a region.
    pub fn region_stride(&self, axis: Axis) -> u64 {
        self.region_strides[axis]
    }

    /// Global number of coordinate 0 on `axis` (heads of a shard; sliced layers).
    pub fn origin(&self, axis: Axis) -> u64 {
        self.origins[axis]
    }

    /// Global coordinates covered on `axis`.
    pub fn range(&self, axis: Axis) -> Range<u64> {
        self.origins[axis]..self.origins[axis] + self.extents[axis]
    }

    /// Place of the element with all coordinates 0.
    pub const fn start(&self) -> Place {
        self.start
    }

    /// Element width in bytes.
    pub const fn elem_bytes(&self) -> u64 {
        (self.elem_bits / 8) as u64
    }

    /// Element width in bits.
    pub const fn elem_bits(&self) -> u32 {
        self.elem_bits
    }

    /// How block ids step.
    pub fn block_step(&self) -> BlockStep {
        BlockStep {
            parts: self.block_parts,
            part_stride: self.part_stride,
            stride: self.strides[Axis::Block],
            region_stride: self.region_strides[Axis::Block],
        }
    }

    /// `blocks` blocks of this view's shape in one region, end to end without gaps, the axes inside a block in the order
    /// that memory has them in here: over regions first, then by falling stride.
    ///
    /// # Errors
    /// Bytes beyond 63 bits.
    pub fn packed(&self, blocks: u64) -> Result<View, LayoutError> {
        let mut inside = Axis::IN_BLOCK;
        inside.sort_by_key(|&axis| std::cmp::Reverse((self.region_strides[axis], self.strides[axis])));
        let mut order = [Axis::Block; 6];
        order[1..].copy_from_slice(&inside);
        let mut extents = self.extents;
        extents[Axis::Block] = blocks;
        let mut strides = PerAxis::splat(0u64);
        let mut step = self.elem_bytes();
        for &axis in order.iter().rev() {
            strides[axis] = step;
            step = mul(step, extents[axis], "bytes of a stage")?;
        }
        View::new(order, extents, strides, PerAxis::splat(0u64), self.elem_bits)
    }

    /// Bytes of the longest stretch inside one block that is contiguous here, all of an axis at a time.
    pub fn packed_run(&self) -> u64 {
        let mut inside = Axis::IN_BLOCK;
        inside.sort_by_key(|&axis| self.strides[axis]);
        let mut run = self.elem_bytes();
        for axis in inside.into_iter().filter(|&axis| self.extents[axis] > 1) {
            if self.region_strides[axis] == 0 && self.strides[axis] == run {
                run *= self.extents[axis];
            }
        }
        run
    }

    /// Where the element at local coordinates `at` lies.
    ///
    /// # Errors
    /// A coordinate out of range.
    pub fn place(&self, at: PerAxis<u64>) -> Result<Place, LayoutError> {
        for axis in Axis::ALL {
            if at[axis] >= self.extents[axis] {
                return Err(LayoutError::Coordinate { axis, value: at[axis], limit: self.extents[axis] });
            }
        }
        let block = self.block_step().place(at[Axis::Block]);
        let mut place =
            Place { region: self.start.region + block.region, offset: self.start.offset + block.offset };
        for axis in Axis::IN_BLOCK {
            place.region += at[axis] * self.region_strides[axis];
            place.offset += at[axis] * self.strides[axis];
        }
        Ok(place)
    }

    /// Bytes from the start of a region to one past its last element, over all coordinates.
    pub fn region_span(&self) -> u64 {
        // The farthest id is the last one, or the last of the last whole group when the group after it is cut short.
        let step = self.block_step();
        let blocks = self.extents[Axis::Block];
        let whole = blocks - blocks % self.block_parts;
        let last_block = step.place(blocks - 1).offset.max(step.place(whole.max(1) - 1).offset);
        let inside: u64 =
            Axis::IN_BLOCK.into_iter().map(|axis| (self.extents[axis] - 1) * self.strides[axis]).sum();
        self.start.offset + last_block + inside + self.elem_bytes()
    }

    /// The same view restricted to global coordinates `range` of `axis`.
    ///
    /// # Errors
    /// An empty range or one beyond the axis; slicing the block axis of a view with parts.
    pub fn slice(&self, axis: Axis, range: Range<u64>) -> Result<View, LayoutError> {
        let have = self.range(axis);
        if range.start >= range.end || range.start < have.start || range.end > have.end {
            return Err(LayoutError::Range {
                axis,
                start: range.start,
                end: range.end,
                first: have.start,
                limit: have.end,
            });
        }
        let skip = range.start - have.start;
        let mut view = self.clone();
        if axis == Axis::Block && self.block_parts > 1 {
            if !skip.is_multiple_of(self.block_parts) {
                return Err(LayoutError::NotDivisible {
                    what: "first block",
                    value: skip,
                    by: self.block_parts,
                });
            }
            let at = self.block_step().place(skip);
            view.start.region += at.region;
            view.start.offset += at.offset;
        } else {
            view.start.region += skip * self.region_strides[axis];
            view.start.offset += skip * self.strides[axis];
        }
        view.origins[axis] = range.start;
        view.extents[axis] = range.end - range.start;
        Ok(view)
    }

    /// The even share `rank` of `world` on `axis`.
    ///
    /// # Errors
    /// `world` does not divide the extent, or `rank >= world`.
    pub fn shard(&self, axis: Axis, rank: u64, world: u64) -> Result<View, LayoutError> {
        let extent = self.extents[axis];
        if world == 0 || !extent.is_multiple_of(world) {
            return Err(LayoutError::NotDivisible { what: axis.name(), value: extent, by: world });
        }
        if rank >= world {
            return Err(LayoutError::Size { field: "rank", value: rank, min: 0, max: world - 1 });
        }
        let share = extent / world;
        let first = self.origins[axis] + rank * share;
        self.slice(axis, first..first + share)
    }

    /// The same elements listed in another axis order (printing and array export; addresses do not change).
    ///
    /// # Errors
    /// An axis named twice.
    pub fn reorder(&self, order: [Axis; 6]) -> Result<View, LayoutError> {
        for (index, axis) in order.iter().enumerate() {
            if order[..index].contains(axis) {
                return Err(LayoutError::AxisTwice { axis: *axis });
            }
        }
        Ok(View { order, ..self.clone() })
    }

    /// The same view with global coordinates of `axis` counted from `first`.
    ///
    /// # Errors
    /// Coordinates beyond 63 bits.
    pub fn with_origin(&self, axis: Axis, first: u64) -> Result<View, LayoutError> {
        add(first, self.extents[axis], "global coordinate")?;
        let mut view = self.clone();
        view.origins[axis] = first;
        Ok(view)
    }

    /// The common part of two views: both sliced, on every axis inside the block, to the global coordinates they
    /// share. `None` when some axis has nothing in common.
    ///
    /// # Errors
    /// None for views that hold their invariants; slicing errors are passed on.
    pub fn intersect(&self, other: &View) -> Result<Option<(View, View)>, LayoutError> {
        let (mut left, mut right) = (self.clone(), other.clone());
        for axis in Axis::IN_BLOCK {
            let (a, b) = (self.range(axis), other.range(axis));
            let common = a.start.max(b.start)..a.end.min(b.end);
            if common.is_empty() {
                return Ok(None);
            }
            left = left.slice(axis, common.clone())?;
            right = right.slice(axis, common)?;
        }
        Ok(Some((left, right)))
    }

    /// The same memory re-addressed in pages of `page_size` tokens: `id = parts · block + part`.
    ///
    /// # Errors
    /// `page_size` does not divide the page extent, more than 2^32 - 1 ids, or a view already split.
    pub fn with_page_size(&self, page_size: u64) -> Result<View, LayoutError> {
        let tokens = self.extents[Axis::Page];
        if page_size == 0 || !tokens.is_multiple_of(page_size) {
            return Err(LayoutError::NotDivisible { what: "page_size", value: tokens, by: page_size });
        }
        if page_size == tokens {
            return Ok(self.clone());
        }
        if self.block_parts > 1 && self.part_stride != tokens * self.strides[Axis::Page] {
            // A page range was cut out of a split view: its parts are no longer whole pages.
            return Err(LayoutError::NotDivisible {
                what: "page_size of a sliced page",
                value: tokens,
                by: page_size,
            });
        }
        let split = tokens / page_size;
        let parts = mul(self.block_parts, split, "parts of a block")?;
        let blocks = mul(self.extents[Axis::Block], split, "number of blocks")?;
        let max = crate::config::MAX_BLOCKS;
        if blocks > max {
            return Err(LayoutError::Size { field: "num_blocks", value: blocks, min: 1, max });
        }
        let mut view = self.clone();
        view.extents[Axis::Block] = blocks;
        view.extents[Axis::Page] = page_size;
        view.origins[Axis::Block] = mul(self.origins[Axis::Block], split, "global coordinate")?;
        view.origins[Axis::Page] = 0;
        view.block_parts = parts;
        // Splitting twice is splitting once more finely: the new step is a page, and old parts were whole pages.
        view.part_stride = mul(page_size, self.strides[Axis::Page], "stride of a part")?;
        Ok(view)
    }

    /// Whether the axes inside a block, read outermost first by stride, come in another order than in `other`.
    /// Region axes of either side and axes of extent 1 have no place in the order.
    pub fn order_differs(&self, other: &View) -> bool {
        let free = |axis: &Axis| {
            self.extents[*axis] > 1
                && other.extents[*axis] > 1
                && self.region_strides[*axis] == 0
                && other.region_strides[*axis] == 0
        };
        let left: Vec<Axis> = self.stride_order().into_iter().filter(free).collect();
        let right: Vec<Axis> = other.stride_order().into_iter().filter(free).collect();
        left != right
    }

    /// The axes inside a block, outermost first: region axes, then by falling stride.
    pub fn stride_order(&self) -> Vec<Axis> {
        let mut axes: Vec<Axis> = Axis::IN_BLOCK.to_vec();
        let declared = |axis: Axis| self.order.iter().position(|&other| other == axis);
        axes.sort_by_key(|&axis| {
            let region = self.region_strides[axis];
            (
                std::cmp::Reverse(region),
                std::cmp::Reverse(if region == 0 { self.strides[axis] } else { 0 }),
                declared(axis),
            )
        });
        axes
    }
}
