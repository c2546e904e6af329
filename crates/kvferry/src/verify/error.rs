//! What a check found.

use kvferry_layout::{BlockId, RowAt};

/// Blocks that do not hold the pattern they should. Names the first bad row, in the order of the blocks given, layer,
/// outer, token, head, and its first bad byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {block} does not hold the pattern of block {as_block}: layer {}, outer {}, token {}, head {}, byte {offset} of \
     the row is {found:#04x}, expected {expected:#04x}; {bad_rows} of {rows} rows differ",
    at.layer, at.outer, at.token, at.head
)]
pub struct Mismatch {
    /// Block that was checked.
    pub block: BlockId,
    /// Block whose pattern it should hold.
    pub as_block: BlockId,
    /// Row of the block; the head is the global number.
    pub at: RowAt,
    /// Byte inside the row.
    pub offset: u64,
    /// What the byte should be.
    pub expected: u8,
    /// What it is.
    pub found: u8,
    /// Rows that differ somewhere.
    pub bad_rows: u64,
    /// Rows that were checked.
    pub rows: u64,
}

impl Mismatch {
    /// The first difference between two rows, counted as one bad row of one.
    pub(super) fn between(
        row: &[u8],
        wanted: &[u8],
        block: BlockId,
        as_block: BlockId,
        at: RowAt,
    ) -> Option<Mismatch> {
        let (offset, (&found, &expected)) =
            row.iter().zip(wanted).enumerate().find(|(_, (found, wanted))| found != wanted)?;
        Some(Mismatch { block, as_block, at, offset: offset as u64, expected, found, bad_rows: 1, rows: 1 })
    }
}

/// A byte that should have kept its fill value. Names the first, by region and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "byte {offset} of region {region} ({}) is {found:#04x}, expected {expected:#04x}",
    match block { Some(block) => format!("in block {block}"), None => "padding, in no block".to_owned() }
)]
pub struct GuardBreach {
    /// Region index.
    pub region: usize,
    /// Byte offset inside the region.
    pub offset: u64,
    /// Block whose payload holds the byte, if any does.
    pub block: Option<BlockId>,
    /// The fill value.
    pub expected: u8,
    /// What the byte is.
    pub found: u8,
}
