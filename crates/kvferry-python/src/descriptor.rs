//! Layouts without memory: JSON descriptors, and plans between them.

use kvferry::{BlockDim, KvOrder, Layout, LayoutKind, MemoryKind};
use pyo3::prelude::*;

use crate::config::LayoutConfig;
use crate::context::Options;
use crate::errors::{OrRaise, plain};
use crate::memory::Memory;
use crate::route::TransferPlan;
use crate::sides::both;

/// The JSON descriptor of a layout of kvferry's own kinds: "fully_contiguous", "layer_separate", "split_kv", "block_pool".
#[pyfunction]
#[pyo3(signature = (kind, config, *, order="NHD", block_dim=None))]
pub(crate) fn describe(
    py: Python<'_>,
    kind: &str,
    config: &LayoutConfig,
    order: &str,
    block_dim: Option<&str>,
) -> PyResult<String> {
    let order = order.parse::<KvOrder>().or_raise(py)?;
    if block_dim.is_some() && kind != "layer_separate" {
        return Err(plain(py, "OptionError", format!("block_dim has no meaning for kind {kind:?}")));
    }
    let kind = match kind {
        "fully_contiguous" => LayoutKind::FullyContiguous { order },
        "layer_separate" => {
            let block_dim =
                block_dim.unwrap_or(BlockDim::BlockFirst.name()).parse::<BlockDim>().or_raise(py)?;
            LayoutKind::LayerSeparate { block_dim, order }
        }
        "split_kv" => LayoutKind::SplitKv { order },
        "block_pool" => LayoutKind::BlockPool { order },
        other => {
            let message = format!(
                "kind must be \"fully_contiguous\", \"layer_separate\", \"split_kv\" or \"block_pool\", got {other:?}"
            );
            return Err(plain(py, "OptionError", message));
        }
    };
    Layout::of_kind(config.0, kind).and_then(|layout| layout.to_json()).or_raise(py)
}

/// Plans a transfer between two layouts given as JSON, without allocating them. Overlap is not looked for.
#[pyfunction]
#[pyo3(signature = (src, dst, src_blocks, dst_blocks, *, src_memory=None, dst_memory=None, layers=None, heads=None,
                    engine="auto", transform="auto", strategy=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
pub(crate) fn plan(
    py: Python<'_>,
    src: &str,
    dst: &str,
    src_blocks: &Bound<'_, PyAny>,
    dst_blocks: &Bound<'_, PyAny>,
    src_memory: Option<&Memory>,
    dst_memory: Option<&Memory>,
    layers: Option<&Bound<'_, PyAny>>,
    heads: Option<&Bound<'_, PyAny>>,
    engine: &str,
    transform: &str,
    strategy: Option<&str>,
) -> PyResult<TransferPlan> {
    let (src, dst) = (Layout::from_json(src).or_raise(py)?, Layout::from_json(dst).or_raise(py)?);
    let options = Options {
        layers,
        heads,
        stream: None,
        after: None,
        engine,
        num_sms: None,
        transform,
        strategy,
        per_layer: false,
    };
    let options = options.read(py)?;
    let (from, to) = both((&src, src_blocks), (&dst, dst_blocks))?;
    let memory = |memory: Option<&Memory>| memory.map_or(MemoryKind::System, |memory| memory.kind);
    let sides = ((&src, memory(src_memory)), (&dst, memory(dst_memory)));
    Ok(TransferPlan(
        py.detach(|| kvferry::plan_layouts(sides.0, sides.1, &from, &to, &options)).or_raise(py)?,
    ))
}
