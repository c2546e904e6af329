//! `tcp://host:port`: rank 0 serves a map of values, the others ask.
//!
//! ```text
//! greeting, both ways   "KVFRDZ01"
//! request               op u8 | 0 u8 | key bytes u16 | value bytes u32 | key | value
//! reply                 status u8 | 0 u8 | 0 u16 | value bytes u32 | value
//! ```
//! Numbers are little-endian. One request is answered before the next; a `WAIT` is answered when somebody sets the key.
//! Who gives up waiting closes the connection, which is also how a rank says goodbye.

mod guest;
mod host;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

use super::{MAX_KEY, MAX_VALUE};
use crate::all2all::setup::SetupError;

pub(super) use guest::Guest;
pub(super) use host::Host;

const GREETING: [u8; 8] = *b"KVFRDZ01";
const HEADER: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Set = 1,
    /// Answered at once.
    Look = 2,
    /// Answered when the key is set.
    Wait = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Done = 0,
    /// No such key.
    Absent = 1,
    /// The value says why.
    Refused = 2,
}

#[derive(Debug, PartialEq, Eq)]
struct Request {
    op: Op,
    key: String,
    value: Vec<u8>,
}

impl Request {
    /// Lengths are the caller's to check.
    fn encode(op: Op, key: &str, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + key.len() + value.len());
        bytes.extend([op as u8, 0]);
        bytes.extend((key.len() as u16).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend(key.as_bytes());
        bytes.extend(value);
        bytes
    }

    /// The request at the start of `bytes` and its length; `None` if it is not whole yet.
    fn decode(bytes: &[u8]) -> Result<Option<(Request, usize)>, &'static str> {
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let op = match header[0] {
            1 => Op::Set,
            2 => Op::Look,
            3 => Op::Wait,
            _ => return Err("an unknown request"),
        };
        let key_len = usize::from(u16::from_le_bytes([header[2], header[3]]));
        let value_len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        if key_len > MAX_KEY {
            return Err("the key is too long");
        }
        if value_len > MAX_VALUE || (op != Op::Set && value_len != 0) {
            return Err("the value is too long");
        }
        let end = HEADER + key_len + value_len;
        let Some(body) = bytes.get(HEADER..end) else { return Ok(None) };
        let (key, value) = body.split_at(key_len);
        let key = std::str::from_utf8(key).map_err(|_| "the key is no text")?.to_owned();
        Ok(Some((Request { op, key, value: value.to_vec() }, end)))
    }
}

fn encode_reply(status: Status, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![status as u8, 0, 0, 0];
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend(value);
    bytes
}

/// Status and length of the value that follows.
fn decode_reply(header: [u8; HEADER]) -> io::Result<(Status, usize)> {
    let status = match header[0] {
        0 => Status::Done,
        1 => Status::Absent,
        2 => Status::Refused,
        _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an unknown reply")),
    };
    let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
    if len > MAX_VALUE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the value is too long"));
    }
    Ok((status, len))
}

/// The URL of an address.
fn place(address: &str) -> String {
    format!("tcp://{address}")
}

/// The socket addresses of `host:port`, with names looked up.
fn resolve(address: &str) -> Result<Vec<SocketAddr>, SetupError> {
    let failed = || SetupError::place(place(address), "looking up its host");
    let found: Vec<SocketAddr> = address.to_socket_addrs().map_err(failed())?.collect();
    if found.is_empty() {
        let error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        return Err(failed()(error));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_survive_and_wait_for_their_last_byte() {
        for (op, value) in [(Op::Set, vec![3; MAX_VALUE]), (Op::Look, vec![]), (Op::Wait, vec![])] {
            let key = "ü".repeat(MAX_KEY / 2);
            let mut bytes = Request::encode(op, &key, &value);
            let len = bytes.len();
            bytes.extend(b"next");
            let expected = Request { op, key, value };
            assert_eq!(Request::decode(&bytes), Ok(Some((expected, len))));
            for short in (0..len.min(300)).chain(len.saturating_sub(20)..len) {
                assert_eq!(Request::decode(&bytes[..short]), Ok(None));
            }
        }
    }

    #[test]
    fn what_is_too_long_is_refused_before_it_is_read() {
        let huge = Request::encode(Op::Set, "k", &vec![0; MAX_VALUE + 1]);
        assert!(Request::decode(&huge[..HEADER]).is_err());
        let key = Request::encode(Op::Look, &"k".repeat(MAX_KEY + 1), &[]);
        assert!(Request::decode(&key[..HEADER]).is_err());
        let laden = Request::encode(Op::Wait, "k", &[1]);
        assert!(Request::decode(&laden[..HEADER]).is_err());
        assert!(decode_reply([0, 0, 0, 0, 1, 0, 1, 0]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_bring_the_server_down(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), plant in any::<bool>()) {
            if plant && bytes.len() >= HEADER {
                bytes[0] %= 5;
                bytes[3] = 0;
                bytes[5..8].fill(0);
            }
            let _ = Request::decode(&bytes);
        }
    }
}
