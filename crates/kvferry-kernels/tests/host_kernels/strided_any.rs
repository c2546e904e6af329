//! Random strided copies for property tests.

use kvferry_kernels::{StridedLoop, StridedSide, Walk};
use proptest::prelude::*;

use crate::strided_case::{IdSource, SidePlan, StridedCase};

/// Most bytes a case moves per block.
const BLOCK_BYTES: u64 = 6 << 10;
/// Byte steps of this size cannot be counted in 32 bits.
const FAR: u64 = 5 << 30;

/// How a side lays out its axes: loops, then parts, then blocks.
#[derive(Clone, Debug)]
struct Layout {
    /// Innermost first.
    order: Vec<usize>,
    /// Bytes left free after all steps of an axis.
    pads: Vec<u64>,
    /// The axis steps through regions instead of bytes. Never the parts.
    regions: Vec<bool>,
    /// The steps through regions are far in bytes, too.
    far: bool,
    start: u64,
    start_region: u64,
    parts: u64,
    blocks: u64,
    misaligned: usize,
}

/// Steps of an axis: bytes and regions.
type Step = (u64, u64);

impl Layout {
    /// The side and the steps of every loop.
    fn build(&self, counts: &[u64], run: u64) -> (SidePlan, Vec<Step>) {
        let whole = self.blocks.div_ceil(self.parts);
        let extents: Vec<u64> = counts.iter().copied().chain([self.parts, whole]).collect();
        let (mut bytes, mut regions) = (run, 1);
        let mut steps = vec![(0, 0); extents.len()];
        for &axis in &self.order {
            if self.regions[axis] && axis != counts.len() && regions * extents[axis] <= 64 {
                steps[axis] = (if self.far { FAR + 64 * axis as u64 } else { 0 }, regions);
                regions *= extents[axis];
            } else {
                steps[axis] = (bytes, 0);
                bytes = bytes * extents[axis] + self.pads[axis];
            }
        }
        let start_offset = self.start + if self.far { FAR } else { 0 };
        let side = StridedSide {
            start_region: self.start_region,
            start_offset,
            parts: self.parts,
            part_stride: steps[counts.len()].0,
            block_stride: steps[counts.len() + 1].0,
            block_region: steps[counts.len() + 1].1,
            blocks: self.blocks,
            regions: self.start_region + regions,
        };
        // Where a region begins: its index taken apart again.
        let shift = (0..side.regions).map(|region| {
            let Some(region) = region.checked_sub(self.start_region) else { return 0 };
            let far = steps.iter().zip(&extents).filter(|(step, _)| step.1 > 0);
            let steps = far.map(|((stride, step), extent)| region / step % extent * stride).sum::<u64>();
            steps + if self.far { FAR } else { 0 }
        });
        let plan = SidePlan { side, shift: shift.collect(), misaligned: self.misaligned };
        (plan, steps[..counts.len()].to_vec())
    }
}

fn any_layout(loops: usize) -> impl Strategy<Value = Layout> {
    let axes = loops + 2;
    let order = Just((0..axes).collect::<Vec<_>>()).prop_shuffle();
    let pad = prop_oneof![3 => Just(0), 2 => (0u64..3).prop_map(|n| n * 16), 1 => 0u64..21];
    let start = prop_oneof![Just(0), (0u64..4).prop_map(|n| n * 16), 0u64..50];
    let misaligned = prop_oneof![3 => Just(0usize), 1 => Just(8usize), 2 => 0usize..16];
    (
        (order, prop::collection::vec(pad, axes), prop::collection::vec(prop::bool::weighted(0.25), axes)),
        (prop::bool::weighted(0.3), start, 0u64..3),
        (prop_oneof![2 => Just(1u64), 1 => 2u64..4], 1u64..9, misaligned),
    )
        .prop_map(|((order, pads, regions), (far, start, start_region), (parts, blocks, misaligned))| {
            Layout { order, pads, regions, far, start, start_region, parts, blocks, misaligned }
        })
}

/// Rows of engines, and anything else.
fn any_run() -> impl Strategy<Value = u64> {
    let rows = vec![1, 2, 4, 8, 16, 32, 64, 128, 132, 256, 512, 576, 584, 656, 1152, 2048, 4096];
    prop_oneof![2 => prop::sample::select(rows), 1 => 1u64..701, 1 => 1u64..5000]
}

