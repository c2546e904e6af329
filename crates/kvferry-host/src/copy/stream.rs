//! Copies by streaming (non-temporal) stores on x86-64, plain copies elsewhere.
//!
//! Streaming stores are weakly ordered (Intel SDM volume 1, 10.4.6.2): whoever uses [`copy`] must call [`fence`] before
//! other threads may be told about the data.

/// Copies `len` bytes, with streaming stores for the 64-byte lines that lie wholly inside the destination.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, and the ranges must not overlap. No alignment is needed.
#[inline]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let head = dst.align_offset(x86::LINE).min(len);
        let body = (len - head) / x86::LINE * x86::LINE;
        if body > 0 {
            let (from, to) = (src.wrapping_add(head), dst.wrapping_add(head));
            if std::arch::is_x86_feature_detected!("avx2") {
                let groups = body / x86::GROUP * x86::GROUP;
                // SAFETY: AVX2 was just detected; `groups <= body` bytes of whole lines at `head` lie inside the caller's
                // ranges, and `head` was chosen so that `to` is line-aligned.
                unsafe { x86::groups_avx2(from, to, groups) };
                let (from, to) = (from.wrapping_add(groups), to.wrapping_add(groups));
                // SAFETY: as above, for the lines behind the groups.
                unsafe { x86::lines_avx2(from, to, body - groups) };
            } else {
                // SAFETY: as above; SSE2 belongs to every x86-64.
                unsafe { x86::lines_sse2(from, to, body) };
            }
            // The ends are usually empty (rows start on lines), and a call that copies nothing costs as much as a line.
            if head > 0 {
                // SAFETY: `head <= len`: a prefix of the caller's ranges.
                unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
            }
            let done = head + body;
            if done < len {
                let (from, to) = (src.wrapping_add(done), dst.wrapping_add(done));
                // SAFETY: `done < len`: a suffix of the caller's ranges.
                unsafe { std::ptr::copy_nonoverlapping(from, to, len - done) };
            }
            return;
        }
    }
    // SAFETY: the caller vouches for both ranges; bytes need no alignment.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// Asks that the lines of `len` bytes at `src` leave this core's own caches for the shared one. Speed only: nothing is
/// read or written, whatever the address. Processors without the instruction (Intel SDM volume 2, CLDEMOTE) take it for
/// one that does nothing.
#[inline]
pub(super) fn demote(src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len + src.addr() % x86::LINE).step_by(x86::LINE) {
        // SAFETY: `cldemote [rax]`, spelled in bytes as not every assembler knows it: a hint about one line that changes no
        // data, no register and no flag, and faults on no address.
        unsafe {
            std::arch::asm!(
                ".byte 0x0f, 0x1c, 0x00",
                in("rax") src.wrapping_sub(src.addr() % x86::LINE).wrapping_add(offset),
                options(nostack, preserves_flags),
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (src, len);
}

/// Orders all streaming stores of this thread before its later stores.
#[inline]
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: needs SSE, which belongs to every x86-64; a fence accesses no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256,
    };

    /// A cache line, and the alignment of the destination.
    pub(super) const LINE: usize = 64;

    /// Pages copied side by side: one page alone leaves memory channels and banks idle.
    const STREAMS: usize = 4;
    const PAGE: usize = 4096;
    /// Lines copied from one page before the next page's turn.
    const TURN: usize = 4 * LINE;
    /// Bytes that [`groups_avx2`] copies at a time.
    pub(super) const GROUP: usize = STREAMS * PAGE;

    /// Copies groups of pages, all pages of a group in step.
    ///
    /// # Safety
    /// `len` is a multiple of [`GROUP`]; otherwise as [`lines_avx2`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn groups_avx2(src: *const u8, dst: *mut u8, len: usize) {
        for group in (0..len).step_by(GROUP) {
            for turn in (0..PAGE).step_by(TURN) {
                for page in 0..STREAMS {
                    let at = group + page * PAGE + turn;
                    // SAFETY: `TURN` bytes of whole lines at `at < len` lie inside both ranges; `at` is a multiple of a
                    // line, so the destination stays aligned.
                    unsafe { lines_avx2(src.wrapping_add(at), dst.wrapping_add(at), TURN) };
                }
            }
        }
    }

    /// # Safety
    /// `len` is a multiple of [`LINE`], `dst` is aligned to it, and both ranges are valid and disjoint. Needs AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn lines_avx2(src: *const u8, dst: *mut u8, len: usize) {
        for offset in (0..len).step_by(LINE) {
            let from = src.wrapping_add(offset).cast::<__m256i>();
            let to = dst.wrapping_add(offset).cast::<__m256i>();
            // SAFETY: the first half of a line inside the source; unaligned load.
            let low = unsafe { _mm256_loadu_si256(from) };
            // SAFETY: the second half of the same line.
            let high = unsafe { _mm256_loadu_si256(from.wrapping_add(1)) };
            // SAFETY: the first half of a line inside the destination, 64-byte aligned.
            unsafe { _mm256_stream_si256(to, low) };
            // SAFETY: the second half of the same line, 32-byte aligned.
            unsafe { _mm256_stream_si256(to.wrapping_add(1), high) };
        }
    }

    /// # Safety
    /// As [`lines_avx2`], without AVX2.
    pub(super) unsafe fn lines_sse2(src: *const u8, dst: *mut u8, len: usize) {
        for offset in (0..len).step_by(size_of::<__m128i>()) {
            let from = src.wrapping_add(offset).cast::<__m128i>();
            let to = dst.wrapping_add(offset).cast::<__m128i>();
            // SAFETY: sixteen bytes inside the source (`len` is a multiple of 16); unaligned load.
            let piece = unsafe { _mm_loadu_si128(from) };
            // SAFETY: sixteen bytes inside the destination, aligned because `dst` and `offset` are.
            unsafe { _mm_stream_si128(to, piece) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn the_sse2_lines_copy_too() {
        let src: Vec<u8> = (0..320_u32).map(|i| (i * 7 + 3) as u8).collect();
        let mut room = vec![0xEE_u8; 320 + 128];
        let at = room.as_ptr().align_offset(x86::LINE);
        let dst = room.as_mut_ptr().wrapping_add(at);
        // SAFETY: 256 bytes at 5 lie in `src`, 256 bytes at a line boundary below 64 lie in `room`; both are ours.
        unsafe { x86::lines_sse2(src.as_ptr().wrapping_add(5), dst, 256) };
        fence();
        assert_eq!(room[at..at + 256], src[5..261]);
        assert!(room[..at].iter().chain(&room[at + 256..]).all(|&b| b == 0xEE));
    }
}
