//! The parameter structs of `exchange`, field for field those of `exchange.cuh`.

use std::ops::{BitOr, BitOrAssign};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::MAX_RANKS;
use crate::Divisor;

/// Most loops around a run.
pub const EXCHANGE_ITEM_LOOPS: usize = 3;
/// Most ranks in the small parameters.
pub const MAX_EXCHANGE_PEERS_SMALL: usize = 8;
/// Most items in the small parameters.
pub const MAX_EXCHANGE_ITEMS_SMALL: usize = 24;
/// Most items of a call: those of the large parameters.
pub const MAX_EXCHANGE_ITEMS: usize = 202;
/// Bytes of the small parameters; every driver takes 4,096.
pub const EXCHANGE_PARAM_BYTES_SMALL: usize = param_bytes(MAX_EXCHANGE_PEERS_SMALL, MAX_EXCHANGE_ITEMS_SMALL);
/// Bytes of the large parameters; the drivers that we support take 32,764.
pub const EXCHANGE_PARAM_BYTES_LARGE: usize = param_bytes(MAX_RANKS, MAX_EXCHANGE_ITEMS);
/// Dynamic shared memory of the exchange kernel: a landing place per rank.
pub const EXCHANGE_SHARED_BYTES: u32 = 8 * MAX_RANKS as u32;

const fn param_bytes(peers: usize, items: usize) -> usize {
    size_of::<ExchangeHeader>()
        + peers * size_of::<ExchangePeerParams>()
        + items * size_of::<ExchangeItemParams>()
}

const _: () = assert!(EXCHANGE_PARAM_BYTES_SMALL <= 4096);
const _: () = assert!(EXCHANGE_PARAM_BYTES_LARGE <= 32760);

/// Which steps of a call a launch does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExchangeFlags(u32);

impl ExchangeFlags {
    /// Tell all peers what the call is and where to write.
    pub const POST: Self = Self(1);
    /// Wait until all peers have told the same.
    pub const WAIT_HEADERS: Self = Self(2);
    /// Copy what stays on this rank.
    pub const OWN: Self = Self(4);
    /// Copy what goes to peers, once all headers are there, and tell them.
    pub const PUSH: Self = Self(8);
    /// Wait for what peers send.
    pub const WAIT_ARRIVALS: Self = Self(16);
    /// End the call: count it, or fill the result if it failed.
    pub const ADVANCE: Self = Self(32);
    /// All of a call.
    pub const WHOLE: Self = Self(63);
    /// First launch of a large call: one CTA that waits for late peers.
    pub const OPEN: Self = Self(1 | 2);
    /// Second launch of a large call.
    pub const MOVE: Self = Self(2 | 4 | 8 | 16 | 32);
    /// Last launch of a call whose bytes the copy engine moves.
    pub const CLOSE: Self = Self(2 | 16 | 32);

    /// As the kernel reads them.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other` are in.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether some of `other` are in.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for ExchangeFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for ExchangeFlags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// What the whole launch has in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeHeader {
    /// Address of the [`LocalState`](super::LocalState).
    pub state: u64,
    /// Device-visible address of the [`HostPage`](super::HostPage).
    pub host_page: u64,
    /// Where results land in the own pool, in bytes.
    pub place: u64,
    /// Bytes of the results, filled with 0xFF when the call fails.
    pub result_bytes: u64,
    /// What the call is.
    pub hash: u64,
    /// 0, or why this rank refuses it.
    pub verdict: u64,
    /// The operation's code, for the record.
    pub op: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
    /// [`ExchangeFlags`].
    pub flags: u32,
    /// Lanes of all targets; those of the own share come first.
    pub lanes: u32,
    /// 0.
    pub reserved: u32,
}

/// One rank, the own one included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangePeerParams {
    /// Its control block, as mapped here.
    pub control: u64,
    /// Its pool, as mapped here.
    pub pool: u64,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// Bytes from its landing place to the end of the last piece written there.
    pub reach: u64,
    /// How often this rank will add to its arrival word.
    pub arrivals: u32,
    /// CTA-sized shares that its pieces are divided into.
    pub lanes: u32,
    /// First of those among all lanes.
    pub first_lane: u32,
    /// First of its items.
    pub first_item: u32,
    /// Number of its items.
    pub items: u32,
    /// Chunks of all its items.
    pub chunks: u32,
}

