//! Why host memory could not be had.

/// Why host memory could not be had. Sizes are in bytes, `errno` is the system's error number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostMemoryError {
    /// A buffer of no bytes has no address.
    #[error("a host buffer needs at least one byte, 0 were asked for")]
    ZeroLength,
    /// The size rounded up to pages does not fit the address space.
    #[error("a host buffer of {bytes} bytes does not fit the address space")]
    TooLarge {
        /// Bytes asked for.
        bytes: usize,
    },
    /// `mmap(2)` refused.
    #[error("mmap of {bytes} bytes failed: {}", std::io::Error::from_raw_os_error(*errno))]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// System error number.
        errno: i32,
    },
    /// The pages were mapped and could not be faulted in.
    #[error("touching {bytes} bytes of host memory failed: {}", std::io::Error::from_raw_os_error(*errno))]
    Touch {
        /// Bytes asked for.
        bytes: usize,
        /// System error number.
        errno: i32,
    },
}

impl HostMemoryError {
    /// The system error number, where the system gave one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Map { errno, .. } | Self::Touch { errno, .. } => Some(*errno),
            Self::ZeroLength | Self::TooLarge { .. } => None,
        }
    }
}
