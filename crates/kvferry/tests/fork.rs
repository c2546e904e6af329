//! A context used in a forked child refuses, and lets the child go.
//!
//! One test, so that no other thread of this program holds a lock (the allocator's, say) at the fork.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::time::Duration;

use common::{Gate, PATIENCE, after, context, occupy, pooled, small_job, small_pair};
use kvferry::{BlockId, Error, TransferOptions};

/// Forks, runs `child` there and gives its exit code.
fn exit_code_of(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the C library's fork runs its handlers, which make the allocator usable in the child; the child calls
    // `child` and _exit, and never returns into the test harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        // A child that hangs is killed by this alarm, which shows as a signal.
        // SAFETY: no handler is installed; the default action ends the child.
        unsafe { libc::alarm(20) };
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `pid` is our own child and `status` a live integer.
    let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(waited, pid);
    assert!(libc::WIFEXITED(status), "the child was killed: status {status}");
    libc::WEXITSTATUS(status)
}

#[test]
fn a_forked_child_is_refused_and_ends() {
    let ctx = context(2);
    let one = [BlockId(0)];
    let (src, dst) = small_pair();
    let options = TransferOptions::default();
    let route = ctx.route(&src, &dst, &options).unwrap();
    small_job(&ctx, &pooled()).wait(Some(PATIENCE)).unwrap();
    let done = small_job(&ctx, &options);
    let busy = occupy(&ctx);
    let gate = Gate::new();
    let queued = small_job(&ctx, &pooled());
    let held = small_job(&ctx, &after(&[&gate.job]));

    let mut ctx = Some(ctx);
    let code = exit_code_of(|| {
        let Some(ctx) = ctx.take() else { return 1 };
        let refusals = [
            matches!(ctx.transfer(&src, &dst, &one, &one, &options), Err(Error::Fork(_))),
            matches!(ctx.route(&src, &dst, &options), Err(Error::Fork(_))),
            matches!(ctx.plan(&src, &dst, &one, &one, &options), Err(Error::Fork(_))),
            matches!(route.submit(&one, &one), Err(Error::Fork(_))),
            matches!(route.submit(&[], &[]), Err(Error::Fork(_))),
            matches!(ctx.close(None), Err(Error::Fork(_))),
            matches!(queued.wait(None), Err(Error::Fork(_))),
            matches!(held.wait(Some(Duration::ZERO)), Err(Error::Fork(_))),
            // What had ended before the fork is still true.
            done.wait(None).is_ok(),
            ctx.in_flight() == 2,
        ];
        if let Some(wrong) = refusals.iter().position(|ok| !ok) {
            return 10 + wrong as i32;
        }
        drop((ctx, route, queued, held, gate, busy));
        // A context of the child's own works.
        let own = context(2);
        match small_job(&own, &pooled()).wait(Some(PATIENCE)) {
            Ok(_) => 42,
            Err(_) => 2,
        }
    });
    assert_eq!(code, 42);
}
