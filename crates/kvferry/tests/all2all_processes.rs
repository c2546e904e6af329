//! Ranks that are processes, and are killed, stopped or leave: this test binary starts itself again as the ranks.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod exchange;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use exchange::*;
use kvferry::all2all::{All2All, ExchangeFailure, internals::Mesh, rendezvous};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error};

use ExchangeOp::{GatherHeads, SendRecvHeads};

/// The promise: a death is known everywhere after this.
const DEATH: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_millis(600);

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

/// Says something to the parent.
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write;
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n@ {}", format_args!($($arg)*)).unwrap();
        out.flush().unwrap();
    }};
}

/// What runs in a child. Without the variables it is a test that does nothing.
#[test]
fn child() {
    let Ok(mode) = std::env::var("KVF_MODE") else { return };
    let (rank, world): (usize, usize) = (var("KVF_RANK").parse().unwrap(), var("KVF_WORLD").parse().unwrap());
    if mode == "leaks" {
        return leaks();
    }
    let connect = |rank: usize, world: usize, name: &str| -> kvferry::Result<All2All> {
        let meet = rendezvous(&var("KVF_URL"), rank, world, PATIENCE)?;
        let builder = All2All::builder(rank, world).name(name).rendezvous(meet).capacity_bytes(64 << 20);
        builder.timeout(if mode == "stop" { TIMEOUT } else { PATIENCE }).connect()
    };
    if mode == "join" && rank == 1 {
        let meet = rendezvous(&var("KVF_URL"), rank, world, PATIENCE).unwrap();
        let _mesh = Mesh::join(rank, world, &*meet, "one", PATIENCE).unwrap();
        say!("ready");
        std::thread::sleep(PATIENCE);
        return;
    }
    let comm = match connect(rank, world, "one") {
        Ok(comm) => comm,
        Err(error) => {
            say!("ready");
            say!("set-up: {error}");
            return;
        }
    };
    let large = mode == "large";
    let tokens = vec![if large { 4096 } else { 3 }; world];
    let whole = Whole::new(1, &tokens, 2 * world as u64, if large { 64 } else { 8 }, Dtype::Float32);
    match &*mode {
        "leave" if rank == 1 => {
            call(&comm, &whole, SendRecvHeads).unwrap();
            say!("ready");
            // No destructor runs.
            std::process::exit(0);
        }
        "fork" if rank == 1 => {
            // SAFETY: the child only sleeps: no allocation, no lock.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                loop {
                    // SAFETY: waits for a signal, touches nothing.
                    unsafe { libc::pause() };
                }
            }
            say!("child {pid}");
        }
        "close" => {
            call(&comm, &whole, SendRecvHeads).unwrap();
            say!("ready");
            if rank == 1 {
                std::thread::sleep(PATIENCE);
            }
            let start = Instant::now();
            let closed = comm.close();
            say!("closed {} after {} ms", closed.is_ok(), start.elapsed().as_millis());
            return;
        }
        _ => {}
    }
    let input = whole.input(SendRecvHeads, rank);
    let options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
    let mut calls = 0_u64;
    let failure = loop {
        match comm.send_recv_heads(std::slice::from_ref(&input.array), &options) {
            Ok(results) => {
                if calls.is_multiple_of(64) {
                    whole.check(SendRecvHeads, rank, HeadLayout::Bnhd, &results[0]);
                }
            }
            Err(error) => break error,
        }
        calls += 1;
        if calls == 20 {
            say!("ready");
        }
    };
    match failure {
        Error::Exchange(ExchangeFailure::PeerDied { peer, pid, when }) => {
            say!("died {peer} {pid} {}", when.epoch > 20)
        }
        Error::Exchange(ExchangeFailure::PeerTimeout { peer, waited, .. }) => {
            say!("timeout {peer} {}", waited.as_millis())
        }
        other => say!("other: {other}"),
    }
    if mode == "calls" && rank != 1 {
        // What is left of the group sets itself up anew, while the old communicator is still there.
        let again = connect(rank / 2, world - 1, "two").unwrap();
        let whole = Whole::new(2, &vec![2; world - 1], 4, 8, Dtype::Float16);
        for seed in 0..20 {
            call(&again, &whole.seeded(seed), SendRecvHeads).unwrap();
            call(&again, &whole.seeded(seed), GatherHeads).unwrap();
        }
        again.close().unwrap();
        assert!(comm.close().is_err());
        say!("again");
    }
}

