//! A submitted GPU transfer: what is in flight, what it follows, and the completion at the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvferry_cuda::{BadId, ContextGuard, CudaError, Event, Flight, Gpu, StreamHandle};
use kvferry_kernels::{
    INLINE_WORDS_LARGE, INLINE_WORDS_SMALL, MAX_INLINE_BASES, PARAM_BYTES_LARGE, PARAM_BYTES_SMALL,
};
use kvferry_layout::CopyPlan;

use super::device::CHUNK_PAIRS;
use super::expect::Expected;
use super::lanes::Ticket;
use super::reports::ReportLease;
use super::submit::destinations;
use crate::error::Result;
use crate::transfer::completion::{
    Completion, TransferCompleteNotification, TransferFailure, TransferResult,
};
use crate::transfer::host::Pool;
use crate::transfer::lock;

/// How long a waiter asks the driver again and again before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// A sleeping thread hears of the end 30 to 110 us late (blocking synchronization and host functions alike, H200 in a
/// virtual machine: reports/gpu), one that asks hears within 4 us. So a waiter sleeps until shortly before the end that
/// the cost model expects, and asks from then on: for so long beyond it, or for this share of the expected time.
const ALERT: Duration = Duration::from_micros(80);
const ALERT_SHARE: u32 = 8;
/// Longest that anybody asks without pause, or sleeps on nothing but a forecast.
const LONG: Duration = Duration::from_millis(1);

/// Where a job stands.
enum State {
    /// Something on the host has to happen first; nothing is on a stream yet.
    Held,
    /// On a stream; the flight's event comes after its last operation.
    Flying(Flight),
    /// Its outcome is known, or about to be by the thread that took the flight.
    Ended,
}

/// What the job will have done, and whom it names if it fails.
pub(crate) struct Account {
    /// Its result, `seconds` still to be set.
    pub(crate) result: TransferResult,
    /// The blocks.
    pub(crate) plan: CopyPlan,
    /// How many of them were put on a stream before the driver refused, and why it did.
    pub(crate) refused: Option<(u32, String)>,
    /// Where the kernel tells of an id out of range, if it read ids on the device.
    pub(crate) report: Option<ReportLease>,
    /// Jobs whose failure is this one's: GPU jobs that are before this one on the device.
    pub(crate) follows: Vec<TransferCompleteNotification>,
    /// When the end is expected, by the cost model.
    pub(crate) expected: Expected,
}

/// A GPU job.
pub(crate) struct CudaJob {
    gpu: Arc<Gpu>,
    state: Mutex<State>,
    account: Mutex<Option<Account>>,
    completion: Arc<Completion>,
    submitted: Instant,
    expected: OnceLock<Expected>,
    pool: Arc<Pool>,
    /// The lane that ends it if nobody else does.
    lane: Ticket,
    /// Somebody is to hear of the end without asking; noted while the job was held, too.
    attended: AtomicBool,
}

impl CudaJob {
    /// An admitted job that is not on a stream yet.
    pub(crate) fn held(
        gpu: Arc<Gpu>,
        completion: Arc<Completion>,
        submitted: Instant,
        pool: Arc<Pool>,
        lane: Ticket,
    ) -> Arc<CudaJob> {
        let state = Mutex::new(State::Held);
        Arc::new(CudaJob {
            gpu,
            state,
            account: Mutex::new(None),
            completion,
            submitted,
            expected: OnceLock::new(),
            pool,
            lane,
            attended: AtomicBool::new(false),
        })
    }

    pub(crate) const fn completion(&self) -> &Arc<Completion> {
        &self.completion
    }

    pub(crate) fn check_fork(&self) -> Result<()> {
        self.pool.check_fork()
    }

    /// The job is on its stream.
    pub(crate) fn fly(self: &Arc<Self>, flight: Flight, account: Account) {
        self.expected.get_or_init(|| account.expected.clone());
        *lock(&self.account) = Some(account);
        *lock(&self.state) = State::Flying(flight);
        self.lane.take(self.clone());
        // Asked for while it was held: `attend` notes it before it looks at the lane, so one of the two sees the other.
        if self.attended.load(Ordering::SeqCst) || self.completion.awaited() {
            self.lane.attend();
        }
    }

