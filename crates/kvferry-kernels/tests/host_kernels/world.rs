//! Several ranks' kernels against each other, as `cuda/host/world.hpp` runs them.

use std::ffi::{CString, c_char, c_void};
use std::ptr;

use kvferry_kernels::{ExchangePart, Kernel, LaunchGeometry};

use crate::ffi::{Order, READ, Region, Report, WRITE};

/// What a consumed byte of a landing place becomes; see `kConsumed`. A fresh place holds it as well.
pub(crate) const CONSUMED: u8 = 0xee;

#[repr(C)]
struct RawOp {
    kind: u32,
    stream: u32,
    rank: u32,
    after: u32,
    name: *const c_char,
    params: *const c_void,
    params_bytes: u64,
    nblocks: u32,
    nthreads: u32,
    shared_bytes: u32,
    ended: u32,
    src: u64,
    dst: u64,
    counts: u64,
    bytes: u64,
    rows: u64,
    src_pitch: u64,
    dst_pitch: u64,
}

#[repr(C)]
struct RawRank {
    regions: *const Region,
    region_count: u64,
    report: *mut Report,
}

/// The host writes a word at a time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Event {
    pub(crate) at_ns: u64,
    pub(crate) address: u64,
    pub(crate) value: u64,
}

#[repr(C)]
struct RawRun {
    ops: *mut RawOp,
    op_count: u64,
    events: *const Event,
    event_count: u64,
    ranks: *const RawRank,
    rank_count: u64,
    seed: u64,
    max_idle: u64,
    order: u32,
    enforce: u32,
}

unsafe extern "C" {
    fn kvf_host_world(run: *const RawRun) -> u64;
}

pub(crate) fn raw_sizes() -> [usize; 3] {
    [size_of::<RawOp>(), size_of::<RawRank>(), size_of::<RawRun>()]
}

/// Memory of its own allocation, at a multiple of 16.
pub(crate) struct Block {
    words: Vec<u128>,
    counters: Vec<u8>,
    bytes: usize,
}

impl Block {
    pub(crate) fn new(bytes: usize, fill: u8) -> Self {
        let words = vec![u128::from_ne_bytes([fill; 16]); bytes.div_ceil(16).max(1)];
        Self { counters: vec![0; words.len() * 16], words, bytes }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &zerocopy::IntoBytes::as_bytes(self.words.as_slice())[..self.bytes]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        &mut zerocopy::IntoBytes::as_mut_bytes(self.words.as_mut_slice())[..bytes]
    }

    pub(crate) fn address(&self) -> u64 {
        self.words.as_ptr().addr() as u64
    }

    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.bytes()[offset..offset + 8].try_into().unwrap())
    }

    pub(crate) fn set_word(&mut self, offset: usize, value: u64) {
        self.bytes_mut()[offset..offset + 8].copy_from_slice(&value.to_ne_bytes());
    }

    /// The part from `offset` on, stores counted or not.
    fn region(&mut self, offset: usize, bytes: usize, access: u64, counted: bool) -> Region {
        assert!(offset + bytes <= self.bytes);
        let base = self.words.as_mut_ptr().cast::<u8>().wrapping_add(offset);
        let counters =
            if counted { self.counters.as_mut_ptr().wrapping_add(offset) } else { ptr::null_mut() };
        Region { base, len: bytes as u64, counters, access }
    }
}

/// Who may do what with a part of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) rank: usize,
    pub(crate) block: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
    pub(crate) access: u64,
    /// Stores are counted: a byte stored twice is a fault.
    pub(crate) counted: bool,
}

impl Grant {
    pub(crate) const READ: u64 = READ;
    pub(crate) const WRITE: u64 = WRITE;
}

#[derive(Clone)]
enum Work {
    Kernel { name: CString, params: Vec<u8>, geometry: LaunchGeometry },
    Copy { src: u64, dst: u64, bytes: u64, rows: u64, src_pitch: u64, dst_pitch: u64 },
    Consume { src: u64, dst: u64, counts: u64, bytes: u64 },
}

#[derive(Clone)]
struct Op {
    rank: usize,
    stream: u32,
    after: Option<usize>,
    work: Work,
}

/// Memory, what is to happen in it, and what did.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) blocks: Vec<Block>,
    pub(crate) grants: Vec<Grant>,
    pub(crate) events: Vec<Event>,
    ops: Vec<Op>,
    pub(crate) reports: Vec<Report>,
    pub(crate) ended: Vec<bool>,
}

impl World {
    pub(crate) fn block(&mut self, bytes: usize, fill: u8) -> usize {
        self.blocks.push(Block::new(bytes, fill));
        self.blocks.len() - 1
    }

    pub(crate) fn grant(&mut self, rank: usize, block: usize, access: u64) {
        let bytes = self.blocks[block].bytes;
        self.grants.push(Grant { rank, block, offset: 0, bytes, access, counted: false });
    }

    fn push(&mut self, rank: usize, stream: u32, after: Option<usize>, work: Work) -> usize {
        self.ops.push(Op { rank, stream, after, work });
        self.ops.len() - 1
    }

