//! Checksums, test patterns and guard checks over the memory of a layout.
//!
//! | call | reads | says |
//! |---|---|---|
//! | [`PhysicalLayout::checksum`] | payload | one number per block, the same in every layout and memory tier |
//! | [`PhysicalLayout::fill_pattern`] | – | writes a stream of its own into every head row |
//! | [`PhysicalLayout::verify_pattern`] | payload | whether blocks hold the pattern of these or other blocks |
//! | [`PhysicalLayout::check_fill`] | all but payload of named blocks | whether anything else was written |
//!
//! The formulas are those of [`kvferry_layout::row_checksum`] and [`kvferry_layout::Pattern`]. Everything runs on the
//! calling thread and scoped helpers, at most one per usable CPU, and returns when it is done. Nothing here orders it
//! against transfers: wait for those first.
//!
//! Device memory is read and written with blocking copies, ordered as [`DeviceRegion`](crate::cuda::DeviceRegion) says,
//! by the calling thread alone: never through the engines, which are what is being checked. Where the rows of a block
//! lie apart, filling them writes back the bytes between them: nobody else may write those meanwhile.

mod device;
mod error;
mod guard;
mod rows;
mod spread;

use std::ops::Range;

use kvferry_layout::{Axis, BlockId, LayoutError, Pattern, PlanError, Side, check_ids, row_checksum};

pub use error::{GuardBreach, Mismatch};
use rows::RowJob;

use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

impl PhysicalLayout {
    /// One checksum per block of `blocks` (which may repeat), over `layers` or all of them.
    ///
    /// `Σ mix64(xxh3_64(row) ^ mix64(coordinates))` mod 2^64 over the head rows of the block, as
    /// [`kvferry_layout::row_checksum`] defines it: equal contents give equal sums in every order, layout and tier;
    /// sums over disjoint layers or head shards add up (wrapping) to the sum of the whole; the block id is not part
    /// of it; padding is not read.
    ///
    /// # Errors
    /// An id or layer out of range, sizes beyond [`kvferry_layout::RowAt::word`], or (device memory) the CUDA driver's
    /// refusal.
    pub fn checksum(&self, blocks: &[BlockId], layers: Option<Range<u64>>) -> Result<Vec<u64>> {
        check_ids(Side::Source, blocks, self.num_blocks())?;
        let job = RowJob::new(self, blocks, layers)?;
        // Every thread sums up a stretch of positions, the first and last of which it may share with others.
        let parts = job.run(Vec::new, |sums: &mut Vec<(usize, u64)>, piece, dense| {
            piece.gather(dense)?;
            let mut sum = 0u64;
            for (row, at) in piece.rows(dense) {
                sum = sum.wrapping_add(row_checksum(row, at));
            }
            match sums.last_mut() {
                Some((position, total)) if *position == piece.position => *total = total.wrapping_add(sum),
                _ => sums.push((piece.position, sum)),
            }
            Ok(())
        })?;
        let mut totals = vec![0u64; blocks.len()];
        for (position, sum) in parts.into_iter().flatten() {
            totals[position] = totals[position].wrapping_add(sum);
        }
        Ok(totals)
    }

    /// Fills every head row of `blocks`, or of all blocks, with the pseudo-random stream that `seed`, the block id and
    /// the row's coordinates (layer, outer, token, global head) determine: see [`kvferry_layout::Pattern`]. Padding is
    /// not written.
    ///
    /// # Errors
    /// An id out of range or given twice, read-only memory, regions that share bytes, or as [`Self::checksum`].
    /// Nothing is written then, unless it was the driver that refused.
    pub fn fill_pattern(&self, seed: u64, blocks: Option<&[BlockId]>) -> Result<()> {
        let blocks = self.ids_or_all(blocks);
        check_ids(Side::Destination, &blocks, self.num_blocks())?;
        if let Some(region) = self.read_only_region() {
            return Err(Error::ReadOnlyDestination { region });
        }
        if let Some((first, second)) = self.aliased_regions() {
            return Err(LayoutError::RegionsAlias { first, second }.into());
        }
        let pattern = Pattern::new(seed);
        let job = RowJob::new(self, &blocks, None)?;
        job.run(
            || (),
            |(), piece, dense| {
                for (row, at) in piece.rows_mut(dense) {
                    pattern.row(piece.block, at, row);
                }
                piece.scatter(dense)
            },
        )?;
        Ok(())
    }

