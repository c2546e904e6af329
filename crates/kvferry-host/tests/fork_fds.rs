//! Forked children let go of our descriptors, and only of ours.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Child, PATIENCE, alone, open_fds};
use kvferry_host::{CloseInChild, Doorbell, PeerAddress, PeerListener, PeerSocket, ProcessWatch, Received};

/// Keeps the child alive until the parent rings, and tells when it runs.
fn until_rung(started: &Doorbell, rung: &Doorbell) -> i32 {
    started.ring();
    let read = [(rung.as_fd(), kvferry_host::Interest::Read)];
    i32::from(kvferry_host::poll_fds(&read, Some(PATIENCE)).unwrap()[0].readable)
}

fn await_start(started: &Doorbell) {
    let read = [(started.as_fd(), kvferry_host::Interest::Read)];
    assert!(kvferry_host::poll_fds(&read, Some(PATIENCE)).unwrap()[0].readable);
}

#[test]
fn a_living_child_does_not_keep_a_socket_open() {
    let (started, end) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let (mine, theirs) = PeerSocket::pair().unwrap();
    let listener = PeerListener::bind(PeerAddress::random().unwrap()).unwrap();
    let child = Child::fork(|| until_rung(&started, &end));
    await_start(&started);
    // Still as it was in the parent.
    mine.try_send(b"after the fork", &[]).unwrap();
    assert!(matches!(theirs.try_recv().unwrap(), Received::Message(bytes, _) if bytes == b"after the fork"));
    drop(mine);
    assert!(matches!(theirs.recv(Some(PATIENCE)).unwrap(), Received::HungUp));
    let address = listener.address().clone();
    drop(listener);
    let error = PeerSocket::connect(&address, PATIENCE).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    end.ring();
    assert_eq!(child.code(), 1);
}

#[test]
fn without_registration_it_would() {
    // The control of the test above: what is not ours stays open in the child.
    let (started, end) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let (mine, theirs) = UnixStream::pair().unwrap();
    let child = Child::fork(|| until_rung(&started, &end));
    await_start(&started);
    drop(mine);
    theirs.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!((&theirs).read(&mut [0]).is_err(), "no end while the child lives");
    end.ring();
    assert_eq!(child.code(), 1);
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!((&theirs).read(&mut [0]).unwrap(), 0);
}

#[test]
fn what_the_child_inherits_is_harmless_there() {
    let (mine, theirs) = PeerSocket::pair().unwrap();
    let watch = ProcessWatch::of_pid(std::process::id()).unwrap();
    mine.try_send(b"for the parent", &[]).unwrap();
    let mut held = Some((mine, theirs, watch));
    let child = Child::fork(|| {
        let Some((mine, theirs, watch)) = held.take() else { return 1 };
        let number = theirs.as_fd().as_raw_fd();
        if mine.try_send(b"x", &[]).is_ok() || theirs.try_recv().is_ok() || watch.exited() {
            return 2;
        }
        // The numbers are taken, so nothing opened here can be closed or written to by the old objects.
        let Ok((mut own, mut other)) = UnixStream::pair() else { return 3 };
        if own.as_raw_fd() == number || other.as_raw_fd() == number {
            return 4;
        }
        drop((mine, theirs, watch));
        let mut byte = [0];
        if own.write_all(&[7]).is_err() || other.read_exact(&mut byte).is_err() || byte != [7] {
            return 5;
        }
        // New ones work, also those under the old numbers.
        let Ok((a, b)) = PeerSocket::pair() else { return 6 };
        let sent = a.try_send(b"new", &[]).is_ok();
        let came = matches!(b.try_recv(), Ok(Received::Message(bytes, _)) if bytes == b"new");
        if sent && came { 42 } else { 7 }
    });
    assert_eq!(child.code(), 42);
    let (mine, theirs, _watch) = held.unwrap();
    assert!(matches!(theirs.try_recv().unwrap(), Received::Message(bytes, _) if bytes == b"for the parent"));
    theirs.try_send(b"back", &[]).unwrap();
    assert!(matches!(mine.try_recv().unwrap(), Received::Message(..)));
}

