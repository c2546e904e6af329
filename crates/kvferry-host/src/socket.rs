//! Sockets between the ranks of one machine: whole messages, descriptors with them, and who is at the other end.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::child_fds::CloseInChild;
use crate::poll::{Interest, poll_fds};
use crate::random::random_bytes;

/// Most bytes of one message.
pub const MAX_MESSAGE: usize = (64 << 10) + 1024;
/// Most descriptors with one message.
pub const MAX_MESSAGE_FDS: usize = 8;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Room for a few of the largest messages; the system may grant less, then senders wait more often.
const SEND_BUFFER: usize = 4 * MAX_MESSAGE;
const BACKLOG: i32 = 128;

/// Where a [`PeerListener`] waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerAddress {
    /// A name in Linux's abstract namespace: no file, gone with the listener, shared by a network namespace.
    Abstract(Vec<u8>),
    /// A socket file, removed with the listener.
    Path(PathBuf),
}

impl PeerAddress {
    /// An abstract address that nobody can guess.
    ///
    /// # Errors
    /// The system has no random source.
    pub fn random() -> io::Result<PeerAddress> {
        let name: String = random_bytes::<16>()?.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(PeerAddress::Abstract(format!("kvferry-{name}").into_bytes()))
    }

    fn unix(&self) -> Result<SocketAddrUnix, Errno> {
        match self {
            PeerAddress::Abstract(name) => SocketAddrUnix::new_abstract_name(name),
            PeerAddress::Path(path) => SocketAddrUnix::new(path.as_path()),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Abstract(name) => write!(f, "@{}", name.escape_ascii()),
            PeerAddress::Path(path) => path.display().fmt(f),
        }
    }
}

/// The process at the other end of a socket, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id in this process's PID namespace; 0 if it has none there.
    pub pid: u32,
    /// Effective user when it connected or listened.
    pub uid: u32,
    /// Effective group then.
    pub gid: u32,
}

impl Credentials {
    /// This process's own.
    pub fn own() -> Credentials {
        Credentials {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }
}

/// A message, or why there is none.
#[derive(Debug)]
pub enum Received {
    /// A whole message and the descriptors that came with it.
    Message(Vec<u8>, Vec<OwnedFd>),
    /// Nobody is at the other end any more, and everything it sent has been read.
    HungUp,
    /// Nothing came in time.
    Nothing,
}

/// One end of a connection that keeps messages whole (Unix `SOCK_SEQPACKET`). Not inherited by other programs, let go of
/// by forked children. Calls from several threads are each whole.
#[derive(Debug)]
pub struct PeerSocket {
    fd: CloseInChild<OwnedFd>,
}

impl PeerSocket {
    /// Two connected ends.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn pair() -> io::Result<(PeerSocket, PeerSocket)> {
        let mut second = None;
        let first = CloseInChild::open(|| {
            let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
            second = Some(PeerSocket::of(CloseInChild::registered_now(b)));
            Ok::<_, Errno>(a)
        })?;
        let second = second.ok_or(Errno::IO)?;
        Ok((PeerSocket::of(first), second))
    }

