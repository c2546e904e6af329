//! One allocation per layout, carved into its regions.

use std::sync::Arc;

use kvferry_cuda::{DeviceBuffer, DeviceRegion, PinnedBuffer, current_device};
use kvferry_host::{HostBuffer, HostOptions, HostRegion};
use kvferry_layout::{Layout, LayoutError};

use super::{MemoryKind, Region};
use crate::error::{Error, Result};

/// Regions after the first start at least here, so that separate layers never share a cache line or a sector.
const REGION_ALIGNMENT: u64 = 512;

/// What every allocator we use guarantees for the base address.
const BASE_ALIGNMENT: u64 = 512;

/// `via`: the device through whose context pinned memory is made; the thread's current one, else 0, if `None`.
pub(crate) fn allocate(
    layout: &Layout,
    kind: MemoryKind,
    options: HostOptions,
    via: Option<u32>,
) -> Result<Vec<Region>> {
    if kind != MemoryKind::System {
        refuse_options(kind, options)?;
    }
    let overflow = |what| Error::Layout(LayoutError::Overflow { what });
    let alignment = layout.config().alignment().max(REGION_ALIGNMENT);
    let region = layout.region_bytes();
    let step = region.checked_next_multiple_of(alignment).ok_or_else(|| overflow("bytes of a region"))?;
    let slack = if alignment > BASE_ALIGNMENT { alignment } else { 0 };
    let total = step
        .checked_mul(layout.num_regions() - 1)
        .and_then(|bytes| bytes.checked_add(region))
        .and_then(|bytes| bytes.checked_add(slack))
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| overflow("bytes of all regions"))?;
    let len = usize::try_from(total).map_err(|_| overflow("bytes of all regions"))?;
    let starts = |base: u64| {
        let first = base.next_multiple_of(alignment) - base;
        (0..layout.num_regions()).map(move |index| first + index * step)
    };
    match kind {
        MemoryKind::System => {
            let whole = HostRegion::of_buffer(Arc::new(HostBuffer::new(len, options)?));
            starts(whole.addr()).map(|start| Ok(Region::Host(whole.part(start, region)?))).collect()
        }
        MemoryKind::Pinned => {
            let via = match via {
                Some(ordinal) => ordinal,
                None => current_device()?.unwrap_or(0),
            };
            let whole = PinnedBuffer::new(len, via)?.into_region();
            // The driver hands out what somebody of this process has left there.
            whole.fill(0, whole.len(), 0)?;
            starts(whole.addr()).map(|start| Ok(Region::Host(whole.part(start, region)?))).collect()
        }
        MemoryKind::Device(ordinal) => {
            let whole = DeviceRegion::of_buffer(Arc::new(DeviceBuffer::new(len, ordinal)?));
            starts(whole.addr())
                .map(|start| {
                    whole.part(start, region).map(Region::Device).ok_or_else(|| overflow("a region"))
                })
                .collect()
        }
    }
}

/// The driver places pinned and device memory: what was asked of the system there is refused, not ignored.
fn refuse_options(kind: MemoryKind, options: HostOptions) -> Result<()> {
    let usual = HostOptions::default();
    let HostOptions { huge_pages, numa, first_touch_threads } = options;
    let (option, value) = if huge_pages != usual.huge_pages {
        ("huge_pages", format!("{huge_pages:?}"))
    } else if numa != usual.numa {
        ("numa", format!("{numa:?}"))
    } else if first_touch_threads != usual.first_touch_threads {
        ("first_touch_threads", first_touch_threads.to_string())
    } else {
        return Ok(());
    };
    Err(Error::InvalidOption { option, expected: format!("left at its default for {kind} memory"), value })
}
