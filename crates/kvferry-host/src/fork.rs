//! Detection of a forked child, where CUDA contexts, threads and sockets of the parent no longer work.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of forks between this process and the one that first made a guard.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Runs in the child of every `fork(2)`. Only an atomic addition: async-signal-safe, as POSIX asks.
extern "C" fn count_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Registers the handler once per process family (children inherit it). False if the C library had no memory for it.
fn handler_installed() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // SAFETY: the child handler is a static function that touches one atomic; the other two are absent, as allowed.
        let status = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
        if status != 0 {
            tracing::warn!(status, "pthread_atfork failed, fork checks fall back to comparing process ids");
        }
        status == 0
    })
}

/// A resource made in one process was used in a forked child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("made in process {created_pid}, used in its forked child {current_pid}: make it anew after the fork")]
pub struct ForkError {
    /// Process in which the resource was made.
    pub created_pid: u32,
    /// Process that tried to use it.
    pub current_pid: u32,
}

/// Remembers the process it was made in. [`check`](Self::check) is one relaxed atomic load.
///
/// Children made by a raw `clone(2)` without the C library are not seen; `fork`, Python's `os.fork` and
/// `multiprocessing` are. `vfork` and `posix_spawn` children run no code of ours before `exec`.
#[derive(Debug, Clone, Copy)]
pub struct ForkGuard {
    generation: u64,
    created_pid: u32,
    counted: bool,
}

impl ForkGuard {
    /// Remembers the current process.
    pub fn new() -> ForkGuard {
        let counted = handler_installed();
        ForkGuard { generation: GENERATION.load(Ordering::Relaxed), created_pid: std::process::id(), counted }
    }

    /// Process id remembered.
    pub fn created_pid(&self) -> u32 {
        self.created_pid
    }

    /// Ok in the process of [`new`](Self::new).
    ///
    /// # Errors
    /// [`ForkError`] in a forked child of it, at any depth.
    #[inline]
    pub fn check(&self) -> Result<(), ForkError> {
        // Relaxed is enough: a child starts as one thread, the one that ran the handler.
        let same = if self.counted {
            GENERATION.load(Ordering::Relaxed) == self.generation
        } else {
            std::process::id() == self.created_pid
        };
        if same { Ok(()) } else { Err(self.error()) }
    }

    #[cold]
    fn error(&self) -> ForkError {
        ForkError { created_pid: self.created_pid, current_pid: std::process::id() }
    }
}

impl Default for ForkGuard {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks, runs `child` there without returning to the harness, and gives its exit code.
    fn exit_code_of(child: impl Fn() -> i32) -> i32 {
        // SAFETY: the child calls only `child` (atomics, getpid, fork and waitpid: no allocation, no lock) and _exit.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            let code = child();
            // SAFETY: ends the child at once, without destructors or exit handlers of the parent's harness.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `pid` is our own child and `status` a live integer.
        let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
        assert_eq!(waited, pid);
        assert!(libc::WIFEXITED(status), "child was killed: status {status}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn the_child_is_refused_and_the_parent_is_not() {
        let guard = ForkGuard::new();
        assert_eq!(guard.check(), Ok(()));
        let parent = std::process::id();
        let code = exit_code_of(|| match guard.check() {
            Err(e) if e.created_pid == parent && e.current_pid == std::process::id() => 41,
            Err(_) => 2,
            Ok(()) => 1,
        });
        assert_eq!(code, 41);
        assert_eq!(guard.check(), Ok(()));
    }

    #[test]
    fn a_guard_made_in_the_child_holds_there_and_fails_in_the_grandchild() {
        let _installed_before = ForkGuard::new();
        let code = exit_code_of(|| {
            let own = ForkGuard::new();
            if own.check().is_err() {
                return 1;
            }
            exit_code_of(|| if own.check().is_err() { 42 } else { 2 })
        });
        assert_eq!(code, 42);
    }

    #[test]
    fn without_the_handler_process_ids_decide() {
        let guard = ForkGuard { counted: false, ..ForkGuard::new() };
        assert_eq!(guard.check(), Ok(()));
        assert_eq!(exit_code_of(|| if guard.check().is_err() { 43 } else { 1 }), 43);
    }

    #[test]
    fn the_message_names_both_processes() {
        let text = ForkError { created_pid: 10, current_pid: 20 }.to_string();
        assert!(text.contains("10") && text.contains("20"), "{text}");
    }
}
