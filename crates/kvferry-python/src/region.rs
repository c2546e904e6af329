//! `kvferry.Region`: memory of a layout, out by every array protocol, never copied.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::Arc;

use kvferry::{Dtype, MemoryKind, RegionSpan};
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::export::{self, Device, Export};
use crate::memory::Memory;
use crate::users::Users;

/// A piece of a layout's memory. Keeps the layout alive; the buffer protocol, DLPack and the array interfaces read it
/// without copying.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct Region {
    layout: Arc<kvferry::PhysicalLayout>,
    users: Arc<Users>,
    span: RegionSpan,
    dtype: Dtype,
    // Buffers point to these two: they never change, and a buffer holds the region.
    shape: Box<[isize]>,
    /// In bytes.
    strides: Box<[isize]>,
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
        // No part of an address space is longer than isize::MAX.
        let sizes = |of: &[u64]| of.iter().map(|&size| size as isize).collect();
        Region {
            layout: layout.clone(),
            users: users.clone(),
            span,
            dtype,
            shape: sizes(shape),
            strides: sizes(strides),
        }
    }
}

#[pymethods]
impl Region {
    /// First address.
    #[getter]
    fn addr(&self) -> u64 {
        self.span.addr
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.span.len
    }

    /// Where the bytes lie.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::of(&self.layout)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.layout.memory_kind().is_host() {
            // AttributeError, so that protocol look-ups go on to the next one.
            return Err(PyAttributeError::new_err("device memory has no __array_interface__"));
        }
        self.interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !matches!(self.layout.memory_kind(), MemoryKind::Device(_)) {
            return Err(PyAttributeError::new_err("host memory has no __cuda_array_interface__"));
        }
        self.users.exported();
        self.interface(py)
    }

    /// DLPack device of the memory: (1, 0) for the CPU, (3, 0) for pinned memory, (2, ordinal) for a GPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(Device::of(self.layout.memory_kind())?.pair())
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
        if copy == Some(true) {
            return Err(PyBufferError::new_err("kvferry exports its own memory and never a copy"));
        }
        let device = Device::of(self.layout.memory_kind())?.viewed_as(dl_device)?;
        export::check_stream(device, stream)?;
        if self.layout.memory_kind() != MemoryKind::System {
            self.users.exported();
        }
        let export = Export::new(
            &self.layout,
            self.span.addr,
            device,
            self.dtype,
            &self.shape,
            &self.strides,
            self.read_only(),
        )?;
        if max_version.is_some_and(|(major, _)| major >= 1) {
            export.versioned(py)
        } else {
            export.legacy(py)
        }
    }

    // No __releasebuffer__: a view owns nothing but its reference to the region, which the interpreter drops.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let (filled, result) = match slf.get().buffer(flags) {
            Ok(buffer) => (ffi::Py_buffer { obj: slf.into_ptr(), ..buffer }, Ok(())),
            // A refused view has a null `obj`.
            Err(error) => (ffi::Py_buffer::new(), Err(error)),
        };
        // SAFETY: the interpreter passes a Py_buffer of its caller, aligned and not null (checked above), which is ours
        // to write until this slot returns, on this thread, with the GIL; it may be uninitialised and is not read. What
        // it points to belongs to the region and to the region's layout, which `obj` keeps alive until the view is
        // released, and nobody changes shape, strides or format.
        unsafe { view.write(filled) };
        result
    }

    fn __repr__(&self) -> String {
        let (RegionSpan { addr, len, .. }, kind) = (self.span, self.layout.memory_kind());
        format!("Region({len} bytes at {addr:#x} in {kind} memory)")
    }
}

