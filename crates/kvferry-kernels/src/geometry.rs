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
    /// More pairs than the index of one launch counts.
    #[error("{pairs} pairs exceed the limit of {limit} in one launch")]
    TooManyPairs {
        /// Pairs asked for.
        pairs: u64,
        /// Most.
        limit: u64,
    },
    /// More words than the parameters hold.
    #[error("{words} inline words (region bases and id pairs) exceed the limit of {limit}")]
    TooManyWords {
        /// Words asked for.
        words: usize,
        /// Most.
        limit: usize,
    },
    /// A list does not have the length that the launch was made for.
    #[error("{given} {what} given, {wanted} wanted")]
    WrongWords {
        /// What is listed.
        what: &'static str,
        /// Words given.
        given: usize,
        /// Words wanted.
        wanted: usize,
    },
    /// Ids on the device have 4 or 8 bytes.
    #[error("ids of {width} bytes; 4 or 8 are understood")]
    IdWidth {
        /// Bytes of an id.
        width: u8,
    },
}
