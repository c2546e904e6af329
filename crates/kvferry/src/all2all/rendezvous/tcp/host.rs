//! Rank 0's end: the map, and a thread that serves it to the others.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_host::{CloseInChild, Doorbell, ForkGuard, Interest, Readiness, poll_fds};

use super::super::memory::Values;
use super::super::{MAX_KEY, MAX_VALUE, Rendezvous, check};
use super::{GREETING, HEADER, Op, Request, Status, encode_reply, place, resolve};
use crate::all2all::setup::SetupError;

/// Most connections at a time.
const MAX_CONNECTIONS: usize = 512;
/// Most keys.
const MAX_KEYS: usize = 4096;

/// A handle of rank 0. Handles of one process on one address share a server, which ends with the last of them.
#[derive(Debug)]
pub(in super::super) struct Host {
    server: Arc<Server>,
}

/// The servers of this process by address. The entry of one that is ending stays until its port is free.
static SERVERS: LazyLock<Mutex<HashMap<String, Weak<Server>>>> = LazyLock::new(Mutex::default);

fn servers() -> MutexGuard<'static, HashMap<String, Weak<Server>>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    pub(in super::super) fn open(address: &str) -> Result<Host, SetupError> {
        loop {
            let mut servers = servers();
            let known = servers.get(address).map(Weak::upgrade);
            match known {
                Some(Some(server)) if server.fork.check().is_ok() => return Ok(Host { server }),
                Some(None) => {
                    drop(servers);
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The parent's server, after a fork, does not serve this process.
                Some(Some(_)) | None => {
                    let server = Arc::new(Server::start(address)?);
                    servers.insert(address.to_owned(), Arc::downgrade(&server));
                    return Ok(Host { server });
                }
            }
        }
    }
}

impl Rendezvous for Host {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), SetupError> {
        self.server.fork.check()?;
        check(key, value)?;
        if !self.server.shared.values.set(key, value, MAX_KEYS) {
            return Err(SetupError::Store { key: key.to_owned(), reason: full() });
        }
        self.server.shared.wake.ring();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, SetupError> {
        self.server.fork.check()?;
        check(key, &[])?;
        self.server.shared.values.wait(key, timeout)
    }
}

fn full() -> String {
    format!("it holds {MAX_KEYS} keys already")
}

#[derive(Debug)]
struct Server {
    address: String,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    fork: ForkGuard,
}

#[derive(Debug)]
struct Shared {
    values: Values,
    wake: Doorbell,
    stop: AtomicBool,
}

impl Server {
    fn start(address: &str) -> Result<Server, SetupError> {
        let fork = ForkGuard::new();
        let listener = listen(address)?;
        let wake = Doorbell::new().map_err(SetupError::io("a descriptor for the rendezvous"))?;
        let shared = Arc::new(Shared { values: Values::default(), wake, stop: AtomicBool::new(false) });
        let thread = std::thread::Builder::new()
            .name("kvf-rendezvous".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || Serving { listener, shared, connections: Vec::new() }.run()
            })
            .map_err(SetupError::io("the thread that serves the rendezvous"))?;
        Ok(Server { address: address.to_owned(), shared, thread: Some(thread), fork })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.fork.check().is_err() {
            // The thread exists in the parent only.
            std::mem::forget(thread);
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake.ring();
        if thread.join().is_err() {
            tracing::error!("the thread that serves the rendezvous had panicked");
        }
        servers().remove(&self.address);
    }
}

fn listen(address: &str) -> Result<CloseInChild<TcpListener>, SetupError> {
    let mut last = None;
    for candidate in resolve(address)? {
        match CloseInChild::open(|| TcpListener::bind(candidate)) {
            Ok(listener) => {
                listener.set_nonblocking(true).map_err(SetupError::place(place(address), "listening"))?;
                return Ok(listener);
            }
            Err(error) => last = Some((candidate, error)),
        }
    }
    Err(match last {
        Some((_, error)) if error.kind() == io::ErrorKind::AddrInUse => {
            SetupError::AddressInUse { address: address.to_owned() }
        }
        Some((candidate, error)) => {
            SetupError::place(place(address), format!("listening at {candidate}"))(error)
        }
        None => SetupError::AddressInUse { address: address.to_owned() },
    })
}

/// What the thread owns.
struct Serving {
    listener: CloseInChild<TcpListener>,
    shared: Arc<Shared>,
    connections: Vec<Connection>,
}