/// Makes, uses and breaks communicators; afterwards the process has what it had before.
fn leaks() {
    let whole = Whole::new(1, &[3, 2, 4], 6, 8, Dtype::Float16);
    let round = || {
        ranks(
            3,
            |builder| builder,
            |comm| {
                let held = call(&comm, &whole, SendRecvHeads).unwrap();
                match comm.rank() {
                    0 => comm.close().unwrap(),
                    1 => drop(comm),
                    _ => assert!(comm.close().is_ok()),
                }
                drop(held);
            },
        );
        ranks(
            3,
            |builder| builder,
            |comm| {
                if comm.rank() == 1 {
                    comm.abort("over").unwrap();
                }
                assert!(call(&comm, &whole, SendRecvHeads).is_err());
            },
        );
    };
    let count = |dir: &str| fs::read_dir(dir).unwrap().count();
    let mapped = || fs::read_to_string("/proc/self/maps").unwrap().matches("kvferry").count();
    let now = || (count("/proc/self/fd"), count("/proc/self/task"), mapped());
    round();
    let before = now();
    for _ in 0..10 {
        round();
    }
    // Threads that were told to end may need a moment.
    let start = Instant::now();
    while now() != before && start.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(5));
    }
    say!("leaks {before:?} {:?}", now());
}

/// One rank's process and what it says.
struct Rank {
    child: Child,
    said: Receiver<String>,
}

impl Rank {
    fn start(mode: &str, rank: usize, world: usize, url: &str) -> Rank {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .envs([("KVF_MODE", mode), ("KVF_URL", url)])
            .envs([("KVF_RANK", rank.to_string()), ("KVF_WORLD", world.to_string())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (send, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(said) = line.strip_prefix("@ ") {
                    let _ = send.send(said.to_owned());
                }
            }
        });
        Rank { child, said }
    }

    /// The next thing it says.
    fn hear(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("a rank says something in time")
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child of ours that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory for a rendezvous, and what else must not change.
struct Place {
    dir: PathBuf,
    shm: BTreeSet<String>,
}

impl Place {
    fn new() -> Place {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("kvferry-all2all-{}-{number}", std::process::id()));
        Place { dir, shm: shm() }
    }

    fn start(&self, mode: &str, world: usize) -> Vec<Rank> {
        let url = format!("file://{}", self.dir.display());
        (0..world).map(|rank| Rank::start(mode, rank, world, &url)).collect()
    }
}

/// Names of ours in /dev/shm.
fn shm() -> BTreeSet<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("kvf"))
        .collect()
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
        if !std::thread::panicking() {
            assert_eq!(shm(), self.shm, "something was left in /dev/shm");
        }
    }
}

/// Kills rank 1 of three in the middle of its calls, and hears what the others say.
fn kill_one(place: &Place, mode: &str) -> Vec<Rank> {
    let mut ranks = place.start(mode, 3);
    let mut forked = None;
    if mode == "fork" {
        let said = ranks[1].hear();
        forked = said.strip_prefix("child ").map(|pid| pid.parse::<i32>().unwrap());
        assert!(forked.is_some(), "{said}");
    }
    for rank in &ranks {
        assert_eq!(rank.hear(), "ready");
    }
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    ranks[1].signal(libc::SIGKILL);
    let pid = ranks[1].pid();
    for rank in [0, 2] {
        assert_eq!(ranks[rank].hear(), format!("died 1 {pid} true"));
        assert!(start.elapsed() < DEATH, "{:?}", start.elapsed());
    }
    if let Some(forked) = forked {
        // SAFETY: the grandchild sleeps until a signal comes; it was alive all the time, so its number is its own.
        assert_eq!(unsafe { libc::kill(forked, libc::SIGKILL) }, 0);
    }
    drop(ranks.remove(1));
    ranks
}

