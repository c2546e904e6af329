//! The copy threads of a context.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_host::ForkGuard;

use super::job::HostJob;
use crate::error::{Error, Result};
use crate::transfer::completion::Completion;
use crate::transfer::{ending, lock};

/// Threads start with the first job that needs them and sleep on a condition variable in between.
pub(crate) struct Pool {
    threads: usize,
    fork: ForkGuard,
    in_flight: AtomicUsize,
    state: Mutex<State>,
    work: Condvar,
    // For who closes: a job has ended, or there is one to help with.
    change: Condvar,
}

#[derive(Default)]
struct State {
    // Started jobs with tasks to claim, oldest first. Held jobs are not here.
    queue: VecDeque<Arc<HostJob>>,
    // Admitted jobs whose handles do not say yet that they have ended.
    open: usize,
    closed: bool,
    stopping: bool,
    workers: Vec<JoinHandle<()>>,
    // The system refused a thread: those that run must do.
    short: bool,
}

impl State {
    /// Removes a job of which every task is claimed, unless somebody has.
    fn exhausted(&mut self, job: &Arc<HostJob>) {
        if self.queue.front().is_some_and(|front| Arc::ptr_eq(front, job)) {
            self.queue.pop_front();
        }
    }
}

impl Pool {
    pub(crate) fn new(threads: usize, fork: ForkGuard) -> Arc<Pool> {
        Arc::new(Pool {
            threads,
            fork,
            in_flight: AtomicUsize::new(0),
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            change: Condvar::new(),
        })
    }

    pub(crate) const fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn check_fork(&self) -> Result<()> {
        Ok(self.fork.check()?)
    }

    /// Admits jobs, all or none, so that closing waits for them, and makes sure that there are threads to run them.
    pub(crate) fn admit(self: &Arc<Self>, jobs: usize, needs_threads: bool) -> Result<()> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Error::Closed);
        }
        while needs_threads && !state.short && state.workers.len() < self.threads {
            let pool = self.clone();
            let name = format!("kvferry-copy-{}", state.workers.len());
            match std::thread::Builder::new().name(name).spawn(move || pool.serve()) {
                Ok(worker) => state.workers.push(worker),
                // Fewer threads than asked for still do the work.
                Err(error) if !state.workers.is_empty() => {
                    tracing::warn!(%error, started = state.workers.len(), "cannot start another copy thread");
                    state.short = true;
                }
                Err(error) => return Err(Error::Thread(error)),
            }
        }
        state.open += jobs;
        self.in_flight.fetch_add(jobs, Ordering::Relaxed);
        Ok(())
    }

    /// Counts a part of an admitted job, which may come after closing: closing waits for it as well.
    pub(crate) fn admit_part(&self) {
        lock(&self.state).open += 1;
    }

    pub(crate) fn enqueue(&self, job: Arc<HostJob>) {
        let many = job.tasks() > 1;
        let mut state = lock(&self.state);
        state.queue.push_back(job);
        let closing = state.closed;
        drop(state);
        if many {
            self.work.notify_all()
        } else {
            self.work.notify_one()
        }
        if closing {
            self.change.notify_all();
        }
    }

    /// An admitted job is about to end. Relaxed: its event, set afterwards, orders this for who has seen it.
    pub(crate) fn leave(&self, completion: &Completion) {
        if !completion.is_part() {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// An admitted job has ended, and its handles say so.
    pub(crate) fn left(&self) {
        let mut state = lock(&self.state);
        state.open -= 1;
        if state.open == 0 {
            self.change.notify_all();
        }
    }

    /// An admitted job has come to nothing.
    pub(crate) fn withdraw(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.left();
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    fn serve(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.queue.front().cloned() {
                drop(state);
                job.help(None);
                state = lock(&self.state);
                // All its tasks are claimed: make room for the next job.
                state.exhausted(&job);
            } else if state.stopping {
                return;
            } else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Refuses new jobs.
    pub(crate) fn refuse(&self) {
        lock(&self.state).closed = true;
    }

    /// Refuses new jobs and waits until none is in flight, helping; true if that came within `timeout`.
    ///
    /// Helping is needed when a callback closes: it holds a copy thread, maybe the only one.
    pub(crate) fn close(&self, timeout: Option<Duration>) -> bool {
        // A limit beyond the clock's range is no limit.
        let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = lock(&self.state);
        state.closed = true;
        while state.open > 0 {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            if let Some(job) = state.queue.front().cloned() {
                drop(state);
                let exhausted = job.help(deadline);
                state = lock(&self.state);
                if exhausted {
                    state.exhausted(&job);
                }
                continue;
            }
            state = match left {
                None => self.change.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.change.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        state.stopping = true;
        let workers = std::mem::take(&mut state.workers);
        drop(state);
        self.work.notify_all();
        for worker in workers {
            // A callback must not wait for threads: for its own, or for one whose callback waits for it in turn.
            let in_callback = ending::in_callback() || worker.thread().id() == std::thread::current().id();
            if !in_callback && worker.join().is_err() {
                tracing::warn!("a copy thread had panicked");
            }
        }
        true
    }

    /// In a forked child: the threads are not there, so only forget them.
    pub(crate) fn abandon(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            for worker in std::mem::take(&mut state.workers) {
                std::mem::forget(worker);
            }
        }
    }
}
