//! Pieces as the copy engine takes them: boxes of rows and layers with pitches.

use kvferry_kernels::ExchangeLoop;

use crate::error::{CudaError, Result};
use crate::raw::{self, CUDA_MEMCPY2D_st, CUDA_MEMCPY3D_st, CUstream};

/// Largest pitch that every driver takes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH` is this on all GPUs so far).
const MOST_PITCH: u64 = 0x7FFF_FFFF;
/// Most copies that a call is worth: beyond it the kernel is the better engine by far.
const MOST_COPIES: usize = 4096;

/// One copy of `layers` times `rows` runs of `width` bytes, relative to a source and a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyBox {
    pub(super) src: i64,
    pub(super) dst: u64,
    pub(super) width: u64,
    pub(super) rows: u64,
    pub(super) layers: u64,
    /// Bytes per row and layer.
    src_pitch: u64,
    dst_pitch: u64,
    /// Rows per layer.
    src_height: u64,
    dst_height: u64,
}

/// Appends the boxes that make up a piece; false if it takes too many.
pub(super) fn cut(src: i64, dst: u64, run: u64, loops: &[ExchangeLoop], out: &mut Vec<CopyBox>) -> bool {
    if run == 0 || loops.iter().any(|l| l.count == 0) {
        return true;
    }
    let mut one = CopyBox {
        src,
        dst,
        width: run,
        rows: 1,
        layers: 1,
        src_pitch: run,
        dst_pitch: run,
        src_height: 1,
        dst_height: 1,
    };
    let mut outer = loops;
    if let Some((inner, rest)) = outer.split_last()
        && let Some(pitch) = pitches(inner, run)
    {
        outer = rest;
        (one.rows, one.src_height, one.dst_height) = (inner.count, inner.count, inner.count);
        (one.src_pitch, one.dst_pitch) = pitch;
        if let Some((next, rest)) = outer.split_last()
            && let Some(heights) = heights(next, pitch, inner.count)
        {
            outer = rest;
            one.layers = next.count;
            (one.src_height, one.dst_height) = heights;
        }
    }
    repeat(one, outer, out)
}

/// Pitches of a loop over runs, if the engine takes them.
fn pitches(l: &ExchangeLoop, run: u64) -> Option<(u64, u64)> {
    let src = u64::try_from(l.src_stride).ok()?;
    let fits = |pitch| (run..=MOST_PITCH).contains(&pitch);
    (fits(src) && fits(l.dst_stride)).then_some((src, l.dst_stride))
}

/// Rows from one layer to the next, if the steps of a loop are whole rows and layers do not overlap.
fn heights(l: &ExchangeLoop, (src, dst): (u64, u64), rows: u64) -> Option<(u64, u64)> {
    let step = u64::try_from(l.src_stride).ok()?;
    let whole = step.is_multiple_of(src) && l.dst_stride.is_multiple_of(dst);
    let heights = (step / src, l.dst_stride / dst);
    (whole && heights.0 >= rows && heights.1 >= rows).then_some(heights)
}

fn repeat(one: CopyBox, loops: &[ExchangeLoop], out: &mut Vec<CopyBox>) -> bool {
    let Some((outer, inner)) = loops.split_first() else {
        out.push(one);
        return out.len() <= MOST_COPIES;
    };
    (0..outer.count).all(|at| {
        let src = one.src.wrapping_add((at as i64).wrapping_mul(outer.src_stride));
        let dst = one.dst.wrapping_add(at.wrapping_mul(outer.dst_stride));
        repeat(CopyBox { src, dst, ..one }, inner, out)
    })
}

impl CopyBox {
    /// Rows at a distance from each other on both sides.
    pub(super) const fn rows(width: u64, rows: u64, src_pitch: u64, dst_pitch: u64) -> CopyBox {
        let (src, dst, layers) = (0, 0, 1);
        CopyBox { src, dst, width, rows, layers, src_pitch, dst_pitch, src_height: rows, dst_height: rows }
    }

    /// Puts the copy on `stream`.
    ///
    /// # Safety
    /// All bytes of the box from `src` and to `dst` are device memory that the current context can reach, until the
    /// stream has done the copy; the stream is one of that context.
    pub(super) unsafe fn enqueue(&self, src: u64, dst: u64, stream: CUstream) -> Result<()> {
        let (src, dst) = (src.wrapping_add_signed(self.src), dst.wrapping_add(self.dst));
        if self.rows == 1 && self.layers == 1 {
            // SAFETY: the caller's promise, for one run.
            return unsafe { raw::cuMemcpyAsync(dst, src, self.width as usize, stream) };
        }
        if self.layers == 1 {
            let copy = self.plane(src, dst);
            // SAFETY: the caller's promise; the description lives through the call.
            return unsafe { raw::cuMemcpy2DAsync_v2(&copy, stream) };
        }
        let copy = self.solid(src, dst);
        // SAFETY: as above.
        unsafe { raw::cuMemcpy3DAsync_v2(&copy, stream) }
    }

    fn plane(&self, src: u64, dst: u64) -> CUDA_MEMCPY2D_st {
        CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: UNIFIED,
            srcHost: std::ptr::null(),
            srcDevice: src,
            srcArray: std::ptr::null_mut(),
            srcPitch: self.src_pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: UNIFIED,
            dstHost: std::ptr::null_mut(),
            dstDevice: dst,
            dstArray: std::ptr::null_mut(),
            dstPitch: self.dst_pitch as usize,
            WidthInBytes: self.width as usize,
            Height: self.rows as usize,
        }
    }

    fn solid(&self, src: u64, dst: u64) -> CUDA_MEMCPY3D_st {
        CUDA_MEMCPY3D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: UNIFIED,
            srcHost: std::ptr::null(),
            srcDevice: src,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: self.src_pitch as usize,
            srcHeight: self.src_height as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: UNIFIED,
            dstHost: std::ptr::null_mut(),
            dstDevice: dst,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: self.dst_pitch as usize,
            dstHeight: self.dst_height as usize,
            WidthInBytes: self.width as usize,
            Height: self.rows as usize,
            Depth: self.layers as usize,
        }
    }
}

