//! One call of a route, after validation: the whole or layer by layer, by copy threads or on a GPU.

use std::sync::Arc;
use std::time::Instant;

use kvferry_cuda::StreamHandle;
use kvferry_layout::{Axis, CopyPlan};

use super::choose::{Choice, HostMode};
use super::completion::{Completion, Ended, Pending, TransferCompleteNotification, TransferResult};
use super::cuda::{Bounce, Cuda, CudaDevice, CudaSubmission, DeviceIdPair, marker, refused};
use super::host::{HostJob, Split, TASK_BYTES, Work};
use super::layers::gather;
use super::options::Dependency;
use super::route::Route;
use super::strategy::{Engine, TransferStrategy};
use crate::error::{Error, Result};

/// A validated call.
pub(super) struct Submission<'a> {
    pub(super) route: &'a Route,
    pub(super) choice: Choice,
    /// The job of an ordered context that has to end first, well or badly.
    pub(super) ahead: Option<TransferCompleteNotification>,
    pub(super) submitted: Instant,
    pub(super) ids: Option<DeviceIdPair>,
    /// What this call has to follow beyond what the route's options say.
    pub(super) after: &'a [Dependency],
}

/// A part of the call: its number if it is one layer, and the library's stream that all layers share.
type Layer = Option<(u64, StreamHandle)>;

