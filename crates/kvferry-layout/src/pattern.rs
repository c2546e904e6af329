//! Test patterns: every head row holds a pseudo-random stream of its own, so that a row in the wrong place shows.
//!
//! ```text
//! key  = mix64(mix64(mix64(seed) ^ block) ^ word(plane 0, layer, outer, token, head))
//! word i of the row, from 0 = mix64(key + (i + 1) · 0x9E3779B97F4A7C15)   mod 2^64
//! ```
//!
//! Words are eight bytes, little-endian, the last one cut at the end of the row: the row is the output of SplitMix64
//! seeded with `key`. `word` and `mix64` are those of the checksum ([`RowAt::word`], [`mix64`]).

use crate::checksum::{RowAt, mix64};
use crate::ids::BlockId;

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A pattern, by its seed. Bytes are what is compared; read as floating-point numbers some are not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    mixed_seed: u64,
}

impl Pattern {
    /// The pattern of `seed`.
    pub const fn new(seed: u64) -> Pattern {
        Pattern { mixed_seed: mix64(seed) }
    }

    /// The key of a row's stream.
    #[inline]
    pub const fn key(&self, block: BlockId, at: RowAt) -> u64 {
        mix64(mix64(self.mixed_seed ^ block.0 as u64) ^ at.word())
    }

    /// Writes what the row of `block` at `at` holds into all of `row`.
    ///
    /// ```
    /// use kvferry_layout::{BlockId, Pattern, RowAt, mix64};
    /// let (pattern, at) = (Pattern::new(7), RowAt { layer: 0, outer: 1, token: 2, head: 3 });
    /// let mut row = [0; 12];
    /// pattern.row(BlockId(5), at, &mut row);
    /// let key = mix64(mix64(mix64(7) ^ 5) ^ at.word());
    /// assert_eq!(row[..8], mix64(key.wrapping_add(0x9E37_79B9_7F4A_7C15)).to_le_bytes());
    /// ```
    #[inline]
    pub fn row(&self, block: BlockId, at: RowAt, row: &mut [u8]) {
        let mut state = self.key(block, at);
        let mut next = || {
            state = state.wrapping_add(GOLDEN);
            mix64(state).to_le_bytes()
        };
        let (words, rest) = row.as_chunks_mut::<8>();
        for word in words {
            *word = next();
        }
        if !rest.is_empty() {
            let last = next();
            let len = rest.len();
            rest.copy_from_slice(&last[..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_key_counts() {
        let at = RowAt { layer: 1, outer: 0, token: 2, head: 3 };
        let key = Pattern::new(1).key(BlockId(4), at);
        let others = [
            Pattern::new(2).key(BlockId(4), at),
            Pattern::new(1).key(BlockId(5), at),
            Pattern::new(1).key(BlockId(4), RowAt { layer: 2, ..at }),
            Pattern::new(1).key(BlockId(4), RowAt { outer: 1, ..at }),
            Pattern::new(1).key(BlockId(4), RowAt { token: 3, head: 2, ..at }),
        ];
        assert!(others.iter().all(|&other| other != key), "{key:#x} among {others:#x?}");
    }

    #[test]
    fn a_short_row_is_a_prefix_of_a_long_one() {
        let (pattern, at) = (Pattern::new(9), RowAt { layer: 0, outer: 0, token: 0, head: 0 });
        let mut long = [0; 33];
        pattern.row(BlockId(0), at, &mut long);
        for len in 0..33 {
            let mut short = vec![0; len];
            pattern.row(BlockId(0), at, &mut short);
            assert_eq!(short, long[..len]);
        }
    }
}
