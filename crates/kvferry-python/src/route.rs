//! `kvferry.Route` and `kvferry.TransferPlan`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::OrRaise;
use crate::layout::PhysicalLayout;
use crate::numbers::whole;
use crate::sides::{Ids, both, now};
use crate::transfer::Transfer;

/// A prepared pair of layouts: call it with two id lists.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Route {
    pub(crate) route: kvferry::Route,
    /// Whether the caller gave a stream.
    pub(crate) on_a_stream: bool,
    pub(crate) src: Py<PhysicalLayout>,
    pub(crate) dst: Py<PhysicalLayout>,
    /// Streams and events that the route knows by their handles only.
    pub(crate) _keep: Vec<Py<PyAny>>,
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
        let (src, dst) = (self.src.get(), self.dst.get());
        let from = Ids::read((src.core.layout(), src_blocks), "source")?;
        let to = Ids::read((dst.core.layout(), dst_blocks), "destination")?;
        let after = if self.on_a_stream { Vec::new() } else { now(py, src, dst, [&from, &to])? };
        let job = py.detach(|| self.route.submit_after(from.source(), to.source(), &after));
        Ok(Transfer::new(job.or_raise(py)?))
    }

    /// Plans without running.
    fn plan(
        &self,
        py: Python<'_>,
        src_blocks: &Bound<'_, PyAny>,
        dst_blocks: &Bound<'_, PyAny>,
    ) -> PyResult<TransferPlan> {
        let (src, dst) = (&self.src.get().core, &self.dst.get().core);
        let (from, to) = both((src.layout(), src_blocks), (dst.layout(), dst_blocks))?;
        Ok(TransferPlan(py.detach(|| self.route.plan(&from, &to)).or_raise(py)?))
    }

    fn __repr__(&self) -> String {
        let side = |layout: &Py<PhysicalLayout>| {
            let core = &layout.get().core;
            format!("{} in {} memory", core.layout().kind().name(), core.memory_kind())
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
