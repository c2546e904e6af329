//! The guard check: bytes that nobody should have written.

use kvferry_cuda::DeviceRegion;
use kvferry_host::HostRegion;
use kvferry_layout::{Axis, BlockId, Place, RegionPart};

use super::device::GAP_BYTES;
use super::error::GuardBreach;
use super::spread::spread;
use crate::error::Result;
use crate::memory::Region;
use crate::physical::PhysicalLayout;

/// Units of work end where a region offset is a multiple of this many bytes.
const UNIT_BYTES: u64 = 1 << 20;
/// Bytes of host memory looked at together: a page, in the first-level cache.
const LOOK_BYTES: usize = 4096;

impl PhysicalLayout {
    /// Checks that every byte of every region that is not payload of `except_blocks` (which may repeat) equals
    /// `value`: other blocks, alignment padding, gaps between strides, and what lies behind the last block. The
    /// counterpart of [`fill`](Self::fill).
    ///
    /// # Errors
    /// [`Error::Guard`](crate::Error::Guard) with the first byte that differs, by region and offset. An id out of
    /// range, or (device memory) the CUDA driver's refusal.
    pub fn check_fill(&self, value: u8, except_blocks: &[BlockId]) -> Result<()> {
        let parts = self.layout().outside_payload(self.spans(), except_blocks)?;
        let bytes = parts.iter().map(|part| part.bytes.end - part.bytes.start).sum();
        let units = cut(&parts);
        let found = spread(self.memory_kind(), units.len() as u64, bytes, |range| {
            let mut buffer = Vec::new();
            let units = &units[range.start as usize..range.end as usize];
            for group in units.chunk_by(read_together) {
                let region = group[0].region;
                let found = match &self.regions()[region] {
                    Region::Host(memory) => first_on_host(memory, group, value, &mut buffer)?,
                    Region::Device(memory) => first_on_device(memory, group, value, &mut buffer)?,
                };
                if let Some((offset, found)) = found {
                    return Ok(Some((region, offset, found)));
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

/// The parts, cut at multiples of [`UNIT_BYTES`], in order.
fn cut(parts: &[RegionPart]) -> Vec<RegionPart> {
    let mut units = Vec::with_capacity(parts.len());
    for RegionPart { region, bytes } in parts {
        let mut at = bytes.start;
        while at < bytes.end {
            let end = (at / UNIT_BYTES + 1).saturating_mul(UNIT_BYTES).min(bytes.end);
            units.push(RegionPart { region: *region, bytes: at..end });
            at = end;
        }
    }
    units
}

/// Whether one copy of device memory brings both units, `second` following `first`. A group of such neighbours spans at
/// most [`UNIT_BYTES`].
fn read_together(first: &RegionPart, second: &RegionPart) -> bool {
    first.region == second.region
        && first.bytes.start / UNIT_BYTES == second.bytes.start / UNIT_BYTES
        && second.bytes.start - first.bytes.end <= GAP_BYTES
}

/// The first byte of `units` that is not `value`, with its offset.
fn first_on_host(
    memory: &HostRegion,
    units: &[RegionPart],
    value: u8,
    buffer: &mut Vec<u8>,
) -> Result<Option<(u64, u8)>> {
    buffer.resize(LOOK_BYTES, 0);
    for unit in units {
        let mut at = unit.bytes.start;
        while at < unit.bytes.end {
            let len = (unit.bytes.end - at).min(LOOK_BYTES as u64) as usize;
            let looked = &mut buffer[..len];
            memory.read(at, looked)?;
            if let Some(index) = first_other(looked, value) {
                return Ok(Some((at + index as u64, looked[index])));
            }
            at += len as u64;
        }
    }
    Ok(None)
}

/// As [`first_on_host`]; `units` are not empty and are [read together](read_together).
fn first_on_device(
    memory: &DeviceRegion,
    units: &[RegionPart],
    value: u8,
    buffer: &mut Vec<u8>,
) -> Result<Option<(u64, u8)>> {
    let start = units[0].bytes.start;
    buffer.resize((units[units.len() - 1].bytes.end - start) as usize, 0);
    memory.read(start, buffer)?;
    Ok(units.iter().find_map(|unit| {
        let looked = &buffer[(unit.bytes.start - start) as usize..(unit.bytes.end - start) as usize];
        let index = first_other(looked, value)?;
        Some((unit.bytes.start + index as u64, looked[index]))
    }))
}

/// The index of the first byte that is not `value`.
fn first_other(bytes: &[u8], value: u8) -> Option<usize> {
    bytes.chunks(LOOK_BYTES).enumerate().find_map(|(number, looked)| {
        // No early exit, so that it is vector code.
        if looked.iter().fold(0, |all, &byte| all | (byte ^ value)) == 0 {
            return None;
        }
        let index = looked.iter().position(|&byte| byte != value)?;
        Some(number * LOOK_BYTES + index)
    })
}
