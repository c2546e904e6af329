//! Arrays in memory of ours as the array protocols show them: for regions of layouts and for results of exchanges.

use std::ffi::{CStr, c_int};
use std::ptr;

use kvferry::host::Owner;
use kvferry::{Dtype, MemoryKind};
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use crate::export::{self, Device, Export};

/// Where an array lies and what shape it has. Never changes once made: buffers point into it.
pub(crate) struct View {
    pub(crate) addr: u64,
    pub(crate) memory: MemoryKind,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Box<[isize]>,
    /// In bytes.
    pub(crate) strides: Box<[isize]>,
    pub(crate) read_only: bool,
}

/// What a DLPack consumer asks for.
pub(crate) struct Asked<'a, 'py> {
    pub(crate) stream: Option<&'a Bound<'py, PyAny>>,
    pub(crate) max_version: Option<(i64, i64)>,
    pub(crate) dl_device: Option<(i32, i32)>,
    pub(crate) copy: Option<bool>,
}

impl View {
    /// Sizes as the protocols have them: no part of an address space is longer than isize::MAX.
    pub(crate) fn sizes(of: &[u64]) -> Box<[isize]> {
        of.iter().map(|&size| size as isize).collect()
    }

    /// `__array_interface__`, or AttributeError, so that protocol look-ups go on to the next one.
    pub(crate) fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !self.memory.is_host() {
            return Err(PyAttributeError::new_err("device memory has no __array_interface__"));
        }
        self.interface(py)
    }

    /// `__cuda_array_interface__`, or AttributeError.
    pub(crate) fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if !matches!(self.memory, MemoryKind::Device(_)) {
            return Err(PyAttributeError::new_err("host memory has no __cuda_array_interface__"));
        }
        self.interface(py)
    }

    /// `__dlpack__`.
    pub(crate) fn dlpack<'py>(
        &self,
        py: Python<'py>,
        owner: Owner,
        asked: &Asked<'_, 'py>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if asked.copy == Some(true) {
            return Err(PyBufferError::new_err("kvferry exports its own memory and never a copy"));
        }
        let device = Device::of(self.memory)?.viewed_as(asked.dl_device)?;
        export::check_stream(device, asked.stream)?;
        let dtype = export::dl_type(self.dtype)?;
        let export =
            Export::new(owner, self.addr, device, dtype, &self.shape, &self.strides, self.read_only)?;
        if asked.max_version.is_some_and(|(major, _)| major >= 1) {
            export.versioned(py)
        } else {
            export.legacy(py)
        }
    }

    /// Fills the view of a consumer of `owner`'s buffer, whose memory and sizes `self`, a part of `owner`, describes.
    ///
    /// # Safety
    /// `view` is what the interpreter passed to the `__getbuffer__` of `owner`, and `self` belongs to `owner`.
    pub(crate) unsafe fn fill(
        &self,
        owner: Bound<'_, PyAny>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let (filled, result) = match self.buffer(flags) {
            Ok(buffer) => (ffi::Py_buffer { obj: owner.into_ptr(), ..buffer }, Ok(())),
            // A refused view has a null `obj`.
            Err(error) => (ffi::Py_buffer::new(), Err(error)),
        };
        // SAFETY: the interpreter passes a Py_buffer of its caller, aligned and not null (checked above), which is ours
        // to write until the slot returns, on this thread, with the GIL; it may be uninitialised and is not read. What
        // it points to belongs to `owner` (our contract), which `obj` keeps alive until the view is released, and nobody
        // changes shape, strides or format.
        unsafe { view.write(filled) };
        result
    }

    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("data", (self.addr, self.read_only))?;
        dict.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        dict.set_item("typestr", typestr(self.dtype))?;
        dict.set_item("strides", PyTuple::new(py, &self.strides)?)?;
        Ok(dict)
    }

    /// The array as the buffer protocol has it, but for its owner. Shape and strides point into `self`.
    fn buffer(&self, flags: c_int) -> PyResult<ffi::Py_buffer> {
        let kind = self.memory;
        let refuse = |why: &str| Err(PyBufferError::new_err(why.to_owned()));
        let asked = |flag: c_int| flags & flag == flag;
        if !kind.is_host() {
            return refuse(&format!("{kind} memory has no buffer: the CPU cannot address it"));
        }
        let readonly = self.read_only;
        if readonly && asked(ffi::PyBUF_WRITABLE) {
            return refuse("the memory is read-only");
        }
        let item = self.dtype.bytes() as isize;
        let rows = contiguous(self.shape.iter().zip(&self.strides).rev(), item);
        let columns = contiguous(self.shape.iter().zip(&self.strides), item);
        if !rows && (!asked(ffi::PyBUF_STRIDES) || asked(ffi::PyBUF_C_CONTIGUOUS)) {
            return refuse("the array is not C-contiguous");
        }
        if !columns && asked(ffi::PyBUF_F_CONTIGUOUS) {
            return refuse("the array is not Fortran-contiguous");
        }
        if !rows && !columns && asked(ffi::PyBUF_ANY_CONTIGUOUS) {
            return refuse("the array is not contiguous");
        }
        let mut view = ffi::Py_buffer::new();
        view.buf = self.addr as *mut _;
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
