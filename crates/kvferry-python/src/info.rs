//! What was built, and what is here.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tracing_subscriber::EnvFilter;

use crate::errors::{OrRaise, plain};

/// What this build contains: version, kernel architectures, toolkit, profile.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = kvferry::build_info();
    let dict = PyDict::new(py);
    dict.set_item("version", env!("CARGO_PKG_VERSION"))?;
    dict.set_item("cuda_mode", info.cuda_mode)?;
    dict.set_item("toolkit", info.toolkit)?;
    dict.set_item("archs", PyList::new(py, info.archs)?)?;
    dict.set_item("profile", info.profile)?;
    Ok(dict)
}

/// The GPUs of this machine, as dicts. Raises CudaError when there is no driver.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(kvferry::cuda::devices).or_raise(py)?;
    let list = PyList::empty(py);
    for device in found {
        let dict = PyDict::new(py);
        dict.set_item("ordinal", device.ordinal)?;
        dict.set_item("name", device.name)?;
        dict.set_item("uuid", device.uuid)?;
        dict.set_item("compute_capability", device.compute_capability)?;
        dict.set_item("sm_count", device.sm_count)?;
        dict.set_item("total_memory", device.total_memory)?;
        dict.set_item("pci_bus_id", device.pci_bus_id)?;
        list.append(dict)?;
    }
    Ok(list)
}

/// CPUs this process may run on.
#[pyfunction]
pub(crate) fn usable_cpus() -> usize {
    kvferry::host::cpu::usable_cpus()
}

/// Writes kvferry's own log to stderr. Off until called: a library does not write unasked. `level` is "error", "warn",
/// "info", "debug", "trace" or a list such as "warn,kvferry::transfer=debug". Calling it again changes nothing.
#[pyfunction]
#[pyo3(signature = (level="warn"))]
pub(crate) fn enable_logging(py: Python<'_>, level: &str) -> PyResult<()> {
    let filter = EnvFilter::builder().parse(level).map_err(|error| {
        plain(
            py,
            "OptionError",
            format!("level must be a level or a list of target=level, got {level:?}: {error}"),
        )
    })?;
    // Each extension module has a dispatcher of its own: this is ours alone, and a second one is refused.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    // Refused when there is one already: the first call stands.
    log.try_init().unwrap_or(());
    Ok(())
}
