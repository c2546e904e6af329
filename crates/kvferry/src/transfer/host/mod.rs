//! The host engine: a plan cut into tasks, run by a pool of threads and by whoever waits.

#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod fault;
mod hint;
mod job;
mod pool;
mod split;
mod task;
#[cfg(test)]
mod task_tests;

pub(crate) use hint::{hint, last_level_cache};
pub(crate) use job::HostJob;
pub(crate) use pool::Pool;
pub(crate) use split::{Split, TASK_BYTES};
pub(crate) use task::Work;
