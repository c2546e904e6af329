//! Long lists of blocks that have nothing to do with one another: checked and packed in one pass.

use crate::ids::{BlockId, bitmap_words, largest};

/// Shorter lists are checked as fast pass by pass.
const LONG: usize = 1024;
/// Ids that are looked at together: what is read for one question is still in the cache for the next.
const TILE: usize = 2048;

/// A pair of ids in one word.
pub(crate) fn word(src: u32, dst: u32) -> u64 {
    u64::from(src) | u64::from(dst) << 32
}

/// Whether any two entries in a row are neighbours on both sides, rising or falling: if none are, nothing joins. A pass
/// without branches, so that long lists in random order cost no more than reading them.
pub(crate) fn neighbours(src: &[BlockId], dst: &[BlockId]) -> bool {
    let len = src.len().min(dst.len());
    let mut from = 0;
    while from + 1 < len {
        let to = (from + TILE).min(len - 1);
        if neighbours_in(&src[from..=to], &dst[from..=to]) {
            return true;
        }
        from = to;
    }
    false
}

/// [`neighbours`] of a short list.
fn neighbours_in(src: &[BlockId], dst: &[BlockId]) -> bool {
    fn next(ids: &[BlockId]) -> std::slice::Iter<'_, BlockId> {
        ids.get(1..).unwrap_or_default().iter()
    }
    let pairs = src.iter().zip(next(src)).zip(dst.iter().zip(next(dst)));
    pairs.fold(false, |any, ((s, next_s), (d, next_d))| {
        let step = next_s.0.wrapping_sub(s.0);
        any | ((step == next_d.0.wrapping_sub(d.0)) & ((step == 1) | (step == u32::MAX)))
    })
}

/// The packed pairs of a long list, if all ids are in range, no destination is given twice and nothing joins. `None` says
/// nothing: such a list is checked with more care, which also names what is wrong.
pub(crate) fn pack_plain(src: &[BlockId], dst: &[BlockId], blocks: [u64; 2]) -> Option<Vec<u64>> {
    if src.len() < LONG || src.len() != dst.len() {
        return None;
    }
    let mut seen = vec![0u64; bitmap_words(dst.len(), blocks[1])?];
    let mut pairs = Vec::with_capacity(src.len());
    let below = |ids: &[BlockId], blocks| u64::from(largest(ids).0) < blocks;
    let mut from = 0;
    while from < src.len() {
        let to = (from + TILE).min(src.len());
        let (s, d) = (&src[from..to], &dst[from..to]);
        // With the last entry of the tile before.
        let back = from.saturating_sub(1);
        if !below(s, blocks[0]) || !below(d, blocks[1]) || neighbours_in(&src[back..to], &dst[back..to]) {
            return None;
        }
        let mut twice = 0;
        for &BlockId(id) in d {
            let (word, bit) = (&mut seen[(id / 64) as usize], 1u64 << (id % 64));
            twice |= *word & bit;
            *word |= bit;
        }
        if twice != 0 {
            return None;
        }
        pairs.extend(s.iter().zip(d).map(|(s, d)| word(s.0, d.0)));
        from = to;
    }
    Some(pairs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids(list: &[u32]) -> Vec<BlockId> {
        list.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn neighbours_are_found_wherever_they_are() {
        for len in [2, 3, TILE, TILE + 1, TILE + 2, 3 * TILE] {
            let apart = |at: usize| 3 * at as u32;
            for at in [0, 1, len / 2, TILE - 1, TILE, len - 2] {
                if at + 1 >= len {
                    continue;
                }
                for falling in [false, true] {
                    let mut src: Vec<u32> = (0..len).map(apart).collect();
                    let mut dst = src.clone();
                    assert!(!neighbours(&ids(&src), &ids(&dst)));
                    let near = |id: u32| if falling { id - 1 } else { id + 1 };
                    (src[at], dst[at]) = (1 << 30, 1 << 29);
                    (src[at + 1], dst[at + 1]) = (near(1 << 30), near(1 << 29));
                    assert!(neighbours(&ids(&src), &ids(&dst)), "{at} of {len}");
                    // On one side only they do not join.
                    dst[at + 1] += 7;
                    assert!(!neighbours(&ids(&src), &ids(&dst)), "{at} of {len}");
                }
            }
        }
        assert!(!neighbours(&[], &[]) && !neighbours(&ids(&[1]), &ids(&[1])));
    }

    #[test]
    fn nothing_wrong_is_packed() {
        let len = 2 * TILE + 5;
        let good: Vec<u32> = (0..len as u32).map(|at| at.wrapping_mul(7919) % 8191).collect();
        let blocks = [8191, 8191];
        let expected: Vec<u64> = good.iter().map(|&id| word(id, id)).collect();
        assert_eq!(pack_plain(&ids(&good), &ids(&good), blocks), Some(expected));
        for at in [0, TILE - 1, TILE, len - 1] {
            let mut beyond = good.clone();
            beyond[at] = 8191;
            assert_eq!(pack_plain(&ids(&beyond), &ids(&good), blocks), None);
            assert_eq!(pack_plain(&ids(&good), &ids(&beyond), blocks), None);
            let mut twice = good.clone();
            twice[at] = good[(at + len / 2) % len];
            assert_eq!(pack_plain(&ids(&good), &ids(&twice), blocks), None);
            assert!(pack_plain(&ids(&twice), &ids(&good), blocks).is_some(), "a source may be given twice");
        }
        assert_eq!(pack_plain(&ids(&good), &ids(&good[1..]), blocks), None);
        assert_eq!(pack_plain(&ids(&good[..9]), &ids(&good[..9]), blocks), None);
    }

    proptest! {
        #[test]
        fn what_is_packed_is_what_was_given(
            seed in any::<u32>(),
            len in LONG..3 * TILE,
            strides in (0_u32..1 << 16, 0_u32..1 << 16),
            twice in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
        ) {
            // Odd strides reach every id once; small ones make neighbours.
            let walk = |stride: u32| -> Vec<u32> {
                let id = |at: u32| at.wrapping_mul(2 * stride + 1).wrapping_add(seed) % (1 << 17);
                (0..len as u32).map(id).collect()
            };
            let (src, mut dst) = (walk(strides.0), walk(strides.1));
            if let Some((from, to)) = twice {
                dst[to.index(len)] = dst[from.index(len)];
            }
            let mut sorted = dst.clone();
            sorted.sort_unstable();
            let distinct = sorted.windows(2).all(|pair| pair[0] != pair[1]);
            let joins = (1..len).any(|at| {
                let step = |ids: &[u32]| i64::from(ids[at]) - i64::from(ids[at - 1]);
                step(&src) == step(&dst) && step(&src).abs() == 1
            });
            let packed = pack_plain(&ids(&src), &ids(&dst), [1 << 17, 1 << 17]);
            let expected = src.iter().zip(&dst).map(|(&s, &d)| u64::from(s) | u64::from(d) << 32).collect();
            prop_assert_eq!(packed, (distinct && !joins).then_some(expected));
        }
    }
}
