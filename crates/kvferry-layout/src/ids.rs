//! Block ids and their validation.

use std::fmt;

use crate::checksum::mix64;
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

/// Up to this many ids are compared with one another.
const FEW: usize = 16;

/// Bytes of bitmap that each id is worth; where there are more, a hash table is smaller and touches fewer pages.
const BITMAP_BYTES_PER_ID: u64 = 16;

/// A bitmap of up to this many bytes is always worth it.
const SMALL_BITMAP: u64 = 4096;

/// Longest search in the hash table. Ids made to collide are sorted instead.
const MAX_PROBES: usize = 64;

/// Checks one side's ids against the number of blocks; for the destination also that none is given twice
/// (a source may be: one block can fan out).
///
/// Linear in the ids, in time and in memory, whatever the number of blocks.
///
/// # Errors
/// [`PlanError::BlockId`] or [`PlanError::DuplicateDestination`], with positions.
pub fn check_ids(side: Side, ids: &[BlockId], num_blocks: u64) -> Result<(), PlanError> {
    let beyond = |&BlockId(id): &BlockId| u64::from(id) >= num_blocks;
    // The largest first: looking for the first bad one takes longer.
    if !ids.is_empty()
        && beyond(&largest(ids))
        && let Some(index) = ids.iter().position(beyond)
    {
        return Err(PlanError::BlockId { side, index, value: ids[index].0.into(), limit: num_blocks });
    }
    let in_order =
        |order: fn(&BlockId, &BlockId) -> bool| ids.windows(2).all(|pair| order(&pair[0], &pair[1]));
    if side == Side::Source || in_order(|a, b| a < b) || in_order(|a, b| a > b) {
        return Ok(());
    }
    match given_twice(ids, num_blocks) {
        None => Ok(()),
        Some(second) => {
            let value = ids[second];
            let first = ids[..second].iter().position(|&id| id == value).unwrap_or(second);
            Err(PlanError::DuplicateDestination { value: value.0, first, second })
        }
    }
}

/// The largest id; 0 of none. Plain integers, so that one instruction compares several.
pub(crate) fn largest(ids: &[BlockId]) -> BlockId {
    BlockId(ids.iter().fold(0, |largest, id| largest.max(id.0)))
}

/// The first position whose id is at an earlier one too. All ids are below `num_blocks`.
fn given_twice(ids: &[BlockId], num_blocks: u64) -> Option<usize> {
    if ids.len() <= FEW {
        return (1..ids.len()).find(|&second| ids[..second].contains(&ids[second]));
    }
    if let Some(words) = bitmap_words(ids.len(), num_blocks) {
        return twice_in_bitmap(ids, words);
    }
    // No layout has as many blocks as there are ids, and the table has no entry for the last.
    if num_blocks > u64::from(u32::MAX) {
        return twice_when_sorted(ids);
    }
    twice_in_table(ids).unwrap_or_else(|Crowded| twice_when_sorted(ids))
}

/// Words of a bitmap of all blocks, if that is worth it for so many ids.
pub(crate) fn bitmap_words(ids: usize, num_blocks: u64) -> Option<usize> {
    let bytes = num_blocks.min(1 << 32).div_ceil(64) * 8;
    (bytes <= SMALL_BITMAP.max(BITMAP_BYTES_PER_ID * ids as u64)).then_some((bytes / 8) as usize)
}

fn twice_in_bitmap(ids: &[BlockId], words: usize) -> Option<usize> {
    let mut seen = vec![0u64; words];
    ids.iter().position(|&BlockId(id)| {
        let (word, bit) = ((id / 64) as usize, 1u64 << (id % 64));
        let twice = seen[word] & bit != 0;
        seen[word] |= bit;
        twice
    })
}

/// Too many ids share a place of the hash table.
struct Crowded;

fn twice_in_table(ids: &[BlockId]) -> Result<Option<usize>, Crowded> {
    // At most half full. Entries are id + 1: an id is below a number of blocks of 32 bits.
    let slots = (ids.len() * 2).next_power_of_two();
    let shift = 64 - slots.trailing_zeros();
    let mut table = vec![0u32; slots];
    for (second, &BlockId(id)) in ids.iter().enumerate() {
        let (entry, start) = (id + 1, (mix64(id.into()) >> shift) as usize);
        let mut probes = (start..start + MAX_PROBES).map(|at| at & (slots - 1));
        let place = probes.find(|&at| table[at] == 0 || table[at] == entry).ok_or(Crowded)?;
        if table[place] == entry {
            return Ok(Some(second));
        }
        table[place] = entry;
    }
    Ok(None)
}

fn twice_when_sorted(ids: &[BlockId]) -> Option<usize> {
    let mut sorted: Vec<(BlockId, usize)> = ids.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    sorted.windows(2).filter(|pair| pair[0].0 == pair[1].0).map(|pair| pair[1].1).min()
}

/// Ids of `parts`-times finer pages: id `b` becomes `parts·b … parts·b + parts - 1`.
pub(crate) fn expand(ids: &[BlockId], parts: u64) -> Vec<BlockId> {
    let parts = parts as u32;
    ids.iter().flat_map(|&BlockId(id)| (0..parts).map(move |part| BlockId(id * parts + part))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_collide_are_sorted_instead() {
        // 100 ids of which all 256 places are one.
        let same = |&id: &u32| mix64(id.into()) >> 56 == 0;
        let mut ids: Vec<BlockId> = (0..u32::MAX).rev().filter(same).take(100).map(BlockId).collect();
        assert!(twice_in_table(&ids).is_err());
        assert_eq!(given_twice(&ids, u32::MAX.into()), None);
        (ids[99], ids[70]) = (ids[3], ids[20]);
        assert_eq!(given_twice(&ids, u32::MAX.into()), Some(70));
        assert_eq!(given_twice(&ids[..70], u32::MAX.into()), None);
        // Found before it is too crowded.
        ids[30] = ids[2];
        assert_eq!(given_twice(&ids, u32::MAX.into()), Some(30));
    }

    #[test]
    fn every_method_finds_the_same() {
        for count in [17, 40, 1000] {
            for twice in [None, Some((0, 16)), Some((5, 9)), Some((count - 2, count - 1))] {
                let mut ids: Vec<BlockId> = (0..count as u32).map(|at| BlockId(at * 7919 % 8191)).collect();
                if let Some((first, second)) = twice {
                    ids[second] = ids[first];
                }
                let expected = twice.map(|(_, second)| second);
                assert_eq!(twice_in_bitmap(&ids, 128), expected);
                assert_eq!(twice_in_table(&ids).ok(), Some(expected));
                assert_eq!(twice_when_sorted(&ids), expected);
            }
        }
        // The largest id of all, in a pool that has it.
        let mut ids: Vec<BlockId> = (0..20).map(|at| BlockId(u32::MAX - at)).collect();
        assert_eq!(given_twice(&ids, 1 << 32), None);
        ids[19] = BlockId(u32::MAX);
        assert_eq!(given_twice(&ids, u64::MAX), Some(19));
    }
}
