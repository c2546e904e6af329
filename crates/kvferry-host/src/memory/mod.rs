//! Anonymous host memory: page-aligned, owned, optionally in huge pages, placed on memory nodes, touched by threads.

mod error;
mod numa;

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::cpu::usable_cpus;

pub use error::HostMemoryError;
pub use numa::{NumaPolicy, memory_nodes};

/// From this many bytes [`HugePages::Auto`] asks for transparent huge pages (two 2 MiB pages).
pub const HUGE_PAGE_THRESHOLD: usize = 4 << 20;

/// First-touch shares are cut at multiples of this many bytes, so that two threads never fault the same huge page.
const TOUCH_GRANULE: usize = 2 << 20;

/// Whether a buffer asks the kernel for transparent huge pages (`madvise(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HugePages {
    /// Ask for them from [`HUGE_PAGE_THRESHOLD`] bytes up. A kernel without them is not an error.
    #[default]
    Auto,
    /// Ask the kernel not to use them, whatever the system default is.
    Off,
}

/// How a [`HostBuffer`] is made.
///
/// By default nothing is touched: making a buffer of any size takes microseconds, pages that are never used cost nothing,
/// and the first access to each page pays for it. Touching is worth it where the first transfer must run at full speed,
/// or the pool will be filled anyway; a pool of 256 GiB then takes a minute to make. Seconds per GiB on two cores of a
/// busy Xeon VM, over two runs (one thread or two made no difference):
///
/// | pages | touch | copy into touched | sum | copy into untouched |
/// |---|---|---|---|---|
/// | huge | 0.13–0.32 | 0.09–0.18 | 0.22–0.50 | 0.38–0.63 |
/// | base | 0.35–0.58 | 0.09–0.18 | 0.45–0.78 | 0.76–1.35 |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct HostOptions {
    /// Page size policy.
    pub huge_pages: HugePages,
    /// Memory nodes that the pages come from.
    pub numa: NumaPolicy,
    /// Threads that fault the pages in before [`HostBuffer::new`] returns; more than [`usable_cpus`] (`usize::MAX`)
    /// means that many. 0 leaves them to the first access. With 1 it is the calling thread.
    ///
    /// Under [`NumaPolicy::Default`] each page lands on the node of the thread that touches it, and several threads may
    /// run on several nodes. Under the other policies the kernel places it, wherever the thread runs.
    pub first_touch_threads: usize,
}

/// An owned, private, zero-filled, page-aligned range of host memory, unmapped on drop.
///
/// The buffer hands out its address, not slices: engines, other threads and devices may be writing to it, and who may
/// look at which bytes when is known above this crate. [`HostRegion`](crate::HostRegion) is the door for safe code.
#[derive(Debug)]
pub struct HostBuffer {
    base: NonNull<u8>,
    len: usize,
    mapped: usize,
}

// SAFETY: the buffer owns its mapping, which belongs to the process and not to a thread; any thread may unmap it.
unsafe impl Send for HostBuffer {}
// SAFETY: through `&HostBuffer` only the address and the length can be read; every access to the bytes themselves is
// an unsafe operation of the caller, who answers for data races there.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Maps `len` bytes (rounded up to whole pages in the kernel, [`HostBuffer::len`] stays exact).
    ///
    /// # Errors
    /// [`HostMemoryError::ZeroLength`], [`TooLarge`](HostMemoryError::TooLarge) and
    /// [`UnknownNode`](HostMemoryError::UnknownNode) before anything is mapped; [`Map`](HostMemoryError::Map),
    /// [`Numa`](HostMemoryError::Numa) or [`Touch`](HostMemoryError::Touch) with the system's number. A policy that the
    /// system refuses is an error, never dropped. Under memory overcommit a machine that runs out while pages are
    /// touched may kill the process instead of failing the call.
    pub fn new(len: usize, options: HostOptions) -> Result<HostBuffer, HostMemoryError> {
        if len == 0 {
            return Err(HostMemoryError::ZeroLength);
        }
        let mapped = len
            .checked_next_multiple_of(page_size())
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or(HostMemoryError::TooLarge { bytes: len })?;
        let placement = options.numa.placement()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint without MAP_FIXED lets the kernel pick unused addresses, so no live mapping is replaced.
        let address =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), mapped, protection, MapFlags::PRIVATE) };
        let address = address.map_err(|e| HostMemoryError::Map { bytes: len, errno: e.raw_os_error() })?;
        let base = NonNull::new(address.cast::<u8>())
            .ok_or(HostMemoryError::Map { bytes: len, errno: Errno::NOMEM.raw_os_error() })?;
        // From here on the buffer owns the mapping: an early return unmaps it.
        let buffer = HostBuffer { base, len, mapped };
        if let Some(placement) = placement {
            placement.apply(base, mapped)?;
        }
        buffer.advise(options.huge_pages);
        if options.first_touch_threads > 0 {
            buffer.touch(options.first_touch_threads)?;
        }
        Ok(buffer)
    }

    /// Address of the first byte, a multiple of the page size.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Pointer to the first byte. Valid for [`len`](Self::len) bytes while the buffer lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn advise(&self, huge_pages: HugePages) {
        let advice = match huge_pages {
            HugePages::Auto if self.mapped >= HUGE_PAGE_THRESHOLD => Advice::LinuxHugepage,
            HugePages::Auto => return,
            HugePages::Off => Advice::LinuxNoHugepage,
        };
        // SAFETY: the range is exactly our own mapping, and both advices change the page size only, never the content.
        let outcome = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.mapped, advice) };
        if let Err(error) = outcome {
            // A kernel built without transparent huge pages says EINVAL; the memory is as good as before.
            tracing::debug!(%error, ?advice, bytes = self.mapped, "huge page advice refused");
        }
    }

    fn touch(&self, threads: usize) -> Result<(), HostMemoryError> {
        let granules = self.mapped.div_ceil(TOUCH_GRANULE);
        let threads = threads.min(usable_cpus()).min(granules);
        let share = granules.div_ceil(threads).saturating_mul(TOUCH_GRANULE);
        // Shares travel to the threads as plain addresses; the provenance was exposed by `addr`.
        let base = self.base.as_ptr().expose_provenance();
        let touch_share = |index: usize| -> Result<(), Errno> {
            let begin = index.saturating_mul(share).min(self.mapped);
            let end = begin.saturating_add(share).min(self.mapped);
            touch_pages(ptr::with_exposed_provenance_mut(base.wrapping_add(begin)), end - begin)
        };
        let outcome = std::thread::scope(|scope| {
            let mut helpers = Vec::new();
            let mut outcome = Ok(());
            for index in 1..threads {
                // A thread that cannot be started costs speed only: its share is done here.
                match std::thread::Builder::new().spawn_scoped(scope, move || touch_share(index)) {
                    Ok(handle) => helpers.push(handle),
                    Err(_) => outcome = outcome.and(touch_share(index)),
                }
            }
            outcome = outcome.and(touch_share(0));
            for helper in helpers {
                outcome = outcome.and(helper.join().unwrap_or(Err(Errno::FAULT)));
            }
            outcome
        });
        outcome.map_err(|e| HostMemoryError::Touch { bytes: self.len, errno: e.raw_os_error() })
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: `base` and `mapped` are what mmap returned and was asked for; this is the only unmapping, and every
        // user of the address must have finished before its owner is dropped (contract of `addr`).
        let outcome = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
        if let Err(error) = outcome {
            tracing::warn!(%error, bytes = self.mapped, "munmap failed, the mapping leaks");
        }
    }
}

