//! When jobs are expected to end: the cost model's times, one job after the other in each direction.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::transfer::lock;

/// What is in flight in one direction.
#[derive(Debug, Default)]
struct Queue {
    jobs: usize,
    /// The end of the last of them.
    end: Option<Instant>,
}

/// The queue of one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Forecast(Arc<Mutex<Queue>>);

/// The forecast for one job.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    /// When it should end.
    pub(super) end: Instant,
    /// How long it should take once its turn has come.
    pub(super) takes: Duration,
    queue: Forecast,
}

impl Forecast {
    /// A job of `seconds` joins the queue.
    pub(super) fn expect(&self, seconds: f64) -> Expected {
        // A model gone wrong must not make a time that the clock cannot hold.
        let takes = Duration::try_from_secs_f64(seconds).unwrap_or_default().min(Duration::from_secs(3600));
        let now = Instant::now();
        let mut queue = lock(&self.0);
        let start = queue.end.filter(|&end| queue.jobs > 0 && end > now).unwrap_or(now);
        let end = start + takes;
        queue.jobs += 1;
        queue.end = Some(end);
        Expected { end, takes, queue: self.clone() }
    }
}

impl Expected {
    /// The job has ended: those behind it end as much earlier or later as it did.
    pub(super) fn met(&self) {
        let now = Instant::now();
        let mut queue = lock(&self.queue.0);
        queue.jobs = queue.jobs.saturating_sub(1);
        // What a job waited for that has nothing to do with the queue says nothing of those behind it.
        let late = now.saturating_duration_since(self.end).min(self.takes);
        let early = self.end.saturating_duration_since(now);
        queue.end = queue.end.and_then(|end| (end + late).checked_sub(early));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_queue_up_and_a_late_one_delays_those_behind() {
        let forecast = Forecast::default();
        let first = forecast.expect(10.0);
        let second = forecast.expect(5.0);
        assert_eq!(second.end - first.end, Duration::from_secs(5));
        // It ends at once: the next one is expected ten seconds sooner than it would have been.
        first.met();
        let third = forecast.expect(1.0);
        assert!(third.end < second.end && third.takes == Duration::from_secs(1));
        second.met();
        third.met();
        let now = Instant::now();
        assert!(forecast.expect(0.0).end <= now + Duration::from_secs(1));
        assert!(forecast.expect(f64::NAN).takes.is_zero() && forecast.expect(-1.0).takes.is_zero());
    }
}
