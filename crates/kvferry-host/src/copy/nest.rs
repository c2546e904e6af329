//! The loop nest and its walk.

use std::ops::Range;

use super::row::Rows;
use super::{CopyHint, stream};

/// Most loops a nest can have around its run. Planned copies have at most: block, layer, outer, page, head, and one
/// for a split axis.
pub const MAX_LOOPS: usize = 6;

/// One counted loop: `count` steps, each moving both sides by their stride in bytes (negative strides are legal).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Loop {
    /// Number of steps; 0 makes the whole nest empty.
    pub count: u64,
    /// Bytes between two steps on the source side.
    pub src_stride: i64,
    /// Bytes between two steps on the destination side.
    pub dst_stride: i64,
}

/// Why a [`CopyNest`] was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NestError {
    /// More loops than [`MAX_LOOPS`].
    #[error("a copy nest has at most {MAX_LOOPS} loops, {loops} were given")]
    TooManyLoops {
        /// Loops given.
        loops: usize,
    },
    /// A run of no bytes.
    #[error("a copy nest needs runs of at least one byte")]
    EmptyRun,
    /// The number of runs, or the bytes spanned on one side, do not fit 63 bits.
    #[error("the copy nest does not fit the address space (loop {index}, counted from the outermost)")]
    Overflow {
        /// Loop at which the arithmetic overflowed; the number of loops if it was the run itself.
        index: usize,
    },
}

/// A run of `run_bytes` bytes, contiguous on both sides, inside up to [`MAX_LOOPS`] loops, outermost first.
///
/// Its runs are numbered from 0 to [`num_runs`](Self::num_runs), the innermost loop counting fastest. All offsets
/// reached fit an `isize`: construction has checked it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyNest {
    run_bytes: usize,
    loops: [Loop; MAX_LOOPS],
    num_loops: usize,
    num_runs: u64,
    src_extent: (i64, i64),
    dst_extent: (i64, i64),
}

impl CopyNest {
    /// A nest of `loops`, outermost first, around runs of `run_bytes` bytes. No loops mean one run.
    ///
    /// # Errors
    /// [`NestError`] if there are too many loops, the run is empty, or offsets or the number of runs overflow.
    pub fn new(run_bytes: usize, loops: &[Loop]) -> Result<CopyNest, NestError> {
        if loops.len() > MAX_LOOPS {
            return Err(NestError::TooManyLoops { loops: loops.len() });
        }
        if run_bytes == 0 {
            return Err(NestError::EmptyRun);
        }
        let mut held = [Loop::default(); MAX_LOOPS];
        let mut num_runs = 1_u64;
        let whole_run = i64::try_from(run_bytes).map_err(|_| NestError::Overflow { index: loops.len() })?;
        let (mut src_extent, mut dst_extent) = ((0, whole_run), (0, whole_run));
        let empty = loops.iter().any(|l| l.count == 0);
        for (index, (slot, step)) in held.iter_mut().zip(loops).enumerate() {
            *slot = *step;
            if empty {
                continue;
            }
            let overflow = NestError::Overflow { index };
            num_runs = num_runs.checked_mul(step.count).ok_or(overflow)?;
            src_extent = widen(src_extent, step.count, step.src_stride).ok_or(overflow)?;
            dst_extent = widen(dst_extent, step.count, step.dst_stride).ok_or(overflow)?;
        }
        if empty {
            (num_runs, src_extent, dst_extent) = (0, (0, 0), (0, 0));
        }
        Ok(CopyNest { run_bytes, loops: held, num_loops: loops.len(), num_runs, src_extent, dst_extent })
    }

    /// Bytes of one run.
    pub fn run_bytes(&self) -> usize {
        self.run_bytes
    }

    /// The loops, outermost first.
    pub fn loops(&self) -> &[Loop] {
        self.loops.get(..self.num_loops).unwrap_or_default()
    }

    /// Number of runs: the product of the counts.
    pub fn num_runs(&self) -> u64 {
        self.num_runs
    }

