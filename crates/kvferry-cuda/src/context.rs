//! Primary contexts, and making one current for a while.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::driver::Driver;
use crate::error::{CudaError, NOT_INITIALIZED, Result};
use crate::raw::{self, CUcontext, CUdevice};

/// The primary context of one device, the one that torch, CuPy and the CUDA runtime use too. Retained while any clone of
/// its `Arc` lives, released after (CUDA driver API, Primary Context Management).
#[derive(Debug)]
pub struct PrimaryContext {
    ordinal: u32,
    device: CUdevice,
    handle: CUcontext,
}

// SAFETY: a context handle may be used from any thread (CUDA driver API: contexts are not bound to the thread that made
// them, and driver calls are thread-safe); the struct itself is never changed after it was made.
unsafe impl Send for PrimaryContext {}
// SAFETY: as for Send; `&self` gives out copies of plain values only.
unsafe impl Sync for PrimaryContext {}

/// Contexts in use, by ordinal. Weak: a static must not own driver state, which may be gone when statics end.
static IN_USE: Mutex<BTreeMap<u32, Weak<PrimaryContext>>> = Mutex::new(BTreeMap::new());

impl PrimaryContext {
    /// The primary context of device `ordinal`, shared with every other user of it in this process. The first use of a
    /// device by anyone creates its context, which takes a few hundred milliseconds.
    ///
    /// # Errors
    /// Those of [`Driver::get`], [`CudaError::InvalidDevice`], and a failing creation.
    pub fn get(ordinal: u32) -> Result<Arc<PrimaryContext>> {
        let device = Driver::get()?.device(ordinal)?;
        // The map is valid after any panic: entries are inserted whole.
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = in_use.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(context);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a live pointer and `device` came from the driver. The reference taken is given back by Drop.
        unsafe { raw::cuDevicePrimaryCtxRetain(&mut handle, device) }?;
        let context = Arc::new(PrimaryContext { ordinal, device, handle });
        in_use.insert(ordinal, Arc::downgrade(&context));
        Ok(context)
    }

    /// Device number.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> CUcontext {
        self.handle
    }

    /// Makes this context current for the calling thread until the guard is dropped, which restores what was current
    /// before (also nothing). Costs one driver call if it is current already.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if the driver refuses, for instance in a forked child.
    pub fn enter(&self) -> Result<ContextGuard<'_>> {
        let pushed = current()? != self.handle;
        if pushed {
            // SAFETY: the handle stays retained while `self` lives, and the guard borrows it.
            unsafe { raw::cuCtxPushCurrent_v2(self.handle) }?;
        }
        Ok(ContextGuard { context: self, pushed, not_send: PhantomData })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: gives back the one reference that `get` took; owners of memory in the context hold an Arc to it.
        if let Err(error) = unsafe { raw::cuDevicePrimaryCtxRelease_v2(self.device) } {
            error.log_on_drop("releasing a primary context");
        }
    }
}

/// A context is current while this lives. Bound to its thread; nested guards end in reverse order, as scopes do.
#[derive(Debug)]
pub struct ContextGuard<'a> {
    context: &'a PrimaryContext,
    pushed: bool,
    /// What is current belongs to a thread: the guard must stay there.
    not_send: PhantomData<*mut ()>,
}

impl ContextGuard<'_> {
    /// The context that is current while this lives.
    pub(crate) fn context(&self) -> &PrimaryContext {
        self.context
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is a live pointer; this takes off what `enter` put on this thread's stack.
        match unsafe { raw::cuCtxPopCurrent_v2(&mut popped) } {
            Ok(()) if popped == self.context.handle => {}
            Ok(()) => tracing::warn!(
                ordinal = self.context.ordinal,
                "the thread's CUDA context was replaced inside one of our calls"
            ),
            Err(error) => error.log_on_drop("restoring a thread's context"),
        }
    }
}

/// The calling thread's current context; null if there is none.
pub(crate) fn current() -> Result<CUcontext> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: `handle` is a live pointer.
    unsafe { raw::cuCtxGetCurrent(&mut handle) }?;
    Ok(handle)
}

/// The device whose context is current for the calling thread, whoever made it so (torch, CuPy, the CUDA runtime);
/// `None` if there is none. Does not initialise CUDA: in a process that nobody has initialised it for, and on a machine
/// without a driver, nothing is current.
///
/// # Errors
/// The driver's refusal.
pub fn current_device() -> Result<Option<u32>> {
    match current() {
        Ok(context) if context.is_null() => return Ok(None),
        Ok(_) => {}
        Err(CudaError::DriverNotFound { .. } | CudaError::Driver { code: NOT_INITIALIZED, .. }) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    }
    let mut device = 0;
    // SAFETY: `device` is a live integer and a context is current.
    unsafe { raw::cuCtxGetDevice(&mut device) }?;
    // There is a context, so CUDA is initialised already.
    Ok(Driver::get()?.ordinal(device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::gpu;

    #[test]
    fn guards_restore_what_was_current() {
        let Some(driver) = gpu() else { return };
        // A fresh thread: nothing is current there.
        let last = driver.device_count() - 1;
        std::thread::spawn(move || {
            assert!(current().unwrap().is_null());
            let (first, other) = (PrimaryContext::get(0).unwrap(), PrimaryContext::get(last).unwrap());
            assert!(current().unwrap().is_null(), "retaining a context must not make it current");
            {
                let _first = first.enter().unwrap();
                assert_eq!(current().unwrap(), first.handle);
                {
                    let _other = other.enter().unwrap();
                    assert_eq!(current().unwrap(), other.handle);
                    let _again = first.enter().unwrap();
                    assert_eq!(current().unwrap(), first.handle);
                }
                assert_eq!(current().unwrap(), first.handle);
                // Memory of another device leaves the thread where it was, at birth and at death.
                let buffer = crate::DeviceBuffer::new(4096, last).unwrap();
                assert_eq!(current().unwrap(), first.handle);
                buffer.memset(0, 4096, 1).unwrap();
                assert!(crate::DeviceBuffer::new(usize::MAX / 2, last).is_err());
                drop(buffer);
                drop(crate::PinnedBuffer::new(4096, last).unwrap());
                assert_eq!(current().unwrap(), first.handle);
            }
            assert!(current().unwrap().is_null());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_current_device_is_the_guards() {
        let Some(driver) = gpu() else { return };
        let last = driver.device_count() - 1;
        std::thread::spawn(move || {
            let other = PrimaryContext::get(last).unwrap();
            assert_eq!(current_device(), Ok(None));
            let guard = other.enter().unwrap();
            assert_eq!(current_device(), Ok(Some(last)));
            drop(guard);
            assert_eq!(current_device(), Ok(None));
        })
        .join()
        .unwrap();
    }
}