    /// Checks that block `blocks[i]` holds, in `layers` or all of them, the pattern that [`Self::fill_pattern`] gives
    /// block `as_blocks[i]` (the same id by default; ids of another layout otherwise, so not limited by this one's
    /// size).
    ///
    /// ```
    /// use kvferry::{BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig, MemoryKind, PhysicalLayout};
    /// use kvferry::{TransferContext, TransferOptions};
    /// # let cfg = LayoutConfig::builder()
    /// #     .num_blocks(8).num_layers(4).page_size(16).num_heads(2).head_dim(64).dtype(Dtype::BFloat16)
    /// #     .build()?;
    /// # let cache = Layout::layer_separate(cfg, BlockDim::BlockFirst, KvOrder::Nhd)?;
    /// # let pool = Layout::fully_contiguous(cfg, KvOrder::Universal)?;
    /// let src = PhysicalLayout::allocate(cache, MemoryKind::System)?;
    /// let dst = PhysicalLayout::allocate(pool, MemoryKind::System)?;
    /// let (from, to) = ([BlockId(3), BlockId(5)], [BlockId(0), BlockId(1)]);
    /// src.fill_pattern(7, None)?;
    /// dst.fill(0xA5)?;
    /// let ctx = TransferContext::host()?;
    /// ctx.transfer(&src, &dst, &from, &to, &TransferOptions::default())?.wait(None)?;
    /// dst.verify_pattern(7, Some(&to), Some(&from), None)?; // every byte arrived,
    /// dst.check_fill(0xA5, &to)?; // and nothing else was touched
    /// assert_eq!(src.checksum(&from, None)?, dst.checksum(&to, None)?);
    /// # Ok::<(), kvferry::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the first row that differs, by position in `blocks`, layer, outer, token, head. Lists
    /// of different lengths, or as [`Self::checksum`].
    pub fn verify_pattern(
        &self,
        seed: u64,
        blocks: Option<&[BlockId]>,
        as_blocks: Option<&[BlockId]>,
        layers: Option<Range<u64>>,
    ) -> Result<()> {
        let blocks = self.ids_or_all(blocks);
        check_ids(Side::Source, &blocks, self.num_blocks())?;
        let as_blocks = as_blocks.unwrap_or(&blocks);
        if as_blocks.len() != blocks.len() {
            let page = self.layout().config().page_size();
            let (src, dst) = (as_blocks.len(), blocks.len());
            return Err(PlanError::IdCount { src, src_page: page, dst, dst_page: page }.into());
        }
        let pattern = Pattern::new(seed);
        let job = RowJob::new(self, &blocks, layers)?;
        let row_bytes = job.row_bytes();
        let start = || (vec![0; row_bytes], None, 0u64);
        let parts = job.run(start, |(expected, first, bad_rows), piece, dense| {
            piece.gather(dense)?;
            let as_block = as_blocks[piece.position];
            for (row, at) in piece.rows(dense) {
                pattern.row(as_block, at, expected);
                if row == expected.as_slice() {
                    continue;
                }
                *bad_rows += 1;
                if first.is_none() {
                    *first = Mismatch::between(row, expected, piece.block, as_block, at);
                }
            }
            Ok(())
        })?;
        let bad_rows = parts.iter().map(|part| part.2).sum();
        // Parts come in the order of the rows.
        match parts.into_iter().find_map(|part| part.1) {
            None => Ok(()),
            Some(first) => Err(Mismatch { bad_rows, rows: job.rows(), ..first }.into()),
        }
    }

    fn num_blocks(&self) -> u64 {
        self.layout().view().extent(Axis::Block)
    }

    fn ids_or_all<'a>(&self, blocks: Option<&'a [BlockId]>) -> std::borrow::Cow<'a, [BlockId]> {
        match blocks {
            Some(blocks) => blocks.into(),
            // Never more than 2^32 - 1 (a configuration's rule).
            None => (0..self.num_blocks()).map(|id| BlockId(id as u32)).collect(),
        }
    }
}
