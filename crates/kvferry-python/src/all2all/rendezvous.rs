//! Python objects as places where ranks meet: torch's stores, or anything with `set` and `get`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry::all2all::{Rendezvous, SetupError, refuse_to_join, rendezvous_attended};
use kvferry::layout::MAX_RANKS;
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use super::interrupt::attend;
use super::options::text;
use crate::errors::{plain, shown};

/// How often a store that does not wait is asked again.
const PAUSE: Duration = Duration::from_millis(2);
/// How long a store may take to show what has just been set.
const SHOWN: Duration = Duration::from_secs(5);
/// Begins every value, before its length: so what no rank has set is known for that.
const MARK: [u8; 8] = *b"kvferry1";

/// How long rank 0's server is looked for, to say that this rank will not come.
const REFUSED: Duration = Duration::from_millis(500);

/// Only used while a communicator is set up or reset, on threads that come from Python.
pub(crate) struct Store {
    object: Py<PyAny>,
    /// It can wait for a key by itself, as torch's stores do.
    waits: bool,
}

impl Store {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Store> {
        let py = object.py();
        for method in [intern!(py, "set"), intern!(py, "get")] {
            if !object.getattr_opt(method)?.is_some_and(|found| found.is_callable()) {
                let kind = object.get_type().name()?;
                return Err(PyTypeError::new_err(format!(
                    "rendezvous must be a URL, or an object with set(key, value) and get(key) such as a torch store, \
                     got {kind}"
                )));
            }
        }
        let waits = object.getattr_opt(intern!(py, "wait"))?.is_some_and(|found| found.is_callable());
        Ok(Store { object: object.clone().unbind(), waits })
    }

    pub(crate) fn put(&self, key: &str, value: &[u8]) -> PyResult<()> {
        Python::attach(|py| {
            let value = [&MARK, &(value.len() as u64).to_le_bytes()[..], value].concat();
            self.object.bind(py).call_method1(intern!(py, "set"), (key, PyBytes::new(py, &value)))?;
            Ok(())
        })
    }

