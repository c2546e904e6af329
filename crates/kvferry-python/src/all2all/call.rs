//! One call, from Python's arguments to Python's results.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvferry::all2all::{CallOptions, ExchangeResult, Landing};
use kvferry::layout::ExchangeOp;
use kvferry::{Region, StreamHandle};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::All2All;
use super::arguments::{Arguments, Given};
use super::array::{ExchangeArray, addr};
use super::held::Held;
use super::inputs::{Input, Inputs, Library};
use super::options;
use super::outputs::{outputs, room};
use super::torch;
use crate::arrays::raw;
use crate::errors::to_py;
use crate::numbers::whole;
use crate::streams;
use crate::users::{cupy_stream, torch_stream};

/// A call as it was asked for; nothing of it has been looked at.
pub(crate) struct Asked<'py> {
    tensors: Option<Bound<'py, PyAny>>,
    /// Of allgather.
    axis: Option<Bound<'py, PyAny>>,
    options: CallKeywords<'py>,
    /// What Python says against the arguments.
    bound: PyResult<()>,
}

/// `rank_tokens`, `layout`, `num_heads`, `query_heads`, `head_splits`, `out`, `stream`, `num_sms`, `engine`, `dtype`.
pub(crate) type CallKeywords<'py> = [Given<'py>; 10];

impl<'py> Asked<'py> {
    pub(crate) fn new(op: ExchangeOp, given: &Arguments<'_, 'py>, options: CallKeywords<'py>) -> Asked<'py> {
        let ([tensors], [], bound) = given.bind(op.name(), ["tensors"], 1, []);
        Asked { tensors, axis: None, options, bound }
    }

    pub(crate) fn allgather(given: &Arguments<'_, 'py>, options: CallKeywords<'py>) -> Asked<'py> {
        let ([tensors, axis], [], bound) = given.bind("allgather", ["tensors", "axis"], 1, []);
        Asked { tensors, axis, options, bound }
    }

    /// The operation that allgather is along its axis.
    pub(crate) fn along(&self, py: Python<'_>) -> PyResult<ExchangeOp> {
        self.axis.as_ref().map_or(Ok(ExchangeOp::AllGatherTokens), |axis| options::axis(py, axis))
    }
}

/// What was asked for and can be.
struct Prepared<'py> {
    op: ExchangeOp,
    inputs: Inputs<'py>,
    options: CallOptions,
}

/// Results that somebody holds, to be found by the address of what Python shows of them. GPU memory only: for host memory
/// nothing has to be found.
#[derive(Default)]
pub(crate) struct Live(Mutex<Vec<Weak<Held>>>);

impl Live {
    pub(crate) fn add(&self, held: &Arc<Held>) {
        if held.result().region().kind().is_host() {
            return;
        }
        let mut live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // As many as there are results in the buffers of the pool, so few.
        live.retain(|held| held.strong_count() > 0);
        live.push(Arc::downgrade(held));
    }

    /// The result that `object` is, or lies in.
    pub(crate) fn find(&self, py: Python<'_>, object: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Held>>> {
        if let Ok(array) = object.cast::<ExchangeArray>() {
            return Ok(Some(array.get().held.clone()));
        }
        let at = match torch::torch(py)? {
            Some(torch) if torch.is_tensor(object)? => object.call_method0("data_ptr")?.extract()?,
            _ => raw(object, "result")?.addr,
        };
        let live = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lies_in = |held: &Arc<Held>| {
            let result = held.result();
            let bytes = result.shape().iter().product::<u64>() * result.dtype().bytes();
            (addr(result)..addr(result) + bytes.max(1)).contains(&at)
        };
        Ok(live.iter().filter_map(Weak::upgrade).find(lies_in))
    }
}

impl All2All {
    /// Publishes that this rank's call will not be, so that the others do not wait for it; gives the error back.
    pub(crate) fn refused(
        &self,
        py: Python<'_>,
        op: ExchangeOp,
        stream: Option<StreamHandle>,
        error: PyErr,
    ) -> PyErr {
        let reason = error.value(py).to_string();
        let options = CallOptions { stream: self.refusal_stream(stream), ..CallOptions::default() };
        match py.detach(|| self.comm.refuse(op, &reason, &options)) {
            Ok(()) => error,
            // Closed, or forked: nothing that was said of the arguments matters then.
            Err(other) => to_py(py, other),
        }
    }

    /// Where the refused call would have run: in a capture nothing is published.
    pub(crate) fn refusal_stream(&self, stream: Option<StreamHandle>) -> Option<StreamHandle> {
        stream.or_else(|| torch::current_stream(self.ordinal()?))
    }

    /// `op`: of a call that is not an allgather.
    pub(crate) fn call<'py>(
        &self,
        py: Python<'py>,
        op: Option<ExchangeOp>,
        asked: Asked<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut stream = None;
        let Prepared { op, inputs, options } = match self.prepare(py, op, asked, &mut stream) {
            Ok(prepared) => prepared,
            Err(error) => {
                let op = op.unwrap_or(ExchangeOp::AllGatherTokens);
                return Err(self.refused(py, op, stream, error));
            }
        };
        let arrays = inputs.arrays();
        let (done, copies) = self.run(py, op, &inputs, &arrays, &options);
        // Inputs may be Python's: they are let go of with the interpreter lock.
        drop(arrays);
        let results = done.map_err(|error| copies.error.unwrap_or_else(|| to_py(py, error)))?;
        outputs(py, &inputs, options.layout, results, copies.made, |held| self.live.add(held))
    }

