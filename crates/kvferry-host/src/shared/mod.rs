//! Memory that several processes map: a sealed memfd, the atomic words in it, and a bell to sleep on.

mod bell;
mod words;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::region::{HostRegion, Owner};

pub use bell::{BELL_BYTES, Bell};
pub use words::SharedWords;

/// Why shared memory could not be had or used. Sizes are in bytes, `errno` is the system's error number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SharedError {
    /// Memory of no bytes.
    #[error("shared memory needs at least one byte, 0 were asked for")]
    ZeroLength,
    /// A size that no address space holds.
    #[error("shared memory of {bytes} bytes does not fit the address space")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A system call refused.
    #[error("{call} for {bytes} bytes of shared memory failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// System error number.
        errno: i32,
    },
    /// A descriptor from a peer is not the memory it was announced as.
    #[error("the descriptor holds {found} bytes of shared memory, {expected} were announced")]
    WrongSize {
        /// Bytes announced.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// A descriptor whose size another process may still change: an access could then kill this one.
    #[error("the descriptor is no shared memory with a sealed size")]
    NotSealed,
    /// Words or a bell outside the memory.
    #[error("bytes {start}..{end} lie outside {len} bytes of shared memory")]
    Bounds {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Length of the memory.
        len: u64,
    },
    /// Words or a bell at an address where they cannot be.
    #[error("offset {offset} is no multiple of {align}")]
    Misaligned {
        /// Offset asked for.
        offset: u64,
        /// Alignment needed.
        align: u64,
    },
}

/// The sizes seals must fix. Without them a peer could shrink the file, and touching the lost pages raises SIGBUS.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Anonymous memory that other processes can map through a descriptor. Nothing appears in the file system: the kernel
/// frees it when the last mapping and the last descriptor are gone, also after a crash. Zero-filled at first. Cloning
/// shares it; the mapping lives until the last clone, [region](Self::region), [words](Self::words) and
/// [bell](Self::bell) are dropped. A forked child keeps the mapping.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    inner: Arc<Mapped>,
}

#[derive(Debug)]
struct Mapped {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: u64,
}

// SAFETY: the mapping belongs to the process and not to a thread; any thread may use or unmap it.
unsafe impl Send for Mapped {}
// SAFETY: through `&Mapped` only the address, the length and the descriptor can be read; accesses to the bytes go through
// atomics or through `HostRegion`, which answers for its own.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: base and length are what mmap returned; whoever hands out addresses in it holds a clone of the Arc, so
        // nobody can use them any more.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) } {
            tracing::warn!(%error, len = self.len, "cannot unmap shared memory");
        }
    }
}

impl SharedMemory {
    /// Makes `len` bytes of zeros. `name` shows in `/proc/self/maps` only; pages cost nothing until touched.
    ///
    /// # Errors
    /// [`SharedError::ZeroLength`], [`TooLarge`](SharedError::TooLarge), or the system's refusal.
    pub fn create(name: &str, len: u64) -> Result<SharedMemory, SharedError> {
        check_len(len)?;
        let system = |call| move |e: Errno| SharedError::System { call, bytes: len, errno: e.raw_os_error() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len).map_err(system("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS | SealFlags::SEAL).map_err(system("sealing"))?;
        SharedMemory::map(fd, len)
    }

    /// Maps memory that a peer made with [`create`](Self::create) and sent as a descriptor.
    ///
    /// # Errors
    /// A descriptor that is no sealed shared memory of exactly `len` bytes; a hostile one cannot make later accesses
    /// fault.
    pub fn from_fd(fd: OwnedFd, len: u64) -> Result<SharedMemory, SharedError> {
        check_len(len)?;
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| SharedError::NotSealed)?;
        if !seals.contains(SIZE_SEALS) {
            return Err(SharedError::NotSealed);
        }
        // Sealed first, looked at second: the size cannot change between.
        let stat = rustix::fs::fstat(&fd).map_err(|e| SharedError::System {
            call: "fstat",
            bytes: len,
            errno: e.raw_os_error(),
        })?;
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        if found != len {
            return Err(SharedError::WrongSize { expected: len, found });
        }
        SharedMemory::map(fd, len)
    }

    fn map(fd: OwnedFd, len: u64) -> Result<SharedMemory, SharedError> {
        let system = |errno| SharedError::System { call: "mmap", bytes: len, errno };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint without MAP_FIXED lets the kernel pick unused addresses, so no live mapping is replaced.
        let mapped =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len as usize, protection, MapFlags::SHARED, &fd, 0) };
        let address = mapped.map_err(|e| system(e.raw_os_error()))?;
        let base = NonNull::new(address.cast::<u8>()).ok_or(system(Errno::NOMEM.raw_os_error()))?;
        Ok(SharedMemory { inner: Arc::new(Mapped { fd, base, len }) })
    }

    /// The descriptor to send to peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Never true: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// All of it as a writable region. What peers write at the same time is not ordered by the region; words are.
    pub fn region(&self) -> HostRegion {
        let addr = self.inner.base.as_ptr().expose_provenance() as u64;
        // SAFETY: the bytes stay mapped, readable and writable while `owner` lives (its size is sealed, so no page can
        // go away), and nothing in this crate holds a reference to them other than to atomics, which alias raw writes
        // as memory shared with another process does.
        unsafe { HostRegion::from_raw(addr, self.inner.len, true, self.owner()) }
    }

    /// `count` words of 8 bytes from `offset` on.
    ///
    /// # Errors
    /// An offset that is no multiple of 8, or words that leave the memory.
    pub fn words(&self, offset: u64, count: usize) -> Result<SharedWords, SharedError> {
        let base = self.at(offset, 8, (count as u64).saturating_mul(8))?;
        // SAFETY: `at` checked alignment (of a page-aligned base) and bounds; the owner keeps the mapping alive. All
        // processes access these bytes as atomics.
        Ok(unsafe { SharedWords::from_raw(base.cast(), count, self.owner()) })
    }

    /// The bell at `offset`; it takes [`BELL_BYTES`] bytes.
    ///
    /// # Errors
    /// An offset that is no multiple of 8, or a bell that leaves the memory.
    pub fn bell(&self, offset: u64) -> Result<Bell, SharedError> {
        let base = self.at(offset, 8, BELL_BYTES)?;
        // SAFETY: as in `words`.
        Ok(unsafe { Bell::from_raw(base.cast(), self.owner()) })
    }

    fn owner(&self) -> Owner {
        Arc::clone(&self.inner) as Owner
    }

    fn at(&self, offset: u64, align: u64, bytes: u64) -> Result<NonNull<u8>, SharedError> {
        if !offset.is_multiple_of(align) {
            return Err(SharedError::Misaligned { offset, align });
        }
        let end = offset.saturating_add(bytes);
        if end > self.inner.len {
            return Err(SharedError::Bounds { start: offset, end, len: self.inner.len });
        }
        // SAFETY: `offset` is at most the length of the mapping (checked above).
        Ok(unsafe { self.inner.base.add(offset as usize) })
    }
}

fn check_len(len: u64) -> Result<(), SharedError> {
    if len == 0 {
        return Err(SharedError::ZeroLength);
    }
    // File sizes are signed, and a mapping may not exceed half the address space.
    if isize::try_from(len).is_err() { Err(SharedError::TooLarge { bytes: len }) } else { Ok(()) }
}
