//! Foreign arrays: buffer protocol, DLPack, `__array_interface__`, `__cuda_array_interface__`. Read, never copied.

use std::sync::Arc;

use kvferry::cuda::{CudaError, DeviceRegion, PointerKind, pointer_kind};
use kvferry::host::{HostRegion, Owner};
use kvferry::{Dtype, ForeignArray, MemoryKind, Region};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyMapping, PyMemoryView, PyTuple, PyType};

use crate::dlpack;
use crate::errors::{plain, to_py};
use crate::interface::interface;
use crate::users::{Users, attribute, loaded};

/// Keeps a Python object alive from any thread; the last drop is left to the next call that holds the GIL.
pub(crate) struct PyOwner(#[expect(dead_code, reason = "held for its reference")] pub(crate) Py<PyAny>);

/// An array with its memory.
pub(crate) struct Foreign {
    pub(crate) array: ForeignArray,
    pub(crate) dtype: Dtype,
    pub(crate) memory: MemoryKind,
    pub(crate) region: Region,
    /// The library it comes from.
    pub(crate) users: Users,
}

/// The arrays of a `from_tensors` argument, in region order, and whether they came as (K, V) pairs. At least one, all of
/// one dtype, in one kind of memory, none given twice.
pub(crate) fn collect(tensors: &Bound<'_, PyAny>, declared: Option<Dtype>) -> PyResult<(Vec<Foreign>, bool)> {
    let py = tensors.py();
    let is_list =
        |value: &Bound<'_, PyAny>| value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
    let mut named: Vec<(String, Bound<'_, PyAny>)> = Vec::new();
    if is_list(tensors) {
        for (index, value) in tensors.try_iter()?.enumerate() {
            named.push((format!("tensors[{index}]"), value?));
        }
    } else if let Ok(mapping) = tensors.cast::<PyMapping>() {
        for item in mapping.items()? {
            let (key, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            named.push((format!("tensors[{}]", key.repr()?), value));
        }
    } else {
        named.push(("tensors".to_owned(), tensors.clone()));
    }
    let pairs = named.iter().filter(|(_, value)| is_list(value)).count();
    if pairs != 0 && pairs != named.len() {
        return Err(plain(py, "LayoutError", "tensors mixes arrays and (K, V) pairs"));
    }
    let mut out = Vec::new();
    for (name, value) in &named {
        if pairs == 0 {
            out.push(read(value, name.clone(), declared)?);
            continue;
        }
        if value.len()? != 2 {
            return Err(plain(
                py,
                "LayoutError",
                format!("{name} must be a (K, V) pair, got {} items", value.len()?),
            ));
        }
        for (index, which) in ["K", "V"].into_iter().enumerate() {
            out.push(read(&value.get_item(index)?, format!("{name} {which}"), declared)?);
        }
    }
    agree(py, &out)?;
    Ok((out, pairs != 0))
}

/// What all arrays of a layout have in common. Extents and strides are the layout's to compare.
fn agree(py: Python<'_>, arrays: &[Foreign]) -> PyResult<()> {
    let Some(first) = arrays.first() else {
        return Err(plain(py, "LayoutError", "tensors is empty"));
    };
    for other in arrays {
        let name = &other.array.name;
        if other.dtype != first.dtype {
            let message = format!("{name}: dtype is {}, expected {}", other.dtype, first.dtype);
            return Err(plain(py, "LayoutError", message));
        }
        if other.memory != first.memory {
            let message =
                format!("{name} lies in {} memory, {} in {}", other.memory, first.array.name, first.memory);
            return Err(plain(py, "LayoutError", message));
        }
    }
    Ok(())
}

/// An array as its producer describes it, strides in bytes.
pub(crate) struct Raw {
    pub(crate) addr: u64,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<i64>,
    /// 0 where an element is not a whole number of bytes.
    pub(crate) item_bytes: u64,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) dtype_name: String,
    /// Elements are integers or raw bytes, as which fp8 and bf16 caches are often kept: may be declared another type.
    pub(crate) relabel: bool,
    pub(crate) read_only: bool,
    /// The producer says that a GPU must read it.
    pub(crate) on_device: bool,
    pub(crate) keep: Py<PyAny>,
}

/// The element type: the array's own, or the declared one over raw bytes of the same width.
fn element(py: Python<'_>, name: &str, raw: &Raw, declared: Option<Dtype>) -> PyResult<Dtype> {
    let message = match (raw.dtype, declared) {
        (Some(found), None) => return Ok(found),
        (Some(found), Some(declared)) if found == declared => return Ok(declared),
        (_, Some(declared)) if raw.relabel && raw.item_bytes == declared.bytes() => return Ok(declared),
        (_, Some(declared)) if raw.relabel => format!(
            "{name}: elements of {} byte(s) ({}) cannot be {declared}, which has {}",
            raw.item_bytes,
            raw.dtype_name,
            declared.bytes()
        ),
        (Some(found), Some(declared)) => format!("{name}: dtype is {found}, expected {declared}"),
        (None, Some(declared)) => format!("{name}: elements ({}) cannot be {declared}", raw.dtype_name),
        (None, None) => {
            format!("{name}: element type ({}) has no kvferry dtype; declare one with dtype=", raw.dtype_name)
        }
    };
    Err(plain(py, "LayoutError", message))
}

fn read(object: &Bound<'_, PyAny>, name: String, declared: Option<Dtype>) -> PyResult<Foreign> {
    let py = object.py();
    let raw = raw(object, &name)?;
    let dtype = element(py, &name, &raw, declared)?;
    if raw.shape.len() != raw.strides.len() {
        let message = format!("{name}: {} extents but {} strides", raw.shape.len(), raw.strides.len());
        return Err(plain(py, "LayoutError", message));
    }
    if let Some(axis) = raw.shape.iter().position(|&extent| extent == 0) {
        return Err(plain(py, "LayoutError", format!("{name}: dimension {axis} is empty")));
    }
    if raw.addr == 0 {
        return Err(plain(py, "LayoutError", format!("{name}: its data pointer is null")));
    }
    // Reach of the array: first byte to one past the last. Negative strides are refused by name later; here they only
    // must not widen the region, which starts at element 0.
    let reach = raw.shape.iter().zip(&raw.strides).try_fold(raw.item_bytes, |reach, (&extent, &stride)| {
        let step = u64::try_from(stride).unwrap_or(0);
        (extent - 1)
            .checked_mul(step)
            .and_then(|bytes| reach.checked_add(bytes))
            .filter(|&r| r <= i64::MAX as u64)
    });
    let Some(len) = reach else {
        return Err(plain(
            py,
            "LayoutError",
            format!("{name}: its extents and strides exceed the address space"),
        ));
    };
    let memory = memory_of(py, &name, &raw)?;
    let owner: Owner = Arc::new(PyOwner(raw.keep));
    let region = match memory {
        MemoryKind::Device(ordinal) => {
            // SAFETY: as for host memory below, and the driver has just said that the address is this device's.
            let region = unsafe { DeviceRegion::from_raw(raw.addr, len, ordinal, owner) };
            Region::Device(if raw.read_only { region.read_only() } else { region })
        }
        // SAFETY: the exporter promises `len` bytes from `addr` (extents and strides as it gave them) for as long as
        // its buffer, capsule or array is referenced, and `owner` holds that reference; writable unless it said
        // read-only. We hold no Rust reference to the bytes.
        _ => Region::Host(unsafe { HostRegion::from_raw(raw.addr, len, !raw.read_only, owner) }),
    };
    Ok(Foreign {
        array: ForeignArray { name, shape: raw.shape, strides: raw.strides },
        dtype,
        memory,
        region,
        users: Users::of(object)?,
    })
}

/// The driver knows where an address lies; without a driver all memory is the system's, and what claims to be a GPU's
/// must not be touched.
pub(crate) fn memory_of(py: Python<'_>, name: &str, raw: &Raw) -> PyResult<MemoryKind> {
    let addr = raw.addr;
    // The first look loads the driver, which takes its time.
    let found = py.detach(|| match pointer_kind(addr) {
        Err(CudaError::DriverNotFound { .. }) if !raw.on_device => Ok(PointerKind::System),
        found => found,
    });
    match found {
        Ok(PointerKind::System) if raw.on_device => {
            let message = format!("{name}: the driver knows no device memory at {addr:#x}");
            Err(plain(py, "LayoutError", message))
        }
        Ok(PointerKind::Device(ordinal)) => Ok(MemoryKind::Device(ordinal)),
        Ok(PointerKind::Pinned) => Ok(MemoryKind::Pinned),
        Ok(PointerKind::System) => Ok(MemoryKind::System),
        Ok(PointerKind::Managed) => {
            Err(plain(py, "Unsupported", format!("{name}: managed memory is not supported")))
        }
        Err(error) => Err(to_py(py, error.into())),
    }
}

pub(crate) fn raw(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Raw> {
    let py = object.py();
    if object.is_exact_instance_of::<crate::region::Region>() {
        // Its buffer shows bfloat16 and fp8 as integers.
        return dlpack::import(object, name).map_err(|error| noted(py, error, name));
    }
    if is_masked(object)? {
        return Err(masked(py, name));
    }
    let unbuffered = match PyMemoryView::from(object) {
        Ok(view) => return buffer(&view, name),
        Err(error) => error,
    };
    if object.hasattr("__dlpack__")? {
        return match dlpack::import(object, name) {
            // NumPy neither buffers nor DLPacks the types it does not know (ml_dtypes' bfloat16 and fp8).
            Err(error)
                if error.is_instance_of::<PyBufferError>(py) && object.hasattr("__array_interface__")? =>
            {
                interface(object, name, "__array_interface__").map_err(|error| noted(py, error, name))
            }
            found => found.map_err(|error| noted(py, error, name)),
        };
    }
    for protocol in ["__cuda_array_interface__", "__array_interface__"] {
        if object.hasattr(protocol)? {
            return interface(object, name, protocol).map_err(|error| noted(py, error, name));
        }
    }
    if !unbuffered.is_instance_of::<PyTypeError>(py) {
        // It has a buffer, but not now: a released memoryview, for one.
        return Err(noted(py, unbuffered, name));
    }
    let kind = object.get_type().name()?;
    let message =
        format!("{name}: {kind} offers neither the buffer protocol, nor DLPack, nor an array interface");
    Err(PyTypeError::new_err(message))
}

/// A producer's own exception, told which of the arrays it is about.
fn noted(py: Python<'_>, error: PyErr, name: &str) -> PyErr {
    let note = format!("kvferry was reading {name}");
    match error.value(py).call_method1("add_note", (note,)) {
        Ok(_) => error,
        Err(other) => other,
    }
}

fn buffer(view: &Bound<'_, PyMemoryView>, name: &str) -> PyResult<Raw> {
    let py = view.py();
    if view.getattr("ndim")?.eq(0)? {
        return Err(plain(py, "LayoutError", format!("{name}: a scalar has no axes")));
    }
    // The memoryview holds the export; the buffer below only reads its description.
    let buffer = PyUntypedBuffer::get(view)?;
    if buffer.suboffsets().is_some() {
        return Err(plain(py, "LayoutError", format!("{name}: indirect buffers are not supported")));
    }
    let format = buffer.format().to_string_lossy().into_owned();
    let item_bytes = buffer.item_size() as u64;
    let letter = format.trim_start_matches(['@', '=', '<']);
    Ok(Raw {
        addr: buffer.buf_ptr() as u64,
        shape: buffer.shape().iter().map(|&extent| extent as u64).collect(),
        strides: buffer.strides().iter().map(|&stride| stride as i64).collect(),
        item_bytes,
        dtype: typed(letter, item_bytes),
        relabel: letter.len() == 1 && "bBhHiIlLqQnN?c".contains(letter),
        dtype_name: format!("buffer format {format:?}"),
        read_only: buffer.readonly(),
        on_device: false,
        keep: view.clone().into_any().unbind(),
    })
}

pub(crate) fn masked(py: Python<'_>, name: &str) -> PyErr {
    plain(py, "LayoutError", format!("{name}: masked arrays are not supported"))
}

/// `numpy.ndarray`, if somebody has imported NumPy.
pub(crate) fn ndarray<'py>(py: Python<'py>) -> PyResult<Option<&'py Bound<'py, PyType>>> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if ARRAY.get(py).is_none() {
        let Some(numpy) = loaded(py, "numpy")? else { return Ok(None) };
        let Some(array) = attribute(&numpy, "ndarray")? else { return Ok(None) };
        let array = array.cast_into::<PyType>()?.unbind();
        ARRAY.get_or_init(py, || array);
    }
    Ok(ARRAY.get(py).map(|array| array.bind(py)))
}

/// Whether `object` is an array of numpy.ma, whose buffer does not show its mask.
fn is_masked(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static MASKED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    // Most are plain, and numpy.ma is seldom loaded.
    if ndarray(py)?.is_none_or(|array| object.get_type().is(array)) {
        return Ok(false);
    }
    if MASKED.get(py).is_none() {
        let Some(module) = loaded(py, "numpy.ma")? else { return Ok(false) };
        let Some(class) = attribute(&module, "MaskedArray")? else { return Ok(false) };
        let class = class.cast_into::<PyType>()?.unbind();
        MASKED.get_or_init(py, || class);
    }
    MASKED.get(py).map_or(Ok(false), |class| object.is_instance(class.bind(py)))
}

/// Byte strides of a C-contiguous array.
pub(crate) fn packed(shape: &[u64], item_bytes: u64) -> Vec<i64> {
    let mut step = item_bytes;
    let mut strides: Vec<i64> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let stride = i64::try_from(step).unwrap_or(i64::MAX);
            step = step.saturating_mul(extent);
            stride
        })
        .collect();
    strides.reverse();
    strides
}

/// A `struct` format character with its width.
pub(crate) fn typed(format: &str, item_bytes: u64) -> Option<Dtype> {
    Some(match (format, item_bytes) {
        ("e", 2) => Dtype::Float16,
        ("f", 4) => Dtype::Float32,
        ("d", 8) => Dtype::Float64,
        ("B" | "c", 1) => Dtype::UInt8,
        ("b" | "i", 1) => Dtype::Int8,
        ("h" | "i" | "l" | "q", 2) => Dtype::Int16,
        ("i" | "l" | "q" | "n", 4) => Dtype::Int32,
        ("i" | "l" | "q" | "n", 8) => Dtype::Int64,
        _ => return None,
    })
}
