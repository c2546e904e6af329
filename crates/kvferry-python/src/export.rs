//! DLPack export (data-apis DLPack 1.x, `dlpack.h`). A capsule owns its tensor, and the tensor a reference to what owns
//! the memory: no Python object, so that a consumer may free it on any thread, with or without the GIL.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use kvferry::host::Owner;
use kvferry::{Dtype, MemoryKind};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::{
    self, BFLOAT, DEVICE_CPU, DEVICE_CUDA, DEVICE_CUDA_HOST, DlDataType, DlDevice, DlManagedTensor,
    DlManagedTensorVersioned, DlTensor, FLOAT, FLOAT8_E4M3FN, FLOAT8_E5M2, INT, LEGACY, READ_ONLY, UINT,
    VERSIONED,
};

/// Where DLPack says the memory lies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device {
    kind: i32,
    id: i32,
}

impl Device {
    pub(crate) fn of(memory: MemoryKind) -> PyResult<Device> {
        Ok(match memory {
            MemoryKind::System => Device { kind: DEVICE_CPU, id: 0 },
            MemoryKind::Pinned => Device { kind: DEVICE_CUDA_HOST, id: 0 },
            MemoryKind::Device(ordinal) => Device { kind: DEVICE_CUDA, id: ordinal as i32 },
            other => return Err(PyBufferError::new_err(format!("DLPack has no device for {other} memory"))),
        })
    }

    pub(crate) fn pair(self) -> (i32, i32) {
        (self.kind, self.id)
    }

    /// The device a consumer wants to see: this one, or the CPU for pinned memory.
    pub(crate) fn viewed_as(self, wanted: Option<(i32, i32)>) -> PyResult<Device> {
        match wanted {
            None => Ok(self),
            Some(wanted) if wanted == self.pair() => Ok(self),
            Some((DEVICE_CPU, 0)) if self.kind == DEVICE_CUDA_HOST => Ok(Device { kind: DEVICE_CPU, id: 0 }),
            Some(wanted) => Err(PyBufferError::new_err(format!(
                "the memory is on DLPack device {:?}, and kvferry does not copy it to {wanted:?}",
                self.pair()
            ))),
        }
    }
}

/// Checks a consumer's stream by the rules of the array API. No stream is ever waited for.
pub(crate) fn check_stream(device: Device, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(stream) = stream else { return Ok(()) };
    if device.kind != DEVICE_CUDA {
        return Err(PyBufferError::new_err("host memory has no streams: stream must be None"));
    }
    match stream.extract::<i64>()? {
        -1 | 1.. => Ok(()),
        other => Err(PyValueError::new_err(format!(
            "stream must be -1, 1, 2 or a CUDA stream's handle, got {other}"
        ))),
    }
}

/// The name of an element type in DLPack.
pub(crate) fn dl_type(dtype: Dtype) -> PyResult<DlDataType> {
    let code = match dtype {
        Dtype::Float16 | Dtype::Float32 | Dtype::Float64 => FLOAT,
        Dtype::BFloat16 => BFLOAT,
        Dtype::Float8E4M3Fn => FLOAT8_E4M3FN,
        Dtype::Float8E5M2 => FLOAT8_E5M2,
        Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => INT,
        Dtype::UInt8 => UINT,
        other => return Err(PyBufferError::new_err(format!("DLPack has no type for {other}"))),
    };
    Ok(DlDataType { code, bits: dtype.bits() as u8, lanes: 1 })
}

/// A tensor to be.
pub(crate) struct Export {
    owner: Owner,
    addr: u64,
    device: Device,
    dtype: DlDataType,
    shape: Box<[i64]>,
    /// In elements.
    strides: Box<[i64]>,
    read_only: bool,
}

impl Export {
    /// `strides` in bytes.
    pub(crate) fn new(
        owner: Owner,
        addr: u64,
        device: Device,
        dtype: DlDataType,
        shape: &[isize],
        strides: &[isize],
        read_only: bool,
    ) -> PyResult<Export> {
        let item = i64::from(dtype.bits / 8).max(1);
        if let Some(stride) = strides.iter().find(|&&stride| stride as i64 % item != 0) {
            let of = dlpack::dtype(dtype).map_or_else(|| format!("{item}-byte"), |dtype| dtype.to_string());
            let message = format!("a stride of {stride} bytes is no whole number of {of} elements");
            return Err(PyBufferError::new_err(message));
        }
        Ok(Export {
            owner,
            addr,
            device,
            dtype,
            shape: shape.iter().map(|&extent| extent as i64).collect(),
            strides: strides.iter().map(|&stride| stride as i64 / item).collect(),
            read_only,
        })
    }

