//! Block ids and their validation.

use std::fmt;

use crate::error::{PlanError, Side};

/// Index of a block in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<u32> for BlockId {
    fn from(id: u32) -> Self {
        BlockId(id)
    }
}

/// Above this many blocks a bitmap (16 MiB here, up to 512 MiB) must be worth its memory.
const SPARSE: u64 = 1 << 27;

/// Checks one side's ids against the number of blocks; for the destination also that none is given twice
/// (a source may be: one block can fan out).
///
/// Linear in the ids, plus one bit per block when the ids are neither few nor rising; few of very many blocks are
/// sorted instead.
///
/// # Errors
/// [`PlanError::BlockId`] or [`PlanError::DuplicateDestination`], with positions.
pub fn check_ids(side: Side, ids: &[BlockId], num_blocks: u64) -> Result<(), PlanError> {
    let mut rising = true;
    let mut last = None;
    for (index, &BlockId(id)) in ids.iter().enumerate() {
        if u64::from(id) >= num_blocks {
            return Err(PlanError::BlockId { side, index, value: id.into(), limit: num_blocks });
        }
        rising &= last < Some(id);
        last = Some(id);
    }
    if side == Side::Source || rising {
        return Ok(());
    }
    let second = if ids.len() <= 16 {
        (1..ids.len()).find(|&second| ids[..second].contains(&ids[second]))
    } else if num_blocks > SPARSE && num_blocks / 64 > ids.len() as u64 {
        let mut sorted: Vec<(BlockId, usize)> = ids.iter().copied().zip(0..).collect();
        sorted.sort_unstable();
        sorted.windows(2).filter(|pair| pair[0].0 == pair[1].0).map(|pair| pair[1].1).min()
    } else {
        let mut seen = vec![0u64; num_blocks.div_ceil(64) as usize];
        ids.iter().position(|&BlockId(id)| {
            let (word, bit) = ((id / 64) as usize, 1u64 << (id % 64));
            let twice = seen[word] & bit != 0;
            seen[word] |= bit;
            twice
        })
    };
    match second {
        None => Ok(()),
        Some(second) => {
            let value = ids[second];
            let first = ids[..second].iter().position(|&id| id == value).unwrap_or(second);
            Err(PlanError::DuplicateDestination { value: value.0, first, second })
        }
    }
}

/// Ids of `parts`-times finer pages: id `b` becomes `parts·b … parts·b + parts - 1`.
pub(crate) fn expand(ids: &[BlockId], parts: u64) -> Vec<BlockId> {
    let parts = parts as u32;
    ids.iter().flat_map(|&BlockId(id)| (0..parts).map(move |part| BlockId(id * parts + part))).collect()
}
