//! Memory for a host run: one allocation in which only opened ranges may be touched.

use std::ffi::CStr;
use std::ops::Range;

use crate::ffi::{self, Launch, READ, Region, Report, WRITE};

/// What a run may do with an opened range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// Stored bytes are counted.
    Write,
    /// Flags: read and stored as often as the body likes.
    Shared,
}

/// Bytes at a 16-byte boundary, all closed at first.
pub(crate) struct Arena {
    words: Vec<u128>,
    counters: Vec<u8>,
    open: Vec<(Range<usize>, Access)>,
}

impl Arena {
    pub(crate) fn new(bytes: usize, fill: u8) -> Self {
        let words = bytes.div_ceil(16).max(1);
        Self {
            words: vec![u128::from_ne_bytes([fill; 16]); words],
            counters: vec![0; words * 16],
            open: Vec::new(),
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        zerocopy::IntoBytes::as_bytes(self.words.as_slice())
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        zerocopy::IntoBytes::as_mut_bytes(self.words.as_mut_slice())
    }

    pub(crate) fn address(&self, offset: usize) -> u64 {
        (self.bytes().as_ptr().addr() + offset) as u64
    }

    /// How often each byte was stored by runs so far.
    pub(crate) fn counters(&self) -> &[u8] {
        &self.counters
    }

    pub(crate) fn open(&mut self, range: Range<usize>, access: Access) {
        assert!(range.end <= self.counters.len());
        if !range.is_empty() {
            self.open.push((range, access));
        }
    }

    fn regions(&mut self, into: &mut Vec<Region>) {
        ffi::guard(self.bytes_mut(), true);
        for (range, access) in self.open.clone() {
            ffi::guard(&mut self.bytes_mut()[range.clone()], false);
            let counters = match access {
                Access::Write => self.counters[range.clone()].as_mut_ptr(),
                Access::Read | Access::Shared => std::ptr::null_mut(),
            };
            let access = match access {
                Access::Read => READ,
                Access::Write => WRITE,
                Access::Shared => READ | WRITE,
            };
            let base = self.bytes_mut().as_mut_ptr().wrapping_add(range.start);
            into.push(Region { base, len: range.len() as u64, counters, access });
        }
    }

    fn unguard(&mut self) {
        ffi::guard(self.bytes_mut(), false);
    }
}

/// Runs a body that may touch what is open in `arenas`, and nothing else.
pub(crate) fn run(body: &CStr, params: &[u8], launch: Launch, arenas: &mut [&mut Arena]) -> Report {
    let regions = regions(arenas);
    // SAFETY: the regions lie in arenas that are exclusively borrowed until the call returns, within their bounds.
    let report = unsafe { ffi::run(body, params, launch, &regions, true) };
    for arena in arenas {
        arena.unguard();
    }
    report
}

/// As [`run`], but what goes outside is left to the sanitizer.
///
/// # Safety
/// Call it only where the sanitizer ends the process at the first wrong access.
pub(crate) unsafe fn run_unchecked(body: &CStr, params: &[u8], launch: Launch, arenas: &mut [&mut Arena]) {
    let regions = regions(arenas);
    // SAFETY: as above; an access outside ends the process, as the caller promises.
    unsafe { ffi::run(body, params, launch, &regions, false) };
}

fn regions(arenas: &mut [&mut Arena]) -> Vec<Region> {
    let mut regions = Vec::new();
    for arena in arenas {
        arena.regions(&mut regions);
    }
    regions
}