#[test]
fn any_number_of_descriptors_and_grandchildren() {
    let pairs: Vec<_> = (0..400).map(|_| PeerSocket::pair().unwrap()).collect();
    let sockets = || open_fds().iter().filter(|link| link.starts_with("socket:")).count();
    assert!(sockets() >= 800);
    let before = sockets();
    let child = Child::fork(|| {
        if alone() && sockets() != before - 800 {
            return 1;
        }
        // Those the child makes are let go of by its own child.
        let Ok((a, b)) = PeerSocket::pair() else { return 2 };
        let grandchild = Child::fork(|| i32::from(a.try_send(b"x", &[]).is_err()) + 40);
        let code = grandchild.code();
        if a.try_send(b"x", &[]).is_ok() && b.try_recv().is_ok() { code } else { 3 }
    });
    assert_eq!(child.code(), 41);
    drop(pairs);
    if alone() {
        assert_eq!(sockets(), before - 800);
    }
}

#[test]
fn a_full_table_of_descriptors_is_no_obstacle() {
    let (mine, theirs) = PeerSocket::pair().unwrap();
    let more: Vec<_> = (0..5).map(|_| PeerSocket::pair().unwrap()).collect();
    let (started, end) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let child = Child::fork(|| {
        // In a child, so that other tests keep their limit. All numbers below the highest are taken, then none is free.
        let (a, b) = PeerSocket::pair().unwrap();
        let mut filler = Vec::new();
        let top = b.as_fd().as_raw_fd().max(a.as_fd().as_raw_fd()) as u64 + 40;
        let limit = libc::rlimit { rlim_cur: top, rlim_max: top };
        // SAFETY: a live structure.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) } != 0 {
            return 1;
        }
        while let Ok(copy) = started.as_fd().try_clone_to_owned() {
            filler.push(copy);
        }
        let mut held = Some((a, b));
        let grandchild = Child::fork(|| {
            let Some((a, b)) = held.take() else { return 1 };
            let gone = a.try_send(b"x", &[]).is_err() && b.try_recv().is_err();
            drop((a, b));
            let sockets = filler.len() * 2; // keeps them open
            if gone && sockets > 0 { until_rung(&started, &end) } else { 2 }
        });
        let Some((a, b)) = held else { return 2 };
        await_start(&started);
        drop(a);
        let hung_up = matches!(b.recv(Some(PATIENCE)), Ok(Received::HungUp));
        end.ring();
        if grandchild.code() == 1 && hung_up { 42 } else { 3 }
    });
    assert_eq!(child.code(), 42);
    drop((mine, theirs, more));
}

#[test]
fn no_fork_catches_a_socket_between_opening_and_registering() {
    if !alone() {
        return;
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let listener = PeerListener::bind(PeerAddress::random().unwrap()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let caller = PeerSocket::connect(listener.address(), PATIENCE).unwrap();
                    let pair = PeerSocket::pair().unwrap();
                    let other = listener.accept(PATIENCE).unwrap();
                    drop((caller, other, pair));
                }
            });
        }
        for round in 0..200 {
            let child =
                Child::fork(|| open_fds().iter().filter(|link| link.starts_with("socket:")).count() as i32);
            let left = child.code();
            if left != 0 {
                stop.store(true, Ordering::Relaxed);
                panic!("round {round}: {left} sockets open in the child");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn other_kinds_of_sockets_can_be_registered() {
    let listener = CloseInChild::open(|| TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let stream = CloseInChild::new(TcpStream::connect(address).unwrap());
    let (started, end) = (Doorbell::new().unwrap(), Doorbell::new().unwrap());
    let child = Child::fork(|| until_rung(&started, &end));
    await_start(&started);
    let (mut accepted, _) = listener.accept().unwrap();
    drop((stream, listener));
    assert_eq!(accepted.read(&mut [0]).unwrap(), 0, "the child does not hold the other end");
    TcpListener::bind(address).expect("the port is free although the child lives");
    end.ring();
    assert_eq!(child.code(), 1);
}

#[test]
fn a_failed_opening_registers_nothing() {
    let failed = CloseInChild::open(|| Err::<TcpListener, _>(std::io::Error::other("no")));
    assert_eq!(failed.unwrap_err().to_string(), "no");
    let panicked = std::panic::catch_unwind(|| {
        let _ = CloseInChild::<TcpListener>::open::<()>(|| panic!("while forks wait"));
    });
    assert!(panicked.is_err());
    // Forks do not hang on it.
    assert_eq!(Child::fork(|| 42).code(), 42);
}
