//! A shape lowered to what the kernels count with.

use super::params::{INLINE_WORDS_LARGE, STRIDED_LOOPS, StridedLoopParams};
use super::{Divisor, Link, SideName, StridedError, StridedLoop, StridedShape, StridedSide, Walk};

/// Region bases beyond this many, of both sides together, belong in a table in memory: inline they would be copied at
/// every launch.
pub const MAX_INLINE_BASES: usize = 256;
/// Widest access.
const MAX_UNIT: u64 = 16;
/// The shortest chunk that a launch cuts runs into, but for their ends.
pub(super) const MIN_CHUNK: u64 = 2 << 10;
/// Over PCIe, runs below this go unit by unit, unless they are whole packets anyway.
const PCIE_WORD_RUN: u64 = 1024;
/// Whole packets: reads and writes of this length and alignment fill the link whoever issues them.
const PCIE_PACKETS: u64 = 256;
/// Between GPU memories, where units cost more arithmetic than teams lose, only runs below this.
const GPU_WORD_RUN: u64 = 32;
/// Sums of offsets stay far from the end of 64 bits.
const MAX_REACH: u128 = 1 << 62;

/// How runs are dealt to threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StridedMode {
    /// Chunks of runs to teams of threads, each chunk with an alignment of its own.
    Tile,
    /// Units of one access each to single threads: short runs.
    Word,
}

/// A shape lowered: loops merged and put into the order of the walk, everything checked for every legal id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedCopyPlan {
    pub(super) src: StridedSide,
    pub(super) dst: StridedSide,
    pub(super) loops: Vec<StridedLoopParams>,
    pub(super) run_bytes: u64,
    pub(super) runs: u64,
    pub(super) unit: u64,
    mode: StridedMode,
    link: Link,
    src_reach: u64,
    dst_reach: u64,
}

impl StridedCopyPlan {
    /// Lowers a shape. `src_align` and `dst_align` are powers of two that divide every base address of their side.
    ///
    /// # Errors
    /// [`StridedError`] if a count is 0 or too large, or a legal id would lead out of the regions or beyond 2^62 bytes.
    pub fn new(shape: &StridedShape, src_align: u64, dst_align: u64) -> Result<Self, StridedError> {
        if shape.run_bytes == 0 {
            return Err(StridedError::EmptyRun);
        }
        if let Some(index) = shape.loops.iter().position(|l| l.count == 0) {
            return Err(StridedError::EmptyLoop { index });
        }
        for (side, align) in [(SideName::Source, src_align), (SideName::Destination, dst_align)] {
            if !align.is_power_of_two() {
                return Err(StridedError::BadAlign { side, align });
            }
        }
        let far = |side| StridedError::TooFar { side };
        let src_reach = reach(SideName::Source, &shape.src, shape)?.ok_or(far(SideName::Source))?;
        let dst_reach = reach(SideName::Destination, &shape.dst, shape)?.ok_or(far(SideName::Destination))?;

        let mut loops: Vec<_> = shape.loops.iter().filter(|l| l.count > 1).copied().collect();
        let run_bytes = absorb(&mut loops, shape.run_bytes);
        merge(&mut loops);
        sort(&mut loops, shape.walk);
        if loops.len() > STRIDED_LOOPS {
            return Err(StridedError::TooManyLoops { loops: loops.len(), limit: STRIDED_LOOPS });
        }
        let runs = loops.iter().try_fold(1_u64, |runs, l| runs.checked_mul(l.count)).unwrap_or(u64::MAX);
        let unit = unit(shape, &loops, run_bytes, src_align, dst_align);
        let mut plan = Self {
            src: shape.src,
            dst: shape.dst,
            loops: Vec::new(),
            run_bytes,
            runs,
            unit,
            mode: StridedMode::Tile,
            link: Link::Pcie,
            src_reach,
            dst_reach,
        };
        plan.check_pieces(StridedMode::Tile)?;
        let step = |region: u64| u32::try_from(region).unwrap_or(u32::MAX);
        plan.loops = loops
            .iter()
            .map(|l| StridedLoopParams {
                src_stride: l.src_stride,
                dst_stride: l.dst_stride,
                src_region: step(l.src_region),
                dst_region: step(l.dst_region),
                steps: Divisor::new(l.count).unwrap_or(Divisor::ONE),
            })
            .collect();
        Ok(plan.with_link(Link::Pcie))
    }

