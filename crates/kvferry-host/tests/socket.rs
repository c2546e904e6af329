//! Peer sockets: whole messages, descriptors, ends, and who is there.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use common::{Child, PATIENCE, alone, open_fds};
use kvferry_host::{
    Credentials, MAX_MESSAGE, MAX_MESSAGE_FDS, PeerAddress, PeerListener, PeerSocket, Received, SharedMemory,
};

fn message(socket: &PeerSocket) -> (Vec<u8>, Vec<OwnedFd>) {
    match socket.recv(Some(PATIENCE)).unwrap() {
        Received::Message(bytes, fds) => (bytes, fds),
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_stay_whole_and_in_order() {
    let (a, b) = PeerSocket::pair().unwrap();
    let lengths = [1, 7, 4096, MAX_MESSAGE, 2, 65_536];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (i, &len) in lengths.iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|at| (at * 31 + i) as u8).collect();
                a.send(&bytes, &[], PATIENCE).unwrap();
            }
        });
        for (i, &len) in lengths.iter().enumerate() {
            let (bytes, fds) = message(&b);
            assert_eq!(bytes, (0..len).map(|at| (at * 31 + i) as u8).collect::<Vec<u8>>());
            assert!(fds.is_empty());
        }
    });
    assert!(matches!(b.try_recv().unwrap(), Received::Nothing));
    b.send(b"back", &[], PATIENCE).unwrap();
    assert_eq!(message(&a).0, b"back");
}

#[test]
fn descriptors_come_with_their_message_and_close_on_exec() {
    let before = open_fds();
    let (a, b) = PeerSocket::pair().unwrap();
    let memory = SharedMemory::create("kvf-test", 4096).unwrap();
    let mut file = tempfile();
    file.write_all(b"content").unwrap();
    a.send(b"plain", &[], PATIENCE).unwrap();
    a.send(b"laden", &[memory.fd(), file.as_fd()], PATIENCE).unwrap();
    assert_eq!(message(&b).1.len(), 0);
    let (bytes, fds) = message(&b);
    assert_eq!((bytes.as_slice(), fds.len()), (b"laden".as_slice(), 2));
    for fd in &fds {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
    let mut fds = fds.into_iter();
    let mapped = SharedMemory::from_fd(fds.next().unwrap(), 4096).unwrap();
    mapped.words(0, 1).unwrap().store(0, 77);
    assert_eq!(memory.words(0, 1).unwrap().load(0), 77);
    let mut same = File::from(fds.next().unwrap());
    same.rewind().unwrap();
    let mut text = String::new();
    same.read_to_string(&mut text).unwrap();
    assert_eq!(text, "content");
    // One in a message that nobody reads must not stay open.
    a.send(b"lost", &[memory.fd()], PATIENCE).unwrap();
    drop((a, b, memory, mapped, file, same, fds));
    if alone() {
        assert_eq!(open_fds(), before);
    }
}

fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!("kvf-socket-{}", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

#[test]
fn what_is_over_the_limits_is_refused_on_both_sides() {
    let (a, b) = PeerSocket::pair().unwrap();
    let fd = a.as_fd();
    let refused = |bytes: &[u8], fds: &[BorrowedFd<'_>]| a.try_send(bytes, fds).unwrap_err().kind();
    assert_eq!(refused(&[], &[]), ErrorKind::InvalidInput);
    assert_eq!(refused(&vec![0; MAX_MESSAGE + 1], &[]), ErrorKind::InvalidInput);
    assert_eq!(refused(b"x", &[fd; MAX_MESSAGE_FDS + 1]), ErrorKind::InvalidInput);
    a.try_send(b"x", &[fd; MAX_MESSAGE_FDS]).unwrap();
    assert_eq!(message(&b).1.len(), MAX_MESSAGE_FDS);
    let before = open_fds();

    // A peer that does not use this type.
    let mut control = rustix::net::SendAncillaryBuffer::default();
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(&a, &[IoSlice::new(&vec![0; MAX_MESSAGE + 1])], &mut control, flags).unwrap();
    assert_eq!(b.try_recv().unwrap_err().kind(), ErrorKind::InvalidData);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(30))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let many = [fd; 30];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&many)));
    rustix::net::sendmsg(&a, &[IoSlice::new(b"x")], &mut control, flags).unwrap();
    assert_eq!(b.try_recv().unwrap_err().kind(), ErrorKind::InvalidData);
    if alone() {
        assert_eq!(open_fds(), before, "refused descriptors are closed");
    }
    // The connection goes on.
    a.try_send(b"still", &[]).unwrap();
    assert_eq!(message(&b).0, b"still");
}

