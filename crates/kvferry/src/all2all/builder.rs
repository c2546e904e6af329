//! Setting up a communicator.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_host::ForkGuard;
use kvferry_layout::exchange::MAX_RANKS;

use super::attend::Attend;
use super::backend::{Backend, Setup};
use super::collective::{message, nonce, word};
use super::comm::{All2All, Calls, Shared, check_timeout};
use super::mesh::Mesh;
use super::options::ExchangeDevice;
use super::plan::PlanCache;
use super::pool::{Pool, pool_bytes};
use super::rendezvous::Rendezvous;
use super::setup::SetupError;
use super::state::Monitor;
use super::stats::Counters;
use super::turn::Turn;
use super::watch::Watch;
use super::wire::Notice;
use super::word::refuse_to_join;
use super::{cpu, cuda};
use crate::error::{Error, Result};

/// What ranks of different builds must not mix: the words they share, and the meaning of calls.
const PROTOCOL: u64 = 1;

/// Sets up one rank of a communicator.
#[derive(Clone)]
pub struct All2AllBuilder {
    rank: usize,
    world: usize,
    capacity: u64,
    buffers: u32,
    name: String,
    rendezvous: Option<Arc<dyn Rendezvous>>,
    device: ExchangeDevice,
    timeout: Duration,
    setup_timeout: Duration,
    attend: Attend,
}

impl std::fmt::Debug for All2AllBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("All2AllBuilder")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("name", &self.name)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A lone rank meets nobody.
#[derive(Debug)]
struct Nowhere;

impl Rendezvous for Nowhere {
    fn set(&self, _key: &str, _value: &[u8]) -> std::result::Result<(), SetupError> {
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> std::result::Result<Vec<u8>, SetupError> {
        Err(SetupError::RendezvousTimeout { key: key.to_owned(), waited: timeout, last: None })
    }
}

impl All2AllBuilder {
    pub(super) fn new(rank: usize, world: usize) -> All2AllBuilder {
        All2AllBuilder {
            rank,
            world,
            capacity: 1 << 28,
            buffers: 4,
            name: String::new(),
            rendezvous: None,
            device: ExchangeDevice::Cpu,
            timeout: Duration::from_secs(60),
            setup_timeout: Duration::from_secs(60),
            attend: Attend::default(),
        }
    }

    /// Most bytes of one call's results on any rank; 256 MiB unless said otherwise. The same on every rank.
    pub fn capacity_bytes(mut self, bytes: u64) -> All2AllBuilder {
        self.capacity = bytes;
        self
    }

    /// Calls whose results can be held at once, 4 unless said otherwise. The pool is this many times the capacity, and
    /// once more. Host memory costs nothing until it is used. The same on every rank.
    pub fn buffers(mut self, buffers: u32) -> All2AllBuilder {
        self.buffers = buffers;
        self
    }

    /// Tells this communicator from others of the same rendezvous. The same on every rank.
    pub fn name(mut self, name: &str) -> All2AllBuilder {
        name.clone_into(&mut self.name);
        self
    }

    /// Where the ranks find each other. A lone rank needs none.
    pub fn rendezvous(mut self, rendezvous: Arc<dyn Rendezvous>) -> All2AllBuilder {
        self.rendezvous = Some(rendezvous);
        self
    }

    /// Where the arrays lie; the CPU unless said otherwise.
    pub fn device(mut self, device: ExchangeDevice) -> All2AllBuilder {
        self.device = device;
        self
    }

    /// Bound of every wait inside a call, 60 s unless said otherwise. Each rank's own.
    pub fn timeout(mut self, timeout: Duration) -> All2AllBuilder {
        self.timeout = timeout;
        self
    }

    /// Bound of every stage of set-up, of `reset` and of `empty_output`, 60 s unless said otherwise.
    pub fn setup_timeout(mut self, timeout: Duration) -> All2AllBuilder {
        self.setup_timeout = timeout;
        self
    }

    /// Who looks after every wait of the communicator, set-up, calls, `reset` and closing, and may end it: the rank then
    /// raises [`Error::Interrupted`], and the others hear of it at once.
    pub fn attend(mut self, attend: Attend) -> All2AllBuilder {
        self.attend = attend;
        self
    }

    /// What must be right for this rank to meet the others at all; [`connect`](Self::connect) begins with it.
    ///
    /// # Errors
    /// A rank, world, name or set-up timeout that cannot be.
    pub fn check(&self) -> Result<()> {
        if !(1..=MAX_RANKS).contains(&self.world) {
            return Err(invalid("world_size", &format!("1 to {MAX_RANKS}"), self.world));
        }
        if self.rank >= self.world {
            return Err(invalid("rank", &format!("below {}", self.world), self.rank));
        }
        if self.setup_timeout.is_zero() {
            return Err(invalid("setup_timeout", "longer than nothing", "0 s"));
        }
        // Memory that ranks share has the name in its own.
        if self.name.contains('\0') {
            return Err(invalid("name", "without a zero byte", &self.name));
        }
        Ok(())
    }

    /// Meets the other ranks and shares memory with them. Every stage ends in the outcome of all: all ranks get a
    /// communicator, or all get an error.
    ///
    /// # Errors
    /// What [`check`](Self::check) refuses (before anybody is met, but those who wait are told), ranks that do not come,
    /// disagree or fail, memory that cannot be had.
    pub fn connect(self) -> Result<All2All> {
        self.check().inspect_err(|error| self.tell_that_it_stays_away(error))?;
        let nowhere = Nowhere;
        let mesh = match &self.rendezvous {
            None if self.world > 1 => {
                return Err(invalid("rendezvous", "given for more than one rank", "none"));
            }
            Some(rendezvous) => self.join(&**rendezvous)?,
            None => self.join(&nowhere)?,
        };
        let connected = self.connect_over(&mesh);
        if connected.is_err() {
            // Ranks that are still reading the outcome of a stage shall not take this one's leaving for a death.
            mesh.tell(Notice::Bye);
        }
        connected
    }

