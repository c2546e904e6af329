//! Completion: one handle for waiting, polling, awaiting and calling back.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvferry_host::Event;

use kvferry_cuda::{ContextGuard, Gpu, StreamHandle};

use super::cuda::{CudaJob, owner_of};
use super::ending::{self, Registered};
use super::host::{HostJob, Pool};
use super::layers::Layers;
use super::lock;
use super::strategy::{Engine, TransferStrategy};
use crate::error::{Error, Result};

/// How the reason of a job begins that failed because another had.
const FOLLOWED: &str = "a transfer it was to follow failed: ";

/// What a finished transfer did.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferResult {
    /// Payload bytes moved.
    pub bytes: u64,
    /// Blocks moved (of the finer page).
    pub blocks: u64,
    /// From submission to the last byte.
    pub seconds: f64,
    /// Engine that moved them.
    pub engine: Engine,
    /// Direction.
    pub strategy: TransferStrategy,
}

/// A transfer that failed. No block it names counts as moved, whatever its bytes look like.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{engine} transfer failed: {reason}; {} destination block(s) must be taken as not moved: {}", failed_blocks.len(), shown(failed_blocks))]
pub struct TransferFailure {
    /// Engine that failed.
    pub engine: Engine,
    /// What went wrong.
    pub reason: String,
    /// Ids of the destination layout that were not moved, or not wholly.
    pub failed_blocks: Vec<u32>,
}

impl TransferFailure {
    /// The reason of a job that was to follow the failed one. The first cause only: reasons must not grow along a chain.
    pub(crate) fn passed_on(&self) -> String {
        let cause = self.reason.strip_prefix(FOLLOWED).unwrap_or(&self.reason);
        format!("{FOLLOWED}{cause}")
    }
}

fn shown(ids: &[u32]) -> String {
    const MOST: usize = 8;
    let listed = ids.iter().take(MOST).map(u32::to_string).collect::<Vec<_>>().join(", ");
    if ids.len() > MOST { format!("{listed}, …") } else { listed }
}

/// How a job ended.
pub type Outcome = std::result::Result<TransferResult, TransferFailure>;

/// Tagged jobs that have ended and not been asked for, in the order of their ends.
pub(crate) type Ended = Arc<Mutex<Vec<(u64, Arc<Completion>)>>>;

/// Shared between a job and its handles.
pub(crate) struct Completion {
    event: Event,
    // Where the end of a tagged job is told; taken at the end.
    tag: Mutex<Option<(u64, Ended)>>,
    outcome: OnceLock<Outcome>,
    // `None` once ended: what is registered later runs at once.
    registered: Mutex<Option<Registered>>,
    observed: AtomicBool,
    /// Of a part of a job: not counted as one itself.
    part: bool,
}

impl Completion {
    pub(crate) fn new(tag: Option<(u64, Ended)>) -> Arc<Completion> {
        Completion::of(tag, false)
    }

    /// Of a job that is a part of another, or that others are made to follow.
    pub(crate) fn part() -> Arc<Completion> {
        Completion::of(None, true)
    }

    /// Whether it is of a part.
    pub(crate) const fn is_part(&self) -> bool {
        self.part
    }

    fn of(tag: Option<(u64, Ended)>, part: bool) -> Arc<Completion> {
        Arc::new(Completion {
            event: Event::new(),
            tag: Mutex::new(tag),
            outcome: OnceLock::new(),
            registered: Mutex::new(Some(Registered::default())),
            observed: AtomicBool::new(false),
            part,
        })
    }

    /// Ends the job: waiters wake, then `ended` runs, then followers, wakers and callbacks.
    pub(crate) fn finish(self: &Arc<Self>, outcome: Outcome, ended: impl FnOnce()) {
        self.outcome.get_or_init(|| outcome);
        match lock(&self.tag).take() {
            Some((tag, list)) => {
                // Under one lock: a job that starts because this one has ended is told of after it.
                let mut list = lock(&list);
                self.event.set();
                list.push((tag, self.clone()));
            }
            None => self.event.set(),
        }
        ended();
        // Taken after the event is set: whoever finds the list gone also finds the job ended.
        let registered = lock(&self.registered).take();
        ending::run(self, registered.unwrap_or_default());
    }

    /// Sleeps until the job has ended, which another thread is about to do.
    pub(super) fn event_wait(&self) {
        self.event.wait(None);
    }

