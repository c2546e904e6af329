//! Ranks that die, at every point, and ranks that only seem to.

use std::time::{Duration, Instant};

use crate::footprint::Footprint;
use crate::processes::{SoiledPath, free_tcp, job, start};
use crate::rank::{Job, Rank};

const TIMEOUT: Duration = Duration::from_secs(3);
/// From a death to its news. 1 s is the promise; these machines share two cores.
const SOON: Duration = Duration::from_secs(2);

fn ready(ranks: &mut [Rank], lines: &[&str]) {
    for rank in ranks {
        for line in lines {
            rank.says(line);
        }
    }
}

#[test]
fn a_killed_rank_is_seen_by_all_while_its_forked_child_lives() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("killed");
    let url = path.url();
    let mut ranks = [
        Rank::start(&job(0, 3, &url, "open join watch await drop")),
        Rank::start(&job(1, 3, &url, "open join watch await gather:after")),
        Rank::start(&job(2, 3, &url, "open join watch fork await")),
    ];
    ready(&mut ranks[..2], &["open ok", "join ok", "waiting"]);
    ready(&mut ranks[2..], &["open ok", "join ok", "forked", "waiting"]);
    let pid = ranks[2].pid();
    let start = Instant::now();
    ranks[2].signal(libc::SIGKILL);
    for rank in &mut ranks[..2] {
        let line = rank.says("event Death");
        assert!(line.contains(&format!("peer: 2, pid: {pid}")), "{line}");
    }
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    ranks[0].go();
    ranks[0].says("drop ok");
    // Rank 1 hears of both deaths: rank 0 went without a goodbye.
    let line = ranks[1].says("event Death");
    assert!(line.contains("peer: 0"), "{line}");
    ranks[1].go();
    let line = ranks[1].says("gather failed PeerDied");
    assert!(line.contains("rank: 0") || line.contains("rank: 2"), "{line}");
}

#[test]
fn a_kill_is_seen_even_if_a_child_holds_the_sockets() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("held");
    let url = path.url();
    let mut ranks = [
        Rank::start(&job(0, 2, &url, "open join watch gather:ready await")),
        Rank::start(&job(1, 2, &url, "open join gather:ready fork-raw await")),
    ];
    ready(&mut ranks[..1], &["open ok", "join ok", "gather ready-of-0", "waiting"]);
    ready(&mut ranks[1..], &["open ok", "join ok", "gather ready-of-0", "forked", "waiting"]);
    let start = Instant::now();
    ranks[1].signal(libc::SIGKILL);
    let line = ranks[0].says("event Death");
    assert!(line.contains("peer: 1") && line.contains("how: Exited"), "{line}");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

#[test]
fn a_dropped_communicator_is_seen_while_a_forked_child_lives() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("dropped");
    let url = path.url();
    let mut ranks = [
        Rank::start(&job(0, 2, &url, "open join watch gather:ready await")),
        Rank::start(&job(1, 2, &url, "open join gather:ready fork await drop await")),
    ];
    ready(&mut ranks[..1], &["open ok", "join ok", "gather ready-of-0", "waiting"]);
    ready(&mut ranks[1..], &["open ok", "join ok", "gather ready-of-0", "forked", "waiting"]);
    ranks[1].go();
    ready(&mut ranks[1..], &["drop ok", "waiting"]);
    let line = ranks[0].says("event Death");
    assert!(line.contains("peer: 1") && line.contains("how: HungUp"), "{line}");
}

#[test]
fn another_user_is_no_rank() {
    let _left = Footprint::of_this_process();
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let url = free_tcp();
    let timeout = Duration::from_millis(800);
    for (zero, one, (found, own)) in [("", "become:65534", (0, 65534)), ("become:65534", "", (65534, 0))] {
        let scripts = [format!("open {zero} join drop"), format!("open {one} join knock drop")];
        let mut ranks: Vec<_> =
            (0..2).map(|rank| Rank::start(&Job { timeout, ..job(rank, 2, &url, &scripts[rank]) })).collect();
        ranks[1].says("open ok");
        let line = ranks[1].says(&format!("join failed WrongUser {{ rank: 0, uid: {found}, own: {own} }}"));
        assert!(line.contains("user"), "{line}");
        // One that does not care is turned away by the other side.
        let line = ranks[1].says("knock 3");
        assert!(line.contains(&format!("this rank runs as user {found}, you as user {own}")), "{line}");
        ranks[1].says("drop ok");
        ranks[0].says("open ok");
        let line = ranks[0].says("join failed Missing { missing: [1]");
        assert!(line.contains(&format!("turned away process {} of user {own}", ranks[1].pid())), "{line}");
    }
}

#[test]
fn a_step_that_a_killed_rank_is_missing_from_ends_at_once() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("step");
    let url = path.url();
    for watch in ["", "watch"] {
        let script = format!("open join {watch} gather:ready gather:step drop");
        let mut ranks = [
            Rank::start(&job(0, 3, &url, &script)),
            Rank::start(&job(1, 3, &url, &script)),
            Rank::start(&job(2, 3, &url, "open join gather:ready fork await")),
        ];
        ready(&mut ranks[..2], &["open ok", "join ok", "gather ready-of-0"]);
        ready(&mut ranks[2..], &["open ok", "join ok", "gather ready-of-0", "forked", "waiting"]);
        let start = Instant::now();
        ranks[2].signal(libc::SIGKILL);
        for rank in &mut ranks[..2] {
            rank.answers("gather failed PeerDied { rank: 2");
        }
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        drop(ranks);
    }
}

