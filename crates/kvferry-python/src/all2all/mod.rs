//! `kvferry.All2All`: attention heads between ranks.

mod array;
mod call;
mod errors;
mod group;
mod held;
mod inner;
mod inputs;
mod interrupt;
mod options;
mod outputs;
mod rendezvous;
mod torch;

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use kvferry::MemoryKind;
use kvferry::all2all::{All2AllBuilder, CallOptions, ExchangeDevice};
use kvferry::layout::{CapacityRequest, ExchangeOp, GlobalTensor, capacity_for};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyRange, PyTuple};

pub(crate) use array::ExchangeArray;
pub(crate) use errors::{failure, refusal, setup};
pub(crate) use inner::{Inner, communicator, head_ranges};
pub(crate) use interrupt::interrupted;

use crate::context::ordinal;
use crate::errors::{OrRaise, plain};
use crate::numbers::whole;
use crate::streams;
use crate::transfer::Timeout;
use array::Axes;
use call::Asked;
use held::Held;
use rendezvous::Meeting;

/// Exchanges attention heads between ranks.
#[pyclass(frozen, weakref, module = "kvferry")]
pub(crate) struct All2All(Arc<Inner>);

impl Deref for All2All {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// What a communicator is made from.
struct Options<'a, 'py> {
    capacity_bytes: &'a Bound<'py, PyAny>,
    device: Option<&'a Bound<'py, PyAny>>,
    timeout: Timeout,
    setup_timeout: Timeout,
    buffers: Option<&'a Bound<'py, PyAny>>,
    name: &'a str,
}

impl Options<'_, '_> {
    /// All but the place, which the other ranks are told at if this is refused.
    fn builder(&self, rank: usize, world: usize) -> PyResult<All2AllBuilder> {
        let capacity = whole("OptionError", "capacity_bytes", self.capacity_bytes, i64::MAX as u64)?;
        let buffers =
            self.buffers.map_or(Ok(4), |given| whole("OptionError", "buffers", given, 1 << 16))? as u32;
        let device = match self.device.map(ordinal).transpose()?.flatten() {
            Some(ordinal) => ExchangeDevice::Gpu(ordinal),
            None => ExchangeDevice::Cpu,
        };
        Ok(kvferry::all2all::All2All::builder(rank, world)
            .capacity_bytes(capacity)
            .buffers(buffers)
            .device(device)
            .timeout(self.timeout.duration())
            .setup_timeout(self.setup_timeout.duration())
            .attend(interrupt::attend())
            .name(self.name))
    }

