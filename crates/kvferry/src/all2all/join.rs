//! How the ranks of a communicator find each other and connect.
//!
//! Every rank listens at an abstract Unix address that nobody can guess and publishes it with a random token. Each pair
//! has one connection, made by the higher rank, which proves with the token that it has read what the lower rank
//! published. What an earlier run left at the rendezvous leads to a closed address or a wrong token; the caller then
//! reads the rendezvous again until the timeout, by when the rank has published anew.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvferry_host::{
    Credentials, Interest, PeerAddress, PeerListener, PeerSocket, ProcessWatch, Received, poll_fds,
    random_bytes,
};
use kvferry_layout::exchange::MAX_RANKS;

use super::attend::{Attend, Attending};
use super::mesh::{Peer, withdraw_from_join};
use super::rendezvous::Rendezvous;
use super::setup::SetupError;
use super::wire::{Hello, MAX_NAME, Message, Token, check_text, left};
use super::word;

/// Connections that have not said who they are.
const MAX_STRANGERS: usize = 128;
/// How soon a leftover at the rendezvous is looked at again.
const RETRY: Duration = Duration::from_millis(20);
/// How long one look at the rendezvous may keep this rank from looking at its connections.
const SLICE: Duration = Duration::from_millis(100);
/// One look at the rendezvous.
const LOOK: Duration = Duration::ZERO;
/// How often this rank looks whether another has taken its place there, or has left word that it will not come.
const WATCH: Duration = Duration::from_millis(200);

/// What a rank publishes.
struct Card {
    token: Token,
    pid: u32,
    address: PeerAddress,
}

impl Card {
    fn encode(&self) -> Vec<u8> {
        let name: &[u8] = match &self.address {
            PeerAddress::Abstract(name) => name,
            PeerAddress::Path(path) => path.as_os_str().as_encoded_bytes(),
        };
        [&self.token, self.pid.to_le_bytes().as_slice(), name].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Card> {
        let (token, rest) = bytes.split_at_checked(size_of::<Token>())?;
        let (pid, name) = rest.split_at_checked(4)?;
        if name.is_empty() || name.len() > 100 {
            return None;
        }
        Some(Card {
            token: token.try_into().ok()?,
            pid: u32::from_le_bytes(pid.try_into().ok()?),
            address: PeerAddress::Abstract(name.to_vec()),
        })
    }
}

pub(super) fn key(name: &str, rank: usize) -> String {
    format!("kvferry/{name}/{rank}")
}

/// How far the connection to a rank is.
#[derive(Debug)]
enum Link {
    /// Nothing yet; a higher rank will call.
    Open,
    /// Greeted, not answered.
    Greeted(PeerSocket, u32),
    Done(Peer),
}

/// Connects to all other ranks.
///
/// # Errors
/// As [`Mesh::join`](super::mesh::Mesh::join).
pub(super) fn connect(
    rank: usize,
    world: usize,
    store: &dyn Rendezvous,
    name: &str,
    timeout: Duration,
    attend: &Attend,
) -> Result<Vec<Option<Peer>>, SetupError> {
    let range = |what, expected: String, value| Err(SetupError::Range { what, expected, value });
    if !(1..=MAX_RANKS).contains(&world) {
        return range("world_size", format!("1 to {MAX_RANKS}"), world);
    }
    if rank >= world {
        return range("rank", format!("below {world}"), rank);
    }
    check_text("the name of a communicator", name, MAX_NAME)?;
    if world == 1 {
        return Ok(vec![None]);
    }
    let address = PeerAddress::random().map_err(SetupError::io("random bytes"))?;
    let listener = PeerListener::bind(address).map_err(SetupError::io("listening for other ranks"))?;
    let token = random_bytes().map_err(SetupError::io("random bytes"))?;
    let card = Card { token, pid: std::process::id(), address: listener.address().clone() };
    let links = (0..world).map(|_| Link::Open).collect();
    let start = Instant::now();
    let mut joining = Joining {
        rank,
        world,
        store,
        name,
        timeout,
        start,
        token,
        listener,
        links,
        strangers: Vec::new(),
        last: None,
        attending: attend.begin(),
        watched: start,
    };
    let result = joining.publish(&card).and_then(|()| joining.run());
    let done = joining.links.into_iter().map(|link| match link {
        Link::Done(peer) => Some(peer),
        Link::Open | Link::Greeted(..) => None,
    });
    match result {
        Ok(()) => Ok(done.collect()),
        Err(error) => {
            // Heard from another rank, perhaps; whoever left the word waits until all have read it.
            let error = match error {
                error @ SetupError::Withdrawn { .. } => word::heed(store, name, rank).err().unwrap_or(error),
                error => error,
            };
            done.flatten().for_each(|peer| withdraw_from_join(rank, &peer.socket, &error));
            Err(error)
        }
    }
}

struct Joining<'a> {
    rank: usize,
    world: usize,
    store: &'a dyn Rendezvous,
    name: &'a str,
    timeout: Duration,
    start: Instant,
    token: Token,
    listener: PeerListener,
    links: Vec<Link>,
    strangers: Vec<PeerSocket>,
    /// The last thing that went wrong and was tried again.
    last: Option<String>,
    attending: Attending<'a>,
    /// When the rendezvous was last looked at for what it says of this rank.
    watched: Instant,
}

