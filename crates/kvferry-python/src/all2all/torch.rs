//! torch without importing it: tensors in and out by its C exchange table (DLPack 1.2 and later), or by capsules.
//!
//! A tensor read through `__dlpack__` costs microseconds; through the table, a hundred nanoseconds.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::OnceLock;

use kvferry::StreamHandle;
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyType};

use crate::dlpack::{DEVICE_CUDA, DlManagedTensorVersioned, DlTensor};
use crate::export::{Export, delete};
use crate::users::{attribute, loaded};

/// `DLPackExchangeAPI` of `dlpack.h`. Exists for as long as the process.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    prev_api: *const c_void,
    managed_tensor_allocator: *const c_void,
    managed_tensor_from_py_object_no_sync: *const c_void,
    managed_tensor_to_py_object_no_sync:
        Option<unsafe extern "C" fn(*mut DlManagedTensorVersioned, *mut *mut c_void) -> c_int>,
    dltensor_from_py_object_no_sync: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The functions of the table that are used.
#[derive(Clone, Copy)]
struct Table {
    to_object: unsafe extern "C" fn(*mut DlManagedTensorVersioned, *mut *mut c_void) -> c_int,
    from_object: unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int,
    stream: unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int,
}

/// Set once torch has been seen; read also where there is no interpreter lock.
static TABLE: OnceLock<Table> = OnceLock::new();

/// torch, looked up among the loaded modules.
pub(crate) struct Torch {
    tensor: Py<PyType>,
    from_capsule: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
    table: Option<Table>,
}

/// torch, if somebody has imported it (all of it: a module that is still loading is not there yet).
pub(crate) fn torch(py: Python<'_>) -> PyResult<Option<&Torch>> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let Some(module) = loaded(py, "torch")? else { return Ok(None) };
    let (Some(tensor), Some(native)) = (attribute(&module, "Tensor")?, attribute(&module, "_C")?) else {
        return Ok(None);
    };
    let from_capsule = attribute(&native, "_from_dlpack")?;
    let is_grad_enabled = attribute(&module, "is_grad_enabled")?;
    let (Some(from_capsule), Some(is_grad_enabled)) = (from_capsule, is_grad_enabled) else {
        return Ok(None);
    };
    let table = table(&tensor)?;
    let found = Torch {
        tensor: tensor.cast_into::<PyType>()?.unbind(),
        from_capsule: from_capsule.unbind(),
        is_grad_enabled: is_grad_enabled.unbind(),
        table,
    };
    if let Some(table) = found.table {
        TABLE.get_or_init(|| table);
    }
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// The exchange table of the tensor type; `None` where torch is older than it, or speaks another version.
fn table(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Table>> {
    let Some(capsule) = attribute(tensor, "__dlpack_c_exchange_api__")? else { return Ok(None) };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    const NAME: &std::ffi::CStr = c"dlpack_exchange_api";
    if !capsule.is_valid_checked(Some(NAME)) {
        return Ok(None);
    }
    let api = capsule.pointer_checked(Some(NAME))?.cast::<ExchangeApi>();
    // SAFETY: a capsule of this name holds a DLPackExchangeAPI that is never freed or changed (dlpack.h); the header comes
    // first in every version, and what follows is of this layout in major version 1, which is looked at below before any
    // of it is used.
    let api = unsafe { api.as_ref() };
    if api.major != 1 {
        return Ok(None);
    }
    Ok(
        match (
            api.managed_tensor_to_py_object_no_sync,
            api.dltensor_from_py_object_no_sync,
            api.current_work_stream,
        ) {
            (Some(to_object), Some(from_object), Some(stream)) => {
                Some(Table { to_object, from_object, stream })
            }
            _ => None,
        },
    )
}

/// torch's current stream of the calling thread on a GPU; `None` where torch has not been seen or has no table. Needs no
/// interpreter lock: what it asks is thread-local.
pub(crate) fn current_stream(ordinal: u32) -> Option<StreamHandle> {
    let table = TABLE.get()?;
    let mut stream = std::ptr::null_mut();
    // SAFETY: a function of torch's table with the arguments it wants; `stream` is a live out pointer. The device exists:
    // the caller has memory of torch's or ours on it.
    let status = unsafe { (table.stream)(DEVICE_CUDA, ordinal as i32, &raw mut stream) };
    // SAFETY: torch never destroys the streams of its pools. (One that came to torch as an ExternalStream is its owner's: it
    // has to outlive the communicator, as the class says.)
    (status == 0).then(|| unsafe { StreamHandle::lasting(stream as u64) })
}

impl Torch {
    /// Whether `object` is a tensor.
    pub(crate) fn is_tensor(&self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tensor = self.tensor.bind(object.py());
        if object.get_type().is(tensor) {
            return Ok(true);
        }
        object.is_instance(tensor)
    }

    /// Whether a result computed from `tensor` would have to carry a gradient.
    pub(crate) fn needs_grad(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        Ok(tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?
            && self.is_grad_enabled.bind(py).call0()?.is_truthy()?)
    }

    /// The memory of a tensor, whose description is valid while the tensor is not resized. `None` without a table.
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<DlTensor>> {
        let Some(table) = self.table else { return Ok(None) };
        let mut found = MaybeUninit::<DlTensor>::uninit();
        // SAFETY: `tensor` is a live object of the table's type, the interpreter lock is held, and `found` has room for
        // the struct that is written.
        let status = unsafe { (table.from_object)(tensor.as_ptr().cast(), found.as_mut_ptr()) };
        if status != 0 {
            return Err(unreadable(tensor));
        }
        // SAFETY: a status of 0 says that the struct has been filled.
        Ok(Some(unsafe { found.assume_init() }))
    }

    /// A tensor over memory of ours.
    pub(crate) fn tensor<'py>(&self, py: Python<'py>, export: Export) -> PyResult<Bound<'py, PyAny>> {
        let Some(table) = self.table else {
            return self.from_capsule.bind(py).call1((export.versioned(py)?,));
        };
        let managed: NonNull<DlManagedTensorVersioned> = export.managed();
        let mut object = std::ptr::null_mut();
        // SAFETY: `managed` is a live tensor with its deleter, which torch takes over if it succeeds; `object` is a live
        // out pointer; the interpreter lock is held.
        let status = unsafe { (table.to_object)(managed.as_ptr(), &raw mut object) };
        if status != 0 {
            let error = raised(py);
            // SAFETY: torch has refused the tensor, so it is still ours and nobody has deleted it.
            unsafe { delete::<DlManagedTensorVersioned>(managed.as_ptr()) };
            return Err(error);
        }
        // SAFETY: a new reference to a tensor object, or null with an exception set, as CPython functions return.
        unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
    }
}

/// A tensor without memory to read: sparse, or of some subclass. The first line of what torch says of it.
fn unreadable(tensor: &Bound<'_, PyAny>) -> PyErr {
    let py = tensor.py();
    let cause = raised(py);
    let said = cause.value(py).to_string();
    let message =
        format!("torch does not lend this tensor's memory: {}", said.lines().next().unwrap_or_default());
    let error = crate::errors::plain(py, "LayoutError", message);
    error.set_cause(py, Some(cause));
    error
}

/// The exception that a function of the table has set.
fn raised(py: Python<'_>) -> PyErr {
    PyErr::take(py)
        .unwrap_or_else(|| PyRuntimeError::new_err("torch refused a DLPack exchange and said nothing"))
}
