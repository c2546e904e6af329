//! `kvferry.TransferContext`, `kvferry.Route` and `kvferry.TransferPlan`.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry::{BlockId, Engine, TransferOptions, TransferStrategy, Transform};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyRange, PyTuple};

use crate::errors::{OrRaise, plain, to_py};
use crate::ids::{IdList, ids};
use crate::layout::PhysicalLayout;
use crate::numbers::{integer, whole};
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
        let refuse = |what: &str| {
            Err(plain(
                py,
                "Unsupported",
                format!("{what} needs a GPU transfer: this context moves host memory"),
            ))
        };
        if self.stream.is_some() {
            return refuse("stream=");
        }
        if let Some(num_sms) = self.num_sms {
            whole("OptionError", "num_sms", num_sms, u32::MAX.into())?;
            return refuse("num_sms=");
        }
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
            after: self.after.map(jobs).transpose()?.unwrap_or_default(),
            tag: None,
            per_layer: self.per_layer,
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

fn jobs(after: &Bound<'_, PyAny>) -> PyResult<Vec<kvferry::TransferCompleteNotification>> {
    if let Ok(job) = after.cast::<Transfer>() {
        return Ok(vec![job.get().job(after.py())?.clone()]);
    }
    if !(after.is_instance_of::<PyList>() || after.is_instance_of::<PyTuple>()) {
        let message = format!("after must be a Transfer or a list of them, got {}", after.get_type().name()?);
        return Err(plain(after.py(), "OptionError", message));
    }
    after
        .try_iter()?
        .map(|item| {
            let item = item?;
            match item.cast::<Transfer>() {
                Ok(job) => Ok(job.get().job(item.py())?.clone()),
                Err(_) => {
                    let message = format!("after must hold Transfers, got {}", item.get_type().name()?);
                    Err(plain(item.py(), "OptionError", message))
                }
            }
        })
        .collect()
}

/// Both id lists, read with the GIL.
pub(crate) fn both(
    (src, src_blocks): (&kvferry::Layout, &Bound<'_, PyAny>),
    (dst, dst_blocks): (&kvferry::Layout, &Bound<'_, PyAny>),
) -> PyResult<(Vec<BlockId>, Vec<BlockId>)> {
    let limit = |layout: &kvferry::Layout| layout.config().num_blocks();
    Ok((
        ids(src_blocks, IdList { side: "source", limit: limit(src) })?,
        ids(dst_blocks, IdList { side: "destination", limit: limit(dst) })?,
    ))
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
    #[pyo3(signature = (device=None, *, threads=None, ordered=false))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
        ordered: bool,
    ) -> PyResult<Self> {
        let mut builder = kvferry::TransferContext::builder().ordered(ordered);
        if let Some(device) = device
            && device.extract::<&str>().ok() != Some("cpu")
        {
            match integer(device)?.map(u32::try_from) {
                Some(Ok(ordinal)) => builder = builder.device(ordinal),
                _ => {
                    let message = format!("device must be None, \"cpu\" or a GPU ordinal, got {device}");
                    return Err(plain(py, "OptionError", message));
                }
            }
        }
        if let Some(threads) = threads {
            let threads = whole("OptionError", "threads", threads, u32::MAX.into())?;
            builder = builder.threads(threads as usize);
        }
        Ok(TransferContext {
            context: Mutex::new(Some(Arc::new(builder.build().or_raise(py)?))),
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
        let (from, to) = both((src.0.layout(), src_blocks), (dst.0.layout(), dst_blocks))?;
        if let Some(tag) = tag {
            let number = self.next_tag.fetch_add(1, Ordering::Relaxed);
            options.tag = Some(number);
            // Known before the job can end.
            self.tags().insert(number, tag.clone().unbind());
        }
        let job = py.detach(|| context.transfer(&src.0, &dst.0, &from, &to, &options));
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
        let (from, to) = both((src.0.layout(), src_blocks), (dst.0.layout(), dst_blocks))?;
        Ok(TransferPlan(py.detach(|| context.plan(&src.0, &dst.0, &from, &to, &options)).or_raise(py)?))
    }

    /// Prepares a pair of layouts for hot loops.
    #[pyo3(signature = (src, dst, *, layers=None, heads=None, stream=None, after=None, engine="auto", num_sms=None,
                        transform="auto", strategy=None, per_layer=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn route(
        &self,
        py: Python<'_>,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
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
        let route = py.detach(|| context.route(&src.0, &dst.0, &options)).or_raise(py)?;
        Ok(Route { route, src: src.0.clone(), dst: dst.0.clone() })
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
                format!(
                    "TransferContext(host, {} threads, {} in flight)",
                    context.threads(),
                    context.in_flight()
                )
            }
            Err(_) => "TransferContext(closed)".to_owned(),
        }
    }
}

/// A prepared pair of layouts: call it with two id lists.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Route {
    route: kvferry::Route,
    src: Arc<kvferry::PhysicalLayout>,
    dst: Arc<kvferry::PhysicalLayout>,
}