impl Joining<'_> {
    /// Puts this rank's card where the others look for it, unless somebody who is still joining has done so.
    fn publish(&self, card: &Card) -> Result<(), SetupError> {
        self.watch()?;
        self.store.set(&key(self.name, self.rank), &card.encode())
    }

    /// Looks at what the rendezvous says of this rank, and of ranks that will not come.
    fn watch(&self) -> Result<(), SetupError> {
        word::heed(self.store, self.name, self.rank)?;
        match self.store.get(&key(self.name, self.rank), LOOK) {
            Ok(found) => self.rival(&found),
            Err(_) => Ok(()),
        }
    }

    /// Fails if the card that stands for this rank is that of another process or thread, which is told too. One that
    /// nobody listens for is left by an earlier run, or its ranks have all met.
    fn rival(&self, found: &[u8]) -> Result<(), SetupError> {
        let Some(card) = Card::decode(found).filter(|card| card.token != self.token) else { return Ok(()) };
        let Ok(socket) = PeerSocket::connect(&card.address, SLICE) else { return Ok(()) };
        // The answer would say what is known.
        if let Err(error) = socket.try_send(&self.hello(self.rank, card.token).encode(), &[]) {
            tracing::debug!(%error, "could not tell another process that it has this one's rank");
        }
        Err(SetupError::Duplicate { rank: self.rank, pid: card.pid })
    }

    fn hello(&self, to: usize, token: Token) -> Message {
        Message::Hello(Hello {
            rank: self.rank as u32,
            world: self.world as u32,
            to: to as u32,
            token,
            pid: std::process::id(),
            name: self.name.to_owned(),
        })
    }

    fn run(&mut self) -> Result<(), SetupError> {
        for lower in 0..self.rank {
            self.call(lower)?;
        }
        while self.waited_for().next().is_some() {
            let left = left(self.start, self.timeout);
            if left.is_zero() {
                let missing = self.waited_for().collect();
                return Err(self.missing(missing));
            }
            self.turn(left.min(SLICE))?;
        }
        Ok(())
    }

    /// Ranks without a connection.
    fn waited_for(&self) -> impl Iterator<Item = usize> {
        (0..self.world).filter(|&rank| rank != self.rank && !matches!(self.links[rank], Link::Done(_)))
    }

    fn missing(&mut self, missing: Vec<usize>) -> SetupError {
        SetupError::Missing { missing, world: self.world, waited: self.timeout, last: self.last.take() }
    }

    /// Finds a lower rank at the rendezvous and greets it.
    fn call(&mut self, lower: usize) -> Result<(), SetupError> {
        let key = key(self.name, lower);
        loop {
            let bytes = match self.store.get(&key, left(self.start, self.timeout).min(SLICE)) {
                Ok(bytes) => bytes,
                Err(SetupError::RendezvousTimeout { last, .. }) => {
                    self.last = last.or(self.last.take());
                    // Those met already may have answered, or given up for a reason that is worth more than a timeout.
                    self.turn(Duration::ZERO)?;
                    if !left(self.start, self.timeout).is_zero() {
                        continue;
                    }
                    // Whoever has published is not the one that is missing.
                    let absent = |&rank: &usize| {
                        rank == lower || self.store.get(&self::key(self.name, rank), LOOK).is_err()
                    };
                    let missing = self.waited_for().filter(absent).collect();
                    return Err(self.missing(missing));
                }
                Err(error) => return Err(error),
            };
            match self.greet(lower, &bytes)? {
                Ok(()) => return Ok(()),
                Err(why) => self.last = Some(format!("rank {lower}: {why}")),
            }
            self.turn(Duration::ZERO)?;
            if left(self.start, self.timeout).is_zero() {
                return Err(self.missing(vec![lower]));
            }
            std::thread::sleep(RETRY.min(left(self.start, self.timeout)));
        }
    }

    /// One try; the inner error is worth another.
    fn greet(&mut self, lower: usize, card: &[u8]) -> Result<Result<(), String>, SetupError> {
        let Some(card) = Card::decode(card) else {
            return Ok(Err("what it published is malformed".to_owned()));
        };
        let socket = match PeerSocket::connect(&card.address, left(self.start, self.timeout).min(SLICE)) {
            Ok(socket) => socket,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) =>
            {
                return Ok(Err(format!(
                    "nobody listens at {} of process {}: left by an earlier run, or in another network namespace",
                    card.address, card.pid
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(Err(error.to_string())),
            Err(error) => return Err(SetupError::io(format!("connecting to rank {lower}"))(error)),
        };
        let found = socket.credentials().map_err(SetupError::io("asking who a rank is"))?;
        let own = Credentials::own().uid;
        if found.uid != own {
            return Err(SetupError::WrongUser { rank: lower, uid: found.uid, own });
        }
        match socket.try_send(&self.hello(lower, card.token).encode(), &[]) {
            Ok(()) => {
                self.links[lower] = Link::Greeted(socket, card.pid);
                Ok(Ok(()))
            }
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    /// Waits for something to happen on any connection, and deals with it.
    fn turn(&mut self, timeout: Duration) -> Result<(), SetupError> {
        let mut fds = vec![(self.listener.as_fd(), Interest::Read)];
        fds.extend(self.strangers.iter().map(|stranger| (stranger.as_fd(), Interest::Read)));
        let strangers = self.strangers.len();
        let mut whose = Vec::new();
        for (rank, link) in self.links.iter().enumerate() {
            match link {
                Link::Open => {}
                Link::Greeted(socket, _) => {
                    fds.push((socket.as_fd(), Interest::Read));
                    whose.push(rank);
                }
                Link::Done(peer) => {
                    // It may be ahead and have sent its part of the next step, which is not read here.
                    fds.push((peer.socket.as_fd(), Interest::End));
                    whose.push(rank);
                    if let Some(watch) = &peer.watch {
                        fds.push((watch.as_fd(), Interest::Read));
                        whose.push(rank);
                    }
                }
            }
        }
        if self.attending.gives_up() {
            return Err(SetupError::Interrupted { what: "join".to_owned() });
        }
        if self.watched.elapsed() >= WATCH {
            self.watch()?;
            self.watched = Instant::now();
        }
        let found = poll_fds(&fds, Some(timeout)).map_err(SetupError::io("waiting for other ranks"))?;
        let (knocked, rest) = (found[0].readable, &found[1..]);
        for (&rank, found) in whose.iter().zip(&rest[strangers..]) {
            match &self.links[rank] {
                Link::Done(peer) if found.ended || found.readable => return Err(self.lost(rank, peer)),
                Link::Greeted(..) if found.readable => self.answered(rank)?,
                _ => {}
            }
        }
        let known = std::mem::take(&mut self.strangers);
        for (stranger, found) in known.into_iter().zip(rest) {
            if found.readable {
                self.introduced(stranger)?;
            } else {
                self.strangers.push(stranger);
            }
        }
        if knocked {
            self.admit()?;
        }
        Ok(())
    }

    /// Takes connections in whose makers have not said who they are.
    fn admit(&mut self) -> Result<(), SetupError> {
        let own = Credentials::own().uid;
        while let Some(stranger) =
            self.listener.accept(Duration::ZERO).map_err(SetupError::io("accepting a rank's connection"))?
        {
            match stranger.credentials() {
                Ok(found) if found.uid == own => {}
                Ok(found) => {
                    let reason = format!("this rank runs as user {own}, you as user {}", found.uid);
                    self.last = Some(format!("turned away process {} of user {}", found.pid, found.uid));
                    refuse(&stranger, false, reason);
                    continue;
                }
                Err(_) => continue,
            }
            if self.strangers.len() >= MAX_STRANGERS {
                // The oldest has had the longest time to speak.
                self.strangers.remove(0);
            }
            self.strangers.push(stranger);
        }
        Ok(())
    }

    /// Reads the greeting of a connection.
    fn introduced(&mut self, socket: PeerSocket) -> Result<(), SetupError> {
        let hello = match socket.try_recv() {
            Ok(Received::Message(bytes, _)) => match Message::decode(&bytes) {
                Ok(Message::Hello(hello)) => hello,
                _ => return Ok(()),
            },
            Ok(Received::Nothing) => {
                self.strangers.push(socket);
                return Ok(());
            }
            Ok(Received::HungUp) | Err(_) => return Ok(()),
        };
        let caller = hello.rank as usize;
        if hello.token != self.token || hello.to as usize != self.rank || hello.name != self.name {
            let reason =
                "this is not the rank you look for: a wrong token, left by an earlier run".to_owned();
            self.last = Some(format!("process {} called rank {caller} came with a wrong token", hello.pid));
            refuse(&socket, true, reason);
            return Ok(());
        }
        if hello.world as usize != self.world {
            let (theirs, own) = (hello.world, self.world);
            refuse(&socket, false, format!("this rank's world has {own} ranks, yours {theirs}"));
            let reason = format!("its world has {theirs} ranks, this rank's {own}");
            return Err(SetupError::Disagree { rank: caller, reason });
        }
        if caller == self.rank {
            refuse(&socket, false, format!("process {} is rank {caller}", std::process::id()));
            return Err(SetupError::Duplicate { rank: caller, pid: hello.pid });
        }
        if caller <= self.rank || caller >= self.world {
            refuse(&socket, false, format!("rank {caller} does not call rank {}", self.rank));
            return Ok(());
        }
        if let Link::Done(peer) = &self.links[caller] {
            refuse(&socket, false, format!("rank {caller} has joined already, as process {}", peer.pid));
            return Ok(());
        }
        if socket.try_send(&Message::Welcome.encode(), &[]).is_ok() {
            let peer = self.peer(caller, socket, hello.pid)?;
            self.links[caller] = Link::Done(peer);
        }
        Ok(())
    }

    /// Reads a lower rank's answer.
    fn answered(&mut self, lower: usize) -> Result<(), SetupError> {
        let Link::Greeted(socket, pid) = std::mem::replace(&mut self.links[lower], Link::Open) else {
            return Ok(());
        };
        let why = match socket.try_recv() {
            Ok(Received::Message(bytes, _)) => match Message::decode(&bytes) {
                Ok(Message::Welcome) => {
                    let peer = self.peer(lower, socket, pid)?;
                    self.links[lower] = Link::Done(peer);
                    return Ok(());
                }
                Ok(Message::Refuse { stale: true, reason }) => reason,
                Ok(Message::Refuse { stale: false, reason }) => {
                    return Err(SetupError::PeerRefused { rank: lower, reason });
                }
                Ok(other) => format!("it answered with {other:?}"),
                Err(error) => error.to_string(),
            },
            Ok(Received::Nothing) => {
                self.links[lower] = Link::Greeted(socket, pid);
                return Ok(());
            }
            Ok(Received::HungUp) => "it hung up".to_owned(),
            Err(error) => error.to_string(),
        };
        self.last = Some(format!("rank {lower}: {why}"));
        std::thread::sleep(RETRY.min(left(self.start, self.timeout)));
        self.call(lower)
    }

    /// A connection that both sides have agreed on.
    fn peer(&self, rank: usize, socket: PeerSocket, told: u32) -> Result<Peer, SetupError> {
        let found = socket.credentials().map_err(SetupError::io("asking who a rank is"))?;
        // A process of another PID namespace has no number here; its own is better than none in messages.
        let pid = if found.pid == 0 { told } else { found.pid };
        let watch = if found.pid == std::process::id() {
            None
        } else {
            match ProcessWatch::of_peer(&socket) {
                Ok(watch) => Some(watch),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(SetupError::PeerDied { rank, pid, what: "join".to_owned() });
                }
                Err(error) => {
                    tracing::warn!(rank, pid, %error, "no descriptor for a rank's process: its socket alone is watched");
                    None
                }
            }
        };
        Ok(Peer { socket, watch, pid })
    }

    /// Process of a rank, 0 if it is not connected.
    fn pid(&self, rank: usize) -> u32 {
        if let Link::Done(peer) = &self.links[rank] { peer.pid } else { 0 }
    }

    /// Why a connected rank is gone.
    fn lost(&self, rank: usize, peer: &Peer) -> SetupError {
        while let Ok(Received::Message(bytes, _)) = peer.socket.try_recv() {
            if let Ok(Message::Withdraw { origin, culprit, reason, .. }) = Message::decode(&bytes) {
                let other = |&rank: &usize| rank != self.rank && rank < self.world;
                let what = "join".to_owned();
                return match culprit.map(|culprit| culprit as usize).filter(other) {
                    Some(rank) => SetupError::PeerDied { rank, pid: self.pid(rank), what },
                    None => {
                        let rank = Some(origin as usize).filter(other).unwrap_or(rank);
                        SetupError::Withdrawn { rank, what, reason }
                    }
                };
            }
        }
        SetupError::PeerDied { rank, pid: peer.pid, what: "join".to_owned() }
    }
}

fn refuse(socket: &PeerSocket, stale: bool, reason: String) {
    if let Err(error) = socket.try_send(&Message::Refuse { stale, reason }.encode(), &[]) {
        tracing::debug!(%error, "could not tell a connection why it is refused");
    }
}