#[test]
fn a_killed_rank_is_known_within_a_second_and_the_rest_can_go_on() {
    let place = Place::new();
    for rank in kill_one(&place, "calls") {
        assert_eq!(rank.hear(), "again");
        rank.ends_well();
    }
}

#[test]
fn a_rank_killed_while_it_copies() {
    kill_one(&Place::new(), "large").into_iter().for_each(Rank::ends_well);
}

#[test]
fn a_rank_killed_while_a_child_of_it_lives() {
    kill_one(&Place::new(), "fork").into_iter().for_each(Rank::ends_well);
}

#[test]
fn a_stopped_rank_is_late_at_the_set_time_and_learns_of_it() {
    let place = Place::new();
    let ranks = place.start("stop", 3);
    for rank in &ranks {
        assert_eq!(rank.hear(), "ready");
    }
    let start = Instant::now();
    ranks[1].signal(libc::SIGSTOP);
    let mut local = 0;
    for rank in [0, 2] {
        let said = ranks[rank].hear();
        let named = said.strip_prefix("timeout ").and_then(|rest| rest.split_once(' '));
        let (peer, waited) = named.unwrap_or_else(|| panic!("{said}"));
        // Also by a survivor that was a call ahead, and waits for one that waits for the stopped rank.
        assert_eq!(peer, "1", "{said}");
        // Zero: the other was faster to say it.
        if waited != "0" {
            local += 1;
            assert!((540..700).contains(&waited.parse::<u64>().unwrap()), "{said}");
        }
    }
    assert!(local > 0);
    let took = start.elapsed();
    assert!(took.as_secs_f64() > 0.9 * TIMEOUT.as_secs_f64(), "{took:?}");
    assert!(took.as_secs_f64() < 1.1 * TIMEOUT.as_secs_f64() + 0.1, "{took:?}");
    ranks[1].signal(libc::SIGCONT);
    let said = ranks[1].hear();
    assert!(said.starts_with("timeout ") || said.starts_with("died"), "{said}");
    ranks.into_iter().for_each(Rank::ends_well);
}

#[test]
fn a_rank_that_leaves_without_a_word_is_dead() {
    let place = Place::new();
    let ranks = place.start("leave", 3);
    let start = Instant::now();
    let pid = ranks[1].pid();
    for rank in [0, 2] {
        let said = ranks[rank].hear();
        assert!(said == format!("died 1 {pid} false"), "{said}");
    }
    assert!(start.elapsed() < Duration::from_secs(20));
    ranks.into_iter().for_each(Rank::ends_well);
}

#[test]
fn a_rank_killed_during_set_up_or_closing_holds_nobody() {
    let place = Place::new();
    let ranks = place.start("join", 3);
    assert_eq!(ranks[1].hear(), "ready");
    ranks[1].signal(libc::SIGKILL);
    let start = Instant::now();
    for rank in [0, 2] {
        assert_eq!(ranks[rank].hear(), "ready");
        let said = ranks[rank].hear();
        assert!(said.contains("rank 1") && said.contains("died"), "{said}");
    }
    assert!(start.elapsed() < DEATH, "{:?}", start.elapsed());
    drop(ranks);

    let place = Place::new();
    let ranks = place.start("close", 3);
    ranks.iter().for_each(|rank| assert_eq!(rank.hear(), "ready"));
    ranks[1].signal(libc::SIGKILL);
    for rank in [0, 2] {
        let said = ranks[rank].hear();
        assert!(said.starts_with("closed "), "{said}");
    }
}

#[test]
fn nothing_is_left_behind() {
    let rank = Rank::start("leaks", 0, 1, "");
    let said = rank.hear();
    let (before, after) = said.strip_prefix("leaks ").unwrap().split_once(") ").unwrap();
    assert_eq!(format!("{before})"), after);
    rank.ends_well();
}
