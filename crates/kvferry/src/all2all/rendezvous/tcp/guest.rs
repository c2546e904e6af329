//! The other ranks' end.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_host::{CloseInChild, ForkGuard};

use super::super::{Rendezvous, check, timed_out};
use super::{GREETING, HEADER, Op, Request, Status, decode_reply, resolve};
use crate::all2all::attend::Attend;
use crate::all2all::setup::SetupError;
use crate::all2all::wire::left;

/// For one try to connect, and for answers that need no waiting.
const PROMPT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(20);

/// A handle of another rank. It connects again when the connection is lost, and then sets anew what it had set: rank 0
/// may have ended its server and started another.
#[derive(Debug)]
pub(in super::super) struct Guest {
    address: String,
    /// Connections nobody uses now. Each thread that asks has one of its own, so a wait holds nobody up.
    idle: Mutex<Vec<CloseInChild<TcpStream>>>,
    set: Mutex<BTreeMap<String, Vec<u8>>>,
    fork: ForkGuard,
}

enum Answer {
    Value(Vec<u8>),
    Absent,
    Refused(String),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guest {
    pub(in super::super) fn open(
        address: &str,
        timeout: Duration,
        attend: &Attend,
    ) -> Result<Guest, SetupError> {
        let guest = Guest {
            address: address.to_owned(),
            idle: Mutex::default(),
            set: Mutex::default(),
            fork: ForkGuard::new(),
        };
        let start = Instant::now();
        let mut attending = attend.begin();
        loop {
            match guest.connect(left(start, timeout))? {
                Ok(stream) => {
                    lock(&guest.idle).push(stream);
                    return Ok(guest);
                }
                Err(last) if left(start, timeout).is_zero() => return Err(guest.unreachable(timeout, last)),
                Err(_) if attending.gives_up() => {
                    return Err(SetupError::Interrupted { what: "connect".to_owned() });
                }
                Err(_) => std::thread::sleep(RETRY.min(left(start, timeout))),
            }
        }
    }

    fn unreachable(&self, waited: Duration, last: String) -> SetupError {
        SetupError::Unreachable { address: self.address.clone(), waited, last }
    }

    /// One try at every address; the inner error is worth another.
    fn connect(&self, limit: Duration) -> Result<Result<CloseInChild<TcpStream>, String>, SetupError> {
        let limit = limit.clamp(Duration::from_millis(1), PROMPT);
        let mut last = String::new();
        for address in resolve(&self.address)? {
            let made = CloseInChild::open(|| TcpStream::connect_timeout(&address, limit));
            match made.and_then(|stream| self.greet(&stream, limit).map(|()| stream)) {
                Ok(stream) => return Ok(Ok(stream)),
                Err(error) => last = format!("{address}: {error}"),
            }
        }
        Ok(Err(last))
    }

    fn greet(&self, stream: &TcpStream, limit: Duration) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        let mut stream = stream;
        stream.write_all(&GREETING)?;
        let mut answer = GREETING;
        answer.fill(0);
        stream.read_exact(&mut answer)?;
        if answer != GREETING {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "something else listens there"));
        }
        for (key, value) in &*lock(&self.set) {
            ask(stream, Op::Set, key, value)?;
        }
        Ok(())
    }

    /// Asks until there is an answer or the time is over; the last failure then.
    fn request(
        &self,
        op: Op,
        key: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<Result<Answer, Option<String>>, SetupError> {
        let start = Instant::now();
        let mut last = None;
        loop {
            let remaining = left(start, timeout);
            // What needs no waiting gets its answer even when no time is left for waiting.
            let limit = if op == Op::Wait { remaining } else { remaining.max(PROMPT) };
            let idle = lock(&self.idle).pop();
            let (stream, fresh) = match idle {
                Some(stream) => (Ok(stream), false),
                None => (self.connect(limit)?, true),
            };
            let failed = match stream {
                Ok(stream) => {
                    let limit = limit.max(Duration::from_millis(1));
                    let set = stream.set_read_timeout(Some(limit));
                    match set.and_then(|()| ask(&stream, op, key, value)) {
                        Ok(answer) => {
                            lock(&self.idle).push(stream);
                            return Ok(Ok(answer));
                        }
                        Err(error)
                            if matches!(
                                error.kind(),
                                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                            ) =>
                        {
                            // The connection is dropped: an answer that comes late must not be taken for another's.
                            "no answer in time".to_owned()
                        }
                        Err(error) if fresh => error.to_string(),
                        // Lost while idle, perhaps long ago; a new one may work at once.
                        Err(_) => continue,
                    }
                }
                Err(why) => why,
            };
            last = Some(failed).filter(|_| op != Op::Wait || !left(start, timeout).is_zero()).or(last);
            if left(start, timeout).is_zero() {
                return Ok(Err(last));
            }
            std::thread::sleep(RETRY.min(left(start, timeout)));
        }
    }
}

/// One request and its answer.
fn ask(mut stream: &TcpStream, op: Op, key: &str, value: &[u8]) -> io::Result<Answer> {
    stream.write_all(&Request::encode(op, key, value))?;
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let (status, len) = decode_reply(header)?;
    let mut value = vec![0; len];
    stream.read_exact(&mut value)?;
    Ok(match status {
        Status::Done => Answer::Value(value),
        Status::Absent => Answer::Absent,
        Status::Refused => Answer::Refused(String::from_utf8_lossy(&value).into_owned()),
    })
}

impl Rendezvous for Guest {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        self.fork.check()?;
        check(key, value)?;
        let answer = self.request(Op::Set, key, value, PROMPT)?;
        match answer {
            Ok(Answer::Value(_)) => {
                lock(&self.set).insert(key.to_owned(), value.to_vec());
                Ok(())
            }
            Ok(Answer::Refused(reason)) => Err(SetupError::Store { key: key.to_owned(), reason }),
            Ok(Answer::Absent) => Err(SetupError::Store {
                key: key.to_owned(),
                reason: "an answer to another request".to_owned(),
            }),
            Err(last) => Err(self.unreachable(PROMPT, last.unwrap_or_default())),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        self.fork.check()?;
        check(key, &[])?;
        let op = if timeout.is_zero() { Op::Look } else { Op::Wait };
        match self.request(op, key, &[], timeout)? {
            Ok(Answer::Value(value)) => Ok(value),
            Ok(Answer::Absent) => Err(timed_out(key, timeout, None)),
            Ok(Answer::Refused(reason)) => Err(SetupError::Store { key: key.to_owned(), reason }),
            Err(last) => Err(timed_out(key, timeout, last)),
        }
    }
}