/// One loop around a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeLoopParams {
    /// Bytes per step of the source; two's complement.
    pub src_stride: u64,
    /// Bytes per step of the destination.
    pub dst_stride: u64,
    /// Iterations.
    pub count: Divisor,
}

/// One piece, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ExchangeItemParams {
    /// Where it begins.
    pub src: u64,
    /// Where it goes, from the target's landing place.
    pub dst_offset: u64,
    /// Words to copy, below 2^31.
    pub words: u32,
    /// Chunks of the target's items before this one.
    pub first_chunk: u32,
    /// Base-2 logarithm of the bytes of a word.
    pub word_shift: u32,
    /// Loops in use.
    pub loops: u32,
    /// Words of a run.
    pub run: Divisor,
    /// Loops, outermost first.
    pub loop_: [ExchangeLoopParams; EXCHANGE_ITEM_LOOPS],
}

impl ExchangeItemParams {
    pub(super) const EMPTY: Self = Self {
        src: 0,
        dst_offset: 0,
        words: 0,
        first_chunk: 0,
        word_shift: 0,
        loops: 0,
        run: Divisor::ONE,
        loop_: [ExchangeLoopParams { src_stride: 0, dst_stride: 0, count: Divisor::ONE };
            EXCHANGE_ITEM_LOOPS],
    };
}

const _: () = assert!(size_of::<ExchangeHeader>() == 72 && align_of::<ExchangeHeader>() == 8);
const _: () = assert!(size_of::<ExchangePeerParams>() == 56 && align_of::<ExchangePeerParams>() == 8);
const _: () = assert!(size_of::<ExchangeLoopParams>() == 32 && align_of::<ExchangeLoopParams>() == 8);
const _: () = assert!(size_of::<ExchangeItemParams>() == 144 && align_of::<ExchangeItemParams>() == 8);

/// Room for the parameters of any call; reused from call to call, since only what a call needs is written.
#[derive(Clone)]
pub struct ExchangeParamBuffer {
    words: Box<[u64]>,
    /// Items of the call that is being built.
    pub(super) items: Vec<ExchangeItemParams>,
    /// The piece each of them comes from: target and index in its list.
    pub(super) origins: Vec<(u32, u32)>,
}

impl ExchangeParamBuffer {
    /// Zeroed. Allocates 32 KiB and more: keep it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            words: vec![0; EXCHANGE_PARAM_BYTES_LARGE / 8].into_boxed_slice(),
            items: Vec::with_capacity(MAX_EXCHANGE_ITEMS),
            origins: Vec::with_capacity(MAX_EXCHANGE_ITEMS),
        }
    }

    /// Writes header, peers and items, and returns whether that took the large form.
    pub(super) fn write(&mut self, header: &ExchangeHeader, peers: &[ExchangePeerParams]) -> bool {
        let large = peers.len() > MAX_EXCHANGE_PEERS_SMALL || self.items.len() > MAX_EXCHANGE_ITEMS_SMALL;
        let items_at = items_offset(large);
        let bytes = self.words.as_mut_bytes();
        put(bytes, 0, header.as_bytes());
        put(bytes, size_of::<ExchangeHeader>(), peers.as_bytes());
        put(bytes, items_at, self.items.as_bytes());
        large
    }

    pub(super) fn set_header(&mut self, header: &ExchangeHeader) {
        put(self.words.as_mut_bytes(), 0, header.as_bytes());
    }

    pub(super) fn bytes(&self, count: usize) -> &[u8] {
        let bytes = self.words.as_bytes();
        bytes.get(..count).unwrap_or(bytes)
    }
}

/// Where the items begin.
pub(super) const fn items_offset(large: bool) -> usize {
    size_of::<ExchangeHeader>()
        + size_of::<ExchangePeerParams>() * if large { MAX_RANKS } else { MAX_EXCHANGE_PEERS_SMALL }
}

/// The lengths are within the limits that the caller has checked.
pub(super) fn put(bytes: &mut [u8], at: usize, from: &[u8]) {
    if let Some(room) = bytes.get_mut(at..at + from.len()) {
        room.copy_from_slice(from);
    } else {
        debug_assert!(false, "{} bytes at {at} exceed the parameters", from.len());
    }
}

impl Default for ExchangeParamBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ExchangeParamBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExchangeParamBuffer").finish_non_exhaustive()
    }
}