struct Connection {
    stream: CloseInChild<TcpStream>,
    input: Vec<u8>,
    output: Vec<u8>,
    greeted: bool,
    /// Key that the other end waits for.
    waiting: Option<String>,
}

impl Serving {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let mut fds =
                vec![(self.shared.wake.as_fd(), Interest::Read), (self.listener.as_fd(), Interest::Read)];
            fds.extend(self.connections.iter().map(|connection| {
                let interest = if connection.output.is_empty() { Interest::Read } else { Interest::Both };
                (connection.stream.as_fd(), interest)
            }));
            let found = match poll_fds(&fds, None) {
                Ok(found) => found,
                Err(error) => {
                    tracing::error!(%error, "cannot serve the rendezvous, trying again");
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            if found[0].readable {
                self.shared.wake.clear();
            }
            let values = &self.shared.values;
            let mut states = found[2..].iter();
            self.connections.retain_mut(|connection| {
                let state = states.next().copied().unwrap_or_default();
                match connection.serve(state, values) {
                    Ok(()) => true,
                    Err(why) => {
                        tracing::debug!(%why, "a connection to the rendezvous ends");
                        false
                    }
                }
            });
            // A value set above or by rank 0 may be what others wait for.
            self.connections.retain_mut(|connection| connection.answer(values).is_ok());
            if found[1].readable {
                self.admit();
            }
        }
    }

    fn admit(&mut self) {
        loop {
            match CloseInChild::open(|| self.listener.accept().map(|(stream, _)| stream)) {
                Ok(stream) => {
                    if let Err(error) = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)) {
                        tracing::debug!(%error, "a connection to the rendezvous cannot be used");
                        continue;
                    }
                    if self.connections.len() >= MAX_CONNECTIONS {
                        // Whoever has not greeted yet is no rank, or a slow one that will come again.
                        match self.connections.iter().position(|connection| !connection.greeted) {
                            Some(stranger) => drop(self.connections.remove(stranger)),
                            None => continue,
                        }
                    }
                    self.connections.push(Connection {
                        stream,
                        input: Vec::new(),
                        output: GREETING.to_vec(),
                        greeted: false,
                        waiting: None,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors: they wait in the queue, and this must not spin.
                    tracing::warn!(%error, "cannot take in a rank at the rendezvous");
                    std::thread::sleep(Duration::from_millis(20));
                    return;
                }
            }
        }
    }
}

impl Connection {
    fn serve(&mut self, state: Readiness, values: &Values) -> io::Result<()> {
        if state.readable {
            // Requests come one at a time, so no more than one belongs here.
            let limit = GREETING.len() + HEADER + MAX_KEY + MAX_VALUE;
            let mut bytes = [0; 4096];
            loop {
                match (&*self.stream).read(&mut bytes) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(got) => self.input.extend(&bytes[..got]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                }
                if self.input.len() > limit {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "more than one request at a time",
                    ));
                }
            }
        }
        if !self.greeted {
            let Some(rest) = self.input.get(GREETING.len()..) else { return self.flush() };
            if !self.input.starts_with(&GREETING) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "another protocol"));
            }
            self.input = rest.to_vec();
            self.greeted = true;
        }
        if self.waiting.is_none()
            && let Some((request, len)) = Request::decode(&self.input).map_err(io::Error::other)?
        {
            self.input.drain(..len);
            match request.op {
                Op::Set if values.set(&request.key, &request.value, MAX_KEYS) => {
                    self.reply(Status::Done, &[])
                }
                Op::Set => self.reply(Status::Refused, full().as_bytes()),
                Op::Look => match values.look(&request.key) {
                    Some(value) => self.reply(Status::Done, &value),
                    None => self.reply(Status::Absent, &[]),
                },
                Op::Wait => self.waiting = Some(request.key),
            }
        }
        self.flush()
    }

    /// Answers a wait that has come true.
    fn answer(&mut self, values: &Values) -> io::Result<()> {
        if let Some(value) = self.waiting.as_deref().and_then(|key| values.look(key)) {
            self.waiting = None;
            self.reply(Status::Done, &value);
        }
        self.flush()
    }

    fn reply(&mut self, status: Status, value: &[u8]) {
        self.output.extend(encode_reply(status, value));
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match (&*self.stream).write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
