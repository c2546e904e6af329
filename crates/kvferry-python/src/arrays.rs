//! Foreign arrays: buffer protocol, DLPack, `__cuda_array_interface__`. Read, never copied.

use std::sync::Arc;

use kvferry::cuda::{PointerKind, pointer_kind};
use kvferry::host::{HostRegion, Owner};
use kvferry::{Dtype, ForeignArray, MemoryKind, Region};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyMemoryView, PyTuple};

use crate::dlpack;
use crate::errors::plain;

/// Keeps a Python object alive from any thread; the last drop is left to the next call that holds the GIL.
struct PyOwner(#[expect(dead_code, reason = "held for its reference")] Py<PyAny>);

/// An array with its memory.
pub(crate) struct Foreign {
    pub(crate) array: ForeignArray,
    pub(crate) dtype: Dtype,
    pub(crate) memory: MemoryKind,
    pub(crate) region: Region,
}

/// The arrays of a `from_tensors` argument, in region order, and whether they came as (K, V) pairs.
pub(crate) fn collect(tensors: &Bound<'_, PyAny>, declared: Option<Dtype>) -> PyResult<(Vec<Foreign>, bool)> {
    let py = tensors.py();
    let mut named: Vec<(String, Bound<'_, PyAny>)> = Vec::new();
    if let Ok(dict) = tensors.cast::<PyDict>() {
        for (key, value) in dict.iter() {
            named.push((format!("tensors[{}]", key.repr()?), value));
        }
    } else if tensors.is_instance_of::<PyList>() || tensors.is_instance_of::<PyTuple>() {
        for (index, value) in tensors.try_iter()?.enumerate() {
            named.push((format!("tensors[{index}]"), value?));
        }
    } else {
        named.push(("tensors".to_owned(), tensors.clone()));
    }
    let is_pair = |value: &Bound<'_, PyAny>| value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
    let pairs = named.iter().filter(|(_, value)| is_pair(value)).count();
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
            return Err(plain(py, "LayoutError", format!("{name} must be a (K, V) pair, got {} items", value.len()?)));
        }
        for (index, which) in ["K", "V"].into_iter().enumerate() {
            out.push(read(&value.get_item(index)?, format!("{name} {which}"), declared)?);
        }
    }
    Ok((out, pairs != 0))
}

struct Raw {
    addr: u64,
    shape: Vec<u64>,
    strides: Vec<i64>,
    item_bytes: u64,
    dtype: Option<Dtype>,
    dtype_name: String,
    read_only: bool,
    keep: Py<PyAny>,
}

fn read(object: &Bound<'_, PyAny>, name: String, declared: Option<Dtype>) -> PyResult<Foreign> {
    let py = object.py();
    let raw = raw(object, &name)?;
    let dtype = match (raw.dtype, declared) {
        // A declared type relabels bytes of the same width: fp8 caches kept as uint8, bf16 as uint16.
        (_, Some(declared)) if declared.bytes() == raw.item_bytes => declared,
        (Some(found), None) => found,
        (_, Some(declared)) => {
            let message = format!(
                "{name}: elements of {} byte(s) ({}) cannot be {declared}, which has {}",
                raw.item_bytes, raw.dtype_name, declared.bytes()
            );
            return Err(plain(py, "LayoutError", message));
        }
        (None, None) => {
            let message = format!("{name}: element type {} has no kvferry dtype; declare one with dtype=", raw.dtype_name);
            return Err(plain(py, "LayoutError", message));
        }
    };
    if let Some(axis) = raw.shape.iter().position(|&extent| extent == 0) {
        return Err(plain(py, "LayoutError", format!("{name}: dimension {axis} is empty")));
    }
    if raw.shape.len() != raw.strides.len() {
        return Err(plain(py, "LayoutError", format!("{name}: {} extents but {} strides", raw.shape.len(), raw.strides.len())));
    }
    // Reach of the array: first byte to one past the last. Negative strides are refused by name later; here they only
    // must not widen the region, which starts at element 0.
    let reach = raw.shape.iter().zip(&raw.strides).try_fold(raw.item_bytes, |reach, (&extent, &stride)| {
        let step = u64::try_from(stride).unwrap_or(0);
        (extent - 1).checked_mul(step).and_then(|bytes| reach.checked_add(bytes)).filter(|&r| r <= i64::MAX as u64)
    });
    let Some(len) = reach else {
        return Err(plain(py, "LayoutError", format!("{name}: its extents and strides exceed the address space")));
    };
    let memory = memory_of(py, raw.addr)?;
    let owner: Owner = Arc::new(PyOwner(raw.keep));
    let region = match memory {
        MemoryKind::Device(ordinal) => Region::device(raw.addr, len, ordinal, owner),
        // SAFETY: the exporter promises `len` bytes from `addr` (extents and strides as it gave them) for as long as
        // its buffer, capsule or array is referenced, and `owner` holds that reference; writable unless it said
        // read-only. We hold no Rust reference to the bytes.
        _ => Region::Host(unsafe { HostRegion::from_raw(raw.addr, len, !raw.read_only, owner) }),
    };
    Ok(Foreign { array: ForeignArray { name, shape: raw.shape, strides: raw.strides }, dtype, memory, region })
}

