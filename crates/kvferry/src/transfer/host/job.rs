//! A submitted host transfer: tasks to claim, a count of what is left, and the completion at the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::pool::Pool;
use super::task::Work;
use crate::error::Result;
use crate::transfer::completion::{Completion, Outcome, TransferFailure, TransferResult};
use crate::transfer::lock;
use crate::transfer::strategy::{Engine, TransferStrategy};

/// A job is *held* until its dependencies are complete, then any thread may claim its tasks. The thread that finishes
/// the last task completes it.
pub(crate) struct HostJob {
    // Taken at completion, so that a kept handle does not keep the layouts. Threads hold a clone only while they run a
    // task, so the one that completes the job drops the last.
    work: Mutex<Option<Arc<Work>>>,
    tasks: u64,
    next: AtomicU64,
    left: AtomicU64,
    holds: AtomicUsize,
    // A dependency failed: no task may run. Set before the last hold is released, read after it.
    doomed: AtomicBool,
    failure: Mutex<Option<TransferFailure>>,
    completion: Arc<Completion>,
    submitted: Instant,
    pool: Arc<Pool>,
}

impl HostJob {
    pub(crate) fn new(
        work: Work,
        pool: Arc<Pool>,
        holds: usize,
        submitted: Instant,
        completion: Arc<Completion>,
    ) -> Arc<HostJob> {
        let tasks = work.split.tasks();
        Arc::new(HostJob {
            work: Mutex::new(Some(Arc::new(work))),
            tasks,
            next: AtomicU64::new(0),
            left: AtomicU64::new(tasks),
            holds: AtomicUsize::new(holds),
            doomed: AtomicBool::new(false),
            failure: Mutex::new(None),
            completion,
            submitted,
            pool,
        })
    }

    pub(crate) fn completion(&self) -> &Arc<Completion> {
        &self.completion
    }

    pub(crate) const fn tasks(&self) -> u64 {
        self.tasks
    }

    pub(crate) fn check_fork(&self) -> Result<()> {
        self.pool.check_fork()
    }

    /// Takes one hold away; the last one starts the job. A failed dependency fails it whole.
    pub(crate) fn release(self: &Arc<Self>, dependency: Option<&Outcome>) {
        if let Some(Err(failure)) = dependency
            && !self.doomed.swap(true, Ordering::Relaxed)
        {
            let blocks = lock(&self.work).as_ref().map(|work| work.all_blocks()).unwrap_or_default();
            self.fail(failure.passed_on(), blocks);
        }
        if self.holds.fetch_sub(1, Ordering::AcqRel) == 1 {
            if self.tasks == 0 || self.doomed.load(Ordering::Relaxed) {
                self.finish();
            } else {
                self.pool.enqueue(self.clone());
            }
        }
    }

    /// Claims and runs tasks until none is left to claim, or the deadline passes; true if none is left. Does nothing
    /// while the job is held.
    pub(crate) fn help(&self, deadline: Option<Instant>) -> bool {
        // Acquire pairs with every release of a hold: what dependencies wrote, and `doomed`, are seen.
        if self.holds.load(Ordering::Acquire) > 0 || self.doomed.load(Ordering::Relaxed) {
            return false;
        }
        while deadline.is_none_or(|at| Instant::now() < at) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.tasks {
                return true;
            }
            self.run(index);
            // Release: the copies happen before whoever sees the job complete.
            if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.finish();
                return true;
            }
        }
        false
    }

    /// Runs a claimed task. The work is there: it is taken only when no task is left.
    fn run(&self, index: u64) {
        let Some(work) = lock(&self.work).clone() else { return };
        let task = work.split.task(index);
        let reason = match catch_unwind(AssertUnwindSafe(|| work.run(task))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "a copy task panicked".to_owned(),
        };
        self.fail(reason, work.blocks_of(task));
    }

    fn fail(&self, reason: String, blocks: Vec<u32>) {
        let mut failure = lock(&self.failure);
        let failure = failure.get_or_insert_with(|| TransferFailure {
            engine: Engine::Host,
            reason,
            failed_blocks: Vec::new(),
        });
        failure.failed_blocks.extend(blocks);
    }

    fn finish(&self) {
        let Some(work) = lock(&self.work).take() else { return };
        let failure = lock(&self.failure).take();
        let outcome = match failure {
            Some(mut failure) => {
                failure.failed_blocks.sort_unstable();
                failure.failed_blocks.dedup();
                Err(failure)
            }
            None => Ok(TransferResult {
                bytes: work.plan.bytes(),
                blocks: work.plan.blocks().into(),
                seconds: self.submitted.elapsed().as_secs_f64(),
                engine: Engine::Host,
                strategy: TransferStrategy::Memcpy,
            }),
        };
        // This may drop the last owner of foreign memory, whose code is not ours; the job ends all the same.
        if catch_unwind(AssertUnwindSafe(|| drop(work))).is_err() {
            tracing::error!("the owner of a layout's memory panicked when dropped");
        }
        // Whoever sees the job ended no longer finds it counted; whoever has closed the pool finds it ended.
        self.pool.leave(&self.completion);
        self.completion.finish(outcome, || self.pool.left());
    }
}

