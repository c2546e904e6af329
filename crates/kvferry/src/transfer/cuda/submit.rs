//! Putting a job on its stream: dependencies, engine, flight, completion; now, or when what it waits for has ended.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvferry_cuda::{BadIdReport, Capture, ContextGuard, DeviceIds, Flight, Gpu, StreamHandle};
use kvferry_layout::CopyPlan;

use super::device::{Cuda, CudaDevice};
use super::engines::{Launch, Stopped};
use super::job::{Account, CudaJob};
use super::lanes::Ticket;
use super::lower::Lowered;
use crate::error::{Error, Result};
use crate::physical::PhysicalLayout;
use crate::transfer::choose::Choice;
use crate::transfer::completion::{
    Completion, Outcome, Pending, TransferCompleteNotification, TransferFailure, TransferResult,
};
use crate::transfer::host::Pool;
use crate::transfer::lock;
use crate::transfer::options::Dependency;
use crate::transfer::strategy::{Engine, TransferStrategy};

/// Ids on the device: source and destination, equally many.
#[derive(Clone, Debug)]
pub(crate) struct DeviceIdPair {
    pub(crate) src: DeviceIds,
    pub(crate) dst: DeviceIds,
}

/// What a submission has to do with what it follows, beyond what its stream waits for.
struct Order {
    /// Jobs that the host has to see the end of, and whether their failure is this one's.
    held: Vec<(TransferCompleteNotification, bool)>,
    /// A job it was to follow has failed already.
    doomed: Option<String>,
}

/// One GPU job to be submitted, validated and chosen for. Owns what it needs, as it may have to wait for its turn.
#[derive(Clone)]
pub(crate) struct CudaSubmission {
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) src: Arc<PhysicalLayout>,
    pub(crate) dst: Arc<PhysicalLayout>,
    pub(crate) plan: CopyPlan,
    pub(crate) lowered: Arc<Lowered>,
    pub(crate) choice: Choice,
    pub(crate) ids: Option<DeviceIdPair>,
    /// The caller's stream.
    pub(crate) stream: Option<StreamHandle>,
    /// The library's stream to use when there is none of the caller's; `None` is the next of its direction.
    pub(crate) library_stream: Option<StreamHandle>,
    pub(crate) after: Vec<Dependency>,
    /// The job that has to be before this one in an ordered context, however it ends.
    pub(crate) ahead: Option<TransferCompleteNotification>,
    pub(crate) ordered: bool,
    /// A part of a transfer of which something may have moved already.
    pub(crate) part: bool,
    pub(crate) submitted: Instant,
}

impl CudaSubmission {
    /// Submits an admitted job.
    ///
    /// # Errors
    /// Nothing has moved and nothing is on a stream.
    pub(crate) fn submit(self, completion: Arc<Completion>) -> Result<TransferCompleteNotification> {
        let stream = self.stream.or(self.library_stream);
        let stream = stream.unwrap_or_else(|| self.device.stream(self.choice.strategy, self.ordered));
        let gpu = self.device.gpu.clone();
        let cx = gpu.enter()?;
        let capturing = match self.stream {
            None => false,
            Some(stream) => match gpu.capture_status(&cx, stream)? {
                Capture::None => false,
                Capture::Active => true,
                Capture::Invalidated => {
                    return Err(Error::Unsupported {
                        what: "a transfer on this stream".to_owned(),
                        why: "its capture into a CUDA graph has failed and must be ended first".to_owned(),
                    });
                }
            },
        };
        let lane = self.cuda.lanes.reserve(&gpu, stream)?;
        // Later parts of a transfer that has begun must not be refused.
        if !capturing && !self.part {
            self.cuda.lanes.make_room(&lane)?;
        }
        let Order { held, doomed } = self.order(&cx, stream, capturing)?;
        if capturing {
            return self.capture(&cx, stream);
        }
        let job = CudaJob::held(gpu.clone(), completion, self.submitted, self.pool.clone(), lane);
        let handle = TransferCompleteNotification::of_cuda(job.clone());
        if let Some(reason) = doomed {
            let failed_blocks = destinations(&self.plan);
            job.ground(TransferFailure { engine: self.choice.engine, reason, failed_blocks });
            return Ok(handle);
        }
        if held.is_empty() {
            self.launch(&cx, stream, &job)?;
            return Ok(handle);
        }
        if self.stream.is_some() {
            return Err(Error::Unsupported {
                what: "stream= after a transfer that host threads take part in".to_owned(),
                why: "no stream can wait for it: wait for it first, or leave stream= out".to_owned(),
            });
        }
        drop(cx);
        Held::start(self, job, stream, held);
        Ok(handle)
    }

