//! Lists of copies in the form that the driver takes, and the calls that take them.

use cudarc::driver::sys::{CUmemLocation, CUmemLocationType, CUmemcpySrcAccessOrder};

use super::BATCH_CAP;
use crate::error::{CudaError, NOT_SUPPORTED, Result};
use crate::raw::{self, BatchForm, CUdeviceptr, CUmemcpyAttributes, CUstream};

/// The copy engine starts when a batch call returns, after about a microsecond of the CPU per copy: the first calls are
/// small, so that it works while the rest is still being put in.
pub(super) const FIRST_CALL: usize = 2;
const CALL_GROWTH: usize = 4;

/// Addresses and sizes, three lists of one length.
#[derive(Debug, Default)]
pub(super) struct Copies {
    src: Vec<CUdeviceptr>,
    dst: Vec<CUdeviceptr>,
    sizes: Vec<usize>,
}

impl Copies {
    pub(super) fn reserve(&mut self, more: usize) {
        self.src.reserve(more);
        self.dst.reserve(more);
        self.sizes.reserve(more);
    }

    pub(super) fn push(&mut self, src: u64, dst: u64, len: u64) {
        self.src.push(src);
        self.dst.push(dst);
        self.sizes.push(len as usize);
    }

    pub(super) fn len(&self) -> usize {
        self.sizes.len()
    }

    pub(super) fn clear(&mut self) {
        self.src.clear();
        self.dst.clear();
        self.sizes.clear();
    }

    #[cfg(test)]
    pub(super) fn list(&self) -> Vec<(u64, u64, usize)> {
        (0..self.len()).map(|at| (self.src[at], self.dst[at], self.sizes[at])).collect()
    }

    /// All copies by the batch call. An error comes with the number of copies that went before it; "not supported" is
    /// [`CudaError::BatchUnsupported`].
    ///
    /// # Safety
    /// The context of `stream` is current, the stream is neither the legacy one nor capturing, and every byte stays valid
    /// until the stream has done the copies.
    pub(super) unsafe fn batch(&self, stream: CUstream, first_call: usize) -> Result<(), (usize, CudaError)> {
        let form = raw::batch_form().ok_or((0, CudaError::BatchUnsupported))?;
        let (mut from, mut next) = (0, first_call.min(BATCH_CAP));
        while from < self.len() {
            let count = next.min(self.len() - from);
            next = (next * CALL_GROWTH).min(BATCH_CAP);
            // SAFETY: `from + count` is within the lists; the rest is the caller's promise.
            let outcome = unsafe { self.batch_part(form, from, count, stream) };
            outcome.map_err(|error| match error.code() {
                Some(NOT_SUPPORTED) => (from, CudaError::BatchUnsupported),
                _ => (from, error),
            })?;
            from += count;
        }
        Ok(())
    }

    /// One batch call.
    ///
    /// # Safety
    /// As [`batch`](Self::batch), and `from + count` is within the lists.
    unsafe fn batch_part(&self, form: BatchForm, from: usize, count: usize, stream: CUstream) -> Result<()> {
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        // One entry for all copies. Stream order: sources are not read before earlier work on the stream is done. The
        // hints are for managed memory.
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut starts = [0];
        // The prototypes are not const-correct: the driver reads the lists and writes nothing there.
        let (dst, src) = (self.dst[from..].as_ptr().cast_mut(), self.src[from..].as_ptr().cast_mut());
        let sizes = self.sizes[from..].as_ptr().cast_mut();
        match form {
            BatchForm::Eight => {
                // SAFETY: three lists of `count` live entries, one attribute entry that begins at copy 0; the rest is
                // the caller's promise.
                unsafe {
                    raw::cuMemcpyBatchAsync_v2(
                        dst,
                        src,
                        sizes,
                        count,
                        &mut attributes,
                        starts.as_mut_ptr(),
                        1,
                        stream,
                    )
                }
            }
            BatchForm::Nine => {
                let mut failed = usize::MAX;
                // SAFETY: as above; `failed` is a live integer.
                unsafe {
                    raw::cuMemcpyBatchAsync(
                        dst,
                        src,
                        sizes,
                        count,
                        &mut attributes,
                        starts.as_mut_ptr(),
                        1,
                        &mut failed,
                        stream,
                    )
                }
            }
        }
    }

    /// The copies from the one numbered `from` on, by one call each.
    ///
    /// # Safety
    /// The context of `stream` is current, and every byte stays valid until the stream has done the copies.
    pub(super) unsafe fn each(&self, stream: CUstream, from: usize) -> Result<()> {
        for at in from..self.len() {
            // SAFETY: the caller's promise; addresses are unified, so the driver finds the direction.
            unsafe { raw::cuMemcpyAsync(self.dst[at], self.src[at], self.sizes[at], stream) }?;
        }
        Ok(())
    }
}
