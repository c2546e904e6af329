//! Ranks as processes.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::footprint::{Footprint, PATIENCE};
use crate::rank::{Job, Rank};

/// An address on the loopback that nobody listens at.
pub(crate) fn free_tcp() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("tcp://{}", listener.local_addr().unwrap())
}

/// A path that does not exist, and must not at the end either.
pub(crate) struct FreePath(pub(crate) PathBuf);

/// The same for tests that kill the last one who could clean up.
pub(crate) struct SoiledPath(FreePath);

impl SoiledPath {
    pub(crate) fn new(name: &str) -> SoiledPath {
        SoiledPath(FreePath::new(name))
    }

    pub(crate) fn url(&self) -> String {
        self.0.url()
    }
}

impl Drop for SoiledPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0.0);
    }
}

impl FreePath {
    pub(crate) fn new(name: &str) -> FreePath {
        let path = std::env::temp_dir().join(format!("kvf-mesh-{name}-{}", std::process::id()));
        assert!(!path.exists());
        FreePath(path)
    }

    pub(crate) fn url(&self) -> String {
        format!("file://{}", self.0.display())
    }
}

impl Drop for FreePath {
    fn drop(&mut self) {
        let left = self.0.exists();
        if left {
            let _ = std::fs::remove_dir_all(&self.0);
        }
        assert!(!left || std::thread::panicking(), "{} was left", self.0.display());
    }
}

pub(crate) fn job<'a>(rank: usize, world: usize, url: &'a str, script: &'a str) -> Job<'a> {
    Job { rank, world, url, name: "run", timeout: PATIENCE, script }
}

/// All ranks with one script.
pub(crate) fn start(world: usize, url: &str, script: &str) -> Vec<Rank> {
    (0..world).map(|rank| Rank::start(&job(rank, world, url, script))).collect()
}

fn gathered(label: &str, world: usize) -> String {
    let parts: Vec<_> = (0..world).map(|rank| format!("{label}-of-{rank}")).collect();
    format!("gather {}", parts.join(","))
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

#[test]
fn processes_meet_and_part_over_tcp_and_files() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("meet");
    for url in [free_tcp(), path.url()] {
        let world = 4;
        let script = "open join close-store gather:one watch gather:two tell-bye drop";
        let mut ranks = start(world, &url, script);
        let mut nonces = Vec::new();
        for rank in &mut ranks {
            rank.says("open ok");
            nonces.push(rank.says("join ok"));
        }
        nonces.dedup();
        assert_eq!(nonces.len(), 1, "{nonces:?}");
        for rank in &mut ranks {
            rank.says(&gathered("one", world));
            // Others may say goodbye while this rank still listens; nobody may be taken for dead.
            loop {
                let line = rank.line();
                assert!(!line.contains("Death"), "{line}");
                if line == "drop ok" {
                    break;
                }
                assert!(line == gathered("two", world) || line.contains("Bye"), "{line}");
            }
        }
        ranks.into_iter().for_each(Rank::ended);
        assert!(!exists(&path.0));
    }
}

#[test]
fn two_communicators_of_processes_share_a_rendezvous() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("two");
    for url in [free_tcp(), path.url()] {
        // The name of the first again at the end, with what it left still there.
        let script = "open join:a join:b gather:both join:a gather:again await";
        let mut ranks = start(3, &url, script);
        let mut nonces: Vec<Vec<String>> = Vec::new();
        for rank in &mut ranks {
            rank.says("open ok");
            let first = [rank.says("join ok"), rank.says("join ok")];
            rank.says(&gathered("both", 3));
            nonces.push([first[0].clone(), first[1].clone(), rank.says("join ok")].to_vec());
            rank.says(&gathered("again", 3));
            rank.says("waiting");
        }
        assert!(nonces.iter().all(|of| *of == nonces[0]), "{nonces:?}");
        nonces[0].sort();
        nonces[0].dedup();
        assert_eq!(nonces[0].len(), 3);
        ranks.iter_mut().for_each(Rank::go);
        ranks.into_iter().for_each(Rank::ended);
    }
}

