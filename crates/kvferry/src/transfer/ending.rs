//! What runs when a job ends: first the jobs that were to follow it, then wakers and callbacks.
//!
//! Nothing here recurses: a chain of a hundred thousand jobs that fail one another, or a callback that submits the next
//! job, which ends at once, is worked off in a loop by the thread that ended the first. Followers go before callbacks,
//! also inside one, so that a callback which waits for other jobs (closing its context, say) finds them started.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;

use super::completion::{Completion, Outcome};

pub(super) type Callback = Box<dyn FnOnce(&Outcome) + Send>;

/// Registered for the end of one job.
#[derive(Default)]
pub(super) struct Registered {
    pub(super) followers: Vec<Callback>,
    pub(super) callbacks: Vec<Callback>,
    // Indexed by the slot that a polled handle remembers.
    pub(super) wakers: Vec<Option<Waker>>,
}

impl Registered {
    pub(super) fn is_empty(&self) -> bool {
        self.followers.is_empty() && self.callbacks.is_empty() && self.wakers.iter().all(Option::is_none)
    }
}

enum Item {
    Call(Callback, Arc<Completion>),
    Wake(Waker),
}

impl Item {
    fn run(self) {
        // A panic in somebody's callback must not take a copy thread, or the callbacks after it, along.
        let outcome = catch_unwind(AssertUnwindSafe(|| match self {
            Item::Call(callback, completion) => {
                if let Some(outcome) = completion.ended_with() {
                    callback(outcome);
                }
            }
            Item::Wake(waker) => waker.wake(),
        }));
        if outcome.is_err() {
            tracing::error!("a completion callback panicked");
        }
    }
}

#[derive(Default)]
struct Turn {
    followers: VecDeque<Item>,
    callbacks: VecDeque<Item>,
    releasing: bool,
    calling: bool,
}

thread_local! {
    static TURN: RefCell<Turn> = RefCell::default();
}

fn turn<T>(f: impl FnOnce(&mut Turn) -> T) -> T {
    TURN.with(|turn| f(&mut turn.borrow_mut()))
}

/// Whether this thread is in a callback.
pub(crate) fn in_callback() -> bool {
    TURN.try_with(|turn| turn.borrow().calling).unwrap_or(false)
}

/// Runs all of `registered`, now or (inside another callback of this thread) right after what is running.
pub(super) fn run(completion: &Arc<Completion>, registered: Registered) {
    let Registered { followers, callbacks, wakers } = registered;
    if followers.is_empty() && callbacks.is_empty() && wakers.is_empty() {
        return;
    }
    let call = |callback| Item::Call(callback, completion.clone());
    let followers = followers.into_iter().map(call);
    let callbacks = wakers.into_iter().flatten().map(Item::Wake).chain(callbacks.into_iter().map(call));
    if TURN.try_with(|_| ()).is_err() {
        // The thread is ending; its turn is gone.
        followers.chain(callbacks).for_each(Item::run);
        return;
    }
    turn(|turn| {
        turn.followers.extend(followers);
        turn.callbacks.extend(callbacks);
    });
    if turn(|turn| std::mem::replace(&mut turn.releasing, true)) {
        return;
    }
    while let Some(item) = turn(|turn| turn.followers.pop_front()) {
        item.run();
    }
    turn(|turn| turn.releasing = false);
    if turn(|turn| std::mem::replace(&mut turn.calling, true)) {
        return;
    }
    while let Some(item) = turn(|turn| turn.callbacks.pop_front()) {
        item.run();
    }
    turn(|turn| turn.calling = false);
}
