//! kvferry moves KV-cache blocks between memories whatever their layouts.
//!
//! A [`PhysicalLayout`] is a strided view bound to memory. A [`TransferContext`] plans a copy between two of them and
//! hands it to an engine; the [`TransferCompleteNotification`] tells when every byte has arrived.
//!
//! ```
//! use kvferry::{BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig, MemoryKind, PhysicalLayout};
//! use kvferry::{TransferContext, TransferOptions};
//!
//! let cfg = LayoutConfig::builder()
//!     .num_blocks(8).num_layers(4).page_size(16).num_heads(2).head_dim(64).dtype(Dtype::BFloat16)
//!     .build()?;
//! let cache = Layout::layer_separate(cfg, BlockDim::BlockFirst, KvOrder::Nhd)?;
//! let pool = Layout::fully_contiguous(cfg, KvOrder::Universal)?;
//! let src = PhysicalLayout::allocate(cache, MemoryKind::System)?;
//! let dst = PhysicalLayout::allocate(pool, MemoryKind::System)?;
//!
//! let ctx = TransferContext::host()?;
//! let job = ctx.transfer(&src, &dst, &[BlockId(3), BlockId(5)], &[BlockId(0), BlockId(1)], &TransferOptions::default())?;
//! let result = job.wait(None)?;
//! assert_eq!(result.bytes, 2 * cfg.block_bytes());
//! # Ok::<(), kvferry::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod all2all;
mod build;
mod calibrate;
mod error;
mod memory;
mod physical;
mod transfer;
mod verify;

pub use build::{BuildInfo, build_info};
pub use calibrate::{
    CalibrateOptions, CostModel, Curve, Direction, MODEL_VERSION, Saved, calibrate, load_calibration,
    save_calibration,
};
pub use error::{Error, Result};
pub use kvferry_cuda as cuda;
pub use kvferry_cuda::{
    DeviceIds, EventHandle, MemcpyBatchMode, StreamHandle, memcpy_batch, vectorized_copy,
};
pub use kvferry_host as host;
pub use kvferry_host::{HostOptions, HugePages, NumaPolicy};
pub use kvferry_layout as layout;
pub use kvferry_layout::{
    Axis, BlockDim, BlockId, CopyPlan, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig,
    LayoutConfigBuilder, LayoutError, LayoutKind, PairPlan, PairRequest, Place, PlanError, PlanStats,
    RegionSpan, Run, Side, Transform, View,
};
pub use memory::{MemoryKind, Region};
pub use physical::{PhysicalLayout, can_use_whole_block_transfer, validate_layout_compatibility};
pub use transfer::{
    Candidate, Choice, Dependency, Engine, HostMode, IdSource, Outcome, Route, TransferCompleteNotification,
    TransferContext, TransferContextBuilder, TransferFailure, TransferOptions, TransferPlan, TransferResult,
    TransferStrategy, execute_cuda_transfer, plan_layouts,
};
pub use verify::{GuardBreach, Mismatch};

/// The README's Rust, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
