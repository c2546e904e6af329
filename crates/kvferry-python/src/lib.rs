//! The Python module `kvferry._core`: converts arguments, releases the GIL, maps errors. No logic of its own.

mod arrays;
mod config;
mod context;
mod descriptor;
mod dlpack;
mod errors;
mod export;
mod ids;
mod info;
mod layout;
mod memory;
mod notify;
mod numbers;
mod region;
mod transfer;
mod verify;

/// Native core of kvferry. Import `kvferry` instead.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::config::LayoutConfig;
    #[pymodule_export]
    use crate::context::{Route, TransferContext, TransferPlan};
    #[pymodule_export]
    use crate::descriptor::{describe, plan};
    #[pymodule_export]
    use crate::info::{build_info, devices, enable_logging, usable_cpus};
    #[pymodule_export]
    use crate::layout::PhysicalLayout;
    #[pymodule_export]
    use crate::memory::{Memory, device, pinned, system};
    #[pymodule_export]
    use crate::notify::Notifier;
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::transfer::{Transfer, TransferResult};
}
