//! Ground truth for tests: copies element by element, by coordinates.
//!
//! Nothing here is shared with the planner or with [`View`](crate::View): addresses come from one nested formula per
//! layout kind, written from the table of layouts. Memory is one `Vec<u8>` per region. Slow and simple on purpose.
//!
//! ```
//! use kvferry_layout::oracle::{self, OracleLayout};
//! use kvferry_layout::{BlockId, Dtype, KvOrder, LayoutConfig, LayoutKind};
//!
//! let cfg = LayoutConfig::builder()
//!     .num_blocks(3).num_layers(2).page_size(4).num_heads(2).head_dim(8).dtype(Dtype::BFloat16)
//!     .build()?;
//! let src = OracleLayout::new(&cfg, LayoutKind::FullyContiguous { order: KvOrder::Nhd })?;
//! let dst = OracleLayout::new(&cfg, LayoutKind::SplitKv { order: KvOrder::Hnd })?;
//! let (mut src_mem, mut dst_mem) = (src.alloc(), dst.alloc());
//! src.fill_unique(&mut src_mem, 7);
//! oracle::poison(&mut dst_mem);
//! oracle::copy(&src, &src_mem, &dst, &mut dst_mem, &[BlockId(2)], &[BlockId(0)], 0..2, 0..2);
//!
//! let (region, offset) = dst.element(0, 1, 1, 3, 1, 5);
//! let (src_region, src_offset) = src.element(2, 1, 1, 3, 1, 5);
//! assert_eq!(dst_mem[region][offset..offset + 2], src_mem[src_region][src_offset..src_offset + 2]);
//! # Ok::<(), kvferry_layout::LayoutError>(())
//! ```

use std::ops::Range;

use crate::{Axis, BlockDim, BlockId, KvOrder, LayoutConfig, LayoutError, LayoutKind};

/// What [`poison`] writes.
pub const POISON: u8 = 0xA5;

/// A layout known only by its sizes and its formula.
#[derive(Clone, Debug)]
pub struct OracleLayout {
    blocks: u64,
    layers: u64,
    outers: u64,
    /// Tokens in a stored block.
    tokens: u64,
    heads: u64,
    first_head: u64,
    dims: u64,
    width: u64,
    align: u64,
    /// Pages a stored block is addressed as.
    parts: u64,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    Own(LayoutKind),
    /// Named axes with byte strides; layers, and with `split` K and V, are regions unless named.
    Foreign {
        strides: Vec<(Axis, u64)>,
        split: bool,
    },
}

impl OracleLayout {
    /// A layout of our own making.
    ///
    /// # Errors
    /// [`LayoutKind::Strided`]: its strides are not in the configuration, see [`OracleLayout::foreign`].
    pub fn new(config: &LayoutConfig, kind: LayoutKind) -> Result<OracleLayout, LayoutError> {
        if kind == LayoutKind::Strided {
            return Err(LayoutError::Missing { field: "strides" });
        }
        Ok(OracleLayout::of(config, Form::Own(kind)))
    }

    /// Foreign arrays with byte strides for each named axis. Arrays are the regions: one per layer unless the layer
    /// axis is named, and with `split_outer` one for K and one for V of each. Axes that are neither must have
    /// extent 1 in `config`.
    pub fn foreign(config: &LayoutConfig, strides: &[(Axis, u64)], split_outer: bool) -> OracleLayout {
        OracleLayout::of(config, Form::Foreign { strides: strides.to_vec(), split: split_outer })
    }

    fn of(config: &LayoutConfig, form: Form) -> OracleLayout {
        OracleLayout {
            blocks: config.num_blocks(),
            layers: config.num_layers(),
            outers: config.outer_dim(),
            tokens: config.page_size(),
            heads: config.num_heads(),
            first_head: config.first_head(),
            dims: config.head_dim(),
            width: config.dtype().bytes(),
            align: config.alignment(),
            parts: 1,
            form,
        }
    }

