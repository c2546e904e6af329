//! One launch of a plan.

use zerocopy::{FromZeros, IntoBytes};

use super::params::{
    IDS_INLINE, IDS_SEPARATE, IDS_TABLE, INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, ParamBuffer, StridedHeader,
    StridedLoopParams, StridedSideParams,
};
use super::plan::MIN_CHUNK;
use super::{Divisor, StridedCopyPlan, StridedMode, StridedSide};
use crate::{GeometryError, Kernel, LaunchGeometry};

/// Threads of a CTA where CTAs have a multiprocessor to themselves: 64 KiB on their way per CTA.
const MAX_BLOCK: u32 = 1024;
/// Smaller CTAs gain nothing.
const MIN_BLOCK: u32 = 128;
/// Accesses a thread keeps in flight.
const IN_FLIGHT: u64 = 4;
/// Rounds of those that a thread makes of a piece of a long run: with two, twice as many pieces are under way in a CTA, and
/// one's addresses are found while another's bytes travel (within an H200, runs of 4 and 64 KiB: 0.913 of a memcpy with one
/// round, 0.919 and 0.922 with two).
const ROUNDS: u64 = 2;
/// Bytes of a long run. In shorter ones neighbouring threads had better stay neighbours.
const LONG_RUN: u64 = 4096;
/// More CTAs than this are no help, and keep the kernel's index arithmetic in 32 bits.
const MAX_GRID: u64 = 65_535;

/// Where region bases are.
#[derive(Clone, Copy, Debug)]
pub enum Bases<'a> {
    /// They travel with the launch.
    Inline {
        /// Base addresses of the source regions.
        src: &'a [u64],
        /// Base addresses of the destination regions.
        dst: &'a [u64],
    },
    /// They are in memory that the device reads.
    Table {
        /// Address of a u64 per source region.
        src: u64,
        /// Address of a u64 per destination region.
        dst: u64,
    },
}

/// Where ids are.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// They travel with the launch, packed: `source | destination << 32`. Checked by the caller.
    Inline(&'a [u64]),
    /// Address of packed pairs in memory that the device reads. Checked by the caller.
    Table(u64),
    /// Two arrays of signed ids, checked by the kernel: a pair with a bad id is skipped and reported.
    Separate {
        /// Address of the source ids, a multiple of `src_width`.
        src: u64,
        /// Bytes of a source id: 4 or 8.
        src_width: u8,
        /// Address of the destination ids, a multiple of `dst_width`.
        dst: u64,
        /// Bytes of a destination id: 4 or 8.
        dst_width: u8,
        /// Address of a [`StridedReport`](super::StridedReport), a multiple of 8.
        report: u64,
    },
}

/// A launch: the kernel, its shape, and its parameters but for addresses and ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StridedLaunch {
    /// What to launch.
    pub kernel: Kernel,
    /// How to launch it; empty when there are no pairs.
    pub geometry: LaunchGeometry,
    header: StridedHeader,
    pairs: usize,
    src_regions: usize,
    dst_regions: usize,
    room: usize,
}

impl StridedCopyPlan {
    /// Shapes a launch over `pairs` id pairs, of which `inline_words` words (bases and packed pairs) are to travel with
    /// it. No more than `max_ctas` CTAs run ([`StridedCopyPlan::enough_ctas`]); little work takes fewer and smaller
    /// ones. Constant time.
    ///
    /// # Errors
    /// [`GeometryError`] if `sm_count` or `max_ctas` is 0, `pairs` exceeds [`StridedCopyPlan::max_pairs`], or the words
    /// do not fit.
    pub fn launch(
        &self,
        pairs: u32,
        inline_words: usize,
        sm_count: u32,
        max_ctas: u32,
    ) -> Result<StridedLaunch, GeometryError> {
        if sm_count == 0 {
            return Err(GeometryError::NoMultiprocessors);
        }
        if max_ctas == 0 {
            return Err(GeometryError::NoCtas);
        }
        if pairs > self.max_pairs() {
            return Err(GeometryError::TooManyPairs { pairs: pairs.into(), limit: self.max_pairs().into() });
        }
        if inline_words > INLINE_WORDS_LARGE {
            return Err(GeometryError::TooManyWords { words: inline_words, limit: INLINE_WORDS_LARGE });
        }
        let large = inline_words > INLINE_WORDS_SMALL;
        let kernel = match (self.mode(), large) {
            (StridedMode::Tile, false) => Kernel::StridedTile,
            (StridedMode::Tile, true) => Kernel::StridedTileLarge,
            (StridedMode::Word, false) => Kernel::StridedWord,
            (StridedMode::Word, true) => Kernel::StridedWordLarge,
        };
        let shape = match self.mode() {
            StridedMode::Tile => self.tile_shape(u64::from(pairs), max_ctas),
            StridedMode::Word => self.word_shape(u64::from(pairs), sm_count, max_ctas),
        };
        Ok(StridedLaunch {
            kernel,
            geometry: LaunchGeometry { grid: shape.grid, block: shape.block, shared: 0 },
            header: self.header(pairs, &shape),
            pairs: pairs as usize,
            src_regions: self.src.regions as usize,
            dst_regions: self.dst.regions as usize,
            room: if large { INLINE_WORDS_LARGE } else { INLINE_WORDS_SMALL },
        })
    }

