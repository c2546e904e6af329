//! `kvferry.calibrate`.

use kvferry::{CalibrateOptions, CostModel};
use pyo3::prelude::*;

use crate::errors::{OrRaise, plain};
use crate::numbers::whole;

/// Measures the constants by which engines are chosen on a GPU, and saves them; the model as a dict.
#[pyfunction]
#[pyo3(signature = (device=None, *, peer=None, force=false, show=false), text_signature = "(device=0, *, peer=None, force=False, show=False)")]
pub(crate) fn calibrate<'py>(
    py: Python<'py>,
    device: Option<&Bound<'py, PyAny>>,
    peer: Option<&Bound<'py, PyAny>>,
    force: bool,
    show: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let ordinal = |name, value| Ok::<_, PyErr>(whole("OptionError", name, value, i32::MAX as u64)? as u32);
    let device = device.map_or(Ok(0), |value| ordinal("device", value))?;
    let peer = peer.map(|value| ordinal("peer", value)).transpose()?;
    let found: kvferry::Result<Option<CostModel>> = py.detach(|| {
        let devices = kvferry::cuda::devices()?;
        let Some(info) = devices.iter().find(|info| info.ordinal == device) else { return Ok(None) };
        if show {
            let saved = kvferry::load_calibration(info);
            return Ok(Some(saved.map_or_else(CostModel::h200, |saved| saved.model)));
        }
        let model = kvferry::calibrate(device, &CalibrateOptions { peer, ..CalibrateOptions::default() })?;
        kvferry::save_calibration(info, &model, force)?;
        Ok(Some(model))
    });
    let Some(model) = found.or_raise(py)? else {
        return Err(plain(py, "CudaError", format!("CUDA device {device} does not exist")));
    };
    let text = serde_json::to_string(&model)
        .map_err(|error| plain(py, "Error", format!("the constants cannot be written as JSON: {error}")))?;
    py.import("json")?.call_method1("loads", (text,))
}
