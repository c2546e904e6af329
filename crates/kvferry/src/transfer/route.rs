//! Routes: everything about a transfer that does not depend on block ids.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use kvferry_cuda::DeviceIds;
use kvferry_layout::{Axis, BlockId, CopyPlan, LayoutError, PairPlan, PairRequest, find_overlap};

use super::choose::{Asked, Choice, GpuAsked, choose, strategy};
use super::completion::{TransferCompleteNotification, TransferResult};
use super::context::Shared;
use super::cuda::{BouncePair, CudaDevice, DeviceIdPair, Lowered};
use super::lock;
use super::options::{Dependency, TransferOptions};
use super::plan::{PlanSide, TransferPlan};
use super::strategy::{Engine, TransferStrategy};
use super::submit::Submission;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;

/// A prepared pair of layouts with options: submit as many id lists as you like.
#[derive(Clone)]
pub struct Route {
    pub(super) context: Arc<Shared>,
    pub(super) src: Arc<PhysicalLayout>,
    pub(super) dst: Arc<PhysicalLayout>,
    pub(super) prepared: Prepared,
    pub(super) strategy: TransferStrategy,
    pub(super) options: TransferOptions,
    /// The GPU that carries the copies; `None` for host memory.
    pub(super) device: Option<Arc<CudaDevice>>,
}

/// Block ids of one side.
#[derive(Clone, Debug)]
pub enum IdSource<'a> {
    /// In host memory, validated before anything is launched.
    Host(&'a [BlockId]),
    /// In device memory, read when the kernel runs: one out of range is skipped and fails the job.
    Device(DeviceIds),
}

/// The id-free part that a context keeps per layout pair.
#[derive(Clone)]
pub(super) struct Prepared {
    pub(super) pair: Arc<PairPlan>,
    may_overlap: bool,
    // Made by the first transfer that asks for its layers.
    layers: Arc<OnceLock<Vec<Arc<PairPlan>>>>,
    lowered: Arc<Mutex<Vec<Lowering>>>,
}

/// What engines made of a pair, or of one layer of it, for one GPU.
struct Lowering {
    ordinal: u32,
    layer: Option<u64>,
    direct: Option<Arc<Lowered>>,
    bounce: Option<Arc<BouncePair>>,
}

impl Prepared {
    pub(super) fn new(
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        options: &TransferOptions,
    ) -> Result<Prepared> {
        let pair = Arc::new(PairPlan::new(src.layout(), dst.layout(), &options.pair_request())?);
        let may_overlap = pair.may_overlap(src.spans(), dst.spans());
        Ok(Prepared { pair, may_overlap, layers: Arc::default(), lowered: Arc::default() })
    }