    /// Bytes of parameters that its launches hold in the driver's queue, roughly.
    pub(super) fn weight(&self) -> usize {
        lock(&self.account).as_ref().map_or(0, |account| {
            // Bases, whose number is not known here, may take their part of the small parameters. What does not fit the
            // large ones either comes in tables.
            match account.plan.blocks() as usize {
                pairs if pairs + MAX_INLINE_BASES <= INLINE_WORDS_SMALL => PARAM_BYTES_SMALL,
                pairs if pairs <= INLINE_WORDS_LARGE => PARAM_BYTES_LARGE,
                pairs => PARAM_BYTES_SMALL * (1 + pairs / CHUNK_PAIRS),
            }
        })
    }

    /// Somebody is to hear of the end without asking.
    pub(crate) fn attend(&self) {
        // In a forked child the lanes' threads and locks are the parent's.
        if self.over() || self.check_fork().is_err() {
            return;
        }
        self.attended.store(true, Ordering::SeqCst);
        self.lane.attend();
    }

    /// Whether the device is through with it; ends nothing.
    pub(super) fn device_is_through(&self) -> bool {
        match &*lock(&self.state) {
            State::Held => false,
            State::Flying(flight) => flight.done().unwrap_or(true),
            State::Ended => true,
        }
    }

    /// The job ends without having been put on a stream.
    pub(crate) fn ground(&self, failure: TransferFailure) {
        *lock(&self.state) = State::Ended;
        self.pool.leave(&self.completion);
        self.completion.finish(Err(failure), || self.pool.left());
    }

    /// The event after the last operation, while the job flies.
    pub(super) fn event(&self) -> Option<Arc<Event>> {
        match &*lock(&self.state) {
            State::Flying(flight) => Some(flight.event().clone()),
            State::Held | State::Ended => None,
        }
    }

    /// Makes `stream` wait for the job; false if the job is not on a stream yet.
    pub(crate) fn order(&self, gpu: &Gpu, cx: &ContextGuard<'_>, stream: StreamHandle) -> Result<bool> {
        match &*lock(&self.state) {
            State::Held => Ok(false),
            State::Flying(flight) => {
                gpu.wait_event(cx, stream, flight.event())?;
                Ok(true)
            }
            State::Ended => Ok(true),
        }
    }

    /// Ends the job if the device is through with it; true if it has ended.
    ///
    /// A job ends after those it follows. They may be many, one behind the other, so this is a loop.
    pub(crate) fn poll(self: &Arc<Self>) -> bool {
        // A forked child must not call the driver; the job is its parent's.
        if self.check_fork().is_err() {
            return self.over();
        }
        let mut chain = vec![self.clone()];
        while let Some(job) = chain.last().cloned() {
            if job.completion.ended_with().is_some() {
                chain.pop();
                continue;
            }
            let outcome = match &*lock(&job.state) {
                State::Held => return false,
                // Another thread is ending it right now.
                State::Ended => return self.completion.ended_with().is_some(),
                State::Flying(flight) => match flight.done() {
                    Ok(false) => return false,
                    Ok(true) => Ok(()),
                    Err(error) => Err(error),
                },
            };
            let before = lock(&job.account).as_ref().and_then(|account| {
                account
                    .follows
                    .iter()
                    .filter_map(TransferCompleteNotification::cuda)
                    .find(|other| !other.over())
                    .cloned()
            });
            match before {
                // Its event is before ours, so it is done; a failing device fails both.
                Some(before) if outcome.is_ok() => {
                    if before.is_held() {
                        return false;
                    }
                    chain.push(before);
                }
                _ => {
                    job.end(outcome);
                    chain.pop();
                }
            }
        }
        self.over()
    }

    pub(super) fn over(&self) -> bool {
        self.completion.ended_with().is_some()
    }

    fn is_held(&self) -> bool {
        matches!(*lock(&self.state), State::Held)
    }

