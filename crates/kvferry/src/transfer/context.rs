//! The transfer context: threads, prepared routes, and the front door.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvferry_host::ForkGuard;
use kvferry_layout::{BlockId, PairRequest};

use super::completion::{Ended, Outcome, TransferCompleteNotification};
use super::cuda::{Cuda, Limits};
use super::ending;
use super::host::Pool;
use super::lock;
use super::options::TransferOptions;
use super::plan::TransferPlan;
use super::route::{IdSource, Prepared, Route};
use super::strategy::TransferStrategy;
use crate::calibrate::CostModel;
use crate::error::{Error, Result};
use crate::physical::{Forget, PhysicalLayout};

/// Most copy threads a context starts unless told otherwise: more do not add memory bandwidth.
const MAX_DEFAULT_THREADS: usize = 16;

/// Copy threads of a context that was not told how many.
pub(super) fn default_threads() -> usize {
    kvferry_host::cpu::usable_cpus().clamp(1, MAX_DEFAULT_THREADS)
}

/// Most layout pairs whose plans a context keeps.
const MAX_PREPARED: usize = 256;
/// Device memory that a context may take beyond its layouts, unless told otherwise: with what the driver takes for kernels
/// and streams, 64 MiB.
const STAGING_BYTES: u64 = 50 << 20;
/// Pinned memory that a context may take beyond its layouts, unless told otherwise: with the pages that the driver keeps, 16 MiB.
const PINNED_BYTES: u64 = 14 << 20;
/// How long a callback that closes waits before it looks after GPU jobs again.
const SLICE: Duration = Duration::from_millis(1);
/// Least of either: below, the ring for long id lists has no room for a chunk.
const LEAST_BYTES: u64 = 1 << 20;

/// What routes and the context share.
pub(super) struct Shared {
    pub(super) pool: Arc<Pool>,
    /// The context's GPU; `None` in a context for host memory.
    pub(super) cuda: Option<Arc<Cuda>>,
    pub(super) fork: ForkGuard,
    /// The last job of each direction, in an ordered context.
    pub(super) order: Option<Mutex<HashMap<TransferStrategy, TransferCompleteNotification>>>,
    /// Tagged jobs that have ended and not been asked for.
    pub(super) completed: Ended,
}

impl Shared {
    /// Ends GPU jobs that the device is through with. In a forked child they are the parent's.
    fn poll(&self) {
        if let Some(cuda) = &self.cuda
            && self.fork.check().is_ok()
        {
            cuda.lanes.poll();
        }
    }

    /// Closes the pool, and sees to it that GPU jobs end meanwhile: a callback that closes may hold the very thread that
    /// would end them.
    fn close(&self, timeout: Option<Duration>) -> bool {
        self.pool.refuse();
        if let Some(cuda) = &self.cuda {
            cuda.lanes.attend_all();
        }
        if self.cuda.is_none() || !ending::in_callback() {
            return self.pool.close(timeout);
        }
        let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            self.poll();
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            if self.pool.close(Some(slice)) {
                return true;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
        }
    }
}

/// The plans of a context, by both layouts' numbers and the request. Forgotten when either layout goes: what engines
/// make of a pair keeps its memory.
#[derive(Default)]
struct Plans(Mutex<HashMap<(u64, u64, PairRequest), Prepared>>);

impl Forget for Plans {
    fn forget(&self, layout: u64) {
        let mut gone = Vec::new();
        lock(&self.0).retain(|(src, dst, _), prepared| {
            let stays = *src != layout && *dst != layout;
            if !stays {
                gone.push(prepared.clone());
            }
            stays
        });
        // Dropped without the lock: the last owner of foreign memory may run code that comes back here.
        drop(gone);
    }
}

/// Plans and runs transfers. Jobs of one context are unordered unless one is named in another's `after`, or the context
/// is [`ordered`](TransferContextBuilder::ordered).
pub struct TransferContext {
    shared: Arc<Shared>,
    prepared: Arc<Plans>,
}

/// Options of a context.
#[derive(Clone, Debug, Default)]
pub struct TransferContextBuilder {
    device: Option<u32>,
    threads: Option<usize>,
    ordered: bool,
    staging_bytes: Option<u64>,
    pinned_bytes: Option<u64>,
    cost_model: Option<CostModel>,
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

    /// Most device memory the context takes beyond its layouts, per GPU: the ring of the staged engine, and copies of
    /// long id lists. At least 1 MiB; default 50 MiB.
    #[must_use]
    pub const fn staging_bytes(mut self, bytes: u64) -> Self {
        self.staging_bytes = Some(bytes);
        self
    }

    /// Most pinned memory the context takes beyond its layouts, per GPU: the ring for pageable memory, and long id
    /// lists. At least 1 MiB; default 14 MiB.
    #[must_use]
    pub const fn pinned_bytes(mut self, bytes: u64) -> Self {
        self.pinned_bytes = Some(bytes);
        self
    }

