//! Copy plans: an id-free pair bound to block ids.

use std::sync::Arc;

use crate::error::{PlanError, Side};
use crate::ids::{BlockId, check_ids, expand};
use crate::pair::{Loop, PairPlan};
use crate::plain::{neighbours, pack_plain, word};
use crate::view::{Place, View};

/// Blocks that are copied together: `count` blocks from `src` and `dst` up, joined end to end in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First source id (of the finer page).
    pub src: u32,
    /// First destination id.
    pub dst: u32,
    /// Blocks joined.
    pub count: u32,
    /// Blocks in the segments before this one.
    pub before: u32,
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where it is read.
    pub src: Place,
    /// Where it is written.
    pub dst: Place,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Counts that describe a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanStats {
    /// Blocks moved, of the finer page.
    pub blocks: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Copies before merging (see [`PairPlan::elementary_runs`]).
    pub elementary_runs: u64,
    /// Copies after merging.
    pub runs: u64,
    /// Shortest run in bytes; 0 for an empty plan.
    pub shortest_run: u64,
    /// Longest run in bytes; 0 for an empty plan.
    pub longest_run: u64,
}

/// Everything an engine needs to move the blocks: integers only. Runs are computed, never stored, so a plan's size
/// depends on the number of ids alone.
///
/// ```
/// use std::sync::Arc;
/// use kvferry_layout::{BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest};
/// let cfg = LayoutConfig::builder()
///     .num_blocks(64).num_layers(2).page_size(16).num_heads(8).head_dim(128).dtype(Dtype::BFloat16)
///     .build()?;
/// let fc = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
/// let pair = Arc::new(PairPlan::new(&fc, &fc, &PairRequest::default())?);
/// let plan = CopyPlan::new(pair, &[3, 4, 5, 9].map(BlockId), &[0, 1, 2, 7].map(BlockId))?;
///
/// // Blocks 3..6 join, block 9 stands alone.
/// let runs: Vec<_> = plan.runs().map(|run| (run.src.offset, run.dst.offset, run.bytes)).collect();
/// let block = cfg.block_bytes();
/// assert_eq!(runs, [(3 * block, 0, 3 * block), (9 * block, 7 * block, block)]);
/// assert_eq!(plan.bytes(), 4 * block);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CopyPlan {
    pair: Arc<PairPlan>,
    segments: Segments,
    blocks: u32,
}

/// Shared by the plans of one transfer's layers.
#[derive(Clone, Debug)]
enum Segments {
    /// No two blocks join: the id pairs as [`CopyPlan::pack`] writes them. Long lists are mostly such, and memory is what
    /// they cost.
    Single(Arc<Vec<u64>>),
    Joined(Arc<Vec<Segment>>),
}

impl CopyPlan {
    /// Binds `pair` to ids: source block `src[i]` goes to destination block `dst[i]`. Where page sizes differ, ids
    /// are in each layout's own pages and pair up in order of tokens.
    ///
    /// Neighbouring pairs, rising or falling, whose runs join on both sides become one segment.
    ///
    /// # Errors
    /// Counts that do not pair up, an id out of range, a destination given twice.
    pub fn new(pair: Arc<PairPlan>, src: &[BlockId], dst: &[BlockId]) -> Result<CopyPlan, PlanError> {
        let (src_parts, dst_parts) = pair.parts();
        let src_blocks = pair.src().extent(crate::Axis::Block) / src_parts;
        let dst_blocks = pair.dst().extent(crate::Axis::Block) / dst_parts;
        let pairs = (src.len() as u64).saturating_mul(src_parts);
        if pairs != (dst.len() as u64).saturating_mul(dst_parts) || u32::try_from(pairs).is_err() {
            let page = pair.src().extent(crate::Axis::Page);
            return Err(PlanError::IdCount {
                src: src.len(),
                src_page: page * src_parts,
                dst: dst.len(),
                dst_page: page * dst_parts,
            });
        }
        if src_parts == 1
            && dst_parts == 1
            && let Some(plain) = pack_plain(src, dst, [src_blocks, dst_blocks])
        {
            return Ok(CopyPlan { pair, segments: Segments::Single(Arc::new(plain)), blocks: pairs as u32 });
        }
        check_ids(Side::Source, src, src_blocks)?;
        check_ids(Side::Destination, dst, dst_blocks)?;
        let (fine_src, fine_dst);
        let (src, dst) = if src_parts == 1 && dst_parts == 1 {
            (src, dst)
        } else {
            (fine_src, fine_dst) = (expand(src, src_parts), expand(dst, dst_parts));
            (&fine_src[..], &fine_dst[..])
        };
        let segments = join(&pair, src, dst);
        Ok(CopyPlan { pair, segments, blocks: pairs as u32 })
    }

