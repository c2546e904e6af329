//! The rendezvous by themselves, and hostile visitors at them and at the ranks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::all2all::internals::Mesh;
use kvferry::all2all::{MAX_KEY, MAX_VALUE, Rendezvous, SetupError, rendezvous};
use kvferry::host::{PeerAddress, PeerSocket, Received};

use crate::footprint::{Footprint, PATIENCE};
use crate::processes::{FreePath, free_tcp};

fn open(url: &str, world: usize) -> Vec<Arc<dyn Rendezvous>> {
    (0..world).map(|rank| rendezvous(url, rank, world, PATIENCE).unwrap()).collect()
}

/// What every rendezvous promises.
fn keeps_its_promises(stores: &[Arc<dyn Rendezvous>]) {
    for (writer, store) in stores.iter().enumerate() {
        let key = format!("key/of {writer}/ü\n..");
        assert!(matches!(store.get(&key, Duration::ZERO), Err(SetupError::RendezvousTimeout { .. })));
        for value in [b"".as_slice(), &[writer as u8; 3], &vec![0xa5; MAX_VALUE], b"last"] {
            store.set(&key, value).unwrap();
            for reader in stores {
                assert_eq!(reader.get(&key, Duration::ZERO).unwrap(), value);
                assert_eq!(reader.get(&key, PATIENCE).unwrap(), value);
            }
        }
        let start = Instant::now();
        let absent = store.get("absent", Duration::from_millis(40));
        assert!(
            matches!(&absent, Err(SetupError::RendezvousTimeout { key, .. }) if key == "absent"),
            "{absent:?}"
        );
        assert!((40..5000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
        let large = |result: Result<(), SetupError>| matches!(result, Err(SetupError::TooLarge { .. }));
        assert!(large(store.set(&"k".repeat(MAX_KEY + 1), b"")));
        assert!(large(store.set("k", &vec![0; MAX_VALUE + 1])));
        assert!(large(store.get(&"k".repeat(MAX_KEY + 1), PATIENCE).map(drop)));
    }
    // Waits of several ranks, and of several threads of one, hold nobody up.
    std::thread::scope(|scope| {
        let waits: Vec<_> = stores
            .iter()
            .flat_map(|store| (0..2).map(move |_| store))
            .map(|store| scope.spawn(|| store.get("later", PATIENCE).unwrap()))
            .collect();
        std::thread::sleep(Duration::from_millis(30));
        stores[stores.len() - 1].set("other", b"x").unwrap();
        stores[0].set("later", b"now").unwrap();
        for wait in waits {
            assert_eq!(wait.join().unwrap(), b"now");
        }
    });
}

#[test]
fn memory_is_shared_by_name_and_forgotten() {
    keeps_its_promises(&open("memory://promises", 3));
    let one = open("memory://one", 1);
    one[0].set("key", b"1").unwrap();
    let absent = |url: &str| open(url, 1)[0].get("key", Duration::ZERO).is_err();
    assert!(absent("memory://two"));
    assert!(!absent("memory://one"));
    drop(one);
    assert!(absent("memory://one"));
}

#[test]
fn tcp_over_both_families_and_by_name() {
    let _left = Footprint::of_this_process();
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        let Ok(listener) = TcpListener::bind(format!("{host}:0")) else {
            eprintln!("skipped {host}: not on this machine");
            continue;
        };
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let url = format!("tcp://{host}:{port}");
        for _ in 0..2 {
            // The port is free again as soon as rank 0 lets go.
            keeps_its_promises(&open(&url, 3));
        }
    }
}

#[test]
fn other_ranks_wait_for_the_server() {
    let _left = Footprint::of_this_process();
    let url = free_tcp();
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| rendezvous(&url, 1, 2, PATIENCE).unwrap().get("key", PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(80));
        let host = rendezvous(&url, 0, 2, PATIENCE).unwrap();
        host.set("key", b"there").unwrap();
        assert_eq!(guest.join().unwrap(), b"there");
    });
}

