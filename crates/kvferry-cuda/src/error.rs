//! What can go wrong at the CUDA border.

use crate::driver::DriverVersion;

/// Result of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

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
/// `CUDA_ERROR_DEINITIALIZED`: the driver is shutting down with the process.
pub(crate) const DEINITIALIZED: i32 = 4;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: i32 = 100;

impl CudaError {
    /// The driver's status number, where a driver call gave one.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver { code, .. } => Some(*code),
            Self::OutOfMemory { .. } => Some(OUT_OF_MEMORY),
            Self::NoDevice => Some(NO_DEVICE),
            Self::DriverNotFound { .. }
            | Self::MissingSymbol { .. }
            | Self::DriverTooOld { .. }
            | Self::InvalidDevice { .. }
            | Self::ZeroLength { .. }
            | Self::OutOfBounds { .. }
            | Self::UnknownMemoryType { .. } => None,
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
