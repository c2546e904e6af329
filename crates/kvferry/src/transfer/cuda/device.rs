//! What a context keeps per GPU: streams, staging memory, and the ring for long id lists.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kvferry_cuda::{CudaError, Gpu, PairRing, Stream, StreamHandle};

use super::expect::{Expected, Forecast};
use super::lanes::Lanes;
use super::reports::Reports;
use super::stage::{DeviceStage, PinnedStage};
use crate::calibrate::CostModel;
use crate::error::{Error, Result};
use crate::memory::MemoryKind;
use crate::transfer::lock;
use crate::transfer::strategy::TransferStrategy;

/// Streams of one direction: enough to keep several transfers apart, few enough to share the hardware's queues.
const STREAMS: usize = 4;
/// Id pairs of one chunk of the ring for lists that do not fit into a kernel's parameters. Few enough that the first
/// kernel starts while the rest of a long list is written, many enough that a kernel more costs nothing.
pub(super) const CHUNK_PAIRS: usize = 32 << 10;
/// Bytes of those, at eight a pair: 256 KiB.
const CHUNK_BYTES: u64 = CHUNK_PAIRS as u64 * 8;

/// Memory a context may take beyond its layouts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Device memory per GPU: staging ring and mirrors of long id lists.
    pub(crate) staging_bytes: u64,
    /// Pinned memory per GPU: long id lists and the ring for pageable memory.
    pub(crate) pinned_bytes: u64,
}

impl Limits {
    /// Chunks of the id ring: a quarter of the pinned memory, and no more than a sixteenth of the device's.
    fn chunks(self) -> usize {
        (self.pinned_bytes / 4 / CHUNK_BYTES).min(self.staging_bytes / 16 / CHUNK_BYTES).max(2) as usize
    }

    /// Bytes of all of them, pinned and as many on the device.
    fn chunk_bytes(self) -> u64 {
        self.chunks() as u64 * CHUNK_BYTES
    }

    fn stage_bytes(self) -> u64 {
        self.staging_bytes.saturating_sub(self.chunk_bytes())
    }

    fn bounce_bytes(self) -> u64 {
        self.pinned_bytes.saturating_sub(self.chunk_bytes())
    }
}

/// Round robin over a few streams.
struct Turn {
    streams: Vec<Stream>,
    next: AtomicUsize,
}

impl Turn {
    fn new(gpu: &Arc<Gpu>) -> Result<Turn> {
        let streams =
            (0..STREAMS).map(|_| Stream::new(gpu)).collect::<std::result::Result<_, CudaError>>()?;
        Ok(Turn { streams, next: AtomicUsize::new(0) })
    }

    fn take(&self, ordered: bool) -> StreamHandle {
        // First-in first-out per direction is one stream.
        let turn = if ordered { 0 } else { self.next.fetch_add(1, Ordering::Relaxed) };
        self.streams[turn % self.streams.len()].handle()
    }
}

/// One GPU of a context.
pub(crate) struct CudaDevice {
    pub(crate) gpu: Arc<Gpu>,
    h2d: Turn,
    d2h: Turn,
    d2d: Turn,
    /// Kernels between the ring and the layouts.
    scatter: Turn,
    pub(crate) pairs: Arc<PairRing>,
    /// What long id lists are copied to the device on.
    uploads: Stream,
    pub(crate) reports: Arc<Reports>,
    stage: Arc<DeviceStage>,
    bounce: Arc<PinnedStage>,
    model: Arc<CostModel>,
    /// Jobs to the device, from it, and within or between devices.
    forecasts: [Forecast; 3],
}

impl CudaDevice {
    fn open(ordinal: u32, limits: Limits, model: Option<Arc<CostModel>>) -> Result<Arc<CudaDevice>> {
        let gpu = Gpu::open(ordinal)?;
        let model = model.unwrap_or_else(|| Arc::new(CostModel::of_gpu(gpu.info())));
        let turn = || Turn::new(&gpu);
        let (h2d, d2h, d2d, scatter) = (turn()?, turn()?, turn()?, turn()?);
        let uploads = Stream::new(&gpu)?;
        let reports = Reports::new(&gpu)?;
        // All of it now: allocating may wait for the device, which a submission must not.
        let stage = Arc::new(DeviceStage::new(&gpu, limits.stage_bytes())?);
        let bounce = PinnedStage::new(&gpu, limits.bounce_bytes())?;
        let pairs = PairRing::new(&gpu, CHUNK_PAIRS, limits.chunks(), limits.chunks())?;
        Ok(Arc::new(CudaDevice {
            gpu,
            h2d,
            d2h,
            d2d,
            scatter,
            pairs,
            uploads,
            reports,
            stage,
            bounce,
            model,
            forecasts: Default::default(),
        }))
    }