#[test]
fn an_end_is_seen_after_everything_sent_before_it() {
    let (a, b) = PeerSocket::pair().unwrap();
    a.try_send(b"one", &[]).unwrap();
    a.try_send(b"bye", &[]).unwrap();
    // Unread messages at the closing end make the kernel report a reset before the data.
    b.try_send(b"never read", &[]).unwrap();
    drop(a);
    assert_eq!(message(&b).0, b"one");
    assert_eq!(message(&b).0, b"bye");
    assert!(matches!(b.recv(None).unwrap(), Received::HungUp));
    assert!(matches!(b.recv(None).unwrap(), Received::HungUp), "and stays seen");
    let error = b.try_send(b"x", &[]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
}

#[test]
fn a_full_socket_blocks_nobody_for_longer_than_asked() {
    let (a, b) = PeerSocket::pair().unwrap();
    let mut sent = 0u32;
    let full = loop {
        match a.try_send(&sent.to_le_bytes(), &[]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let start = Instant::now();
    let late = a.send(b"late", &[], Duration::from_millis(30)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    assert!((30..5_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    // Room wakes the sender, and nothing was lost.
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| a.send(b"last", &[], PATIENCE));
        for expected in 0..sent {
            assert_eq!(message(&b).0, expected.to_le_bytes());
        }
        assert_eq!(message(&b).0, b"last");
        sender.join().unwrap().unwrap();
    });
}

#[test]
fn receiving_waits_its_time() {
    let (_a, b) = PeerSocket::pair().unwrap();
    for limit in [Duration::ZERO, Duration::from_millis(20)] {
        let start = Instant::now();
        assert!(matches!(b.recv(Some(limit)).unwrap(), Received::Nothing));
        assert!(start.elapsed() >= limit);
    }
}

#[test]
fn the_kernel_tells_who_is_there() {
    let listener = PeerListener::bind(PeerAddress::random().unwrap()).unwrap();
    let child = Child::fork(|| {
        let Ok(socket) = PeerSocket::connect(listener.address(), PATIENCE) else { return 1 };
        let parent = socket.credentials().unwrap();
        match socket.recv(Some(PATIENCE)) {
            Ok(Received::Message(bytes, _)) if bytes == parent.pid.to_le_bytes() => 42,
            _ => 2,
        }
    });
    let socket = listener.accept(PATIENCE).unwrap().unwrap();
    assert_eq!(socket.credentials().unwrap(), Credentials { pid: child.0 as u32, ..Credentials::own() });
    socket.try_send(&std::process::id().to_le_bytes(), &[]).unwrap();
    assert_eq!(child.code(), 42);
}

#[test]
fn listeners_come_and_go() {
    let before = open_fds();
    let address = PeerAddress::random().unwrap();
    let refused = |address: &PeerAddress| PeerSocket::connect(address, PATIENCE).unwrap_err().kind();
    assert_eq!(refused(&address), ErrorKind::ConnectionRefused);
    let listener = PeerListener::bind(address.clone()).unwrap();
    assert_eq!(PeerListener::bind(address.clone()).unwrap_err().kind(), ErrorKind::AddrInUse);
    assert!(listener.accept(Duration::from_millis(5)).unwrap().is_none());
    // Connecting and sending need no accept.
    let callers: Vec<PeerSocket> = (0..63u8)
        .map(|i| {
            let socket = PeerSocket::connect(&address, PATIENCE).unwrap();
            socket.try_send(&[i], &[]).unwrap();
            socket
        })
        .collect();
    for i in 0..63u8 {
        let socket = listener.accept(PATIENCE).unwrap().unwrap();
        assert_eq!(message(&socket).0, [i]);
    }
    // Whoever waits in the queue when the listener goes is hung up on.
    let waiting = PeerSocket::connect(&address, PATIENCE).unwrap();
    drop(listener);
    assert!(matches!(waiting.recv(Some(PATIENCE)).unwrap(), Received::HungUp));
    assert_eq!(refused(&address), ErrorKind::ConnectionRefused);
    drop((callers, waiting));
    if alone() {
        assert_eq!(open_fds(), before);
    }
}

#[test]
fn a_full_queue_of_connections_times_out() {
    let listener = PeerListener::bind(PeerAddress::random().unwrap()).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match PeerSocket::connect(listener.address(), Duration::from_millis(20)) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
        assert!(waiting.len() < 10_000);
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(waiting.len() >= 64);
}

#[test]
fn a_socket_file_is_removed_with_its_listener_and_not_by_a_child() {
    let path = std::env::temp_dir().join(format!("kvf-listener-{}", std::process::id()));
    let listener = PeerListener::bind(PeerAddress::Path(path.clone())).unwrap();
    let moved = std::sync::Mutex::new(Some(listener));
    let child = Child::fork(|| {
        drop(moved.lock().unwrap().take());
        i32::from(path.exists())
    });
    assert_eq!(child.code(), 1, "dropped in the child");
    let socket = PeerSocket::connect(&PeerAddress::Path(path.clone()), PATIENCE).unwrap();
    drop(moved.lock().unwrap().take());
    assert!(!path.exists());
    drop(socket);
    let error = PeerSocket::connect(&PeerAddress::Path(path), PATIENCE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn names_too_long_for_the_system_are_errors() {
    for address in
        [PeerAddress::Abstract(vec![b'x'; 200]), PeerAddress::Path("/tmp/".to_owned().repeat(60).into())]
    {
        assert!(PeerListener::bind(address.clone()).is_err());
        assert!(PeerSocket::connect(&address, PATIENCE).is_err());
    }
}
