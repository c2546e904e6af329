//! The border to the CUDA driver: the one crate of kvferry that names cudarc.
//!
//! Five floors, each using only those below:
//!
//! | floor | files | what |
//! |---|---|---|
//! | raw calls | `raw`, [`faults`] | the driver's functions, found by name at run time, each turned into a `Result`; failing one on purpose |
//! | process and device | [`Driver`], [`devices`], [`PrimaryContext`], [`RelaxedCapture`] | is there a driver, how new, which GPUs; contexts saved and restored |
//! | owner types | [`Gpu`], [`Stream`], [`Event`], [`Graph`], [`PinnedBuffer`], [`DeviceBuffer`], [`DeviceRegion`], [`HostRegistration`], [`VmmBuffer`], [`IpcMapping`] | what must be given back is given back, by a thread that may wait for the device |
//! | exchange | [`ExchangeMemory`], [`ExchangeLink`], [`ExchangeRoute`], [`ExchangeQueue`] | memory that ranks share, kernels that wait for one another |
//! | copies | [`GpuMemory`], [`StridedCopy`], [`BatchCopies`], [`Flight`], [`memcpy_batch`], [`vectorized_copy`] | checked before they start, their memory kept until they are done |
//!
//! The safe doors are sound: memory comes in through regions (an unsafe promise of whoever makes one), every access through
//! them is bounds-checked before anything is launched, ids included, and a [`Flight`] keeps owners until the device is
//! done, whatever happens to the flight itself. Two pieces of work that touch the same bytes without order are a race on
//! device memory, as on any shared buffer; they cannot leave their regions.
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

mod batch;
mod capture;
mod context;
mod deferred;
mod device;
mod driver;
mod error;
mod exchange;
pub mod faults;
mod flight;
mod gpu;
mod memory;
mod raw;
mod strided;
#[cfg(test)]
mod testing;
mod vectorized;

pub use batch::{
    BATCH_CAP, BatchCopies, BatchSides, MemcpyBatchMode, MemcpyBatchPath, batch_supported, memcpy_batch,
};
pub use capture::RelaxedCapture;
pub use context::{ContextGuard, PrimaryContext, current_device};
pub use deferred::{FreesPaused, drain_deferred};
pub use device::{DeviceInfo, devices};
pub use driver::{Driver, DriverVersion, KERNELS_NEED};
pub use error::{CudaError, Result, Side};
pub use exchange::{
    ExchangeLink, ExchangeMemory, ExchangeMode, ExchangeOut, ExchangePage, ExchangeProbe, ExchangeQueue,
    ExchangeRoute, ExchangeStopped, ExchangeWay, PeerMemory, PeerReach, RouteInput, RoutePiece, RouteShape,
};
pub use flight::Flight;
pub use gpu::{Capture, Event, EventHandle, Gpu, Graph, Stream, StreamHandle};
pub use kvferry_kernels::{
    ExchangeLoop, ExchangeParamBuffer, MAX_RANKS, PROBE_BYTES, ProbeReport, ProbeState, Record, RecordKind,
    abort_word, split_abort_word,
};
pub use kvferry_kernels::{StridedError, StridedLoop, StridedShape, StridedSide, Walk};
pub use memory::{
    DeviceBuffer, DeviceRegion, GpuMemory, HostRegistration, IpcHandle, IpcMapping, PinnedBuffer,
    PointerKind, VmmBuffer, pointer_kind, register_host, register_in_chunks, vmm_supported,
};
pub use strided::{BadId, BadIdReport, DeviceIds, PairLease, PairRing, PairTable, StridedCopy};
pub use vectorized::vectorized_copy;