    /// The value of a key that somebody sets within `timeout`; `None` if nobody does.
    pub(crate) fn wait_for(&self, key: &str, timeout: Duration) -> PyResult<Option<Vec<u8>>> {
        let end = Instant::now() + timeout;
        if self.waits {
            return Python::attach(|py| self.wait(py, key, timeout));
        }
        loop {
            let found = Python::attach(|py| {
                py.check_signals()?;
                match self.object.bind(py).call_method1(intern!(py, "get"), (key,)) {
                    Ok(value) if value.is_none() => Ok(None),
                    Ok(value) => self.value(key, &value).map(Some),
                    Err(error) if error.is_instance_of::<PyKeyError>(py) => Ok(None),
                    Err(error) => Err(error),
                }
            })?;
            if found.is_some() {
                return Ok(found);
            }
            if Instant::now() >= end {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// torch: `wait(keys, timeout)` raises when the time is over, then `get` returns at once.
    fn wait(&self, py: Python<'_>, key: &str, timeout: Duration) -> PyResult<Option<Vec<u8>>> {
        // No time at all is no limit to some stores.
        let timeout = timeout.max(Duration::from_millis(10));
        let store = self.object.bind(py);
        let seconds = PyDict::new(py);
        seconds.set_item("seconds", timeout.as_secs_f64().min(1e8))?;
        let limit = py.import("datetime")?.getattr("timedelta")?.call((), Some(&seconds))?;
        let start = Instant::now();
        match store.call_method1(intern!(py, "wait"), (PyList::new(py, [key])?, limit)) {
            Ok(_) => {}
            // Stores have exceptions of their own for this; the clock tells it from a store that failed.
            Err(_) if start.elapsed() >= timeout.mul_f64(0.9) => return Ok(None),
            Err(error) => return Err(error),
        }
        self.value(key, &store.call_method1(intern!(py, "get"), (key,))?).map(Some)
    }

    /// What a rank has set, out of what `get` gave.
    fn value(&self, key: &str, given: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        let kind = given.get_type().name()?;
        let bytes = match given.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes().to_vec(),
            Err(_) if given.is_instance_of::<PyString>() => {
                return Err(self.junk(given.py(), key, "got str"));
            }
            Err(_) => match given.extract::<Vec<u8>>() {
                Ok(bytes) => bytes,
                Err(_) => return Err(self.junk(given.py(), key, &format!("got {kind}"))),
            },
        };
        let found = bytes.strip_prefix(&MARK).and_then(|rest| rest.split_first_chunk());
        match found {
            Some((length, value)) if u64::from_le_bytes(*length) == value.len() as u64 => Ok(value.to_vec()),
            _ => {
                let what = format!("got {} bytes that no rank has set", bytes.len());
                Err(self.junk(given.py(), key, &what))
            }
        }
    }

    fn junk(&self, py: Python<'_>, key: &str, what: &str) -> PyErr {
        let store = shown(self.object.bind(py));
        let message =
            format!("rendezvous {store}: get({key:?}) must give the bytes that a rank has set, {what}");
        plain(py, "RendezvousError", message)
    }
}

/// Where the ranks of a communicator meet.
pub(crate) enum Meeting {
    /// A single rank meets nobody.
    None,
    Url(String),
    Store(Arc<Place>),
}

impl Meeting {
    /// `patience`: what a step of set-up may take.
    pub(crate) fn new(given: &Bound<'_, PyAny>, patience: Duration) -> PyResult<Meeting> {
        if given.is_instance_of::<PyString>() {
            return Ok(Meeting::Url(text("rendezvous", given)?.to_owned()));
        }
        let (store, shown) = (Store::new(given)?, patience.min(SHOWN));
        Ok(Meeting::Store(Arc::new(Place { store, shown, raised: Mutex::new(None) })))
    }

    pub(crate) fn place(
        &self,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> kvferry::Result<Option<Arc<dyn Rendezvous>>> {
        Ok(match self {
            Meeting::None => None,
            Meeting::Url(url) => Some(rendezvous_attended(url, rank, world, timeout, &attend())?),
            Meeting::Store(place) => Some(place.clone()),
        })
    }

    /// Lets the ranks that wait for this one know that its arguments are refused; gives the refusal back.
    pub(crate) fn refused(
        &self,
        py: Python<'_>,
        rank: usize,
        world: usize,
        name: &str,
        error: PyErr,
    ) -> PyErr {
        let reason = error.value(py).to_string();
        py.detach(|| {
            // Also of a rank or world out of range, which has no place of its own.
            let place = self.place(rank.min(MAX_RANKS - 1), MAX_RANKS, REFUSED).ok().flatten()?;
            refuse_to_join(&*place, name, rank, world, &reason, &attend()).ok()
        });
        // What the place says does not matter any more.
        self.raised();
        error
    }

    /// The exception that the store raised, if it did.
    pub(crate) fn raised(&self) -> Option<PyErr> {
        match self {
            Meeting::Store(place) => place.raised.lock().unwrap_or_else(PoisonError::into_inner).take(),
            _ => None,
        }
    }
}

/// A Python store as the library sees it.
pub(crate) struct Place {
    store: Store,
    /// Within what time it must give back what has been set.
    shown: Duration,
    raised: Mutex<Option<PyErr>>,
}

impl Place {
    fn failed(&self, key: &str, error: PyErr) -> SetupError {
        let reason = error.to_string();
        *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        SetupError::Store { key: key.to_owned(), reason }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Place(Python)")
    }
}

impl Rendezvous for Place {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        let set = self.store.put(key, value).and_then(|()| {
            // A store that loses values, or makes up others, would look like ranks that do not come.
            match self.store.wait_for(key, self.shown)? {
                Some(_) => Ok(()),
                None => Err(Python::attach(|py| self.store.junk(py, key, "got nothing"))),
            }
        });
        set.map_err(|error| self.failed(key, error))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        match self.store.wait_for(key, timeout) {
            Ok(Some(value)) => Ok(value),
            Ok(None) => {
                Err(SetupError::RendezvousTimeout { key: key.to_owned(), waited: timeout, last: None })
            }
            Err(error) => Err(self.failed(key, error)),
        }
    }
}