    /// Connects to a listener. A connection that the listener has not accepted yet counts.
    ///
    /// # Errors
    /// `ConnectionRefused` or `NotFound`: nobody listens there (in this network namespace, for abstract addresses).
    /// `TimedOut`: the listener's queue stayed full.
    pub fn connect(address: &PeerAddress, timeout: Duration) -> io::Result<PeerSocket> {
        let start = Instant::now();
        let unix = address.unix()?;
        let socket = PeerSocket::of(CloseInChild::open(|| {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
        })?);
        loop {
            match rustix::net::connect(&socket.fd, &unix) {
                Ok(()) => return Ok(socket),
                Err(Errno::INTR) => {}
                // The queue of a Unix listener is full; there is nothing to poll for.
                Err(Errno::AGAIN) if start.elapsed() < timeout => {
                    std::thread::sleep(Duration::from_millis(2))
                }
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn of(fd: CloseInChild<OwnedFd>) -> PeerSocket {
        // A refusal leaves the default, which is enough for one message.
        if let Err(error) = rustix::net::sockopt::set_socket_send_buffer_size(&fd, SEND_BUFFER) {
            tracing::debug!(%error, "the send buffer of a peer socket stays small");
        }
        PeerSocket { fd }
    }

    /// Sends one message with copies of descriptors, or fails with `WouldBlock` and sends nothing.
    ///
    /// # Errors
    /// `InvalidInput`: empty, over [`MAX_MESSAGE`] or [`MAX_MESSAGE_FDS`]. `WouldBlock`: no room, or too many descriptors
    /// are under way; try again. `BrokenPipe` or `ConnectionReset`: nobody is at the other end.
    pub fn try_send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if message.is_empty() || message.len() > MAX_MESSAGE || fds.len() > MAX_MESSAGE_FDS {
            let text = format!(
                "a message has 1 to {MAX_MESSAGE} bytes and up to {MAX_MESSAGE_FDS} descriptors, not {} and {}",
                message.len(),
                fds.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)
            {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::TOOMANYREFS) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends one message with copies of descriptors, waiting for room at most `timeout`.
    ///
    /// # Errors
    /// As [`try_send`](Self::try_send), with `TimedOut` for no room.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<()> {
        let start = Instant::now();
        loop {
            match self.try_send(message, fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Descriptors under way are no reason to be woken for, so look again soon.
            let nap = if fds.is_empty() { left } else { left.min(Duration::from_millis(5)) };
            let found = poll_fds(&[(self.fd.as_fd(), Interest::Write)], Some(nap))?;
            if found[0].writable && !fds.is_empty() {
                std::thread::sleep(Duration::from_millis(1).min(left));
            }
        }
    }

    /// Receives one message if one is there.
    ///
    /// # Errors
    /// `InvalidData`: a message larger than [`MAX_MESSAGE`] or with more than [`MAX_MESSAGE_FDS`] descriptors; it is lost.
    pub fn try_recv(&self) -> io::Result<Received> {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut resets = 0;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.fd, into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => {
                    // Taken first: an error below must not leak them.
                    let mut fds = Vec::new();
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(received) = message {
                            fds.extend(received);
                        }
                    }
                    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message over the limits"));
                    }
                    if got.bytes == 0 {
                        return Ok(Received::HungUp);
                    }
                    bytes.truncate(got.bytes);
                    bytes.shrink_to_fit();
                    return Ok(Received::Message(bytes, fds));
                }
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::INTR) => {}
                // The other end closed with messages of ours unread. Told once; what it sent before can still be read.
                Err(Errno::CONNRESET) if resets < 2 => resets += 1,
                Err(Errno::CONNRESET) => return Ok(Received::HungUp),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one message, waiting at most `timeout` (`None`: without limit).
    ///
    /// # Errors
    /// As [`try_recv`](Self::try_recv).
    pub fn recv(&self, timeout: Option<Duration>) -> io::Result<Received> {
        let start = Instant::now();
        loop {
            match self.try_recv()? {
                Received::Nothing => {}
                done => return Ok(done),
            }
            let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Received::Nothing);
            }
            poll_fds(&[(self.fd.as_fd(), Interest::Read)], left)?;
        }
    }

    /// Who is at the other end: the process that connected, listened or made the pair.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn credentials(&self) -> io::Result<Credentials> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `found` is a live structure of `len` bytes that any bytes may fill; the kernel writes no more.
        let status = unsafe {
            libc::getsockopt(
                self.fd.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &mut len,
            )
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Credentials { pid: u32::try_from(found.pid).unwrap_or(0), uid: found.uid, gid: found.gid })
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Waits for connections. Not inherited by other programs, let go of by forked children.
#[derive(Debug)]
pub struct PeerListener {
    fd: CloseInChild<OwnedFd>,
    address: PeerAddress,
    /// Process that removes the socket file.
    owner: u32,
}

impl PeerListener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// `AddrInUse`, or the system's refusal. A socket file that a killed process left is in use too; remove it first.
    pub fn bind(address: PeerAddress) -> io::Result<PeerListener> {
        let unix = address.unix()?;
        let fd = CloseInChild::open(|| {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
        })?;
        rustix::net::bind(&fd, &unix)?;
        let listener = PeerListener { fd, address, owner: std::process::id() };
        rustix::net::listen(&listener.fd, BACKLOG)?;
        Ok(listener)
    }

    /// Where it listens.
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// The next connection, waiting at most `timeout`; `None` if none came.
    ///
    /// # Errors
    /// The system's refusal, such as no free descriptor.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<PeerSocket>> {
        let start = Instant::now();
        loop {
            match CloseInChild::open(|| rustix::net::accept_with(&self.fd, FLAGS)) {
                Ok(fd) => return Ok(Some(PeerSocket::of(fd))),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            poll_fds(&[(self.fd.as_fd(), Interest::Read)], Some(left))?;
        }
    }
}

impl AsFd for PeerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        if let PeerAddress::Path(path) = &self.address
            && self.owner == std::process::id()
        {
            remove(path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "cannot remove a socket file");
    }
}
