//! Memory the driver knows: pinned host memory, device memory, and what an address is.

mod device;
mod pinned;
mod pointer;
mod region;

pub use device::DeviceBuffer;
pub use pinned::PinnedBuffer;
pub use pointer::{PointerKind, pointer_kind};
pub use region::DeviceRegion;