    /// The constants by which GPU engines are chosen, instead of the calibrated or shipped ones.
    #[must_use]
    pub fn cost_model(mut self, model: CostModel) -> Self {
        self.cost_model = Some(model);
        self
    }

    /// Builds the context. Threads start with the first job that needs them. With a device, its kernels are loaded
    /// here, its streams made and its rings allocated, so that no transfer has to.
    ///
    /// # Errors
    /// A thread count outside 1 to 1024, less memory than said above; without a GPU, a driver of 580 or newer, or
    /// kernels in the build: [`Error::Cuda`].
    pub fn build(self) -> Result<TransferContext> {
        let threads = self.threads.unwrap_or_else(default_threads);
        if !(1..=1024).contains(&threads) {
            return Err(Error::InvalidOption {
                option: "threads",
                expected: "between 1 and 1024".to_owned(),
                value: threads.to_string(),
            });
        }
        let memory = |option, asked: Option<u64>, usual| match asked {
            Some(bytes) if !(LEAST_BYTES..=1 << 40).contains(&bytes) => Err(Error::InvalidOption {
                option,
                expected: "between 1 MiB and 1 TiB".to_owned(),
                value: bytes.to_string(),
            }),
            asked => Ok(asked.unwrap_or(usual)),
        };
        let limits = Limits {
            staging_bytes: memory("staging_bytes", self.staging_bytes, STAGING_BYTES)?,
            pinned_bytes: memory("pinned_bytes", self.pinned_bytes, PINNED_BYTES)?,
        };
        let cuda = self.device.map(|ordinal| Cuda::open(ordinal, limits, self.cost_model)).transpose()?;
        let fork = ForkGuard::new();
        let shared = Arc::new(Shared {
            pool: Pool::new(threads, fork),
            cuda: cuda.map(Arc::new),
            fork,
            order: self.ordered.then(Mutex::default),
            completed: Ended::default(),
        });
        Ok(TransferContext { shared, prepared: Arc::default() })
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

    /// The context's GPU, if it has one.
    pub fn device(&self) -> Option<u32> {
        self.shared.cuda.as_ref().map(|cuda| cuda.ordinal())
    }

    /// The constants by which GPU engines are chosen; `None` in a context for host memory.
    pub fn cost_model(&self) -> Option<CostModel> {
        let cuda = self.shared.cuda.as_ref()?;
        Some(CostModel::clone(cuda.device(cuda.ordinal()).ok()?.model()))
    }

    /// Jobs submitted and not yet complete; a transfer by layer counts as one job per layer.
    pub fn in_flight(&self) -> usize {
        self.shared.poll();
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

    /// As [`transfer`](Self::transfer), with ids that may lie in device memory: see [`Route::submit_after`].
    ///
    /// # Errors
    /// As [`TransferContext::route`] and [`Route::submit_after`].
    pub fn transfer_ids(
        &self,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        src_blocks: IdSource<'_>,
        dst_blocks: IdSource<'_>,
        options: &TransferOptions,
    ) -> Result<TransferCompleteNotification> {
        self.route(src, dst, options)?.submit_after(src_blocks, dst_blocks, &[])
    }

    fn prepare(
        &self,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<Prepared> {
        let key = (src.id(), dst.id(), options.pair_request());
        if let Some(prepared) = lock(&self.prepared.0).get(&key) {
            return Ok(prepared.clone());
        }
        let prepared = Prepared::new(src, dst, options)?;
        for layout in [src, dst] {
            let plans: Arc<dyn Forget> = self.prepared.clone();
            layout.tell_when_dropped(&plans);
        }
        let mut kept = lock(&self.prepared.0);
        // Plans are cheap to make again.
        let spilled = if kept.len() >= MAX_PREPARED { std::mem::take(&mut *kept) } else { HashMap::new() };
        kept.insert(key, prepared.clone());
        drop(kept);
        drop(spilled);
        Ok(prepared)
    }

    /// Tagged jobs that have ended since the last call, in order of their ends, with how they ended: a job whose handle
    /// says so is among them. Kept until asked for: a context whose jobs are tagged must be polled.
    pub fn completed(&self) -> Vec<(u64, Outcome)> {
        self.shared.poll();
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
        if self.shared.close(timeout) {
            if let Some(cuda) = &self.shared.cuda {
                cuda.lanes.stop(!ending::in_callback());
            }
            return Ok(());
        }
        Err(Error::Timeout { seconds: timeout.unwrap_or_default().as_secs_f64() })
    }
}

impl Drop for TransferContext {
    fn drop(&mut self) {
        if self.shared.fork.check().is_err() {
            self.shared.pool.abandon();
            if let Some(cuda) = &self.shared.cuda {
                cuda.lanes.abandon();
            }
            return;
        }
        self.shared.close(None);
        if let Some(cuda) = &self.shared.cuda {
            cuda.lanes.stop(!ending::in_callback());
        }
    }
}
