//! A word to sleep on across processes.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

use crate::region::Owner;

/// Bytes a bell takes in shared memory.
pub const BELL_BYTES: u64 = 8;

/// What lies in the memory. Fresh zeros are a bell that was never rung.
#[repr(C)]
pub(super) struct BellWords {
    /// Times rung, wrapping.
    count: AtomicU32,
    /// Threads asleep or about to sleep. One that is killed there stays counted: then every ring pays a system call.
    waiters: AtomicU32,
}

/// A bell that any process sharing its memory may ring and wait for. To wait for a condition: take
/// [`value`](Self::value), look at the condition, then [`wait`](Self::wait) with that value; a ring between the look and
/// the wait ends the wait at once. Rings nobody waits for cost no system call.
#[derive(Clone)]
pub struct Bell {
    words: NonNull<BellWords>,
    // Never read: keeps the memory of `words`.
    _owner: Owner,
}

// SAFETY: all access goes through atomics, and the owner, which is Send and Sync, keeps them in place.
unsafe impl Send for Bell {}
// SAFETY: as for Send.
unsafe impl Sync for Bell {}

impl Bell {
    /// A bell on this process's heap, for threads.
    pub fn local() -> Bell {
        let words = Arc::new(BellWords { count: AtomicU32::new(0), waiters: AtomicU32::new(0) });
        let base = NonNull::from(&*words);
        // SAFETY: the Arc keeps the words valid and in place.
        unsafe { Bell::from_raw(base, words) }
    }

    /// # Safety
    /// `words` must be aligned and stay valid, and accessed only as atomics, while `owner` lives.
    pub(super) unsafe fn from_raw(words: NonNull<BellWords>, owner: Owner) -> Bell {
        Bell { words, _owner: owner }
    }

    fn words(&self) -> &BellWords {
        // SAFETY: valid and aligned by `from_raw`'s contract, for as long as `self` holds the owner; atomics may be
        // shared.
        unsafe { self.words.as_ref() }
    }

    /// Rings: everyone who waits wakes, in every process. What was stored before is seen by those who wake.
    pub fn ring(&self) {
        let words = self.words();
        // Sequentially consistent with `wait`: either this sees the waiter, or the waiter's futex sees the new count.
        words.count.fetch_add(1, Ordering::SeqCst);
        if words.waiters.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Err(error) = futex::wake(&words.count, futex::Flags::empty(), i32::MAX as u32) {
            tracing::warn!(%error, "futex wake failed");
        }
    }

    /// Times rung, wrapping, with acquire.
    #[inline]
    pub fn value(&self) -> u32 {
        self.words().count.load(Ordering::Acquire)
    }

    /// Sleeps until the bell has been rung since [`value`](Self::value) gave `seen`, at most `timeout`. True if it has.
    pub fn wait(&self, seen: u32, timeout: Duration) -> bool {
        let words = self.words();
        if words.count.load(Ordering::Acquire) != seen {
            return true;
        }
        if timeout.is_zero() {
            return false;
        }
        let start = Instant::now();
        words.waiters.fetch_add(1, Ordering::SeqCst);
        let rung = loop {
            if words.count.load(Ordering::SeqCst) != seen {
                break true;
            }
            let left = match timeout.checked_sub(start.elapsed()) {
                Some(left) if !left.is_zero() => left,
                _ => break false,
            };
            // A limit too long for the system's clock type is no limit.
            let left = futex::Timespec::try_from(left).ok();
            match futex::wait(&words.count, futex::Flags::empty(), seen, left.as_ref()) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(error) => {
                    // Not reachable with our arguments; degrade to short sleeps rather than spin.
                    tracing::warn!(%error, "futex wait failed");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        words.waiters.fetch_sub(1, Ordering::SeqCst);
        rung
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").field("value", &self.value()).finish()
    }
}
