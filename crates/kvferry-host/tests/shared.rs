//! Shared memory between mappings and between processes.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Child, PATIENCE, alone, open_fds};
use kvferry_host::{BELL_BYTES, Bell, SharedError, SharedMemory, SharedWords};
use rustix::fs::{MemfdFlags, SealFlags};

fn copy_of(memory: &SharedMemory) -> OwnedFd {
    memory.fd().try_clone_to_owned().unwrap()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:kvf-test").count()
}

#[test]
fn two_mappings_show_the_same_bytes_and_words() {
    let one = SharedMemory::create("kvf-test", 12_345).unwrap();
    let two = SharedMemory::from_fd(copy_of(&one), 12_345).unwrap();
    assert_ne!(one.region().addr(), two.region().addr());
    assert_eq!((one.len(), two.region().len()), (12_345, 12_345));

    let mut bytes = [1; 12_345];
    two.region().read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 12_345], "fresh memory is zero");
    let pattern: Vec<u8> = (0..12_345u32).map(|i| (i * 7 + i / 251) as u8).collect();
    one.region().write(0, &pattern).unwrap();
    two.region().read(0, &mut bytes).unwrap();
    assert_eq!(bytes.as_slice(), pattern);

    let (mine, theirs) = (one.words(64, 3).unwrap(), two.words(64, 3).unwrap());
    for i in 0..3 {
        mine.store(i, 100 + i as u64);
    }
    assert_eq!([0, 1, 2].map(|i| theirs.load(i)), [100, 101, 102]);
    assert_eq!(theirs.add(1, 9), 101);
    assert_eq!(mine.load(1), 110);
    assert_eq!(mine.compare_exchange(2, 5, 6), Err(102));
    assert_eq!(mine.compare_exchange(2, 102, u64::MAX), Ok(102));
    assert_eq!(theirs.add(2, 2), u64::MAX);
    assert_eq!(theirs.load_relaxed(2), 1, "addition wraps");
    let mut raw = [0; 8];
    one.region().read(72, &mut raw).unwrap();
    assert_eq!(u64::from_le_bytes(raw), 110, "words are little-endian in the bytes");
}

#[test]
fn local_words_are_as_shared_ones() {
    let words = SharedWords::local(5);
    let other = words.clone();
    assert_eq!((words.len(), words.is_empty(), SharedWords::local(0).is_empty()), (5, false, true));
    other.store_relaxed(4, 7);
    drop(other);
    assert_eq!((0..5).map(|i| words.load(i)).collect::<Vec<_>>(), [0, 0, 0, 0, 7]);
}

#[test]
fn words_and_bells_that_leave_the_memory_are_refused() {
    let memory = SharedMemory::create("kvf-test", 64).unwrap();
    assert!(memory.words(0, 8).is_ok());
    assert!(memory.words(64, 0).is_ok());
    assert!(memory.bell(64 - BELL_BYTES).is_ok());
    let bounds = |start, end| Some(SharedError::Bounds { start, end, len: 64 });
    assert_eq!(memory.words(0, 9).err(), bounds(0, 72));
    assert_eq!(memory.words(8, usize::MAX).err(), bounds(8, u64::MAX));
    assert_eq!(memory.bell(64).err(), bounds(64, 72));
    assert_eq!(memory.words(u64::MAX - 7, 2).err(), bounds(u64::MAX - 7, u64::MAX));
    assert_eq!(memory.words(4, 1).err(), Some(SharedError::Misaligned { offset: 4, align: 8 }));
    assert_eq!(memory.bell(12).err(), Some(SharedError::Misaligned { offset: 12, align: 8 }));
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    assert_eq!(SharedMemory::create("kvf-test", 0).err(), Some(SharedError::ZeroLength));
    let huge = u64::MAX - 1;
    assert_eq!(SharedMemory::create("kvf-test", huge).err(), Some(SharedError::TooLarge { bytes: huge }));
    // More than the address space of today's processors, though a legal file size.
    let result = SharedMemory::create("kvf-test", 1 << 60);
    assert!(matches!(result, Err(SharedError::System { .. })), "{result:?}");
}