    /// Bytes the whole nest moves, saturating (sides with a stride of 0 can count bytes more than once).
    pub fn total_bytes(&self) -> u64 {
        self.num_runs.saturating_mul(self.run_bytes as u64)
    }

    /// Byte offsets from the source base that the nest can touch: `[first, end)`. `(0, 0)` if it is empty.
    pub fn src_extent(&self) -> (i64, i64) {
        self.src_extent
    }

    /// As [`src_extent`](Self::src_extent), on the destination side.
    pub fn dst_extent(&self) -> (i64, i64) {
        self.dst_extent
    }
}

/// Grows the interval by `count - 1` steps of `stride`; None if an end or the width no longer fits.
fn widen((low, high): (i64, i64), count: u64, stride: i64) -> Option<(i64, i64)> {
    let reach = i64::try_from(count.checked_sub(1)?).ok()?.checked_mul(stride)?;
    let low = low.checked_add(reach.min(0))?;
    let high = high.checked_add(reach.max(0))?;
    high.checked_sub(low)?;
    Some((low, high))
}

/// Copies the runs of `nest` whose numbers lie in `range`, from `src` to `dst` (the bases that offsets count from).
///
/// Numbers at or beyond [`CopyNest::num_runs`] are ignored. Runs are copied in ascending order; addresses advance
/// incrementally, with one division per loop for the whole call. Streaming stores are fenced before the call returns.
///
/// # Safety
/// For every run in `range`, `run_bytes` bytes at its source offset must be readable and at its destination offset
/// writable, no destination byte of the range may be written twice or belong to any source run of the nest, and nobody
/// else may write the sources or access the destinations during the call. Disjoint ranges may run in parallel. No
/// alignment is needed.
pub unsafe fn copy_nest(src: *const u8, dst: *mut u8, nest: &CopyNest, range: Range<u64>, hint: CopyHint) {
    // SAFETY: the caller's contract, word for word.
    unsafe { copy_nest_unfenced(src, dst, nest, range, hint) };
    if hint.streams() {
        stream::fence();
    }
}

/// As [`copy_nest`], without the fence: until [`stream::fence`], other threads must not be told about the data. Many
/// small nests in a row share one fence, which waits for all stores before it.
///
/// # Safety
/// As [`copy_nest`].
pub(crate) unsafe fn copy_nest_unfenced(
    src: *const u8,
    dst: *mut u8,
    nest: &CopyNest,
    range: Range<u64>,
    hint: CopyHint,
) {
    // SAFETY: the caller's contract, word for word.
    unsafe { walk(src, dst, nest, range, Rows::choose(nest.run_bytes, hint)) };
}

/// As [`copy_nest`], where source and destination bytes may be the same ones: each run is then moved as by `memmove`, one
/// after another, and what a later run reads may have been written by an earlier one. Never streams, needs no fence.
///
/// # Safety
/// As [`copy_nest`], but for overlap of source and destination.
pub(crate) unsafe fn move_nest(src: *const u8, dst: *mut u8, nest: &CopyNest, range: Range<u64>) {
    // SAFETY: the caller's contract; these rows need no disjointness.
    unsafe { walk(src, dst, nest, range, Rows::overlapping()) };
}