    /// Chunks as long as a CTA has in flight; shorter where there is less than that per CTA.
    fn tile_shape(&self, pairs: u64, max_ctas: u32) -> Shape {
        let ctas = u64::from(max_ctas);
        // Bytes of one access at the worst alignment: teams are wide enough for that.
        let unit = self.unit;
        let total = pairs.saturating_mul(self.runs).saturating_mul(self.run_bytes);
        let share = total.div_ceil(ctas).max(1);
        let in_flight = u64::from(MAX_BLOCK) * unit * IN_FLIGHT;
        let (chunk, per_thread) = if share >= in_flight {
            let rounds = if self.run_bytes >= LONG_RUN { ROUNDS } else { 1 };
            (in_flight, unit * IN_FLIGHT * rounds)
        } else {
            let chunk = share.next_multiple_of(MIN_CHUNK).min(in_flight);
            (chunk, share.div_ceil(u64::from(MAX_BLOCK)).next_multiple_of(unit).clamp(unit, unit * IN_FLIGHT))
        };
        let (chunk, inner) = if self.run_bytes <= chunk {
            (self.run_bytes.next_multiple_of(16), 1)
        } else {
            (chunk, self.run_bytes.div_ceil(chunk))
        };
        let items = pairs * self.runs * inner;
        let team = power_of_two(chunk.min(self.run_bytes).div_ceil(per_thread), 1, MAX_BLOCK);
        let threads = items.saturating_mul(u64::from(team)).div_ceil(ctas);
        let block = power_of_two(threads, team.max(MIN_BLOCK), MAX_BLOCK);
        let grid = items.div_ceil(u64::from(block / team)).min(ctas).min(MAX_GRID);
        Shape { grid: grid as u32, block, inner, chunk, lane_shift: team.trailing_zeros() }
    }

    /// Units to threads; up to four per thread and turn.
    fn word_shape(&self, pairs: u64, sm_count: u32, max_ctas: u32) -> Shape {
        let ctas = u64::from(max_ctas);
        let inner = self.run_bytes / self.unit;
        let items = pairs * self.runs * inner;
        // Where CTAs share a multiprocessor, halves of the size overlap better.
        let most = if max_ctas > sm_count { MAX_BLOCK / 2 } else { MAX_BLOCK };
        let block = power_of_two(items.div_ceil(ctas), MIN_BLOCK, most);
        let grid = items.div_ceil(u64::from(block)).min(ctas).min(MAX_GRID);
        Shape { grid: grid as u32, block, inner, chunk: 0, lane_shift: self.unit.trailing_zeros() }
    }

    fn header(&self, pairs: u32, shape: &Shape) -> StridedHeader {
        let one = |count: u64| Divisor::new(count).unwrap_or(Divisor::ONE);
        let mut header = StridedHeader::new_zeroed();
        header.src = side(&self.src);
        header.dst = side(&self.dst);
        header.run_bytes = self.run_bytes;
        header.chunk_bytes = shape.chunk;
        let per_pair = self.runs * shape.inner;
        // Within 31 bits: `max_pairs` sees to it.
        header.items = (u64::from(pairs) * per_pair) as u32;
        header.loops = self.loops.len() as u32;
        header.lane_shift = shape.lane_shift;
        header.per_pair = one(per_pair);
        header.inner = one(shape.inner);
        let unused = StridedLoopParams {
            src_stride: 0,
            dst_stride: 0,
            src_region: 0,
            dst_region: 0,
            steps: Divisor::ONE,
        };
        header.loop_ = std::array::from_fn(|at| self.loops.get(at).copied().unwrap_or(unused));
        header
    }
}

