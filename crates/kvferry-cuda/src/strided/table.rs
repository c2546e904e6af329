//! The base addresses of both sides' regions, where a kernel finds them.

use std::ffi::c_void;
use std::sync::Arc;

use kvferry_kernels::Bases;

use crate::error::Result;
use crate::gpu::Gpu;
use crate::memory::{DeviceBuffer, GpuMemory};
use crate::raw;

/// Base addresses: in the parameters when they are few, else in device memory, written once.
#[derive(Debug)]
pub(super) enum BaseTable {
    Inline { src: Vec<u64>, dst: Vec<u64> },
    Device { table: DeviceBuffer, sources: usize },
}

impl BaseTable {
    /// The bases of `src` and `dst`, for kernels of `gpu`; few enough to go `inline` or not.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        inline: bool,
        src: &[GpuMemory],
        dst: &[GpuMemory],
    ) -> Result<BaseTable> {
        let addresses = |memory: &[GpuMemory]| memory.iter().map(GpuMemory::addr).collect::<Vec<_>>();
        let (src, dst) = (addresses(src), addresses(dst));
        if inline {
            return Ok(BaseTable::Inline { src, dst });
        }
        let sources = src.len();
        let table = upload(gpu, &[src, dst].concat())?;
        Ok(BaseTable::Device { table, sources })
    }

    /// Words of the parameters that the bases take.
    pub(super) fn inline_words(&self) -> usize {
        match self {
            BaseTable::Inline { src, dst } => src.len() + dst.len(),
            BaseTable::Device { .. } => 0,
        }
    }

    /// As launches want them.
    pub(super) fn for_kernel(&self) -> Bases<'_> {
        match self {
            BaseTable::Inline { src, dst } => Bases::Inline { src, dst },
            BaseTable::Device { table, sources } => {
                Bases::Table { src: table.addr(), dst: table.addr() + 8 * *sources as u64 }
            }
        }
    }
}

/// Device memory holding `words`, at least one. Waits for the upload, on a stream of the library's own: nobody else's work
/// is waited for, and nobody's capture is touched.
pub(super) fn upload(gpu: &Arc<Gpu>, words: &[u64]) -> Result<DeviceBuffer> {
    let bytes = size_of_val(words);
    let buffer = DeviceBuffer::new(bytes, gpu.ordinal())?;
    let cx = gpu.enter()?;
    let stream = gpu.service_stream(&cx)?;
    let from = words.as_ptr().cast::<c_void>();
    // SAFETY: the buffer has exactly the bytes of `words`, which is readable until the copy has ended: pageable sources
    // are read during the call, and the stream is waited for besides.
    let copied = unsafe { raw::cuMemcpyHtoDAsync_v2(buffer.addr(), from, bytes, stream.as_driver()) };
    // Also after a failure: nothing may be on its way to memory that is freed.
    let finished = gpu.finish(&cx, stream);
    copied.and(finished)?;
    Ok(buffer)
}
