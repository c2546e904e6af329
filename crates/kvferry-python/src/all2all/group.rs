//! torch process groups: who is in one, and the store in which its ranks meet.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::plain;

pub(crate) struct Members<'py> {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// A part of the group's store that no other communicator uses.
    pub(crate) store: Bound<'py, PyAny>,
    /// The GPU that the group works on, if it does.
    pub(crate) device: Option<Bound<'py, PyAny>>,
}

/// Numbers the communicators of each group: its ranks make them in the same order, as all its collectives.
fn next_of(group: &str) -> u64 {
    static MADE: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let number = made.get_or_insert_default().entry(group.to_owned()).or_default();
    *number += 1;
    *number
}

/// The ranks of `group`, by default of the whole job.
pub(crate) fn members<'py>(py: Python<'py>, group: Option<&Bound<'py, PyAny>>) -> PyResult<Members<'py>> {
    let dist = py.import("torch.distributed")?;
    if !dist.call_method0("is_initialized")?.is_truthy()? {
        return Err(plain(
            py,
            "OptionError",
            "torch.distributed has no process group: call init_process_group()",
        ));
    }
    let native = dist.getattr("distributed_c10d")?;
    let group = match group {
        Some(group) => group.clone(),
        None => native.call_method0("_get_default_group")?,
    };
    let options = PyDict::new(py);
    options.set_item("group", &group)?;
    let rank: i64 = dist.getattr("get_rank")?.call((), Some(&options))?.extract()?;
    let Ok(rank) = usize::try_from(rank) else {
        return Err(plain(py, "OptionError", "this process is not in the group"));
    };
    let world: usize = dist.getattr("get_world_size")?.call((), Some(&options))?.extract()?;
    let name: String = native.call_method1("_get_process_group_name", (&group,))?.extract()?;
    let prefix = format!("kvferry/{name}/{}", next_of(&name));
    let store = native.call_method0("_get_default_store")?;
    let store = dist.getattr("PrefixStore")?.call1((prefix, store))?;
    let backend: String = dist.getattr("get_backend")?.call((), Some(&options))?.extract()?;
    let device = if backend.contains("nccl") {
        Some(py.import("torch.cuda")?.call_method0("current_device")?)
    } else {
        None
    };
    Ok(Members { rank, world, store, device })
}
