//! Transfers: route, plan, engine, completion.

mod choose;
mod completion;
mod context;
mod cuda;
mod ending;
mod executor;
mod host;
mod layers;
mod options;
mod plan;
mod route;
mod strategy;
mod submit;

pub use choose::{Candidate, Choice, HostMode};
pub use completion::{Outcome, TransferCompleteNotification, TransferFailure, TransferResult};
pub use context::{TransferContext, TransferContextBuilder};
pub use executor::execute_cuda_transfer;
pub(crate) use host::{hint, last_level_cache};
pub use options::{Dependency, TransferOptions};
pub use plan::{TransferPlan, plan_layouts};
pub use route::{IdSource, Route};
pub use strategy::{Engine, TransferStrategy};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; a panic elsewhere does not make our plain data invalid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
