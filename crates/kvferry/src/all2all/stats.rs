//! What a communicator has done.

use std::sync::atomic::{AtomicU64, Ordering};

use super::backend::Transport;

/// Counts since the communicator was made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExchangeStats {
    /// Calls that ran.
    pub calls: u64,
    /// Bytes sent to other ranks.
    pub bytes_sent: u64,
    /// Bytes received from other ranks.
    pub bytes_received: u64,
    /// Calls whose results were copied out of the pool.
    pub copied_out: u64,
    /// Calls refused because every buffer was held.
    pub busy: u64,
    /// Buffers of the pool, and those free now.
    pub buffers: u32,
    /// Buffers that no result is held in.
    pub buffers_free: u32,
    /// Calls finished since the last reset, as far as the host knows.
    pub epoch: u64,
    /// Times the communicator was reset.
    pub resets: u64,
    /// How peers' memory is reached, and why so.
    pub transport: Transport,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) calls: AtomicU64,
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) bytes_received: AtomicU64,
    pub(crate) copied_out: AtomicU64,
    pub(crate) busy: AtomicU64,
    pub(crate) resets: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
