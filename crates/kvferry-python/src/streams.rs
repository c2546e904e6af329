//! CUDA streams and events as Python shows them.

use kvferry::{Dependency, EventHandle, StreamHandle};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};

use crate::errors::{plain, shown};
use crate::numbers::whole;
use crate::transfer::Transfer;

/// A stream: its handle, or an object of torch (`cuda_stream`), CuPy (`ptr`) or anybody with `__cuda_stream__`.
/// `None` if `value` is none of these.
fn stream_of(name: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Option<StreamHandle>> {
    let py = value.py();
    let raw = if value.is_instance_of::<PyInt>() {
        if value.is_instance_of::<PyBool>() {
            return Ok(None);
        }
        value.clone()
    } else if let Some(raw) = value.getattr_opt(intern!(py, "cuda_stream"))? {
        raw
    } else if let Some(protocol) = value.getattr_opt(intern!(py, "__cuda_stream__"))? {
        // A method by the protocol, and a plain tuple in the version that some libraries have.
        let pair = if protocol.is_callable() { protocol.call0()? } else { protocol };
        let Ok((version, raw)) = pair.extract::<(i64, Bound<'_, PyAny>)>() else {
            let message =
                format!("{name}: __cuda_stream__ must give (version, handle), got {}", shown(&pair));
            return Err(plain(py, "OptionError", message));
        };
        if version != 0 {
            let message = format!("{name}: version {version} of __cuda_stream__ is not supported");
            return Err(plain(py, "Unsupported", message));
        }
        raw
    } else if let Some(raw) = value.getattr_opt(intern!(py, "ptr"))? {
        raw
    } else {
        return Ok(None);
    };
    let raw = whole("OptionError", name, &raw, usize::MAX as u64)?;
    // SAFETY: the caller says that this is the handle of a stream that exists, which is what the argument is for; the
    // object that owns it is an argument of the call and outlives it (routes keep theirs).
    Ok(Some(unsafe { StreamHandle::from_raw(raw) }))
}

/// The stream in an argument.
pub(crate) fn stream(name: &'static str, value: &Bound<'_, PyAny>) -> PyResult<StreamHandle> {
    match stream_of(name, value)? {
        Some(stream) => Ok(stream),
        None => {
            let message = format!(
                "{name} must be a CUDA stream: a handle, or an object of torch, CuPy or with __cuda_stream__, got {}",
                value.get_type().name()?
            );
            Err(plain(value.py(), "OptionError", message))
        }
    }
}

/// An event: an object of torch (`cuda_event`), CuPy (`ptr`) or cuda-python (`handle`).
fn event_of(value: &Bound<'_, PyAny>) -> PyResult<Option<EventHandle>> {
    let py = value.py();
    let raw = if let Some(raw) = value.getattr_opt(intern!(py, "cuda_event"))? {
        raw
    } else if value.get_type().name()?.to_string_lossy().contains("Event") {
        match value.getattr_opt(intern!(py, "ptr"))? {
            Some(raw) => raw,
            None => match value.getattr_opt(intern!(py, "handle"))? {
                // A number, or an object that is one.
                Some(raw) => raw.call_method0("__int__")?,
                None => return Ok(None),
            },
        }
    } else {
        return Ok(None);
    };
    let raw = whole("OptionError", "after", &raw, usize::MAX as u64)?;
    if raw == 0 {
        return Err(plain(py, "OptionError", "after: the event has not been recorded"));
    }
    // SAFETY: as for streams.
    Ok(Some(unsafe { EventHandle::from_raw(raw) }))
}

/// The GPU whose stream an object is: torch's `device_index`, CuPy's `device_id`. A handle says nothing.
pub(crate) fn device_of(value: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let py = value.py();
    for name in [intern!(py, "device_index"), intern!(py, "device_id")] {
        if let Some(ordinal) = value.getattr_opt(name)? {
            // CuPy says -1 where it does not know.
            return Ok(ordinal.extract::<i64>().ok().and_then(|ordinal| u32::try_from(ordinal).ok()));
        }
    }
    Ok(None)
}

fn dependency(value: &Bound<'_, PyAny>) -> PyResult<Dependency> {
    if let Ok(job) = value.cast::<Transfer>() {
        return Ok(Dependency::Job(job.get().job(value.py())?.clone()));
    }
    if let Some(event) = event_of(value)? {
        return Ok(Dependency::Event(event));
    }
    if let Some(stream) = stream_of("after", value)? {
        return Ok(match device_of(value)? {
            Some(ordinal) => Dependency::StreamOf { ordinal, stream },
            None => Dependency::Stream(stream),
        });
    }
    let message = format!(
        "after must be a Transfer, a CUDA stream or event, or a list of them, got {}",
        value.get_type().name()?
    );
    Err(plain(value.py(), "OptionError", message))
}

/// What a transfer runs after.
pub(crate) fn dependencies(after: &Bound<'_, PyAny>) -> PyResult<Vec<Dependency>> {
    if after.is_instance_of::<PyList>() || after.is_instance_of::<PyTuple>() {
        return after.try_iter()?.map(|item| dependency(&item?)).collect();
    }
    Ok(vec![dependency(after)?])
}
