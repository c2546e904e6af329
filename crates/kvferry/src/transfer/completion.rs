//! Completion: one handle for waiting, polling, awaiting and calling back.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvferry_host::Event;

use super::ending::{self, Registered};
use super::host::HostJob;
use super::layers::Layers;
use super::lock;
use super::strategy::{Engine, TransferStrategy};
use crate::error::{Error, Result};

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
}

impl Completion {
    pub(crate) fn new(tag: Option<(u64, Ended)>) -> Arc<Completion> {
        Arc::new(Completion {
            event: Event::new(),
            tag: Mutex::new(tag),
            outcome: OnceLock::new(),
            registered: Mutex::new(Some(Registered::default())),
            observed: AtomicBool::new(false),
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

    /// Whether the transfer has ended, well or badly.
    pub fn done(&self) -> bool {
        self.completion.event.is_set()
    }

    /// Waits for the end, at most `timeout`. The waiting thread helps with copies that no other thread has taken up.
    ///
    /// # Errors
    /// [`Error::Transfer`] if the job failed, [`Error::Timeout`] if time ran out (the job then goes on), [`Error::Fork`]
    /// in a forked child, which has no thread that could end the job.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<TransferResult> {
        let start = Instant::now();
        // A limit beyond the clock's range is no limit.
        self.help(timeout.and_then(|limit| start.checked_add(limit)))?;
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
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
        }
        Ok(())
    }

    /// The handle of one layer, by its number in the layouts; `None` unless the transfer was submitted with `per_layer`
    /// and moves that layer. The whole ends a moment after its last layer: wait for it rather than assume it.
    pub fn layer(&self, layer: u64) -> Option<&TransferCompleteNotification> {
        match &self.work {
            Pending::Layers(layers) => layers.get(layer),
            Pending::Job(_) => None,
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
    }

    /// As [`on_complete`](Self::on_complete), before all callbacks and wakers: starts the jobs that follow this one.
    pub(crate) fn on_complete_first(&self, callback: impl FnOnce(&Outcome) + Send + 'static) {
        self.completion.register(|registered| registered.followers.push(Box::new(callback)));
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
        // It may have ended between the look and the registration.
        match self.outcome() {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}
