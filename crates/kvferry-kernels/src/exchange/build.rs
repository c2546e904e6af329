//! From pieces to parameters.

use super::lower::lower;
use super::params::ExchangeItemParams;
use super::{
    EXCHANGE_SHARED_BYTES, ExchangeBuildError, ExchangeFlags, ExchangeGrid, ExchangeHeader,
    ExchangeParamBuffer, ExchangePeerParams, ExchangeTemplate, MAX_EXCHANGE_ITEMS, MAX_RANKS, PLACE_ALIGN,
};
use crate::{Kernel, LaunchGeometry};

/// A rank as this rank sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangePeer {
    /// Device-visible address of its control block, a multiple of 64.
    pub control: u64,
    /// Device-visible address of its pool, a multiple of 16.
    pub pool: u64,
    /// Bytes of its pool.
    pub pool_bytes: u64,
}

/// One loop around a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeLoop {
    /// Iterations; 0 makes the piece empty.
    pub count: u64,
    /// Bytes per step of the source.
    pub src_stride: i64,
    /// Bytes per step of the destination.
    pub dst_stride: u64,
}

/// Runs that go from this rank's input to one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangePiece<'a> {
    /// Device-visible address of the first run.
    pub src: u64,
    /// Where it goes, from the target's landing place.
    pub dst_offset: u64,
    /// Bytes of every run.
    pub run_bytes: u64,
    /// Loops around it, outermost first; at most 3 of them go round more than once.
    pub loops: &'a [ExchangeLoop],
}

/// One call of one rank.
///
/// All addresses are what this rank's device sees. No destination byte may be named twice; the sources must be readable
/// where the loops lead.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeCall<'a> {
    /// This rank.
    pub rank: usize,
    /// All ranks, this one included.
    pub peers: &'a [ExchangePeer],
    /// Address of the [`LocalState`](super::LocalState), a multiple of 16.
    pub state: u64,
    /// Address of the [`HostPage`](super::HostPage), a multiple of 16.
    pub host_page: u64,
    /// The operation's code, for the record.
    pub op: u32,
    /// What the call is; all ranks must agree.
    pub hash: u64,
    /// Where results land in the own pool; a multiple of [`PLACE_ALIGN`].
    pub place: u64,
    /// Bytes of the results.
    pub result_bytes: u64,
    /// What goes to each rank.
    pub pieces: &'a [Vec<ExchangePiece<'a>>],
    /// How it is divided among CTAs.
    pub grid: ExchangeGrid,
    /// Whether the copy engine moves what goes to peers: each is then told of one arrival, by
    /// [`Kernel::ExchangeArrive`] and a copy.
    pub copy_engine: bool,
}

/// A call in parameters.
#[derive(Debug)]
pub struct ExchangeLaunch<'a> {
    buffer: &'a mut ExchangeParamBuffer,
    header: ExchangeHeader,
    kernel: Kernel,
    shape: LaunchShape,
}

/// What the grids of all parts of a call follow from.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaunchShape {
    block: u32,
    max_ctas: u32,
    own_lanes: u32,
}

impl LaunchShape {
    /// For a launch of these steps of a call with `lanes` lanes.
    pub(super) fn geometry(&self, flags: ExchangeFlags, lanes: u32) -> LaunchGeometry {
        let lanes = if flags.intersects(ExchangeFlags::PUSH) {
            lanes
        } else if flags.intersects(ExchangeFlags::OWN) {
            self.own_lanes
        } else {
            0
        };
        // The first CTA posts and waits even if there is nothing to copy.
        let grid = lanes.min(self.max_ctas).max(1);
        LaunchGeometry { grid, block: self.block, shared: EXCHANGE_SHARED_BYTES }
    }
}

/// One launch of a call.
#[derive(Clone, Copy, Debug)]
pub struct ExchangePart<'a> {
    /// What to launch.
    pub kernel: Kernel,
    /// How.
    pub geometry: LaunchGeometry,
    /// Its argument. The launch copies it.
    pub params: &'a [u8],
}

