//! Layouts, views and copy plans: the pure centre of kvferry.
//!
//! Everything is a strided [`View`] over named axes; a transfer is a pair of views. [`PairPlan`] pairs the axes of
//! two views, finds the longest run that is contiguous on both sides and loops over the rest; [`CopyPlan`] binds it
//! to block ids. Whole-block copies, layer ranges, head shards and order changes all come out of that one algorithm.
//!
//! Nothing here touches memory: values in, integers out. Units are bytes unless a name says otherwise.
#![forbid(unsafe_code)]

mod arith;
mod axis;
mod config;
mod dtype;
mod error;
mod ids;
mod kind;
mod layout;
pub mod oracle;
mod overlap;
mod pair;
mod plan;
mod view;

pub use axis::{Axis, PerAxis};
pub use config::{LayoutConfig, LayoutConfigBuilder, MAX_ALIGNMENT, MAX_BLOCKS};
pub use dtype::Dtype;
pub use error::{LayoutError, PlanError, Side};
pub use ids::{BlockId, check_ids};
pub use kind::{BlockDim, KvOrder, LayoutKind};
pub use layout::{ForeignArray, Layout, Part, RegionSpan};
pub use overlap::find_overlap;
pub use pair::{Loop, PairPlan, PairRequest, Transform};
pub use plan::{CopyPlan, PlanStats, Run, Segment, step};
pub use view::{BlockStep, Place, View};
