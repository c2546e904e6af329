//! Routes: everything about a transfer that does not depend on block ids.

use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::{BlockId, CopyPlan, LayoutError, PairPlan, find_overlap};

use super::choose::{Choice, HostMode, choose, strategy};
use super::completion::{TransferCompleteNotification, TransferResult};
use super::context::Shared;
use super::host::{HostJob, Split};
use super::options::TransferOptions;
use super::plan::{PlanSide, TransferPlan};
use super::strategy::TransferStrategy;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// A prepared pair of layouts with options: submit as many id lists as you like.
#[derive(Clone)]
pub struct Route {
    pub(super) context: Arc<Shared>,
    pub(super) src: Arc<PhysicalLayout>,
    pub(super) dst: Arc<PhysicalLayout>,
    pub(super) pair: Arc<PairPlan>,
    pub(super) may_overlap: bool,
    pub(super) strategy: TransferStrategy,
    pub(super) options: TransferOptions,
}

/// The id-free part that a context keeps per layout pair.
#[derive(Clone)]
pub(super) struct Prepared {
    pub(super) pair: Arc<PairPlan>,
    pub(super) may_overlap: bool,
}

impl Prepared {
    pub(super) fn new(
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<Prepared> {
        let pair = Arc::new(PairPlan::new(src.layout(), dst.layout(), &options.pair_request())?);
        let may_overlap = pair.may_overlap(src.spans(), dst.spans());
        Ok(Prepared { pair, may_overlap })
    }
}

impl Route {
    pub(super) fn new(
        context: Arc<Shared>,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        prepared: Prepared,
        options: TransferOptions,
    ) -> Result<Route> {
        let strategy = strategy(src.memory_kind(), dst.memory_kind(), options.strategy)?;
        if let Some(region) = dst.read_only_region() {
            return Err(Error::ReadOnlyDestination { region });
        }
        if let Some((first, second)) = dst.aliased_regions() {
            return Err(LayoutError::RegionsAlias { first, second }.into());
        }
        Ok(Route {
            context,
            src: src.clone(),
            dst: dst.clone(),
            pair: prepared.pair,
            may_overlap: prepared.may_overlap,
            strategy,
            options,
        })
    }

    /// Plans a copy without running it: ids are validated, nothing is moved.
    ///
    /// # Errors
    /// Ids out of range, given twice, or that do not pair up; source and destination bytes that overlap; an engine
    /// that cannot do it.
    pub fn plan(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferPlan> {
        let (plan, choice) = self.validate(src, dst)?;
        let side = |layout: &PhysicalLayout| PlanSide::new(layout.layout().clone(), layout.memory_kind());
        Ok(TransferPlan::new(side(&self.src), side(&self.dst), plan, choice))
    }

    /// The gate: everything is checked here, before anything moves.
    fn validate(&self, src: &[BlockId], dst: &[BlockId]) -> Result<(CopyPlan, Choice)> {
        let plan = CopyPlan::new(self.pair.clone(), src, dst)?;
        if self.may_overlap {
            find_overlap(&plan, self.src.spans(), self.dst.spans())?;
        }
        let choice = choose(&plan, self.strategy, &self.options, self.context.pool.threads())?;
        Ok((plan, choice))
    }

    /// Validates, plans and submits. Never waits: copies run on the context's threads (a copy of at most 32 KiB runs
    /// here and now). An empty list is a completed transfer.
    ///
    /// # Errors
    /// As [`Route::plan`], and a context that is closed or was made before a fork.
    pub fn submit(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferCompleteNotification> {
        let submitted = Instant::now();
        self.context.fork.check()?;
        let (plan, choice) = self.validate(src, dst)?;
        tracing::debug!(
            strategy = self.strategy.name(),
            blocks = plan.blocks(),
            bytes = plan.bytes(),
            run_bytes = plan.pair().run_bytes(),
            path = choice.engine.name(),
            inline = choice.host == HostMode::Inline,
            "transfer"
        );
        if plan.blocks() == 0 && self.options.after.is_empty() {
            self.context.pool.admit(false)?;
            self.context.pool.leave();
            self.context.pool.left();
            return Ok(TransferCompleteNotification::ready(Ok(TransferResult {
                bytes: 0,
                blocks: 0,
                seconds: submitted.elapsed().as_secs_f64(),
                engine: choice.engine,
                strategy: self.strategy,
            })));
        }
        self.submit_host(plan, &choice, submitted)
    }

    fn submit_host(
        &self,
        plan: CopyPlan,
        choice: &Choice,
        submitted: Instant,
    ) -> Result<TransferCompleteNotification> {
        let after = &self.options.after;
        let split = Split::new(&plan, super::host::TASK_BYTES);
        let work = super::host::Work {
            plan,
            src: self.src.clone(),
            dst: self.dst.clone(),
            split,
            hint: choice.hint,
        };
        self.context.pool.admit(choice.host != HostMode::Inline)?;
        if choice.host == HostMode::Inline {
            let job = HostJob::new(work, self.context.pool.clone(), 0, submitted);
            job.help(None);
            return Ok(TransferCompleteNotification::new(job.completion().clone(), None));
        }
        // One hold per dependency and one for ourselves, so that the job cannot start while we still register.
        let job = HostJob::new(work, self.context.pool.clone(), after.len() + 1, submitted);
        for dependency in after {
            let waiting = job.clone();
            dependency.on_complete_first(move |outcome| waiting.release(Some(outcome)));
        }
        job.release(None);
        Ok(TransferCompleteNotification::new(job.completion().clone(), Some(job)))
    }
}
