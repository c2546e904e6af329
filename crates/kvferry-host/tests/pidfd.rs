//! The end of a process, seen through a descriptor.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use common::{Child, PATIENCE, eventually};
use kvferry_host::{Interest, PeerAddress, PeerListener, PeerSocket, ProcessWatch, Received, poll_fds};

/// A child connected to this process, which runs `body`.
fn connected(body: impl FnOnce(PeerSocket) -> i32) -> (Child, PeerSocket) {
    let listener = PeerListener::bind(PeerAddress::random().unwrap()).unwrap();
    let child = Child::fork(|| body(PeerSocket::connect(listener.address(), PATIENCE).unwrap()));
    let socket = listener.accept(PATIENCE).unwrap().unwrap();
    assert_eq!(socket.credentials().unwrap().pid as i32, child.0);
    (child, socket)
}

fn sleep_for_long() -> i32 {
    std::thread::sleep(Duration::from_secs(25));
    0
}

#[test]
fn a_kill_is_seen_while_a_grandchild_holds_the_socket() {
    let (child, socket) = connected(|socket| {
        // As a program that forks without the C library: nothing closes the socket for it.
        let held = socket.as_fd().try_clone_to_owned().unwrap();
        let grandchild = Child::fork(|| {
            let _held = held;
            sleep_for_long()
        });
        socket.try_send(&grandchild.0.to_le_bytes(), &[]).unwrap();
        std::mem::forget(grandchild);
        sleep_for_long()
    });
    let Received::Message(bytes, _) = socket.recv(Some(PATIENCE)).unwrap() else { panic!("no message") };
    let grandchild = i32::from_le_bytes(bytes.try_into().unwrap());
    let watch = ProcessWatch::of_peer(&socket).unwrap();
    assert!(!watch.exited());

    let start = Instant::now();
    child.signal(libc::SIGKILL);
    let found = poll_fds(&[(watch.as_fd(), Interest::Read)], Some(PATIENCE)).unwrap();
    assert!(found[0].readable);
    // Nobody has waited for it yet: a zombie has ended.
    assert!(watch.exited());
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(matches!(socket.try_recv().unwrap(), Received::Nothing), "the grandchild holds the other end");
    // SAFETY: the grandchild cannot have been reaped by anybody before its sleep ends.
    assert_eq!(unsafe { libc::kill(grandchild, libc::SIGKILL) }, 0);
    assert!(matches!(socket.recv(Some(PATIENCE)).unwrap(), Received::HungUp));
}

#[test]
fn a_stopped_process_has_not_ended() {
    let (child, socket) = connected(|_socket| sleep_for_long());
    let watch = ProcessWatch::of_peer(&socket).unwrap();
    child.signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!watch.exited());
    assert!(matches!(socket.try_recv().unwrap(), Received::Nothing));
    child.signal(libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!watch.exited());
    child.signal(libc::SIGKILL);
    eventually("the end", || watch.exited());
}

#[test]
fn an_orderly_exit_is_an_end() {
    let (child, socket) = connected(|socket| {
        socket.recv(Some(PATIENCE)).unwrap();
        0
    });
    let watches = [ProcessWatch::of_peer(&socket).unwrap(), ProcessWatch::of_pid(child.0 as u32).unwrap()];
    assert!(watches.iter().all(|watch| !watch.exited()));
    socket.try_send(b"go", &[]).unwrap();
    eventually("the end", || watches.iter().all(ProcessWatch::exited));
    let pid = child.0 as u32;
    assert_eq!(child.code(), 0);
    assert!(watches.iter().all(ProcessWatch::exited), "and stays seen when it has been reaped");
    // Too late now.
    for gone in [ProcessWatch::of_peer(&socket).map(drop), ProcessWatch::of_pid(pid).map(drop)] {
        match gone {
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
            // Since Linux 6.16 the descriptor can be had after the end, and tells it.
            Ok(()) => assert!(ProcessWatch::of_peer(&socket).unwrap().exited()),
        }
    }
}

#[test]
fn numbers_of_nobody_are_refused() {
    for pid in [0, u32::MAX, i32::MAX as u32] {
        assert_eq!(ProcessWatch::of_pid(pid).unwrap_err().kind(), ErrorKind::NotFound, "{pid}");
    }
    assert!(!ProcessWatch::of_pid(std::process::id()).unwrap().exited());
}
