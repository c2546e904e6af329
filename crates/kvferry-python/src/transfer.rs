//! `kvferry.Transfer` and `kvferry.TransferResult`.

use std::time::{Duration, Instant};

use kvferry::TransferCompleteNotification;
use pyo3::prelude::*;

use crate::errors::{plain, to_py};
use crate::notify;

/// How often a blocked wait looks for Ctrl-C. Completion itself is event-driven and does not wait for this.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// What a finished transfer did.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct TransferResult(kvferry::TransferResult);

#[pymethods]
impl TransferResult {
    /// Payload bytes moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Blocks moved (of the finer page where page sizes differ).
    #[getter]
    fn blocks(&self) -> u64 {
        self.0.blocks
    }

    /// From submission to the last byte.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// Engine that moved them.
    #[getter]
    fn engine(&self) -> &'static str {
        self.0.engine.name()
    }

    /// "memcpy", "h2d", "d2h", "d2d" or "p2p".
    #[getter]
    fn direction(&self) -> &'static str {
        self.0.strategy.name()
    }

    /// Always empty: a transfer with failed blocks raises TransferError instead.
    #[getter]
    fn failed_blocks(&self) -> Vec<u32> {
        Vec::new()
    }

    fn __repr__(&self) -> String {
        format!(
            "TransferResult(bytes={}, blocks={}, seconds={:.6}, engine='{}', direction='{}')",
            self.0.bytes, self.0.blocks, self.0.seconds, self.engine(), self.direction()
        )
    }
}

/// Handle of a submitted transfer. Dropping it does not stop the transfer.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Transfer(pub(crate) TransferCompleteNotification);

#[pymethods]
impl Transfer {
    /// Whether the transfer has ended, well or badly.
    fn done(&self) -> bool {
        self.0.done()
    }

    /// Waits for the end without the GIL and returns the result. Raises TransferError if the job failed and
    /// WaitTimeout if `timeout` seconds passed; the job then goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<TransferResult> {
        let limit = timeout.map(|seconds| seconds_of(py, seconds)).transpose()?;
        let start = Instant::now();
        loop {
            let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            let slice = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
            match py.detach(|| self.0.wait(Some(slice))) {
                Ok(result) => return Ok(TransferResult(result)),
                Err(kvferry::Error::Timeout { .. }) => py.check_signals()?,
                Err(error) => return Err(to_py(py, error)),
            }
            if left.is_some_and(|left| left <= slice) {
                let seconds = timeout.unwrap_or_default();
                return Err(to_py(py, kvferry::Error::Timeout { seconds }));
            }
        }
    }

    /// The result of an ended transfer. Raises Busy while it runs, TransferError if it failed.
    fn result(&self, py: Python<'_>) -> PyResult<TransferResult> {
        match self.0.outcome() {
            None => Err(plain(py, "Busy", "the transfer is not complete; wait() or await it")),
            Some(Ok(result)) => Ok(TransferResult(result)),
            Some(Err(failure)) => Err(to_py(py, failure.into())),
        }
    }

    /// `await job` in asyncio: the same result and errors as wait(), without blocking the loop.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        notify::future_of(slf)?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        match self.0.outcome() {
            None => "Transfer(pending)".to_owned(),
            Some(Ok(result)) => format!("Transfer(done, {} bytes in {:.6} s)", result.bytes, result.seconds),
            Some(Err(failure)) => format!("Transfer(failed: {})", failure.reason),
        }
    }
}

/// A timeout in seconds; `inf` is no limit in practice, NaN and negative values are refused.
pub(crate) fn seconds_of(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(plain(py, "OptionError", format!("timeout must be at least 0 seconds, got {seconds}")));
    }
    // A century; Duration cannot hold infinity.
    Ok(Duration::from_secs_f64(seconds.min(3.2e9)))
}