    /// Sleeps until the job has ended, at most for `limit`; true if it has.
    pub(super) fn wait_for(&self, limit: Duration) -> bool {
        self.event.wait(Some(limit))
    }

    /// Whether somebody wants to be called at the end.
    pub(super) fn awaited(&self) -> bool {
        lock(&self.registered).as_ref().is_some_and(|registered| !registered.is_empty())
    }

    /// The outcome once the job has ended, without counting as a look at it.
    pub(super) fn ended_with(&self) -> Option<&Outcome> {
        if self.event.is_set() { self.outcome.get() } else { None }
    }

    /// The outcome once the job has ended, which somebody has then seen.
    pub(super) fn look(&self) -> Option<Outcome> {
        let outcome = self.ended_with().cloned();
        if outcome.is_some() {
            self.observed.store(true, Ordering::Relaxed);
        }
        outcome
    }

    #[cfg(test)]
    pub(crate) fn is_over(&self) -> bool {
        self.event.is_set()
    }

    fn register(self: &Arc<Self>, add: impl FnOnce(&mut Registered)) {
        let mut registered = lock(&self.registered);
        if let Some(registered) = registered.as_mut() {
            return add(registered);
        }
        drop(registered);
        let mut late = Registered::default();
        add(&mut late);
        ending::run(self, late);
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        // A dropped handle must not hide a failure.
        if let Some(Err(failure)) = self.outcome.get()
            && !self.observed.load(Ordering::Relaxed)
        {
            tracing::error!(%failure, "a transfer failed and nobody looked");
        }
    }
}

/// What a waiter can help with.
#[derive(Clone)]
pub(super) enum Pending {
    Job(Arc<HostJob>),
    Layers(Arc<Layers>),
    Cuda(Arc<CudaJob>),
    /// Ended by whoever ends its parts: threads of this pool.
    Parts(Arc<Pool>),
    /// Ended from the start.
    Ended,
    /// In a CUDA graph, to run whenever that is launched: it never ends.
    Captured,
}

/// Handle of a submitted transfer. Cheap to clone; dropping it does not stop the transfer, and a failure that nobody
/// looked at is logged.
pub struct TransferCompleteNotification {
    completion: Arc<Completion>,
    work: Pending,
    // Where this handle's waker is kept while it is awaited, so that polling again replaces it.
    waker: Option<usize>,
}

impl TransferCompleteNotification {
    pub(super) fn new(completion: Arc<Completion>, work: Pending) -> Self {
        TransferCompleteNotification { completion, work, waker: None }
    }

    pub(super) fn of_job(job: Arc<HostJob>) -> Self {
        TransferCompleteNotification::new(job.completion().clone(), Pending::Job(job))
    }

    /// A handle that has ended with `result`.
    pub(super) fn completed(result: TransferResult) -> Self {
        let completion = Completion::new(None);
        completion.finish(Ok(result), || {});
        TransferCompleteNotification::new(completion, Pending::Ended)
    }

    pub(super) fn of_cuda(job: Arc<CudaJob>) -> Self {
        TransferCompleteNotification::new(job.completion().clone(), Pending::Cuda(job))
    }

    /// The handle, or those of its layers.
    pub(super) fn each(&self) -> Vec<TransferCompleteNotification> {
        match &self.work {
            Pending::Layers(layers) => layers.parts().to_vec(),
            _ => vec![self.clone()],
        }
    }

    /// The GPU job behind the handle, if it is one.
    pub(super) fn cuda(&self) -> Option<&Arc<CudaJob>> {
        match &self.work {
            Pending::Cuda(job) => Some(job),
            _ => None,
        }
    }

    /// Whether the transfer has ended, well or badly. A GPU transfer is asked after at the driver.
    pub fn done(&self) -> bool {
        self.completion.event.is_set()
            || match &self.work {
                Pending::Cuda(job) => job.poll(),
                Pending::Layers(layers) => {
                    // The whole ends with its last layer, by the thread that ends that.
                    layers.parts().iter().all(TransferCompleteNotification::done)
                        && self.completion.event.is_set()
                }
                Pending::Job(_) | Pending::Parts(_) | Pending::Ended | Pending::Captured => false,
            }
    }

    /// Whether the transfer was put into a CUDA graph: it runs whenever that is launched, and this handle never ends.
    pub fn captured(&self) -> bool {
        matches!(self.work, Pending::Captured)
    }

