//! Whose turn it is: calls and collective steps of one rank come one after another.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::attend::Attend;
use crate::transfer::lock;

/// A mutex whose waiters can be interrupted.
#[derive(Debug)]
pub(super) struct Turn<T> {
    taken: Mutex<bool>,
    free: Condvar,
    value: Mutex<T>,
}

/// The value, until dropped.
#[derive(Debug)]
pub(super) struct Turned<'a, T> {
    value: MutexGuard<'a, T>,
    // Dropped after the value is let go of.
    _end: End<'a, T>,
}

#[derive(Debug)]
struct End<'a, T>(&'a Turn<T>);

impl<T> Turn<T> {
    pub(super) fn new(value: T) -> Turn<T> {
        Turn { taken: Mutex::new(false), free: Condvar::new(), value: Mutex::new(value) }
    }

    /// Whether somebody has it.
    pub(super) fn is_taken(&self) -> bool {
        *lock(&self.taken)
    }

    /// Waits for it; `None` if `attend` gives up first.
    pub(super) fn take(&self, attend: &Attend) -> Option<Turned<'_, T>> {
        let mut attending = attend.begin();
        let mut taken = lock(&self.taken);
        while *taken {
            let nap = attending.nap(Attend::EVERY);
            taken = self.free.wait_timeout(taken, nap).unwrap_or_else(PoisonError::into_inner).0;
            if *taken {
                // Asked without the lock: the answer may take as long as Python wants.
                drop(taken);
                if attending.gives_up() {
                    return None;
                }
                taken = lock(&self.taken);
            }
        }
        *taken = true;
        drop(taken);
        let end = End(self);
        Some(Turned { value: lock(&self.value), _end: end })
    }
}

impl<T> Deref for Turned<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Turned<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for End<'_, T> {
    fn drop(&mut self) {
        *lock(&self.0.taken) = false;
        self.0.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn one_at_a_time_and_nobody_is_forgotten() {
        let turn = Turn::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        *turn.take(&Attend::default()).unwrap() += 1;
                    }
                });
            }
        });
        assert_eq!(*turn.take(&Attend::default()).unwrap(), 8000);
        assert!(!turn.is_taken());
    }

    #[test]
    fn a_waiter_gives_up_when_told_and_spoils_nothing() {
        let turn = Turn::new(());
        let told = Arc::new(AtomicBool::new(false));
        let attend = Attend::new({
            let told = Arc::clone(&told);
            move || told.load(Ordering::SeqCst)
        });
        let held = turn.take(&attend).unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| turn.take(&attend).is_none());
            std::thread::sleep(Duration::from_millis(20));
            let start = Instant::now();
            told.store(true, Ordering::SeqCst);
            assert!(waiter.join().unwrap());
            assert!(start.elapsed() < Duration::from_secs(1));
        });
        drop(held);
        assert!(turn.take(&attend).is_some());
    }
}
