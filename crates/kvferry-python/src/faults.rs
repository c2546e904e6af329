//! Failing driver calls on purpose: what `kvferry.testing.driver_fault` is made of.

use kvferry::cuda::faults;
use pyo3::prelude::*;

use crate::errors::plain;
use crate::numbers::whole;

/// Lets the nth call from now on of a driver function fail, in whatever thread; the driver does not see it.
#[pyfunction]
pub(crate) fn inject_driver_fault(
    py: Python<'_>,
    call: String,
    nth: &Bound<'_, PyAny>,
    code: i32,
) -> PyResult<()> {
    let nth = whole("OptionError", "nth", nth, u32::MAX.into())? as u32;
    if nth == 0 || code == 0 {
        let message = "nth counts from 1, and code must be a driver's error: 0 is success";
        return Err(plain(py, "OptionError", message));
    }
    faults::inject(call, nth, code);
    Ok(())
}

/// Waits until the memory of everything dropped so far has been given back to the driver, at most ten seconds; whether it
/// has.
#[pyfunction]
pub(crate) fn settle_memory(py: Python<'_>) -> bool {
    py.detach(kvferry::cuda::drain_deferred)
}

/// Takes all faults back; how many had not happened.
#[pyfunction]
pub(crate) fn clear_driver_faults() -> usize {
    faults::clear()
}