pub(crate) fn any_walk() -> impl Strategy<Value = Walk> {
    prop_oneof![Just(Walk::Source), Just(Walk::Destination)]
}

fn any_ids() -> impl Strategy<Value = IdSource> {
    let width = || prop_oneof![Just(4u8), Just(8u8)];
    let separate = (width(), width()).prop_map(|(src, dst)| IdSource::Separate(src, dst));
    prop_oneof![Just(IdSource::Inline), Just(IdSource::Table), separate]
}

/// Any case; with `bad`, some ids are illegal and come separately.
pub(crate) fn any_case(bad: bool) -> impl Strategy<Value = StridedCase> {
    let counts = prop::collection::vec(1u64..5, 0..7);
    (counts, any_run())
        .prop_flat_map(|(counts, run)| {
            let loops = counts.len();
            (Just(counts), Just(run), any_layout(loops), any_layout(loops))
        })
        .prop_flat_map(move |(mut counts, run, src, dst)| {
            for at in 0..counts.len() {
                if counts.iter().product::<u64>() * run > BLOCK_BYTES {
                    counts[at] = 1;
                }
            }
            let all = Just((0..dst.blocks as i64).collect::<Vec<_>>()).prop_shuffle();
            let from = prop::collection::vec(0..src.blocks as i64, dst.blocks as usize);
            let most = dst.blocks as usize;
            let wrong = prop::collection::vec(any_wrong(), if bad { 1..4 } else { 0..1 });
            (
                Just((counts, run, src, dst)),
                (all, from, 0..=most),
                wrong,
                any_ids(),
                any_walk(),
                any::<bool>(),
            )
        })
        .prop_map(move |((counts, run, src, dst), (to, from, len), wrong, ids, walk, inline_bases)| {
            let (src, src_steps) = src.build(&counts, run);
            let (dst, dst_steps) = dst.build(&counts, run);
            let steps = src_steps.into_iter().zip(dst_steps);
            let loops = counts.iter().zip(steps).map(|(&count, (src, dst))| StridedLoop {
                count,
                src_stride: src.0,
                dst_stride: dst.0,
                src_region: src.1,
                dst_region: dst.1,
            });
            let mut case = StridedCase {
                loops: loops.collect(),
                run,
                walk,
                pairs: from.into_iter().zip(to).take(len).collect(),
                ids,
                inline_bases,
                src,
                dst,
            };
            spoil(&mut case, &wrong);
            case
        })
}

/// An illegal id: which pair and side, and by how much it is off.
#[derive(Clone, Copy, Debug)]
struct Wrong {
    at: usize,
    source: bool,
    by: i64,
}

fn any_wrong() -> impl Strategy<Value = Wrong> {
    let far = prop::sample::select(vec![0, 1, 1 << 31, 1 << 32, (1 << 32) + 1, i64::MAX - 100]);
    let by = prop_oneof![Just(-1i64), Just(i64::MIN), -1000i64..0, 0i64..1000, far];
    (any::<usize>(), any::<bool>(), by).prop_map(|(at, source, by)| Wrong { at, source, by })
}

fn spoil(case: &mut StridedCase, wrong: &[Wrong]) {
    if wrong.is_empty() || case.pairs.is_empty() {
        return;
    }
    if !matches!(case.ids, IdSource::Separate(..)) {
        case.ids = IdSource::Separate(8, 4);
    }
    let IdSource::Separate(src_width, dst_width) = case.ids else { return };
    for one in wrong {
        let at = one.at % case.pairs.len();
        let (id, blocks, width) = if one.source {
            (&mut case.pairs[at].0, case.src.side.blocks, src_width)
        } else {
            (&mut case.pairs[at].1, case.dst.side.blocks, dst_width)
        };
        let value = if one.by < 0 { one.by } else { one.by + blocks as i64 };
        // An id of four bytes is what four bytes say.
        let narrow = i64::from(value as i32);
        let bad = narrow < 0 || narrow >= blocks as i64;
        *id = if width == 8 {
            value
        } else if bad {
            narrow
        } else {
            -1
        };
    }
}
