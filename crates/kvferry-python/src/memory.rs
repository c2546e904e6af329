//! Where memory lies: `kf.system()`, `kf.pinned()`, `kf.device(0)`.

use kvferry::MemoryKind;
use pyo3::prelude::*;

use crate::numbers::whole;

/// A kind of memory. Made by `system()`, `pinned()` and `device(ordinal)`.
#[pyclass(frozen, eq, hash, module = "kvferry")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Memory(pub(crate) MemoryKind);

#[pymethods]
impl Memory {
    /// "system", "pinned" or "device".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            MemoryKind::System => "system",
            MemoryKind::Pinned => "pinned",
            MemoryKind::Device(_) => "device",
            _ => "other",
        }
    }

    /// GPU ordinal of device memory, else None.
    #[getter]
    fn ordinal(&self) -> Option<u32> {
        match self.0 {
            MemoryKind::Device(ordinal) => Some(ordinal),
            _ => None,
        }
    }

    fn __repr__(&self) -> String {
        match self.0 {
            MemoryKind::Device(ordinal) => format!("device({ordinal})"),
            other => format!("{other}()"),
        }
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }
}

/// Pageable host memory.
#[pyfunction]
pub(crate) fn system() -> Memory {
    Memory(MemoryKind::System)
}

/// Page-locked host memory that every GPU can address. Needs a CUDA driver.
#[pyfunction]
pub(crate) fn pinned() -> Memory {
    Memory(MemoryKind::Pinned)
}

/// Memory of the GPU with this ordinal.
#[pyfunction]
pub(crate) fn device(ordinal: &Bound<'_, PyAny>) -> PyResult<Memory> {
    // A GPU ordinal is a C int.
    let ordinal = whole("OptionError", "ordinal", ordinal, i32::MAX as u64)?;
    Ok(Memory(MemoryKind::Device(ordinal as u32)))
}
