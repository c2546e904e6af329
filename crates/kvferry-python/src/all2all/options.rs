//! Options of a call as Python gives them.

use std::ops::Range;

use kvferry::all2all::{ExchangeEngine, Output};
use kvferry::layout::{ExchangeError, ExchangeOp, HeadLayout, MAX_TENSORS};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyRange, PySequence, PyString, PyTuple};

use super::array::ExchangeArray;
use crate::context::span;
use crate::errors::{OrRaise, plain, shown};
use crate::numbers::{integer, whole};
use crate::words::words;

/// Counts are 63 bits wide.
const MOST: u64 = i64::MAX as u64;

/// The text in the argument `name`.
pub(crate) fn text<'a>(name: &str, value: &'a Bound<'_, PyAny>) -> PyResult<&'a str> {
    let Ok(text) = value.cast::<PyString>() else {
        let kind = value.get_type().name()?;
        return Err(PyTypeError::new_err(format!("{name} must be a string, got {kind}")));
    };
    match text.to_str() {
        Ok(text) => Ok(text),
        Err(_) => {
            let message = format!("{name} must be text that UTF-8 can hold, got {}", shown(value));
            Err(plain(value.py(), "OptionError", message))
        }
    }
}

/// Order of the axes.
pub(crate) fn layout(py: Python<'_>, given: Option<&Bound<'_, PyAny>>) -> PyResult<HeadLayout> {
    let Some(given) = given else { return Ok(HeadLayout::Bnhd) };
    text("layout", given)?.parse::<HeadLayout>().or_raise(py)
}

/// The operation that gathers along an axis.
pub(crate) fn axis(py: Python<'_>, given: &Bound<'_, PyAny>) -> PyResult<ExchangeOp> {
    match text("axis", given)? {
        "tokens" => Ok(ExchangeOp::AllGatherTokens),
        "heads" => Ok(ExchangeOp::AllGatherHeads),
        other => {
            Err(plain(py, "OptionError", format!("axis must be \"tokens\" or \"heads\", got {other:?}")))
        }
    }
}

pub(crate) fn engine(py: Python<'_>, given: Option<&Bound<'_, PyAny>>) -> PyResult<ExchangeEngine> {
    let Some(given) = given else { return Ok(ExchangeEngine::Auto) };
    match text("engine", given)? {
        "auto" => Ok(ExchangeEngine::Auto),
        "push" => Ok(ExchangeEngine::Push),
        "copy" => Ok(ExchangeEngine::Copy),
        other => {
            let message = format!("engine must be \"auto\", \"push\" or \"copy\", got {other:?}");
            Err(plain(py, "OptionError", message))
        }
    }
}

/// Most entries of any list here: more than there can be ranks, tensors or axes. A sequence may claim any length.
const LONGEST: usize = 4096;

/// The length of a list, which must be one that somebody could mean.
fn length(value: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    match value.len() {
        Ok(length) if length <= LONGEST => Ok(length),
        Err(error) if !error.is_instance_of::<PyOverflowError>(value.py()) => Err(error),
        _ => Err(plain(value.py(), "OptionError", format!("{name} has more than {LONGEST} entries"))),
    }
}

/// The integers of a list or tuple of nothing else; `None` leaves it to the thorough way.
fn plainly(value: &Bound<'_, PyAny>) -> Option<Vec<u64>> {
    let number =
        |item: Bound<'_, PyAny>| item.is_exact_instance_of::<PyInt>().then(|| item.extract().ok())?;
    if let Ok(list) = value.cast_exact::<PyList>() {
        return if list.len() <= LONGEST { list.iter().map(number).collect() } else { None };
    }
    let tuple = value.cast_exact::<PyTuple>().ok().filter(|tuple| tuple.len() <= LONGEST)?;
    tuple.iter().map(number).collect()
}

/// Numbers from 0 to 2^64 - 1, of a list of bounded length.
fn numbers(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    if let Some(found) = plainly(value) {
        return Ok(found);
    }
    if value.cast::<PySequence>().is_ok() {
        length(value, name)?;
    }
    words(value, name)
}

fn is_list(value: &Bound<'_, PyAny>) -> bool {
    value.cast::<PySequence>().is_ok() && !value.is_instance_of::<PyString>()
}

