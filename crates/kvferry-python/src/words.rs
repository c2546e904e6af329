//! Lists of 64-bit numbers from Python: addresses and sizes, in any integer buffer or sequence.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyString};

use crate::errors::plain;
use crate::ids::has_buffer;
use crate::numbers::integer;

/// Most entries that room is made for before any has been seen: a sequence may claim any length.
const MAX_RESERVED: usize = 1 << 16;

/// Reads a list of numbers from 0 to 2^64 - 1; `name` serves errors.
pub(crate) fn words(list: &Bound<'_, PyAny>, name: &str) -> PyResult<Vec<u64>> {
    // PyO3 refuses a buffer without axes (a NumPy scalar), which is no list either.
    if has_buffer(list)
        && let Ok(buffer) = PyUntypedBuffer::get(list)
        && let Some(found) = from_buffer(list.py(), &buffer, name)?
    {
        return Ok(found);
    }
    // A CPU torch tensor has no buffer, but shares its memory with a NumPy array.
    if let Some(numpy) = list.getattr_opt("numpy")? {
        let array = numpy.call0()?;
        if has_buffer(&array) {
            return words(&array, name);
        }
    }
    if list.cast::<PySequence>().is_err() || list.is_instance_of::<PyString>() {
        let kind = list.get_type().name()?;
        return Err(PyTypeError::new_err(format!("{name} must be a list or an integer buffer, got {kind}")));
    }
    let mut out = Vec::with_capacity(list.len().unwrap_or(0).min(MAX_RESERVED));
    for (index, item) in list.try_iter()?.enumerate() {
        let item = item?;
        let Some(value) = integer(&item)? else {
            let kind = item.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "{name} must hold integers, got {kind} at index {index}"
            )));
        };
        match u64::try_from(value) {
            Ok(word) => out.push(word),
            Err(_) => return Err(out_of_range(list.py(), name, index, value)),
        }
    }
    Ok(out)
}

/// A one-dimensional buffer of native integers; `None` for one that has to be read item by item.
fn from_buffer(py: Python<'_>, buffer: &PyUntypedBuffer, name: &str) -> PyResult<Option<Vec<u64>>> {
    if buffer.dimensions() != 1 || buffer.suboffsets().is_some() {
        let dims = buffer.dimensions();
        let message = format!("{name} must be a plain list of one dimension, got {dims}");
        return Err(plain(py, "LayoutError", message));
    }
    let format = buffer.format().to_string_lossy();
    match (format.trim_start_matches(['@', '=', '<']), buffer.item_size()) {
        ("i" | "l" | "q" | "n", 8) => read::<i64>(py, buffer, name).map(Some),
        ("I" | "L" | "Q" | "N", 8) => read::<u64>(py, buffer, name).map(Some),
        ("i" | "l", 4) => read::<i32>(py, buffer, name).map(Some),
        ("I" | "L", 4) => read::<u32>(py, buffer, name).map(Some),
        _ => Ok(None),
    }
}

fn read<T: Copy + Into<i128>>(py: Python<'_>, buffer: &PyUntypedBuffer, name: &str) -> PyResult<Vec<u64>> {
    let (&[count], &[step]) = (buffer.shape(), buffer.strides()) else { return Ok(Vec::new()) };
    let base = buffer.buf_ptr().cast_const().cast::<T>();
    let mut out = Vec::with_capacity(count);
    for index in 0..count {
        let element = base.wrapping_byte_offset(index as isize * step);
        // SAFETY: one of `count` elements of the exporter's, `step` bytes apart, exported while `buffer` is held; of the
        // size of `T`, an integer type by the buffer's format, any bit pattern of which is valid; not aligned by promise.
        // The GIL is held and no Python code runs in between.
        let value: i128 = unsafe { element.read_unaligned() }.into();
        match u64::try_from(value) {
            Ok(word) => out.push(word),
            Err(_) => return Err(out_of_range(py, name, index, value)),
        }
    }
    Ok(out)
}

#[cold]
fn out_of_range(py: Python<'_>, name: &str, index: usize, value: i128) -> PyErr {
    let message = format!("{name} must hold numbers from 0 to 2**64 - 1, got {value} at index {index}");
    plain(py, "OptionError", message)
}
