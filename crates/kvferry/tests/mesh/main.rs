//! Ranks that find each other, agree, and notice each other's end: as threads of one process and as processes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod deaths;
mod footprint;
mod processes;
mod rank;
mod refusals;
mod stores;
mod threads;
