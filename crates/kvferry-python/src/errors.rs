//! Rust errors as the exceptions of `kvferry._errors`, with their fields as attributes.

use kvferry::cuda::CudaError;
use kvferry::{Error, LayoutError, PlanError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

use crate::all2all;

/// Builds `kvferry._errors.<class>(message, **fields)` without running its `__init__`: Python code that native code calls
/// must not be where a daemon thread is when the interpreter ends (before 3.14, that aborts the process).
pub(crate) fn raise(
    py: Python<'_>,
    class: &'static str,
    message: String,
    fill: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>,
) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let class = py.import("kvferry._errors")?.getattr(class)?.cast_into::<PyType>()?;
        let fields = PyDict::new(py);
        fill(&fields)?;
        let arguments = (message.as_str(),);
        let error = class.call_method1("__new__", (&class, arguments.0))?;
        // An OSError does not take them from __new__.
        error.setattr("args", arguments)?;
        for (name, value) in fields.iter() {
            error.setattr(name.cast_into::<PyString>()?, value)?;
        }
        Ok(PyErr::from_value(error))
    };
    make().unwrap_or_else(|error| error)
}

/// `class` with a message and nothing else.
pub(crate) fn plain(py: Python<'_>, class: &'static str, message: impl Into<String>) -> PyErr {
    raise(py, class, message.into(), |_| Ok(()))
}

/// What a message shows of a value: its repr, unless that is long.
pub(crate) fn shown(value: &Bound<'_, PyAny>) -> String {
    const LONGEST: usize = 80;
    match value.repr().map(|text| text.to_string_lossy().into_owned()) {
        Ok(text) if text.chars().count() <= LONGEST => text,
        Ok(text) => text.chars().take(LONGEST).chain("...".chars()).collect(),
        Err(_) => format!("a {}", value.get_type()),
    }
}

/// The exception for a kvferry error. No wildcard over our own variants where a field would be lost.
pub(crate) fn to_py(py: Python<'_>, error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Layout(error) => layout(py, error),
        Error::Plan(error) => plan(py, error),
        Error::HostMemory(error) => {
            let errno = error.errno();
            raise(py, "HostMemoryError", message, |d| d.set_item("errno", errno))
        }
        Error::Cuda(error) => cuda(py, error),
        Error::MixedMemory { .. } | Error::ReadOnlyDestination { .. } => plain(py, "LayoutError", message),
        Error::StrategyMismatch { .. } | Error::InvalidOption { .. } => plain(py, "OptionError", message),
        Error::Unsupported { .. } => plain(py, "Unsupported", message),
        Error::Closed | Error::ExchangeClosed => plain(py, "ClosedError", message),
        Error::Fork(_) => plain(py, "ForkError", message),
        Error::Transfer(failure) => {
            raise(py, "TransferError", message, |d| d.set_item("failed_blocks", failure.failed_blocks))
        }
        Error::Mismatch(found) => raise(py, "MismatchError", message, |d| {
            d.set_item("block", found.block.0)?;
            d.set_item("as_block", found.as_block.0)?;
            d.set_item("layer", found.at.layer)?;
            d.set_item("outer", found.at.outer)?;
            d.set_item("token", found.at.token)?;
            d.set_item("head", found.at.head)?;
            d.set_item("offset", found.offset)?;
            d.set_item("expected", found.expected)?;
            d.set_item("found", found.found)?;
            d.set_item("bad_rows", found.bad_rows)?;
            d.set_item("rows", found.rows)
        }),
        Error::Guard(found) => raise(py, "GuardError", message, |d| {
            d.set_item("region", found.region)?;
            d.set_item("offset", found.offset)?;
            d.set_item("block", found.block.map(|block| block.0))?;
            d.set_item("expected", found.expected)?;
            d.set_item("found", found.found)
        }),
        Error::Contract(error) => plain(py, all2all::refusal(&error), message),
        Error::ArrayBounds { .. } => plain(py, "LayoutError", message),
        Error::Exchange(failure) => all2all::failure(py, failure),
        Error::Setup(error) => all2all::setup(py, error),
        Error::Interrupted { .. } => all2all::interrupted(message),
        Error::Capacity { needed, capacity, .. } => raise(py, "CapacityError", message, |d| {
            d.set_item("needed", needed)?;
            d.set_item("capacity", capacity)
        }),
        Error::Shared(_) => plain(py, "HostMemoryError", message),
        Error::Timeout { seconds } => raise(py, "WaitTimeout", message, |d| d.set_item("seconds", seconds)),
        Error::Thread(_) | Error::Busy { .. } => plain(py, "Busy", message),
        // Only fill() writes without a plan, which has its own refusal of read-only destinations.
        Error::Region(_) => plain(py, "LayoutError", message),
        _ => plain(py, "Error", message),
    }
}

/// What the driver refused is a CudaError; what this library refused before asking the driver is told by its cause.
fn cuda(py: Python<'_>, error: CudaError) -> PyErr {
    let message = error.to_string();
    match error {
        CudaError::BlockId { side, index, value, limit } => {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            block_id(py, message, &side.to_string(), index as usize, value, limit)
        }
        CudaError::ReadOnly { .. } | CudaError::OutOfReach { .. } | CudaError::Regions { .. } => {
            plain(py, "LayoutError", message)
        }
        CudaError::ListLengths { .. }
        | CudaError::Argument { .. }
        | CudaError::ZeroLength { .. }
        | CudaError::RegistrationOverlap { .. }
        | CudaError::WrongDevice { .. }
        | CudaError::WrongStream { .. } => plain(py, "OptionError", message),
        CudaError::BatchUnsupported
        | CudaError::LegacyStream
        | CudaError::NotPinned { .. }
        | CudaError::AliasDiffers { .. }
        | CudaError::PeerAccess { .. }
        | CudaError::SharingUnsupported { .. }
        | CudaError::StreamIsCapturing { .. } => plain(py, "Unsupported", message),
        error => raise(py, "CudaError", message, |d| {
            d.set_item("code", error.code())?;
            d.set_item("name", error.name())?;
            d.set_item("call", error.call())
        }),
    }
}

fn plan(py: Python<'_>, error: PlanError) -> PyErr {
    let message = error.to_string();
    match error {
        PlanError::BlockId { side, index, value, limit } => {
            block_id(py, message, &side.to_string(), index, value, limit)
        }
        PlanError::DuplicateDestination { value, first, second } => {
            raise(py, "DuplicateBlockError", message, |d| {
                d.set_item("value", value)?;
                d.set_item("first", first)?;
                d.set_item("second", second)
            })
        }
        PlanError::Overlap { src, dst, addr } => raise(py, "OverlapError", message, |d| {
            d.set_item("src_block", src)?;
            d.set_item("dst_block", dst)?;
            d.set_item("address", addr)
        }),
        _ => plain(py, "LayoutError", message),
    }
}

pub(crate) fn block_id(
    py: Python<'_>,
    message: String,
    side: &str,
    index: usize,
    value: i64,
    limit: u64,
) -> PyErr {
    raise(py, "BlockIdError", message, |d| {
        d.set_item("side", side)?;
        d.set_item("index", index)?;
        d.set_item("value", value)?;
        d.set_item("limit", limit)
    })
}

pub(crate) fn layout(py: Python<'_>, error: LayoutError) -> PyErr {
    plain(py, "LayoutError", error.to_string())
}

/// Turns any kvferry result into a Python one.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T, E: Into<Error>> OrRaise<T> for Result<T, E> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_py(py, error.into()))
    }
}
