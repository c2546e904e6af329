//! Calls that cannot be put into parameters.

/// A call that cannot be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeBuildError {
    /// A world has 1 to 64 ranks.
    #[error("a world of {world} ranks; 1 to {limit} are possible")]
    World {
        /// Ranks asked for.
        world: usize,
        /// Most.
        limit: usize,
    },
    /// A rank is below the world's size.
    #[error("rank {rank} in a world of {world}")]
    Rank {
        /// Rank asked for.
        rank: usize,
        /// Ranks there are.
        world: usize,
    },
    /// One entry per rank is wanted.
    #[error("{given} {what} given for {wanted} ranks")]
    WrongLength {
        /// What is listed.
        what: &'static str,
        /// Entries given.
        given: usize,
        /// Entries wanted.
        wanted: usize,
    },
    /// A piece has more loops than the kernel walks.
    #[error("piece {piece} for rank {target} has {loops} loops; the limit is {limit}")]
    TooManyLoops {
        /// Rank that receives.
        target: usize,
        /// Index in its list.
        piece: usize,
        /// Loops of the piece that go round more than once.
        loops: usize,
        /// Most.
        limit: usize,
    },
    /// More pieces than the parameters hold.
    #[error(
        "the call needs {items} items (tensors times ranks, pieces beyond 2^31 words count several times); \
         the limit is {limit}"
    )]
    TooManyItems {
        /// Items wanted.
        items: usize,
        /// Most.
        limit: usize,
    },
    /// A piece does not fit 62 bits.
    #[error("piece {piece} for rank {target} reaches beyond 2^62 bytes")]
    TooLarge {
        /// Rank that receives.
        target: usize,
        /// Index in its list.
        piece: usize,
    },
    /// A piece reaches beyond the target's pool wherever it lands.
    #[error("what rank {target} receives takes {bytes} bytes of a pool of {pool_bytes}")]
    BeyondPool {
        /// Rank that receives.
        target: usize,
        /// Bytes from the landing place to the end of the last piece.
        bytes: u64,
        /// Bytes of its pool.
        pool_bytes: u64,
    },
    /// A landing place must be a multiple of 256, below 2^40.
    #[error("landing place {place:#x} is no multiple of {align} below 2^40")]
    Place {
        /// Bytes from the start of the own pool.
        place: u64,
        /// It should divide the place.
        align: u64,
    },
    /// A refusal needs a reason.
    #[error("a refusal with verdict 0 would be none")]
    Verdict,
    /// An address that must be a multiple of 16 is none.
    #[error("{what} {value:#x} is no multiple of 16")]
    Misaligned {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Threads per CTA: at least one per rank, at most 1,024.
    #[error(
        "{block} threads per CTA in a world of {world}; at least one per rank and at most 1024 are needed"
    )]
    Block {
        /// Threads asked for.
        block: u32,
        /// Ranks there are.
        world: usize,
    },
    /// The grid was made for other bytes.
    #[error("the grid has {lanes} lanes for rank {target}, which receives {chunks} chunks")]
    Lanes {
        /// Rank that receives.
        target: usize,
        /// Lanes of the grid.
        lanes: u32,
        /// Chunks to copy.
        chunks: u64,
    },
}