    /// Asks for a short while, and again when the end is near, asleep in between; true if the job has ended.
    pub(crate) fn watch(self: &Arc<Self>, deadline: Option<Instant>) -> bool {
        if self.ask_until(Instant::now() + SPIN, deadline) {
            return true;
        }
        let Some((from, to)) = self.near_end() else { return false };
        let from = deadline.map_or(from, |deadline| deadline.min(from));
        // The forecast may be too late: a look after each quarter of what is left. A lane that slept in the driver
        // meanwhile would wake up just when the next job is submitted, and get in its way.
        loop {
            let left = from.saturating_duration_since(Instant::now());
            if left < SPIN {
                break;
            }
            if self.completion.wait_for((left / 4).min(LONG)) || self.poll() {
                return true;
            }
        }
        self.ask_until(to, deadline)
    }

    /// When asking is worth it.
    fn near_end(&self) -> Option<(Instant, Instant)> {
        let expected = self.expected.get()?;
        let alert = ALERT + (expected.takes / ALERT_SHARE).min(LONG);
        Some((expected.end.checked_sub(alert)?, expected.end.checked_add(alert)?))
    }

    fn ask_until(self: &Arc<Self>, until: Instant, deadline: Option<Instant>) -> bool {
        let until = deadline.map_or(until, |deadline| deadline.min(until));
        while !self.poll() {
            if Instant::now() >= until {
                return false;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Sleeps until the device is through with the job, and ends it. For a lane's thread.
    pub(super) fn serve(self: &Arc<Self>) {
        // Somebody is to be called: that is worth asking for, if it will not take long. Nobody else may be asking, so this
        // thread must not sleep on a forecast.
        if self.completion.awaited()
            && let Some((from, to)) = self.near_end()
            && from < Instant::now() + LONG
            && self.ask_until(to.min(Instant::now() + LONG), None)
        {
            return;
        }
        if let Some(event) = self.event() {
            // An error is found again, and told, by `poll`.
            let _ = event.synchronize();
        }
        while !self.poll() {
            // Another thread is ending it, or one that it follows.
            if self.event().is_none() {
                self.completion.event_wait();
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Ends the job: lets go of what it held, then tells. One thread comes through.
    fn end(&self, outcome: std::result::Result<(), CudaError>) {
        let State::Flying(flight) = std::mem::replace(&mut *lock(&self.state), State::Ended) else { return };
        let Some(account) = lock(&self.account).take() else { return };
        // This may drop the last owner of foreign memory, whose code is not ours; the job ends all the same.
        if catch_unwind(AssertUnwindSafe(|| drop(flight))).is_err() {
            tracing::error!("the owner of a layout's memory panicked when dropped");
        }
        let Account { mut result, plan, refused, report, follows, expected } = account;
        expected.met();
        let engine = result.engine;
        let failed = |reason: String, from: u32| {
            let mut failed_blocks = destinations(&plan);
            failed_blocks.drain(..(from as usize).min(failed_blocks.len()));
            failed_blocks.sort_unstable();
            failed_blocks.dedup();
            TransferFailure { engine, reason, failed_blocks }
        };
        let followed = follows.iter().find_map(|job| job.peek()?.as_ref().err());
        let outcome = if let Err(error) = outcome {
            Err(failed(error.to_string(), 0))
        } else if let Some(cause) = followed {
            Err(failed(cause.passed_on(), 0))
        } else if let Some((done, reason)) = refused {
            Err(failed(reason, done))
        } else if let Some(bad) = report.and_then(|lease| lease.report().take()) {
            let BadId { side, index, value, limit } = bad;
            let reason =
                format!("{side} id {value} at index {index} is out of range: it must be below {limit}");
            // Which blocks the ids name is known on the device alone.
            Err(TransferFailure { engine, reason, failed_blocks: Vec::new() })
        } else {
            result.seconds = self.submitted.elapsed().as_secs_f64();
            Ok(result)
        };
        self.pool.leave(&self.completion);
        self.completion.finish(outcome, || self.pool.left());
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}