impl ExchangeCall<'_> {
    /// Writes the call into `buffer`.
    ///
    /// # Errors
    /// [`ExchangeBuildError`] if something is out of range, or the pieces are more than the parameters hold.
    pub fn build<'b>(
        &self,
        buffer: &'b mut ExchangeParamBuffer,
    ) -> Result<ExchangeLaunch<'b>, ExchangeBuildError> {
        let world = check_world(self.rank, self.peers, self.grid.block)?;
        if self.pieces.len() != world {
            let given = self.pieces.len();
            return Err(ExchangeBuildError::WrongLength { what: "lists of pieces", given, wanted: world });
        }
        // A place travels as 32 bits.
        if !self.place.is_multiple_of(PLACE_ALIGN) || self.place / PLACE_ALIGN > u64::from(u32::MAX) {
            return Err(ExchangeBuildError::Place { place: self.place, align: PLACE_ALIGN });
        }
        check_aligned("state", self.state)?;
        check_aligned("host page", self.host_page)?;
        let own = self.peers.get(self.rank).copied().unwrap_or_default();
        if self.place.checked_add(self.result_bytes).is_none_or(|end| end > own.pool_bytes) {
            let bytes = self.place.saturating_add(self.result_bytes);
            return Err(ExchangeBuildError::BeyondPool {
                target: self.rank,
                bytes,
                pool_bytes: own.pool_bytes,
            });
        }

        buffer.items.clear();
        buffer.origins.clear();
        let mut peers = [ExchangePeerParams::default(); MAX_RANKS];
        for (target, (pieces, peer)) in self.pieces.iter().zip(self.peers).enumerate() {
            let params = self.target(target, peer, pieces, &mut buffer.items, &mut buffer.origins)?;
            if let Some(slot) = peers.get_mut(target) {
                *slot = params;
            }
        }
        if buffer.items.len() > MAX_EXCHANGE_ITEMS {
            return Err(ExchangeBuildError::TooManyItems {
                items: buffer.items.len(),
                limit: MAX_EXCHANGE_ITEMS,
            });
        }

        // Own lanes first: they run while headers are on their way. Then the peers, beginning behind this rank, so that
        // no receiver is everybody's first.
        let mut lanes = 0;
        let mut own_lanes = 0;
        for step in 0..world {
            if let Some(peer) = peers.get_mut((self.rank + step) % world) {
                peer.first_lane = lanes;
                lanes += peer.lanes;
            }
            if step == 0 {
                own_lanes = lanes;
            }
        }
        let header = ExchangeHeader {
            state: self.state,
            host_page: self.host_page,
            place: self.place,
            result_bytes: self.result_bytes,
            hash: self.hash,
            verdict: 0,
            op: self.op,
            rank: self.rank as u32,
            world: world as u32,
            flags: ExchangeFlags::WHOLE.bits(),
            lanes,
            reserved: 0,
        };
        let large = buffer.write(&header, peers.get(..world).unwrap_or(&peers));
        Ok(ExchangeLaunch {
            buffer,
            header,
            kernel: if large { Kernel::ExchangeLarge } else { Kernel::Exchange },
            shape: LaunchShape { block: self.grid.block, max_ctas: self.grid.max_ctas.max(1), own_lanes },
        })
    }

    fn target(
        &self,
        target: usize,
        peer: &ExchangePeer,
        pieces: &[ExchangePiece<'_>],
        items: &mut Vec<ExchangeItemParams>,
        origins: &mut Vec<(u32, u32)>,
    ) -> Result<ExchangePeerParams, ExchangeBuildError> {
        let first_item = items.len();
        let chunk_words = self.grid.chunk_words();
        let mut chunks = 0;
        let mut reach = 0;
        for (index, piece) in pieces.iter().enumerate() {
            reach = reach.max(lower(target, index, piece, chunk_words, &mut chunks, items)?);
            origins.resize(items.len(), (target as u32, index as u32));
        }
        if reach > peer.pool_bytes {
            return Err(ExchangeBuildError::BeyondPool { target, bytes: reach, pool_bytes: peer.pool_bytes });
        }
        let lanes = self.grid.lanes.get(target).copied().unwrap_or(0);
        if chunks > u64::from(u32::MAX / 2) || (chunks > 0 && lanes == 0) {
            return Err(ExchangeBuildError::Lanes { target, lanes, chunks });
        }
        let lanes = lanes.min(chunks as u32);
        let announced = if self.copy_engine { lanes.min(1) } else { lanes };
        Ok(ExchangePeerParams {
            control: peer.control,
            pool: peer.pool,
            pool_bytes: peer.pool_bytes,
            reach,
            arrivals: if target == self.rank { 0 } else { announced },
            lanes,
            first_lane: 0,
            first_item: first_item as u32,
            items: (items.len() - first_item) as u32,
            chunks: chunks as u32,
        })
    }
}

