//! Ranks of this process: they reach one another's memory by its address, and meet at a gate before they launch.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, Weak};

use kvferry_cuda::ExchangeMemory;

use super::gate::Gate;
use crate::transfer::lock;

/// A number that only the ranks of one communicator share, and a rank.
type Key = (u64, usize);

static MEMORY: Mutex<Option<HashMap<Key, Weak<ExchangeMemory>>>> = Mutex::new(None);
static GATES: Mutex<Option<HashMap<u64, Weak<Gate>>>> = Mutex::new(None);

/// The live entry of a map, made if there is none. Dead ones are dropped in passing.
fn entry<K: Eq + Hash, V>(
    map: &mut Option<HashMap<K, Weak<V>>>,
    key: K,
    make: impl FnOnce() -> Arc<V>,
) -> Arc<V> {
    let map = map.get_or_insert_default();
    map.retain(|_, value| value.strong_count() > 0);
    if let Some(found) = map.get(&key).and_then(Weak::upgrade) {
        return found;
    }
    let made = make();
    map.insert(key, Arc::downgrade(&made));
    made
}

/// Lets ranks of this process find this rank's memory.
pub(super) fn announce(session: u64, rank: usize, memory: &Arc<ExchangeMemory>) {
    let mut map = lock(&MEMORY);
    let map = map.get_or_insert_default();
    map.retain(|_, value| value.strong_count() > 0);
    map.insert((session, rank), Arc::downgrade(memory));
}

/// The memory of a rank, if it lives in this process.
pub(super) fn find(session: u64, rank: usize) -> Option<Arc<ExchangeMemory>> {
    lock(&MEMORY).as_ref()?.get(&(session, rank))?.upgrade()
}

/// The gate of the ranks of this process, by bit; `None` for one that is alone here.
pub(super) fn gate(session: u64, members: u64) -> Option<Arc<Gate>> {
    if members.count_ones() < 2 {
        return None;
    }
    Some(entry(&mut lock(&GATES), session, || Arc::new(Gate::new(members))))
}
