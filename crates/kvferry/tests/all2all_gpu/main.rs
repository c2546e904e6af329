//! The exchange between GPUs, on the simulated driver and on real ones. Ranks are threads with a GPU each, or processes:
//! this test binary starts itself again as those.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "helpers of tests stop and speak"
)]

#[path = "../exchange/mod.rs"]
mod exchange;

mod calls;
mod faults;
mod gpus;
mod graphs;
mod outputs;
mod processes;
mod setup;
mod soak;
mod streams;
