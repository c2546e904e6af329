//! The memory through which ranks meet. Every rank exports one allocation, `[control block | pool]`, which its peers map.
//! All words are little-endian; those that peers or other threads watch are written whole, with release, and read with
//! acquire.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most ranks of an exchange.
pub const MAX_RANKS: usize = 64;

/// Where the header cells begin in a control block.
pub const CELLS_OFFSET: u64 = 0;
/// Where the arrival words begin in a control block, each on a line of its own.
pub const ARRIVALS_OFFSET: u64 = 8192;
/// The doorbell of CPU ranks in a control block: a u32, waited for with a futex.
pub const BELL_OFFSET: u64 = 16384;
/// Where a CPU rank says that it waits, and for whom.
pub const BEAT_OFFSET: u64 = BELL_OFFSET + LINE;
/// What the pair probe of set-up writes in a control block: a count, then a flag per source.
pub const PROBE_OFFSET: u64 = 17408;
/// Bytes of a control block. The pool follows, at a multiple of 4,096.
pub const CONTROL_BYTES: u64 = 20480;

/// Landing places are multiples of this.
pub const PLACE_ALIGN: u64 = 256;

/// Bytes between the words of two sources.
const LINE: u64 = 64;

/// Offset in a control block of the [`HeaderCell`] that `source` fills in epochs of this parity (`epoch & 1`).
#[must_use]
pub const fn header_cell_offset(parity: u64, source: usize) -> u64 {
    CELLS_OFFSET + LINE * ((parity & 1) * MAX_RANKS as u64 + source as u64)
}

/// Offset in a control block of the word to which `source` adds its arrivals in epochs of this parity. It counts all
/// arrivals of the calls that ran and is never reset.
#[must_use]
pub const fn arrival_offset(parity: u64, source: usize) -> u64 {
    ARRIVALS_OFFSET + LINE * ((parity & 1) * MAX_RANKS as u64 + source as u64)
}

/// What a CPU rank tells a peer at the start of a call. `epoch` is stored last, with release: a reader that finds the epoch it
/// waits for finds the rest complete.
///
/// The kernels fill the same 64 bytes otherwise: five words of `value << 32 | epoch & 0xffff_ffff` for the halves of the
/// hash, the place in units of [`PLACE_ALIGN`], the arrivals and the verdict. Each says for itself which call it belongs to,
/// so no store waits for another to arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HeaderCell {
    /// What the source takes the call to be; all ranks must agree.
    pub hash: u64,
    /// Where the reader is to write: bytes from the start of the source's pool, a multiple of [`PLACE_ALIGN`].
    pub place: u64,
    /// How often the source will add to the reader's arrival word in this call.
    pub arrivals: u64,
    /// 0, or why the source refuses the call.
    pub verdict: u64,
    /// 0.
    pub reserved: [u64; 3],
    /// The call, counted from 1.
    pub epoch: u64,
}

/// What a rank remembers from call to call, in memory that its peers do not see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LocalState {
    /// Calls finished.
    pub epoch: u64,
    /// CTAs of the running launch that have left, and 2^16 times those of them that failed.
    pub ticket: u32,
    /// [`POISON_NONE`], [`POISON_FRESH`] or [`POISON_OLD`].
    pub poison: u32,
    /// 0.
    pub reserved: [u64; 6],
    /// By parity and source: arrivals of the calls that ran.
    pub expected: [[u64; MAX_RANKS]; 2],
    /// By parity and target: arrivals announced in the calls that ran.
    pub sent: [[u64; MAX_RANKS]; 2],
    /// By parity and target: what the copy engine is to store in the target's arrival word. Written for both parities by
    /// `exchange_arrive`; that of the other parity is what the target has already.
    pub staging: [[u64; MAX_RANKS]; 2],
}

/// All calls so far went well.
pub const POISON_NONE: u32 = 0;
/// A CTA of the launch that runs has met a fault. Whoever turns [`POISON_NONE`] into this writes the record.
pub const POISON_FRESH: u32 = 1;
/// An earlier launch met a fault: this one fills its result and signals nothing. Set by the last CTA to leave, so that
/// all CTAs of a launch see the same: a call that finds its own peers at fault still posts its header to all of them.
pub const POISON_OLD: u32 = 2;

/// What host and kernel tell each other, in memory of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct HostPage {
    /// 0, or why waiting is to end; see [`abort_word`]. Written by the host.
    pub abort: u64,
    /// Longest wait for one word, in nanoseconds; 0: no limit. Written by the host, at any time.
    pub timeout_ns: u64,
    /// 0. The record has a line of its own: host and device write to different ones.
    pub reserved: [u64; 6],
    /// The first fault. Written by the kernel.
    pub record: Record,
}

/// What went wrong first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Record {
    /// 0: nothing. 1: the rest is complete (stored last, with release).
    pub state: u64,
    /// A [`RecordKind`].
    pub kind: u64,
    /// The rank it is about.
    pub peer: u64,
    /// The call.
    pub epoch: u64,
    /// The operation's code, as given to the call.
    pub op: u64,
    /// What was found: epoch (kernels: its low 32 bits), arrivals, hash, or the end of what was to be written.
    pub seen: u64,
    /// What was waited for or allowed.
    pub expected: u64,
    /// The peer's hash, its refusal code, its place, or the abort word.
    pub value: u64,
}

/// Kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
#[non_exhaustive]
pub enum RecordKind {
    /// No header of this call came from the peer in time.
    HeaderTimeout = 1,
    /// The peer announced more arrivals than came in time.
    ArrivalTimeout = 2,
    /// The peer's hash is another.
    Mismatch = 3,
    /// The peer refused the call.
    Refused = 4,
    /// What goes to the peer does not fit its pool where it wants it.
    BadPlace = 5,
    /// The host said so.
    Aborted = 6,
}

impl RecordKind {
    /// From [`Record::kind`].
    #[must_use]
    pub const fn from_code(code: u64) -> Option<Self> {
        match code {
            1 => Some(Self::HeaderTimeout),
            2 => Some(Self::ArrivalTimeout),
            3 => Some(Self::Mismatch),
            4 => Some(Self::Refused),
            5 => Some(Self::BadPlace),
            6 => Some(Self::Aborted),
            _ => None,
        }
    }

    /// As it lies in [`Record::kind`].
    #[must_use]
    pub const fn code(self) -> u64 {
        self as u64
    }
}

/// A value for [`HostPage::abort`]: a code, not 0, and the rank that is the reason.
#[must_use]
pub const fn abort_word(code: u32, peer: u32) -> u64 {
    code as u64 | (peer as u64) << 32
}

/// Code and rank of an [`abort_word`].
#[must_use]
pub const fn split_abort_word(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

const _: () = assert!(size_of::<HeaderCell>() == LINE as usize && align_of::<HeaderCell>() == 8);
const _: () = assert!(std::mem::offset_of!(HeaderCell, epoch) == 56);
const _: () = assert!(size_of::<LocalState>() == 64 + 3 * 2 * 8 * MAX_RANKS);
const _: () = assert!(size_of::<HostPage>() == 128);
const _: () = assert!(header_cell_offset(1, MAX_RANKS - 1) + LINE == ARRIVALS_OFFSET);
const _: () = assert!(arrival_offset(1, MAX_RANKS - 1) + LINE == BELL_OFFSET);
const _: () = assert!(PROBE_OFFSET + 8 * (1 + MAX_RANKS as u64) <= CONTROL_BYTES);