    /// Makes what is put on `stream` from now on wait for the transfer, or for one layer of it (as
    /// [`layer`](Self::layer)), without waiting here. A no-op for a transfer that has ended.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a transfer that is not on a stream: one that host threads carry out or hold back, or
    /// that a CUDA graph has taken; [`Error::InvalidOption`] for a layer without a handle; the driver's refusal.
    pub fn wait_on(&self, stream: StreamHandle, layer: Option<u64>) -> Result<()> {
        self.make_wait(None, stream, layer)
    }

    /// As [`wait_on`](Self::wait_on), for a stream of GPU `ordinal`: says whose default stream is meant, which otherwise is
    /// that of the GPU that carries the transfer.
    ///
    /// # Errors
    /// As [`wait_on`](Self::wait_on), or no such GPU.
    pub fn wait_on_of(&self, ordinal: u32, stream: StreamHandle, layer: Option<u64>) -> Result<()> {
        self.make_wait(Some(ordinal), stream, layer)
    }

    fn make_wait(&self, ordinal: Option<u32>, stream: StreamHandle, layer: Option<u64>) -> Result<()> {
        if let Some(layer) = layer {
            let part = self.layer(layer).ok_or_else(|| Error::InvalidOption {
                option: "layer",
                expected: "a layer that the transfer moves, submitted by layer".to_owned(),
                value: layer.to_string(),
            })?;
            return part.make_wait(ordinal, stream, None);
        }
        if self.done() {
            return Ok(());
        }
        let refuse = |why: &str| {
            Err(Error::Unsupported {
                what: "making a stream wait for this transfer".to_owned(),
                why: why.to_owned(),
            })
        };
        match &self.work {
            Pending::Cuda(job) => {
                let mut gpu = job.gpu().clone();
                let other = match ordinal {
                    Some(ordinal) if ordinal != gpu.ordinal() => Some(Gpu::bystander(ordinal)?),
                    Some(_) => None,
                    None => owner_of(&gpu, &gpu.enter()?, stream)?,
                };
                // A stream waits in its own context.
                gpu = other.unwrap_or(gpu);
                let cx = gpu.enter()?;
                if job.order(&gpu, &cx, stream)? {
                    return Ok(());
                }
                refuse("it waits for a host transfer and is not on a stream yet")
            }
            Pending::Layers(layers) => {
                layers.parts().iter().try_for_each(|part| part.make_wait(ordinal, stream, None))
            }
            Pending::Job(_) | Pending::Parts(_) | Pending::Ended => {
                refuse("host threads take part in it: wait for it on the host")
            }
            Pending::Captured => {
                refuse("a CUDA graph has taken it: order the stream after the graph's launch")
            }
        }
    }

