//! Threads that end GPU jobs: one per stream with jobs in flight, asleep in the driver until the oldest is done.
//!
//! Jobs of a stream are done in the order of the stream, so a lane waits for one event at a time and for nothing by the
//! clock. Whoever waits for a job or asks for it ends it as well; a lane is for callbacks, awaiting, sleeping waiters,
//! and for letting go of memory when nobody asks.
//!
//! Waking a thread costs the submitting one as much as a launch. So a job is put into its lane without a sound, and the
//! lane is woken by the first who needs it: a callback or waker is registered, a waiter goes to sleep, the last handle
//! is dropped, or [`QUIET`] more jobs have come.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use kvferry_cuda::{Gpu, RelaxedCapture, StreamHandle};

use super::job::CudaJob;
use crate::error::{Error, Result};
use crate::transfer::lock;

/// Most threads; streams beyond share them, and a job may then be told of after one of another stream.
const MOST: usize = 64;

/// Bytes of launches that a stream may hold: the driver (580, H200) blocks after 119 launches with 32 KB of parameters, 232
/// with 16 KB, 732 with 4 KB, 1,020 with 1 KB, and sooner where streams share a channel (fewer than 64 with 32 KB).
const QUEUE_BYTES: usize = 1 << 20;
/// Jobs that fit whatever they hold.
const FEW: usize = 32;
/// How long a submission waits for a full queue before it is refused.
pub(super) const BACK_PRESSURE: Duration = Duration::from_millis(20);
/// Jobs that may lie in a lane unattended, their handles kept and not looked at.
const QUIET: usize = 8;

/// Whose jobs are done in their order: a GPU, its stream, and for the per-thread stream the thread.
type Key = (u32, StreamHandle, Option<ThreadId>);

#[derive(Default)]
struct Lane {
    key: Option<Key>,
    queue: VecDeque<Arc<CudaJob>>,
    /// Jobs that will come: another stream must not take the lane before.
    reserved: usize,
    /// Its thread is in the driver, or about to be.
    busy: bool,
    /// It has been told that there is something to do, and will go on until its queue is empty.
    awake: bool,
    /// Wakes its thread.
    bell: Arc<Condvar>,
}

#[derive(Default)]
struct State {
    lanes: Vec<Lane>,
    threads: Vec<JoinHandle<()>>,
    /// Somebody waits for all jobs, also those still to come.
    closing: bool,
    stopping: bool,
}

/// A place in a lane for one job.
pub(crate) struct Ticket {
    lanes: Arc<Lanes>,
    index: usize,
    /// The job has not come yet.
    reserved: AtomicBool,
}

impl Ticket {
    /// For a job that never flies.
    pub(crate) fn none(lanes: &Arc<Lanes>) -> Ticket {
        Ticket { lanes: lanes.clone(), index: 0, reserved: AtomicBool::new(false) }
    }

    /// The job is on its stream.
    pub(super) fn take(&self, job: Arc<CudaJob>) {
        self.lanes.add(self.index, job);
        self.give_back();
    }

    /// Somebody needs the job ended.
    pub(super) fn attend(&self) {
        self.lanes.attend(self.index);
    }

