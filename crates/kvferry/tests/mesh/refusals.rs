//! Ranks that will not come, and ranks that come twice: nobody waits for the timeout.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::all2all::internals::Mesh;
use kvferry::all2all::{All2All, Attend, Rendezvous, SetupError, refuse_to_join, rendezvous};

use crate::footprint::{Footprint, PATIENCE};
use crate::processes::{FreePath, free_tcp};

/// Far below `PATIENCE`.
const SOON: Duration = Duration::from_secs(3);

/// Handles of every rank to every kind of rendezvous.
fn places(path: &FreePath) -> Vec<Vec<Arc<dyn Rendezvous>>> {
    let open = |url: &str| (0..3).map(|rank| rendezvous(url, rank, 3, PATIENCE).unwrap()).collect();
    vec![open("memory://refusals"), open(&path.url()), open(&free_tcp())]
}

#[test]
fn a_rank_that_will_not_come_is_told_of_at_once() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("refusals");
    for stores in places(&path) {
        for refusing in 0..3 {
            // Each name, twice: what one attempt leaves behind does not end the next.
            for attempt in 0..2 {
                let name = format!("refusing {refusing}");
                std::thread::scope(|scope| {
                    let (stores, name) = (&stores, &name);
                    let others: Vec<_> = (0..3)
                        .filter(|&rank| rank != refusing)
                        .map(|rank| {
                            scope.spawn(move || {
                                let start = Instant::now();
                                let error = Mesh::join(rank, 3, &*stores[rank], name, PATIENCE).unwrap_err();
                                (error, start.elapsed())
                            })
                        })
                        .collect();
                    std::thread::sleep(Duration::from_millis(30));
                    let start = Instant::now();
                    let why = format!("capacity_bytes must be more ({attempt})");
                    let attend = Attend::default();
                    refuse_to_join(&*stores[refusing], name, refusing, 3, &why, &attend).unwrap();
                    assert!(start.elapsed() < SOON);
                    for other in others {
                        let (error, took) = other.join().unwrap();
                        assert!(took < SOON, "{took:?}");
                        let SetupError::Withdrawn { rank, reason, .. } = error else { panic!("{error:?}") };
                        assert_eq!((rank, reason), (refusing, why.clone()));
                    }
                });
            }
            let name = format!("refusing {refusing}");
            std::thread::scope(|scope| {
                let (stores, name) = (&stores, &name);
                let join = move |rank: usize| Mesh::join(rank, 3, &*stores[rank], name, PATIENCE);
                let joined: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
                let joined: Vec<_> = joined.into_iter().map(|rank| rank.join().unwrap()).collect();
                joined.into_iter().for_each(|mesh| drop(mesh.unwrap()));
            });
        }
    }
}

#[test]
fn a_builder_that_refuses_its_rank_tells_the_others() {
    let _left = Footprint::of_this_process();
    let store = rendezvous("memory://out of range", 0, 2, PATIENCE).unwrap();
    let connect = |rank| All2All::builder(rank, 2).rendezvous(Arc::clone(&store)).connect().unwrap_err();
    std::thread::scope(|scope| {
        let start = Instant::now();
        let zero = scope.spawn(|| connect(0));
        let wrong = scope.spawn(|| connect(2));
        let error = zero.join().unwrap().to_string();
        assert!(error.contains("rank 2") && error.contains("below 2"), "{error}");
        assert!(matches!(wrong.join().unwrap(), kvferry::Error::InvalidOption { .. }));
        assert!(start.elapsed() < SOON);
    });
}

#[test]
fn nobody_is_waited_for_where_nobody_is() {
    let store = rendezvous("memory://nobody", 0, 2, PATIENCE).unwrap();
    let start = Instant::now();
    refuse_to_join(&*store, "nobody", 0, 2, "no", &Attend::default()).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn two_that_call_themselves_one_rank_both_find_out() {
    let _left = Footprint::of_this_process();
    let path = FreePath::new("duplicates");
    for stores in places(&path) {
        for (rank, gap) in [(0, 0), (0, 50), (1, 0), (1, 50)] {
            let name = format!("twice {rank} {gap}");
            std::thread::scope(|scope| {
                let (stores, name) = (&stores, &name);
                let both: Vec<_> = (0..2)
                    .map(|which| {
                        scope.spawn(move || {
                            std::thread::sleep(Duration::from_millis(gap * which));
                            let start = Instant::now();
                            let error = Mesh::join(rank, 3, &*stores[rank], name, PATIENCE).unwrap_err();
                            (error, start.elapsed())
                        })
                    })
                    .collect();
                for one in both {
                    let (error, took) = one.join().unwrap();
                    assert!(took < SOON, "{took:?}");
                    let pid = std::process::id();
                    assert!(
                        matches!(error, SetupError::Duplicate { rank: found, pid: other } if found == rank && other == pid),
                        "{error:?}"
                    );
                }
            });
        }
    }
}
