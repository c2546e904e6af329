//! Whole numbers from Python, refused by name: TypeError for what is no integer, the library's own error for one out of
//! range. PyO3's conversion to `u64` would say OverflowError, and not which argument.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::errors::plain;

/// An integer of any size, saturated to 128 bits. `None` if `value` is no integer, or is True or False.
pub(crate) fn integer(value: &Bound<'_, PyAny>) -> PyResult<Option<i128>> {
    if value.is_exact_instance_of::<PyBool>() {
        return Ok(None);
    }
    // Most values fit, and the 128-bit conversion is several times slower.
    if let Ok(small) = value.extract::<i64>() {
        return Ok(Some(small.into()));
    }
    let py = value.py();
    match value.extract::<i128>() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
            Ok(Some(if value.lt(0)? { i128::MIN } else { i128::MAX }))
        }
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `value` as a number from 0 to `most`; `name` and the exception class `class` serve errors.
pub(crate) fn whole(class: &'static str, name: &str, value: &Bound<'_, PyAny>, most: u64) -> PyResult<u64> {
    let py = value.py();
    let Some(number) = integer(value)? else {
        return Err(PyTypeError::new_err(format!(
            "{name} must be an integer, got {}",
            value.get_type().name()?
        )));
    };
    match u64::try_from(number) {
        Ok(number) if number <= most => Ok(number),
        _ => {
            let shown = if matches!(number, i128::MIN | i128::MAX) {
                "a huge one".to_owned()
            } else {
                number.to_string()
            };
            Err(plain(py, class, format!("{name} must be a number from 0 to {most}, got {shown}")))
        }
    }
}