#[test]
fn what_was_set_survives_a_new_server() {
    let _left = Footprint::of_this_process();
    let url = free_tcp();
    let stores = open(&url, 2);
    let (host, guest) = (stores[0].clone(), stores[1].clone());
    drop(stores);
    guest.set("guest", b"mine").unwrap();
    drop(host);
    let start = Instant::now();
    assert!(guest.get("host", Duration::from_millis(50)).is_err());
    assert!(start.elapsed() < Duration::from_secs(5));
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| guest.get("host", PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let host = rendezvous(&url, 0, 2, PATIENCE).unwrap();
        assert_eq!(host.get("guest", PATIENCE).unwrap(), b"mine", "set anew");
        host.set("host", b"new").unwrap();
        assert_eq!(wait.join().unwrap(), b"new");
    });
}

#[test]
fn a_port_in_use_is_said() {
    let _left = Footprint::of_this_process();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    match rendezvous(&format!("tcp://{address}"), 0, 2, PATIENCE).map(drop) {
        Err(SetupError::AddressInUse { address: found }) => assert_eq!(found, address),
        other => panic!("{other:?}"),
    }
    // And something else that listens there is not taken for rank 0.
    let error =
        rendezvous(&format!("tcp://{address}"), 1, 2, Duration::from_millis(200)).map(drop).unwrap_err();
    assert!(matches!(error, SetupError::Unreachable { .. }), "{error:?}");
}

#[test]
fn urls_that_name_no_rendezvous_are_refused() {
    for url in [
        "",
        "tcp",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://host:0",
        "tcp://host:70000",
        "file://",
        "memory://",
        "file://relative/path",
        "http://host:80",
        "tcp:/host:1",
        "tcp://:4242",
        "tcp://ho\0st:4242",
        "file:///tmp/a\0b",
    ] {
        let error = rendezvous(url, 0, 1, PATIENCE).map(drop).unwrap_err();
        assert!(matches!(error, SetupError::Url { .. }), "{url}: {error:?}");
        assert!(error.to_string().starts_with(&format!("rendezvous {url:?}: ")), "{error}");
    }
    let error = rendezvous("memory://x", 2, 2, PATIENCE).map(drop).unwrap_err();
    assert!(matches!(error, SetupError::Range { value: 2, .. }), "{error:?}");
    for world in [0, 65] {
        let error = rendezvous("memory://x", 0, world, PATIENCE).map(drop).unwrap_err();
        assert!(matches!(error, SetupError::Range { what: "world_size", .. }), "{error:?}");
    }
}

#[test]
fn places_that_cannot_be_used_are_named() {
    for (url, rank) in [
        ("tcp://no.such.host.invalid:4242", 0),
        ("tcp://no.such.host.invalid:4242", 1),
        ("tcp://192.0.2.1:4242", 0),
        ("file:///no/such/parent/dir", 0),
        ("file:///dev/null", 0),
    ] {
        let error = rendezvous(url, rank, 2, PATIENCE).map(drop).unwrap_err();
        assert!(matches!(error, SetupError::Place { .. }), "{url}: {error:?}");
        assert!(error.to_string().starts_with(&format!("rendezvous {url}: ")), "{error}");
    }
}

