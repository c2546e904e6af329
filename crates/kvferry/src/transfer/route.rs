//! Routes: everything about a transfer that does not depend on block ids.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvferry_layout::{Axis, BlockId, CopyPlan, LayoutError, PairPlan, PairRequest, find_overlap};

use super::choose::{Choice, HostMode, choose, strategy};
use super::completion::{Completion, Ended, TransferCompleteNotification, TransferResult};
use super::context::Shared;
use super::host::{HostJob, Split, TASK_BYTES, Work};
use super::layers::gather;
use super::lock;
use super::options::TransferOptions;
use super::plan::{PlanSide, TransferPlan};
use super::strategy::TransferStrategy;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// A prepared pair of layouts with options: submit as many id lists as you like.
#[derive(Clone)]
pub struct Route {
    context: Arc<Shared>,
    src: Arc<PhysicalLayout>,
    dst: Arc<PhysicalLayout>,
    prepared: Prepared,
    strategy: TransferStrategy,
    options: TransferOptions,
}

/// The id-free part that a context keeps per layout pair.
#[derive(Clone)]
pub(super) struct Prepared {
    pair: Arc<PairPlan>,
    may_overlap: bool,
    // Made by the first transfer that asks for its layers.
    layers: Arc<OnceLock<Vec<Arc<PairPlan>>>>,
}

