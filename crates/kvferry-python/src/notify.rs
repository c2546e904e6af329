//! asyncio without the GIL: completions ring a file descriptor that the event loop watches.
//!
//! No native thread ever attaches to the interpreter. A thread that did could be caught by interpreter shutdown inside
//! Rust frames, which aborts the process.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use kvferry::host::Doorbell;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::transfer::Transfer;

/// A descriptor to watch, and the keys of the jobs that have ended since the last look.
#[pyclass(frozen, module = "kvferry._core")]
pub(crate) struct Notifier(Arc<Shared>);

struct Shared {
    bell: Doorbell,
    ended: Mutex<Vec<u64>>,
}

#[pymethods]
impl Notifier {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Notifier(Arc::new(Shared { bell: Doorbell::new()?, ended: Mutex::new(Vec::new()) })))
    }

    /// The descriptor; readable when a watched job has ended.
    fn fileno(&self) -> i32 {
        self.0.bell.as_raw_fd()
    }

    /// Reports `key` when `job` ends.
    fn watch(&self, py: Python<'_>, job: &Transfer, key: u64) -> PyResult<()> {
        let shared = self.0.clone();
        job.job(py)?.on_complete(move |_| {
            shared.ended.lock().unwrap_or_else(PoisonError::into_inner).push(key);
            shared.bell.ring();
        });
        Ok(())
    }

    /// Keys of the jobs that have ended; the descriptor is then unreadable until the next one.
    fn drain(&self) -> Vec<u64> {
        // Cleared before taking: a job that ends in between rings again.
        self.0.bell.clear();
        std::mem::take(&mut *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// `kvferry._async.wait_for(job)`: a generator that has not started, so no Python code runs in this native frame.
pub(crate) fn wait_for<'py>(job: &Bound<'py, Transfer>) -> PyResult<Bound<'py, PyAny>> {
    static WAIT_FOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    WAIT_FOR.import(job.py(), "kvferry._async", "wait_for")?.call1((job,))
}
