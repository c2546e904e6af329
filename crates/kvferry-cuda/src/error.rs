//! What can go wrong at the CUDA border.

use kvferry_kernels::{ExchangeBuildError, GeometryError, StridedError};

use crate::driver::DriverVersion;

/// Result of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// The two sides of a copy.
pub use kvferry_kernels::SideName as Side;

/// An error of the CUDA border. Sizes and offsets are in bytes, ordinals are the driver's device numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// libcuda could not be loaded: no NVIDIA driver here, or not in the library search path.
    #[error("no CUDA driver on this machine (looked for {looked_for})")]
    DriverNotFound {
        /// Library names tried, separated by commas.
        looked_for: String,
    },
    /// The loaded libcuda lacks a function: it is older than that function.
    #[error("the CUDA driver library has no function {symbol}: the driver is too old")]
    MissingSymbol {
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver works, and is too old for the compiled kernels.
    #[error("the CUDA driver supports CUDA {found}, the kernels need {needed} (driver 580 or newer)")]
    DriverTooOld {
        /// What the driver supports.
        found: DriverVersion,
        /// What the kernels were compiled for.
        needed: DriverVersion,
    },
    /// There is a driver and no device that this process may see.
    #[error("the CUDA driver sees no device (is CUDA_VISIBLE_DEVICES empty?)")]
    NoDevice,
    /// A device number that does not exist.
    #[error("CUDA device {ordinal} does not exist, there are {count}")]
    InvalidDevice {
        /// Device asked for.
        ordinal: u32,
        /// Devices there are.
        count: u32,
    },
    /// Not enough device memory, or not enough host memory that may be pinned.
    #[error("{call} of {bytes} bytes for CUDA device {ordinal}: out of memory")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Device asked for.
        ordinal: u32,
        /// Driver function that refused.
        call: &'static str,
    },
    /// A buffer of no bytes.
    #[error("a {what} buffer needs at least one byte, 0 were asked for")]
    ZeroLength {
        /// Which kind of buffer: "pinned" or "device".
        what: &'static str,
    },
    /// An access beyond the end of a buffer.
    #[error("bytes {offset}..{offset}+{len} lie outside a buffer of {limit} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Bytes of the access.
        len: usize,
        /// Bytes of the buffer.
        limit: usize,
    },
    /// The driver gave a kind of memory that this crate does not know.
    #[error("the CUDA driver reports unknown memory type {value} for address {addr:#x}")]
    UnknownMemoryType {
        /// Address asked about.
        addr: u64,
        /// The driver's number.
        value: u64,
    },
    /// This build of kvferry holds no compiled kernels.
    #[error(
        "this build of kvferry has no CUDA kernels (it was built without nvcc): only copy-engine paths work"
    )]
    NoKernels,
    /// A context guard of another device than the one the call is about, or another context was made current inside it.
    #[error("the current CUDA context is not the one of device {ordinal}, which this call is about")]
    WrongContext {
        /// Device the call is about.
        ordinal: u32,
    },
    /// A stream of another device or context than the one the call is about.
    #[error("stream {stream:#x} does not belong to the primary context of CUDA device {ordinal}")]
    WrongStream {
        /// The stream's handle.
        stream: u64,
        /// Device the call is about.
        ordinal: u32,
    },
    /// Objects that belong to different devices were used together.
    #[error("{what} belongs to CUDA device {found}, this call is about device {ordinal}")]
    WrongDevice {
        /// What was handed in.
        what: &'static str,
        /// Its device.
        found: u32,
        /// Device the call is about.
        ordinal: u32,
    },
    /// The operation cannot become part of a graph, and the stream is capturing one.
    #[error("{what} cannot be captured, and stream {stream:#x} is capturing a graph")]
    StreamIsCapturing {
        /// The stream's handle.
        stream: u64,
        /// What was asked for.
        what: &'static str,
    },
    /// The operation needs a stream that is capturing a graph.
    #[error("stream {stream:#x} is not capturing a graph")]
    NotCapturing {
        /// The stream's handle.
        stream: u64,
    },
    /// The driver's batch copy does not take the legacy default stream.
    #[error("the driver's batch copy does not take the legacy default stream: pass a stream of your own")]
    LegacyStream,
    /// The driver has no batch copy, or says that it does not support this one.
    #[error("the CUDA driver has no batch copy for this (cuMemcpyBatchAsync)")]
    BatchUnsupported,
    /// A device cannot reach memory of another one.
    #[error("CUDA device {from} cannot reach memory of device {to}: there is no peer access")]
    PeerAccess {
        /// Device that would read or write.
        from: u32,
        /// Device that holds the memory.
        to: u32,
    },
    /// A copy that would leave a region.
    #[error("{side} region {region} needs {needs} bytes for this copy and has {has}")]
    OutOfReach {
        /// The side of the copy.
        side: Side,
        /// Index of the region in its table.
        region: usize,
        /// One past the last byte touched, counted from the region's start.
        needs: u64,
        /// Bytes of the region.
        has: u64,
    },
    /// A write to a region that its owner lent for reading only.
    #[error("destination region {region} is read-only")]
    ReadOnly {
        /// Index of the region in its table.
        region: usize,
    },
    /// A write to device memory that its owner lent for reading only.
    #[error("the device memory at {addr:#x} is read-only")]
    ReadOnlyMemory {
        /// First address of the region.
        addr: u64,
    },
    /// A region index that does not exist, or a table of another length than the copy was made for.
    #[error("{side} has {has} regions, {asked} were asked for")]
    Regions {
        /// The side of the copy.
        side: Side,
        /// What was asked for: a table length, or an index and one.
        asked: u64,
        /// Regions there are.
        has: u64,
    },
    /// A block id out of range.
    #[error("{side} block id {value} at index {index} is out of range: there are {limit} blocks")]
    BlockId {
        /// The side of the copy.
        side: Side,
        /// Index in the list of ids.
        index: u64,
        /// The id.
        value: u64,
        /// Blocks there are.
        limit: u64,
    },
    /// More id pairs than the call takes.
    #[error("{pairs} id pairs in one call, at most {limit} fit")]
    TooManyPairs {
        /// Pairs handed in.
        pairs: u64,
        /// Most pairs the call takes.
        limit: u64,
    },
    /// Host memory that the driver has not pinned.
    #[error("host memory at {addr:#x} is neither pinned nor registered with CUDA: the GPU cannot reach it")]
    NotPinned {
        /// First address that is not.
        addr: u64,
    },
    /// Pinned memory whose address for kernels differs from its address for the CPU.
    #[error("pinned memory at {addr:#x} has the device address {alias:#x}: kernels need both to be equal")]
    AliasDiffers {
        /// Address for the CPU.
        addr: u64,
        /// Address for kernels.
        alias: u64,
    },
    /// A range of host memory that is registered in part.
    #[error(
        "host memory {start:#x}..{end:#x} overlaps the registered range {other_start:#x}..{other_end:#x} in part: \
         register the whole once, or keep buffers on pages of their own"
    )]
    RegistrationOverlap {
        /// First address of the range, on a page boundary.
        start: u64,
        /// One past its last address.
        end: u64,
        /// First address that is registered.
        other_start: u64,
        /// One past the last one.
        other_end: u64,
    },
    /// Lists that must be equally long and are not.
    #[error(
        "{sources} sources, {destinations} destinations and {sizes} sizes: the lists must be equally long"
    )]
    ListLengths {
        /// Length of the list of sources.
        sources: usize,
        /// Length of the list of destinations.
        destinations: usize,
        /// Length of the list of sizes.
        sizes: usize,
    },
    /// An argument that can never be right, in words.
    #[error("{what} is {value}: {rule}")]
    Argument {
        /// Name of the argument.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A strided copy that cannot be expressed.
    #[error(transparent)]
    Shape(#[from] StridedError),
    /// A launch that cannot be shaped.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// An exchange that no kernel does.
    #[error(transparent)]
    Exchange(#[from] ExchangeBuildError),
    /// Memory that cannot be shared with other processes this way.
    #[error("CUDA device {ordinal} has no {what}")]
    SharingUnsupported {
        /// What is missing.
        what: &'static str,
        /// The device.
        ordinal: u32,
    },
    /// Any other status of a driver call.
    #[error("{call} failed with {name} ({code}): {message}")]
    Driver {
        /// The driver's number (CUDA driver API, `CUresult`).
        code: i32,
        /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
        name: String,
        /// The driver's own description.
        message: String,
        /// Driver function that failed.
        call: &'static str,
    },
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`: nobody has called `cuInit` in this process.
pub(crate) const NOT_INITIALIZED: i32 = 3;
/// `CUDA_ERROR_DEINITIALIZED`: the driver is shutting down with the process.
pub(crate) const DEINITIALIZED: i32 = 4;
/// `CUDA_ERROR_NOT_READY`: unfinished, not failed.
pub(crate) const NOT_READY: i32 = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(crate) const PEER_ALREADY_ENABLED: i32 = 704;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: i32 = 801;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: i32 = 100;

impl CudaError {
    /// The driver's status number, where a driver call gave one.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver { code, .. } => Some(*code),
            Self::OutOfMemory { .. } => Some(OUT_OF_MEMORY),
            Self::NoDevice => Some(NO_DEVICE),
            _ => None,
        }
    }

    /// The driver's name for the status, where a driver call gave one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Driver { name, .. } => Some(name),
            Self::OutOfMemory { .. } => Some("CUDA_ERROR_OUT_OF_MEMORY"),
            Self::NoDevice => Some("CUDA_ERROR_NO_DEVICE"),
            _ => None,
        }
    }

    /// The driver function concerned, where there is one.
    pub fn call(&self) -> Option<&'static str> {
        match self {
            Self::Driver { call, .. } | Self::OutOfMemory { call, .. } => Some(call),
            Self::MissingSymbol { symbol } => Some(symbol),
            _ => None,
        }
    }

    /// Turns a plain "out of memory" status of an allocation into the variant that says how much and where.
    pub(crate) fn for_allocation(self, bytes: usize, ordinal: u32) -> CudaError {
        match self {
            Self::Driver { code: OUT_OF_MEMORY, call, .. } => Self::OutOfMemory { bytes, ordinal, call },
            other => other,
        }
    }

    /// Logs an error that a destructor cannot return. A driver that is going down with the process is no news.
    pub(crate) fn log_on_drop(&self, what: &str) {
        if self.code() != Some(DEINITIALIZED) {
            tracing::warn!(error = %self, "{what} failed on drop");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accessors_and_messages_carry_the_facts() {
        let error = CudaError::Driver {
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            message: "out of memory".into(),
            call: "cuMemAlloc_v2",
        };
        assert_eq!((error.code(), error.call()), (Some(2), Some("cuMemAlloc_v2")));
        assert!(error.to_string().contains("cuMemAlloc_v2"), "{error}");
        let error = error.for_allocation(4096, 3);
        assert_eq!(error, CudaError::OutOfMemory { bytes: 4096, ordinal: 3, call: "cuMemAlloc_v2" });
        assert_eq!((error.code(), error.name()), (Some(2), Some("CUDA_ERROR_OUT_OF_MEMORY")));
        assert!(error.to_string().contains("4096"), "{error}");
        let error = CudaError::OutOfBounds { offset: 5, len: 6, limit: 7 };
        assert_eq!((error.code(), error.name(), error.call()), (None, None, None));
        assert_eq!(error.clone().for_allocation(1, 1), error);
    }
}
