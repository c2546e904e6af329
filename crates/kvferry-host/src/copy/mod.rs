//! The copy primitives under the host engine.
//!
//! A transfer plan ends in a *loop nest*: up to [`MAX_LOOPS`] counted loops with one byte stride per side, around a
//! run of bytes that is contiguous on both. [`copy_nest`] carries out any sub-range of its runs, so that several
//! threads can share one nest; [`copy_bytes`] is the flat case.
//!
//! Rows of 128 to 512 bytes are where an order change (NHD to HND) spends its time: run lengths that are whole
//! machine words are copied inline, without a call per row. Longer runs go to the C library's `memcpy`.
//! [`CopyHint::NonTemporal`] writes around the caches where the machine can (x86-64), which saves reading the
//! destination first; it pays when the data is larger than the last-level cache and not read again soon.

mod nest;
mod row;
mod stream;

pub use nest::{CopyNest, Loop, MAX_LOOPS, NestError, copy_nest};
pub(crate) use nest::{copy_nest_unfenced, move_nest};
pub(crate) use stream::fence;

/// Whether the destination should pass through the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CopyHint {
    /// Ordinary stores.
    #[default]
    Temporal,
    /// Streaming stores where the machine has them; the same as `Temporal` elsewhere. Only ever a hint.
    NonTemporal,
    /// As `NonTemporal`, and what was read leaves the core's own caches for the shared one: for a source that a device
    /// writes again soon, which is slow while a core still holds it. Runs shorter than 256 bytes, and copies that overlap,
    /// are as with `Temporal`.
    Relay,
}

impl CopyHint {
    /// Whether the destination is written around the caches, which then needs a [`fence`].
    pub(crate) const fn streams(self) -> bool {
        matches!(self, CopyHint::NonTemporal | CopyHint::Relay)
    }
}

/// Copies `len` bytes from `src` to `dst`.
///
/// Streaming stores are fenced before the call returns, so what orders ordinary stores afterwards orders them too.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes, the two ranges must not overlap, and nobody may write to
/// the source or access the destination during the call. No alignment is needed; with `len` 0 nothing is accessed.
pub unsafe fn copy_bytes(src: *const u8, dst: *mut u8, len: usize, hint: CopyHint) {
    if len == 0 {
        return;
    }
    match hint {
        // SAFETY: the caller vouches for both ranges; bytes need no alignment.
        CopyHint::Temporal => unsafe { std::ptr::copy_nonoverlapping(src, dst, len) },
        CopyHint::NonTemporal | CopyHint::Relay => {
            // SAFETY: the caller vouches for both ranges.
            unsafe { stream::copy(src, dst, len) };
            stream::fence();
            if hint == CopyHint::Relay {
                stream::demote(src, len);
            }
        }
    }
}

/// Sets `len` bytes at `dst` to `value`.
///
/// # Safety
/// `dst` must be writable for `len` bytes and nobody else may access them during the call. With `len` 0 nothing is
/// accessed.
pub unsafe fn fill_bytes(dst: *mut u8, value: u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the caller vouches for the range; bytes need no alignment.
    unsafe { std::ptr::write_bytes(dst, value, len) }
}