    /// Makes `stream` wait for what can be waited for there; gives what cannot.
    fn order(&self, cx: &ContextGuard<'_>, stream: StreamHandle, capturing: bool) -> Result<Order> {
        let gpu = &self.device.gpu;
        let mut doomed = None;
        let mut held = Vec::new();
        let mut waits = Vec::new();
        for dependency in &self.after {
            match dependency {
                Dependency::Job(job) if job.captured() && capturing => {}
                Dependency::Job(job) if job.captured() => {
                    return Err(Error::Unsupported {
                        what: "after= with a captured transfer".to_owned(),
                        why: "it runs whenever its graph is launched: name the stream of the launch"
                            .to_owned(),
                    });
                }
                Dependency::Job(job) if capturing => {
                    if !job.done() {
                        return Err(Error::Unsupported {
                            what: "after= with a pending transfer under capture".to_owned(),
                            why: "a graph cannot wait for work outside it: wait for it first".to_owned(),
                        });
                    }
                }
                Dependency::Job(job) => {
                    if let Some(Err(failure)) = job.peek() {
                        doomed.get_or_insert_with(|| failure.passed_on());
                    } else if !job.order(gpu, cx, stream)? {
                        held.push((job.clone(), true));
                    }
                }
                Dependency::Stream(earlier) | Dependency::StreamOf { stream: earlier, .. } => {
                    let owner = match dependency {
                        Dependency::StreamOf { ordinal, .. } if *ordinal != gpu.ordinal() => {
                            Some(Gpu::bystander(*ordinal)?)
                        }
                        Dependency::StreamOf { .. } => None,
                        _ => owner_of(gpu, cx, *earlier)?,
                    };
                    if *earlier == stream && owner.is_none() {
                        continue;
                    }
                    let own;
                    let cx_earlier = match &owner {
                        None => cx,
                        Some(other) => {
                            own = other.enter()?;
                            &own
                        }
                    };
                    let gpu_earlier = owner.as_ref().unwrap_or(gpu);
                    let status = gpu_earlier.capture_status(cx_earlier, *earlier)?;
                    if capturing && status != Capture::Active {
                        return Err(Error::Unsupported {
                            what: "after= with a stream outside the capture".to_owned(),
                            why: "a graph cannot wait for work outside it: order the streams before the capture".to_owned(),
                        });
                    }
                    if !capturing && status != Capture::None {
                        return Err(Error::Unsupported {
                            what: "a transfer after a stream that is being captured".to_owned(),
                            why: "give that stream as stream=, so that the transfer is captured with it"
                                .to_owned(),
                        });
                    }
                    let event = gpu_earlier.event(cx_earlier)?;
                    event.record(cx_earlier, *earlier)?;
                    // Its context is left again: ours is current for the wait.
                    waits.push(event);
                }
                Dependency::Event(event) => gpu.wait_foreign_event(cx, stream, *event)?,
            }
        }
        for event in &waits {
            gpu.wait_event(cx, stream, event)?;
        }
        if let Some(ahead) = &self.ahead
            && !capturing
            && !ahead.order(gpu, cx, stream)?
        {
            held.push((ahead.clone(), false));
        }
        Ok(Order { held, doomed })
    }

    fn start(&self, cx: &ContextGuard<'_>) -> Result<Flight> {
        let mut flight = Flight::new(&self.device.gpu, cx)?;
        flight.hold(self.src.clone());
        flight.hold(self.dst.clone());
        Ok(flight)
    }

