//! `kvferry.TransferContext`.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry::{Engine, TransferOptions, TransferStrategy, Transform};
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyString, PyTuple};

use crate::errors::{OrRaise, plain, shown, to_py};
use crate::layout::PhysicalLayout;
use crate::numbers::{integer, whole};
use crate::route::{Route, TransferPlan};
use crate::sides::{Ids, both, now};
use crate::streams::{dependencies, stream};
use crate::transfer::{Timeout, Transfer, TransferResult, interruptible};

/// Options shared by transfer(), plan() and route().
pub(crate) struct Options<'a, 'py> {
    pub(crate) layers: Option<&'a Bound<'py, PyAny>>,
    pub(crate) heads: Option<&'a Bound<'py, PyAny>>,
    pub(crate) stream: Option<&'a Bound<'py, PyAny>>,
    pub(crate) after: Option<&'a Bound<'py, PyAny>>,
    pub(crate) engine: &'a str,
    pub(crate) num_sms: Option<&'a Bound<'py, PyAny>>,
    pub(crate) transform: &'a str,
    pub(crate) strategy: Option<&'a str>,
    pub(crate) per_layer: bool,
}

impl Options<'_, '_> {
    pub(crate) fn read(&self, py: Python<'_>) -> PyResult<TransferOptions> {
        let transform = match self.transform {
            "auto" => Transform::Auto,
            "forbid" => Transform::Forbid,
            other => {
                return Err(plain(
                    py,
                    "OptionError",
                    format!("transform must be \"auto\" or \"forbid\", got {other:?}"),
                ));
            }
        };
        Ok(TransferOptions {
            layers: self.layers.map(|layers| span("layers", layers)).transpose()?,
            heads: self.heads.map(|heads| span("heads", heads)).transpose()?,
            transform,
            engine: if self.engine == "auto" {
                None
            } else {
                Some(self.engine.parse::<Engine>().or_raise(py)?)
            },
            strategy: self.strategy.map(|s| s.parse::<TransferStrategy>()).transpose().or_raise(py)?,
            after: self.after.map(dependencies).transpose()?.unwrap_or_default(),
            tag: None,
            per_layer: self.per_layer,
            stream: self.stream.map(|given| stream("stream", given)).transpose()?,
            num_sms: self.num_sms.map(num_sms).transpose()?,
        })
    }
}

/// A `range` with step 1. Emptiness and limits are the planner's to judge.
pub(crate) fn span(option: &str, value: &Bound<'_, PyAny>) -> PyResult<Range<u64>> {
    let py = value.py();
    let bad = || {
        plain(py, "OptionError", format!("{option} must be a range with step 1 and start >= 0, got {value}"))
    };
    let range = value.cast::<PyRange>().map_err(|_| bad())?;
    let bound = |name: &str| integer(&range.getattr(name)?)?.ok_or_else(bad);
    let (start, stop, step) = (bound("start")?, bound("stop")?, bound("step")?);
    match (u64::try_from(start), u64::try_from(stop), step) {
        (Ok(start), Ok(stop), 1) => Ok(start..stop),
        _ => Err(bad()),
    }
}

/// A number of multiprocessors; more than there are is no limit.
fn num_sms(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    let most = u32::MAX.into();
    Ok(whole("OptionError", "num_sms", value, most)? as u32)
}

/// Plans and runs transfers.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct TransferContext {
    context: Mutex<Option<Arc<kvferry::TransferContext>>>,
    // What the numbers that the core knows stand for.
    tags: Mutex<HashMap<u64, Py<PyAny>>>,
    next_tag: AtomicU64,
}

impl TransferContext {
    fn get(&self, py: Python<'_>) -> PyResult<Arc<kvferry::TransferContext>> {
        let held = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        held.clone().ok_or_else(|| crate::errors::to_py(py, kvferry::Error::Closed))
    }

