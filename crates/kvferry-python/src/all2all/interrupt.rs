//! Ctrl-C under a wait of the library: what Python's signal handlers raise ends the wait and comes out of the call.

use std::cell::Cell;

use kvferry::all2all::Attend;
use kvferry::host::cpu::is_main_thread;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

thread_local! {
    /// What a handler raised in the wait that is being ended on this thread.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// Asks Python whether it wants to raise. Only its main thread runs handlers; others are not attached, as the interpreter
/// may be shutting down, which would end them in here.
pub(crate) fn attend() -> Attend {
    Attend::new(|| {
        is_main_thread()
            && Python::try_attach(|py| match py.check_signals() {
                Ok(()) => false,
                Err(raised) => {
                    RAISED.set(Some(raised));
                    true
                }
            })
            .unwrap_or(false)
    })
}

/// The exception of an interrupted wait.
pub(crate) fn interrupted(message: String) -> PyErr {
    RAISED.take().unwrap_or_else(|| PyKeyboardInterrupt::new_err(message))
}