#[pymethods]
impl Route {
    /// Submits one transfer along the route.
    fn __call__(
        &self,
        py: Python<'_>,
        src_blocks: &Bound<'_, PyAny>,
        dst_blocks: &Bound<'_, PyAny>,
    ) -> PyResult<Transfer> {
        let (from, to) = both((self.src.layout(), src_blocks), (self.dst.layout(), dst_blocks))?;
        Ok(Transfer::new(py.detach(|| self.route.submit(&from, &to)).or_raise(py)?))
    }

    /// Plans without running.
    fn plan(
        &self,
        py: Python<'_>,
        src_blocks: &Bound<'_, PyAny>,
        dst_blocks: &Bound<'_, PyAny>,
    ) -> PyResult<TransferPlan> {
        let (from, to) = both((self.src.layout(), src_blocks), (self.dst.layout(), dst_blocks))?;
        Ok(TransferPlan(py.detach(|| self.route.plan(&from, &to)).or_raise(py)?))
    }

    fn __repr__(&self) -> String {
        let side = |layout: &kvferry::PhysicalLayout| {
            format!("{} in {} memory", layout.layout().kind().name(), layout.memory_kind())
        };
        format!("Route({} -> {})", side(&self.src), side(&self.dst))
    }
}

/// A validated plan with its engine.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct TransferPlan(pub(crate) kvferry::TransferPlan);

#[pymethods]
impl TransferPlan {
    /// What will be copied, in how many runs, by which engine and why.
    fn explain(&self) -> String {
        self.0.explain()
    }

    /// Blocks moved (of the finer page where page sizes differ).
    #[getter]
    fn blocks(&self) -> u64 {
        self.0.stats().blocks
    }

    /// Bytes moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.stats().bytes
    }

    /// Copies one would make by hand: per (block, layer, outer), or per row where that is not contiguous.
    #[getter]
    fn elementary_runs(&self) -> u64 {
        self.0.stats().elementary_runs
    }

    /// Copies after merging.
    #[getter]
    fn num_runs(&self) -> u64 {
        self.0.stats().runs
    }

    /// Shortest and longest run in bytes.
    #[getter]
    fn run_bytes(&self) -> (u64, u64) {
        let stats = self.0.stats();
        (stats.shortest_run, stats.longest_run)
    }

    /// Whether the order of a block's axes changes on the way.
    #[getter]
    fn transforms(&self) -> bool {
        self.0.plan().pair().transforms()
    }

    /// The engine chosen.
    #[getter]
    fn engine(&self) -> &'static str {
        self.0.choice().engine.name()
    }

    /// Every run as a dict of source and destination region and offset, and length; at most `limit`.
    #[pyo3(signature = (limit=None), text_signature = "($self, limit=1000)")]
    fn runs<'py>(&self, py: Python<'py>, limit: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyList>> {
        let limit = limit.map_or(Ok(1000), |limit| whole("OptionError", "limit", limit, i64::MAX as u64))?;
        let list = PyList::empty(py);
        for run in self.0.plan().runs().take(limit as usize) {
            let dict = PyDict::new(py);
            dict.set_item("src_region", run.src.region)?;
            dict.set_item("src_offset", run.src.offset)?;
            dict.set_item("dst_region", run.dst.region)?;
            dict.set_item("dst_offset", run.dst.offset)?;
            dict.set_item("bytes", run.bytes)?;
            list.append(dict)?;
        }
        Ok(list)
    }

    fn __repr__(&self) -> String {
        let stats = self.0.stats();
        format!(
            "TransferPlan({} blocks, {} bytes, {} runs, engine {})",
            stats.blocks,
            stats.bytes,
            stats.runs,
            self.engine()
        )
    }
}
