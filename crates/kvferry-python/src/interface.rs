//! `__array_interface__` and `__cuda_array_interface__`: dicts that anybody may have filled with anything.

use kvferry::Dtype;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Raw, masked, packed, typed};
use crate::errors::{plain, shown};

/// NumPy's `__array_interface__`, or Numba's `__cuda_array_interface__`, both in version 3.
pub(crate) fn interface(object: &Bound<'_, PyAny>, name: &str, protocol: &str) -> PyResult<Raw> {
    let py = object.py();
    let fields = Fields { name, protocol, given: object.getattr(protocol)? };
    let (addr, read_only): (u64, bool) = fields.needed("data", "an (address, read-only) pair")?;
    let shape: Vec<u64> = fields.needed("shape", "a tuple of integers from 0 to 2**64 - 1")?;
    let kind: String = fields.needed("typestr", "a string")?;
    if fields.get("mask")?.is_some() {
        return Err(masked(py, name));
    }
    let item_bytes: u64 = kind.get(2..).and_then(|digits| digits.parse().ok()).unwrap_or(0);
    let strides = match fields.get("strides")? {
        Some(strides) => fields.read("strides", &strides, "a tuple of integers")?,
        None => packed(&shape, item_bytes),
    };
    if strides.len() != shape.len() {
        let counts = format!("{} entries for {} axes", strides.len(), shape.len());
        return Err(fields.wrong(&format!("[\"strides\"] has {counts}")));
    }
    let (order, letter) = (kind.get(..1), kind.get(1..2));
    let native = order != Some(">");
    let dtype = match (letter, item_bytes) {
        _ if !native => None,
        (Some("f"), 2) => Some(Dtype::Float16),
        (Some("f"), 4) => Some(Dtype::Float32),
        (Some("f"), 8) => Some(Dtype::Float64),
        (Some("i"), _) => typed("i", item_bytes),
        (Some("u"), 1) => Some(Dtype::UInt8),
        _ => None,
    };
    // The types of ml_dtypes are void or one-byte floats to NumPy, but have names.
    let dtype = dtype.or_else(|| named(object).filter(|dtype| native && dtype.bytes() == item_bytes));
    Ok(Raw {
        addr,
        shape,
        strides,
        item_bytes,
        relabel: native && matches!(letter, Some("i" | "u" | "b"))
            || (letter == Some("V") && dtype.is_none()),
        dtype,
        dtype_name: format!("type string {kind:?}"),
        read_only,
        on_device: protocol.starts_with("__cuda"),
        keep: object.clone().unbind(),
    })
}

/// The fields of an interface.
struct Fields<'a, 'py> {
    name: &'a str,
    protocol: &'a str,
    given: Bound<'py, PyAny>,
}

impl<'py> Fields<'_, 'py> {
    /// A field that is there and not None.
    fn get(&self, key: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Ok(fields) = self.given.cast::<PyDict>() else {
            return Err(self.wrong(&format!("must be a dict, got {}", self.given.get_type().name()?)));
        };
        Ok(fields.get_item(key)?.filter(|value| !value.is_none()))
    }

    fn needed<T: for<'a> FromPyObject<'a, 'py>>(&self, key: &str, expected: &str) -> PyResult<T> {
        match self.get(key)? {
            Some(value) => self.read(key, &value, expected),
            None => Err(self.wrong(&format!("has no {key:?}"))),
        }
    }

    fn read<T: for<'a> FromPyObject<'a, 'py>>(
        &self,
        key: &str,
        value: &Bound<'py, PyAny>,
        expected: &str,
    ) -> PyResult<T> {
        let wrong = || self.wrong(&format!("[{key:?}] must be {expected}, got {}", shown(value)));
        value.extract().map_err(|_| wrong())
    }

    fn wrong(&self, what: &str) -> PyErr {
        let gap = if what.starts_with('[') { "" } else { " " };
        plain(self.given.py(), "ProtocolError", format!("{}: its {}{gap}{what}", self.name, self.protocol))
    }
}

/// The dtype that `object.dtype.name` spells.
fn named(object: &Bound<'_, PyAny>) -> Option<Dtype> {
    let name = object.getattr("dtype").ok()?.getattr("name").ok()?;
    name.extract::<String>().ok()?.parse().ok()
}
