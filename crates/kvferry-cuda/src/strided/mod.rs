//! Strided copies by a kernel: validated once, launched many times.

mod ids;
mod pairs;
mod table;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use kvferry_host::Owner;
use kvferry_kernels::{Ids, Link, ParamBuffer, StridedCopyPlan, StridedShape};

pub use ids::{BadId, BadIdReport, DeviceIds};
pub use pairs::{PairLease, PairRing, PairTable};

use crate::context::ContextGuard;
use crate::error::{CudaError, Result, Side};
use crate::flight::Flight;
use crate::gpu::{Gpu, StreamHandle};
use crate::memory::{GpuMemory, device_alias};
use table::BaseTable;

/// A strided copy between two sets of memory, checked once: every byte that any legal id reaches lies inside its region,
/// the destination may be written, and the device can address both sides. Launches check ids and nothing else.
///
/// Destinations that overlap, each other or a source, are the caller's business: their bytes are then unspecified.
pub struct StridedCopy {
    gpu: Arc<Gpu>,
    plan: StridedCopyPlan,
    blocks: [u64; 2],
    bases: BaseTable,
    inline_pairs: usize,
    /// Most pairs of one kernel.
    most_pairs: u32,
    /// Keeps both sides allocated: a flight holds the copy.
    _owners: Vec<Owner>,
}

impl fmt::Debug for StridedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StridedCopy")
            .field("gpu", &self.gpu)
            .field("plan", &self.plan)
            .field("bases", &self.bases)
            .finish_non_exhaustive()
    }
}

thread_local! {
    /// Parameters on their way to the driver, which copies them during the launch.
    static PARAMS: RefCell<ParamBuffer> = RefCell::default();
}

impl StridedCopy {
    /// Checks and prepares the copy of `shape` from `src` to `dst` (one entry per region) by kernels of `gpu`. Peer access
    /// is enabled where a side lies on another device. Tables of more regions than fit into kernel parameters are
    /// uploaded here: the call may wait for that, and does not for other work.
    ///
    /// # Errors
    /// [`CudaError::Regions`], [`CudaError::OutOfReach`], [`CudaError::ReadOnly`], [`CudaError::PeerAccess`],
    /// [`CudaError::AliasDiffers`], [`CudaError::Shape`], or the driver's refusal. [`CudaError::NoKernels`] in a build
    /// without.
    pub fn new(
        gpu: &Arc<Gpu>,
        shape: &StridedShape,
        src: &[GpuMemory],
        dst: &[GpuMemory],
    ) -> Result<Arc<StridedCopy>> {
        StridedCopy::in_parts(gpu, shape, src, dst, u32::MAX)
    }

    /// [`new`](Self::new), with at most `most_pairs` pairs in one kernel: for tests of what else takes billions of bytes.
    #[doc(hidden)]
    pub fn in_parts(
        gpu: &Arc<Gpu>,
        shape: &StridedShape,
        src: &[GpuMemory],
        dst: &[GpuMemory],
        most_pairs: u32,
    ) -> Result<Arc<StridedCopy>> {
        let sides = [(Side::Source, &shape.src, src), (Side::Destination, &shape.dst, dst)];
        for (side, shape, memory) in sides {
            if shape.regions != memory.len() as u64 {
                return Err(CudaError::Regions { side, asked: shape.regions, has: memory.len() as u64 });
            }
        }
        if let Some(region) = dst.iter().position(|memory| !memory.writable()) {
            return Err(CudaError::ReadOnly { region });
        }
        let on_host = src.iter().chain(dst).any(|memory| memory.ordinal().is_none());
        let link = if on_host { Link::Pcie } else { Link::Gpu };
        let plan = StridedCopyPlan::new(shape, alignment(src), alignment(dst))?.with_link(link);
        let reach = [(Side::Source, src, plan.src_reach()), (Side::Destination, dst, plan.dst_reach())];
        for (side, memory, needs) in reach {
            if let Some(region) = memory.iter().position(|memory| memory.len() < needs) {
                return Err(CudaError::OutOfReach { side, region, needs, has: memory[region].len() });
            }
        }
        if !gpu.has_kernels() {
            return Err(CudaError::NoKernels);
        }
        reachable(gpu, src.iter().chain(dst))?;
        let bases = BaseTable::new(gpu, plan.inline_bases(), src, dst)?;
        let inline_pairs = plan.inline_pairs();
        let most_pairs = plan.max_pairs().min(most_pairs).max(1);
        let _owners = owners(src.iter().chain(dst));
        let blocks = [shape.src.blocks, shape.dst.blocks];
        Ok(Arc::new(StridedCopy {
            gpu: Arc::clone(gpu),
            plan,
            blocks,
            bases,
            inline_pairs,
            most_pairs,
            _owners,
        }))
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// CTAs beyond which the copy gets no faster, as measured on an H200: a few across PCIe, four per multiprocessor within
    /// the GPU. Between two GPUs far fewer saturate the link (16).
    pub fn enough_ctas(&self) -> u32 {
        self.plan.enough_ctas(self.gpu.sm_count())
    }

    /// Most pairs that [`launch`](Self::launch) takes.
    pub fn inline_pairs(&self) -> usize {
        self.inline_pairs
    }

    /// Puts the copy of `pairs` (source id in the low half, destination id in the high half) on `stream`, in one kernel
    /// of at most `max_ctas` CTAs, the ids inside its parameters. No pairs: nothing is launched.
    ///
    /// # Errors
    /// [`CudaError::BlockId`], [`CudaError::TooManyPairs`] beyond [`inline_pairs`](Self::inline_pairs), all before
    /// anything is launched; a guard, stream or flight of another device; the driver's refusal.
    pub fn launch(
        self: &Arc<Self>,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        pairs: &[u64],
        max_ctas: u32,
        flight: &mut Flight,
    ) -> Result<()> {
        if pairs.len() > self.inline_pairs {
            let (pairs, limit) = (pairs.len() as u64, self.inline_pairs as u64);
            return Err(CudaError::TooManyPairs { pairs, limit });
        }
        pairs::check(pairs, self.blocks)?;
        self.enqueue(cx, stream, pairs.len(), max_ctas, flight, |first, count| {
            Ids::Inline(&pairs[first..first + count])
        })
    }

    /// As [`launch`](Self::launch), with the pairs of a table, which is uploaded first if it was not. Long tables take
    /// several kernels.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn launch_table(
        self: &Arc<Self>,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        table: &PairTable,
        max_ctas: u32,
        flight: &mut Flight,
    ) -> Result<()> {
        table.check(self.blocks)?;
        let base = table.ready(&self.gpu, cx, stream, flight)?;
        self.enqueue(cx, stream, table.len(), max_ctas, flight, |first, _| {
            Ids::Table(base + 8 * first as u64)
        })
    }