    /// The same plan for a link; [`StridedCopyPlan::new`] assumes PCIe. Measured on an H200 (`scripts/gpu_probe`).
    #[must_use]
    pub fn with_link(mut self, link: Link) -> Self {
        let run = self.run_bytes;
        let short = match link {
            Link::Pcie => run < PCIE_WORD_RUN && !(self.unit == MAX_UNIT && run.is_multiple_of(PCIE_PACKETS)),
            Link::Gpu => run < GPU_WORD_RUN,
        };
        self.link = link;
        self.mode = if short && self.check_pieces(StridedMode::Word).is_ok() {
            StridedMode::Word
        } else {
            StridedMode::Tile
        };
        self
    }

    /// CTAs with which a long copy is as fast as it gets; more gain nothing and cost the rest of the GPU. NVLink wants
    /// 16 at any rate, which a caller who copies between two GPUs says instead.
    #[must_use]
    pub const fn enough_ctas(&self, sm_count: u32) -> u32 {
        match (self.link, self.mode) {
            (Link::Pcie, StridedMode::Tile) => 4,
            // A unit costs the same arithmetic whatever its width.
            (Link::Pcie, StridedMode::Word) => match self.unit {
                16 => 8,
                8 => 16,
                _ => 32,
            },
            (Link::Gpu, _) => sm_count.saturating_mul(4),
        }
    }

    /// The same plan with runs dealt in another way: for tests and measurements.
    ///
    /// # Errors
    /// [`StridedError::TooManyPieces`] if one block has too many pieces that way.
    pub fn with_mode(mut self, mode: StridedMode) -> Result<Self, StridedError> {
        self.check_pieces(mode)?;
        self.mode = mode;
        Ok(self)
    }

    /// How runs are dealt to threads.
    #[must_use]
    pub const fn mode(&self) -> StridedMode {
        self.mode
    }

    /// Bytes of a run once loops that continue it are part of it.
    #[must_use]
    pub const fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Runs of one block.
    #[must_use]
    pub const fn runs_per_block(&self) -> u64 {
        self.runs
    }

    /// Bytes of the widest access that every run allows: 16, 8, 4, 2 or 1.
    #[must_use]
    pub const fn unit_bytes(&self) -> u64 {
        self.unit
    }

    /// Bytes that every source region must have, whatever legal ids come.
    #[must_use]
    pub const fn src_reach(&self) -> u64 {
        self.src_reach
    }

    /// Bytes that every destination region must have, whatever legal ids come.
    #[must_use]
    pub const fn dst_reach(&self) -> u64 {
        self.dst_reach
    }

    /// Base addresses of both sides.
    #[must_use]
    pub const fn bases(&self) -> usize {
        (self.src.regions + self.dst.regions) as usize
    }

    /// Whether there are few enough base addresses to pass them inline.
    #[must_use]
    pub const fn inline_bases(&self) -> bool {
        self.bases() <= MAX_INLINE_BASES
    }

    /// Most id pairs that fit inline, beside the bases if those are.
    #[must_use]
    pub const fn inline_pairs(&self) -> usize {
        INLINE_WORDS_LARGE - if self.inline_bases() { self.bases() } else { 0 }
    }

    /// Most id pairs of one launch, at least 1: pieces are counted in 31 bits. Longer lists take several launches.
    #[must_use]
    pub fn max_pairs(&self) -> u32 {
        let most = u64::from(Divisor::LIMIT - 1) / self.most_pieces(self.mode);
        u32::try_from(most).unwrap_or(u32::MAX).max(1)
    }

    /// Pieces of one block, at most.
    fn most_pieces(&self, mode: StridedMode) -> u64 {
        let per_run = match mode {
            StridedMode::Tile => self.run_bytes.div_ceil(MIN_CHUNK),
            StridedMode::Word => self.run_bytes / self.unit,
        };
        self.runs.saturating_mul(per_run)
    }

    fn check_pieces(&self, mode: StridedMode) -> Result<(), StridedError> {
        let (pieces, limit) = (self.most_pieces(mode), u64::from(Divisor::LIMIT - 1));
        if pieces > limit { Err(StridedError::TooManyPieces { pieces, limit }) } else { Ok(()) }
    }
}