#[test]
fn garbage_at_the_server_harms_nobody() {
    let _left = Footprint::of_this_process();
    let url = free_tcp();
    let stores = open(&url, 2);
    let address = url.trim_start_matches("tcp://").to_owned();
    let greeted = |rest: &[u8]| [b"KVFRDZ01".as_slice(), rest].concat();
    let hostile = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        greeted(&[9; 8]),
        greeted(&[1, 0, 0xff, 0xff, 0, 0, 0, 0]),
        greeted(&[1, 0, 1, 0, 0xff, 0xff, 0xff, 0xff, b'k']),
        greeted(&[3, 0, 1, 0, 0, 0, 0, 0, 0xff]),
        greeted(&[2, 0, 1, 0, 1, 0, 0, 0, b'k', b'v']),
        greeted(&[3, 0, 1, 0, 0, 0, 0, 0, b'k'].repeat(20_000)),
    ];
    for bytes in hostile {
        let mut visitor = TcpStream::connect(&address).unwrap();
        visitor.set_read_timeout(Some(PATIENCE)).unwrap();
        // The server may hang up in the middle.
        let _ = visitor.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = visitor.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer == b"KVFRDZ01", "{answer:?}");
    }
    // Half a request, and nothing at all, for as long as they like.
    let mut slow: Vec<_> = (0..600).filter_map(|_| TcpStream::connect(&address).ok()).collect();
    slow[0].write_all(&greeted(&[1, 0, 5, 0])).unwrap();
    keeps_its_promises(&stores);
}

#[test]
fn files_are_safe_with_many_ranks_at_once_and_go_with_them() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("many");
    for round in 0..10 {
        std::thread::scope(|scope| {
            for rank in 0..8 {
                let url = path.url();
                scope.spawn(move || {
                    let store = rendezvous(&url, rank, 8, PATIENCE).unwrap();
                    store.set(&format!("at/{rank}"), &[rank as u8, round]).unwrap();
                    for other in 0..8 {
                        let value = store.get(&format!("at/{other}"), PATIENCE).unwrap();
                        assert_eq!(value, [other as u8, round], "never the value of a round before");
                    }
                    // Nobody leaves before all have read: a value goes with its rank.
                    store.set(&format!("done/{rank}"), &[]).unwrap();
                    if rank == 0 {
                        (0..8).for_each(|other| drop(store.get(&format!("done/{other}"), PATIENCE).unwrap()));
                        store.set("all", &[]).unwrap();
                        std::thread::sleep(Duration::from_millis(60));
                    } else {
                        store.get("all", PATIENCE).unwrap();
                    }
                });
            }
        });
        assert!(!path.0.exists(), "round {round}");
    }
    keeps_its_promises(&open(&path.url(), 3));
}

#[test]
fn what_else_lies_in_a_directory_stays_and_is_not_believed() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("else");
    std::fs::create_dir(&path.0).unwrap();
    std::fs::write(path.0.join("notes.txt"), b"mine").unwrap();
    std::fs::write(path.0.join("garbage.kvr"), vec![0xee; 500_000]).unwrap();
    std::fs::write(path.0.join("short.kvr"), b"kvferry rendezvous 1\n").unwrap();
    std::fs::create_dir(path.0.join("dir.kvr")).unwrap();
    // A target that must not be written through.
    symlink(path.0.join("notes.txt"), path.0.join("linked.new")).unwrap();
    let stores = open(&path.url(), 2);
    for key in ["garbage", "short", "dir"] {
        assert!(stores[0].get(key, Duration::ZERO).is_err(), "{key}");
    }
    stores[0].set("linked", b"value").unwrap();
    assert_eq!(stores[1].get("linked", PATIENCE).unwrap(), b"value");
    keeps_its_promises(&stores);
    drop(stores);
    assert_eq!(std::fs::read(path.0.join("notes.txt")).unwrap(), b"mine");
    let mut left: Vec<_> = std::fs::read_dir(&path.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["dir.kvr", "garbage.kvr", "notes.txt", "short.kvr"]);
    std::fs::remove_dir_all(&path.0).unwrap();
    // Nor is a file taken for a directory.
    std::fs::write(&path.0, b"a file").unwrap();
    let error = rendezvous(&path.url(), 0, 1, PATIENCE).map(drop).unwrap_err();
    assert!(matches!(error, SetupError::Place { .. }), "{error:?}");
    std::fs::remove_file(&path.0).unwrap();
}