impl Prepared {
    pub(super) fn new(
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<Prepared> {
        let pair = Arc::new(PairPlan::new(src.layout(), dst.layout(), &options.pair_request())?);
        let may_overlap = pair.may_overlap(src.spans(), dst.spans());
        Ok(Prepared { pair, may_overlap, layers: Arc::new(OnceLock::new()) })
    }

    /// The pair, layer by layer.
    fn layers(
        &self,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<&[Arc<PairPlan>]> {
        if let Some(made) = self.layers.get() {
            return Ok(made);
        }
        let one = |layer| {
            let request = PairRequest { layers: Some(layer..layer + 1), ..options.pair_request() };
            Ok(Arc::new(PairPlan::new(src.layout(), dst.layout(), &request)?))
        };
        let made = self.pair.src().range(Axis::Layer).map(one).collect::<Result<Vec<_>>>()?;
        Ok(self.layers.get_or_init(|| made))
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
        Ok(Route { context, src: src.clone(), dst: dst.clone(), prepared, strategy, options })
    }

    /// Plans a copy without running it: ids are validated, nothing is moved.
    ///
    /// # Errors
    /// Ids out of range, given twice, or that do not pair up; source and destination bytes that overlap; an engine
    /// that cannot do it.
    pub fn plan(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferPlan> {
        let (plan, choice) = self.validate(src, dst, !self.options.after.is_empty())?;
        let side = |layout: &PhysicalLayout| PlanSide::new(layout.layout().clone(), layout.memory_kind());
        Ok(TransferPlan::new(side(&self.src), side(&self.dst), plan, choice))
    }

    /// The gate: everything is checked here, before anything moves.
    fn validate(&self, src: &[BlockId], dst: &[BlockId], waits: bool) -> Result<(CopyPlan, Choice)> {
        let plan = CopyPlan::new(self.prepared.pair.clone(), src, dst)?;
        if self.prepared.may_overlap {
            find_overlap(&plan, self.src.spans(), self.dst.spans())?;
        }
        let choice = choose(&plan, self.strategy, &self.options, waits, self.context.pool.threads())?;
        Ok((plan, choice))
    }

    /// Validates, plans and submits. Never waits: copies run on the context's threads (a copy of at most 32 KiB runs
    /// here and now, unless it has to follow another job). An empty list is a transfer of no bytes.
    ///
    /// # Errors
    /// As [`Route::plan`], and a context that is closed or was made before a fork.
    pub fn submit(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferCompleteNotification> {
        let submitted = Instant::now();
        self.context.fork.check()?;
        // An ordered context is locked for the whole submission: the queue is in the order of the locks.
        let mut line = self.context.order.as_ref().map(lock);
        let ahead =
            line.as_ref().and_then(|line| line.get(&self.strategy)).filter(|job| !job.done()).cloned();
        let waits = ahead.is_some() || !self.options.after.is_empty();
        let (plan, choice) = self.validate(src, dst, waits)?;
        tracing::debug!(
            strategy = self.strategy.name(),
            blocks = plan.blocks(),
            bytes = plan.bytes(),
            run_bytes = plan.pair().run_bytes(),
            path = choice.engine.name(),
            inline = choice.host == HostMode::Inline,
            "transfer"
        );
        // A job of no blocks has no task that could end it here: it ends by being released.
        let inline = choice.host == HostMode::Inline && plan.blocks() > 0;
        let needs_threads = !inline && plan.blocks() > 0;
        let submission = Submission { route: self, choice: &choice, ahead, inline, submitted };
        let job = if self.options.per_layer {
            let layers = submission.layers(&plan)?;
            self.context.pool.admit(layers.len(), needs_threads)?;
            submission.gather(&plan, layers)
        } else {
            self.context.pool.admit(1, needs_threads)?;
            submission.one(plan, submission.tag())
        };
        if let Some(line) = line.as_mut() {
            line.insert(self.strategy, job.clone());
        }
        Ok(job)
    }
}

/// One call of [`Route::submit`], after validation.
struct Submission<'a> {
    route: &'a Route,
    choice: &'a Choice,
    /// The job of an ordered context that has to end first, well or badly.
    ahead: Option<TransferCompleteNotification>,
    inline: bool,
    submitted: Instant,
}

impl Submission<'_> {
    /// Where the end of the whole is to be told.
    fn tag(&self) -> Option<(u64, Ended)> {
        self.route.options.tag.map(|tag| (tag, self.route.context.completed.clone()))
    }

    /// Starts one admitted job.
    fn one(&self, plan: CopyPlan, tag: Option<(u64, Ended)>) -> TransferCompleteNotification {
        let Route { context, src, dst, options, .. } = self.route;
        let split = Split::new(&plan, TASK_BYTES);
        let work = Work { plan, src: src.clone(), dst: dst.clone(), split, hint: self.choice.hint };
        let completion = Completion::new(tag);
        if self.inline {
            let job = HostJob::new(work, context.pool.clone(), 0, self.submitted, completion);
            job.help(None);
            return TransferCompleteNotification::of_job(job);
        }
        // One hold per dependency and one for ourselves, so that the job cannot start while we still register.
        let holds = options.after.len() + usize::from(self.ahead.is_some()) + 1;
        let job = HostJob::new(work, context.pool.clone(), holds, self.submitted, completion);
        for dependency in &options.after {
            let waiting = job.clone();
            dependency.on_complete_first(move |outcome| waiting.release(Some(outcome)));
        }
        if let Some(ahead) = &self.ahead {
            let waiting = job.clone();
            ahead.on_complete_first(move |_| waiting.release(None));
        }
        job.release(None);
        TransferCompleteNotification::of_job(job)
    }

    /// The plan, cut into its layers.
    fn layers(&self, plan: &CopyPlan) -> Result<Vec<CopyPlan>> {
        let Route { prepared, src, dst, options, .. } = self.route;
        let mut layers: Vec<CopyPlan> = Vec::new();
        for pair in prepared.layers(src, dst, options)? {
            // Layers differ in where they start and in nothing else: their blocks are joined once.
            let layer = layers.last().unwrap_or(plan).along(pair.clone());
            layers.push(layer.ok_or_else(|| Error::Unsupported {
                what: "a transfer by layer".to_owned(),
                why: "its layers count blocks otherwise than the whole".to_owned(),
            })?);
        }
        Ok(layers)
    }

    /// Starts the admitted jobs of all layers, lowest first.
    fn gather(&self, plan: &CopyPlan, layers: Vec<CopyPlan>) -> TransferCompleteNotification {
        let blank = TransferResult {
            bytes: 0,
            blocks: plan.blocks().into(),
            seconds: 0.0,
            engine: self.choice.engine,
            strategy: self.route.strategy,
        };
        let first = plan.pair().src().range(Axis::Layer).start;
        let parts = layers.into_iter().map(|layer| self.one(layer, None)).collect();
        gather(first, parts, blank, self.submitted, self.tag())
    }
}
