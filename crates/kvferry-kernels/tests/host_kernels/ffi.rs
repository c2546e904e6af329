//! The C interface of `cuda/host/harness.cpp`.

use std::ffi::{CStr, c_char, c_int, c_void};

/// Order in which simulated threads and CTAs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Forward,
    Reversed,
    Random(u64),
}

/// How a body is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Thread after thread; no barriers, no polls.
    Loops,
    /// Fibers, with this many CTAs running at the same time.
    Fibers { resident: u32 },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) grid: u32,
    pub(crate) block: u32,
    pub(crate) shared: u32,
    pub(crate) order: Order,
    pub(crate) mode: Mode,
}

#[repr(C)]
struct RawLaunch {
    nblocks: u32,
    nthreads: u32,
    shared_bytes: u32,
    order: u32,
    mode: u32,
    resident: u32,
    seed: u64,
    max_idle_rounds: u64,
    enforce: u32,
    unused: u32,
}

pub(crate) const READ: u64 = 1;
pub(crate) const WRITE: u64 = 2;

#[repr(C)]
pub(crate) struct Region {
    pub(crate) base: *mut u8,
    pub(crate) len: u64,
    pub(crate) counters: *mut u8,
    pub(crate) access: u64,
}

/// What the monitor found; indices as in `cuda/host/monitor.hpp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Fault {
    Misaligned,
    LoadOutside,
    StoreOutside,
    DoubleStore,
    BarrierInLoop,
    BarrierDiverged,
    Stuck,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Report {
    counts: [u64; 7],
    first_address: u64,
    first_fault: u32,
    first_block: u32,
    first_thread: u32,
    unused: u32,
}

impl Report {
    pub(crate) fn count(&self, fault: Fault) -> u64 {
        self.counts[fault as usize]
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}

unsafe extern "C" {
    fn kvf_host_run(
        name: *const c_char,
        params: *const c_void,
        params_bytes: u64,
        launch: *const RawLaunch,
        regions: *const Region,
        region_count: u64,
        report: *mut Report,
    ) -> c_int;
    fn kvf_host_layout(name: *const c_char, field: *const c_char) -> u64;
    safe fn kvf_host_sanitized() -> c_int;
    fn kvf_host_guard(address: *const c_void, bytes: u64, forbid: c_int);
}

/// Runs a body. With `enforce` it touches nothing outside `regions`.
///
/// # Safety
/// Every region is valid for its access (and its counters for `len` bytes) during the call. Without `enforce`, so is
/// whatever the body reaches.
pub(crate) unsafe fn run(
    name: &CStr,
    params: &[u8],
    launch: Launch,
    regions: &[Region],
    enforce: bool,
) -> Report {
    let (order, seed) = match launch.order {
        Order::Forward => (0, 0),
        Order::Reversed => (1, 0),
        Order::Random(seed) => (2, seed),
    };
    let (mode, resident) = match launch.mode {
        Mode::Loops => (0, 1),
        Mode::Fibers { resident } => (1, resident),
    };
    let raw = RawLaunch {
        nblocks: launch.grid,
        nthreads: launch.block,
        shared_bytes: launch.shared,
        order,
        mode,
        resident,
        seed,
        max_idle_rounds: 100,
        enforce: enforce.into(),
        unused: 0,
    };
    let mut report = Report::default();
    // SAFETY: the pointers come from live references whose lengths are passed along; the caller answers for regions.
    let status = unsafe {
        kvf_host_run(
            name.as_ptr(),
            params.as_ptr().cast(),
            params.len() as u64,
            &raw const raw,
            regions.as_ptr(),
            regions.len() as u64,
            &raw mut report,
        )
    };
    assert_eq!(status, 0, "the harness refused {name:?} with {launch:?}");
    report
}

/// Size (`sizeof`), alignment (`alignof`) or offset of a field of a C++ struct.
pub(crate) fn layout(name: &CStr, field: &CStr) -> Option<usize> {
    // SAFETY: both are NUL-terminated strings that outlive the call, which only reads them.
    let value = unsafe { kvf_host_layout(name.as_ptr(), field.as_ptr()) };
    usize::try_from(value).ok().filter(|value| *value != usize::MAX)
}

pub(crate) fn raw_sizes() -> [usize; 3] {
    [size_of::<RawLaunch>(), size_of::<Region>(), size_of::<Report>()]
}

/// Whether the address sanitizer watches the bodies.
pub(crate) fn sanitized() -> bool {
    kvf_host_sanitized() != 0
}

/// Forbids sanitized code to touch the bytes, or allows it again.
pub(crate) fn guard(bytes: &mut [u8], forbid: bool) {
    // SAFETY: marks memory that is exclusively borrowed, without reading or writing it.
    unsafe { kvf_host_guard(bytes.as_ptr().cast(), bytes.len() as u64, forbid.into()) }
}