    /// The pair, layer by layer.
    pub(super) fn layers(
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

    fn lowering<T>(
        &self,
        ordinal: u32,
        layer: Option<u64>,
        make: impl FnOnce(&mut Lowering) -> Result<T>,
    ) -> Result<T> {
        let mut lowered = lock(&self.lowered);
        let found = lowered.iter().position(|kept| kept.ordinal == ordinal && kept.layer == layer);
        let index = found.unwrap_or_else(|| {
            lowered.push(Lowering { ordinal, layer, direct: None, bounce: None });
            lowered.len() - 1
        });
        make(&mut lowered[index])
    }

    /// Both sides as the GPU addresses them, for the whole pair or one layer of it.
    pub(super) fn lowered(
        &self,
        device: &CudaDevice,
        src: &PhysicalLayout,
        dst: &PhysicalLayout,
        layer: Option<u64>,
    ) -> Result<Arc<Lowered>> {
        self.lowering(device.gpu.ordinal(), layer, |kept| match &kept.direct {
            Some(direct) => Ok(direct.clone()),
            None => Ok(kept.direct.insert(Arc::new(Lowered::new(src, dst)?)).clone()),
        })
    }

    /// The two hops through the pinned ring, for the whole pair or one layer of it.
    pub(super) fn bounce(
        &self,
        device: &CudaDevice,
        pair: &PairPlan,
        (src, dst): (&PhysicalLayout, &PhysicalLayout),
        layer: Option<u64>,
        up: bool,
    ) -> Result<Arc<BouncePair>> {
        self.lowering(device.gpu.ordinal(), layer, |kept| match &kept.bounce {
            Some(bounce) => Ok(bounce.clone()),
            None => Ok(kept.bounce.insert(Arc::new(BouncePair::new(device, pair, (src, dst), up)?)).clone()),
        })
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
        if options.num_sms == Some(0) {
            let value = "0".to_owned();
            return Err(Error::InvalidOption { option: "num_sms", expected: "at least 1".to_owned(), value });
        }
        let device = match (strategy, &context.cuda) {
            (TransferStrategy::Memcpy, _) | (_, None) => None,
            (_, Some(cuda)) => Some(cuda.carrier(src.memory_kind(), dst.memory_kind(), options.stream)?),
        };
        Ok(Route { context, src: src.clone(), dst: dst.clone(), prepared, strategy, options, device })
    }

    /// Plans a copy without running it: ids are validated, nothing is moved.
    ///
    /// # Errors
    /// Ids out of range, given twice, or that do not pair up; source and destination bytes that overlap; an engine
    /// that cannot do it.
    pub fn plan(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferPlan> {
        let (plan, choice) = self.validate(src, dst, !self.options.after.is_empty(), None)?;
        let side = |layout: &PhysicalLayout| PlanSide::new(layout.layout().clone(), layout.memory_kind());
        Ok(TransferPlan::new(side(&self.src), side(&self.dst), plan, choice))
    }

    /// The gate: everything is checked here, before anything moves.
    fn validate(
        &self,
        src: &[BlockId],
        dst: &[BlockId],
        waits: bool,
        kernel_only: Option<&'static str>,
    ) -> Result<(CopyPlan, Choice)> {
        let plan = CopyPlan::new(self.prepared.pair.clone(), src, dst)?;
        if self.prepared.may_overlap {
            find_overlap(&plan, self.src.spans(), self.dst.spans())?;
        }
        let choice = self.choose(&plan, waits, kernel_only)?;
        Ok((plan, choice))
    }

    fn choose(&self, plan: &CopyPlan, waits: bool, kernel_only: Option<&'static str>) -> Result<Choice> {
        let gpu = self.device.as_ref().map(|device| GpuAsked {
            model: device.model().clone(),
            sm_count: device.gpu.sm_count(),
            stage_slot: device.stage_slot_bytes(),
            bounce_slot: device.bounce_slot_bytes(),
            kernel_only,
            held_up: device.stage_held_up(),
        });
        let asked = Asked { waits, threads: self.context.pool.threads(), gpu };
        let kinds = (self.src.memory_kind(), self.dst.memory_kind());
        choose(plan, kinds, self.strategy, &self.options, asked)
    }

    /// Validates, plans and submits. Never waits: copies run on the context's threads or on the GPU (a host copy of at
    /// most 32 KiB runs here and now, unless it has to follow another job). An empty list is a transfer of no bytes.
    ///
    /// # Errors
    /// As [`Route::plan`], and a context that is closed or was made before a fork; [`Error::Busy`] if too many long id
    /// lists are in flight; the driver's refusal of a launch. Nothing has moved then.
    pub fn submit(&self, src: &[BlockId], dst: &[BlockId]) -> Result<TransferCompleteNotification> {
        self.submit_after(IdSource::Host(src), IdSource::Host(dst), &[])
    }

    /// As [`submit`](Self::submit), after more than the route's options say, and with ids that may lie in device memory
    /// on either side. The kernel engine reads those when it runs, after whatever the transfer was ordered after; ids
    /// out of range are skipped and fail the job; that destinations are given once is the caller's promise.
    ///
    /// # Errors
    /// As [`submit`](Self::submit). For ids in device memory also: lists of different lengths; layouts whose page sizes
    /// differ or that share memory; an engine other than the kernel; a transfer by layer.
    pub fn submit_after(
        &self,
        src: IdSource<'_>,
        dst: IdSource<'_>,
        after: &[Dependency],
    ) -> Result<TransferCompleteNotification> {
        let submitted = Instant::now();
        self.context.fork.check()?;
        // An ordered context is locked for the whole submission: the queue is in the order of the locks.
        let mut line = self.context.order.as_ref().map(lock);
        let ahead = line
            .as_ref()
            .and_then(|line| line.get(&self.strategy))
            .filter(|job| job.peek().is_none())
            .cloned();
        let waits = ahead.is_some() || !self.options.after.is_empty() || !after.is_empty();
        let (plan, choice, ids) = match (src, dst) {
            (IdSource::Host(src), IdSource::Host(dst)) => {
                let (plan, choice) = self.validate(src, dst, waits, self.capturing()?)?;
                (plan, choice, None)
            }
            (src, dst) => {
                self.capturing()?;
                let ids = self.device_ids(src, dst)?;
                let plan = CopyPlan::new(self.prepared.pair.clone(), &[], &[])?;
                let reader = "the ids are in device memory, which a kernel reads";
                let choice = self.choose(&plan, false, Some(reader))?;
                (plan, choice, Some(ids))
            }
        };
        let job = Submission { route: self, choice, ahead, submitted, ids, after }.start(plan)?;
        if let Some(line) = line.as_mut()
            && !job.captured()
        {
            line.insert(self.strategy, job.clone());
        }
        Ok(job)
    }

    fn device_ids(&self, src: IdSource<'_>, dst: IdSource<'_>) -> Result<DeviceIdPair> {
        let refuse = |why: &str| {
            Err(Error::Unsupported { what: "block ids in device memory".to_owned(), why: why.to_owned() })
        };
        let Some(device) = &self.device else { return refuse("no GPU takes part in this transfer") };
        if self.prepared.pair.parts() != (1, 1) {
            return refuse("the page sizes differ: re-address one side with with_page_size");
        }
        if self.prepared.may_overlap {
            return refuse(
                "source and destination share memory, and ids there cannot be checked against overlap",
            );
        }
        if self.options.per_layer {
            return refuse("by layer they would be read once per layer, and might have changed");
        }
        let (src_blocks, dst_blocks) =
            (self.prepared.pair.src().extent(Axis::Block), self.prepared.pair.dst().extent(Axis::Block));
        let side = |ids, side, limit| match ids {
            IdSource::Device(ids) => Ok::<_, Error>(ids),
            IdSource::Host(ids) => {
                kvferry_layout::check_ids(side, ids, limit)?;
                let plain: Vec<u64> = ids.iter().map(|id| id.0.into()).collect();
                Ok(DeviceIds::upload(&device.gpu, &plain)?)
            }
        };
        let pair = DeviceIdPair {
            src: side(src, kvferry_layout::Side::Source, src_blocks)?,
            dst: side(dst, kvferry_layout::Side::Destination, dst_blocks)?,
        };
        let (a, b) = (pair.src.len(), pair.dst.len());
        if a != b {
            let page = self.prepared.pair.src().extent(Axis::Page);
            let error = kvferry_layout::PlanError::IdCount {
                src: a as usize,
                src_page: page,
                dst: b as usize,
                dst_page: page,
            };
            return Err(error.into());
        }
        Ok(pair)
    }

    /// Why only a kernel will do, if the caller's stream is being captured.
    fn capturing(&self) -> Result<Option<&'static str>> {
        let (Some(device), Some(stream)) = (&self.device, self.options.stream) else { return Ok(None) };
        let cx = device.gpu.enter()?;
        let status = device.gpu.capture_status(&cx, stream)?;
        if status == kvferry_cuda::Capture::None {
            return Ok(None);
        }
        let never_ends = |what: &str| {
            Err(Error::Unsupported {
                what: format!("{what} under capture"),
                why: "a captured transfer runs whenever its graph is launched, and never ends".to_owned(),
            })
        };
        if self.options.per_layer {
            return never_ends("a transfer by layer");
        }
        if self.options.tag.is_some() {
            return never_ends("a tag");
        }
        Ok(Some("the stream is being captured into a CUDA graph, which holds kernels only"))
    }

    /// What a transfer of so many source blocks will have done, for a handle that does not track it.
    pub(super) fn expected(&self, src_blocks: usize) -> TransferResult {
        let pair = &self.prepared.pair;
        let blocks = src_blocks as u64 * pair.parts().0;
        TransferResult {
            bytes: blocks * pair.block_bytes(),
            blocks,
            seconds: 0.0,
            engine: self.options.engine.unwrap_or(Engine::Kernel),
            strategy: self.strategy,
        }
    }
}
