//! Where memory lies: `kf.system()`, `kf.pinned()`, `kf.device(0)`.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kvferry::{HostOptions, HugePages, Layout, MemoryKind, NumaPolicy, PhysicalLayout};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::plain;
use crate::numbers::whole;

/// A kind of memory and how to allocate it. Made by `system()`, `pinned()` and `device(ordinal)`.
#[pyclass(frozen, eq, hash, module = "kvferry")]
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) kind: MemoryKind,
    pub(crate) options: HostOptions,
    /// GPU through whose context pinned memory is allocated. Makes no difference afterwards, so it is not compared.
    via: Option<u32>,
}

impl PartialEq for Memory {
    fn eq(&self, other: &Memory) -> bool {
        (self.kind, self.options) == (other.kind, other.options)
    }
}

impl Eq for Memory {}

impl Hash for Memory {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind, self.options).hash(state);
    }
}

impl From<MemoryKind> for Memory {
    fn from(kind: MemoryKind) -> Memory {
        Memory { kind, options: HostOptions::default(), via: None }
    }
}

impl Memory {
    /// The memory of a layout.
    pub(crate) fn of(layout: &PhysicalLayout) -> Memory {
        let options = layout.host_options().copied().unwrap_or_default();
        Memory { kind: layout.memory_kind(), options, via: None }
    }

    /// A layout in new memory of this kind.
    pub(crate) fn allocate(&self, layout: Layout) -> kvferry::Result<Arc<PhysicalLayout>> {
        match (self.kind, self.via) {
            (MemoryKind::Pinned, via) => PhysicalLayout::allocate_pinned(layout, via),
            (kind, _) => PhysicalLayout::allocate_with(layout, kind, &self.options),
        }
    }
}

#[pymethods]
impl Memory {
    /// "system", "pinned" or "device".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.kind {
            MemoryKind::System => "system",
            MemoryKind::Pinned => "pinned",
            MemoryKind::Device(_) => "device",
            _ => "other",
        }
    }

    /// GPU ordinal of device memory, else None.
    #[getter]
    fn ordinal(&self) -> Option<u32> {
        match self.kind {
            MemoryKind::Device(ordinal) => Some(ordinal),
            _ => None,
        }
    }

    fn __repr__(&self) -> String {
        if let MemoryKind::Device(ordinal) = self.kind {
            return format!("device({ordinal})");
        }
        let HostOptions { huge_pages, numa, first_touch_threads } = self.options;
        let numa = match numa {
            NumaPolicy::Default => None,
            NumaPolicy::Bind(node) => Some(format!("numa_node={node}")),
            NumaPolicy::Interleave => Some("numa_node='interleave'".to_owned()),
        };
        let huge_pages = (huge_pages == HugePages::Off).then(|| "huge_pages=False".to_owned());
        let touch = (first_touch_threads > 0).then(|| "touch=True".to_owned());
        let options: Vec<String> = [numa, huge_pages, touch].into_iter().flatten().collect();
        format!("{}({})", self.kind, options.join(", "))
    }

    fn __str__(&self) -> String {
        self.kind.to_string()
    }
}

/// Pageable host memory.
///
/// numa_node: the memory node its pages come from, and no other; "interleave": all nodes in turn; None: the node of
/// whichever thread touches a page first. A node this process cannot use, or a system that places no memory, is a
/// HostMemoryError when a layout is allocated, never a silent fallback.
/// huge_pages: ask for transparent huge pages from 4 MiB up.
/// touch: fault every page in at allocation, with every usable CPU. Takes about 0.2 s per GiB (0.5 s without huge
/// pages); otherwise allocation takes microseconds, and the first access to each page pays for it.
#[pyfunction]
#[pyo3(signature = (*, numa_node=None, huge_pages=true, touch=false))]
pub(crate) fn system(
    py: Python<'_>,
    numa_node: Option<&Bound<'_, PyAny>>,
    huge_pages: bool,
    touch: bool,
) -> PyResult<Memory> {
    let numa = match numa_node {
        None => NumaPolicy::Default,
        Some(value) => match value.cast::<PyString>() {
            Ok(word) if word.to_str()? == "interleave" => NumaPolicy::Interleave,
            Ok(word) => {
                let message = format!("numa_node must be a number or \"interleave\", got {}", word.repr()?);
                return Err(plain(py, "OptionError", message));
            }
            Err(_) => NumaPolicy::Bind(whole("OptionError", "numa_node", value, u32::MAX.into())? as u32),
        },
    };
    let huge_pages = if huge_pages { HugePages::Auto } else { HugePages::Off };
    let first_touch_threads = if touch { usize::MAX } else { 0 };
    let options = HostOptions { huge_pages, numa, first_touch_threads };
    Ok(Memory { kind: MemoryKind::System, options, via: None })
}

/// Page-locked host memory that every GPU can address. Needs a CUDA driver.
#[pyfunction]
#[pyo3(signature = (*, device=None))]
pub(crate) fn pinned(device: Option<&Bound<'_, PyAny>>) -> PyResult<Memory> {
    let via = device.map(|value| whole("OptionError", "device", value, i32::MAX as u64)).transpose()?;
    Ok(Memory { via: via.map(|ordinal| ordinal as u32), ..MemoryKind::Pinned.into() })
}

/// Memory of the GPU with this ordinal.
#[pyfunction]
pub(crate) fn device(ordinal: &Bound<'_, PyAny>) -> PyResult<Memory> {
    // A GPU ordinal is a C int.
    let ordinal = whole("OptionError", "ordinal", ordinal, i32::MAX as u64)?;
    Ok(MemoryKind::Device(ordinal as u32).into())
}