    /// The same blocks along another pair of the same two layouts, such as one layer after another. Where that joins
    /// blocks as this one does, it costs no more for many blocks than for few. `None` if the pair counts blocks
    /// otherwise.
    pub fn along(&self, pair: Arc<PairPlan>) -> Option<CopyPlan> {
        let counted = |pair: &PairPlan| {
            let blocks = |view: &View| view.extent(crate::Axis::Block);
            (pair.parts(), blocks(pair.src()), blocks(pair.dst()))
        };
        if counted(&pair) != counted(&self.pair) {
            return None;
        }
        let segments = if pair.joins_like(&self.pair) {
            self.segments.clone()
        } else {
            let each = |first: fn(&Segment) -> u32| {
                self.segments()
                    .flat_map(|s| (first(&s)..first(&s) + s.count).map(BlockId))
                    .collect::<Vec<_>>()
            };
            join(&pair, &each(|s| s.src), &each(|s| s.dst))
        };
        Some(CopyPlan { pair, segments, blocks: self.blocks })
    }

    /// The id-free part.
    pub const fn pair(&self) -> &Arc<PairPlan> {
        &self.pair
    }

    /// Segments there are.
    pub fn num_segments(&self) -> usize {
        match &self.segments {
            Segments::Single(pairs) => pairs.len(),
            Segments::Joined(segments) => segments.len(),
        }
    }

    /// Segment `index`, which is below [`num_segments`](Self::num_segments).
    pub fn segment(&self, index: usize) -> Segment {
        match &self.segments {
            Segments::Single(pairs) => {
                let pair = pairs[index];
                Segment { src: pair as u32, dst: (pair >> 32) as u32, count: 1, before: index as u32 }
            }
            Segments::Joined(segments) => segments[index],
        }
    }

    /// The index of the segment that block `block` of the list is in; [`num_segments`](Self::num_segments) beyond the
    /// last block.
    pub fn segment_of(&self, block: u32) -> usize {
        match &self.segments {
            Segments::Single(pairs) => pairs.len().min(block as usize),
            Segments::Joined(segments) => segments.partition_point(|s| s.before + s.count <= block),
        }
    }

