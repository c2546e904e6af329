//! The parameter structs, field for field those of `strided_copy.cuh`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Divisor;

/// Most loops around a run, after merging.
pub const STRIDED_LOOPS: usize = 6;
/// Parameter bytes of the kernels for short lists.
pub const PARAM_BYTES_SMALL: usize = 4096;
/// Parameter bytes of the kernels for long lists; the driver's limit is 32,764.
pub const PARAM_BYTES_LARGE: usize = 32760;
/// Region bases and id pairs that fit into the small parameters, together.
pub const INLINE_WORDS_SMALL: usize = (PARAM_BYTES_SMALL - size_of::<StridedHeader>()) / 8;
/// Region bases and id pairs that fit into the large parameters, together.
pub const INLINE_WORDS_LARGE: usize = (PARAM_BYTES_LARGE - size_of::<StridedHeader>()) / 8;

/// `ids_kind`: packed pairs among the parameters.
pub(super) const IDS_INLINE: u32 = 0;
/// `ids_kind`: packed pairs in memory.
pub(super) const IDS_TABLE: u32 = 1;
/// `ids_kind`: two arrays of ids in memory, checked by the kernel.
pub(super) const IDS_SEPARATE: u32 = 2;

/// One loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StridedLoopParams {
    /// Bytes per step of the source.
    pub src_stride: u64,
    /// Bytes per step of the destination.
    pub dst_stride: u64,
    /// Regions per step of the source.
    pub src_region: u32,
    /// Regions per step of the destination.
    pub dst_region: u32,
    /// Iterations.
    pub steps: Divisor,
}

/// One side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StridedSideParams {
    /// Device-visible table of base addresses; 0: they are inline.
    pub bases: u64,
    /// Bytes before block 0.
    pub start: u64,
    /// Bytes between blocks.
    pub block_stride: u64,
    /// Bytes between the parts of a block.
    pub part_stride: u64,
    /// Device-visible ids of this side, when they come separately.
    pub ids: u64,
    /// Bytes of one of those: 4 or 8.
    pub id_bytes: u32,
    /// Ids are below this.
    pub blocks: u32,
    /// Region of block 0.
    pub start_region: u32,
    /// Regions between blocks.
    pub block_region: u32,
    /// Inline word at which the bases begin.
    pub bases_at: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Ids per block.
    pub parts: Divisor,
}

/// Everything but the inline words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StridedHeader {
    /// Where blocks come from.
    pub src: StridedSideParams,
    /// Where blocks go to.
    pub dst: StridedSideParams,
    /// Device-visible packed pairs, when they are in memory.
    pub pair_table: u64,
    /// Device-visible [`StridedReport`], when ids come separately.
    pub report: u64,
    /// Bytes of a run.
    pub run_bytes: u64,
    /// Tile: bytes of a piece of a run.
    pub chunk_bytes: u64,
    /// Pieces to copy, below 2^31.
    pub items: u32,
    /// Loops in use.
    pub loops: u32,
    /// Where ids come from.
    pub ids_kind: u32,
    /// Inline word at which packed pairs begin.
    pub ids_at: u32,
    /// Tile: base-2 logarithm of the threads of a team; word: of the bytes of a unit.
    pub lane_shift: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Items of one pair.
    pub per_pair: Divisor,
    /// Pieces of one run.
    pub inner: Divisor,
    /// Loops, outermost first.
    pub loop_: [StridedLoopParams; STRIDED_LOOPS],
}

/// What a launch with separate ids leaves at the report's address. Zero it before; `state` is 0 as long as all ids were
/// good, and the fields of the first bad one are complete once the launch has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StridedReport {
    /// 0: no bad id. 1: the rest tells of one.
    pub state: u32,
    /// 0: source, 1: destination.
    pub side: u32,
    /// Position in the list of ids.
    pub index: u64,
    /// The id found there.
    pub value: i64,
    /// It should have been in `0..limit`.
    pub limit: u64,
}

const _: () = assert!(size_of::<StridedLoopParams>() == 40 && align_of::<StridedLoopParams>() == 8);
const _: () = assert!(size_of::<StridedSideParams>() == 80 && align_of::<StridedSideParams>() == 8);
const _: () = assert!(size_of::<StridedHeader>() == 488 && align_of::<StridedHeader>() == 8);
const _: () = assert!(size_of::<StridedReport>() == 32 && align_of::<StridedReport>() == 8);

/// Room for the parameters of any launch; reused from launch to launch, since only what a launch needs is written.
#[derive(Clone)]
pub struct ParamBuffer {
    words: Box<[u64]>,
}

impl ParamBuffer {
    /// Zeroed. Allocates 32 KiB: keep it.
    #[must_use]
    pub fn new() -> Self {
        Self { words: vec![0; PARAM_BYTES_LARGE / 8].into_boxed_slice() }
    }

    /// Header and inline words.
    pub(super) fn split_mut(&mut self) -> (&mut [u64], &mut [u64]) {
        self.words.split_at_mut(size_of::<StridedHeader>() / 8)
    }

    pub(super) fn bytes(&self, count: usize) -> &[u8] {
        let bytes = self.words.as_bytes();
        bytes.get(..count).unwrap_or(bytes)
    }
}

impl Default for ParamBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ParamBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParamBuffer").finish_non_exhaustive()
    }
}
