//! The transfer context: threads, prepared routes, and the front door.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_host::ForkGuard;
use kvferry_layout::{BlockId, PairRequest};

use super::completion::{Ended, Outcome, TransferCompleteNotification};
use super::host::Pool;
use super::lock;
use super::options::TransferOptions;
use super::plan::TransferPlan;
use super::route::{Prepared, Route};
use super::strategy::TransferStrategy;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// Most copy threads a context starts unless told otherwise: more do not add memory bandwidth.
const MAX_DEFAULT_THREADS: usize = 16;

/// Copy threads of a context that was not told how many.
pub(super) fn default_threads() -> usize {
    kvferry_host::cpu::usable_cpus().clamp(1, MAX_DEFAULT_THREADS)
}

/// Most layout pairs whose plans a context keeps.
const MAX_PREPARED: usize = 256;

/// What routes and the context share.
pub(super) struct Shared {
    pub(super) pool: Arc<Pool>,
    pub(super) fork: ForkGuard,
    /// The last job of each direction, in an ordered context.
    pub(super) order: Option<Mutex<HashMap<TransferStrategy, TransferCompleteNotification>>>,
    /// Tagged jobs that have ended and not been asked for.
    pub(super) completed: Ended,
}

/// Plans and runs transfers. Jobs of one context are unordered unless one is named in another's `after`, or the context
/// is [`ordered`](TransferContextBuilder::ordered).
pub struct TransferContext {
    shared: Arc<Shared>,
    prepared: Mutex<HashMap<(u64, u64, PairRequest), Prepared>>,
}

/// Options of a context.
#[derive(Clone, Debug, Default)]
pub struct TransferContextBuilder {
    device: Option<u32>,
    threads: Option<usize>,
    ordered: bool,
}

impl TransferContextBuilder {
    /// Makes each direction first-in first-out: a job starts when the one submitted before it in the same direction
    /// has ended, well or badly.
    #[must_use]
    pub const fn ordered(mut self, ordered: bool) -> Self {
        self.ordered = ordered;
        self
    }

    /// The GPU to use; without one the context moves host memory only.
    #[must_use]
    pub const fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// Copy threads of the host engine; default: the usable CPUs, at most 16.
    #[must_use]
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Builds the context. Threads start with the first job that needs them.
    ///
    /// # Errors
    /// A thread count outside 1 to 1024; a device, until the CUDA engines are in.
    pub fn build(self) -> Result<TransferContext> {
        let threads = self.threads.unwrap_or_else(default_threads);
        if !(1..=1024).contains(&threads) {
            return Err(Error::InvalidOption {
                option: "threads",
                expected: "between 1 and 1024".to_owned(),
                value: threads.to_string(),
            });
        }
        if let Some(ordinal) = self.device {
            return Err(Error::Unsupported {
                what: format!("a transfer context on device {ordinal}"),
                why: "this build moves host memory; the CUDA engines are not in it".to_owned(),
            });
        }
        let fork = ForkGuard::new();
        let shared = Arc::new(Shared {
            pool: Pool::new(threads, fork),
            fork,
            order: self.ordered.then(Mutex::default),
            completed: Ended::default(),
        });
        Ok(TransferContext { shared, prepared: Mutex::new(HashMap::new()) })
    }
}

impl TransferContext {
    /// Starts a context's options.
    pub fn builder() -> TransferContextBuilder {
        TransferContextBuilder::default()
    }

    /// A context for host memory with default options.
    ///
    /// # Errors
    /// None today; see [`TransferContextBuilder::build`].
    pub fn host() -> Result<TransferContext> {
        TransferContext::builder().build()
    }

    /// Copy threads of the host engine.
    pub fn threads(&self) -> usize {
        self.shared.pool.threads()
    }

    /// Jobs submitted and not yet complete; a transfer by layer counts as one job per layer.
    pub fn in_flight(&self) -> usize {
        self.shared.pool.in_flight()
    }

    /// Prepares a pair of layouts for many transfers.
    ///
    /// # Errors
    /// Layouts that do not fit each other, ranges outside them, a read-only destination, a contradicting strategy, a
    /// context made before a fork.
    pub fn route(
        &self,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        options: &TransferOptions,
    ) -> Result<Route> {
        // Before any lock: in a forked child, a thread that is not there may hold it.
        self.shared.fork.check()?;
        let prepared = self.prepare(src, dst, options)?;
        Route::new(self.shared.clone(), src, dst, prepared, options.clone())
    }

    /// Plans a transfer without running it.
    ///
    /// # Errors
    /// As [`TransferContext::route`] and [`Route::plan`].
    pub fn plan(
        &self,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        src_blocks: &[BlockId],
        dst_blocks: &[BlockId],
        options: &TransferOptions,
    ) -> Result<TransferPlan> {
        self.route(src, dst, options)?.plan(src_blocks, dst_blocks)
    }

    /// Copies block `src_blocks[i]` of `src` to block `dst_blocks[i]` of `dst`, for every i, in whatever order.
    /// Returns at once; both layouts are kept alive until the job is complete. Two jobs that touch the same bytes, and of
    /// which none follows the other, race: the bytes are then unspecified.
    ///
    /// # Errors
    /// As [`TransferContext::route`] and [`Route::submit`]; nothing has moved then.
    pub fn transfer(
        &self,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        src_blocks: &[BlockId],
        dst_blocks: &[BlockId],
        options: &TransferOptions,
    ) -> Result<TransferCompleteNotification> {
        self.route(src, dst, options)?.submit(src_blocks, dst_blocks)
    }

    fn prepare(
        &self,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<Prepared> {
        let key = (src.id(), dst.id(), options.pair_request());
        if let Some(prepared) = lock(&self.prepared).get(&key) {
            return Ok(prepared.clone());
        }
        let prepared = Prepared::new(src, dst, options)?;
        let mut kept = lock(&self.prepared);
        if kept.len() >= MAX_PREPARED {
            // Plans are cheap to make again; what matters is that layouts made and dropped in a loop do not pile up.
            kept.clear();
        }
        kept.insert(key, prepared.clone());
        Ok(prepared)
    }

    /// Tagged jobs that have ended since the last call, in order of their ends, with how they ended: a job whose handle
    /// says so is among them. Kept until asked for: a context whose jobs are tagged must be polled.
    pub fn completed(&self) -> Vec<(u64, Outcome)> {
        let ended = std::mem::take(&mut *lock(&self.shared.completed));
        ended.into_iter().filter_map(|(tag, job)| Some((tag, job.look()?))).collect()
    }

    /// Refuses new jobs, waits for those in flight, helping with them, and stops the threads. Closing twice is fine, and
    /// so is closing in a completion callback; the threads then stop soon after.
    ///
    /// # Errors
    /// [`Error::Timeout`] if jobs were still in flight after `timeout`; they go on, and new ones stay refused.
    pub fn close(&self, timeout: Option<Duration>) -> Result<()> {
        self.shared.fork.check()?;
        if self.shared.pool.close(timeout) {
            return Ok(());
        }
        Err(Error::Timeout { seconds: timeout.unwrap_or_default().as_secs_f64() })
    }
}

impl Drop for TransferContext {
    fn drop(&mut self) {
        if self.shared.fork.check().is_err() {
            self.shared.pool.abandon();
            return;
        }
        self.shared.pool.close(None);
    }
}
