//! A strided copy in guarded memory, and an oracle of its own: nested loops over the numbers of a [`StridedShape`].

use std::ops::Range;

use kvferry_kernels::{
    Bases, Ids, Kernel, ParamBuffer, StridedCopyPlan, StridedLaunch, StridedLoop, StridedReport,
    StridedShape, StridedSide, Walk,
};
use zerocopy::FromBytes;

use crate::arena::{self, Access, Arena};
use crate::ffi::{Launch, Mode, Order, Report};

const GUARD: usize = 48;
const POISON: u8 = 0x5c;

/// How ids reach the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdSource {
    Inline,
    Table,
    /// Widths of both sides.
    Separate(u8, u8),
}

/// Where a side's regions lie: `base[r]` is what the kernel adds offsets to, which may be far outside of the memory that
/// holds the region's bytes.
#[derive(Clone, Debug)]
pub(crate) struct SidePlan {
    pub(crate) side: StridedSide,
    /// Subtracted from the address of region r's memory, for offsets beyond 4 GiB without memory of that size.
    pub(crate) shift: Vec<u64>,
    /// Distance of every region's memory from a 16-byte boundary.
    pub(crate) misaligned: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct StridedCase {
    pub(crate) src: SidePlan,
    pub(crate) dst: SidePlan,
    pub(crate) loops: Vec<StridedLoop>,
    pub(crate) run: u64,
    pub(crate) walk: Walk,
    /// Ids as given; illegal ones only with `IdSource::Separate`.
    pub(crate) pairs: Vec<(i64, i64)>,
    pub(crate) ids: IdSource,
    pub(crate) inline_bases: bool,
}

/// Region and offset of every run of a pair, source and destination.
type Run = ((u64, u64), (u64, u64));

impl StridedCase {
    pub(crate) fn shape(&self) -> StridedShape {
        StridedShape {
            src: self.src.side,
            dst: self.dst.side,
            loops: self.loops.clone(),
            run_bytes: self.run,
            walk: self.walk,
        }
    }

    pub(crate) fn plan(&self) -> StridedCopyPlan {
        let align = |side: &SidePlan| 1_u64 << (side.misaligned | 16).trailing_zeros();
        // Shifts are multiples of 16, or the alignment would not be that of the memory.
        assert!(self.src.shift.iter().chain(&self.dst.shift).all(|shift| shift % 16 == 0));
        StridedCopyPlan::new(&self.shape(), align(&self.src), align(&self.dst)).unwrap()
    }

    fn is_good(&self, (src, dst): (i64, i64)) -> bool {
        let within = |id: i64, side: &SidePlan| u64::try_from(id).is_ok_and(|id| id < side.side.blocks);
        within(src, &self.src) && within(dst, &self.dst)
    }

    /// Words that travel with a launch.
    pub(crate) fn inline_words(&self) -> usize {
        let bases = if self.inline_bases { self.src.shift.len() + self.dst.shift.len() } else { 0 };
        bases + if self.ids == IdSource::Inline { self.pairs.len() } else { 0 }
    }

    /// Every run of a pair.
    fn runs(&self, src: u64, dst: u64) -> Vec<Run> {
        let mut runs = vec![(place(&self.src.side, src), place(&self.dst.side, dst))];
        for l in &self.loops {
            runs = runs
                .iter()
                .flat_map(|((src_region, src), (dst_region, dst))| {
                    (0..l.count).map(move |i| {
                        (
                            (src_region + i * l.src_region, src + i * l.src_stride),
                            (dst_region + i * l.dst_region, dst + i * l.dst_stride),
                        )
                    })
                })
                .collect();
        }
        runs
    }

    /// Bytes that each side's regions must have, by trying every legal id.
    pub(crate) fn reach(&self) -> (u64, u64) {
        let end = |pick: fn(&Run) -> u64, ids: u64, of: fn(&Self, u64) -> Vec<Run>| {
            (0..ids).flat_map(|id| of(self, id)).map(|run| pick(&run) + self.run).max().unwrap_or(0)
        };
        (
            end(|run| run.0.1, self.src.side.blocks, |case, id| case.runs(id, 0)),
            end(|run| run.1.1, self.dst.side.blocks, |case, id| case.runs(0, id)),
        )
    }

    /// Runs `launch` and says what is wrong: faults, bytes, gaps, guards, the report of a bad id.
    pub(crate) fn check(&self, launch: &StridedLaunch, order: Order) -> Result<(), String> {
        self.check_with(launch, order, |_| {}).map(drop)
    }

