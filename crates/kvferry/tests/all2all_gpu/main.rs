//! The exchange between GPUs, ranks being threads with a GPU each: on the simulated driver, and on real GPUs.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests stop and speak")]

#[path = "../exchange/mod.rs"]
mod exchange;

mod calls;
mod gpus;
