//! Block ids in device memory: any CUDA array of signed 32- or 64-bit integers, read by the kernel.

use std::sync::Arc;

use kvferry::cuda::DeviceRegion;
use kvferry::host::Owner;
use kvferry::{DeviceIds, Dtype, MemoryKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::arrays::{PyOwner, Raw, memory_of};
use crate::dlpack;
use crate::errors::{OrRaise, plain};
use crate::interface::interface;
use crate::users::Users;

/// Ids on a device.
pub(crate) struct OnDevice {
    pub(crate) ids: DeviceIds,
    pub(crate) users: Users,
}

/// Reads `list` if its memory is a GPU's; `side` serves errors.
pub(crate) fn device_ids(list: &Bound<'_, PyAny>, side: &str) -> PyResult<Option<OnDevice>> {
    let py = list.py();
    let name = format!("{side} block ids");
    let raw = if let Some(cuda) = torch_says(list)? {
        // torch describes a tensor by __cuda_array_interface__ and DLPack too, in five to ten times the time.
        if !cuda {
            return Ok(None);
        }
        torch(list)?
    } else if list.hasattr(intern!(py, "__cuda_array_interface__"))? {
        interface(list, &name, "__cuda_array_interface__")?
    } else if list.hasattr(intern!(py, "__dlpack_device__"))? {
        let (device, _): (i32, i32) = list.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        if device != dlpack::DEVICE_CUDA {
            return Ok(None);
        }
        dlpack::import(list, &name)?
    } else {
        return Ok(None);
    };
    if raw.shape.len() != 1 {
        let dims = raw.shape.len();
        return Err(plain(
            py,
            "LayoutError",
            format!("{name} must be one-dimensional, got {dims} dimensions"),
        ));
    }
    let width: u8 = match raw.dtype {
        Some(Dtype::Int32) => 4,
        Some(Dtype::Int64) => 8,
        _ => {
            let message =
                format!("{name} on a GPU must be signed integers of 32 or 64 bits, got {}", raw.dtype_name);
            return Err(pyo3::exceptions::PyTypeError::new_err(message));
        }
    };
    let count = raw.shape.first().copied().unwrap_or(0);
    if count > 1 && raw.strides.first() != Some(&i64::from(width)) {
        let message = format!("{name} on a GPU must be contiguous; make a contiguous copy first");
        return Err(plain(py, "LayoutError", message));
    }
    let users = Users::of(list)?;
    // An empty array may have no memory.
    let ordinal = match raw.addr {
        0 => 0,
        _ => match memory_of(py, &name, &raw)? {
            MemoryKind::Device(ordinal) => ordinal,
            other => {
                return Err(plain(
                    py,
                    "LayoutError",
                    format!("{name} claim a GPU's memory and lie in {other}"),
                ));
            }
        },
    };
    let len = count.saturating_mul(width.into());
    let owner: Owner = Arc::new(PyOwner(raw.keep));
    // SAFETY: the exporter promises `len` bytes from `addr`, contiguous as just checked, for as long as the object or
    // capsule is referenced, and `owner` holds that reference; the driver has said whose memory it is. The region is only
    // read. Without ids there is no byte.
    let region = unsafe { DeviceRegion::from_raw(raw.addr, len, ordinal, owner) }.read_only();
    Ok(Some(OnDevice { ids: DeviceIds::new(region, width).or_raise(py)?, users }))
}

/// Whether a torch tensor is on a GPU; `None` for what is no torch tensor.
fn torch_says(list: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = list.py();
    let tensor = match TENSOR.get(py) {
        Some(tensor) => tensor.bind(py).clone(),
        None => {
            let modules = py.import("sys")?.getattr("modules")?;
            let Some(torch) = modules.cast::<PyDict>()?.get_item("torch")? else { return Ok(None) };
            let Some(tensor) = torch.getattr_opt("Tensor")? else { return Ok(None) };
            TENSOR.get_or_init(py, || tensor.clone().unbind());
            tensor
        }
    };
    if !list.get_type().is(&tensor) {
        return Ok(None);
    }
    list.getattr(intern!(py, "is_cuda"))?.extract().map(Some)
}

/// A torch tensor by its own attributes.
fn torch(list: &Bound<'_, PyAny>) -> PyResult<Raw> {
    static TYPES: PyOnceLock<[Py<PyAny>; 2]> = PyOnceLock::new();
    let py = list.py();
    let types = TYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        PyResult::Ok([torch.getattr("int32")?.unbind(), torch.getattr("int64")?.unbind()])
    })?;
    let dtype = list.getattr(intern!(py, "dtype"))?;
    let (known, width) = if dtype.is(&types[0]) {
        (Some(Dtype::Int32), 4)
    } else if dtype.is(&types[1]) {
        (Some(Dtype::Int64), 8)
    } else {
        (None, 0)
    };
    let strides: Vec<i64> = list.call_method0(intern!(py, "stride"))?.extract()?;
    Ok(Raw {
        addr: list.call_method0(intern!(py, "data_ptr"))?.extract()?,
        shape: list.getattr(intern!(py, "shape"))?.extract()?,
        strides: strides.into_iter().map(|step| step.saturating_mul(width)).collect(),
        item_bytes: width as u64,
        dtype: known,
        dtype_name: if known.is_some() { String::new() } else { dtype.str()?.to_string() },
        relabel: false,
        read_only: false,
        on_device: true,
        keep: list.clone().unbind(),
    })
}