    /// Makes `stream` wait for the transfer, if that can be done on the device; false if it has to be waited for here.
    pub(super) fn order(&self, gpu: &Gpu, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<bool> {
        match &self.work {
            _ if self.completion.event.is_set() => Ok(true),
            Pending::Cuda(job) => job.order(gpu, cx, stream),
            Pending::Layers(layers) => {
                for part in layers.parts() {
                    if !part.order(gpu, cx, stream)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Pending::Job(_) | Pending::Parts(_) | Pending::Ended | Pending::Captured => Ok(false),
        }
    }

    /// Waits for the end, at most `timeout`. The waiting thread helps with copies that no other thread has taken up.
    ///
    /// # Errors
    /// [`Error::Transfer`] if the job failed, [`Error::Timeout`] if time ran out (the job then goes on), [`Error::Fork`]
    /// in a forked child, which has no thread that could end the job, [`Error::Unsupported`] for a transfer that a CUDA
    /// graph has taken.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<TransferResult> {
        if self.captured() {
            return Err(Error::Unsupported {
                what: "waiting for a captured transfer".to_owned(),
                why: "it runs whenever its CUDA graph is launched: synchronize with the launch".to_owned(),
            });
        }
        let start = Instant::now();
        // A limit beyond the clock's range is no limit.
        self.help(timeout.and_then(|limit| start.checked_add(limit)))?;
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        self.attend();
        if !self.completion.event.wait(left) {
            return Err(Error::Timeout { seconds: timeout.unwrap_or_default().as_secs_f64() });
        }
        self.outcome().ok_or(Error::Timeout { seconds: 0.0 })?.map_err(Error::Transfer)
    }

    fn help(&self, deadline: Option<Instant>) -> Result<()> {
        match &self.work {
            _ if self.done() => {}
            Pending::Job(job) => {
                job.check_fork()?;
                job.help(deadline);
            }
            Pending::Layers(layers) => {
                for part in layers.parts() {
                    part.help(deadline)?;
                }
            }
            Pending::Cuda(job) => {
                job.check_fork()?;
                job.watch(deadline);
            }
            Pending::Parts(pool) => pool.check_fork()?,
            Pending::Ended | Pending::Captured => {}
        }
        Ok(())
    }

    /// The handle of one layer, by its number in the layouts; `None` unless the transfer was submitted with `per_layer`
    /// and moves that layer. The whole ends a moment after its last layer: wait for it rather than assume it.
    pub fn layer(&self, layer: u64) -> Option<&TransferCompleteNotification> {
        match &self.work {
            Pending::Layers(layers) => layers.get(layer),
            _ => None,
        }
    }

    /// Takes note of a failure that is told of elsewhere.
    pub(super) fn observed(&self) {
        self.completion.observed.store(true, Ordering::Relaxed);
    }

    /// How the transfer ended, or `None` while it runs. Never waits.
    pub fn outcome(&self) -> Option<Outcome> {
        self.completion.look()
    }

    /// As [`outcome`](Self::outcome), without counting as a look at a failure: for printing.
    pub fn peek(&self) -> Option<&Outcome> {
        self.completion.ended_with()
    }

    /// Calls `callback` once when the transfer ends: on the thread that ends it, or here and now if it has ended (inside
    /// another callback: right after that one). It must be short, must not wait for other jobs, and does not count as a
    /// look at a failure: that is still logged unless [`outcome`](Self::outcome), `wait` or `await` gives it out.
    pub fn on_complete(&self, callback: impl FnOnce(&Outcome) + Send + 'static) {
        self.completion.register(|registered| registered.callbacks.push(Box::new(callback)));
        self.attend();
    }

    /// The end is to be told without anybody asking.
    fn attend(&self) {
        match &self.work {
            Pending::Cuda(job) => job.attend(),
            Pending::Layers(layers) => layers.parts().iter().for_each(TransferCompleteNotification::attend),
            Pending::Job(_) | Pending::Parts(_) | Pending::Ended | Pending::Captured => {}
        }
    }

    /// As [`on_complete`](Self::on_complete), before all callbacks and wakers: starts the jobs that follow this one.
    pub(crate) fn on_complete_first(&self, callback: impl FnOnce(&Outcome) + Send + 'static) {
        self.completion.register(|registered| registered.followers.push(Box::new(callback)));
        self.attend();
    }

    /// Puts `waker` in this handle's slot; gives back what was there, to be dropped without the lock.
    fn keep_waker(&mut self, waker: Waker) -> Option<Waker> {
        let mut registered = lock(&self.completion.registered);
        let wakers = &mut registered.as_mut()?.wakers;
        let free = || wakers.iter().position(Option::is_none).unwrap_or(wakers.len());
        let slot = self.waker.unwrap_or_else(free);
        if slot == wakers.len() {
            wakers.push(None);
        }
        self.waker = Some(slot);
        wakers.get_mut(slot)?.replace(waker)
    }
}

impl Clone for TransferCompleteNotification {
    fn clone(&self) -> Self {
        TransferCompleteNotification::new(self.completion.clone(), self.work.clone())
    }
}

impl Drop for TransferCompleteNotification {
    fn drop(&mut self) {
        // Nobody may be left to ask: the job has the other reference.
        if Arc::strong_count(&self.completion) <= 2 {
            self.attend();
        }
        if let Some(slot) = self.waker {
            let mut registered = lock(&self.completion.registered);
            let waker = registered.as_mut().and_then(|registered| registered.wakers.get_mut(slot)?.take());
            drop(registered);
            drop(waker);
        }
    }
}

impl fmt::Debug for TransferCompleteNotification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.completion.ended_with() {
            None => f.write_str("TransferCompleteNotification(pending)"),
            Some(Ok(result)) => write!(f, "TransferCompleteNotification(done, {} bytes)", result.bytes),
            Some(Err(_)) => f.write_str("TransferCompleteNotification(failed)"),
        }
    }
}

impl Future for TransferCompleteNotification {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Some(outcome) = self.outcome() {
            return Poll::Ready(outcome);
        }
        drop(self.keep_waker(cx.waker().clone()));
        self.attend();
        // It may have ended between the look and the registration.
        match self.outcome() {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}
