//! The CUDA kernels of kvferry as data: embedded fatbins, the `#[repr(C)]` parameters they take, and the launch
//! geometry that fits the work to the GPU.
//!
//! Nothing here calls CUDA: `kvferry-cuda` loads a [`fatbin`] and launches a [`Kernel`]. The crate builds on machines
//! without a CUDA compiler; [`available`] then says `false` and [`fatbin`] returns `None`.
//!
//! | kernel | parameters | geometry |
//! |---|---|---|
//! | [`Kernel::VectorizedCopy`] | [`VectorizedCopyParams`] | [`vectorized_copy_geometry`] |
//!
//! Kernel sources are in `cuda/`; their bodies are tested on the CPU by `tests/host_kernels`.
#![forbid(unsafe_code)]

mod fatbin;
mod geometry;
mod kernel;
mod vectorized_copy;

pub use fatbin::{BuildInfo, available, build_info, fatbin};
pub use geometry::{GeometryError, LaunchGeometry};
pub use kernel::{Kernel, Module};
pub use vectorized_copy::{VectorizedCopyGeometry, VectorizedCopyParams, vectorized_copy_geometry};
