//! Watching another process for its end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::child_fds::CloseInChild;
use crate::poll::{Interest, poll_fds};
use crate::socket::PeerSocket;

/// From `asm-generic/socket.h`; the C library's headers may be older than the kernel (6.5).
const SO_PEERPIDFD: libc::c_int = 77;

/// A descriptor that becomes readable when a process ends, however that happens: also while a forked child keeps its
/// sockets open, and before anybody has waited for it. A stopped process has not ended.
#[derive(Debug)]
pub struct ProcessWatch {
    fd: CloseInChild<OwnedFd>,
}

impl ProcessWatch {
    /// Watches the process at the other end of a connected socket: the one that called `connect`, `listen` or
    /// `socketpair`, which also works across PID namespaces where the kernel can (6.5).
    ///
    /// On older kernels the process is found by its number, which is right only if it cannot have ended yet: call this
    /// while the peer is known to be there.
    ///
    /// # Errors
    /// The kernel has no pidfds (before 5.3), forbids them, or the process is gone (`NotFound`).
    pub fn of_peer(socket: &PeerSocket) -> io::Result<ProcessWatch> {
        match CloseInChild::open(|| peer_pidfd(socket)) {
            Ok(fd) => Ok(ProcessWatch { fd }),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP)) => {
                ProcessWatch::of_pid(socket.credentials()?.pid)
            }
            // How kernels say that the process has been reaped already.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ESRCH | libc::ENODATA)) =>
            {
                Err(gone())
            }
            Err(error) => Err(error),
        }
    }

    /// Watches the process with this number.
    ///
    /// # Errors
    /// No such process (`NotFound`), or the kernel has no pidfds or forbids them.
    pub fn of_pid(pid: u32) -> io::Result<ProcessWatch> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(gone)?;
        match CloseInChild::open(|| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Ok(fd) => Ok(ProcessWatch { fd }),
            Err(Errno::SRCH) => Err(gone()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has ended. Never waits.
    pub fn exited(&self) -> bool {
        poll_fds(&[(self.fd.as_fd(), Interest::Read)], Some(Duration::ZERO))
            .is_ok_and(|found| found[0].readable)
    }
}

impl AsFd for ProcessWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the process has ended")
}

fn peer_pidfd(socket: &PeerSocket) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut len = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: `fd` is a live integer of `len` bytes and `len` a live length; the kernel writes no more than that.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &mut len,
        )
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor (with close-on-exec) for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