    pub(crate) fn launch(
        &mut self,
        rank: usize,
        stream: u32,
        after: Option<usize>,
        part: &ExchangePart<'_>,
    ) -> usize {
        self.launch_as(part.kernel.name(), rank, stream, after, part.params, part.geometry)
    }

    pub(crate) fn launch_as(
        &mut self,
        name: &str,
        rank: usize,
        stream: u32,
        after: Option<usize>,
        params: &[u8],
        geometry: LaunchGeometry,
    ) -> usize {
        let work = Work::Kernel { name: CString::new(name).unwrap(), params: params.to_vec(), geometry };
        self.push(rank, stream, after, work)
    }

    pub(crate) fn small(
        &mut self,
        kernel: Kernel,
        rank: usize,
        params: &[u8],
        geometry: LaunchGeometry,
    ) -> usize {
        self.launch_as(kernel.name(), rank, rank as u32, None, params, geometry)
    }

    /// `rows` of `bytes`, at source and destination pitches.
    pub(crate) fn copy(
        &mut self,
        rank: usize,
        (src, src_pitch): (u64, u64),
        (dst, dst_pitch): (u64, u64),
        bytes: u64,
        rows: u64,
    ) {
        self.push(rank, rank as u32, None, Work::Copy { src, dst, bytes, rows, src_pitch, dst_pitch });
    }

    pub(crate) fn consume(&mut self, rank: usize, src: u64, dst: u64, counts: u64, bytes: u64) -> usize {
        self.push(rank, rank as u32, None, Work::Consume { src, dst, counts, bytes })
    }

    /// The last operation of a stream so far.
    pub(crate) fn last_of(&self, stream: u32) -> Option<usize> {
        self.ops.iter().rposition(|op| op.stream == stream)
    }

    /// Runs everything that was put into streams, once; leaves reports and what ended.
    pub(crate) fn run(&mut self, ranks: usize, order: Order) {
        let mut regions: Vec<Vec<Region>> = (0..ranks).map(|_| Vec::new()).collect();
        for grant in &self.grants {
            if grant.bytes > 0 {
                let block = &mut self.blocks[grant.block];
                regions[grant.rank].push(block.region(
                    grant.offset,
                    grant.bytes,
                    grant.access,
                    grant.counted,
                ));
            }
        }
        self.reports = vec![Report::default(); ranks];
        let raw_ranks: Vec<_> = regions
            .iter()
            .zip(&mut self.reports)
            .map(|(regions, report)| RawRank {
                regions: regions.as_ptr(),
                region_count: regions.len() as u64,
                report,
            })
            .collect();
        let mut raw: Vec<_> = self.ops.iter().map(Op::raw).collect();
        let (order, seed) = match order {
            Order::Forward => (0, 0),
            Order::Reversed => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let run = RawRun {
            ops: raw.as_mut_ptr(),
            op_count: raw.len() as u64,
            events: self.events.as_ptr(),
            event_count: self.events.len() as u64,
            ranks: raw_ranks.as_ptr(),
            rank_count: ranks as u64,
            seed,
            max_idle: 2_000,
            order,
            enforce: 1,
        };
        // SAFETY: names and parameters are owned by `self.ops`, regions by `self.blocks`, lists by this frame; all of
        // them stay where they are during the call, and with `enforce` nothing outside the regions is touched. Nobody
        // else looks at the blocks meanwhile: `self` is borrowed exclusively.
        let refused = unsafe { kvf_host_world(&raw const run) };
        assert_eq!(refused, 0, "the harness refused operation {}", refused.wrapping_sub(1));
        self.ended = raw.iter().map(|op| op.ended != 0).collect();
    }
}

impl Op {
    fn raw(&self) -> RawOp {
        let mut raw = RawOp {
            kind: 0,
            stream: self.stream,
            rank: self.rank as u32,
            after: self.after.map_or(u32::MAX, |index| index as u32),
            name: ptr::null(),
            params: ptr::null(),
            params_bytes: 0,
            nblocks: 1,
            nthreads: 1,
            shared_bytes: 0,
            ended: 0,
            src: 0,
            dst: 0,
            counts: 0,
            bytes: 0,
            rows: 1,
            src_pitch: 0,
            dst_pitch: 0,
        };
        match &self.work {
            Work::Kernel { name, params, geometry } => {
                (raw.name, raw.params, raw.params_bytes) =
                    (name.as_ptr(), params.as_ptr().cast(), params.len() as u64);
                (raw.nblocks, raw.nthreads, raw.shared_bytes) =
                    (geometry.grid, geometry.block, geometry.shared);
            }
            Work::Copy { src, dst, bytes, rows, src_pitch, dst_pitch } => {
                (raw.kind, raw.src, raw.dst) = (1, *src, *dst);
                (raw.bytes, raw.rows, raw.src_pitch, raw.dst_pitch) = (*bytes, *rows, *src_pitch, *dst_pitch);
            }
            Work::Consume { src, dst, counts, bytes } => {
                (raw.kind, raw.src, raw.dst, raw.counts, raw.bytes) = (2, *src, *dst, *counts, *bytes);
            }
        }
        raw
    }
}
