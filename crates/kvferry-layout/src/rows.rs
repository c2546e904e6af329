//! Head rows of a view, in chunks that can be gathered into a dense buffer.

use crate::arith::mul;
use crate::axis::{Axis, PerAxis};
use crate::checksum::{MAX_ROW_HEADS, MAX_ROW_LAYERS, MAX_ROW_TOKENS, RowAt};
use crate::error::LayoutError;
use crate::ids::BlockId;
use crate::pair::{Loop, absorb_tail, merge_loops};
use crate::view::{Place, View};

/// Some tokens of one (block, layer, outer), with all heads of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowChunk {
    /// Where its first element lies.
    pub place: Place,
    /// Its first row.
    pub first: RowAt,
    /// Its tokens.
    pub tokens: u64,
}

/// The head rows of a view's blocks, cut into chunks of at most so many bytes.
///
/// Chunks of a block are numbered by layer, outer, token; the rows of a chunk come by token, head. So the rows of a
/// block have one order, that of [`RowAt`], in every layout.
///
/// ```
/// use kvferry_layout::{BlockId, Dtype, KvOrder, Layout, LayoutConfig, RowChunks};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(8).num_layers(2).page_size(16).num_heads(4).head_dim(64).dtype(Dtype::Float16)
///     .build()?;
/// let hnd = Layout::fully_contiguous(cfg, KvOrder::Hnd)?;
/// let rows = RowChunks::new(hnd.view(), 2048)?;
/// // Four tokens of four rows of 128 bytes in a chunk, four chunks in a (layer, outer).
/// assert_eq!((rows.per_block(), rows.chunk_bytes(4)), (2 * 2 * 4, 2048));
/// let chunk = rows.chunk(BlockId(1), 5);
/// assert_eq!((chunk.first.layer, chunk.first.outer, chunk.first.token, chunk.tokens), (0, 1, 4, 4));
/// assert_eq!(chunk.place.offset, cfg.block_bytes() + cfg.chunk_bytes() + 4 * 128);
/// # Ok::<(), kvferry_layout::LayoutError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RowChunks {
    view: View,
    /// Tokens in a chunk, but for the last of a page.
    tokens: u64,
    /// Chunks of a (layer, outer).
    groups: u64,
    row_bytes: u64,
}

impl RowChunks {
    /// Cuts `view` into chunks of at most `max_bytes`, or of one token where a token is longer.
    ///
    /// # Errors
    /// Coordinates beyond what [`RowAt::word`] can hold.
    pub fn new(view: &View, max_bytes: u64) -> Result<RowChunks, LayoutError> {
        let limits = [
            (Axis::Layer, "layers", MAX_ROW_LAYERS),
            (Axis::Outer, "outer", 2),
            (Axis::Page, "tokens of a block", MAX_ROW_TOKENS),
            (Axis::Head, "global heads", MAX_ROW_HEADS),
        ];
        for (axis, field, max) in limits {
            let end = view.range(axis).end;
            if end > max {
                return Err(LayoutError::Size { field, value: end, min: 1, max });
            }
        }
        let row_bytes = mul(view.extent(Axis::Dim), view.elem_bytes(), "bytes of a head row")?;
        let token_bytes = mul(row_bytes, view.extent(Axis::Head), "bytes of a token")?;
        let page = view.extent(Axis::Page);
        mul(token_bytes, page, "bytes of a page")?;
        let tokens = (max_bytes / token_bytes).clamp(1, page);
        Ok(RowChunks { view: view.clone(), tokens, groups: page.div_ceil(tokens), row_bytes })
    }

    /// Bytes of one row.
    pub const fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes of the rows of `tokens` tokens.
    pub fn chunk_bytes(&self, tokens: u64) -> u64 {
        tokens * self.view.extent(Axis::Head) * self.row_bytes
    }

    /// Most tokens a chunk has.
    pub const fn max_tokens(&self) -> u64 {
        self.tokens
    }

    /// Chunks of one block.
    pub fn per_block(&self) -> u64 {
        self.view.extent(Axis::Layer) * self.view.extent(Axis::Outer) * self.groups
    }

    /// Payload bytes of one block of the view.
    pub fn block_bytes(&self) -> u64 {
        let parts = self.view.extent(Axis::Layer) * self.view.extent(Axis::Outer);
        parts * self.chunk_bytes(self.view.extent(Axis::Page))
    }

    /// Chunk `index` of `block`; both must be in range.
    pub fn chunk(&self, block: BlockId, index: u64) -> RowChunk {
        let (part, group) = (index / self.groups, index % self.groups);
        let outers = self.view.extent(Axis::Outer);
        let mut at = PerAxis::splat(0);
        at[Axis::Layer] = part / outers;
        at[Axis::Outer] = part % outers;
        at[Axis::Page] = group * self.tokens;
        let step = self.view.block_step().place(block.0.into());
        let mut place = self.view.start();
        place.region += step.region;
        place.offset += step.offset;
        for axis in [Axis::Layer, Axis::Outer, Axis::Page] {
            place.region += at[axis] * self.view.region_stride(axis);
            place.offset += at[axis] * self.view.stride(axis);
        }
        let global = |axis: Axis| self.view.origin(axis) + at[axis];
        let first = RowAt {
            layer: global(Axis::Layer),
            outer: global(Axis::Outer),
            token: global(Axis::Page),
            head: global(Axis::Head),
        };
        let tokens = self.tokens.min(self.view.extent(Axis::Page) - at[Axis::Page]);
        RowChunk { place, first, tokens }
    }

    /// The rows of a chunk, in the order in which [`gather`](RowChunks::gather) puts them.
    pub fn rows(&self, chunk: &RowChunk) -> impl Iterator<Item = RowAt> + use<> {
        let (first, heads) = (chunk.first, self.view.extent(Axis::Head));
        (0..chunk.tokens).flat_map(move |token| {
            (0..heads).map(move |head| RowAt { token: first.token + token, head: first.head + head, ..first })
        })
    }

    /// How the rows of `tokens` tokens lie: a contiguous run and the loops around it, outermost first, from the view
    /// (source) to a dense buffer of token, head, element (destination).
    pub fn gather(&self, tokens: u64) -> (u64, Vec<Loop>) {
        let dense = PerAxis::from_fn(|axis| match axis {
            Axis::Page => self.chunk_bytes(1),
            Axis::Head => self.row_bytes,
            _ => self.view.elem_bytes(),
        });
        let mut loops: Vec<Loop> = [Axis::Page, Axis::Head, Axis::Dim]
            .into_iter()
            .map(|axis| Loop {
                count: if axis == Axis::Page { tokens } else { self.view.extent(axis) },
                src_stride: self.view.stride(axis),
                dst_stride: dense[axis],
                ..Loop::default()
            })
            .filter(|l| l.count > 1)
            .collect();
        let run = absorb_tail(&mut loops, self.view.elem_bytes());
        merge_loops(&mut loops);
        loops.sort_by_key(|l| std::cmp::Reverse(l.dst_stride));
        (run, loops)
    }
}
