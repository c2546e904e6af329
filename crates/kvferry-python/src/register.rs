//! `kvferry.register_host`: host memory that somebody else allocated, made reachable for GPUs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry::cuda;
use kvferry::host::HostRegion;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{PyOwner, packed, raw};
use crate::errors::{OrRaise, plain};
use crate::numbers::whole;

/// Host memory that is registered with CUDA until close().
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct HostRegistration {
    held: Mutex<Option<cuda::HostRegistration>>,
    addr: u64,
    nbytes: u64,
}

impl HostRegistration {
    fn held(&self) -> MutexGuard<'_, Option<cuda::HostRegistration>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl HostRegistration {
    /// First address.
    #[getter]
    fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Whether close() has been called.
    #[getter]
    fn closed(&self) -> bool {
        self.held().is_none()
    }

    /// Gives the registration up. Jobs in flight keep theirs. Closing twice is fine.
    fn close(&self) {
        drop(self.held().take());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, _exc: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("HostRegistration({} bytes at {:#x}, {state})", self.nbytes, self.addr)
    }
}

/// Registers an array's host memory with CUDA, for every GPU. Slow: it pins every page.
#[pyfunction]
#[pyo3(signature = (array, *, device=None))]
pub(crate) fn register_host(
    array: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
) -> PyResult<HostRegistration> {
    let py = array.py();
    let device = device.map(|value| whole("OptionError", "device", value, i32::MAX as u64)).transpose()?;
    let found = raw(array, "array")?;
    if found.on_device {
        return Err(plain(py, "Unsupported", "array: a GPU's memory needs no registration, and has none"));
    }
    let bytes = found.shape.iter().try_fold(found.item_bytes, |bytes, &extent| bytes.checked_mul(extent));
    let Some(bytes) = bytes.filter(|&bytes| bytes > 0 && found.addr != 0) else {
        return Err(plain(py, "LayoutError", "array: it has no bytes to register"));
    };
    let steps = packed(&found.shape, found.item_bytes);
    let loose = |(index, &extent): (usize, &u64)| extent > 1 && found.strides.get(index) != steps.get(index);
    if found.shape.iter().enumerate().any(loose) {
        return Err(plain(py, "LayoutError", "array: only contiguous memory can be registered"));
    }
    let (addr, writable) = (found.addr, !found.read_only);
    let owner = Arc::new(PyOwner(found.keep));
    // SAFETY: the exporter promises `bytes` contiguous bytes from `addr` for as long as its buffer or capsule is
    // referenced, and `owner` holds that reference. We hold no Rust reference to the bytes.
    let region = unsafe { HostRegion::from_raw(addr, bytes, writable, owner) };
    let held = py.detach(|| {
        let ordinal = match device {
            Some(ordinal) => ordinal as u32,
            None => cuda::current_device()?.unwrap_or(0),
        };
        cuda::register_host(&region, ordinal)
    });
    let held = held.or_raise(py)?;
    Ok(HostRegistration { held: Mutex::new(Some(held)), addr, nbytes: bytes })
}
