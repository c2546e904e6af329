//! DLPack import (data-apis DLPack 1.x, `dlpack.h`). The capsule is read and kept, never consumed: whoever made it
//! frees it when the last layout that borrows from it goes.

use std::ffi::c_void;

use kvferry::Dtype;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::errors::plain;

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    device_type: i32,
    device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const READ_ONLY: u64 = 1;
const DEVICE_CPU: i32 = 1;
const DEVICE_CUDA: i32 = 2;
const DEVICE_CUDA_HOST: i32 = 3;

/// What a capsule describes, with strides in bytes.
pub(crate) struct Tensor {
    pub(crate) addr: u64,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<i64>,
    pub(crate) item_bytes: u64,
    pub(crate) dtype: Option<Dtype>,
    pub(crate) dtype_name: String,
    pub(crate) read_only: bool,
    pub(crate) keep: Py<PyAny>,
}

/// Asks `object` for its memory. The producer's stream is not waited for (`stream=-1`): kvferry orders itself.
pub(crate) fn import(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Tensor> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let options = PyDict::new(py);
    if device == DEVICE_CUDA {
        options.set_item("stream", -1)?;
    }
    options.set_item("max_version", (1, 0))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        Ok(capsule) => capsule,
        // Producers from before DLPack 1.0 do not know the keyword.
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) => {
            options.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&options))?
        }
        Err(error) => return Err(error),
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let (tensor, read_only) = if capsule.is_valid_checked(Some(c"dltensor_versioned")) {
        let managed = capsule.pointer_checked(Some(c"dltensor_versioned"))?.cast::<DlManagedTensorVersioned>();
        // SAFETY: a capsule of this name holds a live DLManagedTensorVersioned (DLPack 1.x); we hold the capsule, it is
        // not consumed, and the struct is plain data of the declared C layout.
        let managed = unsafe { managed.as_ref() };
        if managed.major != 1 {
            return Err(plain(py, "Unsupported", format!("{name}: DLPack version {} is not supported", managed.major)));
        }
        (managed.tensor, managed.flags & READ_ONLY != 0)
    } else {
        let managed = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
        // SAFETY: a capsule of this name holds a live DLManagedTensor, whose first member is the DLTensor; we hold the
        // capsule and it is not consumed.
        (unsafe { *managed.as_ref() }, false)
    };
    if !matches!(tensor.device.device_type, DEVICE_CPU | DEVICE_CUDA | DEVICE_CUDA_HOST) {
        let kind = tensor.device.device_type;
        return Err(plain(py, "Unsupported", format!("{name}: memory of DLPack device type {kind} is not supported")));
    }
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let shape = read(tensor.shape, ndim);
    let item_bytes = u64::from(tensor.dtype.bits) * u64::from(tensor.dtype.lanes) / 8;
    let strides: Vec<i64> = if tensor.strides.is_null() {
        let mut step = item_bytes as i64;
        let mut packed: Vec<i64> = shape
            .iter()
            .rev()
            .map(|&extent| {
                let stride = step;
                step = step.saturating_mul(extent);
                stride
            })
            .collect();
        packed.reverse();
        packed
    } else {
        read(tensor.strides, ndim).into_iter().map(|stride| stride.saturating_mul(item_bytes as i64)).collect()
    };
    let whole_bytes = tensor.dtype.bits.is_multiple_of(8) && tensor.dtype.lanes == 1;
    Ok(Tensor {
        addr: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        shape: shape.into_iter().map(|extent| extent.max(0) as u64).collect(),
        strides,
        item_bytes: if whole_bytes { item_bytes } else { 0 },
        dtype: dtype(tensor.dtype),
        dtype_name: format!("DLPack code {} with {} bits", tensor.dtype.code, tensor.dtype.bits),
        read_only,
        keep: capsule.into_any().unbind(),
    })
}

fn read(from: *const i64, count: usize) -> Vec<i64> {
    if from.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: shape and strides of a DLTensor point to `ndim` aligned int64 values that live as long as the capsule.
    unsafe { std::slice::from_raw_parts(from, count) }.to_vec()
}

/// Type codes of `dlpack.h`: 0 int, 1 uint, 2 float, 4 bfloat, 10 float8_e4m3fn, 12 float8_e5m2.
fn dtype(of: DlDataType) -> Option<Dtype> {
    if of.lanes != 1 {
        return None;
    }
    Some(match (of.code, of.bits) {
        (0, 8) => Dtype::Int8,
        (0, 16) => Dtype::Int16,
        (0, 32) => Dtype::Int32,
        (0, 64) => Dtype::Int64,
        (1, 8) => Dtype::UInt8,
        (2, 16) => Dtype::Float16,
        (2, 32) => Dtype::Float32,
        (2, 64) => Dtype::Float64,
        (4, 16) => Dtype::BFloat16,
        (10, 8) => Dtype::Float8E4M3Fn,
        (12, 8) => Dtype::Float8E5M2,
        _ => return None,
    })
}
