//! Both sides of a transfer as Python gives them: ids wherever they are, and the streams that the memory is used on.

use kvferry::{BlockId, Dependency, IdSource};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange, PyTuple};

use crate::device_ids::{OnDevice, device_ids};
use crate::ids::{IdList, has_buffer, ids};
use crate::layout::PhysicalLayout;
use crate::users::{Users, current_streams};

/// One side of a transfer: its layout, and the ids as given.
pub(crate) type Given<'a, 'py> = (&'a kvferry::Layout, &'a Bound<'py, PyAny>);

fn listed((layout, blocks): Given<'_, '_>, side: &'static str) -> PyResult<Vec<BlockId>> {
    ids(blocks, IdList { side, limit: layout.config().num_blocks() })
}

/// Both id lists, which lie in host memory, read with the GIL.
pub(crate) fn both(src: Given<'_, '_>, dst: Given<'_, '_>) -> PyResult<(Vec<BlockId>, Vec<BlockId>)> {
    Ok((listed(src, "source")?, listed(dst, "destination")?))
}

/// Ids of one side, wherever they are.
pub(crate) enum Ids {
    Host(Vec<BlockId>),
    Device(OnDevice),
}

/// What need not be asked whether a GPU holds it.
fn plainly_host(blocks: &Bound<'_, PyAny>) -> bool {
    blocks.is_instance_of::<PyList>()
        || blocks.is_instance_of::<PyTuple>()
        || blocks.is_instance_of::<PyRange>()
        // CuPy's arrays have a buffer for memory that the CPU can address, and say no when asked for it.
        || (has_buffer(blocks) && !blocks.hasattr("__cuda_array_interface__").unwrap_or(false))
}

impl Ids {
    pub(crate) fn read(side: Given<'_, '_>, name: &'static str) -> PyResult<Ids> {
        if !plainly_host(side.1)
            && let Some(found) = device_ids(side.1, name)?
        {
            return Ok(Ids::Device(found));
        }
        Ok(Ids::Host(listed(side, name)?))
    }

    pub(crate) fn users(&self) -> Option<&Users> {
        match self {
            Ids::Host(_) => None,
            Ids::Device(found) => Some(&found.users),
        }
    }

    pub(crate) fn source(&self) -> IdSource<'_> {
        match self {
            Ids::Host(ids) => IdSource::Host(ids),
            Ids::Device(found) => IdSource::Device(found.ids.clone()),
        }
    }
}

/// What a transfer that was given no stream follows: the current streams of the libraries whose memory it is.
pub(crate) fn now(
    py: Python<'_>,
    src: &PhysicalLayout,
    dst: &PhysicalLayout,
    [from, to]: [&Ids; 2],
) -> PyResult<Vec<Dependency>> {
    let users = [Some(&*src.users), Some(&*dst.users), from.users(), to.users()];
    current_streams(py, users.into_iter().flatten(), [src.core.memory_kind(), dst.core.memory_kind()])
}