/// Bytes that every region of a side must have, or `None` beyond 2^62. Checks the side's counts and its regions.
fn reach(name: SideName, side: &StridedSide, shape: &StridedShape) -> Result<Option<u64>, StridedError> {
    if side.parts == 0 {
        return Err(StridedError::NoParts { side: name });
    }
    let limit = u64::from(Divisor::LIMIT);
    for (what, value) in [("blocks", side.blocks), ("parts", side.parts), ("regions", side.regions)] {
        if value > limit {
            return Err(StridedError::TooMany { side: name, what, value, limit });
        }
    }
    let last = side.blocks.checked_sub(1).ok_or(StridedError::NoBlocks { side: name })?;
    let wide = u128::from;
    let (block, part) = (last / side.parts, last % side.parts);
    let mut offset = wide(block) * wide(side.block_stride) + wide(part) * wide(side.part_stride);
    if block > 0 {
        // The block before is whole, and may reach further than the first parts of the last.
        let before =
            wide(block - 1) * wide(side.block_stride) + wide(side.parts - 1) * wide(side.part_stride);
        offset = offset.max(before);
    }
    let mut region = wide(side.start_region) + wide(block) * wide(side.block_region);
    offset += wide(side.start_offset);
    for l in &shape.loops {
        let (stride, step) = match name {
            SideName::Source => (l.src_stride, l.src_region),
            SideName::Destination => (l.dst_stride, l.dst_region),
        };
        // Saturation only has to stay beyond every limit.
        offset = offset.saturating_add(wide(l.count - 1) * wide(stride));
        region = region.saturating_add(wide(l.count - 1) * wide(step));
    }
    if region >= wide(side.regions) {
        let region = u64::try_from(region).unwrap_or(u64::MAX);
        return Err(StridedError::RegionOutside { side: name, region, regions: side.regions });
    }
    let end = offset.saturating_add(wide(shape.run_bytes));
    Ok(u64::try_from(end).ok().filter(|_| end <= MAX_REACH))
}

const fn within_regions(l: &StridedLoop) -> bool {
    l.src_region == 0 && l.dst_region == 0
}

/// Grows the run over loops that continue it on both sides.
fn absorb(loops: &mut Vec<StridedLoop>, mut run: u64) -> u64 {
    let continues = |l: &StridedLoop, run| within_regions(l) && l.src_stride == run && l.dst_stride == run;
    while let Some(at) = loops.iter().position(|l| continues(l, run)) {
        run *= loops.swap_remove(at).count;
    }
    run
}

/// Fuses pairs of loops that are one loop on both sides.
fn merge(loops: &mut Vec<StridedLoop>) {
    let wraps = |outer: &StridedLoop, inner: &StridedLoop| {
        let all = |step: u64| step.checked_mul(inner.count);
        all(inner.src_stride) == Some(outer.src_stride)
            && all(inner.dst_stride) == Some(outer.dst_stride)
            && all(inner.src_region) == Some(outer.src_region)
            && all(inner.dst_region) == Some(outer.dst_region)
            && outer.count.checked_mul(inner.count).is_some()
    };
    let mut outer = 0;
    while outer < loops.len() {
        let found = (0..loops.len()).find(|&inner| inner != outer && wraps(&loops[outer], &loops[inner]));
        match found {
            Some(inner) => {
                loops[inner].count *= loops[outer].count;
                loops.swap_remove(outer);
                outer = 0;
            }
            None => outer += 1,
        }
    }
}

/// Outermost first, so that the walked side's addresses rise as far as they can.
fn sort(loops: &mut [StridedLoop], walk: Walk) {
    loops.sort_by_key(|l| {
        let (src, dst) = ((l.src_region, l.src_stride), (l.dst_region, l.dst_stride));
        std::cmp::Reverse(match walk {
            Walk::Source => (src, dst),
            Walk::Destination => (dst, src),
        })
    });
}

/// The widest access, up to 16 bytes, at which every run begins on both sides and of which it is a multiple.
fn unit(shape: &StridedShape, loops: &[StridedLoop], run: u64, src_align: u64, dst_align: u64) -> u64 {
    let sides = [&shape.src, &shape.dst].into_iter();
    let of_sides = sides.map(|s| {
        let blocks = if s.blocks > s.parts { s.block_stride } else { 0 };
        let parts = if s.parts > 1 { s.part_stride } else { 0 };
        s.start_offset | blocks | parts
    });
    let of_loops = loops.iter().map(|l| l.src_stride | l.dst_stride);
    let bits =
        of_sides.chain(of_loops).fold(MAX_UNIT | src_align | dst_align | run, |bits, value| bits | value);
    1 << bits.trailing_zeros()
}
