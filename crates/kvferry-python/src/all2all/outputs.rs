//! Results of a call, in the library of the arrays that went in.

use std::sync::Arc;

use kvferry::all2all::{ExchangeResult, ResultShape};
use kvferry::layout::HeadLayout;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use super::array::{self, Axes, ExchangeArray};
use super::held::Held;
use super::inputs::{Input, Inputs, Library};
use super::torch::torch;

/// One object if one array went in, else a tuple.
pub(crate) fn outputs<'py>(
    py: Python<'py>,
    inputs: &Inputs<'py>,
    layout: HeadLayout,
    results: Vec<ExchangeResult>,
    copies: Vec<Py<PyAny>>,
    mut held: impl FnMut(&Arc<Held>),
) -> PyResult<Bound<'py, PyAny>> {
    let mut objects = Vec::with_capacity(results.len());
    let mut copies = copies.into_iter();
    for (result, input) in results.into_iter().zip(&inputs.each) {
        if result.copied()
            && let Some(copy) = copies.next()
        {
            objects.push(copy.into_bound(py));
            continue;
        }
        let result = Held::new(result);
        held(&result);
        objects.push(output(py, input, layout, result)?);
    }
    match objects.pop() {
        Some(object) if inputs.single => Ok(object),
        last => {
            objects.extend(last);
            Ok(PyTuple::new(py, objects)?.into_any())
        }
    }
}

fn output<'py>(
    py: Python<'py>,
    input: &Input<'py>,
    layout: HeadLayout,
    held: Arc<Held>,
) -> PyResult<Bound<'py, PyAny>> {
    let axes = Axes { layout, flat: input.flat };
    if let Library::Torch(dtype) = input.library
        && let Some(torch) = torch(py)?
    {
        return torch.tensor(py, array::export(&held, axes, dtype)?);
    }
    let array = Bound::new(py, ExchangeArray::new(held, axes, None))?;
    match &input.library {
        Library::NumPy(dtype) => {
            static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let seen = ASARRAY.import(py, "numpy", "asarray")?.call1((array,))?;
            if seen.getattr(intern!(py, "dtype"))?.is(dtype) {
                return Ok(seen);
            }
            seen.call_method1(intern!(py, "view"), (dtype,))
        }
        _ => Ok(array.into_any()),
    }
}

/// Memory of the caller's library for a copy of each result, and the arrays over it.
pub(crate) fn room(
    py: Python<'_>,
    like: &[(Py<PyAny>, bool)],
    layout: HeadLayout,
    shapes: &[ResultShape],
) -> PyResult<Vec<(Py<PyAny>, kvferry::all2all::ExchangeArray)>> {
    let mut made = Vec::with_capacity(shapes.len());
    for (shape, (like, flat)) in shapes.iter().zip(like) {
        let [batch, tokens, heads, dim] = shape.shape;
        let (second, third) = match layout {
            HeadLayout::Bnhd => (tokens, heads),
            HeadLayout::Bhnd => (heads, tokens),
        };
        let mut extents = vec![batch, second, third];
        if !flat {
            extents.push(dim);
        }
        let tensor = like.bind(py).call_method1(intern!(py, "new_empty"), (PyTuple::new(py, extents)?,))?;
        let array = super::inputs::target(&tensor, layout, shape.dtype)?;
        made.push((tensor.unbind(), array));
    }
    Ok(made)
}