impl Region {
    fn read_only(&self) -> bool {
        self.layout.read_only_region().is_some()
    }

    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("data", (self.span.addr, self.read_only()))?;
        dict.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        dict.set_item("typestr", typestr(self.dtype))?;
        dict.set_item("strides", PyTuple::new(py, &self.strides)?)?;
        Ok(dict)
    }

    /// The region as the buffer protocol has it, but for its owner.
    fn buffer(&self, flags: c_int) -> PyResult<ffi::Py_buffer> {
        let kind = self.layout.memory_kind();
        let refuse = |why: &str| Err(PyBufferError::new_err(why.to_owned()));
        let asked = |flag: c_int| flags & flag == flag;
        if !kind.is_host() {
            return refuse(&format!("{kind} memory has no buffer: the CPU cannot address it"));
        }
        let readonly = self.read_only();
        if readonly && asked(ffi::PyBUF_WRITABLE) {
            return refuse("the layout is read-only");
        }
        let item = self.dtype.bytes() as isize;
        let rows = contiguous(self.shape.iter().zip(&self.strides).rev(), item);
        let columns = contiguous(self.shape.iter().zip(&self.strides), item);
        if !rows && (!asked(ffi::PyBUF_STRIDES) || asked(ffi::PyBUF_C_CONTIGUOUS)) {
            return refuse("the region is not C-contiguous");
        }
        if !columns && asked(ffi::PyBUF_F_CONTIGUOUS) {
            return refuse("the region is not Fortran-contiguous");
        }
        if !rows && !columns && asked(ffi::PyBUF_ANY_CONTIGUOUS) {
            return refuse("the region is not contiguous");
        }
        let mut view = ffi::Py_buffer::new();
        view.buf = self.span.addr as *mut _;
        view.len = self.shape.iter().product::<isize>() * item;
        view.itemsize = item;
        view.readonly = c_int::from(readonly);
        view.ndim = self.shape.len() as c_int;
        let unless =
            |asked: bool, pointer: *const isize| if asked { pointer.cast_mut() } else { ptr::null_mut() };
        if !asked(ffi::PyBUF_ND) {
            // Who asks for no shape gets one dimension of bytes, as PyBuffer_FillInfo fills it. More dimensions without a
            // shape are legal for the protocol, but memoryview reads that null (`region.__buffer__(0)`, Python 3.12).
            (view.ndim, view.itemsize) = (1, 1);
            if asked(ffi::PyBUF_FORMAT) {
                view.format = c"B".as_ptr().cast_mut();
            }
            return Ok(view);
        }
        view.shape = self.shape.as_ptr().cast_mut();
        view.strides = unless(asked(ffi::PyBUF_STRIDES), self.strides.as_ptr());
        if asked(ffi::PyBUF_FORMAT) {
            view.format = format(self.dtype).as_ptr().cast_mut();
        }
        Ok(view)
    }
}

/// Whether axes, innermost first, are packed.
fn contiguous<'a>(axes: impl Iterator<Item = (&'a isize, &'a isize)>, item: isize) -> bool {
    let mut step = item;
    for (&extent, &stride) in axes {
        if extent > 1 && stride != step {
            return false;
        }
        step *= extent;
    }
    true
}

/// NumPy type string; widths without a NumPy type are shown as unsigned integers.
fn typestr(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float16 => "<f2",
        Dtype::Float32 => "<f4",
        Dtype::Float64 => "<f8",
        Dtype::Int8 => "|i1",
        Dtype::Int16 => "<i2",
        Dtype::Int32 => "<i4",
        Dtype::Int64 => "<i8",
        Dtype::BFloat16 => "<u2",
        _ => "|u1",
    }
}

/// `struct` format, native; types that have none are shown as unsigned integers.
fn format(dtype: Dtype) -> &'static CStr {
    match dtype {
        Dtype::Float16 => c"e",
        Dtype::Float32 => c"f",
        Dtype::Float64 => c"d",
        Dtype::Int8 => c"b",
        Dtype::Int16 => c"h",
        Dtype::Int32 => c"i",
        // A C long, as NumPy's int64 is on 64-bit Linux; "q" would be another type to it.
        Dtype::Int64 => c"l",
        Dtype::BFloat16 => c"H",
        _ => c"B",
    }
}
