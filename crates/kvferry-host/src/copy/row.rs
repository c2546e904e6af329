//! The innermost loop: equal runs at two constant strides, with the body chosen once by the run length.

use super::{CopyHint, Loop, stream};

/// Runs at least this long gain from streaming stores (measured by `examples/copy_speed.rs`: 1.4 times at 256 bytes, a
/// third slower at 64).
const MIN_STREAM_RUN: usize = 256;

type RowFn = unsafe fn(src: *const u8, dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize);

/// The row copy for one run length and hint.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    copy: RowFn,
}

impl Rows {
    pub(super) fn choose(run_bytes: usize, hint: CopyHint) -> Rows {
        if hint.streams() && run_bytes >= MIN_STREAM_RUN {
            return Rows { copy: if hint == CopyHint::Relay { relayed } else { streamed } };
        }
        let copy: RowFn = match run_bytes {
            1 => fixed::<1>,
            2 => fixed::<2>,
            4 => fixed::<4>,
            8 => fixed::<8>,
            16 => fixed::<16>,
            32 => fixed::<32>,
            64 => fixed::<64>,
            96 => fixed::<96>,
            128 => fixed::<128>,
            n if n <= MAX_LINED && n % LINE == 0 => lined,
            _ => any,
        };
        Rows { copy }
    }

    /// Rows of any length whose source and destination may overlap.
    pub(super) const fn overlapping() -> Rows {
        Rows { copy: moved }
    }

    /// Copies `runs` runs of `run_bytes` bytes, `step` apart on each side (its count is not looked at).
    ///
    /// # Safety
    /// `run_bytes` is the one given to [`choose`](Self::choose), and every run must be readable at its source,
    /// writable at its destination, and overlap no other run's destination. Unless made by
    /// [`overlapping`](Self::overlapping), a run's source does not overlap its destination.
    #[inline]
    pub(super) unsafe fn copy(self, src: *const u8, dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
        // SAFETY: the caller's promise is the one of every row function.
        unsafe { (self.copy)(src, dst, runs, step, run_bytes) }
    }
}

/// Runs of `N` bytes: the compiler turns the copy into a few vector moves.
unsafe fn fixed<const N: usize>(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, _: usize) {
    for _ in 0..runs {
        // SAFETY: the caller vouches for N readable and N writable bytes of every run; bytes need no alignment.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, N) };
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}

/// Bytes per inlined piece of [`lined`]: the longest copy the compiler expands without a call on baseline x86-64.
const LINE: usize = 128;
/// Longest run that [`lined`] takes; beyond, the C library's copy is as fast.
const MAX_LINED: usize = 512;

/// Runs that are a short multiple of [`LINE`].
unsafe fn lined(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
    for _ in 0..runs {
        for offset in (0..run_bytes).step_by(LINE) {
            let (from, to) = (src.wrapping_add(offset), dst.wrapping_add(offset));
            // SAFETY: `run_bytes` is a multiple of LINE, so the piece lies inside the run the caller vouches for.
            unsafe { std::ptr::copy_nonoverlapping(from, to, LINE) };
        }
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}

/// Runs of any length.
unsafe fn any(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
    for _ in 0..runs {
        // SAFETY: the caller vouches for both ranges of every run; bytes need no alignment.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, run_bytes) };
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}

/// Runs of any length, each moved as if through a buffer.
unsafe fn moved(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
    for _ in 0..runs {
        // SAFETY: the caller vouches for both ranges of every run; they may overlap, and bytes need no alignment.
        unsafe { std::ptr::copy(src, dst, run_bytes) };
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}

/// [`streamed`], and the source leaves the core's own caches.
unsafe fn relayed(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
    for _ in 0..runs {
        // SAFETY: the caller vouches for both ranges of every run.
        unsafe { stream::copy(src, dst, run_bytes) };
        stream::demote(src, run_bytes);
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}

/// Runs of any length by streaming stores. The fence is the caller's.
unsafe fn streamed(mut src: *const u8, mut dst: *mut u8, runs: u64, step: &Loop, run_bytes: usize) {
    for _ in 0..runs {
        // SAFETY: the caller vouches for both ranges of every run.
        unsafe { stream::copy(src, dst, run_bytes) };
        src = src.wrapping_offset(step.src_stride as isize);
        dst = dst.wrapping_offset(step.dst_stride as isize);
    }
}
