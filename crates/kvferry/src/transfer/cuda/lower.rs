//! A pair of bound layouts as the engines want it: made once per pair and GPU, kept with the pair.

use std::sync::{Arc, Mutex};

use kvferry_cuda::{BatchSides, Gpu, GpuMemory, StridedCopy, StridedLoop, StridedShape, StridedSide, Walk};
use kvferry_layout::{Axis, BlockStep, PairPlan, Side, View};

use super::device::CudaDevice;
use super::stage::{DEVICE_SLOTS, DeviceStage};
use crate::error::Result;
use crate::memory::Region;
use crate::physical::PhysicalLayout;
use crate::transfer::lock;
use crate::transfer::strategy::TransferStrategy;

/// Regions of both sides as the GPU addresses them, and what was made of them so far.
pub(crate) struct Lowered {
    pub(crate) src: Vec<GpuMemory>,
    pub(crate) dst: Vec<GpuMemory>,
    /// The same for the copy engine.
    pub(crate) sides: Arc<BatchSides>,
    kernel: Mutex<Option<Arc<StridedCopy>>>,
    staged: Mutex<Option<Arc<Staged>>>,
}

/// Most blocks of a staged group.
const MOST_BLOCKS: u32 = 1 << 20;

/// The two hops of a copy through the device ring.
pub(crate) struct Staged {
    pub(crate) stage: Arc<DeviceStage>,
    /// Between the host side and the packed blocks of a slot.
    pub(crate) hop: PairPlan,
    /// The regions of the hop, per slot.
    pub(crate) sides: Vec<Arc<BatchSides>>,
    /// Between a slot and the device side, per slot.
    pub(crate) kernels: Vec<Arc<StridedCopy>>,
    /// Blocks per slot.
    pub(crate) group: usize,
}

/// Regions of a layout as a GPU addresses them.
fn visible(layout: &PhysicalLayout) -> Result<Vec<GpuMemory>> {
    let of = |region: &Region| match region {
        Region::Host(region) => Ok(GpuMemory::of_host(region)?),
        Region::Device(region) => Ok(GpuMemory::of_device(region)),
    };
    layout.regions().iter().map(of).collect()
}

impl Lowered {
    pub(crate) fn new(src: &PhysicalLayout, dst: &PhysicalLayout) -> Result<Lowered> {
        Ok(Lowered::between(visible(src)?, visible(dst)?))
    }

    fn between(src: Vec<GpuMemory>, dst: Vec<GpuMemory>) -> Lowered {
        let sides = BatchSides::new(&src, &dst);
        Lowered { src, dst, sides, kernel: Mutex::new(None), staged: Mutex::new(None) }
    }

    /// A pair of which one side is a slot of pinned memory.
    pub(crate) fn of_slot(slot: &GpuMemory, device: &PhysicalLayout, up: bool) -> Result<Lowered> {
        let (slot, device) = (vec![slot.clone()], visible(device)?);
        let (src, dst) = if up { (slot, device) } else { (device, slot) };
        Ok(Lowered::between(src, dst))
    }

    /// The strided copy of the whole pair.
    pub(crate) fn kernel(
        &self,
        gpu: &Arc<Gpu>,
        pair: &PairPlan,
        strategy: TransferStrategy,
    ) -> Result<Arc<StridedCopy>> {
        let mut kernel = lock(&self.kernel);
        if let Some(kernel) = &*kernel {
            return Ok(kernel.clone());
        }
        let shaped = shape(pair, walk(strategy), (&self.src, &self.dst));
        let made = StridedCopy::new(gpu, &shaped, &self.src, &self.dst)?;
        Ok(kernel.insert(made).clone())
    }

    /// The pair in two hops through the device ring; a block is known to fit a slot.
    pub(crate) fn staged(
        &self,
        device: &CudaDevice,
        pair: &PairPlan,
        strategy: TransferStrategy,
    ) -> Result<Arc<Staged>> {
        let mut staged = lock(&self.staged);
        if let Some(staged) = &*staged {
            return Ok(staged.clone());
        }
        let stage = device.stage().clone();
        let up = strategy == TransferStrategy::CudaAsyncH2D;
        let host = if up { Side::Source } else { Side::Destination };
        let group = (stage.slot(0).len() / pair.block_bytes()).clamp(1, u64::from(MOST_BLOCKS));
        let (first, second) = pair.through_stage(host, group)?;
        let (hop, inner) = if up { (first, second) } else { (second, first) };
        let ring = |slot: usize| std::slice::from_ref(stage.slot(slot));
        let ends = if up { (ring(0), &self.dst[..]) } else { (&self.src[..], ring(0)) };
        let shape = shape(&inner, walk(strategy), ends);
        let kernel = |slot: usize| {
            let (src, dst) = if up { (ring(slot), &self.dst[..]) } else { (&self.src[..], ring(slot)) };
            StridedCopy::new(&device.gpu, &shape, src, dst)
        };
        let kernels = (0..DEVICE_SLOTS).map(kernel).collect::<std::result::Result<Vec<_>, _>>()?;
        // Ids of a group go into the kernel's parameters.
        let fits = kernels.first().map_or(1, |kernel: &Arc<StridedCopy>| kernel.inline_pairs());
        let group = (group as usize).min(fits).max(1);
        let sides = |slot: usize| {
            if up { BatchSides::new(&self.src, ring(slot)) } else { BatchSides::new(ring(slot), &self.dst) }
        };
        let sides = (0..DEVICE_SLOTS).map(sides).collect();
        let made = Arc::new(Staged { stage, hop, sides, kernels, group });
        Ok(staged.insert(made).clone())
    }
}

/// Threads walk along the side that is behind PCIe: there, neighbouring accesses become full packets. Between GPU
/// memories it is the destination, whose partial writes would cost reads.
pub(crate) const fn walk(strategy: TransferStrategy) -> Walk {
    match strategy {
        TransferStrategy::CudaAsyncH2D => Walk::Source,
        _ => Walk::Destination,
    }
}

/// The numbers of a pair that the kernel needs, for regions of so many.
fn shape(pair: &PairPlan, walk: Walk, (src, dst): (&[GpuMemory], &[GpuMemory])) -> StridedShape {
    let (src_step, dst_step) = pair.steps();
    StridedShape {
        src: side(pair.src(), src_step, src.len()),
        dst: side(pair.dst(), dst_step, dst.len()),
        loops: pair
            .loops()
            .iter()
            .map(|l| StridedLoop {
                count: l.count,
                src_stride: l.src_stride,
                dst_stride: l.dst_stride,
                src_region: l.src_region,
                dst_region: l.dst_region,
            })
            .collect(),
        run_bytes: pair.run_bytes(),
        walk,
    }
}

fn side(view: &View, step: BlockStep, regions: usize) -> StridedSide {
    let start = view.start();
    StridedSide {
        start_region: start.region,
        start_offset: start.offset,
        parts: step.parts,
        part_stride: step.part_stride,
        block_stride: step.stride,
        block_region: step.region_stride,
        blocks: view.extent(Axis::Block),
        regions: regions as u64,
    }
}
