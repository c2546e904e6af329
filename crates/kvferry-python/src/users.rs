//! Which libraries work on a layout's memory, and on which streams now: what `stream=None` runs after.
//!
//! torch and CuPy are looked up among the loaded modules, never imported.

use std::sync::atomic::{AtomicU8, Ordering};

use kvferry::{Dependency, MemoryKind, StreamHandle};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

const TORCH: u8 = 1;
const CUPY: u8 = 2;

/// The libraries that use some memory.
#[derive(Debug, Default)]
pub(crate) struct Users(AtomicU8);

impl Users {
    /// Whoever made `object`: by the modules of its class and that class's bases.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Users> {
        let mut found = 0;
        for class in object.get_type().mro().iter() {
            let module = class.cast::<PyType>()?.module()?;
            let module = module.to_string_lossy();
            found |= match module.split('.').next() {
                Some("torch") => TORCH,
                Some("cupy") => CUPY,
                _ => 0,
            };
        }
        Ok(Users(AtomicU8::new(found)))
    }

    /// Who uses the other memory uses this one too.
    pub(crate) fn join(&self, other: &Users) {
        self.0.fetch_or(other.0.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The memory was handed out: to whom is not known.
    pub(crate) fn exported(&self) {
        self.0.fetch_or(TORCH | CUPY, Ordering::Relaxed);
    }

    /// Whether torch and whether CuPy are among them.
    pub(crate) fn torch_and_cupy(&self) -> (bool, bool) {
        (self.bits() & TORCH != 0, self.bits() & CUPY != 0)
    }

    fn bits(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a transfer without a stream of its caller's runs after: the current streams, on the GPUs that take part, of
/// every library that uses the memory of either side or the ids. Nothing for host memory, which is ready at the call.
pub(crate) fn current_streams<'a>(
    py: Python<'_>,
    users: impl Iterator<Item = &'a Users>,
    kinds: [MemoryKind; 2],
) -> PyResult<Vec<Dependency>> {
    let bits = users.fold(0, |bits, users| bits | users.bits());
    let mut streams = Vec::new();
    if bits == 0 {
        return Ok(streams);
    }
    let mut seen = None;
    for kind in kinds {
        let MemoryKind::Device(ordinal) = kind else { continue };
        if seen.replace(ordinal) == Some(ordinal) {
            continue;
        }
        let torch = if bits & TORCH == 0 { None } else { torch_stream(py, ordinal)? };
        let cupy = if bits & CUPY == 0 { None } else { cupy_stream(py, ordinal)? };
        let cupy = cupy.filter(|cupy| torch.is_none_or(|torch| torch.raw() != cupy.raw()));
        let of_gpu = |stream| Dependency::StreamOf { ordinal, stream };
        streams.extend(torch.into_iter().chain(cupy).map(of_gpu));
    }
    Ok(streams)
}

/// A module, if somebody has imported it.
pub(crate) fn loaded<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let modules = MODULES.get_or_try_init(py, || {
        PyResult::Ok(py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?.unbind())
    })?;
    modules.bind(py).get_item(name)
}

/// `None` where a module is still being imported and lacks the attribute.
pub(crate) fn attribute<'py>(of: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    match of.getattr(name) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_instance_of::<PyAttributeError>(of.py()) => Ok(None),
        Err(error) => Err(error),
    }
}

fn handle(stream: &Bound<'_, PyAny>, name: &str) -> PyResult<StreamHandle> {
    let raw = match stream.extract::<u64>() {
        Ok(raw) => raw,
        Err(_) => stream.getattr(name)?.extract()?,
    };
    // SAFETY: the library's current stream of this thread: it keeps it alive for as long as it is that, and the handle is
    // used within this call, which Python code of this thread cannot interrupt.
    Ok(unsafe { StreamHandle::from_raw(raw) })
}

/// torch's current stream in this thread; `None` if torch is not here or has not touched a GPU.
pub(crate) fn torch_stream(py: Python<'_>, ordinal: u32) -> PyResult<Option<StreamHandle>> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if CURRENT.get(py).is_none() {
        let Some(torch) = loaded(py, "torch")? else { return Ok(None) };
        let Some(cuda) = attribute(&torch, "cuda")? else { return Ok(None) };
        // Asking for a stream would start CUDA in torch, where it has nothing to be waited for.
        let Some(started) = attribute(&cuda, "is_initialized")? else { return Ok(None) };
        if !started.call0()?.is_truthy()? {
            return Ok(None);
        }
        // The raw handle costs a tenth of a Stream object.
        let raw = match attribute(&torch, "_C")? {
            Some(native) => attribute(&native, "_cuda_getCurrentRawStream")?,
            None => None,
        };
        let current = match raw {
            Some(raw) => raw,
            None => cuda.getattr("current_stream")?,
        };
        CURRENT.get_or_init(py, || current.unbind());
    }
    let Some(current) = CURRENT.get(py) else { return Ok(None) };
    handle(&current.bind(py).call1((ordinal,))?, "cuda_stream").map(Some)
}

/// CuPy's current stream in this thread; `None` if CuPy is not here.
pub(crate) fn cupy_stream(py: Python<'_>, ordinal: u32) -> PyResult<Option<StreamHandle>> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if CURRENT.get(py).is_none() {
        let Some(cupy) = loaded(py, "cupy")? else { return Ok(None) };
        let Some(cuda) = attribute(&cupy, "cuda")? else { return Ok(None) };
        let Some(current) = attribute(&cuda, "get_current_stream")? else { return Ok(None) };
        CURRENT.get_or_init(py, || current.unbind());
    }
    let Some(current) = CURRENT.get(py) else { return Ok(None) };
    let current = current.bind(py);
    let stream = match current.call1((ordinal,)) {
        // Before CuPy 11, of the current device only.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => current.call0(),
        found => found,
    }?;
    handle(&stream, "ptr").map(Some)
}