#[test]
fn a_tcp_server_that_ends_and_starts_again_loses_nobody() {
    let _left = Footprint::of_this_process();
    let url = free_tcp();
    // Every rank opens, joins and closes the rendezvous for each communicator; a fast rank meets the old server.
    let script = "open join close-store open join close-store open join close-store gather:end await";
    let mut ranks = start(3, &url, script);
    for rank in &mut ranks {
        for _ in 0..3 {
            rank.says("open ok");
            rank.says("join ok");
        }
        rank.says(&gathered("end", 3));
        rank.says("waiting");
    }
    ranks.iter_mut().for_each(Rank::go);
    ranks.into_iter().for_each(Rank::ended);
}

#[test]
fn leftovers_of_a_killed_run_are_replaced() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("leftover");
    let url = path.url();
    // Killed with their files in place; more ranks than the next run has.
    let mut killed = start(4, &url, "open join await");
    for rank in &mut killed {
        rank.says("open ok");
        rank.says("join ok");
        rank.says("waiting");
    }
    killed.iter().for_each(|rank| rank.signal(libc::SIGKILL));
    killed.into_iter().for_each(Rank::ended);
    // A writer that died in the middle, too.
    std::fs::write(path.0.join("half.new"), b"kvferry rend").unwrap();
    assert!(std::fs::read_dir(&path.0).unwrap().count() >= 5);

    let mut ranks = start(3, &url, "open join gather:new await");
    for rank in &mut ranks {
        rank.says("open ok");
        rank.says("join ok");
        rank.says(&gathered("new", 3));
        rank.says("waiting");
    }
    ranks.iter_mut().for_each(Rank::go);
    ranks.into_iter().for_each(Rank::ended);
    assert!(!exists(&path.0), "the last one removed the old files too");
}

#[test]
fn a_living_run_of_the_same_name_is_no_leftover() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("living");
    let url = path.url();
    let mut first = start(2, &url, "open join gather:x await gather:y");
    for rank in &mut first {
        rank.says("open ok");
        rank.says("join ok");
        rank.says(&gathered("x", 2));
        rank.says("waiting");
    }
    // A second run of the same name meets while the first one lives: its members find each other, not the first's.
    let mut second = start(2, &url, "open join gather:z await");
    for rank in &mut second {
        rank.says("open ok");
        rank.says("join ok");
        rank.says(&gathered("z", 2));
        rank.says("waiting");
    }
    second.iter_mut().for_each(Rank::go);
    second.into_iter().for_each(Rank::ended);
    for rank in &mut first {
        rank.go();
    }
    for rank in &mut first {
        rank.says(&gathered("y", 2));
    }
    first.into_iter().for_each(Rank::ended);
}

#[test]
fn ranks_that_never_come_are_named() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("absent");
    let timeout = Duration::from_millis(1500);
    for url in [free_tcp(), path.url()] {
        let mut ranks: Vec<_> = [0, 1, 3]
            .map(|rank| Rank::start(&Job { timeout, ..job(rank, 5, &url, "open join drop") }))
            .into_iter()
            .collect();
        for rank in &mut ranks {
            rank.says("open ok");
            let line = rank.says("join failed");
            // The first to give up names the two; the others may hear it from that one, or lose rank 0's server.
            assert!(line.contains("ranks 2 and 4") || line.contains("[2, 4]"), "{line}");
            rank.says("drop ok");
        }
        ranks.into_iter().for_each(Rank::ended);
    }
    // Rank 0 itself, which serves the rendezvous.
    let url = free_tcp();
    let mut alone = Rank::start(&Job { timeout: Duration::from_millis(300), ..job(1, 2, &url, "open") });
    let line = alone.says("open failed Unreachable");
    assert!(line.contains("rank 0"), "{line}");
    alone.ended();
    let url = path.url();
    let mut alone = Rank::start(&Job { timeout: Duration::from_millis(300), ..job(1, 2, &url, "open join") });
    alone.says("open ok");
    let line = alone.says("join failed Missing");
    assert!(line.contains("rank 0"), "{line}");
    alone.ended();
}
