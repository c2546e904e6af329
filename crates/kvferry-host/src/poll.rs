//! Waiting for several descriptors at once.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// What to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something to read, or the end.
    Read,
    /// Room to write, or the end.
    Write,
    /// Either.
    Both,
    /// Only the end, however much there is to read.
    End,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Reading would not block: data, the end, or an error.
    pub readable: bool,
    /// Writing would not block: room, or an error.
    pub writable: bool,
    /// The other end is gone, or the descriptor is broken; there may still be something to read.
    pub ended: bool,
}

/// Waits until one of `fds` is ready, at most `timeout` (`None`: without limit); the state of each, in order. All are
/// `false` after a timeout. Interruptions by signals are waited through.
///
/// # Errors
/// The system's refusal (too many descriptors, no memory).
pub fn poll_fds(fds: &[(BorrowedFd<'_>, Interest)], timeout: Option<Duration>) -> io::Result<Vec<Readiness>> {
    let start = Instant::now();
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .map(|&(fd, interest)| {
            let events = match interest {
                Interest::Read => PollFlags::IN,
                Interest::Write => PollFlags::OUT,
                Interest::Both => PollFlags::IN | PollFlags::OUT,
                // The end is always told.
                Interest::End => PollFlags::empty(),
            };
            PollFd::from_borrowed_fd(fd, events)
        })
        .collect();
    loop {
        // A limit too long for the system's clock type is no limit.
        let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match rustix::event::poll(&mut polled, left.as_ref()) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    Ok(polled
        .iter()
        .zip(fds)
        .map(|(fd, (_, interest))| {
            let found = fd.revents();
            let is = |flags: PollFlags| found.intersects(flags.union(ended));
            Readiness {
                readable: matches!(interest, Interest::Read | Interest::Both) && is(PollFlags::IN),
                writable: matches!(interest, Interest::Write | Interest::Both) && is(PollFlags::OUT),
                ended: found.intersects(ended),
            }
        })
        .collect())
}