/// Faults in `len` bytes from the page boundary `begin`, which lie in a fresh private mapping of ours.
fn touch_pages(begin: *mut u8, len: usize) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    loop {
        // SAFETY: the range lies in our own live mapping and starts on a page; populating changes no content.
        let outcome = unsafe { rustix::mm::madvise(begin.cast::<c_void>(), len, Advice::LinuxPopulateWrite) };
        match outcome {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            // Linux before 5.14 does not know the advice; a sandbox may filter it or be short of a resource.
            Err(Errno::INVAL | Errno::NOSYS | Errno::AGAIN) => break,
            Err(error) => return Err(error),
        }
    }
    write_each_page(begin, len);
    Ok(())
}

/// The same by one store per page, for kernels without the advice.
fn write_each_page(begin: *mut u8, len: usize) {
    for offset in (0..len).step_by(page_size()) {
        // SAFETY: `offset < len` stays inside our mapping; nobody else has its address yet, and zero is what the
        // fresh page holds. Volatile, because a plain store of zero could be dropped.
        unsafe { begin.wrapping_add(offset).write_volatile(0) };
    }
}

/// Size of a base page in bytes, a power of two.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::HostRegion;

    #[test]
    fn zero_and_absurd_sizes_are_refused() {
        assert_eq!(HostBuffer::new(0, HostOptions::default()).err(), Some(HostMemoryError::ZeroLength));
        let options = HostOptions { numa: NumaPolicy::Bind(0), ..HostOptions::default() };
        assert_eq!(HostBuffer::new(0, options).err(), Some(HostMemoryError::ZeroLength));
        let error = HostBuffer::new(usize::MAX, HostOptions::default()).unwrap_err();
        assert_eq!(error, HostMemoryError::TooLarge { bytes: usize::MAX });
        let bytes = 1_usize << 60;
        let error = HostBuffer::new(bytes, HostOptions::default()).unwrap_err();
        assert_eq!(error, HostMemoryError::Map { bytes, errno: Errno::NOMEM.raw_os_error() });
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    }

    #[test]
    fn every_option_gives_zeroed_writable_memory() {
        for len in [1, 4095, 4097, TOUCH_GRANULE + 1, HUGE_PAGE_THRESHOLD + 12_345] {
            for huge_pages in [HugePages::Auto, HugePages::Off] {
                for first_touch_threads in [0, 1, 3, usize::MAX] {
                    let options = HostOptions { huge_pages, first_touch_threads, ..HostOptions::default() };
                    let buffer = HostBuffer::new(len, options).unwrap();
                    assert_eq!(buffer.len(), len);
                    assert!(!buffer.is_empty());
                    assert_eq!(buffer.addr() % page_size() as u64, 0);
                    let (region, mut view) = (HostRegion::of_buffer(Arc::new(buffer)), vec![1; len]);
                    region.read(0, &mut view).unwrap();
                    assert!(view.iter().all(|&b| b == 0));
                    region.write(len as u64 - 1, &[7]).unwrap();
                }
            }
        }
    }

    #[test]
    fn first_touch_makes_pages_resident() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * page_size()
        };
        let before = resident();
        let len = 64 << 20;
        let options = HostOptions { first_touch_threads: 2, ..HostOptions::default() };
        let buffer = HostBuffer::new(len, options).unwrap();
        // Half is enough to tell touched from untouched while other tests come and go.
        assert!(resident() > before + len / 2);
        drop(buffer);

        let options = HostOptions { huge_pages: HugePages::Off, ..HostOptions::default() };
        let before = resident();
        let buffer = HostBuffer::new(len, options).unwrap();
        write_each_page(buffer.as_ptr(), len);
        assert!(resident() > before + len / 2);
    }
}
