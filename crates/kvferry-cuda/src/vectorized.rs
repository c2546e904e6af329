//! The public pointer-table copy between raw addresses.

use std::sync::Arc;

use kvferry_kernels::{Kernel, VectorizedCopyParams, vectorized_copy_geometry};

use crate::error::{CudaError, Result};
use crate::gpu::{Gpu, StreamHandle};

/// Copies `pairs` runs of `bytes` bytes each on `stream`, by a kernel: run `i` from the address in word `i` of the table
/// at `src_table` to that in word `i` of the table at `dst_table`. Any alignment of the runs; the tables are multiples
/// of 8, in memory of the device or pinned memory. At most `max_ctas` CTAs, or as many as fill the device. No pairs or no
/// bytes: nothing is launched. May be captured.
///
/// # Errors
/// [`CudaError::NoKernels`], [`CudaError::Geometry`], [`CudaError::Argument`] for a table that is no multiple of 8, a
/// stream of another device, or the driver's refusal.
///
/// # Safety
/// Until the stream has done the work, both tables hold `pairs` addresses that kernels of this device can use, each valid
/// for `bytes` bytes; no destination overlaps another one or a source.
pub unsafe fn vectorized_copy(
    gpu: &Arc<Gpu>,
    src_table: u64,
    dst_table: u64,
    pairs: u64,
    bytes: u64,
    stream: StreamHandle,
    max_ctas: Option<u32>,
) -> Result<()> {
    for (what, value) in
        [("the address of the source table", src_table), ("the address of the destination table", dst_table)]
    {
        if !value.is_multiple_of(8) {
            return Err(CudaError::Argument { what, value, rule: "it must be a multiple of 8" });
        }
    }
    let geometry = vectorized_copy_geometry(pairs, bytes, gpu.sm_count(), max_ctas)?;
    let cx = gpu.enter()?;
    let handle = gpu.own_stream(&cx, stream)?;
    let params = VectorizedCopyParams::new(src_table, dst_table, pairs, bytes, &geometry);
    // SAFETY: the context is current and the stream is one of it; `params` is the parameter struct of this kernel; the
    // memory is the caller's promise.
    unsafe {
        gpu.kernels().launch(Kernel::VectorizedCopy, geometry.launch, (&raw const params).cast(), handle)
    }
}
