//! The fiber scheduler: right bodies pass in every order, a missing barrier does not.

use std::ffi::CStr;

use zerocopy::{Immutable, IntoBytes};

use crate::arena::{self, Access, Arena};
use crate::ffi::{Fault, Launch, Mode, Order, Report};

const TILE: usize = 8;
const THREADS: u32 = 64;

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct TransposeParams {
    src: u64,
    dst: u64,
    tiles: u64,
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct HandoffParams {
    flag: u64,
    value: u64,
    out: u64,
    send: u64,
}

fn orders() -> impl Iterator<Item = Order> {
    [Order::Forward, Order::Reversed].into_iter().chain((0..8).map(Order::Random))
}

fn launch(grid: u32, order: Order, mode: Mode) -> Launch {
    Launch { grid, block: THREADS, shared: THREADS * 4, order, mode }
}

/// The report, and whether every tile came out transposed with each byte stored once.
fn transpose(body: &CStr, tiles: usize, grid: u32, order: Order, mode: Mode) -> (Report, bool) {
    let words = tiles * TILE * TILE;
    let mut src = Arena::new(words * 4, 0);
    let mut dst = Arena::new(words * 4, 0xee);
    for (index, word) in src.bytes_mut().chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&u32::try_from(index * 3 + 1).unwrap().to_ne_bytes());
    }
    src.open(0..words * 4, Access::Read);
    dst.open(0..words * 4, Access::Write);
    let params = TransposeParams { src: src.address(0), dst: dst.address(0), tiles: tiles as u64 };
    let report = arena::run(body, params.as_bytes(), launch(grid, order, mode), &mut [&mut src, &mut dst]);
    let word = |bytes: &[u8], index: usize| u32::from_ne_bytes(bytes[index * 4..][..4].try_into().unwrap());
    let right = (0..words).all(|index| {
        let (tile, row, column) = (index / (TILE * TILE), index / TILE % TILE, index % TILE);
        word(dst.bytes(), index) == word(src.bytes(), tile * TILE * TILE + column * TILE + row)
    });
    let once = dst.counters()[..words * 4].iter().all(|count| *count == 1);
    (report, right && once)
}

#[test]
fn a_right_transpose_passes_in_every_order() {
    for order in orders() {
        for (grid, resident) in [(1, 1), (3, 2), (3, 3)] {
            let (report, right) = transpose(c"transpose", 7, grid, order, Mode::Fibers { resident });
            assert!(report.is_clean() && right, "{order:?}: {report:?}");
        }
    }
}

#[test]
fn a_missing_barrier_shows_in_every_order() {
    for body in [c"transpose_unfilled", c"transpose_undrained"] {
        for order in orders() {
            let (_, right) = transpose(body, 4, 1, order, Mode::Fibers { resident: 1 });
            assert!(!right, "{body:?} passed in order {order:?}");
        }
    }
}

#[test]
fn a_barrier_some_threads_miss_is_a_fault() {
    let (report, _) = transpose(c"diverged_barrier", 1, 1, Order::Random(1), Mode::Fibers { resident: 1 });
    assert_eq!(report.count(Fault::BarrierDiverged), 1);
}

#[test]
fn a_barrier_under_plain_loops_is_a_fault() {
    let (report, _) = transpose(c"transpose", 1, 1, Order::Forward, Mode::Loops);
    assert!(report.count(Fault::BarrierInLoop) > 0);
}

fn handoff(order: Order, resident: u32, send: bool) -> (Report, bool) {
    const GRID: u32 = 4;
    let readers = ((GRID - 1) * THREADS) as usize;
    let mut flags = Arena::new(32, 0);
    let mut out = Arena::new(readers * 4, 0);
    flags.open(0..32, Access::Shared);
    out.open(0..readers * 4, Access::Write);
    let params = HandoffParams {
        flag: flags.address(0),
        value: flags.address(16),
        out: out.address(0),
        send: send.into(),
    };
    let launch = launch(GRID, order, Mode::Fibers { resident });
    let report = arena::run(c"handoff", params.as_bytes(), launch, &mut [&mut flags, &mut out]);
    let right = out.bytes()[..readers * 4].chunks_exact(4).all(|word| word == 42u32.to_ne_bytes());
    (report, right)
}

#[test]
fn a_spin_ends_when_all_ctas_are_resident() {
    for order in orders() {
        let (report, right) = handoff(order, 4, true);
        assert!(report.is_clean() && right, "{order:?}: {report:?}");
    }
}

#[test]
fn a_spin_nobody_ends_is_a_fault() {
    let (report, _) = handoff(Order::Forward, 4, false);
    assert_eq!(report.count(Fault::Stuck), 1);
    // The CTA that would end it is not resident while the others spin.
    let (report, _) = handoff(Order::Reversed, 2, true);
    assert_eq!(report.count(Fault::Stuck), 1);
}
