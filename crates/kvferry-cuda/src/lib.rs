//! The border to the CUDA driver: the one crate of kvferry that names cudarc.
//!
//! Three floors, each using only the one below:
//!
//! | floor | files | what |
//! |---|---|---|
//! | raw calls | `raw` | the driver's functions, found by name at run time, each turned into a `Result` |
//! | process and device | [`Driver`], [`devices`] | is there a driver, how new, which GPUs |
//! | owner types | [`PrimaryContext`], [`ContextGuard`], [`RelaxedCapture`], [`PinnedBuffer`], [`DeviceBuffer`], [`DeviceRegion`] | what must be given back is given back on drop |
//!
//! libcuda is loaded on first use. Without it every entry returns [`CudaError::DriverNotFound`]; nothing here panics or
//! needs a GPU to compile.
//!
//! ```no_run
//! let driver = kvferry_cuda::Driver::get()?;
//! println!("driver API {}", driver.driver_version());
//! for device in kvferry_cuda::devices()? {
//!     println!("{}: {} {}", device.ordinal, device.name, device.uuid);
//! }
//! # Ok::<(), kvferry_cuda::CudaError>(())
//! ```

mod capture;
mod context;
mod device;
mod driver;
mod error;
mod memory;
mod raw;
#[cfg(test)]
mod testing;

pub use capture::RelaxedCapture;
pub use context::{ContextGuard, PrimaryContext};
pub use device::{DeviceInfo, devices};
pub use driver::{Driver, DriverVersion, KERNELS_NEED};
pub use error::{CudaError, Result};
pub use memory::{DeviceBuffer, DeviceRegion, PinnedBuffer, PointerKind, pointer_kind};