    fn join(&self, place: &dyn Rendezvous) -> std::result::Result<Arc<Mesh>, SetupError> {
        let Self { rank, world, name, setup_timeout, attend, .. } = self;
        Mesh::join_attended(*rank, *world, place, name, *setup_timeout, attend)
    }

    fn connect_over(&self, mesh: &Arc<Mesh>) -> Result<All2All> {
        let fork = ForkGuard::new();
        let monitor = Arc::new(Monitor::new(self.rank, self.world));
        mesh.agree("arguments", self.check_arguments())?;
        let (nonce, outcome) = match self.compare(mesh) {
            Ok(nonce) => (nonce, Ok(())),
            Err(error) => (0, Err(error)),
        };
        mesh.agree("terms agreed", outcome)?;
        let pool_bytes = pool_bytes(self.capacity, self.buffers).unwrap_or(0);
        let setup = Setup {
            rank: self.rank,
            world: self.world,
            name: &self.name,
            pool_bytes,
            mesh,
            patience: self.setup_timeout,
            timeout: self.timeout,
        };
        let backend = self.backend(&setup)?;
        let cpu = self.device == ExchangeDevice::Cpu;
        let pool = Arc::new(Pool::new(Arc::clone(&backend), self.capacity, self.buffers, cpu));
        backend.attach(&pool, &monitor);
        monitor.arm(Arc::clone(&backend), Arc::clone(mesh));
        let watch = Watch::start(mesh, {
            let monitor = Arc::clone(&monitor);
            move |event| monitor.event(event)
        });
        let (watch, outcome) = match watch {
            Ok(watch) => (Some(watch), Ok(())),
            Err(error) => (None, Err(error.into())),
        };
        mesh.agree("armed", outcome)?;
        tracing::debug!(
            rank = self.rank,
            world = self.world,
            device = %self.device,
            transport = backend.transport().name,
            capacity = self.capacity,
            buffers = self.buffers,
            "all2all communicator"
        );
        let calls = Calls { plans: PlanCache::default(), nonce, next_output: 1, beyond_repair: false };
        Ok(All2All {
            shared: Arc::new(Shared {
                rank: self.rank,
                world: self.world,
                capacity: self.capacity,
                buffers: self.buffers,
                device: self.device,
                patience: self.setup_timeout,
                fork,
                monitor,
                backend,
                pool,
                counters: Counters::default(),
                calls: Turn::new(calls),
                watch: Mutex::new(watch),
                mesh: Arc::clone(mesh),
            }),
        })
    }

    fn backend(&self, setup: &Setup<'_>) -> Result<Arc<dyn Backend>> {
        match self.device {
            ExchangeDevice::Cpu => cpu::connect(setup),
            ExchangeDevice::Gpu(ordinal) => cuda::connect(setup, ordinal),
        }
    }

    /// Lets the ranks that wait for this one know.
    fn tell_that_it_stays_away(&self, error: &Error) {
        let Some(place) = &self.rendezvous else { return };
        let Self { rank, world, name, attend, .. } = self;
        if let Err(error) = refuse_to_join(&**place, name, *rank, *world, &error.to_string(), attend) {
            tracing::debug!(%error, "could not leave word at the rendezvous");
        }
    }

    fn check_arguments(&self) -> Result<()> {
        check_timeout(self.timeout)?;
        if self.buffers == 0 {
            return Err(invalid("buffers", "at least 1", self.buffers));
        }
        if self.capacity == 0 {
            return Err(invalid("capacity_bytes", "at least 1", self.capacity));
        }
        if pool_bytes(self.capacity, self.buffers).is_none() {
            let expected = format!("small enough for {} buffers of it in 63 bits", self.buffers);
            return Err(invalid("capacity_bytes", &expected, self.capacity));
        }
        Ok(())
    }

    /// Finds out whether all ranks were built alike; the nonce of the session, which rank 0 drew.
    fn compare(&self, mesh: &Mesh) -> Result<u64> {
        const NAMES: [&str; 5] =
            ["protocol version", "world size", "capacity_bytes", "buffers", "device kind"];
        let kind = match self.device {
            ExchangeDevice::Cpu => 0,
            ExchangeDevice::Gpu(_) => 1,
        };
        let mine = [PROTOCOL, self.world as u64, self.capacity, self.buffers.into(), kind];
        let drawn = nonce()?;
        let parts = mesh.gather("terms", &message(&[&mine[..], &[drawn]].concat()), self.setup_timeout)?;
        let said = |rank: usize, index: usize| parts.get(rank).and_then(|part| word(part, index));
        for rank in 0..parts.len() {
            for (index, name) in NAMES.iter().enumerate() {
                let (theirs, first) = (said(rank, index), said(0, index));
                if theirs != first || theirs.is_none() {
                    let text =
                        |value: Option<u64>| value.map_or("nothing".to_owned(), |value| value.to_string());
                    let reason = format!("its {name} is {}, that of rank 0 is {}", text(theirs), text(first));
                    return Err(SetupError::Disagree { rank, reason }.into());
                }
            }
        }
        said(0, NAMES.len()).ok_or_else(|| invalid("nonce", "drawn by rank 0", "nothing"))
    }
}

fn invalid(option: &'static str, expected: &str, value: impl std::fmt::Display) -> Error {
    Error::InvalidOption { option, expected: expected.to_owned(), value: value.to_string() }
}
