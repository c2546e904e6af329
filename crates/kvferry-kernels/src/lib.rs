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

pub use exchange::{
    ARRIVALS_OFFSET, BEAT_OFFSET, BELL_OFFSET, CELLS_OFFSET, CONTROL_BYTES, EXCHANGE_ITEM_LOOPS,
    EXCHANGE_PARAM_BYTES_LARGE, EXCHANGE_PARAM_BYTES_SMALL, EXCHANGE_SHARED_BYTES, ExchangeArriveParams,
    ExchangeBuildError, ExchangeCall, ExchangeFlags, ExchangeGrid, ExchangeHeader, ExchangeItemParams,
    ExchangeLaunch, ExchangeLimits, ExchangeLoop, ExchangeLoopParams, ExchangeParamBuffer, ExchangePart,
    ExchangePeer, ExchangePeerParams, ExchangePiece, ExchangeProbeParams, ExchangeProbePeer,
    ExchangeTemplate, HeaderCell, HostPage, LocalState, MAX_EXCHANGE_ITEMS, MAX_EXCHANGE_ITEMS_SMALL,
    MAX_EXCHANGE_PEERS_SMALL, MAX_RANKS, PLACE_ALIGN, POISON_FRESH, POISON_NONE, POISON_OLD, PROBE_BYTES,
    PROBE_OFFSET, ProbeReport, ProbeState, Record, RecordKind, abort_word, arrival_offset,
    header_cell_offset, split_abort_word,
};
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
