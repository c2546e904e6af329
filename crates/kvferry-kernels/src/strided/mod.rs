//! The strided copy: blocks between two layouts, by the kernels in `cuda/include/kvferry/strided_copy.cuh`.
//!
//! [`StridedShape`] says what a copy looks like, [`StridedCopyPlan`] is the same lowered to integers and kept, and
//! [`StridedLaunch`] is one launch of it: it takes constant time but for copying ids into the parameters.

mod divisor;
mod launch;
mod params;
mod plan;
mod shape;

pub use divisor::Divisor;
pub use launch::{Bases, Ids, StridedLaunch};
pub use params::{
    INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, PARAM_BYTES_LARGE, PARAM_BYTES_SMALL, ParamBuffer, STRIDED_LOOPS,
    StridedHeader, StridedLoopParams, StridedReport, StridedSideParams,
};
pub use plan::{MAX_INLINE_BASES, StridedCopyPlan, StridedMode};
pub use shape::{Link, SideName, StridedError, StridedLoop, StridedShape, StridedSide, Walk};

#[cfg(test)]
mod tests;