    /// A stream for the copies of one direction.
    pub(crate) fn stream(&self, strategy: TransferStrategy, ordered: bool) -> StreamHandle {
        match strategy {
            TransferStrategy::CudaAsyncH2D => self.h2d.take(ordered),
            TransferStrategy::CudaAsyncD2H => self.d2h.take(ordered),
            TransferStrategy::CudaAsyncD2D | TransferStrategy::CudaAsyncP2P | TransferStrategy::Memcpy => {
                self.d2d.take(ordered)
            }
        }
    }

    /// When a job of `seconds` should end, behind those of its direction.
    pub(crate) fn expect(&self, strategy: TransferStrategy, seconds: f64) -> Expected {
        let direction = match strategy {
            TransferStrategy::CudaAsyncH2D => 0,
            TransferStrategy::CudaAsyncD2H => 1,
            TransferStrategy::CudaAsyncD2D | TransferStrategy::CudaAsyncP2P | TransferStrategy::Memcpy => 2,
        };
        self.forecasts[direction].expect(seconds)
    }

    /// A stream for kernels between ring and layout.
    pub(crate) fn scatter(&self, ordered: bool) -> StreamHandle {
        self.scatter.take(ordered)
    }

    /// The stream that long id lists are copied to the device on.
    pub(crate) fn uploads(&self) -> StreamHandle {
        self.uploads.handle()
    }

    /// The device ring.
    pub(crate) const fn stage(&self) -> &Arc<DeviceStage> {
        &self.stage
    }

    /// Whether the next slot of the device ring is held by a job that waits for a caller's stream.
    pub(crate) fn stage_held_up(&self) -> bool {
        self.stage.held_up()
    }

    /// Bytes of one slot of the device ring.
    pub(crate) fn stage_slot_bytes(&self) -> u64 {
        self.stage.slot(0).len()
    }

    /// The pinned ring for pageable memory.
    pub(crate) const fn bounce(&self) -> &Arc<PinnedStage> {
        &self.bounce
    }

    /// Bytes of one slot of the pinned ring.
    pub(crate) fn bounce_slot_bytes(&self) -> u64 {
        self.bounce.slots().first().map_or(0, |slot| slot.memory.len())
    }

    pub(crate) const fn model(&self) -> &Arc<CostModel> {
        &self.model
    }
}

/// The GPUs of a context: its own, and those at the other end of its peer copies.
pub(crate) struct Cuda {
    ordinal: u32,
    limits: Limits,
    model: Option<Arc<CostModel>>,
    devices: Mutex<BTreeMap<u32, Arc<CudaDevice>>>,
    pub(crate) lanes: Arc<Lanes>,
}

impl Cuda {
    /// `model` overrides what was calibrated.
    pub(crate) fn open(ordinal: u32, limits: Limits, model: Option<CostModel>) -> Result<Cuda> {
        let model = model.map(Arc::new);
        let device = CudaDevice::open(ordinal, limits, model.clone())?;
        let devices = Mutex::new(BTreeMap::from([(ordinal, device)]));
        Ok(Cuda { ordinal, limits, model, devices, lanes: Arc::default() })
    }

    pub(crate) const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// A GPU of the context; another one than its own is opened when a peer copy first needs it.
    pub(crate) fn device(&self, ordinal: u32) -> Result<Arc<CudaDevice>> {
        let mut devices = lock(&self.devices);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = CudaDevice::open(ordinal, self.limits, self.model.clone())?;
        devices.insert(ordinal, device.clone());
        Ok(device)
    }

    /// The GPU that carries out a copy between two kinds of memory. For a peer copy it is the destination's, whose loads
    /// fetch, unless the caller's stream belongs to the source's.
    pub(crate) fn carrier(
        &self,
        src: MemoryKind,
        dst: MemoryKind,
        stream: Option<StreamHandle>,
    ) -> Result<Arc<CudaDevice>> {
        use MemoryKind::Device;
        let (at, ends) = match (src, dst) {
            (Device(a), Device(b)) => (b, [a, b]),
            (Device(a), _) | (_, Device(a)) => (a, [a, a]),
            _ => (self.ordinal, [self.ordinal; 2]),
        };
        if !ends.contains(&self.ordinal) {
            return Err(Error::Unsupported {
                what: format!("a copy from {src} to {dst} in a context of device {}", self.ordinal),
                why: "a context serves copies to and from its own device".to_owned(),
            });
        }
        let carrier = self.device(at)?;
        let Some(stream) = stream else { return Ok(carrier) };
        // The implicit streams are those of the context's own device.
        let implicit = stream.is_legacy() || stream == StreamHandle::PER_THREAD;
        let owner = if implicit {
            self.ordinal
        } else {
            let cx = carrier.gpu.enter()?;
            carrier.gpu.stream_device(&cx, stream)?
        };
        if owner == at {
            return Ok(carrier);
        }
        if ends.contains(&owner) {
            return self.device(owner);
        }
        Err(Error::InvalidOption {
            option: "stream",
            expected: format!("a stream of device {at}"),
            value: format!("one of device {owner}"),
        })
    }
}