/// `rank_tokens`: a list of counts, or one such list per tensor.
pub(crate) fn rank_tokens(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u64>>> {
    if let Some(found) = plainly(value)
        && !found.is_empty()
    {
        return Ok(vec![found]);
    }
    let nested = (value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>())
        && value.len()? > 0
        && !value.get_item(0)?.is_instance_of::<PyInt>()
        && is_list(&value.get_item(0)?);
    if nested {
        length(value, "rank_tokens")?;
        return value.try_iter()?.map(|list| numbers(&list?, "rank_tokens")).collect();
    }
    Ok(vec![numbers(value, "rank_tokens")?])
}

/// `num_heads`: a number for every tensor, or one per tensor.
pub(crate) fn num_heads(value: &Bound<'_, PyAny>, tensors: usize) -> PyResult<Vec<u64>> {
    // A plain number first: whether something is a sequence takes a microsecond.
    if !value.is_instance_of::<PyInt>() && (is_list(value) || value.len().is_ok()) {
        return numbers(value, "num_heads");
    }
    Ok(vec![whole("OptionError", "num_heads", value, MOST)?; tensors])
}

pub(crate) fn query_heads(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("OptionError", "query_heads", value, MOST)
}

/// `head_splits`: for every rank a range, or a number of heads that follow those of the rank before; one such list for
/// every tensor, or one per tensor.
pub(crate) fn head_splits(value: &Bound<'_, PyAny>, tensors: usize) -> PyResult<Vec<Vec<Range<u64>>>> {
    let wrong = || {
        let message = "head_splits must be a list with a range or a number of heads per rank, or one such list per \
                       tensor";
        PyTypeError::new_err(message)
    };
    let of_rank = |item: &Bound<'_, PyAny>| -> PyResult<bool> {
        Ok(item.is_instance_of::<PyRange>() || item.is_instance_of::<PyInt>() || integer(item)?.is_some())
    };
    if !is_list(value) || length(value, "head_splits")? == 0 {
        return Err(wrong());
    }
    if of_rank(&value.get_item(0)?)? {
        return Ok(vec![splits(value)?; tensors]);
    }
    value
        .try_iter()?
        .map(|list| {
            let list = list?;
            if is_list(&list) { splits(&list) } else { Err(wrong()) }
        })
        .collect()
}

fn splits(list: &Bound<'_, PyAny>) -> PyResult<Vec<Range<u64>>> {
    length(list, "head_splits")?;
    let mut next = 0_u64;
    let mut found = Vec::new();
    for item in list.try_iter()? {
        let item = item?;
        let range = if item.is_instance_of::<PyRange>() {
            span("head_splits", &item)?
        } else {
            let count = whole("OptionError", "head_splits", &item, MOST)?;
            next..next.saturating_add(count)
        };
        next = range.end;
        found.push(range);
    }
    Ok(found)
}

/// `out`: what `empty_output` gave, whole.
pub(crate) fn output(value: &Bound<'_, PyAny>) -> PyResult<Output> {
    let wrong = |what: String| {
        let message = format!("out must be what empty_output() returned, got {what}");
        Err(plain(value.py(), "OptionError", message))
    };
    let several = value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>();
    let first = if several && value.len()? > 0 { value.get_item(0)? } else { value.clone() };
    let Ok(first) = first.cast_into::<ExchangeArray>() else {
        return wrong(value.get_type().name()?.to_string());
    };
    let Some((output, _)) = first.get().output.clone() else {
        return wrong("the result of a call".to_owned());
    };
    let count = if several { value.len()? } else { 1 };
    for index in 0..count {
        let item = if several { value.get_item(index)? } else { value.clone() };
        let place = item.cast::<ExchangeArray>().ok().and_then(|array| array.get().output.as_ref());
        if place.is_none_or(|(of, at)| of.id() != output.id() || *at != index) {
            return wrong("parts of different outputs, or in another order".to_owned());
        }
    }
    if output.results().or_raise(value.py())?.len() != count {
        return wrong("a part of it".to_owned());
    }
    Ok(output)
}

/// Batch, tokens, heads and dim; and whether dim is not shown.
pub(crate) type Shape = ([u64; 4], bool);

/// A shape of three or four axes in the order of `layout`, as batch, tokens, heads, dim; and whether it has three.
pub(crate) fn shape(value: &Bound<'_, PyAny>, layout: HeadLayout) -> PyResult<Shape> {
    let extents = numbers(value, "shape")?;
    let (a, b, c, d, flat) = match extents[..] {
        [a, b, c, d] => (a, b, c, d, false),
        [a, b, c] => (a, b, c, 1, true),
        _ => {
            let message = format!("shape must have three or four axes, got {}", extents.len());
            return Err(plain(value.py(), "OptionError", message));
        }
    };
    Ok(match layout {
        HeadLayout::Bnhd => ([a, b, c, d], flat),
        HeadLayout::Bhnd => ([a, c, b, d], flat),
    })
}

/// One shape, or a list of them; and whether it was one.
pub(crate) fn shapes(value: &Bound<'_, PyAny>, layout: HeadLayout) -> PyResult<(Vec<Shape>, bool)> {
    let several = (value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>())
        && value.len()? > 0
        && is_list(&value.get_item(0)?);
    if !several {
        return Ok((vec![shape(value, layout)?], true));
    }
    let (count, limit) = (value.len()?, MAX_TENSORS);
    if count > limit {
        return Err(ExchangeError::TensorCount { value: count, limit }).or_raise(value.py());
    }
    let found = value.try_iter()?.map(|each| shape(&each?, layout)).collect::<PyResult<_>>()?;
    Ok((found, false))
}

/// One dtype for all of `count`, or a list of them.
pub(crate) fn dtypes(value: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<kvferry::Dtype>> {
    if !(value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>()) {
        return Ok(vec![crate::config::dtype(value)?; count]);
    }
    let entries = value.len()?;
    if entries != count {
        let message = format!("dtype has {entries} entries for {count} shapes");
        return Err(plain(value.py(), "OptionError", message));
    }
    value.try_iter()?.map(|each| crate::config::dtype(&each?)).collect()
}
