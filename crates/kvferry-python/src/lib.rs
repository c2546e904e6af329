//! The Python module `kvferry._core`: converts arguments, releases the GIL, maps errors. No logic of its own.

mod all2all;
mod arrays;
mod calibrate;
mod config;
mod context;
mod descriptor;
mod device_ids;
mod dlpack;
mod errors;
mod export;
mod faults;
mod ids;
mod info;
mod interface;
mod layout;
mod memory;
mod notify;
mod numbers;
mod primitives;
mod region;
mod register;
mod route;
mod sides;
mod streams;
mod transfer;
mod users;
mod verify;
mod view;
mod words;

/// Native core of kvferry. Import `kvferry` instead.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::all2all::{All2All, ExchangeArray, communicator, head_ranges};
    #[pymodule_export]
    use crate::calibrate::calibrate;
    #[pymodule_export]
    use crate::config::LayoutConfig;
    #[pymodule_export]
    use crate::context::TransferContext;
    #[pymodule_export]
    use crate::descriptor::{describe, plan};
    #[pymodule_export]
    use crate::faults::{clear_driver_faults, inject_driver_fault, settle_memory};
    #[pymodule_export]
    use crate::info::{build_info, devices, enable_logging, usable_cpus};
    #[pymodule_export]
    use crate::layout::PhysicalLayout;
    #[pymodule_export]
    use crate::memory::{Memory, device, pinned, system};
    #[pymodule_export]
    use crate::notify::Notifier;
    #[pymodule_export]
    use crate::primitives::{memcpy_batch, vectorized_copy};
    #[pymodule_export]
    use crate::region::Region;
    #[pymodule_export]
    use crate::register::{HostRegistration, register_host};
    #[pymodule_export]
    use crate::route::{Route, TransferPlan};
    #[pymodule_export]
    use crate::transfer::{Transfer, TransferResult};
}