#[test]
fn files_of_dead_writers_are_not_read() {
    let path = FreePath::new("dead");
    let stores = open(&path.url(), 2);
    stores[0].set("key", b"value").unwrap();
    let file = path.0.join("key.kvr");
    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let fields: Vec<&str> = lines[1].split(' ').collect();
    let with = |at: usize, field: &str| {
        let mut fields = fields.clone();
        fields[at] = field;
        std::fs::write(&file, format!("{}\n{}\n{}", lines[0], fields.join(" "), "changed")).unwrap();
        stores[1].get("key", Duration::ZERO).ok()
    };
    assert_eq!(with(4, fields[4]).as_deref(), Some(b"changed".as_slice()), "unchanged, it is believed");
    assert_eq!(with(0, "another-boot"), None);
    assert_eq!(with(2, "4194399"), None, "no such process");
    assert_eq!(with(3, "1"), None, "the number is another process's now");
    // In another PID namespace nobody can say, so the writer counts as alive.
    assert!(with(1, "pid:[1]").is_some());
    std::fs::write(&file, text).unwrap();
}

/// What a rank publishes, as its callers read it.
pub(crate) fn card(store: &Arc<dyn Rendezvous>, name: &str, rank: usize) -> ([u8; 16], PeerAddress) {
    let bytes = store.get(&format!("kvferry/{name}/{rank}"), PATIENCE).unwrap();
    (bytes[..16].try_into().unwrap(), PeerAddress::Abstract(bytes[20..].to_vec()))
}

/// A greeting as another program would forge it.
pub(crate) fn hello(rank: u32, world: u32, to: u32, token: [u8; 16], name: &str) -> Vec<u8> {
    let mut payload = Vec::new();
    for word in [rank, world, to, std::process::id()] {
        payload.extend(word.to_le_bytes());
    }
    payload.extend(token);
    let mut bytes = b"KVM1".to_vec();
    bytes.extend([1, name.len() as u8, 0, 0]);
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(name.as_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn strangers_at_a_listener_are_turned_away_and_the_ranks_still_meet() {
    let _left = Footprint::of_this_process();
    let stores = open("memory://strangers", 2);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Mesh::join(0, 2, &*stores[0], "run", PATIENCE).unwrap());
        let (token, address) = card(&stores[1], "run", 0);
        let mut wrong = token;
        wrong[15] ^= 1;
        let answer = |bytes: &[u8]| {
            let socket = PeerSocket::connect(&address, PATIENCE).unwrap();
            socket.try_send(bytes, &[]).unwrap();
            match socket.recv(Some(PATIENCE)).unwrap() {
                Received::Message(bytes, _) => (bytes[4], String::from_utf8_lossy(&bytes[20..]).into_owned()),
                Received::HungUp => (0, String::new()),
                Received::Nothing => panic!("no answer"),
            }
        };
        const REFUSED: u8 = 3;
        let (kind, why) = answer(&hello(1, 2, 0, wrong, "run"));
        assert!(kind == REFUSED && why.contains("token"), "{why}");
        assert_eq!(answer(&hello(1, 2, 1, token, "run")).0, REFUSED, "meant for another rank");
        assert_eq!(answer(&hello(1, 2, 0, token, "other")).0, REFUSED, "another communicator");
        assert_eq!(answer(&hello(2, 2, 0, token, "run")).0, REFUSED, "no such rank");
        assert_eq!(answer(&hello(u32::MAX, 2, 0, token, "run")).0, REFUSED);
        assert_eq!(answer(b"garbage").0, 0, "hung up on");
        assert_eq!(answer(&hello(1, 2, 0, token, "run")[..30]).0, 0);
        // Those who say nothing do not hold the queue up.
        let silent: Vec<_> = (0..140).filter_map(|_| PeerSocket::connect(&address, PATIENCE).ok()).collect();
        let one = Mesh::join(1, 2, &*stores[1], "run", PATIENCE).unwrap();
        let zero = zero.join().unwrap();
        assert_eq!(zero.nonce(), one.nonce());
        drop(silent);
    });
}

