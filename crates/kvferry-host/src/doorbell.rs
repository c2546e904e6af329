//! A file descriptor that becomes readable when something has happened: completions for event loops.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// An eventfd. Ringing it any number of times makes it readable once; clearing makes it unreadable again.
///
/// Ringing takes no lock and never blocks, so completion threads may do it.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
}

impl Doorbell {
    /// A doorbell that has not been rung. Its descriptor is not inherited by other programs.
    ///
    /// # Errors
    /// The system is out of file descriptors.
    pub fn new() -> std::io::Result<Doorbell> {
        Ok(Doorbell { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Makes the descriptor readable.
    pub fn ring(&self) {
        // AGAIN: the counter is full, so the descriptor is readable already.
        match rustix::io::write(&self.fd, &1u64.to_ne_bytes()) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!(%error, "cannot ring a doorbell"),
        }
    }

    /// Makes it unreadable; true if it had been rung.
    pub fn clear(&self) -> bool {
        let mut count = [0u8; 8];
        rustix::io::read(&self.fd, &mut count).is_ok()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Doorbell {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rings_are_one_and_clearing_resets() {
        let bell = Doorbell::new().unwrap();
        assert!(!bell.clear());
        bell.ring();
        bell.ring();
        assert!(bell.clear());
        assert!(!bell.clear());
    }
}
