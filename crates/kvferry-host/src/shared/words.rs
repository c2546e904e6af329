//! Atomic 64-bit words in shared or own memory.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::region::Owner;

/// A row of atomic words, in memory shared between processes or in the process's own. Cloning shares them; the memory
/// stays while a clone lives.
///
/// An index out of range is a fault of the caller: a debug build stops there, a release build reads 0 and writes
/// nothing.
#[derive(Clone)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    count: usize,
    // Never read: keeps the memory of `base`.
    _owner: Owner,
}

// SAFETY: all access goes through atomics, and the owner, which is Send and Sync, keeps them in place.
unsafe impl Send for SharedWords {}
// SAFETY: as for Send; `&SharedWords` gives only atomic operations.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// `count` words of zero on this process's heap.
    pub fn local(count: usize) -> SharedWords {
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..count).map(|_| AtomicU64::new(0)).collect());
        let base = NonNull::from(words.as_slice()).cast();
        // SAFETY: the vector's buffer holds `count` aligned words and never moves or shrinks behind the Arc.
        unsafe { SharedWords::from_raw(base, count, words) }
    }

    /// # Safety
    /// `base` must be aligned and `count` words from it stay valid, and accessed only as atomics, while `owner` lives.
    pub(super) unsafe fn from_raw(base: NonNull<AtomicU64>, count: usize, owner: Owner) -> SharedWords {
        SharedWords { base, count, _owner: owner }
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        debug_assert!(index < self.count, "word {index} of {}", self.count);
        if index >= self.count {
            return None;
        }
        // SAFETY: in bounds (checked above) of words that the owner keeps valid.
        let word = unsafe { self.base.add(index) };
        // SAFETY: valid and aligned by `from_raw`'s contract, for as long as `self` holds the owner; an atomic may be
        // shared.
        Some(unsafe { word.as_ref() })
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Reads with acquire: what its writer stored before a release is seen.
    #[inline]
    pub fn load(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Reads without ordering.
    #[inline]
    pub fn load_relaxed(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Writes with release.
    #[inline]
    pub fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Writes without ordering; a later release makes it visible.
    #[inline]
    pub fn store_relaxed(&self, index: usize, value: u64) {
        if let Some(word) = self.word(index) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Adds (wrapping) with acquire and release; the value before.
    #[inline]
    pub fn add(&self, index: usize, value: u64) -> u64 {
        self.word(index).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
    }

    /// Writes `new` if the word is `old`, with acquire and release; `Ok(old)`, or what was there instead.
    ///
    /// # Errors
    /// The value found, if it was not `old`.
    #[inline]
    pub fn compare_exchange(&self, index: usize, old: u64, new: u64) -> Result<u64, u64> {
        match self.word(index) {
            Some(word) => word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire),
            None => Err(!old),
        }
    }
}

impl fmt::Debug for SharedWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedWords").field("base", &self.base).field("count", &self.count).finish()
    }
}
