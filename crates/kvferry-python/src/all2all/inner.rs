//! What is behind a `kvferry.All2All`, and how it is found by a number.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use kvferry::host::ForkGuard;
use pyo3::prelude::*;
use pyo3::types::PyRange;

use super::call::Live;
use super::{All2All, options};
use crate::errors::{OrRaise, plain};
use crate::numbers::whole;

/// A communicator with what Python holds of it.
pub(crate) struct Inner {
    pub(super) comm: kvferry::all2all::All2All,
    pub(super) live: Live,
    pub(super) handle: u64,
    /// For what the library does not refuse in a forked child, though its counts and locks are the parent's.
    pub(super) fork: ForkGuard,
}

/// Communicators by number: compilers of torch keep numbers in their graphs, not objects.
static OPEN: Mutex<BTreeMap<u64, Weak<Inner>>> = Mutex::new(BTreeMap::new());

impl Inner {
    pub(super) fn new(comm: kvferry::all2all::All2All) -> Arc<Inner> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        let inner = Arc::new(Inner { comm, live: Live::default(), handle, fork: ForkGuard::new() });
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::downgrade(&inner));
        inner
    }
}

/// The communicator with a number that `All2All._handle` gave.
#[pyfunction]
pub(crate) fn communicator(handle: &Bound<'_, PyAny>) -> PyResult<All2All> {
    let (py, handle) = (handle.py(), whole("OptionError", "handle", handle, u64::MAX)?);
    let found = OPEN.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).and_then(Weak::upgrade);
    found.map(All2All).ok_or_else(|| plain(py, "ClosedError", "the all2all communicator is gone"))
}

/// Heads of every rank when `num_heads` are shared by default.
#[pyfunction]
#[pyo3(signature = (num_heads, world_size, query_heads=None))]
pub(crate) fn head_ranges<'py>(
    py: Python<'py>,
    num_heads: &Bound<'py, PyAny>,
    world_size: &Bound<'py, PyAny>,
    query_heads: Option<&Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyRange>>> {
    let num_heads = whole("OptionError", "num_heads", num_heads, i64::MAX as u64)?;
    let world_size = whole("OptionError", "world_size", world_size, u32::MAX.into())? as usize;
    let query_heads = query_heads.map(options::query_heads).transpose()?;
    let ranges = kvferry::layout::head_ranges(num_heads, world_size, query_heads).or_raise(py)?;
    ranges.into_iter().map(|range| PyRange::new(py, range.start as isize, range.end as isize)).collect()
}

impl Drop for Inner {
    fn drop(&mut self) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.handle);
    }
}
