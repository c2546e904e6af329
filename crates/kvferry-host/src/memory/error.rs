//! Why host memory could not be had.

use super::NumaPolicy;

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
    /// A memory node that does not exist, has no memory, or is closed to this process (cpuset).
    #[error("there is no memory node {node} for this process, only {}", nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", "))]
    UnknownNode {
        /// Node asked for.
        node: u32,
        /// Nodes that this process may use.
        nodes: Vec<u32>,
    },
    /// The system does not let memory be placed: a kernel without NUMA support, or a container that forbids it.
    #[error("placing memory by {policy:?} failed: {}{}", std::io::Error::from_raw_os_error(*errno), hint(*errno))]
    Numa {
        /// Policy asked for.
        policy: NumaPolicy,
        /// System error number.
        errno: i32,
    },
}

fn hint(errno: i32) -> &'static str {
    match errno {
        libc::ENOSYS => "; the kernel has no NUMA support",
        libc::EPERM => "; containers may forbid it (Docker does without CAP_SYS_NICE)",
        _ => "",
    }
}

impl HostMemoryError {
    /// The system error number, where the system gave one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Map { errno, .. } | Self::Touch { errno, .. } | Self::Numa { errno, .. } => Some(*errno),
            Self::ZeroLength | Self::TooLarge { .. } | Self::UnknownNode { .. } => None,
        }
    }
}