    fn tags(&self) -> MutexGuard<'_, HashMap<u64, Py<PyAny>>> {
        self.tags.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TransferContext {
    fn drop(&mut self) {
        // A context that was not closed waits for its jobs here, which others need not wait for.
        let held = self.context.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        Python::try_attach(move |py| py.detach(move || drop(held)));
    }
}

#[pymethods]
impl TransferContext {
    #[new]
    #[pyo3(signature = (device=None, *, threads=None, ordered=false, staging_bytes=None, pinned_bytes=None))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
        ordered: bool,
        staging_bytes: Option<&Bound<'_, PyAny>>,
        pinned_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let mut builder = kvferry::TransferContext::builder().ordered(ordered);
        if let Some(ordinal) = device.map(ordinal).transpose()?.flatten() {
            builder = builder.device(ordinal);
        }
        if let Some(threads) = threads {
            let threads = whole("OptionError", "threads", threads, u32::MAX.into())?;
            builder = builder.threads(threads as usize);
        }
        let bytes = |name, value| whole("OptionError", name, value, i64::MAX as u64);
        if let Some(value) = staging_bytes {
            builder = builder.staging_bytes(bytes("staging_bytes", value)?);
        }
        if let Some(value) = pinned_bytes {
            builder = builder.pinned_bytes(bytes("pinned_bytes", value)?);
        }
        let context = py.detach(|| builder.build()).or_raise(py)?;
        Ok(TransferContext {
            context: Mutex::new(Some(Arc::new(context))),
            tags: Mutex::default(),
            next_tag: AtomicU64::new(0),
        })
    }

    /// Copies block src_blocks[i] of src to block dst_blocks[i] of dst. Returns at once.
    #[pyo3(signature = (src, dst, src_blocks, dst_blocks, *, layers=None, heads=None, stream=None, after=None,
                        engine="auto", num_sms=None, transform="auto", strategy=None, tag=None, per_layer=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn transfer(
        &self,
        py: Python<'_>,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        src_blocks: &Bound<'_, PyAny>,
        dst_blocks: &Bound<'_, PyAny>,
        layers: Option<&Bound<'_, PyAny>>,
        heads: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        after: Option<&Bound<'_, PyAny>>,
        engine: &str,
        num_sms: Option<&Bound<'_, PyAny>>,
        transform: &str,
        strategy: Option<&str>,
        tag: Option<&Bound<'_, PyAny>>,
        per_layer: bool,
    ) -> PyResult<Transfer> {
        let context = self.get(py)?;
        let options =
            Options { layers, heads, stream, after, engine, num_sms, transform, strategy, per_layer };
        let mut options = options.read(py)?;
        let from = Ids::read((src.core.layout(), src_blocks), "source")?;
        let to = Ids::read((dst.core.layout(), dst_blocks), "destination")?;
        if options.stream.is_none() {
            options.after.extend(now(py, src, dst, [&from, &to])?);
        }
        if let Some(tag) = tag {
            let number = self.next_tag.fetch_add(1, Ordering::Relaxed);
            options.tag = Some(number);
            // Known before the job can end.
            self.tags().insert(number, tag.clone().unbind());
        }
        let job =
            py.detach(|| context.transfer_ids(&src.core, &dst.core, from.source(), to.source(), &options));
        if let (Err(_), Some(number)) = (&job, options.tag) {
            let refused = self.tags().remove(&number);
            drop(refused);
        }
        Ok(Transfer::new(job.or_raise(py)?))
    }

    /// Plans a transfer without running it.
    #[pyo3(signature = (src, dst, src_blocks, dst_blocks, *, layers=None, heads=None, stream=None, after=None,
                        engine="auto", num_sms=None, transform="auto", strategy=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn plan(
        &self,
        py: Python<'_>,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        src_blocks: &Bound<'_, PyAny>,
        dst_blocks: &Bound<'_, PyAny>,
        layers: Option<&Bound<'_, PyAny>>,
        heads: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        after: Option<&Bound<'_, PyAny>>,
        engine: &str,
        num_sms: Option<&Bound<'_, PyAny>>,
        transform: &str,
        strategy: Option<&str>,
    ) -> PyResult<TransferPlan> {
        let context = self.get(py)?;
        let options =
            Options { layers, heads, stream, after, engine, num_sms, transform, strategy, per_layer: false }
                .read(py)?;
        let (from, to) = both((src.core.layout(), src_blocks), (dst.core.layout(), dst_blocks))?;
        let plan = py.detach(|| context.plan(&src.core, &dst.core, &from, &to, &options)).or_raise(py)?;
        Ok(TransferPlan(plan))
    }