#[test]
fn a_wrong_token_at_the_rendezvous_is_read_again_until_it_is_right() {
    let _left = Footprint::of_this_process();
    let stores = open("memory://stale", 2);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Mesh::join(0, 2, &*stores[0], "run", PATIENCE).unwrap());
        let key = "kvferry/run/0";
        let right = stores[1].get(key, PATIENCE).unwrap();
        let mut wrong = right.clone();
        wrong[0] ^= 0x80;
        let mut nowhere = right.clone();
        nowhere.extend(b"-gone");
        // As an earlier run may have left them.
        let error = |bytes: &[u8]| {
            stores[1].set(key, bytes).unwrap();
            Mesh::join(1, 2, &*stores[1], "run", Duration::from_millis(150)).unwrap_err().to_string()
        };
        let text = error(&wrong);
        assert!(text.contains("rank 0 of 2 did not join") && text.contains("token"), "{text}");
        let text = error(&nowhere);
        assert!(text.contains("rank 0") && text.contains("nobody listens"), "{text}");
        let text = error(b"short");
        assert!(text.contains("rank 0") && text.contains("malformed"), "{text}");
        let one = scope.spawn(|| Mesh::join(1, 2, &*stores[1], "run", PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(60));
        stores[1].set(key, &right).unwrap();
        assert_eq!(one.join().unwrap().nonce(), zero.join().unwrap().nonce());
    });
}

#[test]
fn garbage_from_a_joined_rank_is_its_death() {
    let _left = Footprint::of_this_process();
    let stores = open("memory://garbage", 2);
    let frames: [&[u8]; 4] = [b"garbage", &[0; 64], &hello(1, 2, 0, [0; 16], "run"), &vec![7; 66_000]];
    for frame in frames {
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| {
                let mesh = Mesh::join(0, 2, &*stores[0], "run", PATIENCE)?;
                mesh.gather("step", &[], PATIENCE)
            });
            // A rank that greets properly and then loses its mind.
            let socket = loop {
                let (token, address) = card(&stores[1], "run", 0);
                let Ok(socket) = PeerSocket::connect(&address, PATIENCE) else { continue };
                socket.try_send(&hello(1, 2, 0, token, "run"), &[]).unwrap();
                if matches!(socket.recv(Some(PATIENCE)).unwrap(), Received::Message(bytes, _) if bytes[4] == 2)
                {
                    break socket;
                }
            };
            socket.try_send(frame, &[]).unwrap();
            let error = zero.join().unwrap().unwrap_err();
            assert!(matches!(error, SetupError::PeerDied { rank: 1, .. }), "{error:?}");
        });
    }
}

#[test]
fn a_flood_of_messages_does_not_grow_without_limit() {
    let stores = open("memory://flood", 2);
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| {
            let mesh = Mesh::join(0, 2, &*stores[0], "run", PATIENCE).unwrap();
            mesh.gather("never", &[], PATIENCE).unwrap_err()
        });
        let (token, address) = card(&stores[1], "run", 0);
        let socket = PeerSocket::connect(&address, PATIENCE).unwrap();
        socket.send(&hello(1, 2, 0, token, "run"), &[], PATIENCE).unwrap();
        assert!(matches!(socket.recv(Some(PATIENCE)).unwrap(), Received::Message(..)));
        for sequence in 0u64.. {
            // Its part of the step that ends set-up, then of steps that this rank is not in.
            let sequence = if sequence == 0 { 0 } else { sequence + 10 };
            let label = if sequence == 0 { "join" } else { "x" };
            let mut part = b"KVM1".to_vec();
            part.extend([4, label.len() as u8, 0, 0]);
            part.extend(sequence.to_le_bytes());
            part.extend(8u32.to_le_bytes());
            part.extend(label.as_bytes());
            part.extend([0; 8]);
            if socket.send(&part, &[], Duration::from_millis(500)).is_err() {
                break;
            }
            assert!(sequence < 100_000);
        }
        let error = zero.join().unwrap();
        assert!(matches!(error, SetupError::PeerDied { rank: 1, .. }), "{error:?}");
    });
}