#[test]
fn a_stopped_rank_is_waited_for() {
    let _left = Footprint::of_this_process();
    let url = free_tcp();
    let mut ranks = start(3, &url, "open join watch gather:ready await gather:step await");
    ready(&mut ranks, &["open ok", "join ok", "gather ready-of-0", "waiting"]);
    ranks[1].signal(libc::SIGSTOP);
    ranks[0].go();
    ranks[2].go();
    // Both wait in the step. A death would be an event, a failure a line.
    std::thread::sleep(Duration::from_millis(400));
    ranks[1].signal(libc::SIGCONT);
    ranks[1].go();
    for rank in &mut ranks {
        rank.says("gather step-of-0,step-of-1,step-of-2");
        rank.says("waiting");
    }
}

#[test]
fn a_stopped_rank_stops_nobody_beyond_the_timeout_and_is_named() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("stopped");
    let url = path.url();
    let timeout = Duration::from_millis(700);
    // It has joined: named by a step.
    let script = "open join watch gather:ready await gather:step drop";
    let mut ranks: Vec<_> =
        (0..3).map(|rank| Rank::start(&Job { timeout, ..job(rank, 3, &url, script) })).collect();
    ready(&mut ranks, &["open ok", "join ok", "gather ready-of-0", "waiting"]);
    ranks[1].signal(libc::SIGSTOP);
    for which in [0, 2] {
        ranks[which].go();
    }
    for which in [0, 2] {
        let line = ranks[which].answers("gather failed");
        assert!(line.contains("rank 1 did not take part in"), "{line}");
    }
    drop(ranks);
    // It has not: named by set-up. The others have met it at the rendezvous.
    let mut ranks = [
        Rank::start(&Job { timeout, ..job(0, 3, &url, "open await join drop") }),
        Rank::start(&Job { timeout, ..job(1, 3, &url, "open die-after:1 await join drop") }),
        Rank::start(&Job { timeout, ..job(2, 3, &url, "open await join drop") }),
    ];
    ready(&mut ranks, &["open ok", "waiting"]);
    ranks[1].signal(libc::SIGSTOP);
    for which in [0, 2] {
        ranks[which].go();
    }
    for which in [0, 2] {
        let line = ranks[which].says("join failed");
        assert!(line.contains("rank 1"), "{line}");
    }
    drop(ranks);
}

#[test]
fn an_end_at_any_stage_of_set_up_raises_on_all_others_and_is_named() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("stages");
    // Calls of rank 1 at the rendezvous: 0 publishes itself, 1 finds rank 0. Then it is connected and waits for rank 2,
    // which comes late.
    let stages = [
        ("open exit", "after opening the rendezvous"),
        ("open die-before:0 join", "before publishing itself"),
        ("open die-after:0 join", "after publishing itself"),
        ("open die-after:1 join", "after finding rank 0"),
        ("open die-in:60000 join", "connected to rank 0 only"),
        ("open join exit", "after set-up"),
    ];
    for url in [free_tcp(), path.url()] {
        for (script, stage) in stages {
            let begun = Instant::now();
            let timeout = Duration::from_millis(1200);
            let rank = |rank, script| Rank::start(&Job { timeout, ..job(rank, 3, &url, script) });
            let mut zero = rank(0, "open join gather:step drop");
            let one = rank(1, script);
            let mut two = rank(2, "sleep:150 open join gather:step drop");
            let mut ended = 0;
            for (who, other) in [(&mut zero, "zero"), (&mut two, "two")] {
                let failed = loop {
                    let line = who.line();
                    if line.contains("failed") {
                        break line;
                    }
                    assert!(
                        line.starts_with("open ok") || line.starts_with("join ok"),
                        "{stage}, {other}: {line}"
                    );
                };
                // Rank 0 may have given up, and with it the rendezvous, before rank 2 came to it.
                let too_late = url.starts_with("tcp") && failed.starts_with("open failed Unreachable");
                let named = ["rank 1", "rank: 1", "ranks 0 and 1"].iter().any(|name| failed.contains(name));
                let named = named || too_late;
                assert!(named, "{stage}, {other}: {failed}");
                if !failed.starts_with("open") {
                    who.says("drop ok");
                }
                ended += 1;
            }
            assert!(begun.elapsed() < timeout * 2 + SOON, "{stage}: {:?}", begun.elapsed());
            assert_eq!(ended, 2);
            for rank in [zero, one, two] {
                rank.ended();
            }
        }
    }
}

#[test]
fn a_kill_at_any_moment_hangs_nobody() {
    let _left = Footprint::of_this_process();
    let path = SoiledPath::new("moments");
    for round in 0..24u64 {
        let url = path.url();
        let begun = Instant::now();
        let victim = (round % 3) as usize;
        let delay = 200 + round * 700;
        let deadly = format!("open die-in:{delay} join gather:a gather:b sleep:500 drop");
        let script = "open join gather:a gather:b drop";
        let mut ranks: Vec<_> = (0..3)
            .map(|rank| {
                let script = if rank == victim { deadly.as_str() } else { script };
                Rank::start(&Job { timeout: TIMEOUT, ..job(rank, 3, &url, script) })
            })
            .collect();
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            loop {
                let line = process.line();
                if line.starts_with("drop ok") {
                    break;
                }
                // A survivor that has all it needs ends and is then missed itself.
                let named = line.contains("rank ") || line.contains("ranks ");
                assert!(!line.contains("failed") || named, "round {round}, rank {rank}: {line}");
                if line.contains("join failed") {
                    break;
                }
            }
        }
        assert!(begun.elapsed() < TIMEOUT * 2 + SOON, "round {round}: {:?}", begun.elapsed());
        drop(ranks);
    }
}
