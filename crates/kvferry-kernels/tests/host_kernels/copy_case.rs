//! A batch of runs in guarded memory, and the oracle that says what copying it must do.

use std::ffi::CStr;

use kvferry_kernels::{VectorizedCopyGeometry, VectorizedCopyParams, vectorized_copy_geometry};
use proptest::prelude::*;
use zerocopy::IntoBytes;

use crate::arena::{self, Access, Arena};
use crate::ffi::{Launch, Mode, Order, Report};

/// Bytes between neighbouring runs, at least.
const GUARD: usize = 16;
const POISON: u8 = 0x5c;

/// Pair `i` goes from slot `src_slots[i]` to slot `dst_slots[i]`, with the misalignment of the pair's own.
#[derive(Clone, Debug)]
pub(crate) struct CopyCase {
    pub(crate) bytes: usize,
    /// Distance from a 16-byte boundary, source and destination.
    pub(crate) misaligned: Vec<(usize, usize)>,
    pub(crate) src_slots: Vec<usize>,
    pub(crate) dst_slots: Vec<usize>,
}

/// Grid, threads and chunks, from the library or at will.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) grid: u32,
    pub(crate) block: u32,
    pub(crate) chunk_bytes: u64,
    pub(crate) team_shift: u32,
    pub(crate) order: Order,
}

impl From<(VectorizedCopyGeometry, Order)> for Shape {
    fn from((geometry, order): (VectorizedCopyGeometry, Order)) -> Self {
        Self {
            grid: geometry.launch.grid,
            block: geometry.launch.block,
            chunk_bytes: geometry.chunk_bytes,
            team_shift: geometry.team_shift,
            order,
        }
    }
}

impl CopyCase {
    /// Pairs in order, in slots of their own.
    pub(crate) fn in_order(bytes: usize, misaligned: Vec<(usize, usize)>) -> Self {
        let slots: Vec<_> = (0..misaligned.len()).collect();
        Self { bytes, misaligned, src_slots: slots.clone(), dst_slots: slots }
    }

    pub(crate) fn geometry(&self, sms: u32, max_ctas: Option<u32>, order: Order) -> Shape {
        let pairs = self.misaligned.len() as u64;
        (vectorized_copy_geometry(pairs, self.bytes as u64, sms, max_ctas).unwrap(), order).into()
    }

    /// Builds the memory, runs `body` and says what is wrong: faults, bytes, gaps, guards.
    pub(crate) fn check(&self, body: &CStr, shape: Shape) -> Result<(), String> {
        let mut memory = Memory::new(self);
        let report = memory.run(self, body, shape);
        memory.verify(self, report)
    }
}

/// Source, destination and both tables.
pub(crate) struct Memory {
    src: Arena,
    dst: Arena,
    tables: Arena,
    offsets: Vec<(usize, usize)>,
}

impl Memory {
    pub(crate) fn new(case: &CopyCase) -> Self {
        let pairs = case.misaligned.len();
        // Room for any misalignment, then a guard, in steps that keep slots on 16-byte boundaries.
        let slot = (case.bytes + 15 + GUARD).next_multiple_of(16);
        let mut src = Arena::new(GUARD + pairs * slot, 0);
        let mut dst = Arena::new(GUARD + pairs * slot, POISON);
        let mut tables = Arena::new(pairs * 16 + GUARD, POISON);
        for (index, byte) in src.bytes_mut().iter_mut().enumerate() {
            *byte = noise(index);
        }
        let mut offsets = Vec::with_capacity(pairs);
        for (pair, (src_off, dst_off)) in case.misaligned.iter().enumerate() {
            let from = GUARD + case.src_slots[pair] * slot + src_off;
            let to = GUARD + case.dst_slots[pair] * slot + dst_off;
            src.open(from..from + case.bytes, Access::Read);
            dst.open(to..to + case.bytes, Access::Write);
            let (from_address, to_address) = (src.address(from), dst.address(to));
            let table = tables.bytes_mut();
            table[pair * 8..][..8].copy_from_slice(&from_address.to_ne_bytes());
            table[(pairs + pair) * 8..][..8].copy_from_slice(&to_address.to_ne_bytes());
            offsets.push((from, to));
        }
        tables.open(0..pairs * 16, Access::Read);
        Self { src, dst, tables, offsets }
    }

