//! The CUDA kernels of kvferry as data: embedded fatbins, the `#[repr(C)]` parameters they take, and the launch
//! geometry that fits the work to the GPU.
//!
//! Nothing here calls CUDA: `kvferry-cuda` loads a [`fatbin`] and launches a [`Kernel`]. The crate builds on machines
//! without a CUDA compiler; [`available`] then says `false` and [`fatbin`] returns `None`.
//!
//! | kernel | parameters | geometry |
//! |---|---|---|
//! | [`Kernel::VectorizedCopy`] | [`VectorizedCopyParams`] | [`vectorized_copy_geometry`] |
//! | [`Kernel::StridedTile`] and its kin | [`StridedLaunch::write_params`] | [`StridedCopyPlan::launch`] |
//! | [`Kernel::Exchange`], [`Kernel::ExchangeLarge`] | [`ExchangeCall::build`] | [`ExchangeGrid::choose`] |
//! | [`Kernel::ExchangeArrive`] | [`ExchangeArriveParams`] | [`ExchangeArriveParams::GEOMETRY`] |
//! | [`Kernel::ExchangeProbe`] | [`ExchangeProbeParams`] | [`ExchangeProbeParams::GEOMETRY`] |
//!
//! Kernel sources are in `cuda/`; their bodies are tested on the CPU by `tests/host_kernels`.
#![forbid(unsafe_code)]

mod exchange;
mod fatbin;
mod geometry;
mod kernel;
mod strided;
mod vectorized_copy;

pub use exchange::*;
pub use fatbin::{BuildInfo, available, build_info, fatbin};
pub use geometry::{GeometryError, LaunchGeometry};
pub use kernel::{Kernel, Module};
pub use strided::{
    Bases, Divisor, INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, Ids, Link, MAX_INLINE_BASES, PARAM_BYTES_LARGE,
    PARAM_BYTES_SMALL, ParamBuffer, STRIDED_LOOPS, SideName, StridedCopyPlan, StridedError, StridedHeader,
    StridedLaunch, StridedLoop, StridedLoopParams, StridedMode, StridedReport, StridedShape, StridedSide,
    StridedSideParams, Walk,
};
pub use vectorized_copy::{VectorizedCopyGeometry, VectorizedCopyParams, vectorized_copy_geometry};