#[cfg(test)]
mod tests {
    use kvferry_host::{CopyHint, ForkGuard};
    use kvferry_layout::{BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, PairPlan, PairRequest};

    use super::super::split::Split;
    use super::*;
    use crate::{MemoryKind, PhysicalLayout};

    fn job(holds: usize) -> (Arc<HostJob>, Arc<PhysicalLayout>) {
        let cfg = LayoutConfig::builder().num_blocks(2).num_layers(1).page_size(1).inner_dim(8);
        let layout =
            Layout::fully_contiguous(cfg.dtype(Dtype::UInt8).build().unwrap(), KvOrder::Nhd).unwrap();
        let pair = Arc::new(PairPlan::new(&layout, &layout, &PairRequest::default()).unwrap());
        let ids = [BlockId(0), BlockId(1)];
        let plan = CopyPlan::new(pair, &ids, &ids).unwrap();
        let make = || PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
        let (src, dst) = (make(), make());
        src.fill(1).unwrap();
        let split = Split::new(&plan, 8);
        let work = Work { plan, src, dst: dst.clone(), split, hint: CopyHint::Temporal };
        let pool = Pool::new(1, ForkGuard::new());
        pool.admit(1, false).unwrap();
        (HostJob::new(work, pool, holds, Instant::now(), Completion::new(None)), dst)
    }

    fn moved(dst: &PhysicalLayout) -> bool {
        let mut bytes = [0; 8];
        dst.host_region(0).unwrap().read(0, &mut bytes).unwrap();
        bytes != [0; 8]
    }

    fn failed() -> Outcome {
        Err(TransferFailure { engine: Engine::Host, reason: "test".to_owned(), failed_blocks: vec![] })
    }

    #[test]
    fn a_job_is_not_helped_while_held_nor_once_doomed() {
        let (held, dst) = job(2);
        held.release(Some(&failed()));
        assert!(!held.help(None) && !moved(&dst) && !held.completion.is_over());
        // Between the last release of a hold and the end that it brings, a waiter may look.
        held.holds.store(0, Ordering::Release);
        assert!(!held.help(None) && !moved(&dst) && !held.completion.is_over());
        held.holds.store(1, Ordering::Release);
        held.release(None);
        assert!(held.completion.is_over() && !moved(&dst));
        assert_eq!(held.pool.in_flight(), 0);
    }

    #[test]
    fn a_job_that_fails_while_helped_ends_only_with_its_last_task() {
        // A waiter helps between the last hold and the queue, and a task of it fails: the releasing thread must not take
        // that for a failed dependency.
        let (job, _) = job(1);
        job.fail("test".to_owned(), vec![0]);
        job.release(None);
        assert!(!job.completion.is_over());
        assert!(job.help(None) && job.completion.is_over());
    }
}
