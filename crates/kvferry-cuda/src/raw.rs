//! The lowest floor: driver functions by name, each returning a `Result`.
//!
//! cudarc supplies the library handle and the C types. Its generated functions are not called, for two reasons read in
//! its source (0.19.10, `driver/sys/mod.rs`): each is resolved on first use and **panics** if the loaded libcuda lacks
//! it, and each returns a Rust `enum` of the statuses known to the chosen binding level, so that a status added by a
//! newer driver (917 and up against our 12.8 bindings) would be undefined behaviour. Here a missing function is
//! [`CudaError::MissingSymbol`] at the call that needs it, and a status is an `i32`.
//!
//! A new driver function is one line in [`driver_functions!`]; every status passes [`check`], the one place to watch.
#![expect(non_snake_case, reason = "driver functions keep the names they have in NVIDIA's manual")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
pub(crate) use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr};

use crate::error::{CudaError, Result};

/// A `CUstream`; null is the legacy default stream.
pub(crate) type StreamHandle = sys::CUstream;

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
            pub(crate) unsafe fn $name($($arg: $ty),*) -> Result<()> {
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
        cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
        cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemHostGetDevicePointer_v2(alias: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
        cuMemFreeHost(address: *mut c_void);
        cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: CUdeviceptr);
        cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize);
        cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize);
        cuMemsetD8_v2(dst: CUdeviceptr, value: u8, bytes: usize);
        cuStreamSynchronize(stream: StreamHandle);
        cuPointerGetAttributes(count: c_uint, attributes: *mut c_uint, values: *mut *mut c_void, address: CUdeviceptr);
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
