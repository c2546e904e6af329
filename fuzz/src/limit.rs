//! An allocator that ends the process on one allocation larger than a target allows.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIMIT: AtomicUsize = AtomicUsize::new(64 << 20);

/// Largest single allocation from here on, in bytes; 64 MiB until set.
pub fn limit_allocations(bytes: usize) {
    LIMIT.store(bytes, Ordering::Relaxed);
}

/// The system allocator, but aborting beyond [`limit_allocations`].
pub struct LimitedAlloc;

fn check(bytes: usize) {
    if bytes > LIMIT.load(Ordering::Relaxed) {
        // Reporting allocates.
        limit_allocations(usize::MAX);
        eprintln!("a single allocation of {bytes} bytes\n{}", std::backtrace::Backtrace::force_capture());
        std::process::abort();
    }
}

// SAFETY: every call is passed on to the system allocator unchanged, or the process ends.
unsafe impl GlobalAlloc for LimitedAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        check(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        check(size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}
