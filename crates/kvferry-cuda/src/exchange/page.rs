//! What host and kernels tell each other: a page of pinned memory that both see.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvferry_kernels::{HostPage, ProbeReport, Record};

use crate::error::Result;
use crate::gpu::Gpu;
use crate::memory::PinnedBuffer;

/// Bytes pinned: the page, then the reports of the probe.
const BYTES: usize = 4096;
/// Where the reports begin.
const REPORTS: usize = 1024;

/// The page of one rank. Every method is a handful of plain atomic accesses: no driver call, no lock, no allocation, so
/// any native thread may use it at any time, also while kernels spin.
#[derive(Debug)]
pub struct ExchangePage {
    memory: PinnedBuffer,
}

const _: () = assert!(size_of::<HostPage>() <= REPORTS);
const _: () = assert!(REPORTS + kvferry_kernels::MAX_RANKS * size_of::<ProbeReport>() <= BYTES);

impl ExchangePage {
    /// A page of zeroes: nothing aborted, no limit, no record.
    ///
    /// # Errors
    /// Those of [`PinnedBuffer::new`].
    pub fn new(gpu: &Gpu) -> Result<Arc<ExchangePage>> {
        let page = ExchangePage { memory: PinnedBuffer::new(BYTES, gpu.ordinal())? };
        for word in 0..BYTES / 8 {
            page.word(8 * word).store(0, Ordering::Relaxed);
        }
        Ok(Arc::new(page))
    }

    /// Address of the page for kernels.
    pub(super) fn device_addr(&self) -> u64 {
        self.memory.device_addr()
    }

    /// Address of the probe's reports for kernels.
    pub(super) fn reports_addr(&self) -> u64 {
        self.device_addr() + REPORTS as u64
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at < BYTES);
        let word = self.memory.as_ptr().wrapping_add(at.min(BYTES - 8));
        // SAFETY: inside the page-aligned allocation, which lives as long as `self`, at a multiple of 8 (all callers pass
        // field offsets or multiples). Host and device access the page by whole words only, the host through atomics.
        unsafe { AtomicU64::from_ptr(word.cast()) }
    }

    /// The word that ends all waiting, see [`abort_word`](kvferry_kernels::abort_word); 0 takes it back.
    pub fn set_abort(&self, word: u64) {
        self.word(offset_of!(HostPage, abort)).store(word, Ordering::Release);
    }

    /// Ends all waiting, unless that has been said before: the first word stays. True if this is the first.
    pub fn abort(&self, word: u64) -> bool {
        let at = self.word(offset_of!(HostPage, abort));
        at.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The abort word; 0 if there is none.
    pub fn aborted(&self) -> u64 {
        self.word(offset_of!(HostPage, abort)).load(Ordering::Acquire)
    }

    /// Bounds every wait of kernels from now on, running ones too. Zero counts as the shortest.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanoseconds = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.word(offset_of!(HostPage, timeout_ns)).store(nanoseconds, Ordering::Release);
    }

    /// What a kernel recorded.
    pub fn record(&self) -> Option<Record> {
        let field = |at: usize| self.word(offset_of!(HostPage, record) + at);
        let state = field(offset_of!(Record, state)).load(Ordering::Acquire);
        if state == 0 {
            return None;
        }
        // The kernel stored the state last, with release.
        let read = |at: usize| field(at).load(Ordering::Relaxed);
        Some(Record {
            state,
            kind: read(offset_of!(Record, kind)),
            peer: read(offset_of!(Record, peer)),
            epoch: read(offset_of!(Record, epoch)),
            op: read(offset_of!(Record, op)),
            seen: read(offset_of!(Record, seen)),
            expected: read(offset_of!(Record, expected)),
            value: read(offset_of!(Record, value)),
        })
    }

    /// Forgets abort word and record. No kernel of the rank may be running.
    pub fn clear(&self) {
        let record = offset_of!(HostPage, record);
        for at in (record..record + size_of::<Record>()).step_by(8) {
            self.word(at).store(0, Ordering::Relaxed);
        }
        self.set_abort(0);
    }

    /// What the probe found about the rank `peer`, once it has ended.
    pub fn report(&self, peer: usize) -> ProbeReport {
        let at = REPORTS + peer.min(kvferry_kernels::MAX_RANKS - 1) * size_of::<ProbeReport>();
        let read = |field: usize| self.word(at + field).load(Ordering::Acquire);
        ProbeReport {
            state: read(offset_of!(ProbeReport, state)),
            value: read(offset_of!(ProbeReport, value)),
        }
    }
}
