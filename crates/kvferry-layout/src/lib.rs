//! Layouts, views and copy plans: the pure centre of kvferry.
//!
//! Everything is a strided [`View`] over named axes; a transfer is a pair of views. [`PairPlan`] pairs the axes of
//! two views, finds the longest run that is contiguous on both sides and loops over the rest; [`CopyPlan`] binds it
//! to block ids. Whole-block copies, layer ranges, head shards and order changes all come out of that one algorithm.
//!
//! Nothing here touches memory: values in, integers out. Units are bytes unless a name says otherwise.
#![forbid(unsafe_code)]

mod alias;
mod arith;
mod axis;
mod checksum;
mod config;
#[cfg(feature = "serde")]
mod descriptor;
mod dtype;
mod error;
pub mod exchange;
mod foreign;
mod ids;
mod kind;
mod layout;
pub mod oracle;
mod overlap;
mod pair;
mod pattern;
mod payload;
mod plain;
mod plan;
mod rows;
mod view;

pub use axis::{Axis, PerAxis};
pub use checksum::{MAX_ROW_HEADS, MAX_ROW_LAYERS, MAX_ROW_TOKENS, RowAt, mix64, row_checksum};
pub use config::{LayoutConfig, LayoutConfigBuilder, MAX_ALIGNMENT, MAX_BLOCKS};
#[cfg(feature = "serde")]
pub use descriptor::{DESCRIPTOR_VERSION, MAX_DESCRIPTOR_BYTES};
pub use dtype::Dtype;
pub use error::{LayoutError, PlanError, Side};
pub use exchange::{
    CapacityRequest, Contract, ExchangeError, ExchangeOp, ExchangeRequest, GlobalTensor, HeadLayout,
    MAX_RANKS, MAX_TENSORS, Piece, PieceLoop, RESULT_ALIGN, TensorInput, capacity_for, head_ranges,
};
pub use foreign::ForeignArray;
pub use ids::{BlockId, check_ids};
pub use kind::{BlockDim, KvOrder, LayoutKind};
pub use layout::{Layout, Part, RegionSpan};
pub use overlap::find_overlap;
pub use pair::{Loop, PairPlan, PairRequest, Transform, incompatibilities};
pub use pattern::Pattern;
pub use payload::RegionPart;
pub use plan::{CopyPlan, PlanStats, Run, Segment, step};
pub use rows::{RowChunk, RowChunks};
pub use view::{BlockStep, Place, View};
