//! Pageable memory: copy threads between it and a pinned ring, a GPU engine between the ring and the device. Groups of
//! blocks follow one another through the slots of the ring, so that both halves work at the same time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvferry_host::CopyHint;
use kvferry_layout::{BlockId, CopyPlan, PairPlan, Side};

use super::device::{Cuda, CudaDevice};
use super::lower::Lowered;
use super::stage::{PinnedMemory, PinnedSlot, PinnedStage, SLOTS};
use super::submit::CudaSubmission;
use crate::calibrate::Work as Modelled;
use crate::error::Result;
use crate::physical::PhysicalLayout;
use crate::transfer::choose::Choice;
use crate::transfer::completion::{
    Completion, Ended, Outcome, Pending, TransferCompleteNotification, TransferFailure, TransferResult,
};
use crate::transfer::host::{HostJob, Pool, Split, TASK_BYTES, Work};
use crate::transfer::lock;
use crate::transfer::strategy::{Engine, TransferStrategy};

/// From so many copy threads on it pays to put slots out of the cores' caches before the GPU writes them again. Measured on
/// an H200's host, 11 MiB of slots: 18 to 44 GB/s with 16 threads, 24 to 37 with 8; fewer threads have enough to do with
/// copying (33 to 21 GB/s with 4).
const RELAYING_THREADS: usize = 8;

/// The two hops of a pair through the pinned ring; kept with the pair.
pub(crate) struct BouncePair {
    stage: Arc<PinnedStage>,
    /// Between pageable memory and the packed blocks of a slot.
    hop: Arc<PairPlan>,
    /// Between a slot and the device side.
    inner: Arc<PairPlan>,
    lowered: [Arc<Lowered>; SLOTS],
    /// Blocks per slot.
    group: usize,
}

impl BouncePair {
    /// A block is known to fit a slot.
    pub(crate) fn new(
        device: &CudaDevice,
        pair: &PairPlan,
        (src, dst): (&PhysicalLayout, &PhysicalLayout),
        up: bool,
    ) -> Result<BouncePair> {
        let stage = device.bounce().clone();
        let side = if up { Side::Source } else { Side::Destination };
        let group = (device.bounce_slot_bytes() / pair.block_bytes()).clamp(1, u64::from(u32::MAX));
        let (first, second) = pair.through_stage(side, group)?;
        let (hop, inner) = if up { (first, second) } else { (second, first) };
        let on_device = if up { dst } else { src };
        let of = |slot: &Arc<PinnedMemory>| Ok(Arc::new(Lowered::of_slot(&slot.memory, on_device, up)?));
        let made = stage.slots().iter().map(of).collect::<Result<Vec<_>>>()?;
        let mut made = made.into_iter();
        let mut next = || made.next().ok_or(crate::Error::Closed);
        let lowered = [next()?, next()?, next()?, next()?];
        Ok(BouncePair { stage, hop: Arc::new(hop), inner: Arc::new(inner), lowered, group: group as usize })
    }
}

/// One transfer of pageable memory.
pub(crate) struct Bounce {
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) src: Arc<PhysicalLayout>,
    pub(crate) dst: Arc<PhysicalLayout>,
    pub(crate) plan: CopyPlan,
    pub(crate) pair: Arc<BouncePair>,
    pub(crate) choice: Choice,
    pub(crate) submitted: Instant,
}

/// A bounce under way. Held by the calls that its groups wait for, so it lives until the last of them.
struct Flow {
    // Taken at the end, so that a kept handle does not keep the layouts.
    job: Mutex<Option<Arc<Bounce>>>,
    pairs: Vec<u64>,
    completion: Arc<Completion>,
    /// What it waits for before it starts.
    holds: AtomicUsize,
    /// Groups that have not ended.
    left: AtomicUsize,
    failure: Mutex<Option<TransferFailure>>,
}

impl Bounce {
    /// Starts an admitted job once `waits` have ended; whether each one's failure is this job's comes with it.
    pub(crate) fn submit(
        self,
        waits: Vec<(TransferCompleteNotification, bool)>,
        tag: Option<(u64, Ended)>,
    ) -> TransferCompleteNotification {
        let mut pairs = vec![0; self.plan.blocks() as usize];
        self.plan.pack(0, &mut pairs);
        let pool = self.pool.clone();
        let completion = Completion::new(tag);
        let flow = Arc::new(Flow {
            left: AtomicUsize::new(pairs.len().div_ceil(self.pair.group)),
            job: Mutex::new(Some(Arc::new(self))),
            pairs,
            completion: completion.clone(),
            holds: AtomicUsize::new(waits.len() + 1),
            failure: Mutex::new(None),
        });
        for (job, binding) in waits {
            let flow = flow.clone();
            job.on_complete_first(move |outcome| flow.release(Some(outcome).filter(|_| binding)));
        }
        flow.release(None);
        TransferCompleteNotification::new(completion, Pending::Parts(pool))
    }
}

