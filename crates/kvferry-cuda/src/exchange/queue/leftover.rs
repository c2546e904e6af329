//! What a queue leaves behind.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{ExchangeQueue, Trip};
use crate::capture::RelaxedCapture;
use crate::deferred::run_later;
use crate::exchange::link::ExchangeLink;

/// How often it is looked whether the last call has ended.
const PATIENT_LOOK: Duration = Duration::from_millis(2);

/// Work that outlives its queue, and what it uses.
struct Leftover {
    link: Arc<ExchangeLink>,
    trips: VecDeque<Trip>,
    untracked: bool,
}

impl Leftover {
    /// Lets go of everything when it is no longer used. Calls end by themselves: their waits are bounded.
    fn outlast(self) {
        // Not asleep in the driver: a kernel that waits for a peer may take its time, and others need the driver.
        let ended = match self.trips.back() {
            Some(last) if !self.untracked => loop {
                match last.event.query() {
                    Ok(false) => std::thread::sleep(PATIENT_LOOK),
                    Ok(true) => break Ok(()),
                    Err(error) => break Err(error),
                }
            },
            _ => self.link.gpu().synchronize(),
        };
        if let Err(error) = ended.or_else(|_| self.link.gpu().synchronize()) {
            error.log_on_drop("ending an exchange: its memory is leaked, it may still be in use. That");
            std::mem::forget(self);
        }
    }
}

impl Drop for ExchangeQueue {
    fn drop(&mut self) {
        if !self.in_flight() {
            return;
        }
        let (link, trips) = (Arc::clone(&self.link), std::mem::take(&mut self.trips));
        let leftover = Arc::new(Mutex::new(Some(Leftover { link, trips, untracked: self.untracked })));
        let take = |leftover: &Mutex<Option<Leftover>>| {
            leftover.lock().unwrap_or_else(PoisonError::into_inner).take().map(Leftover::outlast)
        };
        // Results of the last calls may be in use: the calls go on, and a thread of their own waits for them.
        let waiter = Arc::clone(&leftover);
        let started = std::thread::Builder::new().name("kvf-exchange-end".to_owned()).spawn(move || {
            let _relaxed = RelaxedCapture::enter();
            take(&waiter)
        });
        if started.is_err() {
            run_later(move || {
                take(&leftover);
            });
        }
    }
}