    /// The same memory addressed in pages of `page_size` tokens, which must divide the page size of the layout as
    /// it was made.
    #[must_use]
    pub fn with_page_size(&self, page_size: u64) -> OracleLayout {
        OracleLayout { parts: self.tokens / page_size, ..self.clone() }
    }

    /// Tokens in an addressed page.
    pub fn page_size(&self) -> u64 {
        self.tokens / self.parts
    }

    /// Addressed pages: ids are below this.
    pub fn num_blocks(&self) -> u64 {
        self.blocks * self.parts
    }

    /// Global numbers of the heads held.
    pub fn heads(&self) -> Range<u64> {
        self.first_head..self.first_head + self.heads
    }

    /// Bytes of one element.
    pub fn elem_bytes(&self) -> usize {
        self.width as usize
    }

    /// Region and byte offset of an element. `block` and `page` are in addressed pages, `head` is local.
    pub fn element(
        &self,
        block: u64,
        layer: u64,
        outer: u64,
        page: u64,
        head: u64,
        dim: u64,
    ) -> (usize, usize) {
        let token = block % self.parts * self.page_size() + page;
        let (region, offset) = self.stored(block / self.parts, layer, outer, token, head, dim);
        (region as usize, offset as usize)
    }

    fn stored(&self, block: u64, layer: u64, outer: u64, token: u64, head: u64, dim: u64) -> (u64, u64) {
        let (nl, no, nt, nh, nd) = (self.layers, self.outers, self.tokens, self.heads, self.dims);
        let padded = |elements: u64| (elements * self.width).div_ceil(self.align) * self.align;
        // Element number inside one (layer, outer) part.
        let part = |order| match order {
            KvOrder::Nhd => (token * nh + head) * nd + dim,
            KvOrder::Hnd | KvOrder::Universal => (head * nt + token) * nd + dim,
        };
        // Element number inside a block that holds all its layers.
        let whole = |order| match order {
            KvOrder::Nhd | KvOrder::Hnd => (layer * no + outer) * (nt * nh * nd) + part(order),
            KvOrder::Universal => (((head * nl + layer) * no + outer) * nt + token) * nd + dim,
        };
        match &self.form {
            Form::Own(LayoutKind::FullyContiguous { order }) => {
                (0, block * padded(nl * no * nt * nh * nd) + whole(*order) * self.width)
            }
            Form::Own(LayoutKind::BlockPool { order }) => (block, whole(*order) * self.width),
            Form::Own(LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order }) => {
                let inside = outer * (nt * nh * nd) + part(*order);
                (layer, block * padded(no * nt * nh * nd) + inside * self.width)
            }
            Form::Own(LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order }) => {
                let cell = outer * self.blocks + block;
                (layer, cell * padded(nt * nh * nd) + part(*order) * self.width)
            }
            Form::Own(LayoutKind::SplitKv { order }) => {
                (layer * no + outer, block * padded(nt * nh * nd) + part(*order) * self.width)
            }
            // `new` refuses it.
            Form::Own(LayoutKind::Strided) => (u64::MAX, u64::MAX),
            Form::Foreign { strides, split } => {
                let mut offset = 0;
                let mut layer_named = false;
                for &(axis, stride) in strides {
                    layer_named |= axis == Axis::Layer;
                    offset += stride
                        * match axis {
                            Axis::Block => block,
                            Axis::Layer => layer,
                            Axis::Outer => outer,
                            Axis::Page => token,
                            Axis::Head => head,
                            Axis::Dim => dim,
                        };
                }
                let array = if layer_named { 0 } else { layer };
                (if *split { array * 2 + outer } else { array }, offset)
            }
        }
    }

    /// Number of regions.
    pub fn num_regions(&self) -> usize {
        self.last().0 as usize + 1
    }

    /// Bytes a region must hold.
    pub fn region_bytes(&self) -> usize {
        (self.last().1 + self.width) as usize
    }

    /// Place of the last element: every formula grows with every coordinate.
    fn last(&self) -> (u64, u64) {
        self.stored(
            self.blocks - 1,
            self.layers - 1,
            self.outers - 1,
            self.tokens - 1,
            self.heads - 1,
            self.dims - 1,
        )
    }

    /// Zeroed memory for all regions.
    pub fn alloc(&self) -> Vec<Vec<u8>> {
        vec![vec![0; self.region_bytes()]; self.num_regions()]
    }

    /// Writes [`value`] into every element; padding stays as it is.
    ///
    /// # Panics
    /// When `mem` is smaller than [`alloc`](OracleLayout::alloc) makes it.
    pub fn fill_unique(&self, mem: &mut [Vec<u8>], seed: u64) {
        self.for_each(|[block, layer, outer, page, head, dim], (region, offset)| {
            let global = [block, layer, outer, page, self.first_head + head, dim];
            for (index, byte) in mem[region][offset..offset + self.elem_bytes()].iter_mut().enumerate() {
                *byte = (value(seed, global) >> (index % 8 * 8)) as u8;
            }
        });
    }

    /// Calls `f` with the (local) coordinates and the place of every element.
    pub fn for_each(&self, mut f: impl FnMut([u64; 6], (usize, usize))) {
        for block in 0..self.num_blocks() {
            for layer in 0..self.layers {
                for outer in 0..self.outers {
                    for page in 0..self.page_size() {
                        for head in 0..self.heads {
                            for dim in 0..self.dims {
                                let place = self.element(block, layer, outer, page, head, dim);
                                f([block, layer, outer, page, head, dim], place);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Eight pseudo-random bytes keyed by `seed` and the coordinates block, layer, outer, page, global head, dim, so
/// that an element in the wrong place shows. Elements narrower than eight bytes take the low ones.
pub fn value(seed: u64, coordinates: [u64; 6]) -> u64 {
    coordinates.into_iter().fold(mix(seed), |key, coordinate| mix(key ^ coordinate))
}

/// splitmix64.
fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Overwrites everything with [`POISON`], so that bytes nobody wrote can be told.
pub fn poison(mem: &mut [Vec<u8>]) {
    for region in mem {
        region.fill(POISON);
    }
}

/// Copies `layers` and the global `heads` of source blocks to destination blocks. Where page sizes differ, the ids
/// pair up in order of tokens.
///
/// # Panics
/// When ids, ranges or memory do not fit the layouts: a test that gets here with them is wrong.
#[allow(clippy::too_many_arguments, reason = "two sides of three things, and two ranges")]
pub fn copy(
    src: &OracleLayout,
    src_mem: &[Vec<u8>],
    dst: &OracleLayout,
    dst_mem: &mut [Vec<u8>],
    src_ids: &[BlockId],
    dst_ids: &[BlockId],
    layers: Range<u64>,
    heads: Range<u64>,
) {
    let (src_page, dst_page) = (src.page_size(), dst.page_size());
    let tokens = src_ids.len() as u64 * src_page;
    assert_eq!(tokens, dst_ids.len() as u64 * dst_page, "id lists of different lengths");
    assert_eq!((src.dims, src.outers, src.width), (dst.dims, dst.outers, dst.width), "rows differ");
    for token in 0..tokens {
        let from = u64::from(src_ids[(token / src_page) as usize].0);
        let to = u64::from(dst_ids[(token / dst_page) as usize].0);
        for layer in layers.clone() {
            for outer in 0..src.outers {
                for head in heads.clone() {
                    for dim in 0..src.dims {
                        let (src_head, dst_head) = (head - src.first_head, head - dst.first_head);
                        let (a, at) = src.element(from, layer, outer, token % src_page, src_head, dim);
                        let (b, to_at) = dst.element(to, layer, outer, token % dst_page, dst_head, dim);
                        let width = src.elem_bytes();
                        dst_mem[b][to_at..to_at + width].copy_from_slice(&src_mem[a][at..at + width]);
                    }
                }
            }
        }
    }
}