impl Flow {
    fn job(&self) -> Option<Arc<Bounce>> {
        lock(&self.job).clone()
    }

    fn release(self: &Arc<Self>, outcome: Option<&Outcome>) {
        if let Some(Err(failure)) = outcome {
            self.fail(failure.passed_on(), &self.pairs);
        }
        if self.holds.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let groups = self.left.load(Ordering::Relaxed);
        let Some(job) = self.job().filter(|_| groups > 0 && lock(&self.failure).is_none()) else {
            return self.finish();
        };
        for group in 0..groups {
            let flow = self.clone();
            job.pair.stage.with_slot(move |slot| flow.start(group, slot));
        }
    }

    fn pairs_of(&self, job: &Bounce, group: usize) -> &[u64] {
        let first = group * job.pair.group;
        &self.pairs[first..self.pairs.len().min(first + job.pair.group)]
    }

    /// The first half of a group, which has a slot.
    fn start(self: &Arc<Self>, group: usize, slot: PinnedSlot) {
        let Some(job) = self.job() else { return };
        if lock(&self.failure).is_some() {
            self.fail(String::new(), self.pairs_of(&job, group));
            return self.end_group(slot);
        }
        let flow = self.clone();
        if job.up() {
            self.host_half(&job, group, slot, move |slot, job| {
                flow.gpu_half(&job, group, slot, Flow::end_group)
            });
        } else {
            self.gpu_half(&job, group, slot, move |flow, slot| {
                let Some(job) = flow.job() else { return };
                let done = flow.clone();
                flow.host_half(&job, group, slot, move |slot, _| done.end_group(slot));
            });
        }
    }

    /// Copy threads between pageable memory and the slot, then `next`.
    fn host_half(
        self: &Arc<Self>,
        job: &Arc<Bounce>,
        group: usize,
        slot: PinnedSlot,
        next: impl FnOnce(PinnedSlot, Arc<Bounce>) + Send + 'static,
    ) {
        let pairs = self.pairs_of(job, group);
        let stage = slot.memory().layout.clone();
        let (src, dst) = if job.up() { (job.src.clone(), stage) } else { (stage, job.dst.clone()) };
        let plan = match job.plan_of(&job.pair.hop, pairs) {
            Ok(plan) => plan,
            Err(error) => {
                self.fail(error.to_string(), pairs);
                return self.end_group(slot);
            }
        };
        let split = Split::new(&plan, TASK_BYTES);
        // The GPU reads a slot through PCIe, which finds it in the cache or not: streaming stores save the reads of lines
        // that are wholly written.
        let relays = !job.up() && job.pool.threads() >= RELAYING_THREADS;
        let hint = if relays { CopyHint::Relay } else { CopyHint::NonTemporal };
        let work = Work { plan, src, dst, split, hint };
        job.pool.admit_part();
        let copies = HostJob::new(work, job.pool.clone(), 1, job.submitted, Completion::part());
        let (flow, job) = (self.clone(), job.clone());
        TransferCompleteNotification::of_job(copies.clone()).on_complete_first(move |outcome| {
            if let Err(failure) = outcome {
                flow.fail(failure.reason.clone(), flow.pairs_of(&job, group));
                return flow.end_group(slot);
            }
            next(slot, job);
        });
        copies.release(None);
    }

    /// A GPU engine between the slot and the device, then `next`.
    fn gpu_half(
        self: &Arc<Self>,
        job: &Arc<Bounce>,
        group: usize,
        slot: PinnedSlot,
        next: impl FnOnce(&Arc<Flow>, PinnedSlot) + Send + 'static,
    ) {
        let pairs = self.pairs_of(job, group);
        job.pool.admit_part();
        let submitted = job.gpu_part(pairs, slot.memory());
        match submitted {
            Ok(part) => {
                let (flow, job) = (self.clone(), job.clone());
                part.observed();
                part.on_complete_first(move |outcome| {
                    if let Err(failure) = outcome {
                        flow.fail(failure.reason.clone(), flow.pairs_of(&job, group));
                        return flow.end_group(slot);
                    }
                    next(&flow, slot);
                });
            }
            Err(error) => {
                job.pool.left();
                self.fail(error.to_string(), pairs);
                self.end_group(slot);
            }
        }
    }

