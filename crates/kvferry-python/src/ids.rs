//! Block ids from Python: any integer buffer, or a sequence of integers.

use kvferry::BlockId;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView, PyRange, PySequence, PyString, PyTuple};

use crate::device_ids::device_ids;
use crate::errors::{block_id, plain};
use crate::numbers::integer;

/// Most ids that room is made for before any has been seen: a sequence may claim any length.
const MAX_RESERVED: usize = 1 << 16;

/// Which list an id came from and how many blocks that layout has, for errors.
#[derive(Clone, Copy)]
pub(crate) struct IdList {
    pub(crate) side: &'static str,
    pub(crate) limit: u64,
}

/// Whether an object has a buffer of its own, such as an array of NumPy's or the standard library's.
pub(crate) fn has_buffer(list: &Bound<'_, PyAny>) -> bool {
    // SAFETY: a borrowed reference to a live object, with the GIL; looks at its type only.
    (unsafe { pyo3::ffi::PyObject_CheckBuffer(list.as_ptr()) }) == 1
}

/// Reads ids in host memory. An id outside 32 bits is refused here; the rest of the range check is the planner's.
pub(crate) fn ids(list: &Bound<'_, PyAny>, what: IdList) -> PyResult<Vec<BlockId>> {
    let py = list.py();
    // Lists first: asking one for its buffer costs an exception.
    if list.is_instance_of::<PyList>() || list.is_instance_of::<PyTuple>() || list.is_instance_of::<PyRange>()
    {
        return from_sequence(list, what);
    }
    if let Ok(buffer) = PyUntypedBuffer::get(list) {
        return from_buffer(list, &buffer, what);
    }
    // A ctypes array leaves out its strides; a memoryview adds them.
    if let Ok(view) = PyMemoryView::from(list)
        && let Ok(buffer) = PyUntypedBuffer::get(&view)
    {
        return from_buffer(list, &buffer, what);
    }
    if device_ids(list, what.side)?.is_some() {
        let message = format!("{} block ids in device memory are not supported here", what.side);
        return Err(plain(py, "Unsupported", message));
    }
    // A CPU torch tensor has no buffer, but shares its memory with a NumPy array.
    if let Ok(numpy) = list.getattr("numpy")
        && let Ok(array) = numpy.call0()
        && let Ok(buffer) = PyUntypedBuffer::get(&array)
    {
        return from_buffer(&array, &buffer, what);
    }
    if let Ok(tolist) = list.getattr("tolist")
        && let Ok(items) = tolist.call0()?.cast::<PyList>()
    {
        return from_sequence(items, what);
    }
    // Not any iterable: a set has no order, and an iterator may have no end.
    if list.cast::<PySequence>().is_ok() && !list.is_instance_of::<PyString>() {
        return from_sequence(list, what);
    }
    let kind = list.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "{} block ids must be a list or an integer buffer, got {kind}",
        what.side
    )))
}

fn from_sequence(list: &Bound<'_, PyAny>, what: IdList) -> PyResult<Vec<BlockId>> {
    let py = list.py();
    // A hint only: a range may be longer than a length can say.
    let mut out = Vec::with_capacity(list.len().unwrap_or(0).min(MAX_RESERVED));
    for (index, item) in list.try_iter()?.enumerate() {
        let item = item?;
        // A list of bools is a mask by mistake.
        let Some(value) = integer(&item)? else {
            let kind = item.get_type().name()?;
            let message = format!("{} block ids must be integers, got {kind} at index {index}", what.side);
            return Err(PyTypeError::new_err(message));
        };
        match u32::try_from(value) {
            // The planner would find it too, after a range of 2^32 ids had been read.
            Ok(id) if u64::from(id) < what.limit => out.push(BlockId(id)),
            _ => return Err(out_of_range(py, index, value, what)),
        }
    }
    Ok(out)
}