    /// A capsule for consumers that know DLPack 1.0.
    pub(crate) fn versioned(self, py: Python<'_>) -> PyResult<Bound<'_, PyCapsule>> {
        encapsulated(py, self.managed())
    }

    /// What such a capsule holds, for consumers that take it without one. Whoever gets it must see to its deletion.
    pub(crate) fn managed(self) -> NonNull<DlManagedTensorVersioned> {
        let flags = if self.read_only { READ_ONLY } else { 0 };
        // 1.1 brought the 8-bit floats.
        let minor = u32::from(matches!(self.dtype.code, FLOAT8_E4M3FN | FLOAT8_E5M2));
        let deleter = delete::<DlManagedTensorVersioned>;
        self.leaked(|tensor| DlManagedTensorVersioned {
            major: 1,
            minor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(deleter),
            flags,
            tensor,
        })
    }

    /// A capsule for older ones; it cannot say that memory is read-only.
    pub(crate) fn legacy(self, py: Python<'_>) -> PyResult<Bound<'_, PyCapsule>> {
        if self.read_only {
            let message =
                "the memory is read-only, which only DLPack 1.0 can say: ask with max_version=(1, 0)";
            return Err(PyBufferError::new_err(message));
        }
        let deleter = delete::<DlManagedTensor>;
        let managed = self.leaked(|tensor| DlManagedTensor {
            tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(deleter),
        });
        encapsulated(py, managed)
    }

    fn leaked<M: Managed>(self, managed: impl FnOnce(DlTensor) -> M) -> NonNull<M> {
        let Export { owner, addr, device, dtype, shape, strides, read_only: _ } = self;
        let tensor = DlTensor {
            data: addr as *mut c_void,
            device: DlDevice { device_type: device.kind, device_id: device.id },
            ndim: shape.len() as i32,
            dtype,
            shape: shape.as_ptr(),
            strides: strides.as_ptr(),
            byte_offset: 0,
        };
        let held = Needed { _owner: owner, _shape: shape, _strides: strides };
        let context = NonNull::from(Box::leak(Box::new(held)));
        let mut managed = managed(tensor);
        *managed.context() = context.as_ptr().cast();
        NonNull::from(Box::leak(Box::new(managed)))
    }
}

fn encapsulated<M: Managed>(py: Python<'_>, managed: NonNull<M>) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: `managed` points to an initialised, leaked M, which is what a capsule of M's name must hold, and lives
    // until `delete::<M>` runs: by the consumer that renamed the capsule, or by `destroy::<M>` if none did. That
    // destructor may run on any thread and assumes only the GIL, with which capsules are destroyed.
    let made = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, managed.cast(), M::NAME, Some(destroy::<M>))
    };
    made.inspect_err(|_| {
        // SAFETY: without a capsule nobody else has seen the pointer, and it is as `delete` wants it.
        unsafe { delete::<M>(managed.as_ptr()) }
    })
}

/// What a tensor needs for as long as it is in use. `shape` and `strides` of its `DLTensor` point into the boxes.
struct Needed {
    _owner: Owner,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
}

/// Consumers delete tensors on threads of their own.
const _: fn() = || {
    fn on_any_thread<T: Send>() {}
    on_any_thread::<Needed>();
};

/// The two structs of `dlpack.h` that a capsule can hold.
pub(crate) trait Managed: Sized + 'static {
    const NAME: &'static CStr;

    fn context(&mut self) -> &mut *mut c_void;
}

impl Managed for DlManagedTensor {
    const NAME: &'static CStr = LEGACY;

    fn context(&mut self) -> &mut *mut c_void {
        &mut self.manager_ctx
    }
}

impl Managed for DlManagedTensorVersioned {
    const NAME: &'static CStr = VERSIONED;

    fn context(&mut self) -> &mut *mut c_void {
        &mut self.manager_ctx
    }
}

/// The deleter of an exported tensor. Does not need the GIL and does not take it.
///
/// # Safety
/// `managed` is null or a tensor of [`Export::leaked`], given up by the caller and not deleted before.
pub(crate) unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    if managed.is_null() {
        return;
    }
    // SAFETY: `leaked` left this very box as an M, and by our contract this is its only deletion: the box is ours,
    // whichever thread we are on.
    let mut managed = unsafe { Box::from_raw(managed) };
    let context = managed.context().cast::<Needed>();
    // SAFETY: `leaked` put a leaked Box<Needed> there, consumers leave `manager_ctx` alone (dlpack.h), and this is the
    // only deletion. Needed is Send (asserted above): dropping it here is right on any thread. A Python object that a
    // layout borrows from is left to PyO3's reference pool, that is to the next call into kvferry, on threads that are not
    // known to hold the GIL.
    drop(unsafe { Box::from_raw(context) });
}

/// The destructor of a capsule: deletes the tensor that nobody took.
///
/// # Safety
/// Called by the interpreter, with a capsule of [`Export::leaked`].
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: `capsule` is a live capsule (our contract) and the name a C string; this raises nothing.
    if unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 0 {
        // Renamed: whoever did it deletes the tensor.
        return;
    }
    // SAFETY: the capsule is valid for this name, as just checked, with the GIL held since: this cannot fail.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
    // SAFETY: a capsule that still has its name still owns the tensor that `encapsulated` put there, and is going away.
    unsafe { delete::<M>(managed.cast()) };
}