#[test]
fn a_hostile_descriptor_is_refused() {
    let memory = SharedMemory::create("kvf-test", 8192).unwrap();
    for announced in [4096, 8191, 8193, 1 << 40] {
        let wrong = SharedMemory::from_fd(copy_of(&memory), announced);
        assert_eq!(wrong.err(), Some(SharedError::WrongSize { expected: announced, found: 8192 }));
    }
    // The size could be changed after the check, and touching the memory would then kill the reader.
    let open = rustix::fs::memfd_create("kvf-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&open, 8192).unwrap();
    let unsealed = |fd: &OwnedFd| SharedMemory::from_fd(fd.try_clone().unwrap(), 8192).err();
    assert_eq!(unsealed(&open), Some(SharedError::NotSealed));
    rustix::fs::fcntl_add_seals(&open, SealFlags::GROW).unwrap();
    assert_eq!(unsealed(&open), Some(SharedError::NotSealed));
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert_eq!(unsealed(&pipe), Some(SharedError::NotSealed));
    let file = OwnedFd::from(File::open("/proc/self/exe").unwrap());
    assert_eq!(unsealed(&file), Some(SharedError::NotSealed));
    // Read-only memory of a peer: mapping it writable fails, it does not fault later.
    rustix::fs::fcntl_add_seals(&open, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
    let read_only = unsealed(&open);
    assert!(matches!(read_only, Some(SharedError::System { call: "mmap", .. })), "{read_only:?}");
}

#[test]
fn its_size_is_fixed() {
    let memory = SharedMemory::create("kvf-test", 8192).unwrap();
    for len in [0, 4096, 1 << 20] {
        assert!(rustix::fs::ftruncate(memory.fd(), len).is_err(), "{len}");
    }
    // Nor can a peer make it fail by sealing it against writes.
    assert!(rustix::fs::fcntl_add_seals(memory.fd(), SealFlags::WRITE).is_err());
}

#[test]
fn the_mapping_lives_as_long_as_anything_in_it() {
    let before = (open_fds(), mappings());
    let memory = SharedMemory::create("kvf-test", 4096).unwrap();
    let (region, words, bell) = (memory.region(), memory.words(0, 1).unwrap(), memory.bell(8).unwrap());
    drop(memory);
    words.store(0, 5);
    bell.ring();
    let mut bytes = [0; 12];
    region.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    drop((region, words));
    assert_eq!(bell.value(), 1);
    drop(bell);
    if alone() {
        assert_eq!((open_fds(), mappings()), before);
    }
}

#[test]
fn nothing_appears_in_dev_shm() {
    let memory = SharedMemory::create("kvf-test-of-dev-shm", 4096).unwrap();
    memory.words(0, 1).unwrap().store(0, 1);
    let names = std::fs::read_dir("/dev/shm")
        .map(|dir| dir.flatten().filter(|entry| entry.file_name().to_string_lossy().contains("kvf")).count());
    assert_eq!(names.unwrap_or(0), 0);
}

#[test]
fn bells_and_words_work_between_processes() {
    let memory = SharedMemory::create("kvf-test", 4096).unwrap();
    const ROUNDS: u64 = 2_000;
    // Word 0 is the parent's turn, word 1 the child's; each has its bell.
    let (words, to_child, to_parent) =
        (memory.words(0, 2).unwrap(), memory.bell(64).unwrap(), memory.bell(128).unwrap());
    let wait = |bell: &Bell, word: usize, at_least: u64| {
        let start = Instant::now();
        loop {
            let seen = bell.value();
            if words.load(word) >= at_least {
                return true;
            }
            if start.elapsed() > PATIENCE || !bell.wait(seen, PATIENCE) {
                return false;
            }
        }
    };
    let child = Child::fork(|| {
        for round in 1..=ROUNDS {
            if !wait(&to_child, 0, round) {
                return 1;
            }
            words.add(1, 1);
            to_parent.ring();
        }
        42
    });
    for round in 1..=ROUNDS {
        words.store(0, round);
        to_child.ring();
        assert!(wait(&to_parent, 1, round), "round {round}");
    }
    assert_eq!(child.code(), 42);
}

#[test]
fn a_bell_waits_its_time_and_no_ring_is_lost() {
    let bell = Bell::local();
    for limit in [Duration::ZERO, Duration::from_micros(50), Duration::from_millis(15)] {
        let start = Instant::now();
        assert!(!bell.wait(bell.value(), limit));
        assert!(start.elapsed() >= limit);
    }
    let seen = bell.value();
    bell.ring();
    assert!(bell.wait(seen, Duration::ZERO));
    assert!(bell.wait(seen, Duration::MAX), "rung before the wait");
    for _ in 0..300 {
        let seen = bell.value();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| assert!(bell.wait(seen, PATIENCE)));
            }
            scope.spawn(|| bell.ring());
        });
    }
}

#[test]
fn a_waiter_killed_in_its_sleep_leaves_the_bell_working() {
    let memory = SharedMemory::create("kvf-test", 4096).unwrap();
    let (bell, ready) = (memory.bell(0).unwrap(), memory.words(64, 1).unwrap());
    let child = Child::fork(|| {
        ready.store(0, 1);
        i32::from(bell.wait(bell.value(), Duration::from_secs(25)))
    });
    common::eventually("the child's start", || ready.load(0) == 1);
    std::thread::sleep(Duration::from_millis(20));
    drop(child);
    let rung = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let seen = bell.value();
        let (bell, rung) = (&bell, &rung);
        scope.spawn(move || rung.store(bell.wait(seen, PATIENCE), Ordering::Relaxed));
        std::thread::sleep(Duration::from_millis(10));
        bell.ring();
    });
    assert!(rung.load(Ordering::Relaxed));
    assert!(memory.fd().as_fd().try_clone_to_owned().is_ok());
}