fn from_buffer(list: &Bound<'_, PyAny>, buffer: &PyUntypedBuffer, what: IdList) -> PyResult<Vec<BlockId>> {
    let py = list.py();
    if buffer.dimensions() != 1 {
        let dims = buffer.dimensions();
        let message = format!("{} block ids must be one-dimensional, got {dims} dimensions", what.side);
        return Err(plain(py, "LayoutError", message));
    }
    if buffer.suboffsets().is_some() {
        return Err(plain(
            py,
            "LayoutError",
            format!("{} block ids in an indirect buffer are not supported", what.side),
        ));
    }
    let format = buffer.format().to_string_lossy();
    let swapped = format.starts_with(['>', '!']);
    // Not PyO3's `as_typed`: it takes big-endian elements for little-endian ones and refuses the reverse (0.30).
    let letter = format.trim_start_matches(['@', '=', '<', '>', '!']);
    match (letter, buffer.item_size()) {
        ("b" | "h" | "i" | "l" | "q" | "n" | "B" | "H" | "I" | "L" | "Q" | "N", _) if swapped => {
            match list.call_method0("tolist") {
                Ok(items) => from_sequence(&items, what),
                Err(_) => Err(not_integers(&format, what)),
            }
        }
        ("i" | "l" | "q" | "n", 8) => read::<i64>(py, buffer, what),
        ("i" | "l", 4) => read::<i32>(py, buffer, what),
        ("h", 2) => read::<i16>(py, buffer, what),
        ("b", 1) => read::<i8>(py, buffer, what),
        ("I" | "L" | "Q" | "N", 8) => read::<u64>(py, buffer, what),
        ("I" | "L", 4) => read::<u32>(py, buffer, what),
        ("H", 2) => read::<u16>(py, buffer, what),
        ("B", 1) => read::<u8>(py, buffer, what),
        _ => Err(not_integers(&format, what)),
    }
}

fn not_integers(format: &str, what: IdList) -> PyErr {
    PyTypeError::new_err(format!(
        "{} block ids must be integers, got a buffer of format {format:?}",
        what.side
    ))
}

/// Integers as ids. The high half tells in one pass without branches whether all of them fit.
trait Id: Copy + Into<i128> {
    fn high(self) -> u64;
    fn low(self) -> u32;
}

macro_rules! ids_of {
    ($($t:ty)*) => {$(
        impl Id for $t {
            #[inline]
            fn high(self) -> u64 {
                // Sign-extended, so that a negative number has a high half.
                (self as i64 as u64) >> 32
            }

            #[inline]
            fn low(self) -> u32 {
                self as u32
            }
        }
    )*};
}

ids_of!(i8 i16 i32 i64 u8 u16 u32 u64);

/// Reads a one-dimensional buffer whose elements are `T` by format and size.
fn read<T: Id>(py: Python<'_>, buffer: &PyUntypedBuffer, what: IdList) -> PyResult<Vec<BlockId>> {
    let (&[count], &[step]) = (buffer.shape(), buffer.strides()) else { return Ok(Vec::new()) };
    let base = buffer.buf_ptr().cast_const().cast::<T>();
    let at = |element: *const T| {
        // SAFETY: one of `count` elements of the exporter's, `step` bytes apart, exported while `buffer` is held; of
        // size `T`, any bit pattern of which is an integer; not aligned by promise, hence unaligned. The GIL is held and
        // no Python code runs. A writer without the GIL can only change which ids are read: each is used as read here.
        unsafe { element.read_unaligned() }
    };
    if step == size_of::<T>() as isize {
        narrow(py, count, |index| at(base.wrapping_add(index)), what)
    } else {
        narrow(py, count, |index| at(base.wrapping_byte_offset(index as isize * step)), what)
    }
}

fn narrow<T: Id>(
    py: Python<'_>,
    count: usize,
    at: impl Fn(usize) -> T,
    what: IdList,
) -> PyResult<Vec<BlockId>> {
    let mut high = 0;
    let take = |index| {
        let value = at(index);
        high |= value.high();
        BlockId(value.low())
    };
    let ids = (0..count).map(take).collect();
    if high == 0 {
        return Ok(ids);
    }
    match (0..count).map(|index| (index, at(index))).find(|(_, value)| value.high() != 0) {
        Some((index, value)) => Err(out_of_range(py, index, value.into(), what)),
        None => {
            Err(plain(py, "LayoutError", format!("{} block ids changed while they were read", what.side)))
        }
    }
}

#[cold]
fn out_of_range(py: Python<'_>, index: usize, value: i128, what: IdList) -> PyErr {
    let shown = i64::try_from(value).unwrap_or(if value < 0 { i64::MIN } else { i64::MAX });
    let message = format!(
        "{} block id {shown} at index {index} is out of range: the layout has {} blocks",
        what.side, what.limit
    );
    block_id(py, message, what.side, index, shown, what.limit)
}