impl<'a> ExchangeLaunch<'a> {
    /// A refusal of the next call of `rank`: posts `verdict`, not 0, to all peers and closes this rank. One launch, of
    /// [`ExchangeFlags::POST`].
    ///
    /// # Errors
    /// [`ExchangeBuildError`] if the ranks are out of range or the verdict is 0.
    pub fn refusal(
        rank: usize,
        peers: &[ExchangePeer],
        state: u64,
        host_page: u64,
        op: u32,
        verdict: u32,
        buffer: &'a mut ExchangeParamBuffer,
    ) -> Result<Self, ExchangeBuildError> {
        let block = MAX_RANKS as u32;
        let world = check_world(rank, peers, block)?;
        check_aligned("state", state)?;
        check_aligned("host page", host_page)?;
        if verdict == 0 {
            return Err(ExchangeBuildError::Verdict);
        }
        let header = ExchangeHeader {
            state,
            host_page,
            verdict: verdict.into(),
            op,
            rank: rank as u32,
            world: world as u32,
            flags: ExchangeFlags::POST.bits(),
            ..ExchangeHeader::default()
        };
        let mut table = [ExchangePeerParams::default(); MAX_RANKS];
        for (slot, peer) in table.iter_mut().zip(peers) {
            (slot.control, slot.pool, slot.pool_bytes) = (peer.control, peer.pool, peer.pool_bytes);
        }
        buffer.items.clear();
        let large = buffer.write(&header, table.get(..world).unwrap_or(&table));
        let kernel = if large { Kernel::ExchangeLarge } else { Kernel::Exchange };
        Ok(Self { buffer, header, kernel, shape: LaunchShape { block, max_ctas: 1, own_lanes: 0 } })
    }

    /// The launch that does these steps of the call. Valid until the next part is asked for.
    pub fn part(&mut self, flags: ExchangeFlags) -> ExchangePart<'_> {
        self.header.flags = flags.bits();
        self.buffer.set_header(&self.header);
        ExchangePart {
            kernel: self.kernel,
            geometry: self.shape.geometry(flags, self.header.lanes),
            params: self.buffer.bytes(self.kernel.param_bytes()),
        }
    }

    /// The same call for inputs and landing places to come. `input` says which input the piece with this target and
    /// index reads; `bases` are the addresses of the inputs that the call was built with.
    #[must_use]
    pub fn template(&self, bases: &[u64], input: impl Fn(usize, usize) -> usize) -> ExchangeTemplate {
        let sources = self.buffer.items.iter().zip(&self.buffer.origins).map(|(item, &(target, index))| {
            let input = input(target as usize, index as usize);
            (input, item.src.wrapping_sub(bases.get(input).copied().unwrap_or(0)))
        });
        let bytes = self.buffer.bytes(self.kernel.param_bytes());
        ExchangeTemplate::new(bytes, self.header, self.kernel, self.shape, sources.collect(), bases)
    }

    /// Lanes of all targets.
    #[must_use]
    pub const fn lanes(&self) -> u32 {
        self.header.lanes
    }

    /// Lanes of what stays on this rank.
    #[must_use]
    pub const fn own_lanes(&self) -> u32 {
        self.shape.own_lanes
    }
}

fn check_world(rank: usize, peers: &[ExchangePeer], block: u32) -> Result<usize, ExchangeBuildError> {
    let world = peers.len();
    if world == 0 || world > MAX_RANKS {
        return Err(ExchangeBuildError::World { world, limit: MAX_RANKS });
    }
    if rank >= world {
        return Err(ExchangeBuildError::Rank { rank, world });
    }
    if block > 1024 || (block as usize) < world {
        return Err(ExchangeBuildError::Block { block, world });
    }
    for peer in peers {
        check_aligned("control block", peer.control)?;
        check_aligned("pool", peer.pool)?;
    }
    Ok(world)
}

fn check_aligned(what: &'static str, value: u64) -> Result<(), ExchangeBuildError> {
    if value.is_multiple_of(16) { Ok(()) } else { Err(ExchangeBuildError::Misaligned { what, value }) }
}