/// Walks runs `range` of `nest`.
///
/// # Safety
/// As [`copy_nest`]; `rows` says whether source and destination may overlap, and fits the nest's run length.
unsafe fn walk(src: *const u8, dst: *mut u8, nest: &CopyNest, range: Range<u64>, rows: Rows) {
    let end = range.end.min(nest.num_runs);
    let Some(mut left) = end.checked_sub(range.start).filter(|&runs| runs > 0) else {
        return;
    };
    // A nest without loops is one row of one run.
    let single = Loop { count: 1, src_stride: 0, dst_stride: 0 };
    let (inner, outer) = match nest.loops().split_last() {
        Some((inner, outer)) => (*inner, outer),
        None => (single, &[][..]),
    };
    let mut digits = [0_u64; MAX_LOOPS];
    let mut walk = Walk { src, dst };
    let mut number = range.start / inner.count;
    let mut at = range.start % inner.count;
    for (digit, step) in digits.iter_mut().zip(outer).rev() {
        *digit = number % step.count;
        number /= step.count;
        walk.advance(*digit, step);
    }
    loop {
        let runs = left.min(inner.count - at);
        let mut row = walk;
        row.advance(at, &inner);
        // SAFETY: the row is runs `at .. at + runs` of the inner loop at the current outer position, all of them in
        // `range`, for which the caller vouches; offsets fit an isize by construction of the nest.
        unsafe { rows.copy(row.src, row.dst, runs, &inner, nest.run_bytes) };
        left -= runs;
        if left == 0 {
            break;
        }
        at = 0;
        for (digit, step) in digits.iter_mut().zip(outer).rev() {
            *digit += 1;
            if *digit < step.count {
                walk.advance(1, step);
                break;
            }
            walk.rewind(*digit - 1, step);
            *digit = 0;
        }
    }
}

/// The two addresses of the walk. Wrapping arithmetic: only the addresses of runs in range are ever dereferenced.
#[derive(Clone, Copy)]
struct Walk {
    src: *const u8,
    dst: *mut u8,
}

impl Walk {
    // Counts below `step.count` times a stride fit an i64 (checked by `CopyNest::new`), so the casts lose nothing.
    fn advance(&mut self, steps: u64, step: &Loop) {
        self.src = self.src.wrapping_offset((steps as i64).wrapping_mul(step.src_stride) as isize);
        self.dst = self.dst.wrapping_offset((steps as i64).wrapping_mul(step.dst_stride) as isize);
    }

    fn rewind(&mut self, steps: u64, step: &Loop) {
        self.src =
            self.src.wrapping_offset((steps as i64).wrapping_mul(step.src_stride).wrapping_neg() as isize);
        self.dst =
            self.dst.wrapping_offset((steps as i64).wrapping_mul(step.dst_stride).wrapping_neg() as isize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn step(count: u64, src_stride: i64, dst_stride: i64) -> Loop {
        Loop { count, src_stride, dst_stride }
    }

    #[test]
    fn extents_and_counts() {
        let nest = CopyNest::new(4, &[step(3, 100, -10), step(2, 8, 0)]).unwrap();
        assert_eq!((nest.num_runs(), nest.total_bytes()), (6, 24));
        assert_eq!((nest.src_extent(), nest.dst_extent()), ((0, 212), (-20, 4)));
        let nest = CopyNest::new(4, &[]).unwrap();
        assert_eq!((nest.num_runs(), nest.src_extent()), (1, (0, 4)));
        let nest = CopyNest::new(4, &[step(u64::MAX, i64::MAX, 1), step(0, 0, 0)]).unwrap();
        assert_eq!((nest.num_runs(), nest.src_extent(), nest.loops().len()), (0, (0, 0), 2));
    }

    #[test]
    fn what_cannot_be_walked_is_refused() {
        assert_eq!(CopyNest::new(0, &[]), Err(NestError::EmptyRun));
        assert_eq!(CopyNest::new(1, &[step(1, 0, 0); 7]), Err(NestError::TooManyLoops { loops: 7 }));
        assert_eq!(CopyNest::new(usize::MAX, &[]), Err(NestError::Overflow { index: 0 }));
        let wide = step(1 << 40, 1, 1);
        assert_eq!(CopyNest::new(1, &[wide, wide]), Err(NestError::Overflow { index: 1 }));
        assert_eq!(CopyNest::new(1, &[step(3, i64::MAX, 0)]), Err(NestError::Overflow { index: 0 }));
        assert_eq!(CopyNest::new(1, &[step(3, 0, i64::MIN)]), Err(NestError::Overflow { index: 0 }));
    }
}
