//! The lowest floor: driver functions by name, each returning a `Result`.
//!
//! cudarc supplies the library handle and the C types. Its generated functions are not called, for two reasons read in
//! its source (0.19.10, `driver/sys/mod.rs`): each is resolved on first use and **panics** if the loaded libcuda lacks
//! it, and each returns a Rust `enum` of the statuses known to the chosen binding level, so that a status added by a
//! newer driver (917 and up against our 12.8 bindings) would be undefined behaviour. Here a missing function is
//! [`CudaError::MissingSymbol`] at the call that needs it, and a status is an `i32`.
//!
//! A new driver function is one line in [`driver_functions!`]; every status passes [`check`], the one place to watch.
//! Names are those that libcuda exports: a `_v2` is part of the name, the unversioned form is the old prototype.
#![expect(non_snake_case, reason = "driver functions keep the names they have in NVIDIA's manual")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub(crate) use cudarc::driver::sys::{
    CUDA_MEMCPY2D_st, CUDA_MEMCPY3D_st, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph,
    CUgraphExec, CUhostFn, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemcpyAttributes, CUmodule, CUstream, CUuserObject,
};

use crate::error::{CudaError, Result};
use crate::faults;

type Status = c_int;

/// Makes the table of function pointers and, for each function under `calls`, a checked caller of the same name.
macro_rules! driver_functions {
    (
        calls { $($name:ident($($arg:ident: $ty:ty),*);)* }
        table_only { $($bare:ident($($bare_ty:ty),*);)* }
    ) => {
        /// The functions found in the loaded libcuda.
        struct Functions {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> Status>,)*
            $($bare: Option<unsafe extern "C" fn($($bare_ty),*) -> Status>,)*
        }

        impl Functions {
            /// Looks every function up. Call only after [`find_library`] succeeded.
            fn load() -> Functions {
                Functions {
                    $(
                        // SAFETY: the type is the C prototype of the named function, its status as the int it is.
                        $name: unsafe { find(concat!(stringify!($name), "\0")) },
                    )*
                    $(
                        // SAFETY: the type is the C prototype of the named function, its status as the int it is.
                        $bare: unsafe { find(concat!(stringify!($bare), "\0")) },
                    )*
                }
            }
        }

        $(
            /// The driver function of this name, its status as a `Result`.
            ///
            /// # Safety
            /// What the CUDA driver API manual asks of its arguments.
            #[allow(clippy::too_many_arguments, reason = "the driver's prototype")]
            pub(crate) unsafe fn $name($($arg: $ty),*) -> Result<()> {
                if let Some(status) = faults::strike(stringify!($name)) {
                    return check(status, stringify!($name));
                }
                let function = functions()?.$name;
                let function = function.ok_or(CudaError::MissingSymbol { symbol: stringify!($name) })?;
                // SAFETY: the pointer has the function's own type; the caller vouches for the arguments.
                let status = unsafe { function($($arg),*) };
                check(status, stringify!($name))
            }
        )*
    };
}

driver_functions! {
    calls {
        cuInit(flags: c_uint);
        cuDriverGetVersion(version: *mut c_int);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice);
        cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxGetCurrent(context: *mut CUcontext);
        cuCtxPushCurrent_v2(context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuCtxGetDevice(device: *mut CUdevice);
        cuCtxSynchronize();
        cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
        cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, src: CUdevice, dst: CUdevice);
        cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
        cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostGetDevicePointer_v2(alias: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
        cuMemFreeHost(address: *mut c_void);
        cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: CUdeviceptr);
        cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize);
        cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize);
        cuMemsetD8_v2(dst: CUdeviceptr, value: u8, bytes: usize);
        cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostUnregister(address: *mut c_void);
        cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: CUdeviceptr);
        cuPointerGetAttributes(count: c_uint, attributes: *mut c_uint, values: *mut *mut c_void, address: CUdeviceptr);
        cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D_st, stream: CUstream);
        cuMemcpy3DAsync_v2(copy: *const CUDA_MEMCPY3D_st, stream: CUstream);
        cuMemsetD8Async(dst: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
        cuMemcpyBatchAsync(
            dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attributes: *mut CUmemcpyAttributes, attribute_starts: *mut usize, attribute_count: usize,
            failed: *mut usize, stream: CUstream
        );
        cuMemcpyBatchAsync_v2(
            dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attributes: *mut CUmemcpyAttributes, attribute_starts: *mut usize, attribute_count: usize, stream: CUstream
        );
        cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamSynchronize(stream: CUstream);
        cuStreamQuery(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        cuStreamIsCapturing(stream: CUstream, status: *mut c_uint);
        cuStreamGetCaptureInfo_v2(
            stream: CUstream, status: *mut c_uint, id: *mut u64, graph: *mut CUgraph,
            dependencies: *mut *const c_void, dependency_count: *mut usize
        );
        cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint);
        cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        cuGraphExecDestroy(exec: CUgraphExec);
        cuGraphDestroy(graph: CUgraph);
        cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        cuEventCreate(event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventQuery(event: CUevent);
        cuEventSynchronize(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        cuModuleUnload(module: CUmodule);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuFuncLoad(function: CUfunction);
        cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction);
        cuLaunchKernel(
            function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void
        );
        cuUserObjectCreate(
            object: *mut CUuserObject, pointer: *mut c_void, destroy: CUhostFn, references: c_uint, flags: c_uint
        );
        cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
        cuMemCreate(
            handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: u64
        );
        cuMemRelease(handle: CUmemGenericAllocationHandle);
        cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const CUmemAllocationProp, option: c_uint);
        cuMemAddressReserve(
            address: *mut CUdeviceptr, bytes: usize, alignment: usize, wish: CUdeviceptr, flags: u64
        );
        cuMemAddressFree(address: CUdeviceptr, bytes: usize);
        cuMemMap(
            address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64
        );
        cuMemUnmap(address: CUdeviceptr, bytes: usize);
        cuMemSetAccess(address: CUdeviceptr, bytes: usize, descriptions: *const CUmemAccessDesc, count: usize);
        cuMemExportToShareableHandle(
            shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: u64
        );
        cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, os_handle: *mut c_void, kind: c_uint);
        cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
        cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
        cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        cuIpcCloseMemHandle(address: CUdeviceptr);
    }
    table_only {
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
    }
}

