//! What the tests of shared memory, sockets and forks have in common.
#![allow(dead_code, reason = "every test file uses a part")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::time::{Duration, Instant};

/// A limit that only a hang reaches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A forked child; killed and reaped on drop.
pub(crate) struct Child(pub(crate) i32);

impl Child {
    /// Forks and runs `body` in the child, whose exit code it gives.
    pub(crate) fn fork(body: impl FnOnce() -> i32) -> Child {
        // SAFETY: the C library's fork makes the allocator usable in the child, which runs `body` and _exit and never
        // returns into the test harness.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            // SAFETY: the default action of the alarm ends a child that hangs.
            unsafe { libc::alarm(30) };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) };
        }
        Child(pid)
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: our own child, not reaped yet, so the number is its.
        assert_eq!(unsafe { libc::kill(self.0, signal) }, 0);
    }

    /// Waits for it; its exit code.
    pub(crate) fn code(self) -> i32 {
        let mut status = 0;
        // SAFETY: our own child and a live integer.
        assert_eq!(unsafe { libc::waitpid(self.0, &mut status, 0) }, self.0);
        std::mem::forget(self);
        assert!(libc::WIFEXITED(status), "killed: status {status}");
        libc::WEXITSTATUS(status)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: our own child, not reaped yet.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above; no status is asked for.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// Names of everything this process has open.
pub(crate) fn open_fds() -> Vec<String> {
    let dir = std::fs::read_dir("/proc/self/fd").unwrap();
    let mut links: Vec<String> = dir
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|link| link.to_string_lossy().into_owned())
        .filter(|link| !link.contains("/proc/"))
        .collect();
    links.sort();
    links
}

/// Whether this test has its process for itself.
pub(crate) fn alone() -> bool {
    std::env::var_os("NEXTEST").is_some()
}

/// Waits for `done`.
pub(crate) fn eventually(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}