    /// As [`StridedCase::check`], with parameters changed on the way. Gives what was reported.
    pub(crate) fn check_with(
        &self,
        launch: &StridedLaunch,
        order: Order,
        edit: impl FnOnce(&mut [u8]),
    ) -> Result<StridedReport, String> {
        let mut memory = Memory::new(self);
        let report = memory.run(self, launch, order, edit);
        memory.verify(self, report)
    }
}

fn place(side: &StridedSide, id: u64) -> (u64, u64) {
    let (block, part) = (id / side.parts, id % side.parts);
    (
        side.start_region + block * side.block_region,
        side.start_offset + block * side.block_stride + part * side.part_stride,
    )
}

/// The memory of one side.
struct Regions {
    arenas: Vec<Arena>,
    /// Offset of the kernel's base from the first byte of each arena; may be "negative".
    base: Vec<u64>,
    bases: Vec<u64>,
    /// Bytes of runs, per arena.
    used: Vec<Vec<Range<usize>>>,
}

impl Regions {
    /// `used`: (region, offset) of runs of `run` bytes that must exist.
    fn new(side: &SidePlan, used: &[(u64, u64)], run: u64, fill: impl Fn(usize, usize) -> u8) -> Self {
        let mut arenas = Vec::new();
        let (mut base, mut bases) = (Vec::new(), Vec::new());
        for (region, shift) in side.shift.iter().enumerate() {
            let begin = GUARD + side.misaligned;
            let ends = used.iter().filter(|(r, _)| *r == region as u64).map(|(_, at)| at + run - shift);
            let len = ends.max().unwrap_or(0) as usize;
            let mut arena = Arena::new(begin + len + GUARD, 0);
            for (at, byte) in arena.bytes_mut().iter_mut().enumerate() {
                *byte = fill(region, at);
            }
            base.push((begin as u64).wrapping_sub(*shift));
            bases.push(arena.address(begin).wrapping_sub(*shift));
            arenas.push(arena);
        }
        let used = vec![Vec::new(); arenas.len()];
        Self { arenas, base, bases, used }
    }

    /// Opens what is used. Runs that meet are one range: an access may span them.
    fn open(&mut self, access: Access) {
        for (arena, used) in self.arenas.iter_mut().zip(&mut self.used) {
            used.sort_by_key(|range| range.start);
            let mut joined: Vec<Range<usize>> = Vec::new();
            for range in used.drain(..) {
                match joined.last_mut() {
                    Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                    _ => joined.push(range),
                }
            }
            for range in joined {
                arena.open(range, access);
            }
        }
    }

    fn range(&self, (region, offset): (u64, u64), run: u64) -> Range<usize> {
        let at = self.base[region as usize].wrapping_add(offset) as usize;
        at..at + run as usize
    }
}

struct Memory {
    src: Regions,
    dst: Regions,
    tables: Arena,
    /// What the destination and its store counters must be.
    expected: Vec<Vec<u8>>,
    stores: Vec<Vec<u8>>,
    ids_at: [usize; 2],
    bases_at: [usize; 2],
}

impl Memory {
    fn new(case: &StridedCase) -> Self {
        let good = case.pairs.iter().copied().filter(|pair| case.is_good(*pair));
        let runs: Vec<Run> = good.flat_map(|(src, dst)| case.runs(src as u64, dst as u64)).collect();
        let (from, to): (Vec<_>, Vec<_>) = runs.iter().copied().unzip();
        let mut src = Regions::new(&case.src, &from, case.run, noise);
        let mut dst = Regions::new(&case.dst, &to, case.run, |_, _| POISON);
        let mut expected: Vec<_> = dst.arenas.iter().map(|arena| arena.bytes().to_vec()).collect();
        let mut stores: Vec<_> = expected.iter().map(|bytes| vec![0; bytes.len()]).collect();
        for (from, to) in runs {
            let (read, write) = (src.range(from, case.run), dst.range(to, case.run));
            expected[to.0 as usize][write.clone()]
                .copy_from_slice(&src.arenas[from.0 as usize].bytes()[read.clone()]);
            stores[to.0 as usize][write.clone()].iter_mut().for_each(|count| *count += 1);
            src.used[from.0 as usize].push(read);
            dst.used[to.0 as usize].push(write);
        }
        src.open(Access::Read);
        dst.open(Access::Write);
        let mut memory =
            Self { src, dst, tables: Arena::new(0, 0), expected, stores, ids_at: [0; 2], bases_at: [0; 2] };
        memory.fill_tables(case);
        memory
    }

