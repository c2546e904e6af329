//! `kvferry.Transfer` and `kvferry.TransferResult`.

use std::time::{Duration, Instant};

use kvferry::TransferCompleteNotification;
use kvferry::host::ForkGuard;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::{OrRaise, plain, to_py};
use crate::notify;
use crate::numbers::whole;

/// How often a blocked wait looks for Ctrl-C. Completion itself is event-driven and does not wait for this.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// What a finished transfer did.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct TransferResult(kvferry::TransferResult);

impl TransferResult {
    pub(crate) fn new(result: kvferry::TransferResult) -> TransferResult {
        TransferResult(result)
    }
}

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
            self.0.bytes,
            self.0.blocks,
            self.0.seconds,
            self.engine(),
            self.direction()
        )
    }
}

/// Handle of a submitted transfer. Dropping it does not stop the transfer.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Transfer {
    job: TransferCompleteNotification,
    fork: ForkGuard,
}

impl Transfer {
    pub(crate) fn new(job: TransferCompleteNotification) -> Transfer {
        Transfer { job, fork: ForkGuard::new() }
    }

    /// The job, unless it can never end: one that was pending when its process forked, in the child.
    pub(crate) fn job(&self, py: Python<'_>) -> PyResult<&TransferCompleteNotification> {
        if !self.job.done() {
            self.fork.check().or_raise(py)?;
        }
        Ok(&self.job)
    }

    /// Refuses a captured transfer, which never ends.
    fn waitable(&self, py: Python<'_>) -> PyResult<()> {
        if self.job.captured() {
            self.job.wait(Some(Duration::ZERO)).or_raise(py)?;
        }
        Ok(())
    }

    /// The job, or its part for one layer.
    fn part(
        &self,
        py: Python<'_>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<&TransferCompleteNotification> {
        let job = self.job(py)?;
        let Some(layer) = layer else { return Ok(job) };
        let layer = whole("OptionError", "layer", layer, i64::MAX as u64)?;
        job.layer(layer).ok_or_else(|| {
            plain(py, "OptionError", format!("layer {layer} is not told of: the transfer does not move it, or was made without per_layer=True"))
        })
    }
}

#[pymethods]
impl Transfer {
    /// Whether the transfer, or one layer of it, has ended, well or badly.
    #[pyo3(signature = (*, layer=None))]
    fn done(&self, py: Python<'_>, layer: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        Ok(self.part(py, layer)?.done())
    }

    /// Waits for the end, or for the end of one layer of a transfer made with per_layer=True, without the GIL and
    /// returns the result. Raises TransferError if the job failed and WaitTimeout if `timeout` seconds passed; the job
    /// then goes on.
    #[pyo3(signature = (timeout=None, *, layer=None))]
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<Timeout>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<TransferResult> {
        let job = self.part(py, layer)?;
        interruptible(py, timeout, |limit| job.wait(limit)).map(TransferResult)
    }

    /// Whether a CUDA graph has taken the transfer: it runs whenever that is launched, and this handle never ends.
    #[getter]
    fn captured(&self) -> bool {
        self.job.captured()
    }

    /// Makes what is put on a stream from now on wait for the transfer, or for one layer of it, without waiting here.
    #[pyo3(signature = (stream, *, layer=None))]
    fn wait_on(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let device = crate::streams::device_of(stream)?;
        let stream = crate::streams::stream("stream", stream)?;
        let job = self.part(py, layer)?;
        py.detach(|| match device {
            Some(ordinal) => job.wait_on_of(ordinal, stream, None),
            None => job.wait_on(stream, None),
        })
        .or_raise(py)
    }

    /// The result of an ended transfer. Raises Busy while it runs, TransferError if it failed.
    fn result(&self, py: Python<'_>) -> PyResult<TransferResult> {
        self.waitable(py)?;
        match self.job(py)?.outcome() {
            None => Err(plain(py, "Busy", "the transfer is not complete; wait() or await it")),
            Some(Ok(result)) => Ok(TransferResult(result)),
            Some(Err(failure)) => Err(to_py(py, failure.into())),
        }
    }

    /// `await job` in asyncio: the same result and errors as wait(), without blocking the loop.
    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().waitable(slf.py())?;
        notify::wait_for(slf)
    }

    fn __repr__(&self) -> String {
        match self.job.peek() {
            None if self.job.captured() => "Transfer(captured)".to_owned(),
            None => "Transfer(pending)".to_owned(),
            Some(Ok(result)) => format!("Transfer(done, {} bytes in {:.6} s)", result.bytes, result.seconds),
            Some(Err(failure)) => format!("Transfer(failed: {})", failure.reason),
        }
    }
}

/// Waits in slices without the GIL, so that Ctrl-C is seen.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    timeout: Option<Timeout>,
    wait: impl Fn(Option<Duration>) -> kvferry::Result<T> + Sync,
) -> PyResult<T> {
    let start = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.0.saturating_sub(start.elapsed()));
        let slice = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
        match py.detach(|| wait(Some(slice))) {
            Ok(done) => return Ok(done),
            Err(kvferry::Error::Timeout { .. }) => py.check_signals()?,
            Err(error) => return Err(to_py(py, error)),
        }
        if let Some(timeout) = timeout
            && left.is_some_and(|left| left <= slice)
        {
            return Err(to_py(py, kvferry::Error::Timeout { seconds: timeout.0.as_secs_f64() }));
        }
    }
}

/// A timeout in seconds; `inf` is no limit in practice, NaN and negative values are refused.
#[derive(Clone, Copy)]
pub(crate) struct Timeout(Duration);

impl Timeout {
    pub(crate) const fn duration(self) -> Duration {
        self.0
    }

    /// Reads the argument `name`; True and False are no numbers.
    pub(crate) fn read(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Timeout> {
        if value.is_instance_of::<PyBool>() {
            return Err(no_seconds(name, value));
        }
        Timeout::number(name, value)
    }

    fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Timeout> {
        let py = value.py();
        let seconds = match value.extract::<f64>() {
            Ok(seconds) => seconds,
            // An integer beyond every float.
            Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
                if value.lt(0)? {
                    f64::NEG_INFINITY
                } else {
                    f64::INFINITY
                }
            }
            Err(error) if error.is_instance_of::<PyTypeError>(py) => return Err(no_seconds(name, value)),
            Err(error) => return Err(error),
        };
        if seconds.is_nan() || seconds < 0.0 {
            let message = format!("{name} must be at least 0 seconds, got {seconds}");
            return Err(plain(py, "OptionError", message));
        }
        // A century; Duration cannot hold infinity.
        Ok(Timeout(Duration::from_secs_f64(seconds.min(3.2e9))))
    }
}

fn no_seconds(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    match value.get_type().name() {
        Ok(kind) => PyTypeError::new_err(format!("{name} must be a number of seconds, got {kind}")),
        Err(error) => error,
    }
}

impl FromPyObject<'_, '_> for Timeout {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, '_, PyAny>) -> PyResult<Timeout> {
        Timeout::number("timeout", &value)
    }
}
