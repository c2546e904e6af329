//! One thread that lets go of what may not be let go of where it is dropped.
//!
//! Freeing device or pinned memory waits for all work of the device, also for a kernel that spins until the very thread
//! that frees does something (seen on an H200, driver 580: `cuMemFree`, `cuMemFreeHost`). Whoever drops a buffer may
//! wait, as with any other library; a submission, a poll, or a thread that tells of ends may not: there a [`FreeLater`]
//! is held, and buffers are handed to the thread here. A graph's destructor may call no driver function at all.

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
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

thread_local! {
    static LATER: Cell<usize> = const { Cell::new(0) };
}

/// While this lives, memory dropped on this thread is given back by another one. Nests.
#[derive(Debug)]
pub struct FreeLater(PhantomData<*mut ()>);

impl FreeLater {
    /// Begins.
    pub fn enter() -> FreeLater {
        LATER.with(|depth| depth.set(depth.get() + 1));
        FreeLater(PhantomData)
    }
}

impl Drop for FreeLater {
    fn drop(&mut self) {
        LATER.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Runs `task`, which may wait for the device: here, unless this thread must not wait.
pub(crate) fn run_where_waiting_is_fine(task: impl FnOnce() + Send + 'static) {
    // A thread whose locals are gone is ending; it may wait.
    if LATER.try_with(|depth| depth.get() > 0).unwrap_or(false) {
        return run_later(task);
    }
    if forked() {
        return std::mem::forget(task);
    }
    // Ours must not spoil a capture that another thread has begun.
    let _relaxed = RelaxedCapture::enter();
    task();
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
        let Some(task) = held.as_mut().and_then(|state| state.tasks.pop_front()) else {
            held = WORK.wait(held).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(held);
        // The owners of a graph's memory may be anybody's code.
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(task)).is_err() {
            tracing::error!("the owner of a graph's memory panicked when dropped");
        }
        held = state();
        if let Some(state) = held.as_mut() {
            state.open -= 1;
        }
        DONE.notify_all();
    }
}

/// Waits until everything dropped so far has been given back to the driver, at most ten seconds; true if it has. For
/// whoever needs the memory now: allocations that find none do this themselves.
pub fn drain_deferred() -> bool {
    if forked() {
        return false;
    }
    let deadline = Instant::now() + PATIENCE;
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

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