    /// Whatever is raised here is published by the caller, on the stream if that has been found.
    fn prepare<'py>(
        &self,
        py: Python<'py>,
        op: Option<ExchangeOp>,
        asked: Asked<'py>,
        stream: &mut Option<StreamHandle>,
    ) -> PyResult<Prepared<'py>> {
        let axis = asked.along(py);
        let [rank_tokens, layout, num_heads, query_heads, head_splits, out, on, num_sms, engine, dtype] =
            asked.options.map(|given| given.0);
        // None is as good as nothing, but for words.
        let some = |given: Option<Bound<'py, PyAny>>| given.filter(|value| !value.is_none());
        if let Some(given) = some(on) {
            *stream = Some(streams::stream("stream", &given)?);
        }
        asked.bound?;
        let op = op.map_or(axis, Ok)?;
        let Some(tensors) = asked.tensors else { return Err(PyTypeError::new_err("tensors must be given")) };
        let layout = options::layout(py, layout.as_ref())?;
        let declared = some(dtype).map(|given| crate::config::dtype(&given)).transpose()?;
        let mut inputs = Inputs::read(&tensors, layout, declared, self.home())?;
        let count = inputs.each.len();
        let sms = |given: Bound<'_, PyAny>| whole("OptionError", "num_sms", &given, u32::MAX.into());
        let mut options = CallOptions {
            layout,
            rank_tokens: some(rank_tokens).map(|given| options::rank_tokens(&given)).transpose()?,
            num_heads: some(num_heads).map(|given| options::num_heads(&given, count)).transpose()?,
            query_heads: some(query_heads).map(|given| options::query_heads(&given)).transpose()?,
            head_splits: some(head_splits).map(|given| options::head_splits(&given, count)).transpose()?,
            out: some(out).map(|given| options::output(&given)).transpose()?,
            stream: *stream,
            num_sms: some(num_sms).map(sms).transpose()?.map(|count| count as u32),
            engine: options::engine(py, engine.as_ref())?,
            kinds: if declared.is_none() { inputs.kinds() } else { 0 },
        };
        if options.stream.is_none()
            && let Some(ordinal) = self.ordinal()
        {
            options.stream = current(py, &inputs, ordinal)?;
            if options.stream.is_some() && options.stream == torch::current_stream(ordinal) {
                inputs.each.iter_mut().for_each(in_stream_order);
            }
        }
        *stream = options.stream;
        Ok(Prepared { op, inputs, options })
    }

    fn run(
        &self,
        py: Python<'_>,
        op: ExchangeOp,
        inputs: &Inputs<'_>,
        arrays: &[kvferry::all2all::ExchangeArray],
        options: &CallOptions,
    ) -> (kvferry::Result<Vec<ExchangeResult>>, Copies) {
        let mut copies = Copies::default();
        let torch = |library: &Library<'_>| matches!(library, Library::Torch(_));
        if options.out.is_some() || !inputs.each.iter().all(|input| torch(&input.library)) {
            return (py.detach(|| self.comm.exchange(op, arrays, options, Landing::Pool)), copies);
        }
        let like: Vec<_> =
            inputs.each.iter().map(|input| (input.object.clone().unbind(), input.flat)).collect();
        let done = py.detach(|| {
            let mut target = |shapes: &[kvferry::all2all::ResultShape]| {
                Python::attach(|py| match room(py, &like, options.layout, shapes) {
                    Ok(made) => {
                        let (objects, arrays): (Vec<_>, Vec<_>) = made.into_iter().unzip();
                        copies.made = objects;
                        Ok(arrays)
                    }
                    Err(error) => {
                        let why = error.value(py).to_string();
                        copies.error = Some(error);
                        Err(kvferry::Error::Unsupported { what: "a copy of the result".to_owned(), why })
                    }
                })
            };
            self.comm.exchange(op, arrays, options, Landing::PoolOrCopy(&mut target))
        });
        (done, copies)
    }
}

/// Memory of the caller's library that results were copied to, or why there was none.
#[derive(Default)]
struct Copies {
    made: Vec<Py<PyAny>>,
    error: Option<PyErr>,
}

/// Lets torch have a tensor's memory back as soon as the caller lets go of it, as torch's own operations on its current
/// stream do.
fn in_stream_order(input: &mut Input<'_>) {
    if matches!(input.library, Library::Torch(_))
        && let Region::Device(region) = &input.array.region
    {
        // SAFETY: the call runs on torch's current stream, and torch's allocator gives memory back in the order of the
        // stream that a tensor is used on (Tensor.record_stream is the caller's to say otherwise, as with torch itself).
        let region = unsafe { region.clone().in_stream_order() };
        input.array.region = Region::Device(region);
    }
}

/// The current stream, on the communicator's GPU, of the library that the arrays belong to.
fn current(py: Python<'_>, inputs: &Inputs<'_>, ordinal: u32) -> PyResult<Option<StreamHandle>> {
    let of_torch = inputs.each.iter().any(|input| matches!(input.library, Library::Torch(_)));
    if of_torch && let Some(stream) = torch::current_stream(ordinal) {
        return Ok(Some(stream));
    }
    let mut found = None;
    for input in &inputs.each {
        let (torch, cupy) = input.users()?;
        if torch {
            found = torch_stream(py, ordinal)?;
        }
        if found.is_none() && cupy {
            found = cupy_stream(py, ordinal)?;
        }
        if found.is_some() {
            break;
        }
    }
    Ok(found)
}
