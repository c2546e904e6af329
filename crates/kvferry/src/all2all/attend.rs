//! What whoever waits looks after meanwhile, such as Python's signals.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A question that every wait of a communicator asks about ten times a second, on the thread that waits: whether to give
/// up. The default never does. It is asked with locks of the communicator held, so it must not call into that.
#[derive(Clone, Default)]
pub struct Attend(Option<Arc<dyn Fn() -> bool + Send + Sync>>);

impl Attend {
    /// Longest time between two questions of one wait.
    pub const EVERY: Duration = Duration::from_millis(100);

    /// Gives up once `gives_up` says so.
    pub fn new(gives_up: impl Fn() -> bool + Send + Sync + 'static) -> Attend {
        Attend(Some(Arc::new(gives_up)))
    }

    /// Begins a wait.
    pub(crate) fn begin(&self) -> Attending<'_> {
        Attending { attend: self, asked: Instant::now() }
    }
}

impl fmt::Debug for Attend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Attend(asks)" } else { "Attend" })
    }
}

/// One wait that asks.
#[derive(Debug)]
pub(crate) struct Attending<'a> {
    attend: &'a Attend,
    asked: Instant,
}

impl Attending<'_> {
    /// How long to sleep when `left` may pass.
    pub(crate) fn nap(&self, left: Duration) -> Duration {
        left.min(Attend::EVERY.saturating_sub(self.asked.elapsed())).max(Duration::from_millis(1).min(left))
    }

    /// Asks if it is time to: whether to give up.
    pub(crate) fn gives_up(&mut self) -> bool {
        if self.asked.elapsed() < Attend::EVERY {
            return false;
        }
        self.asked = Instant::now();
        self.attend.0.as_ref().is_some_and(|gives_up| gives_up())
    }
}
