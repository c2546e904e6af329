//! One thread that lets go of what may not be let go of where it is dropped.
//!
//! Freeing device or pinned memory waits for all work of the device, also for a kernel that spins until the very thread
//! that frees does something (seen on an H200, driver 580: `cuMemFree`, `cuMemFreeHost`), and in Python a buffer is
//! dropped whenever the garbage collector comes by. A graph's destructor may call no driver function at all. So buffers
//! and the cargo of graphs are handed to this thread, which may wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_host::ForkGuard;

use crate::capture::RelaxedCapture;

/// How long whoever needs the memory back waits for it: it may be behind work that never ends.
const PATIENCE: Duration = Duration::from_secs(10);

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// Tasks handed over and not done.
    open: usize,
    started: bool,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// The process whose thread it is: a forked child has none, and may find the lock held by a thread it does not have.
static HOME: OnceLock<ForkGuard> = OnceLock::new();
static WORK: Condvar = Condvar::new();
static DONE: Condvar = Condvar::new();

fn forked() -> bool {
    HOME.get().is_some_and(|home| home.check().is_err())
}

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Flights with work on a stream.
static FLYING: AtomicUsize = AtomicUsize::new(0);
/// How long a free waits for a moment without flights.
const QUIET: Duration = Duration::from_secs(1);
/// How often it looks.
const LOOK: Duration = Duration::from_millis(2);
/// Somebody needs the memory now.
static URGENT: AtomicUsize = AtomicUsize::new(0);

/// Counts a flight while this lives.
#[derive(Debug)]
pub(crate) struct Flying(());

impl Flying {
    /// It has work on a stream.
    pub(crate) fn new() -> Flying {
        FLYING.fetch_add(1, Ordering::Relaxed);
        Flying(())
    }
}

impl Drop for Flying {
    fn drop(&mut self) {
        FLYING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A driver that waits in a free lets no other thread of the process launch (seen on an H200): a free behind a stream that
/// somebody holds would stop the transfers of everybody. So frees take place between transfers, or after a while.
fn wait_for_quiet() {
    let deadline = Instant::now() + QUIET;
    while FLYING.load(Ordering::Relaxed) > 0
        && URGENT.load(Ordering::Relaxed) == 0
        && Instant::now() < deadline
    {
        std::thread::sleep(LOOK);
    }
}

/// Whether frees may take place now.
#[derive(Default)]
struct Traffic {
    /// Those who forbid them.
    pauses: usize,
    /// One takes place.
    freeing: bool,
}

static TRAFFIC: Mutex<Traffic> = Mutex::new(Traffic { pauses: 0, freeing: false });
static TURN: Condvar = Condvar::new();

fn traffic() -> MutexGuard<'static, Traffic> {
    TRAFFIC.lock().unwrap_or_else(PoisonError::into_inner)
}

/// No free of this library begins while this lives.
///
/// For ranks that are threads of one process: a free that begins between the first and the last launch of a call waits
/// for the first one's kernel, which waits for the last launch, which a driver that waits in a free does not let through.
/// To be held for the time of a few launches.
#[derive(Debug)]
pub struct FreesPaused(());

impl FreesPaused {
    /// Waits for the free that takes place now, if one does: every kernel that it waits for must be able to end.
    pub fn begin() -> FreesPaused {
        let mut traffic = traffic();
        // Counted first, so that no other free begins before this one's turn.
        traffic.pauses += 1;
        while traffic.freeing {
            traffic = TURN.wait(traffic).unwrap_or_else(PoisonError::into_inner);
        }
        FreesPaused(())
    }
}

impl Drop for FreesPaused {
    fn drop(&mut self) {
        traffic().pauses -= 1;
        TURN.notify_all();
    }
}

/// Waits until frees may take place, and says that one does until dropped.
struct Freeing(());

impl Freeing {
    fn begin() -> Freeing {
        let mut traffic = traffic();
        while traffic.pauses > 0 {
            traffic = TURN.wait(traffic).unwrap_or_else(PoisonError::into_inner);
        }
        traffic.freeing = true;
        Freeing(())
    }
}

impl Drop for Freeing {
    fn drop(&mut self) {
        traffic().freeing = false;
        TURN.notify_all();
    }
}

/// Runs `task` on the thread, after all that was handed over before. Calls no driver function itself. In a forked child
/// nothing runs: the driver's objects are the parent's.
pub(crate) fn run_later(task: impl FnOnce() + Send + 'static) {
    if forked() {
        return std::mem::forget(task);
    }
    let mut held = state();
    let state = held.get_or_insert_default();
    if !state.started {
        HOME.get_or_init(ForkGuard::new);
        let started = std::thread::Builder::new().name("kvferry-free".to_owned()).spawn(serve);
        if let Err(error) = started {
            drop(held);
            tracing::warn!(%error, "cannot start the thread that frees memory: freeing it here");
            return task();
        }
        state.started = true;
    }
    state.open += 1;
    state.tasks.push_back(Box::new(task));
    drop(held);
    WORK.notify_one();
}

fn serve() {
    // Frees of this thread must not spoil a capture that another thread of the program has begun.
    let _relaxed = RelaxedCapture::enter();
    let mut held = state();
    loop {
        let tasks = held.as_mut().map(|state| std::mem::take(&mut state.tasks)).unwrap_or_default();
        if tasks.is_empty() {
            held = WORK.wait(held).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        drop(held);
        // Once for all that has come together.
        wait_for_quiet();
        for task in tasks {
            let _freeing = Freeing::begin();
            // The owners of a graph's memory may be anybody's code.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(task)).is_err() {
                tracing::error!("the owner of a graph's memory panicked when dropped");
            }
            if let Some(state) = state().as_mut() {
                state.open -= 1;
            }
            DONE.notify_all();
        }
        held = state();
    }
}

/// Waits until everything dropped so far has been given back to the driver, at most ten seconds; true if it has. For
/// whoever needs the memory now: allocations that find none do this themselves.
pub fn drain_deferred() -> bool {
    if forked() {
        return false;
    }
    let deadline = Instant::now() + PATIENCE;
    URGENT.fetch_add(1, Ordering::Relaxed);
    let done = wait_until_empty(deadline);
    URGENT.fetch_sub(1, Ordering::Relaxed);
    done
}

fn wait_until_empty(deadline: Instant) -> bool {
    let mut held = state();
    while held.as_ref().is_some_and(|state| state.open > 0) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        held = DONE.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn no_task_begins_during_a_pause() {
        let pause = FreesPaused::begin();
        let done = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&done);
        run_later(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let second = FreesPaused::begin();
        drop(pause);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(done.load(Ordering::Relaxed), 0);
        drop(second);
        assert!(drain_deferred());
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn tasks_run_in_order_and_a_panic_stops_nobody() {
        let count = Arc::new(AtomicUsize::new(0));
        for index in 0..100 {
            let count = Arc::clone(&count);
            run_later(move || {
                assert_eq!(count.fetch_add(1, Ordering::Relaxed), index);
                assert_ne!(index, 50, "a test's panic");
            });
        }
        assert!(drain_deferred());
        assert_eq!(count.load(Ordering::Relaxed), 100);
    }
}