impl Submission<'_> {
    pub(super) fn start(self, plan: CopyPlan) -> Result<TransferCompleteNotification> {
        tracing::debug!(
            strategy = self.choice.strategy.name(),
            blocks = self.ids.as_ref().map_or(plan.blocks(), |ids| ids.src.len()),
            bytes = plan.bytes(),
            run_bytes = plan.pair().run_bytes(),
            path = self.choice.engine.name(),
            inline = self.choice.host == HostMode::Inline,
            "transfer"
        );
        match (&self.route.context.cuda, &self.route.device) {
            (Some(cuda), Some(device)) => self.on_gpu(cuda, device, plan),
            _ => self.on_host(plan),
        }
    }

    /// Where the end of the whole is to be told.
    fn tag(&self) -> Option<(u64, Ended)> {
        self.route.options.tag.map(|tag| (tag, self.route.context.completed.clone()))
    }

    fn on_gpu(
        &self,
        cuda: &Arc<Cuda>,
        device: &Arc<CudaDevice>,
        plan: CopyPlan,
    ) -> Result<TransferCompleteNotification> {
        let pool = &self.route.context.pool;
        let threads = self.choice.engine == Engine::Bounce;
        let free = self.route.options.after.is_empty() && self.after.is_empty() && self.ahead.is_none();
        if plan.blocks() == 0 && self.ids.is_none() && free && self.plain() {
            // Nothing to do and nothing to wait for.
            let result = self.blank(&plan);
            pool.admit(1, false)?;
            let completion = Completion::new(self.tag());
            pool.leave(&completion);
            completion.finish(Ok(result), || pool.left());
            return Ok(TransferCompleteNotification::new(completion, Pending::Ended));
        }
        if !self.route.options.per_layer {
            pool.admit(1, threads)?;
            let tag = self.tag();
            return self.part(cuda, device, plan, None, tag).inspect_err(|_| pool.withdraw());
        }
        let layers = self.layers(&plan)?;
        let first = plan.pair().src().range(Axis::Layer).start;
        // On one stream, so that layers end in their order.
        let stream = device.stream(self.choice.strategy, true);
        pool.admit(layers.len(), threads)?;
        let mut parts: Vec<TransferCompleteNotification> = Vec::with_capacity(layers.len());
        let mut failed: Option<String> = None;
        let left = layers.len();
        let refuse = |plan: &CopyPlan, reason: &str| {
            refused(cuda, device, pool, self.choice.engine, plan, self.submitted, reason.to_owned())
        };
        for (layer, plan) in (first..).zip(layers) {
            // Once the driver has refused a layer, those after it are not tried.
            if let Some(reason) = &failed {
                parts.push(refuse(&plan, reason));
                continue;
            }
            match self.part(cuda, device, plan.clone(), Some((layer, stream)), None) {
                Ok(part) => parts.push(part),
                Err(error) if parts.is_empty() => {
                    (0..left).for_each(|_| pool.withdraw());
                    return Err(error);
                }
                Err(error) => {
                    let reason = error.to_string();
                    parts.push(refuse(&plan, &reason));
                    failed = Some(reason);
                }
            }
        }
        Ok(self.gather(&plan, parts))
    }

    /// One admitted job on a GPU. An error means that nothing of it has moved.
    fn part(
        &self,
        cuda: &Arc<Cuda>,
        device: &Arc<CudaDevice>,
        plan: CopyPlan,
        layer: Layer,
        tag: Option<(u64, Ended)>,
    ) -> Result<TransferCompleteNotification> {
        let Route { context, src, dst, prepared, options, .. } = self.route;
        let number = layer.map(|(number, _)| number);
        let (cuda, device, pool) = (cuda.clone(), device.clone(), context.pool.clone());
        let (src, dst, choice, submitted) = (src.clone(), dst.clone(), self.choice.clone(), self.submitted);
        if choice.engine == Engine::Bounce {
            let up = choice.strategy == TransferStrategy::CudaAsyncH2D;
            let pair = prepared.bounce(&device, plan.pair(), (&src, &dst), number, up)?;
            let waits = self.host_waits(&plan)?;
            let bounce = Bounce { cuda, device, pool, src, dst, plan, pair, choice, submitted };
            return Ok(bounce.submit(waits, tag));
        }
        let lowered = prepared.lowered(&device, &src, &dst, number)?;
        CudaSubmission {
            cuda,
            device,
            pool,
            src,
            dst,
            plan,
            lowered,
            choice,
            ids: self.ids.clone(),
            stream: options.stream,
            library_stream: layer.map(|(_, stream)| stream),
            after: options.after.iter().chain(self.after).cloned().collect(),
            ahead: self.ahead.clone(),
            ordered: context.order.is_some(),
            part: layer.is_some_and(|(number, _)| number > prepared.pair.src().range(Axis::Layer).start),
            submitted,
        }
        .submit(Completion::new(tag))
    }

    /// Jobs that the host has to see the end of, and whether their failure counts. Streams and events become jobs.
    fn host_waits(&self, plan: &CopyPlan) -> Result<Vec<(TransferCompleteNotification, bool)>> {
        let Route { context, device, options, .. } = self.route;
        let after = options.after.iter().chain(self.after);
        let job = |dependency: &Dependency| match (dependency, &context.cuda) {
            (Dependency::Job(job), _) if job.captured() => Err(Error::Unsupported {
                what: "after= with a captured transfer".to_owned(),
                why: "it runs whenever its graph is launched: name the stream of the launch".to_owned(),
            }),
            (Dependency::Job(job), _) => Ok(job.clone()),
            (dependency, Some(cuda)) => {
                let device = device.clone().map_or_else(|| cuda.device(cuda.ordinal()), Ok)?;
                marker(cuda, &device, &context.pool, dependency, plan, self.submitted)
            }
            (_, None) => Err(Error::Unsupported {
                what: "after= with a stream or an event in a context without a GPU".to_owned(),
                why: "give the context a device: TransferContext(device=0)".to_owned(),
            }),
        };
        let mut waits = after.map(|dependency| Ok((job(dependency)?, true))).collect::<Result<Vec<_>>>()?;
        waits.extend(self.ahead.clone().map(|ahead| (ahead, false)));
        Ok(waits)
    }

    fn on_host(&self, plan: CopyPlan) -> Result<TransferCompleteNotification> {
        let pool = &self.route.context.pool;
        // A job of no blocks has no task that could end it here: it ends by being released.
        let inline = self.choice.host == HostMode::Inline && plan.blocks() > 0;
        let threads = !inline && plan.blocks() > 0;
        if !self.route.options.per_layer {
            pool.admit(1, threads)?;
            let waits = self.host_waits(&plan).inspect_err(|_| pool.withdraw())?;
            return Ok(self.copies(plan, &waits, inline, self.tag()));
        }
        let layers = self.layers(&plan)?;
        let admitted = layers.len();
        pool.admit(admitted, threads)?;
        let waits = self.host_waits(&plan);
        let waits = waits.inspect_err(|_| (0..admitted).for_each(|_| pool.withdraw()))?;
        let parts = layers.into_iter().map(|layer| self.copies(layer, &waits, false, None)).collect();
        Ok(self.gather(&plan, parts))
    }

    /// One admitted job of copy threads.
    fn copies(
        &self,
        plan: CopyPlan,
        waits: &[(TransferCompleteNotification, bool)],
        inline: bool,
        tag: Option<(u64, Ended)>,
    ) -> TransferCompleteNotification {
        let Route { context, src, dst, .. } = self.route;
        let split = Split::new(&plan, TASK_BYTES);
        let work = Work { plan, src: src.clone(), dst: dst.clone(), split, hint: self.choice.hint };
        let completion = Completion::new(tag);
        if inline {
            let job = HostJob::new(work, context.pool.clone(), 0, self.submitted, completion);
            job.help(None);
            return TransferCompleteNotification::of_job(job);
        }
        // One hold per dependency and one for ourselves, so that the job cannot start while we still register.
        let job = HostJob::new(work, context.pool.clone(), waits.len() + 1, self.submitted, completion);
        for (dependency, binding) in waits {
            let (waiting, binding) = (job.clone(), *binding);
            dependency.on_complete_first(move |outcome| waiting.release(Some(outcome).filter(|_| binding)));
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

    /// No stream of the caller's, and not by layer.
    const fn plain(&self) -> bool {
        self.route.options.stream.is_none() && !self.route.options.per_layer
    }

    /// The result of having moved nothing yet.
    fn blank(&self, plan: &CopyPlan) -> TransferResult {
        TransferResult {
            bytes: 0,
            blocks: plan.blocks().into(),
            seconds: 0.0,
            engine: self.choice.engine,
            strategy: self.route.strategy,
        }
    }

    /// One handle for the jobs of all layers, lowest first.
    fn gather(
        &self,
        plan: &CopyPlan,
        parts: Vec<TransferCompleteNotification>,
    ) -> TransferCompleteNotification {
        let blank = self.blank(plan);
        let first = plan.pair().src().range(Axis::Layer).start;
        gather(first, parts, blank, self.submitted, self.tag())
    }
}
