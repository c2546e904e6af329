//! `kvferry.ExchangeArray`: a result of an exchange, out by every array protocol, never copied.

use std::ffi::c_int;
use std::sync::Arc;

use kvferry::all2all::{ExchangeResult, Output};
use kvferry::layout::HeadLayout;
use kvferry::{Dtype, MemoryKind};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};

use super::held::Held;
use crate::dlpack::DlDataType;
use crate::export::{Device, Export};
use crate::view::{Asked, View};

/// How a result is shown: its axes in the order of the layout, with or without the last one.
#[derive(Clone, Copy)]
pub(crate) struct Axes {
    pub(crate) layout: HeadLayout,
    /// Three axes: a dim of 1 is not shown.
    pub(crate) flat: bool,
}

/// Extents and byte strides of a result in memory order.
pub(crate) fn shown(result: &ExchangeResult, axes: Axes) -> (Vec<isize>, Vec<isize>) {
    let ([batch, tokens, heads, dim], [of_batch, of_token, of_head]) = (result.shape(), result.strides());
    let item = result.dtype().bytes() as isize;
    let (second, third) = match axes.layout {
        HeadLayout::Bnhd => ((tokens, of_token), (heads, of_head)),
        HeadLayout::Bhnd => ((heads, of_head), (tokens, of_token)),
    };
    // No part of an address space is longer than isize::MAX.
    let mut shape = vec![batch as isize, second.0 as isize, third.0 as isize];
    let mut strides = vec![of_batch as isize, second.1 as isize, third.1 as isize];
    if !axes.flat {
        shape.push(dim as isize);
        strides.push(item);
    }
    (shape, strides)
}

/// First address of a result.
pub(crate) fn addr(result: &ExchangeResult) -> u64 {
    result.region().span().addr + result.offset()
}

/// A tensor over a result, with an element type of the caller's choice and the result's width.
pub(crate) fn export(held: &Arc<Held>, axes: Axes, dtype: DlDataType) -> PyResult<Export> {
    let result = held.result();
    let (shape, strides) = shown(result, axes);
    let device = Device::of(result.region().kind())?;
    Export::new(held.clone(), addr(result), device, dtype, &shape, &strides, false)
}

/// A result of an exchange, or a place for one. The buffer of the pool is used again once nobody holds it; NumPy (host
/// memory), DLPack and the CUDA array interface read it without copying.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct ExchangeArray {
    pub(crate) held: Arc<Held>,
    pub(crate) axes: Axes,
    /// The place that it is a part of, if it was made by `empty_output`, and which part.
    pub(crate) output: Option<(Output, usize)>,
    view: View,
}

impl ExchangeArray {
    pub(crate) fn new(held: Arc<Held>, axes: Axes, output: Option<(Output, usize)>) -> ExchangeArray {
        let result = held.result();
        let (shape, strides) = shown(result, axes);
        let view = View {
            addr: addr(result),
            memory: result.region().kind(),
            dtype: result.dtype(),
            shape: shape.into(),
            strides: strides.into(),
            read_only: false,
        };
        ExchangeArray { held, axes, output, view }
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.view.dtype
    }
}

#[pymethods]
impl ExchangeArray {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.shape)
    }

    /// Bytes from one index to the next, by axis.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.view.strides)
    }

    /// Name of the element type.
    #[getter(dtype)]
    fn dtype_name(&self) -> &'static str {
        self.view.dtype.name()
    }

    /// First address.
    #[getter]
    fn addr(&self) -> u64 {
        self.view.addr
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.view.shape.iter().product::<isize>() as u64 * self.view.dtype.bytes()
    }

    fn __len__(&self) -> usize {
        self.view.shape.first().map_or(0, |&extent| extent as usize)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.view.array_interface(py)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = self.view.cuda_array_interface(py)?;
        self.held.exported();
        Ok(interface)
    }

    /// DLPack device of the memory: (1, 0) for the CPU, (2, ordinal) for a GPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(Device::of(self.view.memory)?.pair())
    }

    /// A DLPack capsule over the memory with its true dtype; the result lives until the consumer's deleter has run.
    ///
    /// stream: None for host memory. For a GPU it is accepted and nothing is waited for: the exchange ran on the stream of
    /// its call.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(i64, i64)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let asked = Asked { stream, max_version, dl_device, copy };
        let capsule = self.view.dlpack(py, self.held.clone(), &asked)?;
        if self.view.memory != MemoryKind::System {
            self.held.exported();
        }
        Ok(capsule)
    }

    // No __releasebuffer__: a view owns nothing but its reference to the array, which the interpreter drops.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let array = slf.clone();
        // SAFETY: the interpreter calls this with a view for `slf`, whose own `View` it is.
        unsafe { array.get().view.fill(slf.into_any(), view, flags) }
    }

    fn __repr__(&self) -> String {
        let View { shape, dtype, memory, .. } = &self.view;
        format!("ExchangeArray({shape:?}, {dtype}, {memory} memory)")
    }
}
