//! The kernel bodies of `cuda/` on the CPU, against oracles written in Rust. `scripts/sanitize.sh` runs the same tests
//! under the address and undefined-behaviour sanitizers.
#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod arena;
mod copy_case;
mod exchange;
mod exchange_broken;
mod exchange_case;
mod exchange_faults;
mod ffi;
mod fibers;
mod layout;
mod negative;
mod strided_any;
mod strided_case;
mod strided_copy;
mod vectorized_copy;
mod world;
