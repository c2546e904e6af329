//! Setting up: what is refused, and that a failure anywhere fails every rank and leaves nothing behind.

use std::time::Duration;

use kvferry::Dtype;
use kvferry::all2all::ExchangeDevice;
use kvferry::cuda::{drain_deferred, faults};
use kvferry::layout::exchange::ExchangeOp;

use crate::exchange::{Whole, builder, fresh_name, threads};
use crate::gpus::{Rank, gpus, live, on_gpus};
use crate::processes::in_processes;

use ExchangeOp::SendRecvHeads;

fn whole() -> Whole {
    Whole::new(1, &[3, 5], 6, 8, Dtype::Float16)
}

#[test]
fn two_threads_on_one_gpu_are_refused() {
    if gpus(1).is_none() {
        return;
    }
    let name = fresh_name();
    threads(2, |rank| {
        let error = builder(rank, 2, &name).device(ExchangeDevice::Gpu(0)).connect().unwrap_err();
        assert!(error.to_string().contains("one GPU per thread"), "{error}");
    });
}

#[test]
fn a_device_that_is_not_there_fails_both_ranks() {
    if gpus(2).is_none() {
        return;
    }
    let name = fresh_name();
    threads(2, |rank| {
        let device = ExchangeDevice::Gpu(if rank == 0 { 0 } else { 77 });
        let error = builder(rank, 2, &name).device(device).connect().unwrap_err();
        assert!(error.to_string().contains("77"), "{error}");
    });
}

#[test]
fn gpus_without_access_to_each_other_are_named() {
    let env = [("KVFERRY_FAKE_NO_PEER", "1")];
    in_processes("setup::gpus_without_access_to_each_other_are_named", 2, &env, |process| {
        // The variable means something to the simulated driver only.
        let Err(error) = process.builder("one").connect() else { return };
        assert!(error.to_string().contains("allows no access"), "{error}");
        assert!(error.to_string().contains("rank 0") && error.to_string().contains("rank 1"), "{error}");
    });
}

#[test]
fn threads_under_launch_blocking_are_refused() {
    let env = [("CUDA_LAUNCH_BLOCKING", "1")];
    in_processes("setup::threads_under_launch_blocking_are_refused", 1, &env, |_| {
        if gpus(2).is_none() {
            return;
        }
        let name = fresh_name();
        threads(2, |rank| {
            let device = ExchangeDevice::Gpu(rank as u32);
            let error = builder(rank, 2, &name).device(device).connect().unwrap_err();
            assert!(error.to_string().contains("CUDA_LAUNCH_BLOCKING"), "{error}");
        });
    });
}

/// Driver functions that set-up calls.
const CALLS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetAttribute",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncLoad",
    "cuLaunchKernel",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuThreadExchangeStreamCaptureMode",
];

fn everything_live() -> Option<Vec<u64>> {
    drain_deferred();
    [c"device", c"pinned", c"mapped", c"opened"].into_iter().map(live).collect()
}

#[test]
fn a_fault_of_the_driver_anywhere_fails_every_rank_and_leaves_nothing() {
    if gpus(2).is_none() {
        return;
    }
    let attempt = || {
        let name = fresh_name();
        threads(2, |rank| {
            let builder = builder(rank, 2, &name).device(ExchangeDevice::Gpu(rank as u32));
            // A rank whose probe was not launched is waited for this long.
            builder.capacity_bytes(4096).setup_timeout(Duration::from_millis(1500)).connect()
        })
    };
    // Contexts and what they keep are there from now on.
    drop(attempt());
    let before = everything_live();
    let mut struck = 0;
    for call in CALLS {
        for nth in 1.. {
            faults::inject(*call, nth, 999);
            let outcomes = attempt();
            let reached = faults::clear() == 0;
            let good = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert!(good == 0 || good == 2, "{call} {nth}: {outcomes:?}");
            // Another transport may have saved it; a lost answer of no consequence too.
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                if let Err(error) = &outcome {
                    assert!(reached, "{call} {nth}, rank {rank}: {error}");
                }
                drop(outcome);
            }
            struck += u32::from(reached);
            // Repeated calls of one kind fail alike: the first few say it all.
            if !reached || nth >= 6 {
                break;
            }
        }
        assert_eq!(everything_live(), before, "{call}");
    }
    assert!(struck > 30, "{struck} faults happened");
    on_gpus(2, |builder| builder, |at: &Rank| drop(at.checked(&whole(), SendRecvHeads)));
}
