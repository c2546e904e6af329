//! Memory the driver knows: pinned and registered host memory, device memory, shared memory, and what an address is.

mod blocking;
mod device;
mod gpu_memory;
mod ipc;
mod pinned;
mod pointer;
mod region;
mod register;
mod vmm;

pub use device::DeviceBuffer;
pub use gpu_memory::GpuMemory;
pub use ipc::{IpcHandle, IpcMapping};
pub use pinned::PinnedBuffer;
pub(crate) use pointer::device_alias;
pub use pointer::{PointerKind, pointer_kind};
pub use region::DeviceRegion;
pub use register::{HostRegistration, register_host, register_in_chunks};
pub use vmm::{VmmBuffer, vmm_supported};