    fn give_back(&self) {
        if self.reserved.swap(false, Ordering::AcqRel) {
            lock(&self.lanes.state).lanes[self.index].reserved -= 1;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// The lanes of a context.
#[derive(Default)]
pub(crate) struct Lanes {
    state: Mutex<State>,
}

impl Lanes {
    /// Makes sure that there is a thread for jobs of `stream`, so that [`add`](Self::add) cannot fail later.
    pub(crate) fn reserve(self: &Arc<Self>, gpu: &Gpu, stream: StreamHandle) -> Result<Ticket> {
        let thread = (stream == StreamHandle::PER_THREAD).then(|| std::thread::current().id());
        let key = (gpu.ordinal(), stream, thread);
        let mut state = lock(&self.state);
        if state.stopping {
            return Err(Error::Closed);
        }
        let same = |lane: &Lane| lane.key == Some(key);
        let idle = |lane: &Lane| lane.queue.iter().all(|job| job.over()) && !lane.busy && lane.reserved == 0;
        let found = state.lanes.iter().position(same).or_else(|| state.lanes.iter().position(idle));
        let index = match found {
            Some(index) => index,
            None if state.lanes.len() < MOST => {
                let index = state.lanes.len();
                let lanes = self.clone();
                let name = format!("kvferry-cuda-{index}");
                let lane = Lane::default();
                let bell = lane.bell.clone();
                // It finds its lane: the lock is ours until the lane is entered.
                let thread = std::thread::Builder::new().name(name).spawn(move || lanes.serve(index, &bell));
                match thread {
                    Ok(thread) => {
                        state.threads.push(thread);
                        state.lanes.push(lane);
                        index
                    }
                    // Fewer threads than streams still end every job.
                    Err(error) if !state.lanes.is_empty() => {
                        tracing::warn!(%error, lanes = index, "cannot start another completion thread");
                        stream.raw() as usize % index
                    }
                    Err(error) => return Err(Error::Thread(error)),
                }
            }
            None => (stream.raw() >> 4) as usize % MOST,
        };
        state.lanes[index].key = Some(key);
        state.lanes[index].reserved += 1;
        Ok(Ticket { lanes: self.clone(), index, reserved: AtomicBool::new(true) })
    }

    /// Waits, briefly, until the jobs in flight of a lane leave room for another in the driver's queue. The driver would
    /// wait in the launch itself, for ever if the stream is held by what this thread is to do next. Ends no job: callers
    /// may hold locks that completion callbacks take.
    pub(crate) fn make_room(&self, ticket: &Ticket) -> Result<()> {
        let deadline = Instant::now() + BACK_PRESSURE;
        loop {
            let jobs: Vec<Arc<CudaJob>> = {
                let state = lock(&self.state);
                let queue = &state.lanes[ticket.index].queue;
                if queue.len() < FEW {
                    return Ok(());
                }
                queue.iter().cloned().collect()
            };
            // Jobs of a stream are done in their order.
            let waiting = jobs.iter().skip_while(|job| job.device_is_through());
            if waiting.map(|job| job.weight()).sum::<usize>() < QUEUE_BYTES {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::Busy {
                    what: "the queue of a stream that does not move",
                    limit: QUEUE_BYTES as u64,
                });
            }
            std::thread::yield_now();
        }
    }

    /// Hands a job to a lane: it is behind the jobs of its stream that were added before.
    fn add(&self, index: usize, job: Arc<CudaJob>) {
        let mut state = lock(&self.state);
        let closing = state.closing;
        let lane = &mut state.lanes[index];
        // Jobs that somebody has ended need no attention.
        while lane.queue.front().is_some_and(|job| job.over()) {
            lane.queue.pop_front();
        }
        lane.queue.push_back(job);
        let crowded = closing || (!lane.awake && lane.queue.len() > QUIET);
        drop(state);
        if crowded {
            self.attend(index);
        }
    }

    /// Somebody needs the jobs of a lane ended.
    fn attend(&self, index: usize) {
        let mut state = lock(&self.state);
        let lane = &mut state.lanes[index];
        if lane.awake || lane.queue.is_empty() {
            return;
        }
        lane.awake = true;
        let bell = lane.bell.clone();
        drop(state);
        bell.notify_one();
    }

    /// All jobs are waited for, by nobody in particular.
    pub(crate) fn attend_all(&self) {
        lock(&self.state).closing = true;
        self.attend_each();
    }

    /// Jobs in flight are to be ended as soon as the device is through with them: somebody needs what they hold.
    pub(crate) fn attend_each(&self) {
        let lanes = lock(&self.state).lanes.len();
        (0..lanes).for_each(|index| self.attend(index));
    }

    /// Ends, on this thread, the jobs that the device is through with.
    pub(crate) fn poll(&self) {
        let fronts: Vec<Arc<CudaJob>> =
            lock(&self.state).lanes.iter().flat_map(|lane| lane.queue.iter().cloned()).collect();
        for job in fronts {
            job.poll();
        }
    }

    fn serve(&self, index: usize, bell: &Condvar) {
        // Queries and frees of this thread must not spoil a capture that another thread of the program has begun.
        let relaxed = RelaxedCapture::enter();
        if let Err(error) = &relaxed {
            tracing::warn!(%error, "a completion thread stays in its default capture mode");
        }
        let mut state = lock(&self.state);
        loop {
            let stopping = state.stopping;
            let Some(lane) = state.lanes.get_mut(index) else { return };
            // Unattended jobs stay where they are.
            let next = if lane.awake || stopping { lane.queue.pop_front() } else { None };
            if let Some(job) = next {
                lane.busy = true;
                drop(state);
                job.serve();
                drop(job);
                state = lock(&self.state);
                state.lanes[index].busy = false;
            } else if stopping {
                return;
            } else {
                lane.awake = false;
                state = bell.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Stops the threads once their queues are empty. Every job has ended when this is called.
    pub(crate) fn stop(&self, join: bool) {
        let mut state = lock(&self.state);
        state.stopping = true;
        let threads = std::mem::take(&mut state.threads);
        state.lanes.iter().for_each(|lane| lane.bell.notify_all());
        drop(state);
        for thread in threads {
            let own = thread.thread().id() == std::thread::current().id();
            if join && !own && thread.join().is_err() {
                tracing::warn!("a completion thread had panicked");
            }
        }
    }

    /// In a forked child the threads are not there: they are only forgotten.
    pub(crate) fn abandon(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            for thread in std::mem::take(&mut state.threads) {
                std::mem::forget(thread);
            }
        }
    }
}
