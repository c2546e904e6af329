//! Parameters and geometry of the kernel in `cuda/include/kvferry/vectorized_copy.cuh`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{GeometryError, LaunchGeometry};

/// Launch bounds of the kernel: its registers allow this many threads on a multiprocessor, in CTAs of any size.
const MAX_BLOCK: u32 = 1024;
/// Smaller CTAs gain nothing and leave the scheduler more to do.
const MIN_BLOCK: u32 = 128;
/// Threads that share one item, at least: eight 16-byte accesses are one 128-byte line.
const MIN_TEAM: u32 = 8;
/// Bytes of one access.
const UNIT: u64 = 16;
/// Accesses a thread keeps in flight.
const IN_FLIGHT: u64 = 4;
/// Chunks are multiples of this: short enough to spread one pair, long enough to hide the table look-up.
const CHUNK_STEP: u64 = 4 << 10;
/// Beyond this a longer chunk only makes the last turn of the grid more uneven.
const MAX_CHUNK: u64 = MAX_BLOCK as u64 * UNIT * IN_FLIGHT;
/// Sums of items and of the grid's teams stay far from the end of 64 bits.
const MAX_BYTES: u64 = 1 << 62;

/// Argument of [`Kernel::VectorizedCopy`](crate::Kernel::VectorizedCopy), passed by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VectorizedCopyParams {
    /// Device-visible address of `pairs` source addresses, a multiple of 8.
    pub src_table: u64,
    /// Device-visible address of `pairs` destination addresses, a multiple of 8. Destinations must not overlap.
    pub dst_table: u64,
    /// Number of pairs.
    pub pairs: u64,
    /// Bytes of every pair.
    pub bytes: u64,
    /// Bytes of one work item; a multiple of 16 unless a pair is one item.
    pub chunk_bytes: u64,
    /// Work items per pair: `bytes / chunk_bytes`, rounded up.
    pub chunks_per_pair: u64,
    /// Base-2 logarithm of the threads that share an item; divides the CTA.
    pub team_shift: u32,
    /// Must be 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<VectorizedCopyParams>() == 56);
const _: () = assert!(align_of::<VectorizedCopyParams>() == 8);

impl VectorizedCopyParams {
    /// The argument for a launch of `geometry`, which was made for the same `pairs` and `bytes`.
    #[must_use]
    pub const fn new(
        src_table: u64,
        dst_table: u64,
        pairs: u64,
        bytes: u64,
        geometry: &VectorizedCopyGeometry,
    ) -> Self {
        Self {
            src_table,
            dst_table,
            pairs,
            bytes,
            chunk_bytes: geometry.chunk_bytes,
            chunks_per_pair: geometry.chunks_per_pair,
            team_shift: geometry.team_shift,
            reserved: 0,
        }
    }
}

/// How the copy is cut into items and laid on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorizedCopyGeometry {
    /// The launch itself.
    pub launch: LaunchGeometry,
    /// Bytes of one work item.
    pub chunk_bytes: u64,
    /// Work items per pair.
    pub chunks_per_pair: u64,
    /// Base-2 logarithm of the threads that share an item.
    pub team_shift: u32,
}

/// Shapes a copy of `pairs` runs of `bytes_per_pair` bytes for a GPU of `sm_count` multiprocessors.
///
/// Without `max_ctas` the grid fills the GPU once and walks the rest; with it the grid stays below, which is what
/// PCIe wants (4 to 16 CTAs saturate it). Large pairs are cut into chunks so that few of them fill the grid; small ones
/// share a CTA. No pairs or no bytes give an empty launch. Takes constant time.
///
/// # Errors
/// [`GeometryError`] if `sm_count` or `max_ctas` is 0 or the work exceeds 2^62 bytes.
pub fn vectorized_copy_geometry(
    pairs: u64,
    bytes_per_pair: u64,
    sm_count: u32,
    max_ctas: Option<u32>,
) -> Result<VectorizedCopyGeometry, GeometryError> {
    if sm_count == 0 {
        return Err(GeometryError::NoMultiprocessors);
    }
    if max_ctas == Some(0) {
        return Err(GeometryError::NoCtas);
    }
    if pairs == 0 || bytes_per_pair == 0 {
        let launch = LaunchGeometry { grid: 0, block: MIN_BLOCK, shared: 0 };
        return Ok(VectorizedCopyGeometry { launch, chunk_bytes: UNIT, chunks_per_pair: 1, team_shift: 3 });
    }
    let total = pairs
        .checked_mul(bytes_per_pair)
        .filter(|total| *total <= MAX_BYTES)
        .ok_or(GeometryError::TooLarge { pairs, bytes_per_pair })?;
    // Pairs below one unit still cost a turn each.
    let turns = total.div_ceil(UNIT).max(pairs);

    // One CTA of MAX_BLOCK threads fills a multiprocessor.
    let ctas = u64::from(max_ctas.map_or(sm_count, |max| max.min(sm_count)));
    let chunk_bytes = total.div_ceil(ctas).next_multiple_of(CHUNK_STEP).min(MAX_CHUNK);
    let (chunk_bytes, chunks_per_pair) = if bytes_per_pair <= chunk_bytes {
        (bytes_per_pair.next_multiple_of(UNIT), 1)
    } else {
        (chunk_bytes, bytes_per_pair.div_ceil(chunk_bytes))
    };
    let items = pairs * chunks_per_pair;

    // Little work: one access per thread, for the shortest path. Much work: several in flight per thread.
    let per_thread = if turns <= ctas * u64::from(MAX_BLOCK) { UNIT } else { UNIT * IN_FLIGHT };
    let team = power_of_two(chunk_bytes.div_ceil(per_thread), MIN_TEAM, MAX_BLOCK);
    let threads = items.saturating_mul(u64::from(team));
    let block = power_of_two(threads.div_ceil(ctas), team.max(MIN_BLOCK), MAX_BLOCK);
    // Small CTAs share a multiprocessor; an explicit limit counts CTAs whatever their size.
    let most = max_ctas.map_or_else(|| ctas * u64::from(MAX_BLOCK / block), u64::from);
    let grid = items.div_ceil(u64::from(block / team)).min(most).min(i32::MAX as u64);
    Ok(VectorizedCopyGeometry {
        launch: LaunchGeometry { grid: u32::try_from(grid).unwrap_or(u32::MAX), block, shared: 0 },
        chunk_bytes,
        chunks_per_pair,
        team_shift: team.trailing_zeros(),
    })
}

/// The smallest power of two that is at least `wanted`, within bounds that are powers of two themselves.
fn power_of_two(wanted: u64, least: u32, most: u32) -> u32 {
    match u32::try_from(wanted) {
        Ok(wanted) if wanted < most => wanted.next_power_of_two().max(least),
        _ => most,
    }
}

#[cfg(test)]
#[path = "vectorized_copy_tests.rs"]
mod tests;
