//! Where the ranks of a communicator find each other: a few small values under keys.

mod file;
mod memory;
mod tcp;

use std::sync::Arc;
use std::time::Duration;

use kvferry_layout::exchange::MAX_RANKS;

use super::attend::Attend;
use super::setup::SetupError;

/// Most bytes of a key.
pub const MAX_KEY: usize = 256;
/// Most bytes of a value.
pub const MAX_VALUE: usize = 64 << 10;

/// A place that all ranks can reach, for values under keys. A value set again replaces the old one.
///
/// Needed until the ranks have joined. Implement it to let a store of your own (of a job scheduler, of torch) serve.
pub trait Rendezvous: Send + Sync {
    /// Sets a value.
    ///
    /// # Errors
    /// The store failed, or the key or value is over its limit.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError>;

    /// The value under `key`, waiting until somebody sets it, at most `timeout`; a timeout of zero only looks.
    ///
    /// # Errors
    /// [`SetupError::RendezvousTimeout`] if nobody set it in time, others if the store failed.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError>;
}

/// Opens the rendezvous at `url` for a rank of `world`.
///
/// | url | who may meet there | left behind |
/// |---|---|---|
/// | `tcp://host:port` | processes that reach rank 0, which serves it until its handle is dropped | nothing |
/// | `file:///path` | processes that share a directory; `path` is made if need be | nothing; leftovers of killed runs are recognised and replaced |
/// | `memory://name` | threads of one process | nothing |
///
/// Over `tcp://` other ranks try to connect until `timeout`; a lost connection is made again. Anybody who can reach the
/// port can read and set values, so use an address of a trusted network, best the loopback one. Ranks prove to each
/// other that they belong to the same user.
///
/// # Errors
/// A malformed url, an address in use, or one that cannot be reached.
pub fn rendezvous(
    url: &str,
    rank: usize,
    world: usize,
    timeout: Duration,
) -> Result<Arc<dyn Rendezvous>, SetupError> {
    rendezvous_attended(url, rank, world, timeout, &Attend::default())
}

/// As [`rendezvous`], with somebody who looks after the wait for rank 0's server.
///
/// # Errors
/// As [`rendezvous`], and [`SetupError::Interrupted`].
pub fn rendezvous_attended(
    url: &str,
    rank: usize,
    world: usize,
    timeout: Duration,
    attend: &Attend,
) -> Result<Arc<dyn Rendezvous>, SetupError> {
    if !(1..=MAX_RANKS).contains(&world) {
        let expected = format!("1 to {MAX_RANKS}");
        return Err(SetupError::Range { what: "world_size", expected, value: world });
    }
    if rank >= world {
        return Err(SetupError::Range { what: "rank", expected: format!("below {world}"), value: rank });
    }
    let bad = |why: &str| SetupError::Url { url: url.to_owned(), why: why.to_owned() };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| bad("it is not scheme://address"))?;
    if rest.is_empty() {
        return Err(bad("the address is empty"));
    }
    if rest.contains('\0') {
        return Err(bad("the address holds a zero byte"));
    }
    match scheme {
        "tcp" => {
            let named = rest.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            let (_, port) = named.ok_or_else(|| bad("tcp:// needs host:port"))?;
            match port.parse::<u16>() {
                Ok(1..) => {}
                _ => return Err(bad("the port must be 1 to 65535")),
            }
            if rank == 0 {
                Ok(Arc::new(tcp::Host::open(rest)?))
            } else {
                Ok(Arc::new(tcp::Guest::open(rest, timeout, attend)?))
            }
        }
        "file" if rest.starts_with('/') => Ok(Arc::new(file::FileStore::open(rest.as_ref())?)),
        "file" => Err(bad("file:// needs an absolute path, as in file:///tmp/run7")),
        "memory" => Ok(Arc::new(memory::MemoryStore::open(rest))),
        _ => Err(bad("schemes are tcp, file and memory")),
    }
}

/// Checks a key and a value against the limits.
fn check(key: &str, value: &[u8]) -> Result<(), SetupError> {
    let large = |what: &str, value, limit| Err(SetupError::TooLarge { what: what.to_owned(), value, limit });
    if key.len() > MAX_KEY {
        return large("a rendezvous key", key.len(), MAX_KEY);
    }
    if value.len() > MAX_VALUE {
        return large("a rendezvous value", value.len(), MAX_VALUE);
    }
    Ok(())
}

fn timed_out(key: &str, waited: Duration, last: Option<String>) -> SetupError {
    SetupError::RendezvousTimeout { key: key.to_owned(), waited, last }
}