struct Shape {
    grid: u32,
    block: u32,
    inner: u64,
    chunk: u64,
    lane_shift: u32,
}

/// The smallest power of two that is at least `wanted`, within bounds that are powers of two themselves.
fn power_of_two(wanted: u64, least: u32, most: u32) -> u32 {
    match u32::try_from(wanted) {
        Ok(wanted) if wanted < most => wanted.next_power_of_two().max(least),
        _ => most,
    }
}

fn side(side: &StridedSide) -> StridedSideParams {
    let mut params = StridedSideParams::new_zeroed();
    params.start = side.start_offset;
    params.block_stride = side.block_stride;
    params.part_stride = side.part_stride;
    params.blocks = side.blocks as u32;
    params.start_region = side.start_region as u32;
    // With one block a step of any size is never taken.
    params.block_region = if side.blocks > side.parts { side.block_region as u32 } else { 0 };
    params.parts = Divisor::new(side.parts).unwrap_or(Divisor::ONE);
    params
}

impl StridedLaunch {
    /// Bytes of the parameters.
    #[must_use]
    pub const fn param_bytes(&self) -> usize {
        self.kernel.param_bytes()
    }

    /// Writes the parameters; what they are is valid until `out` is written again. Proportional to the inline words.
    ///
    /// # Errors
    /// [`GeometryError::WrongWords`] if the numbers of bases or ids are not those of the plan and the launch, or more
    /// words come inline than the launch was made for.
    pub fn write_params<'a>(
        &self,
        bases: Bases<'_>,
        ids: Ids<'_>,
        out: &'a mut ParamBuffer,
    ) -> Result<&'a [u8], GeometryError> {
        let mut header = self.header;
        let (head, tail) = out.split_mut();
        let mut at = 0;
        match bases {
            Bases::Inline { src, dst } => {
                expect("source bases", src.len(), self.src_regions)?;
                expect("destination bases", dst.len(), self.dst_regions)?;
                header.src.bases_at = self.put(tail, &mut at, src)?;
                header.dst.bases_at = self.put(tail, &mut at, dst)?;
            }
            Bases::Table { src, dst } => (header.src.bases, header.dst.bases) = (src, dst),
        }
        match ids {
            Ids::Inline(pairs) => {
                expect("pairs", pairs.len(), self.pairs)?;
                header.ids_kind = IDS_INLINE;
                header.ids_at = self.put(tail, &mut at, pairs)?;
            }
            Ids::Table(table) => (header.ids_kind, header.pair_table) = (IDS_TABLE, table),
            Ids::Separate { src, src_width, dst, dst_width, report } => {
                for width in [src_width, dst_width] {
                    if width != 4 && width != 8 {
                        return Err(GeometryError::IdWidth { width });
                    }
                }
                header.ids_kind = IDS_SEPARATE;
                (header.src.ids, header.src.id_bytes) = (src, src_width.into());
                (header.dst.ids, header.dst.id_bytes) = (dst, dst_width.into());
                header.report = report;
            }
        }
        head.as_mut_bytes().copy_from_slice(header.as_bytes());
        Ok(out.bytes(self.param_bytes()))
    }

    fn put(&self, tail: &mut [u64], at: &mut usize, words: &[u64]) -> Result<u32, GeometryError> {
        let (begin, end) = (*at, *at + words.len());
        let Some(room) = tail.get_mut(begin..end).filter(|_| end <= self.room) else {
            return Err(GeometryError::TooManyWords { words: end, limit: self.room });
        };
        room.copy_from_slice(words);
        *at = end;
        Ok(begin as u32)
    }
}

fn expect(what: &'static str, given: usize, wanted: usize) -> Result<(), GeometryError> {
    if given == wanted { Ok(()) } else { Err(GeometryError::WrongWords { what, given, wanted }) }
}