/// The driver knows where an address lies; without a driver all memory is the system's.
fn memory_of(py: Python<'_>, addr: u64) -> PyResult<MemoryKind> {
    if kvferry::cuda::Driver::get().is_err() {
        return Ok(MemoryKind::System);
    }
    match pointer_kind(addr) {
        Ok(PointerKind::Device(ordinal)) => Ok(MemoryKind::Device(ordinal)),
        Ok(PointerKind::Pinned) => Ok(MemoryKind::Pinned),
        Ok(PointerKind::System) => Ok(MemoryKind::System),
        Ok(PointerKind::Managed) => Err(plain(py, "Unsupported", "managed memory is not supported")),
        Err(error) => Err(crate::errors::to_py(py, error.into())),
    }
}

fn raw(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Raw> {
    if let Ok(view) = PyMemoryView::from(object) {
        return buffer(&view, name);
    }
    if object.hasattr("__dlpack__")? {
        let t = dlpack::import(object, name)?;
        return Ok(Raw {
            addr: t.addr,
            shape: t.shape,
            strides: t.strides,
            item_bytes: t.item_bytes,
            dtype: t.dtype,
            dtype_name: t.dtype_name,
            read_only: t.read_only,
            keep: t.keep,
        });
    }
    if object.hasattr("__cuda_array_interface__")? {
        return cuda_array(object, name);
    }
    let kind = object.get_type().name()?;
    let message = format!("{name}: {kind} offers neither the buffer protocol, nor DLPack, nor __cuda_array_interface__");
    Err(pyo3::exceptions::PyTypeError::new_err(message))
}

fn buffer(view: &Bound<'_, PyMemoryView>, name: &str) -> PyResult<Raw> {
    let py = view.py();
    // The memoryview holds the export; the buffer below only reads its description.
    let buffer = PyUntypedBuffer::get(view)?;
    if buffer.suboffsets().is_some() {
        return Err(plain(py, "LayoutError", format!("{name}: indirect buffers are not supported")));
    }
    let format = buffer.format().to_string_lossy().into_owned();
    let item_bytes = buffer.item_size() as u64;
    Ok(Raw {
        addr: buffer.buf_ptr() as u64,
        shape: buffer.shape().iter().map(|&extent| extent as u64).collect(),
        strides: buffer.strides().iter().map(|&stride| stride as i64).collect(),
        item_bytes,
        dtype: typestr(format.trim_start_matches(['@', '=', '<']), item_bytes),
        dtype_name: format!("buffer format {format:?}"),
        read_only: buffer.readonly(),
        keep: view.clone().into_any().unbind(),
    })
}

/// `__cuda_array_interface__` version 3 (Numba's specification).
fn cuda_array(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Raw> {
    let py = object.py();
    let interface = object.getattr("__cuda_array_interface__")?;
    let (addr, read_only): (u64, bool) = interface.get_item("data")?.extract()?;
    let shape: Vec<u64> = interface.get_item("shape")?.extract()?;
    let kind: String = interface.get_item("typestr")?.extract()?;
    let item_bytes: u64 = kind.get(2..).and_then(|digits| digits.parse().ok()).unwrap_or(0);
    let strides = match interface.call_method1("get", ("strides",))?.extract::<Option<Vec<i64>>>()? {
        Some(strides) => strides,
        None => {
            let mut step = item_bytes as i64;
            let mut packed: Vec<i64> = Vec::with_capacity(shape.len());
            for &extent in shape.iter().rev() {
                packed.push(step);
                step = step.saturating_mul(extent as i64);
            }
            packed.reverse();
            packed
        }
    };
    if kind.starts_with('>') {
        return Err(plain(py, "LayoutError", format!("{name}: big-endian elements are not supported")));
    }
    let letter = match kind.get(1..2) {
        Some("f") => match item_bytes {
            2 => "e",
            4 => "f",
            _ => "d",
        },
        Some("i") => "i",
        Some("u") if item_bytes == 1 => "B",
        _ => "?",
    };
    Ok(Raw {
        addr,
        shape,
        strides,
        item_bytes,
        dtype: typestr(letter, item_bytes),
        dtype_name: format!("type string {kind:?}"),
        read_only,
        keep: object.clone().unbind(),
    })
}

/// A `struct` format character with its width.
fn typestr(format: &str, item_bytes: u64) -> Option<Dtype> {
    Some(match (format, item_bytes) {
        ("e", 2) => Dtype::Float16,
        ("f", 4) => Dtype::Float32,
        ("d", 8) => Dtype::Float64,
        ("B" | "c", 1) => Dtype::UInt8,
        ("b" | "h" | "i" | "l" | "q", 1) => Dtype::Int8,
        ("h" | "i" | "l" | "q", 2) => Dtype::Int16,
        ("i" | "l" | "q", 4) => Dtype::Int32,
        ("i" | "l" | "q", 8) => Dtype::Int64,
        _ => return None,
    })
}
