//! What every launch has in common.

/// Grid, CTA and dynamic shared memory of a launch, one-dimensional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchGeometry {
    /// CTAs; 0 when there is nothing to launch.
    pub grid: u32,
    /// Threads per CTA.
    pub block: u32,
    /// Bytes of dynamic shared memory per CTA.
    pub shared: u32,
}

impl LaunchGeometry {
    /// Nothing to do: the driver refuses an empty grid, so the launch is skipped.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.grid == 0
    }
}

/// A launch that cannot be shaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A GPU has at least one multiprocessor.
    #[error("sm_count is 0; a GPU has at least one multiprocessor")]
    NoMultiprocessors,
    /// No CTA may be launched, yet there is work.
    #[error("max_ctas is 0; at least one CTA is needed to copy anything")]
    NoCtas,
    /// The work does not fit 62 bits.
    #[error("{pairs} pairs of {bytes_per_pair} bytes exceed the limit of 2^62 bytes in one launch")]
    TooLarge {
        /// Pairs asked for.
        pairs: u64,
        /// Bytes of each.
        bytes_per_pair: u64,
    },
}
