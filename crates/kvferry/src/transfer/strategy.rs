//! Directions and engines.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;
use crate::memory::MemoryKind;

/// Direction of a transfer; follows from the two memory kinds. Giving one is a cross-check, not a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransferStrategy {
    /// Host to host.
    Memcpy,
    /// Host to device.
    CudaAsyncH2D,
    /// Device to host.
    CudaAsyncD2H,
    /// Device to the same device.
    CudaAsyncD2D,
    /// Device to another device.
    CudaAsyncP2P,
}

impl TransferStrategy {
    /// Every strategy.
    pub const ALL: [TransferStrategy; 5] = [
        TransferStrategy::Memcpy,
        TransferStrategy::CudaAsyncH2D,
        TransferStrategy::CudaAsyncD2H,
        TransferStrategy::CudaAsyncD2D,
        TransferStrategy::CudaAsyncP2P,
    ];

    /// The direction from one memory to another.
    pub fn between(src: MemoryKind, dst: MemoryKind) -> TransferStrategy {
        match (src, dst) {
            (MemoryKind::Device(a), MemoryKind::Device(b)) if a == b => TransferStrategy::CudaAsyncD2D,
            (MemoryKind::Device(_), MemoryKind::Device(_)) => TransferStrategy::CudaAsyncP2P,
            (MemoryKind::Device(_), _) => TransferStrategy::CudaAsyncD2H,
            (_, MemoryKind::Device(_)) => TransferStrategy::CudaAsyncH2D,
            _ => TransferStrategy::Memcpy,
        }
    }

    /// The name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            TransferStrategy::Memcpy => "memcpy",
            TransferStrategy::CudaAsyncH2D => "h2d",
            TransferStrategy::CudaAsyncD2H => "d2h",
            TransferStrategy::CudaAsyncD2D => "d2d",
            TransferStrategy::CudaAsyncP2P => "p2p",
        }
    }
}

impl fmt::Display for TransferStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransferStrategy {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        TransferStrategy::ALL.into_iter().find(|strategy| strategy.name() == word).ok_or_else(|| {
            Error::InvalidOption {
                option: "strategy",
                expected: "one of memcpy, h2d, d2h, d2d, p2p".to_owned(),
                value: word.to_owned(),
            }
        })
    }
}

/// What carries out a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// CPU threads.
    Host,
    /// The driver's batch copy on the copy engine.
    Batch,
    /// A strided copy kernel.
    Kernel,
    /// Copy engine between host and a device ring, kernel between ring and layout.
    Staged,
    /// Pageable memory through a pinned ring: CPU threads on one side of it, a GPU engine on the other.
    Bounce,
    /// A file.
    Disk,
    /// Another machine.
    Remote,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Engine; 7] = [
        Engine::Host,
        Engine::Batch,
        Engine::Kernel,
        Engine::Staged,
        Engine::Bounce,
        Engine::Disk,
        Engine::Remote,
    ];

    /// The name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            Engine::Host => "host",
            Engine::Batch => "batch",
            Engine::Kernel => "kernel",
            Engine::Staged => "staged",
            Engine::Bounce => "bounce",
            Engine::Disk => "disk",
            Engine::Remote => "remote",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Engine {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self, Error> {
        Engine::ALL.into_iter().find(|engine| engine.name() == word).ok_or_else(|| Error::InvalidOption {
            option: "engine",
            expected: "\"auto\" or one of host, batch, kernel, staged, bounce, disk, remote".to_owned(),
            value: word.to_owned(),
        })
    }
}
