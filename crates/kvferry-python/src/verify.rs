//! Checksums, patterns and guard checks: the bodies of four methods of `kvferry.PhysicalLayout`.

use kvferry::BlockId;
use pyo3::prelude::*;

use crate::context::span;
use crate::errors::OrRaise;
use crate::ids::{IdList, ids};
use crate::numbers::whole;

fn read(
    layout: &kvferry::PhysicalLayout,
    list: &Bound<'_, PyAny>,
    side: &'static str,
) -> PyResult<Vec<BlockId>> {
    ids(list, IdList { side, limit: layout.layout().config().num_blocks() })
}

fn seed_of(seed: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("OptionError", "seed", seed, u64::MAX)
}

pub(crate) fn checksum(
    py: Python<'_>,
    layout: &kvferry::PhysicalLayout,
    blocks: Option<&Bound<'_, PyAny>>,
    layers: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u64>> {
    let blocks = match blocks {
        Some(list) => read(layout, list, "source")?,
        None => (0..layout.layout().config().num_blocks()).map(|id| BlockId(id as u32)).collect(),
    };
    let layers = layers.map(|layers| span("layers", layers)).transpose()?;
    py.detach(|| layout.checksum(&blocks, layers)).or_raise(py)
}

pub(crate) fn fill_pattern(
    layout: &kvferry::PhysicalLayout,
    seed: &Bound<'_, PyAny>,
    blocks: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = seed.py();
    let seed = seed_of(seed)?;
    let blocks = blocks.map(|list| read(layout, list, "destination")).transpose()?;
    py.detach(|| layout.fill_pattern(seed, blocks.as_deref())).or_raise(py)
}

pub(crate) fn verify_pattern(
    layout: &kvferry::PhysicalLayout,
    seed: &Bound<'_, PyAny>,
    blocks: Option<&Bound<'_, PyAny>>,
    as_blocks: Option<&Bound<'_, PyAny>>,
    layers: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = seed.py();
    let seed = seed_of(seed)?;
    let blocks = blocks.map(|list| read(layout, list, "source")).transpose()?;
    // Ids of another layout, of whatever size.
    let any = IdList { side: "pattern", limit: 1 << 32 };
    let as_blocks = as_blocks.map(|list| ids(list, any)).transpose()?;
    let layers = layers.map(|layers| span("layers", layers)).transpose()?;
    py.detach(|| layout.verify_pattern(seed, blocks.as_deref(), as_blocks.as_deref(), layers)).or_raise(py)
}

pub(crate) fn check_fill(
    layout: &kvferry::PhysicalLayout,
    value: &Bound<'_, PyAny>,
    except_blocks: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = value.py();
    let value = whole("OptionError", "value", value, 255)? as u8;
    let except = except_blocks.map(|list| read(layout, list, "source")).transpose()?.unwrap_or_default();
    py.detach(|| layout.check_fill(value, &except)).or_raise(py)
}
