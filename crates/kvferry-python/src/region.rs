//! `kvferry.Region`: memory of a layout, out by every array protocol, never copied.

use std::ffi::c_int;
use std::sync::Arc;

use kvferry::{Dtype, MemoryKind, RegionSpan};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::export::Device;
use crate::memory::Memory;
use crate::users::Users;
use crate::view::{Asked, View};

/// A piece of a layout's memory. Keeps the layout alive; the buffer protocol, DLPack and the array interfaces read it
/// without copying.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Region {
    layout: Arc<kvferry::PhysicalLayout>,
    users: Arc<Users>,
    /// Bytes from the first to the last.
    nbytes: u64,
    view: View,
}

impl Region {
    /// `shape` and `strides` (in bytes) must stay inside `span`, and `span` inside a region of `layout`.
    pub(crate) fn new(
        layout: &Arc<kvferry::PhysicalLayout>,
        users: &Arc<Users>,
        span: RegionSpan,
        dtype: Dtype,
        shape: &[u64],
        strides: &[u64],
    ) -> Region {
        let view = View {
            addr: span.addr,
            memory: layout.memory_kind(),
            dtype,
            shape: View::sizes(shape),
            strides: View::sizes(strides),
            read_only: layout.read_only_region().is_some(),
        };
        Region { layout: layout.clone(), users: users.clone(), nbytes: span.len, view }
    }
}

#[pymethods]
impl Region {
    /// First address.
    #[getter]
    fn addr(&self) -> u64 {
        self.view.addr
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Where the bytes lie.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::of(&self.layout)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.view.array_interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = self.view.cuda_array_interface(py)?;
        self.users.exported();
        Ok(interface)
    }

    /// DLPack device of the memory: (1, 0) for the CPU, (3, 0) for pinned memory, (2, ordinal) for a GPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(Device::of(self.view.memory)?.pair())
    }

    /// A DLPack capsule over the memory with its true dtype; the layout lives until the consumer's deleter has run.
    ///
    /// stream: None for host memory. For a GPU it is accepted and nothing is waited for: transfers are ordered by their
    /// own handles, so wait for those that write here first.
    /// max_version: from (1, 0) on, a versioned capsule, which can be read-only; else a legacy one, which cannot.
    /// dl_device: the device of the memory, or (1, 0) for pinned memory, which the CPU can address.
    /// copy: True is a BufferError.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(i64, i64)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let capsule =
            self.view.dlpack(py, self.layout.clone(), &Asked { stream, max_version, dl_device, copy })?;
        if self.view.memory != MemoryKind::System {
            self.users.exported();
        }
        Ok(capsule)
    }

    // No __releasebuffer__: a view owns nothing but its reference to the region, which the interpreter drops.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let region = slf.clone();
        // SAFETY: the interpreter calls this with a view for `slf`, whose own `View` it is.
        unsafe { region.get().view.fill(slf.into_any(), view, flags) }
    }

    fn __repr__(&self) -> String {
        let View { addr, memory, .. } = self.view;
        format!("Region({} bytes at {addr:#x} in {memory} memory)", self.nbytes)
    }
}
