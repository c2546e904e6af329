//! Do regions of one layout share bytes? Exact, in time independent of the number of blocks.

use crate::axis::Axis;
use crate::layout::{Layout, RegionSpan};
use crate::view::View;

impl View {
    /// Whether a copy of this view's bytes, `delta` bytes further on, meets the view itself.
    ///
    /// Both cover the offsets Σ kᵢ·strideᵢ, so they meet where some Σ dᵢ·strideᵢ with |dᵢ| < extentᵢ comes closer to
    /// `delta` than an element is wide. Every axis steps past all that the axes inside it reach (a view's invariant),
    /// so for each axis, outermost first, at most two dᵢ can still lead there.
    fn meets_shifted(&self, delta: u64) -> bool {
        let step = self.block_step();
        let mut steps: Vec<(i128, i128)> = Axis::IN_BLOCK
            .into_iter()
            .filter(|&axis| self.region_stride(axis) == 0)
            .map(|axis| (i128::from(self.stride(axis)), i128::from(self.extent(axis))))
            .collect();
        if step.region_stride == 0 {
            let stored = self.extent(Axis::Block).div_ceil(step.parts);
            steps.push((i128::from(step.stride), i128::from(stored)));
        }
        // Parts of a block are more of its page axis.
        if step.parts > 1 {
            steps.push((i128::from(step.part_stride), i128::from(step.parts)));
        }
        steps.retain(|&(_, extent)| extent > 1);
        steps.sort_unstable_by(|a, b| b.cmp(a));
        close(&steps, i128::from(delta), i128::from(self.elem_bytes()))
    }
}

/// Whether some Σ dᵢ·strideᵢ, |dᵢ| < extentᵢ, differs from `delta` by less than `width`.
fn close(steps: &[(i128, i128)], delta: i128, width: i128) -> bool {
    let Some((&(stride, extent), inner)) = steps.split_first() else {
        return delta.abs() < width;
    };
    let below = delta.div_euclid(stride);
    [below, below + 1].into_iter().any(|d| d.abs() < extent && close(inner, delta - d * stride, width))
}

impl Layout {
    /// The first two regions that share bytes when bound to `regions`, if any. Interleaved regions (K and V as two
    /// strided parts of one tensor) do not share bytes and are found to be apart.
    ///
    /// Sorts the regions; looks closer only at pairs whose spans meet.
    pub fn aliased_regions(&self, regions: &[RegionSpan]) -> Option<(usize, usize)> {
        let span = self.region_bytes();
        let mut order: Vec<usize> = (0..regions.len()).collect();
        order.sort_by_key(|&index| regions[index].addr);
        for (at, &first) in order.iter().enumerate() {
            let base = regions[first].addr;
            let near = order[at + 1..].iter().take_while(|&&second| regions[second].addr - base < span);
            for &second in near {
                if self.view().meets_shifted(regions[second].addr - base) {
                    return Some((first.min(second), first.max(second)));
                }
            }
        }
        None
    }
}
