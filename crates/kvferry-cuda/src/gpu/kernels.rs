//! The compiled kernels, loaded.

use std::ffi::{CString, c_void};

use kvferry_kernels::{Kernel, LaunchGeometry, Module};

use crate::error::{CudaError, Result};
use crate::raw::{self, CUfunction, CUmodule, CUstream};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`.
const MAX_THREADS_PER_BLOCK: u32 = 0;

/// Modules and functions of one context. Empty when the build has no kernels.
#[derive(Default)]
pub(crate) struct Kernels {
    modules: Vec<CUmodule>,
    /// By `kernel as usize`.
    functions: Vec<CUfunction>,
    /// Most threads of a block, by `kernel as usize`.
    most_threads: Vec<u32>,
}

impl Kernels {
    /// Loads every module into the current context and finds every function. A failure leaves nothing loaded.
    pub(super) fn load() -> Result<Kernels> {
        let mut kernels = Kernels::default();
        let outcome = if kvferry_kernels::available() { kernels.fill() } else { Ok(()) };
        if outcome.is_err() {
            kernels.unload();
        }
        outcome.map(|()| kernels)
    }

    fn fill(&mut self) -> Result<()> {
        for &module in Module::ALL {
            let fatbin = kvferry_kernels::fatbin(module).ok_or(CudaError::NoKernels)?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: the fatbin is whole, 16-byte aligned and static; `handle` is a live pointer.
            unsafe { raw::cuModuleLoadData(&mut handle, fatbin.as_ptr().cast()) }?;
            self.modules.push(handle);
        }
        for &kernel in Kernel::ALL {
            let module = self.modules.get(kernel.module() as usize).ok_or(CudaError::NoKernels)?;
            let name = CString::new(kernel.name()).map_err(|_| CudaError::NoKernels)?;
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is loaded, the name ends with a null, and `function` is a live pointer.
            unsafe { raw::cuModuleGetFunction(&mut function, *module, name.as_ptr()) }?;
            // A lazily loading process would otherwise load at the first launch, which can wait for running kernels.
            // SAFETY: the function was just given by the driver.
            unsafe { raw::cuFuncLoad(function) }?;
            let mut most = 0;
            // SAFETY: `most` is a live integer; the function was just given by the driver.
            unsafe { raw::cuFuncGetAttribute(&mut most, MAX_THREADS_PER_BLOCK, function) }?;
            self.functions.push(function);
            self.most_threads.push(u32::try_from(most).unwrap_or(0));
        }
        Ok(())
    }

    /// Whether there are kernels.
    pub(super) fn loaded(&self) -> bool {
        !self.functions.is_empty()
    }

    /// Most threads that a block of the kernel may have; 0 without kernels.
    pub(crate) fn most_threads(&self, kernel: Kernel) -> u32 {
        self.most_threads.get(kernel as usize).copied().unwrap_or(0)
    }

    /// Unloads, with the context of `load` current and no kernel running.
    pub(super) fn unload(&mut self) {
        self.functions.clear();
        self.most_threads.clear();
        for module in self.modules.drain(..) {
            // SAFETY: loaded by us, unloaded once; whoever launches holds the `Gpu` until its kernels are done.
            if let Err(error) = unsafe { raw::cuModuleUnload(module) } {
                error.log_on_drop("unloading a module");
            }
        }
    }

    /// Puts a kernel on `stream`. An empty geometry puts nothing there.
    ///
    /// # Safety
    /// The kernel's context is current and `stream` is one of it. `params` starts with the kernel's parameter struct, and
    /// has at least its size, at its alignment. Every byte the kernel then touches is valid until it has run.
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        geometry: LaunchGeometry,
        params: *const u8,
        stream: CUstream,
    ) -> Result<()> {
        if geometry.is_empty() {
            return Ok(());
        }
        let function = *self.functions.get(kernel as usize).ok_or(CudaError::NoKernels)?;
        // One argument: the struct. The driver copies it during the call and never writes it.
        let mut arguments = [params.cast_mut().cast::<c_void>()];
        let LaunchGeometry { grid, block, shared } = geometry;
        // SAFETY: the caller vouches for the arguments; the array lives through the call.
        unsafe {
            raw::cuLaunchKernel(
                function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}