    fn engine<'a>(&'a self, cx: &'a ContextGuard<'_>, stream: StreamHandle, capturing: bool) -> Launch<'a> {
        Launch {
            device: &self.device,
            lanes: &self.cuda.lanes,
            cx,
            plan: &self.plan,
            lowered: &self.lowered,
            strategy: self.choice.strategy,
            stream,
            foreign: self.stream.is_some(),
            uncertain: self.stream.is_some() || !self.after.is_empty() || self.ahead.is_some(),
            ordered: self.ordered,
            capturing,
            max_ctas: match self.choice.strategy {
                // The link between two GPUs, which only the model knows.
                TransferStrategy::CudaAsyncP2P => self.choice.max_ctas,
                _ => self.choice.num_sms.unwrap_or(u32::MAX),
            },
        }
    }

    /// Puts the transfer into the graph that `stream` is captured into.
    fn capture(&self, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<TransferCompleteNotification> {
        let mut flight = self.start(cx)?;
        let engine = self.engine(cx, stream, true);
        match &self.ids {
            Some(ids) => {
                // The report of a captured transfer is the graph's: nobody waits for the job that could look.
                let report = BadIdReport::new(&self.device.gpu)?;
                engine.by_device_ids((&ids.src, &ids.dst), &report, &mut flight)?;
            }
            None => engine.by_kernel(&mut flight).map_err(|stopped| stopped.error)?,
        }
        flight.capture(cx, stream)?;
        self.pool.withdraw();
        Ok(TransferCompleteNotification::new(Completion::new(None), Pending::Captured))
    }

    /// Runs the engine and lets the job fly. An error means that nothing has moved, and leaves the job as it was.
    fn launch(&self, cx: &ContextGuard<'_>, stream: StreamHandle, job: &Arc<CudaJob>) -> Result<()> {
        let mut flight = self.start(cx)?;
        let engine = self.engine(cx, stream, false);
        let mut report = None;
        let mut end = stream;
        let outcome = match (&self.ids, self.choice.engine) {
            (Some(ids), _) => self.device.reports.lend().map_err(Stopped::from).and_then(|told| {
                engine.by_device_ids((&ids.src, &ids.dst), told.report(), &mut flight)?;
                report = Some(told);
                Ok(())
            }),
            (None, Engine::Batch) => engine.by_batch(&mut flight),
            (None, Engine::Staged) => engine.by_stage(&mut flight).map(|stream| end = stream),
            (None, _) => engine.by_kernel(&mut flight),
        };
        let mut refused = None;
        if let Err(Stopped { blocks: done, begun, error }) = outcome {
            if !begun {
                // What little may be on a stream, such as a list of ids, is waited for elsewhere.
                flight.drop_later();
                return Err(error);
            }
            refused = Some((done, error.to_string()));
        }
        if let Err(error) = flight.land(cx, end) {
            // All is on its stream and nothing can tell the end: the job has failed, its memory is waited for elsewhere.
            flight.drop_later();
            let (reason, failed_blocks) = (error.to_string(), destinations(&self.plan));
            job.ground(TransferFailure { engine: self.choice.engine, reason, failed_blocks });
            return Ok(());
        }
        let ids = self.ids.as_ref().map(|ids| u64::from(ids.src.len()));
        let result = TransferResult {
            bytes: ids.map_or(self.plan.bytes(), |ids| ids * self.plan.pair().block_bytes()),
            blocks: ids.unwrap_or(self.plan.blocks().into()),
            seconds: 0.0,
            engine: self.choice.engine,
            strategy: self.choice.strategy,
        };
        let follows = self.after.iter().filter_map(|dependency| match dependency {
            Dependency::Job(job) => Some(job.clone()),
            Dependency::Stream(_) | Dependency::StreamOf { .. } | Dependency::Event(_) => None,
        });
        // A transfer by layer is its layers: whoever ends this job ends those first.
        let follows = follows.flat_map(|job| job.each()).collect();
        let expected = self.device.expect(self.choice.strategy, self.choice.seconds().unwrap_or(0.0));
        job.fly(flight, Account { result, plan: self.plan.clone(), refused, report, follows, expected });
        Ok(())
    }
}

