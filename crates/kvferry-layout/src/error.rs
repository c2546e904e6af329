//! Typed errors: what, where, how much.

use crate::axis::Axis;
use crate::dtype::Dtype;
use crate::kind::KvOrder;

/// A layout, view or region that cannot be what it claims to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A size outside its legal range.
    #[error("{field} must be between {min} and {max}, got {value}")]
    Size {
        /// Field name.
        field: &'static str,
        /// Value given.
        value: u64,
        /// Smallest legal value.
        min: u64,
        /// Largest legal value.
        max: u64,
    },
    /// A field that has no default was not given.
    #[error("{field} is required")]
    Missing {
        /// Field name.
        field: &'static str,
    },
    /// Both `inner_dim` and heads were given, or other fields that exclude each other.
    #[error("{left} and {right} exclude each other")]
    Exclusive {
        /// First field.
        left: &'static str,
        /// Second field.
        right: &'static str,
    },
    /// A product or sum of sizes leaves 63 bits.
    #[error("{what} exceeds the addressable 2^63 - 1 bytes")]
    Overflow {
        /// Quantity that overflowed.
        what: &'static str,
    },
    /// Alignment is not a power of two.
    #[error("alignment must be a power of two, got {value}")]
    Alignment {
        /// Value given.
        value: u64,
    },
    /// Unknown element type name.
    #[error(
        "unknown dtype {name:?}; known: float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, int8, uint8, int16, int32, int64"
    )]
    UnknownDtype {
        /// Name given.
        name: String,
    },
    /// A word that is not one of the words of an option.
    #[error("{option} must be one of {allowed}, got {value:?}")]
    UnknownWord {
        /// Option name.
        option: &'static str,
        /// Legal words.
        allowed: &'static str,
        /// Word given.
        value: String,
    },
    /// Unknown axis name.
    #[error("unknown axis {name:?}; axes are block, layer, outer, page, head, dim")]
    UnknownAxis {
        /// Name given.
        name: String,
    },
    /// The same axis named twice.
    #[error("axis {axis} is named twice")]
    AxisTwice {
        /// The axis.
        axis: Axis,
    },
    /// An axis with an extent above one is missing from a declared order.
    #[error("axes must name {axis}: {why}")]
    AxisMissing {
        /// The axis.
        axis: Axis,
        /// Why it is needed.
        why: &'static str,
    },
    /// A block order the layout kind cannot hold.
    #[error("{kind} cannot hold {order} blocks: its regions would cut every head row of a block")]
    OrderNotAllowed {
        /// Layout kind.
        kind: &'static str,
        /// Order asked for.
        order: KvOrder,
    },
    /// Two elements would share bytes.
    #[error("axis {axis} steps {stride} bytes, but the axes inside it span {span}: elements would overlap")]
    AxesOverlap {
        /// Outer axis of the two.
        axis: Axis,
        /// Its byte stride.
        stride: u64,
        /// Bytes spanned by one step of it.
        span: u64,
    },
    /// A coordinate outside its axis.
    #[error("{axis} {value} is out of range: the layout has {limit}")]
    Coordinate {
        /// Axis.
        axis: Axis,
        /// Coordinate given.
        value: u64,
        /// Extent of the axis.
        limit: u64,
    },
    /// A range that is empty, reversed or beyond its axis.
    #[error("{axis} range {start}..{end} is not a non-empty part of {first}..{limit}")]
    Range {
        /// Axis.
        axis: Axis,
        /// Start given.
        start: u64,
        /// End given.
        end: u64,
        /// First legal coordinate.
        first: u64,
        /// End of the legal coordinates.
        limit: u64,
    },
    /// A size that should divide another does not.
    #[error("{what}: {value} is not a multiple of {by}")]
    NotDivisible {
        /// What was divided.
        what: &'static str,
        /// Dividend.
        value: u64,
        /// Divisor.
        by: u64,
    },
    /// A part of a block that is not one contiguous stretch of bytes.
    #[error(
        "block {block}, layer {layer}, outer {outer} is not contiguous: axis {axis} steps {stride} bytes where {expected} were needed"
    )]
    NotContiguous {
        /// Block id.
        block: u64,
        /// Layer.
        layer: u64,
        /// K or V.
        outer: u64,
        /// First axis that breaks contiguity.
        axis: Axis,
        /// Its stride in bytes.
        stride: u64,
        /// The stride that would have been contiguous.
        expected: u64,
    },
    /// Wrong number of regions.
    #[error("{kind} needs {expected} region(s), got {got}")]
    RegionCount {
        /// Layout kind.
        kind: &'static str,
        /// Regions needed.
        expected: u64,
        /// Regions given.
        got: u64,
    },
    /// A region shorter than the layout needs.
    #[error("region {region} holds {got} bytes, the layout needs {needed}")]
    RegionTooSmall {
        /// Region index.
        region: u64,
        /// Bytes needed.
        needed: u64,
        /// Bytes given.
        got: u64,
    },
    /// A region that does not start at the promised alignment.
    #[error("region {region} starts at {addr:#x}, which is not a multiple of {alignment}")]
    Misaligned {
        /// Region index.
        region: u64,
        /// Address given.
        addr: u64,
        /// Alignment promised.
        alignment: u64,
    },
    /// A foreign array that contradicts the declared configuration or its siblings.
    #[error("{what}: {axis} is {got}, expected {expected}")]
    ExtentMismatch {
        /// Which array.
        what: String,
        /// Axis.
        axis: Axis,
        /// Extent found.
        got: u64,
        /// Extent expected.
        expected: u64,
    },
    /// Two regions of one layout share bytes, so that writes to one would change the other.
    #[error(
        "regions {first} and {second} of the layout share memory: it can be read from, but not written to"
    )]
    RegionsAlias {
        /// Region index.
        first: usize,
        /// Another region index.
        second: usize,
    },
    /// A descriptor that cannot be read.
    #[error("layout descriptor: {reason}")]
    Descriptor {
        /// What is wrong with it.
        reason: String,
    },
    /// A foreign array with another number of dimensions than axes were named.
    #[error("{what} has {got} dimensions, but {expected} axes are named")]
    Rank {
        /// Which array.
        what: String,
        /// Dimensions found.
        got: usize,
        /// Axes named.
        expected: usize,
    },
    /// A foreign array that runs backwards along an axis.
    #[error("{what}: {axis} has the negative stride {stride}; pass a copy or a view that runs forwards")]
    NegativeStride {
        /// Which array.
        what: String,
        /// Axis.
        axis: Axis,
        /// Stride in bytes.
        stride: i64,
    },
    /// Foreign arrays of one layout with different strides.
    #[error("{what}: the stride of {axis} is {got} bytes, expected {expected}")]
    StrideMismatch {
        /// Which array.
        what: String,
        /// Axis.
        axis: Axis,
        /// Stride found.
        got: i64,
        /// Stride expected.
        expected: i64,
    },
    /// A foreign array of another element type than declared.
    #[error("{what}: dtype is {got}, expected {expected}")]
    DtypeMismatch {
        /// Which array.
        what: String,
        /// Type found.
        got: Dtype,
        /// Type expected.
        expected: Dtype,
    },
}

