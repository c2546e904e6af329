//! Block ids from Python: any integer buffer, or a sequence of integers.

use kvferry::BlockId;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::errors::{block_id, plain};

/// Which list an id came from, for errors.
#[derive(Clone, Copy)]
pub(crate) struct IdList {
    pub(crate) side: &'static str,
    pub(crate) limit: u64,
}

/// Reads ids. An id outside 32 bits is refused here; the rest of the range check is the planner's.
pub(crate) fn ids(py: Python<'_>, list: &Bound<'_, PyAny>, what: IdList) -> PyResult<Vec<BlockId>> {
    if let Ok(buffer) = PyUntypedBuffer::get(list) {
        if buffer.dimensions() != 1 {
            let dims = buffer.dimensions();
            return Err(plain(py, "LayoutError", format!("{} block ids must be one-dimensional, got {dims} dimensions", what.side)));
        }
        if let Some(found) = typed::<i64>(py, &buffer, what)
            .or_else(|| typed::<i32>(py, &buffer, what))
            .or_else(|| typed::<u32>(py, &buffer, what))
            .or_else(|| typed::<u64>(py, &buffer, what))
            .or_else(|| typed::<i16>(py, &buffer, what))
            .or_else(|| typed::<u16>(py, &buffer, what))
            .or_else(|| typed::<i8>(py, &buffer, what))
            .or_else(|| typed::<u8>(py, &buffer, what))
        {
            return found;
        }
        let format = buffer.format().to_string_lossy().into_owned();
        return Err(plain(py, "LayoutError", format!("{} block ids must be integers, got a buffer of format {format:?}", what.side)));
    }
    if let Ok(tolist) = list.getattr("tolist") {
        // An array without the buffer protocol, such as a CPU torch tensor.
        return from_sequence(py, &tolist.call0()?, what);
    }
    from_sequence(py, list, what)
}

fn from_sequence(py: Python<'_>, list: &Bound<'_, PyAny>, what: IdList) -> PyResult<Vec<BlockId>> {
    let mut out = Vec::with_capacity(list.len().unwrap_or(0));
    for (index, item) in list.try_iter()?.enumerate() {
        let item = item?;
        match item.extract::<i128>() {
            Ok(value) => out.push(checked(py, index, value, what)?),
            Err(error) => return Err(error),
        }
    }
    Ok(out)
}

fn typed<T>(py: Python<'_>, buffer: &PyUntypedBuffer, what: IdList) -> Option<PyResult<Vec<BlockId>>>
where
    T: Element + Copy + Into<i128>,
{
    let buffer: &PyBuffer<T> = buffer.as_typed::<T>().ok()?;
    Some(buffer.to_vec(py).and_then(|values| {
        values.into_iter().enumerate().map(|(index, value)| checked(py, index, value.into(), what)).collect()
    }))
}

#[inline]
fn checked(py: Python<'_>, index: usize, value: i128, what: IdList) -> PyResult<BlockId> {
    match u32::try_from(value) {
        Ok(id) => Ok(BlockId(id)),
        Err(_) => {
            let shown = i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX });
            let message = format!(
                "{} block id {value} at index {index} is out of range: the layout has {} blocks",
                what.side, what.limit
            );
            Err(block_id(py, message, what.side, index, shown, what.limit))
        }
    }
}
