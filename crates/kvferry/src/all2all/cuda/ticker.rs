//! A thread that looks at the page while calls are under way.
//!
//! A kernel that gives up tells the host by a record in the page, and nobody may ask for a while: a user who only
//! synchronises the device or launches a graph never enters this library. So the page is looked at every 10 ms from a call
//! until the time in which it must have ended, and twice a second once graphs may launch calls. A look is one load; the
//! thread makes no driver call and takes no lock that a call holds. What it finds breaks the communicator, is logged, and
//! goes to the peers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::transfer::lock;

/// While a call is under way.
const SOON: Duration = Duration::from_millis(10);
/// While only graphs may be.
const NOW_AND_THEN: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Shared {
    start: Instant,
    /// Until when calls may be under way, in milliseconds from `start`.
    until: AtomicU64,
    /// A call was captured.
    graphs: AtomicBool,
    /// Calls so far, and how many there were when something was found: nothing is looked for until the next.
    calls: AtomicU64,
    found: AtomicU64,
    asleep: AtomicBool,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

/// The thread, until dropped.
#[derive(Debug)]
pub(super) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts a thread that calls `look`, which says whether there is anything left to look for.
    pub(super) fn start(look: impl Fn() -> bool + Send + 'static) -> Result<Ticker> {
        let shared = Arc::new(Shared {
            start: Instant::now(),
            until: AtomicU64::new(0),
            graphs: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            found: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            lock: Mutex::default(),
            wake: Condvar::new(),
        });
        let thread = std::thread::Builder::new().name("kvf-exchange".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(&look)
        });
        Ok(Ticker { shared, thread: Some(thread.map_err(Error::Thread)?) })
    }

    /// Graphs that were captured may be launched again: all is whole.
    pub(super) fn resume(&self) {
        if self.shared.graphs.load(Ordering::SeqCst) {
            self.call(Duration::ZERO, true);
        }
    }

    /// A call is under way, for at most `patience` from now. Wakes the thread if it sleeps; otherwise two stores.
    pub(super) fn call(&self, patience: Duration, captured: bool) {
        let shared = &*self.shared;
        if captured {
            shared.graphs.store(true, Ordering::SeqCst);
        } else {
            let until = shared.start.elapsed().saturating_add(patience).as_millis();
            shared.until.store(u64::try_from(until).unwrap_or(u64::MAX), Ordering::SeqCst);
        }
        shared.calls.fetch_add(1, Ordering::SeqCst);
        // Sequentially consistent with the thread, which says that it sleeps before it looks at these once more.
        if shared.asleep.swap(false, Ordering::SeqCst) {
            let _guard = lock(&shared.lock);
            shared.wake.notify_all();
        }
    }
}

impl Shared {
    fn nap(&self) -> Option<Duration> {
        if self.calls.load(Ordering::SeqCst) == self.found.load(Ordering::SeqCst) {
            return None;
        }
        let now = self.start.elapsed().as_millis();
        if now < u128::from(self.until.load(Ordering::SeqCst)) {
            Some(SOON)
        } else {
            self.graphs.load(Ordering::SeqCst).then_some(NOW_AND_THEN)
        }
    }

    fn run(&self, look: &dyn Fn() -> bool) {
        let mut guard = lock(&self.lock);
        while !self.stop.load(Ordering::Acquire) {
            let Some(nap) = self.nap() else {
                self.asleep.store(true, Ordering::SeqCst);
                if self.nap().is_none() && !self.stop.load(Ordering::Acquire) {
                    // A call that comes now waits for the lock, which is given up by falling asleep.
                    guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.asleep.store(false, Ordering::SeqCst);
                continue;
            };
            // Between two looks of a slow beat a call may ask for a quick one.
            self.asleep.store(nap > SOON, Ordering::SeqCst);
            if self.nap() != Some(nap) {
                continue;
            }
            guard = self.wake.wait_timeout(guard, nap).unwrap_or_else(PoisonError::into_inner).0;
            self.asleep.store(false, Ordering::SeqCst);
            drop(guard);
            // A call that comes during the look is not what was found.
            let calls = self.calls.load(Ordering::SeqCst);
            if !look() {
                self.found.store(calls, Ordering::SeqCst);
            }
            guard = lock(&self.lock);
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        {
            let _guard = lock(&self.shared.lock);
            self.shared.wake.notify_all();
        }
        let Some(thread) = self.thread.take() else { return };
        // What it found may have been the last thing that held this.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread that looks after all2all calls had panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn it_looks_while_calls_are_under_way_and_sleeps_otherwise() {
        let looks = Arc::new(AtomicUsize::new(0));
        let ticker = Ticker::start({
            let looks = Arc::clone(&looks);
            move || {
                looks.fetch_add(1, Ordering::SeqCst);
                true
            }
        })
        .unwrap();
        let seen = || looks.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(seen(), 0);
        ticker.call(Duration::from_millis(200), false);
        let start = Instant::now();
        while seen() < 3 {
            assert!(start.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(5));
        }
        // Asleep again, some time after; and woken by the next.
        std::thread::sleep(Duration::from_millis(400));
        let before = seen();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(seen(), before);
        ticker.call(Duration::from_secs(60), false);
        while seen() == before {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_is_found_ends_the_looking() {
        let looks = Arc::new(AtomicUsize::new(0));
        let ticker = Ticker::start({
            let looks = Arc::clone(&looks);
            move || looks.fetch_add(1, Ordering::SeqCst) > 3
        })
        .unwrap();
        ticker.call(Duration::from_secs(60), false);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(looks.load(Ordering::SeqCst), 1);
        // Without graphs there is nothing to take up again.
        ticker.resume();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(looks.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn graphs_are_looked_after_again_once_all_is_whole() {
        let looks = Arc::new(AtomicUsize::new(0));
        let ticker = Ticker::start({
            let looks = Arc::clone(&looks);
            move || looks.fetch_add(1, Ordering::SeqCst) > 0
        })
        .unwrap();
        ticker.call(Duration::ZERO, true);
        std::thread::sleep(NOW_AND_THEN * 5 / 2);
        assert_eq!(looks.load(Ordering::SeqCst), 1, "what was found ends it");
        ticker.resume();
        let start = Instant::now();
        while looks.load(Ordering::SeqCst) < 3 {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
