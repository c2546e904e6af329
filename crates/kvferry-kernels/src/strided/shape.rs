//! What a strided copy looks like, in the words of layouts.

/// One loop around a run: how often, and how far both sides step each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StridedLoop {
    /// Iterations, at least 1.
    pub count: u64,
    /// Bytes the source steps.
    pub src_stride: u64,
    /// Bytes the destination steps.
    pub dst_stride: u64,
    /// Regions the source steps.
    pub src_region: u64,
    /// Regions the destination steps.
    pub dst_region: u64,
}

/// How a side places its blocks. Block `id` begins in region `start_region + id / parts * block_region`, at byte
/// `start_offset + id / parts * block_stride + id % parts * part_stride` of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StridedSide {
    /// Region of block 0.
    pub start_region: u64,
    /// Byte of block 0 in its region.
    pub start_offset: u64,
    /// Ids per block of the layout, at least 1: more than 1 where the other side has finer pages.
    pub parts: u64,
    /// Bytes between the parts of a block.
    pub part_stride: u64,
    /// Bytes between blocks.
    pub block_stride: u64,
    /// Regions between blocks.
    pub block_region: u64,
    /// Legal ids are `0..blocks`.
    pub blocks: u64,
    /// Regions of the side: entries of its table of base addresses.
    pub regions: u64,
}

/// The side on which neighbouring threads touch neighbouring addresses where one must be chosen: the one behind PCIe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Walk {
    /// Source order: host to device.
    Source,
    /// Destination order: device to host, and between devices.
    Destination,
}

/// What lies between the two sides; decides how runs are dealt, never what is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Link {
    /// One side is host memory, behind PCIe: short accesses become short packets.
    #[default]
    Pcie,
    /// Both sides are GPU memory, of one GPU or of two.
    Gpu,
}

/// A copy of blocks between two strided layouts, before any id or address is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StridedShape {
    /// Where blocks come from.
    pub src: StridedSide,
    /// Where blocks go to.
    pub dst: StridedSide,
    /// Loops inside a block, in any order. Distinct runs of one block must not overlap in the destination.
    pub loops: Vec<StridedLoop>,
    /// Bytes of a run, at least 1.
    pub run_bytes: u64,
    /// The side to walk in address order.
    pub walk: Walk,
}

/// A side, in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SideName {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

impl std::fmt::Display for SideName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// A shape that the kernels cannot copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StridedError {
    /// A run has no bytes.
    #[error("run_bytes is 0; a run has at least one byte")]
    EmptyRun,
    /// A loop never runs.
    #[error("loop {index} has count 0; a loop runs at least once")]
    EmptyLoop {
        /// Position in [`StridedShape::loops`].
        index: usize,
    },
    /// No id is legal.
    #[error("{side} blocks is 0; there is nothing to copy")]
    NoBlocks {
        /// The side.
        side: SideName,
    },
    /// A block has no parts.
    #[error("{side} parts is 0; a block has at least one part")]
    NoParts {
        /// The side.
        side: SideName,
    },
    /// More loops are left after merging than the parameters hold.
    #[error("{loops} loops are left after merging; the limit is {limit}")]
    TooManyLoops {
        /// Loops left.
        loops: usize,
        /// Most that fit.
        limit: usize,
    },
    /// Ids, parts or regions are counted in 31 bits.
    #[error("{side} {what} is {value}; the limit is {limit}")]
    TooMany {
        /// The side.
        side: SideName,
        /// `blocks`, `parts` or `regions`.
        what: &'static str,
        /// Value given.
        value: u64,
        /// Largest value.
        limit: u64,
    },
    /// A legal id leads to a region that is not there.
    #[error("{side} reaches region {region}, but has {regions}")]
    RegionOutside {
        /// The side.
        side: SideName,
        /// The furthest region.
        region: u64,
        /// Regions of the side.
        regions: u64,
    },
    /// A legal id leads beyond 2^62 bytes.
    #[error("{side} reaches beyond 2^62 bytes in a region")]
    TooFar {
        /// The side.
        side: SideName,
    },
    /// One block has more pieces than an index counts.
    #[error("a block has {pieces} pieces of a run; the limit is {limit}")]
    TooManyPieces {
        /// Pieces of one block, at least.
        pieces: u64,
        /// Most.
        limit: u64,
    },
    /// Not a power of two.
    #[error("{side} alignment is {align}; it must be a power of two")]
    BadAlign {
        /// The side.
        side: SideName,
        /// Value given.
        align: u64,
    },
}
