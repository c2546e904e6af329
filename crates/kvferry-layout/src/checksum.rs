//! The checksum of a block: a sum over its head rows, so that order, layout and memory do not matter.
//!
//! ```text
//! checksum(block) = Σ mix64(xxh3_64(row) ^ mix64(word(plane, layer, outer, token, head)))   mod 2^64
//! ```
//!
//! over every head row of the block. A row is its `head_dim` elements as they lie in memory, joined without gaps,
//! hashed with seed 0. `token` counts inside the block, `head` is the global number (a shard's first head is not 0),
//! a cache without heads has one. The block id is not part of it, padding is never read. Hence equal contents give
//! equal sums in every layout, the sums of parts (layers, head shards) add up to the sum of the whole, and swapped
//! rows change it.
//!
//! `word` packs the coordinates into 64 bits, lowest first:
//!
//! | bits | 0–19 | 20–43 | 44–59 | 60 | 61–63 |
//! |---|---|---|---|---|---|
//! | | head | token | layer | outer | plane, 0 for the cache itself |
//!
//! `mix64` is the finaliser of SplitMix64 (see [`mix64`]).

use twox_hash::XxHash3_64;

const TOKEN_SHIFT: u32 = 20;
const LAYER_SHIFT: u32 = 44;
const OUTER_SHIFT: u32 = 60;

/// Global head numbers in a coordinate word lie below this.
pub const MAX_ROW_HEADS: u64 = 1 << TOKEN_SHIFT;
/// Tokens of a block in a coordinate word lie below this.
pub const MAX_ROW_TOKENS: u64 = 1 << (LAYER_SHIFT - TOKEN_SHIFT);
/// Layers in a coordinate word lie below this.
pub const MAX_ROW_LAYERS: u64 = 1 << (OUTER_SHIFT - LAYER_SHIFT);

/// Which head row of a block, whatever the layout. Ordered as the fields are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowAt {
    /// Layer.
    pub layer: u64,
    /// K (0) or V (1).
    pub outer: u64,
    /// Token inside the block.
    pub token: u64,
    /// Global head number.
    pub head: u64,
}

impl RowAt {
    /// The coordinates as one word: `head | token << 20 | layer << 44 | outer << 60`. One to one within the limits
    /// that [`RowChunks::new`](crate::RowChunks::new) checks.
    pub const fn word(self) -> u64 {
        self.head | self.token << TOKEN_SHIFT | self.layer << LAYER_SHIFT | self.outer << OUTER_SHIFT
    }
}

/// The finaliser of SplitMix64, a bijection on 64-bit words:
/// `z = (z ^ z >> 30) · 0xBF58476D1CE4E5B9; z = (z ^ z >> 27) · 0x94D049BB133111EB; z ^ z >> 31`, mod 2^64.
#[inline]
pub const fn mix64(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// What one head row adds to the checksum of its block (add with wrapping).
///
/// ```
/// use kvferry_layout::{RowAt, mix64, row_checksum};
/// let at = RowAt { layer: 3, outer: 1, token: 5, head: 7 };
/// assert_eq!(at.word(), 7 | 5 << 20 | 3 << 44 | 1 << 60);
/// // 0x2D06800538D394C2 is the XXH3 of nothing.
/// assert_eq!(row_checksum(&[], at), mix64(0x2D06_8005_38D3_94C2 ^ mix64(at.word())));
/// ```
#[inline]
pub fn row_checksum(row: &[u8], at: RowAt) -> u64 {
    mix64(XxHash3_64::oneshot(row) ^ mix64(at.word()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_is_one_to_one() {
        let last =
            RowAt { layer: MAX_ROW_LAYERS - 1, outer: 1, token: MAX_ROW_TOKENS - 1, head: MAX_ROW_HEADS - 1 };
        let zero = RowAt { layer: 0, outer: 0, token: 0, head: 0 };
        let fields = [
            RowAt { head: last.head, ..zero }.word(),
            RowAt { token: last.token, ..zero }.word(),
            RowAt { layer: last.layer, ..zero }.word(),
            RowAt { outer: last.outer, ..zero }.word(),
        ];
        assert_eq!(fields.iter().fold(0, |all, field| all ^ field), last.word());
        assert_eq!(fields.iter().map(|field| field.count_ones()).sum::<u32>(), 61);
        assert_eq!(last.word(), (1 << 61) - 1);
    }

    /// Reference values of SplitMix64 seeded with 0: its outputs are the finaliser of multiples of the golden ratio.
    #[test]
    fn mix64_is_the_published_finaliser() {
        let golden = 0x9E37_79B9_7F4A_7C15_u64;
        assert_eq!(mix64(0), 0);
        assert_eq!(mix64(golden), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mix64(golden.wrapping_mul(2)), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn coordinates_and_bytes_both_count() {
        let at = RowAt { layer: 1, outer: 0, token: 2, head: 3 };
        let row = row_checksum(&[1, 2, 3, 4], at);
        assert_ne!(row, row_checksum(&[1, 2, 3, 5], at));
        assert_ne!(row, row_checksum(&[1, 2, 3, 4], RowAt { head: 2, token: 3, ..at }));
        assert_ne!(row, row_checksum(&[1, 2, 3, 4], RowAt { outer: 1, ..at }));
    }
}