/// Whether libcuda can be loaded. Must precede any use of it: cudarc panics on a missing library.
fn find_library() -> Result<()> {
    // SAFETY: loads libcuda for a moment; its constructors may run in any thread, and no symbol is taken from it.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    // The candidates are one library under many versions: two of them tell the reader which.
    let names = cudarc::get_lib_name_candidates("cuda");
    let shown: Vec<&str> =
        ["libcuda.so", "libcuda.so.1"].into_iter().filter(|&n| names.iter().any(|c| c == n)).collect();
    Err(CudaError::DriverNotFound { looked_for: shown.join(", ") })
}

/// Looks a function up by its null-terminated name. None if the loaded libcuda lacks it.
///
/// # Safety
/// [`find_library`] has succeeded, and `F` is a pointer to a function of the prototype that libcuda gives this name.
unsafe fn find<F: Copy>(symbol: &str) -> Option<F> {
    // SAFETY: loads libcuda, whose constructors may run in any thread. cudarc panics only if none of the names can be
    // loaded that `find_library` has just loaded.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller vouches for the type; the pointer is copied out of a library that is never unloaded.
    let found = unsafe { library.get::<F>(symbol.as_bytes()) };
    found.ok().map(|function| *function)
}

/// The table, made on first use. The outcome is kept: a driver does not appear while a process runs.
fn functions() -> Result<&'static Functions> {
    static FUNCTIONS: OnceLock<Result<Functions>> = OnceLock::new();
    let outcome = FUNCTIONS.get_or_init(|| find_library().map(|()| Functions::load()));
    outcome.as_ref().map_err(Clone::clone)
}

/// The driver's batch copy, in the form the loaded libcuda has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BatchForm {
    /// `cuMemcpyBatchAsync_v2` (CUDA 13.0): eight arguments.
    Eight,
    /// `cuMemcpyBatchAsync` (CUDA 12.8): nine, one of them the index of a copy that failed.
    Nine,
}

/// Which batch copy there is; the newer one if both are.
pub(crate) fn batch_form() -> Option<BatchForm> {
    let functions = functions().ok()?;
    match (functions.cuMemcpyBatchAsync_v2.is_some(), functions.cuMemcpyBatchAsync.is_some()) {
        (true, _) => Some(BatchForm::Eight),
        (false, true) => Some(BatchForm::Nine),
        (false, false) => None,
    }
}

/// Turns the status of the driver function `call` into a `Result`. Every call of the crate ends here.
#[inline]
fn check(status: Status, call: &'static str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(describe(status, call)) }
}

#[cold]
fn describe(status: Status, call: &'static str) -> CudaError {
    let functions = functions().ok();
    let text = |function: Option<unsafe extern "C" fn(c_int, *mut *const c_char) -> Status>| {
        let mut text = std::ptr::null();
        // SAFETY: any status may be asked about; `text` is a live pointer that the driver overwrites.
        let found = unsafe { function?(status, &mut text) };
        if found != 0 || text.is_null() {
            return None;
        }
        // SAFETY: on success the driver gives a null-terminated string that is never freed.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    };
    let name = text(functions.and_then(|f| f.cuGetErrorName));
    let message = text(functions.and_then(|f| f.cuGetErrorString));
    CudaError::Driver {
        code: status,
        name: name.unwrap_or_else(|| format!("CUDA_ERROR_{status}")),
        message: message.unwrap_or_else(|| "no description".to_owned()),
        call,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_statuses_keep_their_number() {
        let error = check(123_456, "cuInit").unwrap_err();
        assert_eq!((error.code(), error.call()), (Some(123_456), Some("cuInit")));
        assert_eq!(error.name(), Some("CUDA_ERROR_123456"));
        assert_eq!(check(0, "cuInit"), Ok(()));
    }
}