/// The GPU whose stream it is, if that is another one than `gpu`: events are recorded in the stream's own context.
pub(crate) fn owner_of(gpu: &Gpu, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<Option<Arc<Gpu>>> {
    let ordinal = gpu.stream_device(cx, stream)?;
    Ok(if ordinal == gpu.ordinal() { None } else { Some(Gpu::bystander(ordinal)?) })
}

/// Destination ids of a plan, as the layout counts them. None are known of ids on the device.
pub(super) fn destinations(plan: &CopyPlan) -> Vec<u32> {
    let (_, parts) = plan.pair().parts();
    let parts = u32::try_from(parts).unwrap_or(u32::MAX);
    plan.segments().flat_map(|s| (s.dst..s.dst + s.count).map(move |id| id / parts)).collect()
}

/// An admitted job that has failed before it was put on a stream.
pub(crate) fn refused(
    cuda: &Cuda,
    device: &CudaDevice,
    pool: &Arc<Pool>,
    engine: Engine,
    plan: &CopyPlan,
    submitted: Instant,
    reason: String,
) -> TransferCompleteNotification {
    let lane = Ticket::none(&cuda.lanes);
    let job = CudaJob::held(device.gpu.clone(), Completion::new(None), submitted, pool.clone(), lane);
    let handle = TransferCompleteNotification::of_cuda(job.clone());
    job.ground(TransferFailure { engine, reason, failed_blocks: destinations(plan) });
    handle
}

/// A job of no bytes that ends when a stream or an event gets there: what host work can be made to follow. It names the
/// blocks of `plan` if it fails.
pub(crate) fn marker(
    cuda: &Cuda,
    device: &CudaDevice,
    pool: &Arc<Pool>,
    dependency: &Dependency,
    plan: &CopyPlan,
    submitted: Instant,
) -> Result<TransferCompleteNotification> {
    let (gpu, stream) = match dependency {
        Dependency::Job(job) => return Ok(job.clone()),
        Dependency::StreamOf { ordinal, stream } => (Gpu::bystander(*ordinal)?, *stream),
        Dependency::Stream(stream) => {
            let cx = device.gpu.enter()?;
            (owner_of(&device.gpu, &cx, *stream)?.unwrap_or_else(|| device.gpu.clone()), *stream)
        }
        Dependency::Event(_) => (device.gpu.clone(), device.stream(TransferStrategy::CudaAsyncD2D, false)),
    };
    let (gpu, cx) = (&gpu, gpu.enter()?);
    if let Dependency::Event(event) = dependency {
        gpu.wait_foreign_event(&cx, stream, *event)?;
    } else if gpu.capture_status(&cx, stream)? != Capture::None {
        return Err(Error::Unsupported {
            what: "host copies after a stream that is being captured".to_owned(),
            why: "a CUDA graph cannot hold them".to_owned(),
        });
    }
    let lane = cuda.lanes.reserve(gpu, stream)?;
    let mut flight = Flight::new(gpu, &cx)?;
    flight.land(&cx, stream)?;
    pool.admit_part();
    let job = CudaJob::held(gpu.clone(), Completion::part(), submitted, pool.clone(), lane);
    let strategy = TransferStrategy::CudaAsyncD2D;
    let result = TransferResult { bytes: 0, blocks: 0, seconds: 0.0, engine: Engine::Kernel, strategy };
    let expected = device.expect(strategy, 0.0);
    let (plan, refused, report, follows) = (plan.clone(), None, None, Vec::new());
    job.fly(flight, Account { result, plan, refused, report, follows, expected });
    Ok(TransferCompleteNotification::of_cuda(job))
}

/// A job that waits for host work before it can be put on its stream.
struct Held {
    submission: Mutex<Option<CudaSubmission>>,
    job: Arc<CudaJob>,
    stream: StreamHandle,
    left: AtomicUsize,
    failure: Mutex<Option<String>>,
}

impl Held {
    fn start(
        submission: CudaSubmission,
        job: Arc<CudaJob>,
        stream: StreamHandle,
        waits: Vec<(TransferCompleteNotification, bool)>,
    ) {
        let held = Arc::new(Held {
            submission: Mutex::new(Some(submission)),
            job,
            stream,
            // One for ourselves, so that the job cannot start while we still register.
            left: AtomicUsize::new(waits.len() + 1),
            failure: Mutex::new(None),
        });
        for (job, binding) in waits {
            let held = held.clone();
            job.on_complete_first(move |outcome| held.release(Some(outcome).filter(|_| binding)));
        }
        held.release(None);
    }

    fn release(&self, outcome: Option<&Outcome>) {
        if let Some(Err(failure)) = outcome {
            lock(&self.failure).get_or_insert_with(|| failure.passed_on());
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let Some(submission) = lock(&self.submission).take() else { return };
        let failed = |reason: String| {
            let mut failed_blocks = destinations(&submission.plan);
            failed_blocks.sort_unstable();
            failed_blocks.dedup();
            TransferFailure { engine: submission.choice.engine, reason, failed_blocks }
        };
        if let Some(reason) = lock(&self.failure).take() {
            return self.job.ground(failed(reason));
        }
        let gpu = submission.device.gpu.clone();
        let launched =
            gpu.enter().map_err(Error::from).and_then(|cx| submission.launch(&cx, self.stream, &self.job));
        if let Err(error) = launched {
            self.job.ground(failed(error.to_string()));
        }
    }
}
