//! The border to the host system: everything in kvferry that needs an operating-system call or a raw host address.
//!
//! | module | what it owns |
//! |---|---|
//! | [`memory`] | anonymous page-aligned memory: huge pages, memory nodes, first touch |
//! | [`copy`] | the copy primitives under the host engine: strided loop nests, streaming stores, fills |
//! | [`region`] | memory with an owner, and the bounds-checked door to copies for safe code |
//! | [`wait`] | a one-shot completion word that spins briefly and then sleeps |
//! | [`Doorbell`] | a descriptor that becomes readable at a completion, for event loops |
//! | [`fork`] | detection of a forked child in one atomic load |
//! | [`shared`] | memory that several processes map, the atomic words in it, a bell to sleep on |
//! | [`PeerSocket`] | whole messages and descriptors between processes, and who is at the other end |
//! | [`ProcessWatch`] | the end of another process, as a descriptor |
//! | [`CloseInChild`] | descriptors that forked children let go of |
//! | [`poll_fds`] | waiting for several descriptors at once |
//! | [`cpu`] | usable CPUs, CPU features |
//!
//! Unsafe code lives here so that the crates above need none for host memory. Nothing here knows CUDA or Python.

mod child_fds;
pub mod copy;
pub mod cpu;
mod doorbell;
pub mod fork;
pub mod memory;
mod pidfd;
mod poll;
mod random;
pub mod region;
pub mod shared;
mod socket;
pub mod wait;

pub use child_fds::CloseInChild;
pub use copy::{CopyHint, CopyNest, Loop, MAX_LOOPS, NestError, copy_bytes, copy_nest, fill_bytes};
pub use doorbell::Doorbell;
pub use fork::{ForkError, ForkGuard};
pub use memory::{HostBuffer, HostMemoryError, HostOptions, HugePages, NumaPolicy, memory_nodes};
pub use pidfd::ProcessWatch;
pub use poll::{Interest, Readiness, poll_fds};
pub use random::random_bytes;
pub use region::{Copier, HostRegion, Owner, RegionError};
pub use shared::{BELL_BYTES, Bell, SharedError, SharedMemory, SharedWords};
pub use socket::{
    Credentials, MAX_MESSAGE, MAX_MESSAGE_FDS, PeerAddress, PeerListener, PeerSocket, Received,
};
pub use wait::Event;
