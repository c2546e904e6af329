//! Measuring the constants: a few seconds of real transfers with forced engines.

use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::{BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig};

use super::model::{CostModel, Curve, Direction, STAGE_SLOT, Work};
use crate::error::Result;
use crate::memory::MemoryKind;
use crate::physical::PhysicalLayout;
use crate::transfer::{Engine, TransferContext, TransferOptions, TransferStrategy};

/// Run lengths whose rates are measured.
const RUNS: [u64; 8] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 2 << 20];
/// Most copy-engine copies of a measurement: each costs about a microsecond of the host's time.
const MOST_COPIES: u64 = 1024;
/// Repetitions, of which the median counts.
const REPEATS: usize = 5;
/// Bytes of the copy that the overhead is measured with.
const SMALL: u64 = 16 << 10;

/// What to measure with.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Payload of a measurement over PCIe; within GPU memory it is four times as much. Default 64 MiB.
    pub bytes: u64,
    /// Another GPU for the constants between devices; without one the shipped ones are kept.
    pub peer: Option<u32>,
}

impl Default for CalibrateOptions {
    fn default() -> Self {
        CalibrateOptions { bytes: 64 << 20, peer: None }
    }
}

/// Measures the constants of a GPU. Takes a few seconds, wants the GPU and the host idle, and saves nothing: see
/// [`save_calibration`](super::save_calibration).
///
/// # Errors
/// No such GPU, or too little memory: four times `bytes` on the device, twice over, and twice `bytes` pinned.
pub fn calibrate(ordinal: u32, options: &CalibrateOptions) -> Result<CostModel> {
    let ctx = TransferContext::builder().device(ordinal).build()?;
    let mut model = CostModel { source: "calibration on this machine".to_owned(), ..CostModel::h200() };
    let (device, pinned) = (MemoryKind::Device(ordinal), MemoryKind::Pinned);
    let probe = |src, dst, bytes| Probe { ctx: &ctx, src, dst, bytes };
    model.h2d = probe(pinned, device, options.bytes).direction(&model.h2d)?;
    model.d2h = probe(device, pinned, options.bytes).direction(&model.d2h)?;
    model.d2d = probe(device, device, 4 * options.bytes).direction(&model.d2d)?;
    if let Some(peer) = options.peer {
        model.p2p = probe(MemoryKind::Device(peer), device, 4 * options.bytes).direction(&model.p2p)?;
    }
    model.h2d.staged_overhead_us = probe(pinned, device, options.bytes).staged(&model)?;
    model.d2h.staged_overhead_us = probe(device, pinned, options.bytes).staged(&model)?;
    Ok(model)
}

struct Probe<'a> {
    ctx: &'a TransferContext,
    src: MemoryKind,
    dst: MemoryKind,
    bytes: u64,
}

impl Probe<'_> {
    fn direction(&self, usual: &Direction) -> Result<Direction> {
        Ok(Direction {
            kernel: self.curve(Engine::Kernel)?,
            batch: self.curve(Engine::Batch)?,
            ..usual.clone()
        })
    }

    fn curve(&self, engine: Engine) -> Result<Curve> {
        let mut points = Vec::with_capacity(RUNS.len());
        let overhead = self.seconds(engine, SMALL, 1, 4 * REPEATS)?;
        for run in RUNS {
            let most = if engine == Engine::Batch { MOST_COPIES } else { u64::MAX };
            let copies = (self.bytes / run).clamp(1, most);
            let seconds = self.seconds(engine, run, copies, REPEATS)?;
            let moving = (seconds - overhead).max(seconds / 10.0);
            points.push((run, (copies * run) as f64 / moving / 1e9));
        }
        // What the small copy's bytes took is no overhead.
        let rate = Curve { overhead_us: overhead * 1e6, points }.clone();
        let overhead_us =
            (rate.overhead_us - SMALL as f64 / rate.rate(SMALL) * 1e6).max(rate.overhead_us / 4.0);
        Ok(Curve { overhead_us, ..rate })
    }

    /// Median seconds of copying `copies` scattered runs of `run` bytes.
    fn seconds(&self, engine: Engine, run: u64, copies: u64, repeats: usize) -> Result<f64> {
        // Twice as many blocks as are copied, every second one, so that no two join.
        let cfg = LayoutConfig::builder()
            .num_blocks(2 * copies)
            .num_layers(1)
            .outer_dim(1)
            .page_size(1)
            .inner_dim(run);
        let layout = Layout::fully_contiguous(cfg.dtype(Dtype::UInt8).build()?, KvOrder::Nhd)?;
        let src = PhysicalLayout::allocate(layout.clone(), self.src)?;
        let dst = PhysicalLayout::allocate(layout, self.dst)?;
        let ids: Vec<BlockId> = (0..copies as u32).map(|at| BlockId(2 * at)).collect();
        self.median(&src, &dst, &ids, engine, repeats)
    }

    fn median(
        &self,
        src: &Arc<PhysicalLayout>,
        dst: &Arc<PhysicalLayout>,
        ids: &[BlockId],
        engine: Engine,
        repeats: usize,
    ) -> Result<f64> {
        let options = TransferOptions { engine: Some(engine), ..TransferOptions::default() };
        let route = self.ctx.route(src, dst, &options)?;
        route.submit(ids, ids)?.wait(None)?;
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            let start = Instant::now();
            route.submit(ids, ids)?.wait(None)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[repeats / 2])
    }

    /// Microseconds of the staged engine beyond its copies and its last kernel, at 32 KiB runs.
    fn staged(&self, model: &CostModel) -> Result<f64> {
        let (run, parts) = (32 << 10, 64);
        let blocks = (self.bytes / (run * parts)).max(1);
        let cfg =
            LayoutConfig::builder().num_blocks(2 * blocks).num_layers(parts / 2).outer_dim(2).page_size(1);
        let cfg = cfg.inner_dim(run).dtype(Dtype::UInt8).build()?;
        let host = Layout::fully_contiguous(cfg, KvOrder::Nhd)?;
        let device = Layout::layer_separate(cfg, BlockDim::OuterFirst, KvOrder::Nhd)?;
        let up = self.src.is_host();
        let (src, dst) = if up { (host, device) } else { (device, host) };
        let src = PhysicalLayout::allocate(src, self.src)?;
        let dst = PhysicalLayout::allocate(dst, self.dst)?;
        let ids: Vec<BlockId> = (0..blocks as u32).map(|at| BlockId(2 * at)).collect();
        let seconds = self.median(&src, &dst, &ids, Engine::Staged, REPEATS)?;
        let bytes = blocks * run * parts;
        let work = Work { bytes, run, hop_run: run * parts, group: bytes.min(STAGE_SLOT) };
        let strategy = TransferStrategy::between(self.src, self.dst);
        let mut bare = model.clone();
        for direction in [&mut bare.h2d, &mut bare.d2h] {
            direction.staged_overhead_us = 0.0;
        }
        let moving = bare.predict(Engine::Staged, strategy, &work).unwrap_or(0.0);
        Ok(((seconds - moving) * 1e6).max(5.0))
    }
}
