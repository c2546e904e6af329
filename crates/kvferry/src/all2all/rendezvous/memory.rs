//! `memory://name`: a map of this process, and the map under the `tcp://` server.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{Rendezvous, check, timed_out};
use crate::all2all::setup::SetupError;
use crate::all2all::wire::left;

/// Values that threads set and wait for.
#[derive(Debug, Default)]
pub(super) struct Values {
    map: Mutex<HashMap<String, Vec<u8>>>,
    news: Condvar,
}

impl Values {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False, and nothing set, if `limit` other keys are there.
    pub(super) fn set(&self, key: &str, value: &[u8], limit: usize) -> bool {
        let mut map = self.lock();
        if map.len() >= limit && !map.contains_key(key) {
            return false;
        }
        map.insert(key.to_owned(), value.to_vec());
        self.news.notify_all();
        true
    }

    pub(super) fn look(&self, key: &str) -> Option<Vec<u8>> {
        self.lock().get(key).cloned()
    }

    pub(super) fn wait(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        let start = Instant::now();
        let mut map = self.lock();
        loop {
            if let Some(value) = map.get(key) {
                return Ok(value.clone());
            }
            let left = left(start, timeout);
            if left.is_zero() {
                return Err(timed_out(key, timeout, None));
            }
            map = self.news.wait_timeout(map, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The named maps in use. A name is free again when its last handle is dropped.
static NAMED: LazyLock<Mutex<HashMap<String, Weak<Values>>>> = LazyLock::new(Mutex::default);

/// A handle to a named map.
#[derive(Debug)]
pub(super) struct MemoryStore {
    values: Arc<Values>,
}

impl MemoryStore {
    pub(super) fn open(name: &str) -> MemoryStore {
        let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
        named.retain(|_, values| values.strong_count() > 0);
        let values = named.get(name).and_then(Weak::upgrade).unwrap_or_default();
        named.insert(name.to_owned(), Arc::downgrade(&values));
        MemoryStore { values }
    }
}

impl Rendezvous for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        check(key, value)?;
        self.values.set(key, value, usize::MAX);
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        check(key, &[])?;
        self.values.wait(key, timeout)
    }
}
