//! The structs of `dlpack.h` (data-apis DLPack 1.x), and import. A capsule is read and kept, never consumed: whoever made
//! it frees it when the last layout that borrows from it goes.

use std::ffi::{CStr, c_void};

use kvferry::Dtype;
use kvferry::cuda::Gpu;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};

use crate::arrays::{Raw, packed};
use crate::errors::{plain, shown};

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDevice {
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlDataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDataType,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

#[repr(C)]
pub(crate) struct DlManagedTensor {
    pub(crate) tensor: DlTensor,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

#[repr(C)]
pub(crate) struct DlManagedTensorVersioned {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) manager_ctx: *mut c_void,
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

/// Names of capsules that nobody has consumed.
pub(crate) const LEGACY: &CStr = c"dltensor";
pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";

pub(crate) const READ_ONLY: u64 = 1;
pub(crate) const DEVICE_CPU: i32 = 1;
pub(crate) const DEVICE_CUDA: i32 = 2;
pub(crate) const DEVICE_CUDA_HOST: i32 = 3;

pub(crate) const INT: u8 = 0;
pub(crate) const UINT: u8 = 1;
pub(crate) const FLOAT: u8 = 2;
pub(crate) const BFLOAT: u8 = 4;
pub(crate) const BOOL: u8 = 6;
pub(crate) const FLOAT8_E4M3FN: u8 = 10;
pub(crate) const FLOAT8_E5M2: u8 = 12;

/// Asks `object` for its memory. The producer's stream is not waited for (`stream=-1`): kvferry orders itself.
pub(crate) fn import(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Raw> {
    let py = object.py();
    let wrong = |what: String| plain(py, "ProtocolError", format!("{name}: its {what}"));
    if !object.hasattr("__dlpack_device__")? {
        return Err(wrong("__dlpack__ comes without a __dlpack_device__".to_owned()));
    }
    let place = object.call_method0("__dlpack_device__")?;
    let Ok((device, ordinal)) = place.extract::<(i32, i32)>() else {
        return Err(wrong(format!("__dlpack_device__ must give two integers, got {}", shown(&place))));
    };
    // torch exports memory of the current device only.
    let gpu = u32::try_from(ordinal).ok().filter(|_| device == DEVICE_CUDA);
    let gpu = gpu.and_then(|ordinal| Gpu::bystander(ordinal).ok());
    let _current = gpu.as_ref().and_then(|gpu| gpu.enter().ok());
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
    let capsule = match capsule.cast_into::<PyCapsule>() {
        Ok(capsule) => capsule,
        Err(error) => {
            let given = error.into_inner();
            return Err(wrong(format!("__dlpack__ must give a capsule, got {}", shown(&given))));
        }
    };
    let (tensor, read_only) = if capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = capsule.pointer_checked(Some(VERSIONED))?.cast::<DlManagedTensorVersioned>();
        // SAFETY: a capsule of this name holds a live DLManagedTensorVersioned (DLPack 1.x); we hold the capsule, it is
        // not consumed, and the struct is plain data of the declared C layout.
        let managed = unsafe { managed.as_ref() };
        if managed.major != 1 {
            return Err(plain(
                py,
                "Unsupported",
                format!("{name}: DLPack version {} is not supported", managed.major),
            ));
        }
        (managed.tensor, managed.flags & READ_ONLY != 0)
    } else if capsule.is_valid_checked(Some(LEGACY)) {
        let managed = capsule.pointer_checked(Some(LEGACY))?.cast::<DlTensor>();
        // SAFETY: a capsule of this name holds a live DLManagedTensor, whose first member is the DLTensor; we hold the
        // capsule and it is not consumed.
        (unsafe { *managed.as_ref() }, false)
    } else {
        return Err(wrong(
            "__dlpack__ gave a capsule with an incorrect name: used, or no tensor's".to_owned(),
        ));
    };
    let device_type = tensor.device.device_type;
    if !matches!(device_type, DEVICE_CPU | DEVICE_CUDA | DEVICE_CUDA_HOST) {
        let message = format!("{name}: memory of DLPack device type {device_type} is not supported");
        return Err(plain(py, "Unsupported", message));
    }
    let extents = read(tensor.shape, usize::try_from(tensor.ndim).unwrap_or(0));
    if let Some(axis) = extents.iter().position(|&extent| extent < 0) {
        return Err(wrong(format!("__dlpack__ tensor has a negative extent at axis {axis}")));
    }
    let DlDataType { code, bits, lanes } = tensor.dtype;
    let item_bytes = if bits.is_multiple_of(8) && lanes == 1 { u64::from(bits / 8) } else { 0 };
    let (shape, strides) = sizes(&tensor, item_bytes);
    let lanes = if lanes == 1 { String::new() } else { format!(" in {lanes} lanes") };
    Ok(Raw {
        // A null pointer stays one, so that it can be refused.
        addr: if tensor.data.is_null() { 0 } else { (tensor.data as u64).wrapping_add(tensor.byte_offset) },
        shape,
        strides,
        item_bytes,
        dtype: dtype(tensor.dtype),
        dtype_name: format!("DLPack type code {code}, {bits} bits{lanes}"),
        relabel: item_bytes != 0 && matches!(code, INT | UINT | BOOL),
        read_only,
        on_device: device_type == DEVICE_CUDA,
        keep: capsule.into_any().unbind(),
    })
}

/// Extents, and strides in bytes, of a live tensor.
pub(crate) fn sizes(tensor: &DlTensor, item_bytes: u64) -> (Vec<u64>, Vec<i64>) {
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let shape: Vec<u64> = read(tensor.shape, ndim).into_iter().map(|extent| extent.max(0) as u64).collect();
    let strides = if tensor.strides.is_null() {
        packed(&shape, item_bytes)
    } else {
        read(tensor.strides, ndim)
            .into_iter()
            .map(|stride| stride.saturating_mul(item_bytes as i64))
            .collect()
    };
    (shape, strides)
}

fn read(from: *const i64, count: usize) -> Vec<i64> {
    if from.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: shape and strides of a DLTensor point to `ndim` aligned int64 values that live as long as the capsule.
    unsafe { std::slice::from_raw_parts(from, count) }.to_vec()
}

/// Our name of an element type, if it has one.
pub(crate) fn dtype(of: DlDataType) -> Option<Dtype> {
    Some(match (of.code, of.bits, of.lanes) {
        (INT, 8, 1) => Dtype::Int8,
        (INT, 16, 1) => Dtype::Int16,
        (INT, 32, 1) => Dtype::Int32,
        (INT, 64, 1) => Dtype::Int64,
        (UINT, 8, 1) => Dtype::UInt8,
        (FLOAT, 16, 1) => Dtype::Float16,
        (FLOAT, 32, 1) => Dtype::Float32,
        (FLOAT, 64, 1) => Dtype::Float64,
        (BFLOAT, 16, 1) => Dtype::BFloat16,
        (FLOAT8_E4M3FN, 8, 1) => Dtype::Float8E4M3Fn,
        (FLOAT8_E5M2, 8, 1) => Dtype::Float8E5M2,
        _ => return None,
    })
}
