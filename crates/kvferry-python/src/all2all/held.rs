//! Results as long as Python holds them, and what happens when it lets go.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use kvferry::MemoryKind;
use kvferry::all2all::ExchangeResult;
use pyo3::prelude::*;

use super::torch;
use crate::users::cupy_stream;

/// A result that some Python object, or some consumer of a capsule, holds. The last one to let go announces the stream it
/// works on, so that the buffer is not written again before that work is done.
pub(crate) struct Held {
    result: ExchangeResult,
    /// A consumer other than torch may have it.
    handed_out: AtomicBool,
}

impl Held {
    pub(crate) fn new(result: ExchangeResult) -> Arc<Held> {
        Arc::new(Held { result, handed_out: AtomicBool::new(false) })
    }

    pub(crate) fn result(&self) -> &ExchangeResult {
        &self.result
    }

    /// Who has the memory now is not known.
    pub(crate) fn exported(&self) {
        self.handed_out.store(true, Ordering::Relaxed);
    }
}

impl Drop for Held {
    /// On any thread, with or without the interpreter lock.
    fn drop(&mut self) {
        let MemoryKind::Device(ordinal) = self.result.region().kind() else { return };
        if let Some(stream) = torch::current_stream(ordinal) {
            self.result.record_stream(stream);
        }
        if *self.handed_out.get_mut() && attached() {
            Python::try_attach(|py| {
                // A destructor may run while an exception is on its way.
                let pending = PyErr::take(py);
                if let Ok(Some(stream)) = cupy_stream(py, ordinal) {
                    self.result.record_stream(stream);
                }
                if let Some(pending) = pending {
                    pending.restore(py);
                }
            });
        }
    }
}

/// Whether this thread holds the interpreter lock: a destructor must not wait for it.
fn attached() -> bool {
    type Check = unsafe extern "C" fn() -> c_int;
    static CHECK: OnceLock<Option<Check>> = OnceLock::new();
    // Every CPython exports it, though the stable ABI does not promise it: so it is looked up, not linked.
    let check = CHECK.get_or_init(|| {
        // SAFETY: a C string, and the pseudo-handle for everything that is loaded.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
        // SAFETY: null, or CPython's function of this name, which takes nothing and returns an int; an Option of a function
        // pointer has the size of a pointer and null is None.
        unsafe { std::mem::transmute::<*mut libc::c_void, Option<Check>>(found) }
    });
    // SAFETY: may be called on any thread while the process runs.
    check.is_some_and(|check| unsafe { check() } != 0)
}