    pub(crate) fn run(&mut self, case: &CopyCase, body: &CStr, shape: Shape) -> Report {
        let (params, launch) = self.arguments(case, shape);
        arena::run(body, params.as_bytes(), launch, &mut [&mut self.src, &mut self.dst, &mut self.tables])
    }

    /// # Safety
    /// That of [`arena::run_unchecked`].
    pub(crate) unsafe fn run_unchecked(&mut self, case: &CopyCase, body: &CStr, shape: Shape) {
        let (params, launch) = self.arguments(case, shape);
        let arenas = &mut [&mut self.src, &mut self.dst, &mut self.tables];
        // SAFETY: passed on.
        unsafe { arena::run_unchecked(body, params.as_bytes(), launch, arenas) }
    }

    fn arguments(&self, case: &CopyCase, shape: Shape) -> (VectorizedCopyParams, Launch) {
        let pairs = case.misaligned.len();
        let params = VectorizedCopyParams {
            src_table: self.tables.address(0),
            dst_table: self.tables.address(pairs * 8),
            pairs: pairs as u64,
            bytes: case.bytes as u64,
            chunk_bytes: shape.chunk_bytes,
            chunks_per_pair: (case.bytes as u64).div_ceil(shape.chunk_bytes).max(1),
            team_shift: shape.team_shift,
            reserved: 0,
        };
        let launch =
            Launch { grid: shape.grid, block: shape.block, shared: 0, order: shape.order, mode: Mode::Loops };
        (params, launch)
    }

    fn verify(&self, case: &CopyCase, report: Report) -> Result<(), String> {
        if !report.is_clean() {
            return Err(format!("{report:?}"));
        }
        let source: Vec<_> = (0..self.src.bytes().len()).map(noise).collect();
        let mut expected = vec![POISON; self.dst.bytes().len()];
        let mut stores = vec![0; expected.len()];
        for (from, to) in &self.offsets {
            expected[*to..to + case.bytes].copy_from_slice(&source[*from..from + case.bytes]);
            stores[*to..to + case.bytes].iter_mut().for_each(|count| *count += 1);
        }
        same("source", self.src.bytes(), &source)?;
        same("destination", self.dst.bytes(), &expected)?;
        same("store count", self.dst.counters(), &stores)
    }
}

fn same(what: &str, found: &[u8], expected: &[u8]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(at) => Err(format!("{what} at {at}: {} instead of {}", found[at], expected[at])),
    }
}

/// Source bytes: no two neighbours of a 16-byte unit or of a run look alike.
fn noise(index: usize) -> u8 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()[3]
}

/// Sizes that engines have: odd ones, MLA rows, rows with scales.
const SIZES: &[usize] = &[1, 3, 7, 15, 16, 17, 132, 257, 576, 584, 656, 1152, 4096, 4104];

pub(crate) fn any_case() -> impl Strategy<Value = CopyCase> {
    let bytes = prop_oneof![prop::sample::select(SIZES), 0usize..100, 0usize..5000];
    let misaligned = prop::collection::vec(
        prop_oneof![(0usize..16, 0usize..16), (0usize..16).prop_map(|same| (same, same)), Just((0, 0))],
        0..32,
    );
    (bytes, misaligned).prop_flat_map(|(bytes, misaligned)| {
        let slots: Vec<_> = (0..misaligned.len()).collect();
        (Just(bytes), Just(misaligned), Just(slots.clone()).prop_shuffle(), Just(slots).prop_shuffle())
            .prop_map(|(bytes, misaligned, src_slots, dst_slots)| CopyCase {
                bytes,
                misaligned,
                src_slots,
                dst_slots,
            })
    })
}

pub(crate) fn any_order() -> impl Strategy<Value = Order> {
    prop_oneof![Just(Order::Forward), Just(Order::Reversed), any::<u64>().prop_map(Order::Random)]
}

pub(crate) fn any_shape() -> impl Strategy<Value = Shape> {
    (1u32..12, 0u32..9, any_order(), prop_oneof![1u64..8, 1u64..400])
        .prop_flat_map(|(grid, log2_block, order, chunk)| {
            (Just((grid, log2_block, order, chunk)), 0..=log2_block)
        })
        .prop_map(|((grid, log2_block, order, chunk), team_shift)| Shape {
            grid,
            block: 1 << log2_block,
            chunk_bytes: chunk * 16,
            team_shift,
            order,
        })
}
