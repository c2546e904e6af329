//! Parameters of the two small kernels beside `exchange`.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::MAX_RANKS;
use crate::LaunchGeometry;

/// Argument of [`Kernel::ExchangeArrive`](crate::Kernel::ExchangeArrive), which readies the words that the copy engine
/// is to store in the peers' arrival words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeArriveParams {
    /// Address of the [`LocalState`](super::LocalState).
    pub state: u64,
    /// Ranks.
    pub world: u32,
    /// 0.
    pub reserved: u32,
    /// Bit t: rank t gets one more arrival.
    pub targets: u64,
}

const _: () = assert!(size_of::<ExchangeArriveParams>() == 24);

impl ExchangeArriveParams {
    /// One CTA with a thread per rank.
    pub const GEOMETRY: LaunchGeometry = LaunchGeometry { grid: 1, block: MAX_RANKS as u32, shared: 0 };

    /// For the ranks that `targets` says get bytes.
    #[must_use]
    pub fn new(state: u64, targets: &[bool]) -> Self {
        let bits = targets.iter().take(MAX_RANKS).enumerate();
        Self {
            state,
            world: targets.len().min(MAX_RANKS) as u32,
            reserved: 0,
            targets: bits.fold(0, |word, (rank, wanted)| word | u64::from(*wanted) << rank),
        }
    }
}

/// Bytes that the probe writes into each peer's pool, at this rank times as much.
pub const PROBE_BYTES: u64 = 4096;

/// A rank as the probe sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeProbePeer {
    /// Its control block, as mapped here.
    pub control: u64,
    /// Its pool, as mapped here; at least [`PROBE_BYTES`] per rank.
    pub pool: u64,
}

/// Argument of [`Kernel::ExchangeProbe`](crate::Kernel::ExchangeProbe): every rank writes a pattern to every peer, then
/// a flag, and looks whether what peers wrote was complete when their flags came. It also counts with atomics. Run it
/// once, on fresh zeroed control blocks, on all ranks at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeProbeParams {
    /// Device-visible address of a zeroed [`ProbeReport`] per rank.
    pub report: u64,
    /// The same on all ranks, not 0: flag and seed of the pattern.
    pub nonce: u64,
    /// Longest wait in nanoseconds.
    pub timeout_ns: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
    /// All ranks.
    pub peers: [ExchangeProbePeer; MAX_RANKS],
}

const _: () = assert!(size_of::<ExchangeProbeParams>() == 32 + 16 * MAX_RANKS);

impl ExchangeProbeParams {
    /// One CTA.
    pub const GEOMETRY: LaunchGeometry = LaunchGeometry { grid: 1, block: 64, shared: 0 };

    /// For a world of `peers.len()` ranks, at most [`MAX_RANKS`].
    #[must_use]
    pub fn new(rank: usize, peers: &[ExchangeProbePeer], report: u64, nonce: u64, timeout_ns: u64) -> Self {
        let world = peers.len().min(MAX_RANKS);
        Self {
            report,
            nonce,
            timeout_ns,
            rank: rank as u32,
            world: world as u32,
            peers: std::array::from_fn(|at| peers.get(at).copied().unwrap_or_default()),
        }
    }
}

/// What the probe found about one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ProbeReport {
    /// A [`ProbeState`].
    pub state: u64,
    /// Wrong words of the pattern, or what the atomics added up to.
    pub value: u64,
}

/// Outcomes of the probe for one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
#[non_exhaustive]
pub enum ProbeState {
    /// The probe did not get there, or the peer is this rank.
    Unknown = 0,
    /// Pattern, order and atomics are right.
    Good = 1,
    /// The peer's flag did not come in time.
    Timeout = 2,
    /// Its flag came before its pattern, or the pattern is wrong.
    Payload = 3,
    /// Atomic additions of all peers do not add up.
    Atomics = 4,
}

impl ProbeReport {
    /// What [`ProbeReport::state`] means.
    #[must_use]
    pub const fn outcome(&self) -> ProbeState {
        match self.state {
            1 => ProbeState::Good,
            2 => ProbeState::Timeout,
            3 => ProbeState::Payload,
            4 => ProbeState::Atomics,
            _ => ProbeState::Unknown,
        }
    }
}