    /// As [`launch`](Self::launch), with the first `count` ids of two arrays on the device, read and checked when the
    /// kernel runs: a pair with a bad id is skipped, and the first bad one is found in `report` when the work is done.
    ///
    /// # Errors
    /// [`CudaError::TooManyPairs`] if an array is shorter than `count`; otherwise as [`launch`](Self::launch), without
    /// the ids, which nobody has read yet.
    #[expect(clippy::too_many_arguments, reason = "a launch has this many facts")]
    pub fn launch_device_ids(
        self: &Arc<Self>,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        src: &DeviceIds,
        dst: &DeviceIds,
        count: u32,
        report: &Arc<BadIdReport>,
        max_ctas: u32,
        flight: &mut Flight,
    ) -> Result<()> {
        for ids in [src, dst] {
            if u64::from(count) > u64::from(ids.len()) {
                return Err(CudaError::TooManyPairs { pairs: count.into(), limit: ids.len().into() });
            }
            ids.reachable(&self.gpu)?;
        }
        let per_launch = self.most_pairs;
        let slots = report.reserve(&self.gpu, count, per_launch)?;
        flight.hold(Arc::clone(report) as Owner);
        flight.hold(src.owner());
        flight.hold(dst.owner());
        self.enqueue(cx, stream, count as usize, max_ctas, flight, |first, _| Ids::Separate {
            src: src.addr_of(first),
            src_width: src.width(),
            dst: dst.addr_of(first),
            dst_width: dst.width(),
            report: slots + (first / per_launch as usize) as u64 * ids::SLOT_BYTES,
        })
    }

    /// Launches `count` pairs, as many kernels as they need. `ids` names the ids of a stretch: its first pair and length.
    fn enqueue<'a>(
        self: &Arc<Self>,
        cx: &ContextGuard<'_>,
        stream: StreamHandle,
        count: usize,
        max_ctas: u32,
        flight: &mut Flight,
        ids: impl Fn(usize, usize) -> Ids<'a>,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let handle = flight.board(&self.gpu, cx, stream)?;
        flight.hold(Arc::clone(self) as Owner);
        let most = self.most_pairs as usize;
        PARAMS.with_borrow_mut(|buffer| {
            let mut first = 0;
            while first < count {
                let len = most.min(count - first);
                let ids = ids(first, len);
                let words =
                    self.bases.inline_words() + if let Ids::Inline(pairs) = &ids { pairs.len() } else { 0 };
                let launch = self.plan.launch(len as u32, words, self.gpu.sm_count(), max_ctas)?;
                let params = launch.write_params(self.bases.for_kernel(), ids, buffer)?;
                // SAFETY: the context is current and the stream one of it (`board`). The parameters are those of this
                // kernel. Every byte it reaches was found inside a region (`new`) for every legal id, and ids are legal:
                // checked above, or by the kernel itself. The flight holds this copy, so all regions, tables and the
                // kernel itself live until the stream has done the work.
                unsafe {
                    self.gpu.kernels().launch(launch.kernel, launch.geometry, params.as_ptr(), handle)
                }?;
                first += len;
            }
            Ok(())
        })
    }
}

/// The largest power of two up to 16 that divides every address.
fn alignment(memory: &[GpuMemory]) -> u64 {
    let bits = memory.iter().fold(16, |bits, memory| bits | memory.addr());
    1 << bits.trailing_zeros()
}

/// Makes sure that kernels of `gpu` can address all of `memory`, under the addresses we know.
fn reachable<'a>(gpu: &Gpu, memory: impl Iterator<Item = &'a GpuMemory>) -> Result<()> {
    let _current = gpu.enter()?;
    for memory in memory {
        match memory.ordinal() {
            Some(ordinal) => gpu.peer_access(ordinal)?,
            None if memory.is_empty() => {}
            None => {
                let (addr, alias) = (memory.addr(), device_alias(memory.addr())?);
                if alias != addr {
                    return Err(CudaError::AliasDiffers { addr, alias });
                }
            }
        }
    }
    Ok(())
}

/// The owners of some memory, each once: layouts of many regions often have one.
fn owners<'a>(memory: impl Iterator<Item = &'a GpuMemory>) -> Vec<Owner> {
    let mut owners: Vec<Owner> = Vec::new();
    for memory in memory {
        if !owners.last().is_some_and(|last| Arc::ptr_eq(last, memory.owner())) {
            owners.push(Arc::clone(memory.owner()));
        }
    }
    owners
}