/// Addresses say themselves where they are.
const UNIFIED: cudarc::driver::sys::CUmemorytype = cudarc::driver::sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;

/// Bytes that a piece touches on one side: lowest offset and one past the highest. `None` for a piece of no bytes.
///
/// # Errors
/// [`CudaError::Argument`] for a piece that leaves 62 bits.
pub(super) fn span(
    start: i128,
    run: u64,
    loops: impl Iterator<Item = (u64, i128)>,
) -> Result<Option<(i64, i64)>> {
    let (mut low, mut high) = (start, start + i128::from(run));
    let mut empty = run == 0;
    for (count, stride) in loops {
        empty |= count == 0;
        let far = (i128::from(count) - 1).max(0).saturating_mul(stride);
        low = low.saturating_add(far.min(0));
        high = high.saturating_add(far.max(0));
    }
    if empty {
        return Ok(None);
    }
    if low < -LIMIT || high > LIMIT {
        let (what, rule) = ("the bytes between two ends of a piece", "they must fit 62 bits");
        return Err(CudaError::Argument { what, value: high.saturating_sub(low) as u64, rule });
    }
    Ok(Some((low as i64, high as i64)))
}

const LIMIT: i128 = 1 << 62;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Offsets (source, destination) of every run of a box, with its width.
    fn runs(b: &CopyBox) -> Vec<(i64, u64, u64)> {
        let row = |layer: u64, row: u64| {
            let src = b.src + ((layer * b.src_height + row) * b.src_pitch) as i64;
            (src, b.dst + (layer * b.dst_height + row) * b.dst_pitch, b.width)
        };
        (0..b.layers).flat_map(|layer| (0..b.rows).map(move |at| row(layer, at))).collect()
    }

    fn naive(src: i64, dst: u64, run: u64, loops: &[ExchangeLoop]) -> Vec<(i64, u64, u64)> {
        let Some((outer, inner)) = loops.split_first() else { return vec![(src, dst, run)] };
        (0..outer.count)
            .flat_map(|at| naive(src + at as i64 * outer.src_stride, dst + at * outer.dst_stride, run, inner))
            .collect()
    }

    #[test]
    fn batch_tokens_and_heads_are_one_copy() {
        // [2, 100, 8 of 32 heads, 64] to a result of 300 tokens.
        let loops = [
            ExchangeLoop { count: 2, src_stride: 100 * 4096, dst_stride: 300 * 1024 },
            ExchangeLoop { count: 100, src_stride: 4096, dst_stride: 1024 },
        ];
        let mut boxes = Vec::new();
        assert!(cut(1024, 2048, 1024, &loops, &mut boxes));
        assert_eq!(boxes.len(), 1);
        assert_eq!((boxes[0].rows, boxes[0].layers), (100, 2));
    }

    #[test]
    fn what_the_engine_cannot_take_is_counted() {
        let many = [ExchangeLoop { count: 5000, src_stride: -64, dst_stride: 64 }];
        assert!(!cut(0, 0, 64, &many, &mut Vec::new()));
        let mut few = Vec::new();
        let repeated = [ExchangeLoop { count: 7, src_stride: 0, dst_stride: 64 }];
        assert!(cut(0, 0, 64, &repeated, &mut few));
        assert_eq!(few.len(), 7);
        assert!(cut(0, 0, 0, &many, &mut few) && few.len() == 7);
    }

    proptest! {
        #[test]
        fn boxes_are_the_runs_of_the_piece(
            run in 1_u64..40,
            loops in prop::collection::vec((1_u64..6, -200_i64..400, 1_u64..400), 0..4),
        ) {
            let loops: Vec<_> = loops
                .into_iter()
                .map(|(count, src_stride, dst_stride)| ExchangeLoop { count, src_stride, dst_stride })
                .collect();
            let mut boxes = Vec::new();
            prop_assert!(cut(-3, 5, run, &loops, &mut boxes));
            for b in &boxes {
                prop_assert!(b.rows == 1 || (b.src_pitch >= run && b.dst_pitch >= run));
                prop_assert!(b.layers == 1 || (b.src_height >= b.rows && b.dst_height >= b.rows));
            }
            let mut found: Vec<_> = boxes.iter().flat_map(runs).collect();
            let mut wanted = naive(-3, 5, run, &loops);
            found.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(found, wanted);
        }

        #[test]
        fn spans_hold_every_run(
            run in 1_u64..40,
            loops in prop::collection::vec((1_u64..6, -200_i64..400), 0..4),
        ) {
            let all: Vec<_> = loops
                .iter()
                .map(|&(count, src_stride)| ExchangeLoop { count, src_stride, dst_stride: 1 })
                .collect();
            let runs = naive(-3, 0, run, &all);
            let low = runs.iter().map(|r| r.0).min().unwrap();
            let high = runs.iter().map(|r| r.0 + run as i64).max().unwrap();
            let found = span(-3, run, loops.iter().map(|&(count, stride)| (count, stride.into())));
            prop_assert_eq!(found.unwrap(), Some((low, high)));
        }
    }
}