    /// The first reason counts; every block that has not arrived is named.
    fn fail(&self, reason: String, pairs: &[u64]) {
        let parts = self.job().map_or(1, |job| job.plan.pair().parts().1);
        let blocks = pairs.iter().map(|pair| u32::try_from((pair >> 32) / parts).unwrap_or(u32::MAX));
        let mut failure = lock(&self.failure);
        let failure = failure.get_or_insert_with(|| TransferFailure {
            engine: Engine::Bounce,
            reason,
            failed_blocks: Vec::new(),
        });
        failure.failed_blocks.extend(blocks);
    }

    fn end_group(self: &Arc<Self>, slot: PinnedSlot) {
        // Last first: the slot's next user may be of this job.
        let last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        drop(slot);
        if last {
            self.finish();
        }
    }

    fn finish(&self) {
        let Some(job) = lock(&self.job).take() else { return };
        let outcome = match lock(&self.failure).take() {
            Some(mut failure) => {
                failure.failed_blocks.sort_unstable();
                failure.failed_blocks.dedup();
                Err(failure)
            }
            None => Ok(TransferResult {
                bytes: job.plan.bytes(),
                blocks: job.plan.blocks().into(),
                seconds: job.submitted.elapsed().as_secs_f64(),
                engine: Engine::Bounce,
                strategy: job.choice.strategy,
            }),
        };
        let pool = job.pool.clone();
        drop(job);
        pool.leave(&self.completion);
        self.completion.finish(outcome, || pool.left());
    }
}

impl Bounce {
    fn up(&self) -> bool {
        self.choice.strategy == TransferStrategy::CudaAsyncH2D
    }

    /// The plan of one hop for a group: the ids of its layout, and slots from 0 up.
    fn plan_of(&self, hop: &Arc<PairPlan>, pairs: &[u64]) -> Result<CopyPlan> {
        let slots: Vec<BlockId> = (0..pairs.len() as u32).map(BlockId).collect();
        let src = || pairs.iter().map(|&pair| BlockId(pair as u32)).collect::<Vec<_>>();
        let dst = || pairs.iter().map(|&pair| BlockId((pair >> 32) as u32)).collect::<Vec<_>>();
        // The slot is the destination of the first hop and the source of the second.
        let first = Arc::ptr_eq(hop, &self.pair.hop) == self.up();
        Ok(if first {
            CopyPlan::new(hop.clone(), &src(), &slots)?
        } else {
            CopyPlan::new(hop.clone(), &slots, &dst())?
        })
    }

    fn gpu_part(&self, pairs: &[u64], slot: &PinnedMemory) -> Result<TransferCompleteNotification> {
        let plan = self.plan_of(&self.pair.inner, pairs)?;
        let segments = plan.num_segments().max(1) as u64;
        let run = plan.pair().run_bytes() * (u64::from(plan.blocks()) / segments).max(1);
        let work = Modelled { bytes: plan.bytes(), run, hop_run: 0, group: 0 };
        let model = self.device.model();
        let seconds = |engine| model.predict(engine, self.choice.strategy, &work).unwrap_or(f64::MAX);
        let engine =
            if seconds(Engine::Batch) <= seconds(Engine::Kernel) { Engine::Batch } else { Engine::Kernel };
        let stage = slot.layout.clone();
        let (src, dst) = if self.up() { (stage, self.dst.clone()) } else { (self.src.clone(), stage) };
        CudaSubmission {
            cuda: self.cuda.clone(),
            device: self.device.clone(),
            pool: self.pool.clone(),
            src,
            dst,
            plan,
            lowered: self.pair.lowered[slot.index].clone(),
            choice: self.choice.of_part(engine, work),
            ids: None,
            stream: None,
            // All on one, so that one thread hears of their ends.
            library_stream: Some(self.device.stream(self.choice.strategy, true)),
            after: Vec::new(),
            ahead: None,
            ordered: false,
            part: true,
            submitted: self.submitted,
        }
        .submit(Completion::part())
    }
}