    /// The joined blocks, in the order of the ids.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment> + '_ {
        (0..self.num_segments()).map(|index| self.segment(index))
    }

    /// Blocks moved, of the finer page.
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Writes the id pairs of the blocks from `first` on, one a word: the source in the low half, the destination in the
    /// high half. Words of `out` beyond the last block stay as they are.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use kvferry_layout::{BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest};
    /// # let cfg = LayoutConfig::builder().num_blocks(64).num_layers(2).page_size(16).inner_dim(8);
    /// # let cfg = cfg.dtype(Dtype::UInt8).build()?;
    /// # let fc = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
    /// # let pair = Arc::new(PairPlan::new(&fc, &fc, &PairRequest::default())?);
    /// let plan = CopyPlan::new(pair, &[3, 4, 5, 9].map(BlockId), &[0, 1, 2, 7].map(BlockId))?;
    /// let mut words = [0; 2];
    /// plan.pack(2, &mut words);
    /// assert_eq!(words, [5 | 2 << 32, 9 | 7 << 32]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pack(&self, first: u32, out: &mut [u64]) {
        let segments = match &self.segments {
            Segments::Single(pairs) => {
                let left = pairs.get(first as usize..).unwrap_or_default();
                let len = left.len().min(out.len());
                return out[..len].copy_from_slice(&left[..len]);
            }
            Segments::Joined(segments) => segments,
        };
        let mut out = out.iter_mut();
        for s in &segments[self.segment_of(first)..] {
            for skip in first.saturating_sub(s.before)..s.count {
                let Some(out) = out.next() else { return };
                *out = word(s.src + skip, s.dst + skip);
            }
        }
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks) * self.pair.block_bytes()
    }

    /// The loops and run length of one segment. Borrowed from the pair unless joining swallowed a loop.
    pub fn shape(&self, segment: &Segment) -> (u64, std::borrow::Cow<'_, [Loop]>) {
        if segment.count == 1 || self.pair.keeps_loops(segment.count) {
            return (self.pair.run_bytes() * u64::from(segment.count), self.pair.loops().into());
        }
        let (run, loops) = self.pair.joined(segment.count);
        (run, loops.into())
    }

    /// Every run, segment by segment, inner loops fastest.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.segments().flat_map(move |segment| {
            let (bytes, loops) = self.shape(&segment);
            let (src, dst) = (self.pair.src_place(segment.src), self.pair.dst_place(segment.dst));
            let total: u64 = loops.iter().map(|l| l.count).product();
            (0..total).map(move |index| {
                let (src, dst) = step(&loops, index, src, dst);
                Run { src, dst, bytes }
            })
        })
    }

    /// Counts for people and for the cost model; linear in the number of segments.
    pub fn stats(&self) -> PlanStats {
        let mut stats = PlanStats {
            blocks: self.blocks.into(),
            bytes: self.bytes(),
            elementary_runs: u64::from(self.blocks) * self.pair.elementary_runs(),
            runs: 0,
            shortest_run: if self.blocks == 0 { 0 } else { u64::MAX },
            longest_run: 0,
        };
        for segment in self.segments() {
            let (run, loops) = self.shape(&segment);
            stats.runs += loops.iter().map(|l| l.count).product::<u64>();
            stats.shortest_run = stats.shortest_run.min(run);
            stats.longest_run = stats.longest_run.max(run);
        }
        stats
    }
}

/// Source and destination of iteration `index` of the flattened `loops`.
pub fn step(loops: &[Loop], mut index: u64, mut src: Place, mut dst: Place) -> (Place, Place) {
    for l in loops.iter().rev() {
        let at = index % l.count;
        index /= l.count;
        src.region += at * l.src_region;
        src.offset += at * l.src_stride;
        dst.region += at * l.dst_region;
        dst.offset += at * l.dst_stride;
    }
    (src, dst)
}

fn join(pair: &PairPlan, src: &[BlockId], dst: &[BlockId]) -> Segments {
    if !neighbours(src, dst) {
        return Segments::Single(Arc::new(
            src.iter().zip(dst).map(|(src, dst)| word(src.0, dst.0)).collect(),
        ));
    }
    let mut segments: Vec<Segment> = Vec::with_capacity(src.len());
    let mut pairs = src.iter().zip(dst).zip(0u32..);
    let single = |((&BlockId(src), &BlockId(dst)), before)| Segment { src, dst, count: 1, before };
    // The segment that may still grow is kept out of the list, in registers.
    let Some(mut open) = pairs.next().map(single) else { return Segments::Joined(Arc::default()) };
    for next in pairs {
        let next = single(next);
        let (s, d) = (next.src, next.dst);
        let above = s == open.src.wrapping_add(open.count) && d == open.dst.wrapping_add(open.count);
        if above && pair.joins(s - 1, d - 1) {
            open.count += 1;
            continue;
        }
        // A falling pair extends the segment downwards; a segment of one may start either way.
        if s.wrapping_add(1) == open.src && d.wrapping_add(1) == open.dst && pair.joins(s, d) {
            (open.src, open.dst) = (s, d);
            open.count += 1;
            continue;
        }
        segments.push(open);
        open = next;
    }
    segments.push(open);
    Segments::Joined(Arc::new(segments))
}