/// Which side of a transfer an error speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The layout read from.
    Source,
    /// The layout written to.
    Destination,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Source => "source",
            Side::Destination => "destination",
        })
    }
}

/// A pair of layouts, or the ids given with it, that no plan can serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Number of layers differs.
    #[error("layer counts differ: source has {src}, destination has {dst}")]
    LayerCount {
        /// Source.
        src: u64,
        /// Destination.
        dst: u64,
    },
    /// K/V extent differs.
    #[error("outer dimensions differ: source has {src}, destination has {dst}")]
    OuterDim {
        /// Source.
        src: u64,
        /// Destination.
        dst: u64,
    },
    /// Neither page size divides the other.
    #[error("page sizes {src} (source) and {dst} (destination) do not divide one another")]
    PageSize {
        /// Source.
        src: u64,
        /// Destination.
        dst: u64,
    },
    /// Head width differs.
    #[error("head_dim differs: source has {src}, destination has {dst}")]
    HeadDim {
        /// Source.
        src: u64,
        /// Destination.
        dst: u64,
    },
    /// Element type differs.
    #[error("dtype differs: source is {src}, destination is {dst}; kvferry moves bytes and does not convert")]
    Dtype {
        /// Source.
        src: Dtype,
        /// Destination.
        dst: Dtype,
    },
    /// Number of heads in the whole model differs.
    #[error(
        "head counts differ: source has {src} heads in all, destination has {dst}; declare a shard with shard_heads() to move part of them"
    )]
    TotalHeads {
        /// Source.
        src: u64,
        /// Destination.
        dst: u64,
    },
    /// Two shards that hold no head in common.
    #[error(
        "no head in common: source holds heads {src_start}..{src_end}, destination {dst_start}..{dst_end}"
    )]
    NoCommonHead {
        /// First source head.
        src_start: u64,
        /// End of the source heads.
        src_end: u64,
        /// First destination head.
        dst_start: u64,
        /// End of the destination heads.
        dst_end: u64,
    },
    /// Layer or head range outside a layout.
    #[error("{side}: {source}")]
    Range {
        /// Side.
        side: Side,
        /// What is wrong with it.
        source: LayoutError,
    },
    /// An order change that the caller forbade.
    #[error("block orders differ ({src} and {dst}) and transform=\"forbid\" was asked for")]
    TransformForbidden {
        /// Source order, outermost first.
        src: String,
        /// Destination order.
        dst: String,
    },
    /// Different numbers of source and destination ids.
    #[error(
        "{src} source blocks (of {src_page} tokens) and {dst} destination blocks (of {dst_page} tokens) do not pair up"
    )]
    IdCount {
        /// Source ids.
        src: usize,
        /// Tokens in a source block.
        src_page: u64,
        /// Destination ids.
        dst: usize,
        /// Tokens in a destination block.
        dst_page: u64,
    },
    /// A block id beyond the layout.
    #[error("{side} block id {value} at index {index} is out of range: the layout has {limit} blocks")]
    BlockId {
        /// Side.
        side: Side,
        /// Position in the id list.
        index: usize,
        /// Id given.
        value: i64,
        /// Number of blocks.
        limit: u64,
    },
    /// A destination named twice: the order of the two writes would be undefined.
    #[error("destination block id {value} is given at index {first} and again at index {second}")]
    DuplicateDestination {
        /// Id.
        value: u32,
        /// First position.
        first: usize,
        /// Second position.
        second: usize,
    },
    /// Source and destination bytes overlap.
    #[error("source block {src} and destination block {dst} overlap in memory at address {addr:#x}")]
    Overlap {
        /// Source block id.
        src: u32,
        /// Destination block id.
        dst: u32,
        /// First shared address.
        addr: u64,
    },
}
