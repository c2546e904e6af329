//! Descriptors that forked children must not keep open.
//!
//! A socket stays connected while any process holds it. Without this module a forked child (a DataLoader worker) would
//! keep the sockets of its parent open, and peers would see no hang-up when the parent dies.

use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

const CHUNK: usize = 256;

/// A part of the table of registered descriptors. Chunks are added and never freed, so the fork handler can walk them
/// without a lock or an allocation.
struct Chunk {
    /// Descriptor + 1; 0 is a free slot.
    slots: [AtomicI32; CHUNK],
    next: OnceLock<Box<Chunk>>,
}

impl Chunk {
    const fn new() -> Chunk {
        Chunk { slots: [const { AtomicI32::new(0) }; CHUNK], next: OnceLock::new() }
    }
}

static TABLE: Chunk = Chunk::new();

/// Taken while a descriptor exists that is not registered yet, and by every fork.
static OPENING: AtomicBool = AtomicBool::new(false);

fn take_opening() {
    while OPENING.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
        // Held for one or two system calls, so a sleep is never worth it.
        rustix::thread::sched_yield();
    }
}

fn release_opening() {
    OPENING.store(false, Ordering::Release);
}

extern "C" fn before_fork() {
    take_opening();
}

extern "C" fn in_parent() {
    release_opening();
}

/// Puts an eventfd under the number of every registered descriptor: what the parent holds stays as it is, the child lets
/// go of it, and objects the child inherits still own the number they think they own.
///
/// Runs in the child of a fork, so only async-signal-safe calls: atomics and system calls.
extern "C" fn in_child() {
    let mut placeholder = -1;
    let mut chunk = Some(&TABLE);
    while let Some(here) = chunk {
        for slot in &here.slots {
            let fd = slot.load(Ordering::Relaxed) - 1;
            if fd >= 0 {
                placeholder = replace(fd, placeholder);
            }
        }
        chunk = here.next.get().map(|next| &**next);
    }
    if placeholder >= 0 {
        // SAFETY: made by `replace` below and known to nobody else.
        unsafe { libc::close(placeholder) };
    }
    release_opening();
}

/// Replaces `fd` by a copy of `placeholder`, which is made on first use; gives the placeholder.
fn replace(fd: RawFd, mut placeholder: RawFd) -> RawFd {
    let make = || {
        // SAFETY: no pointers.
        unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
    };
    if placeholder < 0 {
        placeholder = make();
    }
    if placeholder < 0 {
        // The table of descriptors is full. Closing one makes room, and the new one may get its very number.
        // SAFETY: `fd` is registered, so it is open and ours; this process has no other thread that could use it.
        unsafe { libc::close(fd) };
        placeholder = make();
        if placeholder == fd {
            return -1;
        }
    }
    if placeholder >= 0 {
        // SAFETY: both are open or about to be, and `fd` is ours to replace (it is registered).
        unsafe { libc::dup3(placeholder, fd, libc::O_CLOEXEC) };
    }
    placeholder
}

fn handler_installed() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // SAFETY: static functions; the child's makes only async-signal-safe calls, the others touch one atomic.
        let status = unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        if status != 0 {
            tracing::warn!(status, "pthread_atfork failed: forked children will keep sockets open");
        }
        status == 0
    })
}

fn register(fd: RawFd) -> &'static AtomicI32 {
    let mut chunk = &TABLE;
    loop {
        for slot in &chunk.slots {
            if slot.compare_exchange(0, fd + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return slot;
            }
        }
        chunk = chunk.next.get_or_init(|| Box::new(Chunk::new()));
    }
}

/// An object with a descriptor that forked children let go of.
///
/// In a child of `fork(2)` the number stays taken, by an eventfd, so that the inherited object remains harmless: its
/// calls fail or find nothing, and dropping it closes that eventfd. The parent notices nothing.
pub struct CloseInChild<T: AsFd> {
    // Dropped in this order: no fork from before the entry goes until after the descriptor is closed. The entry goes
    // first because the number may be somebody else's once it is closed.
    _entry: Entry,
    inner: T,
    _after: LetForks,
}

/// A place in the table.
struct Entry(&'static AtomicI32);

impl Drop for Entry {
    fn drop(&mut self) {
        take_opening();
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Lets forks go on when dropped.
struct LetForks;

impl Drop for LetForks {
    fn drop(&mut self) {
        release_opening();
    }
}

impl<T: AsFd> CloseInChild<T> {
    /// Opens something with no fork in between: `open` must be quick, and must not fork or drop another of these.
    ///
    /// # Errors
    /// What `open` gives.
    pub fn open<E>(open: impl FnOnce() -> Result<T, E>) -> Result<CloseInChild<T>, E> {
        handler_installed();
        take_opening();
        // Also when `open` panics.
        let _held = LetForks;
        Ok(CloseInChild::registered_now(open()?))
    }

    /// Registers something that is open. A fork before this call keeps it open.
    pub fn new(inner: T) -> CloseInChild<T> {
        handler_installed();
        CloseInChild::registered_now(inner)
    }

    /// As [`new`](Self::new), inside the `open` of another.
    pub(crate) fn registered_now(inner: T) -> CloseInChild<T> {
        CloseInChild { _entry: Entry(register(inner.as_fd().as_raw_fd())), inner, _after: LetForks }
    }
}

impl<T: AsFd> Deref for CloseInChild<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> AsFd for CloseInChild<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<T: AsFd + fmt::Debug> fmt::Debug for CloseInChild<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
