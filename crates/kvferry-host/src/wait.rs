//! A one-shot completion word: set once, waited for by any number of threads.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

/// Longest time a waiter spins before it sleeps. A copy that is about to end is then seen without a system call
/// (about 1 µs), and a long wait costs no more CPU than this.
pub const SPIN_LIMIT: Duration = Duration::from_micros(50);

/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 32;

const UNSET: u32 = 0;
/// Unset, and some waiter sleeps or is about to.
const AWAITED: u32 = 1;
const SET: u32 = 2;

/// A completion that happens once.
///
/// What a thread wrote before [`set`](Self::set) is seen by whoever has seen the event set (release and acquire).
/// Built on a futex rather than a mutex and condition variable: one 32-bit word, `set` without waiters makes no system
/// call and takes no lock, so a completion thread can never be blocked by a waiter, and there is no poisoning.
#[derive(Debug, Default)]
pub struct Event {
    state: AtomicU32,
}

impl Event {
    /// A new event, not set.
    pub const fn new() -> Event {
        Event { state: AtomicU32::new(UNSET) }
    }

    /// Sets the event and wakes every waiter. Setting it again does nothing.
    pub fn set(&self) {
        if self.state.swap(SET, Ordering::Release) == AWAITED {
            // The only failures are bad arguments; the word is ours and aligned.
            if let Err(error) = futex::wake(&self.state, futex::Flags::PRIVATE, i32::MAX as u32) {
                tracing::warn!(%error, "futex wake failed");
            }
        }
    }

    /// Whether the event has been set.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.state.load(Ordering::Acquire) == SET
    }

    /// Waits until the event is set, for at most `timeout` (`None`: without limit). True if it is set.
    ///
    /// A timeout of zero only looks. The wait may overrun by the system's scheduling delay, never fall short.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        if self.is_set() {
            return true;
        }
        let start = Instant::now();
        let spin = timeout.map_or(SPIN_LIMIT, |limit| limit.min(SPIN_LIMIT));
        while start.elapsed() < spin {
            for _ in 0..SPINS_PER_LOOK {
                if self.is_set() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        self.sleep(start, timeout)
    }

    #[cold]
    fn sleep(&self, start: Instant, timeout: Option<Duration>) -> bool {
        loop {
            // Announce the sleep before it. If `set` comes between, this sees SET, or the futex sees that the word is
            // no longer AWAITED and returns at once: no wake-up can be lost.
            let seen = self.state.compare_exchange(UNSET, AWAITED, Ordering::Acquire, Ordering::Acquire);
            if seen == Err(SET) {
                return true;
            }
            let left = match timeout {
                None => None,
                Some(limit) => match limit.checked_sub(start.elapsed()) {
                    Some(left) if !left.is_zero() => Some(left),
                    _ => return self.is_set(),
                },
            };
            // A limit too long for the system's clock type is no limit.
            let left = left.and_then(|left| futex::Timespec::try_from(left).ok());
            match futex::wait(&self.state, futex::Flags::PRIVATE, AWAITED, left.as_ref()) {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
                Err(error) => {
                    // Not reachable with our arguments; degrade to short sleeps rather than spin or give up.
                    tracing::warn!(%error, "futex wait failed");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn set_is_sticky_and_immediate() {
        let event = Event::new();
        assert!(!event.is_set());
        assert!(!event.wait(Some(Duration::ZERO)));
        event.set();
        event.set();
        assert!(event.is_set());
        assert!(event.wait(None));
        assert!(event.wait(Some(Duration::ZERO)));
    }

    #[test]
    fn a_timeout_never_falls_short() {
        let event = Event::new();
        for limit in [Duration::from_micros(10), Duration::from_millis(1), Duration::from_millis(20)] {
            let start = Instant::now();
            assert!(!event.wait(Some(limit)));
            assert!(start.elapsed() >= limit);
        }
    }

    #[test]
    fn endless_limits_do_not_overflow() {
        let event = Arc::new(Event::new());
        let waiter = std::thread::spawn({
            let event = Arc::clone(&event);
            move || event.wait(Some(Duration::MAX))
        });
        std::thread::sleep(Duration::from_millis(5));
        event.set();
        assert!(waiter.join().unwrap());
    }

    #[test]
    fn all_waiters_wake_whenever_set_comes() {
        // Delays around the spin limit put `set` before, inside and after the step from spinning to sleeping.
        for round in 0..300_u64 {
            let event = Event::new();
            let woken = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                for _ in 0..6 {
                    scope.spawn(|| {
                        assert!(event.wait(Some(Duration::from_secs(60))));
                        woken.fetch_add(1, Ordering::Relaxed);
                    });
                }
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(round) {
                    std::hint::spin_loop();
                }
                event.set();
            });
            assert_eq!(woken.load(Ordering::Relaxed), 6);
        }
    }

    #[test]
    fn the_setter_s_writes_are_seen() {
        struct Cell(UnsafeCell<u64>);
        // SAFETY: the tests below write before `set` and read after `wait`, which order the two accesses.
        unsafe impl Sync for Cell {}
        for value in 0..500 {
            let cell = Cell(UnsafeCell::new(u64::MAX));
            let event = Event::new();
            std::thread::scope(|scope| {
                let (cell, event) = (&cell, &event);
                scope.spawn(move || {
                    assert!(event.wait(None));
                    // SAFETY: the only write happened before `set`, which this thread has seen.
                    assert_eq!(unsafe { cell.0.get().read() }, value);
                });
                // SAFETY: nobody reads before `set`.
                unsafe { cell.0.get().write(value) };
                event.set();
            });
        }
    }
}
