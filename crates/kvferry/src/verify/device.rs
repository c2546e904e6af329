//! Chunks of device memory: blocking copies of the bytes they span, never the engines that are being checked.

use std::ops::Range;

use kvferry_cuda::DeviceRegion;
use kvferry_layout::Loop;

use crate::error::Result;

/// Bytes between two parts from which on another copy is cheaper than reading them too: a copy costs about 10 µs and
/// then moves some GB/s.
pub(super) const GAP_BYTES: u64 = 64 << 10;
/// Most bytes that are read in one copy for the sake of parts of them.
const SPAN_BYTES: u64 = 4 << 20;

/// How the rows of a chunk lie in device memory: in parts of one copy each, a part in runs with gaps between them.
pub(super) struct Parts {
    /// From part to part; the source is device memory, the destination a dense buffer. Innermost first.
    outer: Vec<Loop>,
    /// From run to run of a part.
    inner: Vec<Loop>,
    /// Bytes of a run.
    run: usize,
    /// Bytes of a part, gaps included.
    span: usize,
    /// Whether a part has gaps.
    gaps: bool,
}

impl Parts {
    /// Parts of a chunk that consists of runs of `run` bytes, `loops` around them.
    pub(super) fn new(run: u64, mut loops: Vec<Loop>) -> Parts {
        loops.sort_by_key(|l| l.src_stride);
        let (mut span, mut bytes, mut joined) = (run, run, 0);
        for l in &loops {
            // Layout invariants keep offsets within 63 bits.
            let longer = span + (l.count - 1) * l.src_stride;
            if l.src_stride > span + GAP_BYTES || longer > SPAN_BYTES {
                break;
            }
            (span, bytes, joined) = (longer, bytes * l.count, joined + 1);
        }
        let outer = loops.split_off(joined);
        Parts { outer, inner: loops, run: run as usize, span: span as usize, gaps: bytes < span }
    }

    /// Reads the chunk at `offset` into `dense`. What `scratch` holds does not matter, before and after.
    pub(super) fn gather(
        &self,
        memory: &DeviceRegion,
        offset: u64,
        dense: &mut [u8],
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        scratch.resize(self.span, 0);
        walk(&self.outer, offset, 0, &mut |part, to| {
            memory.read(part, scratch)?;
            walk(&self.inner, 0, to, &mut |from, to| {
                dense[self.run_at(to)].copy_from_slice(&scratch[self.run_at(from)]);
                Ok(())
            })
        })
    }

    /// Writes `dense` to the chunk at `offset`. Bytes in the gaps are read and written back.
    pub(super) fn scatter(
        &self,
        memory: &DeviceRegion,
        offset: u64,
        dense: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        scratch.resize(self.span, 0);
        walk(&self.outer, offset, 0, &mut |part, from| {
            if self.gaps {
                memory.read(part, scratch)?;
            }
            walk(&self.inner, 0, from, &mut |to, from| {
                scratch[self.run_at(to)].copy_from_slice(&dense[self.run_at(from)]);
                Ok(())
            })?;
            Ok(memory.write(part, scratch)?)
        })
    }

    fn run_at(&self, offset: u64) -> Range<usize> {
        offset as usize..offset as usize + self.run
    }
}

/// Calls `visit` with the two offsets of every step of `loops`, innermost first, from `src` and `dst` on.
fn walk(loops: &[Loop], src: u64, dst: u64, visit: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
    let Some((outermost, inner)) = loops.split_last() else { return visit(src, dst) };
    (0..outermost.count).try_for_each(|step| {
        walk(inner, src + step * outermost.src_stride, dst + step * outermost.dst_stride, visit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(count: u64, src_stride: u64, dst_stride: u64) -> Loop {
        Loop { count, src_stride, dst_stride, ..Loop::default() }
    }

    fn shape(parts: &Parts) -> (usize, usize, usize, bool) {
        (parts.outer.len(), parts.inner.len(), parts.span, parts.gaps)
    }

    #[test]
    fn parts_end_where_a_gap_or_a_span_is_too_long() {
        // Order changes inside one contiguous stretch.
        assert_eq!(
            shape(&Parts::new(256, vec![step(16, 256, 2048), step(8, 4096, 256)])),
            (0, 2, 32768, false)
        );
        assert_eq!(shape(&Parts::new(256, vec![])), (0, 0, 256, false));
        let gap = 256 + GAP_BYTES;
        assert_eq!(shape(&Parts::new(256, vec![step(3, gap, 256)])), (0, 1, 2 * gap as usize + 256, true));
        assert_eq!(shape(&Parts::new(256, vec![step(3, gap + 1, 256)])), (1, 0, 256, false));
        // The far loop is the outer one, wherever it stood.
        assert_eq!(shape(&Parts::new(2, vec![step(3, 1 << 40, 2), step(4, 4, 6)])), (1, 1, 14, true));
        assert_eq!(shape(&Parts::new(1, vec![step(100, 1 << 16, 1)])), (1, 0, 1, false));
        // No run is cut.
        assert_eq!(shape(&Parts::new(5 << 20, vec![step(2, 5 << 20, 5 << 20)])), (1, 0, 5 << 20, false));
    }

    #[test]
    fn every_step_is_visited_once() {
        let mut seen = Vec::new();
        let mut visit = |src, dst| {
            seen.push((src, dst));
            Ok(())
        };
        walk(&[step(3, 1, 10), step(2, 100, 1000)], 5, 7, &mut visit).unwrap();
        assert_eq!(seen, [(5, 7), (6, 17), (7, 27), (105, 1007), (106, 1017), (107, 1027)]);
    }
}