    /// Report, base tables and id arrays, each between guards.
    fn fill_tables(&mut self, case: &StridedCase) {
        let mut words: Vec<(usize, Vec<u8>)> = Vec::new();
        let mut at = 32 + GUARD;
        let mut put = |bytes: Vec<u8>| {
            let begin = at;
            at = (begin + bytes.len() + GUARD).next_multiple_of(16);
            words.push((begin, bytes));
            begin
        };
        let u64s = |values: &[u64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>();
        if !case.inline_bases {
            self.bases_at = [put(u64s(&self.src.bases)), put(u64s(&self.dst.bases))];
        }
        match case.ids {
            IdSource::Inline => {}
            IdSource::Table => self.ids_at[0] = put(u64s(&packed(case))),
            IdSource::Separate(src_width, dst_width) => {
                let list = |width: u8, pick: fn(&(i64, i64)) -> i64| {
                    let ids = case.pairs.iter().map(pick);
                    ids.flat_map(|id| id.to_ne_bytes()[..width.into()].to_vec()).collect::<Vec<u8>>()
                };
                self.ids_at = [put(list(src_width, |p| p.0)), put(list(dst_width, |p| p.1))];
            }
        }
        self.tables = Arena::new(at, POISON);
        for (begin, bytes) in words {
            self.tables.bytes_mut()[begin..begin + bytes.len()].copy_from_slice(&bytes);
            self.tables.open(begin..begin + bytes.len(), Access::Read);
        }
        self.tables.bytes_mut()[..32].fill(0);
        if matches!(case.ids, IdSource::Separate(..)) {
            self.tables.open(0..32, Access::Shared);
        }
    }

    fn run(
        &mut self,
        case: &StridedCase,
        launch: &StridedLaunch,
        order: Order,
        edit: impl FnOnce(&mut [u8]),
    ) -> Report {
        let at = |offset: usize| self.tables.address(offset);
        let bases = if case.inline_bases {
            Bases::Inline { src: &self.src.bases, dst: &self.dst.bases }
        } else {
            Bases::Table { src: at(self.bases_at[0]), dst: at(self.bases_at[1]) }
        };
        let pairs = packed(case);
        let ids = match case.ids {
            IdSource::Inline => Ids::Inline(&pairs),
            IdSource::Table => Ids::Table(at(self.ids_at[0])),
            IdSource::Separate(src_width, dst_width) => Ids::Separate {
                src: at(self.ids_at[0]),
                src_width,
                dst: at(self.ids_at[1]),
                dst_width,
                report: at(0),
            },
        };
        let mut buffer = ParamBuffer::new();
        let mut params = launch.write_params(bases, ids, &mut buffer).unwrap().to_vec();
        edit(&mut params);
        let geometry = Launch {
            grid: launch.geometry.grid,
            block: launch.geometry.block,
            shared: launch.geometry.shared,
            order,
            mode: Mode::Loops,
        };
        let body = match launch.kernel {
            Kernel::StridedTile => c"strided_tile",
            Kernel::StridedTileLarge => c"strided_tile_large",
            Kernel::StridedWord => c"strided_word",
            _ => c"strided_word_large",
        };
        assert_eq!(body.to_str(), Ok(launch.kernel.name()));
        let mut arenas: Vec<&mut Arena> =
            self.src.arenas.iter_mut().chain(&mut self.dst.arenas).chain([&mut self.tables]).collect();
        arena::run(body, &params, geometry, &mut arenas)
    }

    fn verify(&self, case: &StridedCase, report: Report) -> Result<StridedReport, String> {
        if !report.is_clean() {
            return Err(format!("{report:?}"));
        }
        for (region, arena) in self.src.arenas.iter().enumerate() {
            let untouched: Vec<_> = (0..arena.bytes().len()).map(|at| noise(region, at)).collect();
            same("source", region, arena.bytes(), &untouched)?;
        }
        for (region, arena) in self.dst.arenas.iter().enumerate() {
            same("destination", region, arena.bytes(), &self.expected[region])?;
            same("store count", region, arena.counters(), &self.stores[region])?;
        }
        let (report, _) = StridedReport::read_from_prefix(self.tables.bytes()).unwrap();
        self.verify_report(case, report).map(|()| report)
    }

    fn verify_report(&self, case: &StridedCase, report: StridedReport) -> Result<(), String> {
        if case.pairs.iter().all(|pair| case.is_good(*pair)) {
            return if report == StridedReport::default() {
                Ok(())
            } else {
                Err(format!("{report:?} of good ids"))
            };
        }
        let pair = case.pairs.get(report.index as usize).copied();
        let (value, limit) = match report.side {
            0 => (pair.map(|p| p.0), case.src.side.blocks),
            _ => (pair.map(|p| p.1), case.dst.side.blocks),
        };
        let bad =
            report.state == 1 && report.side < 2 && value == Some(report.value) && limit == report.limit;
        let out = u64::try_from(report.value).map_or(true, |value| value >= limit);
        if bad && out { Ok(()) } else { Err(format!("{report:?} is not about a bad id of {:?}", case.pairs)) }
    }
}

fn packed(case: &StridedCase) -> Vec<u64> {
    case.pairs.iter().map(|(src, dst)| (*src as u64 & 0xffff_ffff) | (*dst as u64) << 32).collect()
}

fn same(what: &str, region: usize, found: &[u8], expected: &[u8]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(at) => {
            Err(format!("{what}, region {region} at {at}: {} instead of {}", found[at], expected[at]))
        }
    }
}

/// Source bytes: no two neighbours, runs or regions look alike.
fn noise(region: usize, at: usize) -> u8 {
    let mixed = ((region << 40) as u64 + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).to_le_bytes()[3]
}
