//! `kvferry.All2All`: attention heads between ranks.

mod arguments;
mod array;
mod call;
mod errors;
mod group;
mod held;
mod inner;
mod inputs;
mod interrupt;
mod options;
mod output;
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
use arguments::{Arguments, Given};
use call::Asked;
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
    timeout: Given<'py>,
    setup_timeout: Given<'py>,
    buffers: Option<&'a Bound<'py, PyAny>>,
    name: Given<'py>,
}

impl<'py> Options<'_, 'py> {
    /// All but the place, which the other ranks are told at if this is refused; and what a step of set-up may take.
    fn builder(
        &self,
        py: Python<'py>,
        rank: usize,
        world: usize,
        name: &str,
    ) -> PyResult<(All2AllBuilder, Duration)> {
        let capacity = whole("OptionError", "capacity_bytes", self.capacity_bytes, i64::MAX as u64)?;
        let buffers =
            self.buffers.map_or(Ok(4), |given| whole("OptionError", "buffers", given, 1 << 16))? as u32;
        let device = match self.device.map(ordinal).transpose()?.flatten() {
            Some(ordinal) => ExchangeDevice::Gpu(ordinal),
            None => ExchangeDevice::Cpu,
        };
        let seconds = |name, given: &Given<'py>| match &given.0 {
            Some(given) => Timeout::read(name, given).map(Timeout::duration),
            None => Ok(PATIENCE),
        };
        let patience = seconds("setup_timeout", &self.setup_timeout)?;
        let builder = kvferry::all2all::All2All::builder(rank, world)
            .capacity_bytes(capacity)
            .buffers(buffers)
            .device(device)
            .timeout(seconds("timeout", &self.timeout)?)
            .setup_timeout(patience)
            .attend(interrupt::attend())
            .name(name);
        builder.check().or_raise(py)?;
        Ok((builder, patience))
    }

    /// `meeting`: makes the place, given how long a step of set-up may take.
    fn connect(
        self,
        py: Python<'py>,
        rank: usize,
        world: usize,
        meeting: impl FnOnce(Duration) -> PyResult<Meeting>,
    ) -> PyResult<All2All> {
        // Without a name there is nobody to be told.
        let name = self.name.0.as_ref().map_or(Ok(""), |name| options::text("name", name))?;
        // Before the place is opened, which waits for rank 0.
        let (mut builder, patience) = match self.builder(py, rank, world, name) {
            Ok(built) => built,
            Err(error) => {
                return Err(match meeting(PATIENCE) {
                    Ok(meeting) => meeting.refused(py, rank, world, name, error),
                    Err(_) => error,
                });
            }
        };
        let meeting = meeting(patience)?;
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

/// What set-up and calls wait by default.
const PATIENCE: Duration = Duration::from_secs(60);

#[pymethods]
impl All2All {
    #[new]
    #[pyo3(signature = (rank, world_size, *, capacity_bytes, rendezvous=None, device=None, timeout=Given(None),
                        setup_timeout=Given(None), buffers=None, name=Given(None)))]
    #[pyo3(
        text_signature = "(rank, world_size, *, capacity_bytes, rendezvous=None, device=None, timeout=60.0, \
                             setup_timeout=60.0, buffers=None, name='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new<'py>(
        py: Python<'py>,
        rank: &Bound<'py, PyAny>,
        world_size: &Bound<'py, PyAny>,
        capacity_bytes: &Bound<'py, PyAny>,
        rendezvous: Option<&Bound<'py, PyAny>>,
        device: Option<&Bound<'py, PyAny>>,
        timeout: Given<'py>,
        setup_timeout: Given<'py>,
        buffers: Option<&Bound<'py, PyAny>>,
        name: Given<'py>,
    ) -> PyResult<All2All> {
        let rank = whole("OptionError", "rank", rank, u32::MAX.into())? as usize;
        let world = whole("OptionError", "world_size", world_size, u32::MAX.into())? as usize;
        let meeting = |patience| match rendezvous {
            Some(given) => Meeting::new(given, patience),
            None if world == 1 => Ok(Meeting::None),
            None => {
                let message = format!("rendezvous must be given for {world} ranks to meet");
                Err(plain(py, "OptionError", message))
            }
        };
        Options { capacity_bytes, device, timeout, setup_timeout, buffers, name }
            .connect(py, rank, world, meeting)
    }

    /// The communicator of the ranks of a torch process group, which meet in its store.
    #[staticmethod]
    #[pyo3(signature = (group=None, *, capacity_bytes, device=None, timeout=Given(None),
                        setup_timeout=Given(None), buffers=None, name=Given(None)))]
    #[pyo3(
        text_signature = "(group=None, *, capacity_bytes, device=None, timeout=60.0, setup_timeout=60.0, \
                             buffers=None, name='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn from_group<'py>(
        py: Python<'py>,
        group: Option<&Bound<'py, PyAny>>,
        capacity_bytes: &Bound<'py, PyAny>,
        device: Option<&Bound<'py, PyAny>>,
        timeout: Given<'py>,
        setup_timeout: Given<'py>,
        buffers: Option<&Bound<'py, PyAny>>,
        name: Given<'py>,
    ) -> PyResult<All2All> {
        let found = group::members(py, group)?;
        let device = device.or(found.device.as_ref());
        let meeting = |patience| Meeting::new(&found.store, patience);
        Options { capacity_bytes, device, timeout, setup_timeout, buffers, name }.connect(
            py,
            found.rank,
            found.world,
            meeting,
        )
    }

    /// Bytes of the largest result of such a call on any rank.
    #[staticmethod]
    #[pyo3(signature = (shape, dtype, world_size, *, operation=Given(None), rank_tokens=None, query_heads=None,
                        head_splits=None))]
    #[pyo3(text_signature = "(shape, dtype, world_size, *, operation='send_recv_heads', rank_tokens=None, \
                             query_heads=None, head_splits=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn capacity_for(
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        world_size: &Bound<'_, PyAny>,
        operation: Given<'_>,
        rank_tokens: Option<&Bound<'_, PyAny>>,
        query_heads: Option<&Bound<'_, PyAny>>,
        head_splits: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let (shapes, _) = options::shapes(shape, kvferry::layout::HeadLayout::Bnhd)?;
        let dtypes = options::dtypes(dtype, shapes.len())?;
        let tensors: Vec<GlobalTensor> =
            shapes.iter().zip(dtypes).map(|(&(shape, _), dtype)| GlobalTensor { shape, dtype }).collect();
        let op = operation.0.map_or(Ok(ExchangeOp::SendRecvHeads), |name| operation_of(py, &name))?;
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
    #[pyo3(signature = (*args, rank_tokens=Given(None), layout=Given(None), num_heads=Given(None),
                        query_heads=Given(None), head_splits=Given(None), out=Given(None), stream=Given(None),
                        num_sms=Given(None), engine=Given(None), dtype=Given(None), **kwargs))]
    #[pyo3(text_signature = "($self, tensors, *, rank_tokens=None, layout='BNHD', num_heads=None, \
                             query_heads=None, head_splits=None, out=None, stream=None, num_sms=None, engine='auto', \
                             dtype=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn send_recv_heads<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        rank_tokens: Given<'py>,
        layout: Given<'py>,
        num_heads: Given<'py>,
        query_heads: Given<'py>,
        head_splits: Given<'py>,
        out: Given<'py>,
        stream: Given<'py>,
        num_sms: Given<'py>,
        engine: Given<'py>,
        dtype: Given<'py>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options =
            [rank_tokens, layout, num_heads, query_heads, head_splits, out, stream, num_sms, engine, dtype];
        let given = Arguments { positional: args, keywords: kwargs };
        let op = ExchangeOp::SendRecvHeads;
        self.call(py, Some(op), Asked::new(op, &given, options))
    }

    /// The inverse: [B, N of all ranks, heads of r, D] becomes [B, N_r, H, D].
    #[pyo3(signature = (*args, rank_tokens=Given(None), layout=Given(None), num_heads=Given(None),
                        query_heads=Given(None), head_splits=Given(None), out=Given(None), stream=Given(None),
                        num_sms=Given(None), engine=Given(None), dtype=Given(None), **kwargs))]
    #[pyo3(text_signature = "($self, tensors, *, rank_tokens=None, layout='BNHD', num_heads=None, \
                             query_heads=None, head_splits=None, out=None, stream=None, num_sms=None, engine='auto', \
                             dtype=None)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn gather_heads<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        rank_tokens: Given<'py>,
        layout: Given<'py>,
        num_heads: Given<'py>,
        query_heads: Given<'py>,
        head_splits: Given<'py>,
        out: Given<'py>,
        stream: Given<'py>,
        num_sms: Given<'py>,
        engine: Given<'py>,
        dtype: Given<'py>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options =
            [rank_tokens, layout, num_heads, query_heads, head_splits, out, stream, num_sms, engine, dtype];
        let given = Arguments { positional: args, keywords: kwargs };
        let op = ExchangeOp::GatherHeads;
        self.call(py, Some(op), Asked::new(op, &given, options))
    }

    /// Every rank gets the whole along `axis`.
    #[pyo3(signature = (*args, rank_tokens=Given(None), layout=Given(None), num_heads=Given(None),
                        query_heads=Given(None), head_splits=Given(None), out=Given(None), stream=Given(None),
                        num_sms=Given(None), engine=Given(None), dtype=Given(None), **kwargs))]
    #[pyo3(
        text_signature = "($self, tensors, axis='tokens', *, rank_tokens=None, layout='BNHD', num_heads=None, \
                             query_heads=None, head_splits=None, out=None, stream=None, num_sms=None, engine='auto', \
                             dtype=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    fn allgather<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        rank_tokens: Given<'py>,
        layout: Given<'py>,
        num_heads: Given<'py>,
        query_heads: Given<'py>,
        head_splits: Given<'py>,
        out: Given<'py>,
        stream: Given<'py>,
        num_sms: Given<'py>,
        engine: Given<'py>,
        dtype: Given<'py>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options =
            [rank_tokens, layout, num_heads, query_heads, head_splits, out, stream, num_sms, engine, dtype];
        let given = Arguments { positional: args, keywords: kwargs };
        self.call(py, None, Asked::allgather(&given, options))
    }

    /// A place for results, known to all ranks, which all make it together.
    #[pyo3(signature = (*args, **kwargs))]
    #[pyo3(text_signature = "($self, shape, dtype, *, layout='BNHD')")]
    fn empty_output<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.output(py, &Arguments { positional: args, keywords: kwargs })
    }

    /// Says that work on `stream` reads `result`, which must not be overwritten before that work is done.
    fn record_stream(
        &self,
        py: Python<'_>,
        result: &Bound<'_, PyAny>,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.fork.check().or_raise(py)?;
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
    #[pyo3(signature = (reason=Given(None)), text_signature = "($self, reason='')")]
    fn abort<'py>(&self, py: Python<'py>, reason: Given<'py>) -> PyResult<()> {
        let given = reason.0.as_ref().map_or(Ok(""), |reason| options::text("reason", reason))?;
        let reason = if given.is_empty() { "abort() was called" } else { given };
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
    fn set_timeout(&self, py: Python<'_>, timeout: &Bound<'_, PyAny>) -> PyResult<()> {
        let timeout = Timeout::read("timeout", timeout)?.duration();
        py.detach(|| self.comm.set_timeout(timeout)).or_raise(py)
    }

    /// Counts so far; after close() those until then.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.fork.check().or_raise(py)?;
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
    fn _refuse(
        &self,
        py: Python<'_>,
        operation: &Bound<'_, PyAny>,
        reason: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (op, reason) = (operation_of(py, operation)?, options::text("reason", reason)?);
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

fn operation_of(py: Python<'_>, name: &Bound<'_, PyAny>) -> PyResult<ExchangeOp> {
    let name = options::text("operation", name)?;
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
