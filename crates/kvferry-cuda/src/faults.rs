//! Failing driver calls on purpose, so that every error path can be walked without breaking a GPU.
//!
//! The one place where driver calls are made asks here first. A call that is to fail never reaches the driver: the
//! library sees the status, the device sees nothing. For tests; unused, it costs one relaxed load per call.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One call that is to fail.
#[derive(Debug)]
struct Fault {
    call: Cow<'static, str>,
    /// Calls of that name still to come, this one included, before one fails. 0: it has failed.
    remaining: u32,
    code: i32,
}

/// Whether the table holds anything: the one word that calls look at.
static ARMED: AtomicBool = AtomicBool::new(false);
static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());

fn table() -> MutexGuard<'static, Vec<Fault>> {
    // Entries are changed in single steps: the table is valid after any panic.
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets the `nth` call (1: the next one) of the driver function `call` fail with `code`, in whatever thread it happens.
/// `call` is the name as errors print it, such as "cuMemcpyBatchAsync_v2". Several faults may be pending, also of one
/// name; each fails one call. An `nth` of 0 never happens.
pub fn inject(call: impl Into<Cow<'static, str>>, nth: u32, code: i32) {
    let mut table = table();
    table.push(Fault { call: call.into(), remaining: nth, code });
    ARMED.store(true, Relaxed);
}

/// Takes every fault back and gives how many had not happened.
pub fn clear() -> usize {
    let mut table = table();
    ARMED.store(false, Relaxed);
    table.drain(..).filter(|fault| fault.remaining > 0).count()
}

/// The status that this call of `call` must fail with, if it must.
#[inline]
pub(crate) fn strike(call: &str) -> Option<i32> {
    if ARMED.load(Relaxed) { counted(call) } else { None }
}

#[cold]
fn counted(call: &str) -> Option<i32> {
    let mut struck = None;
    for fault in table().iter_mut().filter(|fault| fault.call == call && fault.remaining > 0) {
        fault.remaining -= 1;
        if fault.remaining == 0 && struck.is_none() {
            struck = Some(fault.code);
        }
    }
    struck
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_once() {
        // Names no driver function has: other tests run beside this one.
        inject("cuTestOnly", 2, 700);
        inject("cuTestOnly", 3, 2);
        assert_eq!(strike("cuTestOther"), None);
        assert_eq!([(); 4].map(|()| strike("cuTestOnly")), [None, Some(700), Some(2), None]);
        inject("cuTestOnly", 9, 1);
        assert_eq!(clear(), 1);
        assert_eq!((clear(), strike("cuTestOnly")), (0, None));
    }
}