    /// Prepares a pair of layouts for hot loops.
    #[pyo3(signature = (src, dst, *, layers=None, heads=None, stream=None, after=None, engine="auto", num_sms=None,
                        transform="auto", strategy=None, per_layer=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn route(
        &self,
        py: Python<'_>,
        src: &Bound<'_, PhysicalLayout>,
        dst: &Bound<'_, PhysicalLayout>,
        layers: Option<&Bound<'_, PyAny>>,
        heads: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        after: Option<&Bound<'_, PyAny>>,
        engine: &str,
        num_sms: Option<&Bound<'_, PyAny>>,
        transform: &str,
        strategy: Option<&str>,
        per_layer: bool,
    ) -> PyResult<Route> {
        let context = self.get(py)?;
        let options =
            Options { layers, heads, stream, after, engine, num_sms, transform, strategy, per_layer }
                .read(py)?;
        let (src, dst) = (src.clone().unbind(), dst.clone().unbind());
        let route = py.detach(|| context.route(&src.get().core, &dst.get().core, &options)).or_raise(py)?;
        let keep = [stream, after].into_iter().flatten().map(|given| given.clone().unbind()).collect();
        Ok(Route { route, on_a_stream: options.stream.is_some(), src, dst, _keep: keep })
    }

    /// Number of the GPU; None in a context for host memory.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        Ok(self.get(py)?.device())
    }

    /// Copy threads of the host engine.
    #[getter]
    fn threads(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.threads())
    }

    /// Jobs submitted and not yet complete.
    #[getter]
    fn in_flight(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.in_flight())
    }

    /// Tagged jobs that have ended since the last call, in order of their ends: (tag, TransferResult or the
    /// TransferError that wait() would raise). Kept until asked for.
    fn completed<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Py<PyAny>, Bound<'py, PyAny>)>> {
        let ended = self.get(py)?.completed();
        let mut out = Vec::with_capacity(ended.len());
        for (number, outcome) in ended {
            let tag = self.tags().remove(&number);
            let told = match outcome {
                Ok(result) => Bound::new(py, TransferResult::new(result))?.into_any(),
                Err(failure) => to_py(py, failure.into()).into_value(py).into_bound(py).into_any(),
            };
            out.push((tag.unwrap_or_else(|| py.None()), told));
        }
        Ok(out)
    }

    /// Refuses new jobs and waits for those in flight. Closing twice is fine.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<()> {
        let Ok(context) = self.get(py) else { return Ok(()) };
        interruptible(py, timeout, |limit| context.close(limit))?;
        // Dropped without the lock: the last reference joins the threads.
        let held = self.context.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(held);
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, py: Python<'_>, _exc: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.get(py) {
            Ok(context) => {
                let device =
                    context.device().map_or("host".to_owned(), |ordinal| format!("device {ordinal}"));
                let (threads, in_flight) = (context.threads(), context.in_flight());
                format!("TransferContext({device}, {threads} threads, {in_flight} in flight)")
            }
            Err(_) => "TransferContext(closed)".to_owned(),
        }
    }
}

/// The GPU of a context: an ordinal, "cuda:1", "cuda" for the first, or "cpu".
pub(crate) fn ordinal(device: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    if let Ok(word) = device.cast::<PyString>() {
        match &*word.to_string_lossy() {
            "cpu" => return Ok(None),
            "cuda" => return Ok(Some(0)),
            other => {
                if let Some(Ok(ordinal)) = other.strip_prefix("cuda:").map(str::parse) {
                    return Ok(Some(ordinal));
                }
            }
        }
    } else if let Some(Ok(ordinal)) = integer(device)?.map(u32::try_from) {
        return Ok(Some(ordinal));
    }
    let message =
        format!("device must be None, \"cpu\", a GPU ordinal or such as \"cuda:0\", got {}", shown(device));
    Err(plain(device.py(), "OptionError", message))
}