    fn connect(self, py: Python<'_>, rank: usize, world: usize, meeting: Meeting) -> PyResult<All2All> {
        let patience = self.setup_timeout.duration();
        let built =
            self.builder(rank, world).and_then(|builder| builder.check().map(|()| builder).or_raise(py));
        let mut builder = built.map_err(|error| meeting.refused(py, rank, world, self.name, error))?;
        let made = py.detach(|| {
            if let Some(place) = meeting.place(rank, world, patience)? {
                builder = builder.rendezvous(place);
            }
            builder.connect()
        });
        match made {
            Ok(comm) => Ok(All2All(Inner::new(comm))),
            // A store's own exception says more than that it failed.
            Err(error) => Err(meeting.raised().unwrap_or_else(|| crate::errors::to_py(py, error))),
        }
    }
}

#[pymethods]
impl All2All {
    #[new]
    #[pyo3(signature = (rank, world_size, *, capacity_bytes, rendezvous=None, device=None, timeout=Timeout::SECONDS_60,
                        setup_timeout=Timeout::SECONDS_60,
                        buffers=None, name=""))]
    #[pyo3(
        text_signature = "(rank, world_size, *, capacity_bytes, rendezvous=None, device=None, timeout=60.0, \
                             setup_timeout=60.0, buffers=None, name='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        rank: &Bound<'_, PyAny>,
        world_size: &Bound<'_, PyAny>,
        capacity_bytes: &Bound<'_, PyAny>,
        rendezvous: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        timeout: Timeout,
        setup_timeout: Timeout,
        buffers: Option<&Bound<'_, PyAny>>,
        name: &str,
    ) -> PyResult<All2All> {
        let rank = whole("OptionError", "rank", rank, u32::MAX.into())? as usize;
        let world = whole("OptionError", "world_size", world_size, u32::MAX.into())? as usize;
        let meeting = match rendezvous {
            Some(given) => Meeting::new(given)?,
            None if world == 1 => Meeting::None,
            None => {
                let message = format!("rendezvous must be given for {world} ranks to meet");
                return Err(plain(py, "OptionError", message));
            }
        };
        Options { capacity_bytes, device, timeout, setup_timeout, buffers, name }
            .connect(py, rank, world, meeting)
    }

    /// The communicator of the ranks of a torch process group, which meet in its store.
    #[staticmethod]
    #[pyo3(signature = (group=None, *, capacity_bytes, device=None, timeout=Timeout::SECONDS_60,
                        setup_timeout=Timeout::SECONDS_60, buffers=None, name=""))]
    #[pyo3(
        text_signature = "(group=None, *, capacity_bytes, device=None, timeout=60.0, setup_timeout=60.0, \
                             buffers=None, name='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn from_group(
        py: Python<'_>,
        group: Option<&Bound<'_, PyAny>>,
        capacity_bytes: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        timeout: Timeout,
        setup_timeout: Timeout,
        buffers: Option<&Bound<'_, PyAny>>,
        name: &str,
    ) -> PyResult<All2All> {
        let found = group::members(py, group)?;
        let device = device.or(found.device.as_ref());
        let meeting = Meeting::new(&found.store)?;
        Options { capacity_bytes, device, timeout, setup_timeout, buffers, name }.connect(
            py,
            found.rank,
            found.world,
            meeting,
        )
    }

    /// Bytes of the largest result of such a call on any rank.
    #[staticmethod]
    #[pyo3(signature = (shape, dtype, world_size, *, operation="send_recv_heads", rank_tokens=None, query_heads=None,
                        head_splits=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn capacity_for(
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        world_size: &Bound<'_, PyAny>,
        operation: &str,
        rank_tokens: Option<&Bound<'_, PyAny>>,
        query_heads: Option<&Bound<'_, PyAny>>,
        head_splits: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let (shapes, _) = options::shapes(shape, kvferry::layout::HeadLayout::Bnhd)?;
        let dtypes = options::dtypes(dtype, shapes.len())?;
        let tensors: Vec<GlobalTensor> =
            shapes.iter().zip(dtypes).map(|(&(shape, _), dtype)| GlobalTensor { shape, dtype }).collect();
        let op = operation_of(py, operation)?;
        let world = whole("OptionError", "world_size", world_size, u32::MAX.into())? as usize;
        let rank_tokens = rank_tokens.map(options::rank_tokens).transpose()?;
        let splits = head_splits.map(|given| options::head_splits(given, tensors.len())).transpose()?;
        let request = CapacityRequest {
            rank_tokens: rank_tokens.as_deref(),
            query_heads: query_heads.map(options::query_heads).transpose()?,
            head_splits: splits.as_deref(),
            ..CapacityRequest::new(op, world, &tensors)
        };
        capacity_for(&request).or_raise(py)
    }

    /// [B, N_r, H, D] on rank r becomes [B, N of all ranks, heads of r, D].
    #[pyo3(signature = (tensors, *, rank_tokens=None, layout="BNHD", num_heads=None, query_heads=None, head_splits=None,
                        out=None, stream=None, num_sms=None, engine="auto", dtype=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn send_recv_heads<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyAny>,
        rank_tokens: Option<&Bound<'py, PyAny>>,
        layout: &str,
        num_heads: Option<&Bound<'py, PyAny>>,
        query_heads: Option<&Bound<'py, PyAny>>,
        head_splits: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        num_sms: Option<&Bound<'py, PyAny>>,
        engine: &str,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let asked = Asked {
            rank_tokens,
            layout,
            num_heads,
            query_heads,
            head_splits,
            out,
            stream,
            num_sms,
            engine,
            dtype,
        };
        self.call(py, ExchangeOp::SendRecvHeads, tensors, &asked)
    }

    /// The inverse: [B, N of all ranks, heads of r, D] becomes [B, N_r, H, D].
    #[pyo3(signature = (tensors, *, rank_tokens=None, layout="BNHD", num_heads=None, query_heads=None, head_splits=None,
                        out=None, stream=None, num_sms=None, engine="auto", dtype=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn gather_heads<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyAny>,
        rank_tokens: Option<&Bound<'py, PyAny>>,
        layout: &str,
        num_heads: Option<&Bound<'py, PyAny>>,
        query_heads: Option<&Bound<'py, PyAny>>,
        head_splits: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        num_sms: Option<&Bound<'py, PyAny>>,
        engine: &str,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let asked = Asked {
            rank_tokens,
            layout,
            num_heads,
            query_heads,
            head_splits,
            out,
            stream,
            num_sms,
            engine,
            dtype,
        };
        self.call(py, ExchangeOp::GatherHeads, tensors, &asked)
    }

    /// Every rank gets the whole along `axis`.
    #[pyo3(signature = (tensors, axis="tokens", *, rank_tokens=None, layout="BNHD", num_heads=None, query_heads=None,
                        head_splits=None, out=None, stream=None, num_sms=None, engine="auto", dtype=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn allgather<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyAny>,
        axis: &str,
        rank_tokens: Option<&Bound<'py, PyAny>>,
        layout: &str,
        num_heads: Option<&Bound<'py, PyAny>>,
        query_heads: Option<&Bound<'py, PyAny>>,
        head_splits: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        num_sms: Option<&Bound<'py, PyAny>>,
        engine: &str,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let op = match options::axis(py, axis) {
            Ok(op) => op,
            Err(error) => return Err(self.refused(py, ExchangeOp::AllGatherTokens, None, error)),
        };
        let asked = Asked {
            rank_tokens,
            layout,
            num_heads,
            query_heads,
            head_splits,
            out,
            stream,
            num_sms,
            engine,
            dtype,
        };
        self.call(py, op, tensors, &asked)
    }

    /// A place for results, known to all ranks, which all make it together.
    #[pyo3(signature = (shape, dtype, *, layout="BNHD"))]
    fn empty_output<'py>(
        &self,
        py: Python<'py>,
        shape: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        layout: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layout = options::layout(py, layout)?;
        let (shapes, single) = options::shapes(shape, layout)?;
        let dtypes = options::dtypes(dtype, shapes.len())?;
        let parts: Vec<_> = shapes.iter().zip(dtypes).map(|(&(shape, _), dtype)| (shape, dtype)).collect();
        let output = py.detach(|| self.comm.empty_output(&parts, layout)).or_raise(py)?;
        let results = output.results().or_raise(py)?;
        let mut arrays = Vec::with_capacity(results.len());
        for (index, (result, (_, flat))) in results.into_iter().zip(shapes).enumerate() {
            let held = Held::new(result);
            self.live.add(&held);
            let axes = Axes { layout, flat };
            arrays.push(Bound::new(py, ExchangeArray::new(held, axes, Some((output.clone(), index))))?);
        }
        match arrays.pop() {
            Some(array) if single => Ok(array.into_any()),
            last => {
                arrays.extend(last);
                Ok(PyTuple::new(py, arrays)?.into_any())
            }
        }
    }

    /// Says that work on `stream` reads `result`, which must not be overwritten before that work is done.
    fn record_stream(
        &self,
        py: Python<'_>,
        result: &Bound<'_, PyAny>,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let stream = streams::stream("stream", stream)?;
        match self.live.find(py, result)? {
            Some(held) => held.result().record_stream(stream),
            None => {
                let message = "result must be, or lie in, what a call of this communicator returned";
                return Err(plain(py, "OptionError", message));
            }
        }
        Ok(())
    }

    /// Heads of this rank when `num_heads` are shared by default.
    #[pyo3(signature = (num_heads, *, query_heads=None))]
    fn head_range<'py>(
        &self,
        py: Python<'py>,
        num_heads: &Bound<'py, PyAny>,
        query_heads: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyRange>> {
        let heads = whole("OptionError", "num_heads", num_heads, i64::MAX as u64)?;
        let query_heads = query_heads.map(options::query_heads).transpose()?;
        let range = self.comm.head_range(heads, query_heads).or_raise(py)?;
        PyRange::new(py, range.start as isize, range.end as isize)
    }

    /// Raises what has broken the communicator, if something has.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.comm.check()).or_raise(py)
    }

    /// Breaks the communicator on every rank, also under a running call.
    #[pyo3(signature = (reason=""))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let reason = if reason.is_empty() { "abort() was called" } else { reason };
        py.detach(|| self.comm.abort(reason)).or_raise(py)
    }

    /// Makes a broken communicator usable again; all ranks call it.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.comm.reset()).or_raise(py)
    }

    /// Lets go of the peers; results stay valid. Closing twice is fine.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.comm.close()).or_raise(py)
    }

    /// Bound of every wait inside a call from now on, also of one that runs.
    fn set_timeout(&self, py: Python<'_>, timeout: Timeout) -> PyResult<()> {
        let timeout = timeout.duration();
        py.detach(|| self.comm.set_timeout(timeout)).or_raise(py)
    }

    /// Counts so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.comm.stats();
        let dict = PyDict::new(py);
        dict.set_item("calls", stats.calls)?;
        dict.set_item("epoch", stats.epoch)?;
        dict.set_item("bytes_sent", stats.bytes_sent)?;
        dict.set_item("bytes_received", stats.bytes_received)?;
        dict.set_item("copied_out", stats.copied_out)?;
        dict.set_item("busy", stats.busy)?;
        dict.set_item("buffers", stats.buffers)?;
        dict.set_item("buffers_free", stats.buffers_free)?;
        dict.set_item("resets", stats.resets)?;
        dict.set_item("transport", stats.transport.name)?;
        dict.set_item("why", stats.transport.why)?;
        Ok(dict)
    }

    #[getter]
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.comm.world()
    }

    #[getter]
    fn capacity_bytes(&self) -> u64 {
        self.comm.capacity()
    }

    /// Number of the GPU; None for the CPU.
    #[getter]
    fn device(&self) -> Option<u32> {
        self.ordinal()
    }

    /// Publishes that this rank's next call will not be: for layers above whose own checks failed.
    fn _refuse(&self, py: Python<'_>, operation: &str, reason: &str) -> PyResult<()> {
        let op = operation_of(py, operation)?;
        let options = CallOptions { stream: self.refusal_stream(None), ..CallOptions::default() };
        py.detach(|| self.comm.refuse(op, reason, &options)).or_raise(py)
    }

    /// Number of the communicator in this process, for `communicator()`.
    #[getter]
    fn _handle(&self) -> u64 {
        self.handle
    }

    /// Whether close() has been called.
    #[getter]
    fn closed(&self) -> bool {
        self.comm.is_closed()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exc))]
    fn __exit__(&self, py: Python<'_>, exc: &Bound<'_, PyTuple>) -> PyResult<()> {
        let closed = self.close(py);
        // What ended the block is what its caller should hear of.
        if exc.get_item(0).is_ok_and(|kind| !kind.is_none()) { Ok(()) } else { closed }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a kvferry.All2All belongs to its process and cannot be pickled: make one there",
        ))
    }

    fn __repr__(&self) -> String {
        let (rank, world, device) = (self.comm.rank(), self.comm.world(), self.comm.device());
        let closed = if self.comm.is_closed() { ", closed" } else { "" };
        format!("All2All(rank {rank} of {world}, {device}, {} bytes{closed})", self.comm.capacity())
    }
}

fn operation_of(py: Python<'_>, name: &str) -> PyResult<ExchangeOp> {
    ExchangeOp::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
        let names = ExchangeOp::ALL.map(ExchangeOp::name).join(", ");
        plain(py, "OptionError", format!("operation must be one of {names}, got {name:?}"))
    })
}

impl All2All {
    fn ordinal(&self) -> Option<u32> {
        match self.comm.device() {
            ExchangeDevice::Gpu(ordinal) => Some(ordinal),
            _ => None,
        }
    }

    fn home(&self) -> MemoryKind {
        self.ordinal().map_or(MemoryKind::System, MemoryKind::Device)
    }
}

impl Timeout {
    /// What set-up and calls wait by default.
    pub(crate) const SECONDS_60: Timeout = Timeout::of(Duration::from_secs(60));
}
