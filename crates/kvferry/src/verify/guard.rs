//! The guard check: bytes that nobody should have written.

use std::ops::Range;

use kvferry_host::HostRegion;
use kvferry_layout::{Axis, BlockId, Place, RegionPart};

use super::error::GuardBreach;
use super::spread::spread;
use crate::error::Result;
use crate::physical::PhysicalLayout;

/// Bytes of a unit of work.
const UNIT_BYTES: u64 = 1 << 20;
/// Bytes looked at together: a page, in the first-level cache.
const LOOK_BYTES: usize = 4096;

impl PhysicalLayout {
    /// Checks that every byte of every region that is not payload of `except_blocks` (which may repeat) equals
    /// `value`: other blocks, alignment padding, gaps between strides, and what lies behind the last block. The
    /// counterpart of [`fill`](Self::fill).
    ///
    /// # Errors
    /// [`Error::Guard`](crate::Error::Guard) with the first byte that differs, by region and offset. An id out of
    /// range, or memory the CPU cannot address.
    pub fn check_fill(&self, value: u8, except_blocks: &[BlockId]) -> Result<()> {
        self.host_region(0)?;
        let parts = self.layout().outside_payload(self.spans(), except_blocks)?;
        let bytes = parts.iter().map(|part| part.bytes.end - part.bytes.start).sum();
        let units = cut(&parts);
        let found = spread(units.len() as u64, bytes, |range| {
            let mut buffer = [0; LOOK_BYTES];
            for (region, bytes) in &units[range.start as usize..range.end as usize] {
                let memory = self.host_region(*region)?;
                if let Some((offset, found)) = first_other(memory, bytes.clone(), value, &mut buffer)? {
                    return Ok(Some((*region, offset, found)));
                }
            }
            Ok(None)
        })?;
        match found.into_iter().flatten().next() {
            None => Ok(()),
            Some((region, offset, found)) => {
                let block = self.block_of(region, offset);
                Err(GuardBreach { region, offset, block, expected: value, found }.into())
            }
        }
    }

    /// The block whose payload holds a byte, in whichever region: regions can interleave in one allocation.
    fn block_of(&self, region: usize, offset: u64) -> Option<BlockId> {
        let addr = self.spans()[region].addr + offset;
        self.spans().iter().enumerate().find_map(|(index, span)| {
            let offset = addr.checked_sub(span.addr).filter(|&offset| offset < span.len)?;
            let at = self.layout().view().locate(Place { region: index as u64, offset })?;
            Some(BlockId(at[Axis::Block] as u32))
        })
    }
}

/// The parts in pieces of at most [`UNIT_BYTES`], in order.
fn cut(parts: &[RegionPart]) -> Vec<(usize, Range<u64>)> {
    let mut units = Vec::with_capacity(parts.len());
    for RegionPart { region, bytes } in parts {
        let mut at = bytes.start;
        while at < bytes.end {
            let end = bytes.end.min(at + UNIT_BYTES);
            units.push((*region, at..end));
            at = end;
        }
    }
    units
}

/// The first byte of `bytes` that is not `value`, with its offset.
fn first_other(
    memory: &HostRegion,
    bytes: Range<u64>,
    value: u8,
    buffer: &mut [u8; LOOK_BYTES],
) -> Result<Option<(u64, u8)>> {
    let mut at = bytes.start;
    while at < bytes.end {
        let len = (bytes.end - at).min(LOOK_BYTES as u64) as usize;
        let looked = &mut buffer[..len];
        memory.read(at, looked)?;
        // No early exit, so that it is vector code.
        if looked.iter().fold(0, |all, &byte| all | (byte ^ value)) != 0
            && let Some(index) = looked.iter().position(|&byte| byte != value)
        {
            return Ok(Some((at + index as u64, looked[index])));
        }
        at += len as u64;
    }
    Ok(None)
}
