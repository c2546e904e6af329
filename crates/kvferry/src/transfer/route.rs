//! Routes: everything about a transfer that does not depend on block ids.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvferry_host::CopyHint;
use kvferry_layout::{BlockId, CopyPlan, PairPlan, PlanStats, find_overlap};

use super::choose::{Choice, HostMode, choose, strategy};
use super::completion::{TransferCompleteNotification, TransferResult};
use super::context::Shared;
use super::host::{HostJob, Split};
use super::options::TransferOptions;
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
        let plan = CopyPlan::new(self.pair.clone(), src, dst)?;
        if self.may_overlap {
            find_overlap(&plan, self.src.spans(), self.dst.spans())?;
        }
        let choice = choose(&plan, self.strategy, &self.options, self.context.pool.threads())?;
        Ok(TransferPlan { src: self.src.clone(), dst: self.dst.clone(), plan, choice })
    }

    /// Validates, plans and submits. Never waits: copies run on the context's threads (a copy of at most 32 KiB runs
    /// here and now). An empty list is a completed transfer.
    ///
    /// # Errors
    /// As [`Route::plan`], and a context that is closed or was made before a fork.
    pub fn submit(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferCompleteNotification> {
        let submitted = Instant::now();
        self.context.fork.check()?;
        let TransferPlan { plan, choice, .. } = self.plan(src, dst)?;
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
        self.submit_host(plan, choice.host, submitted)
    }

    fn submit_host(
        &self,
        plan: CopyPlan,
        mode: HostMode,
        submitted: Instant,
    ) -> Result<TransferCompleteNotification> {
        let after = &self.options.after;
        let split = Split::new(&plan, super::host::TASK_BYTES);
        let work = super::host::Work {
            plan,
            src: self.src.clone(),
            dst: self.dst.clone(),
            split,
            hint: CopyHint::Temporal,
        };
        self.context.pool.admit(mode != HostMode::Inline)?;
        if mode == HostMode::Inline {
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

/// A validated plan with its engine: what `explain()` speaks of.
#[derive(Clone, Debug)]
pub struct TransferPlan {
    src: Arc<PhysicalLayout>,
    dst: Arc<PhysicalLayout>,
    plan: CopyPlan,
    choice: Choice,
}

impl TransferPlan {
    /// The copy plan.
    pub const fn plan(&self) -> &CopyPlan {
        &self.plan
    }

    /// The engine and why.
    pub const fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Counts.
    pub fn stats(&self) -> PlanStats {
        self.plan.stats()
    }

    /// What will be copied, in how many runs, by which engine and why, for people.
    pub fn explain(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TransferPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        let pair = self.plan.pair();
        let side = |layout: &PhysicalLayout| {
            let kind = layout.layout().kind();
            let order = kind.order().map(|order| format!(" {order}")).unwrap_or_default();
            format!("{}{order} ({})", kind.name(), layout.memory_kind())
        };
        writeln!(f, "{} -> {}", side(&self.src), side(&self.dst))?;
        writeln!(
            f,
            "blocks: {} of {} bytes, {} bytes in all",
            stats.blocks,
            pair.block_bytes(),
            stats.bytes
        )?;
        let order = |view: &kvferry_layout::View| {
            view.stride_order().into_iter().map(|axis| axis.name()).collect::<Vec<_>>().join(" ")
        };
        if pair.transforms() {
            writeln!(f, "order: {} -> {}, changed in flight", order(pair.src()), order(pair.dst()))?;
        } else {
            writeln!(f, "order: the same on both sides")?;
        }
        let lengths = if stats.shortest_run == stats.longest_run {
            format!("{} bytes each", stats.longest_run)
        } else {
            format!("{} to {} bytes", stats.shortest_run, stats.longest_run)
        };
        writeln!(f, "runs: {} copies merged into {}, {lengths}", stats.elementary_runs, stats.runs)?;
        for l in pair.loops() {
            let across = if l.within_regions() { "" } else { ", across regions" };
            writeln!(
                f,
                "  loop of {}: source steps {} bytes, destination {} bytes{across}",
                l.count, l.src_stride, l.dst_stride
            )?;
        }
        write!(f, "{}", self.choice)
    }
}
