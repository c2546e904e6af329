//! Which engine carries out a plan, and why.

use std::fmt;
use std::sync::Arc;

use kvferry_host::CopyHint;
use kvferry_layout::{CopyPlan, Side};

use super::host::{hint, last_level_cache};
use super::options::TransferOptions;
use super::strategy::{Engine, TransferStrategy};
use crate::calibrate::{CostModel, STAGE_SLOT, Work};
use crate::error::{Error, Result};
use crate::memory::MemoryKind;

/// Up to here a host copy runs on the calling thread: handing it to another costs more than doing it.
pub(crate) const INLINE_BYTES: u64 = 32 << 10;
/// Runs up to which that holds.
pub(crate) const INLINE_RUNS: u64 = 128;

/// How the host engine runs a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMode {
    /// On the calling thread, before the call returns.
    Inline,
    /// On the context's copy threads.
    Pooled {
        /// Threads of the pool.
        threads: usize,
    },
}

/// An engine that was considered.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The engine.
    pub engine: Engine,
    /// Whether it could carry out the plan.
    pub able: bool,
    /// Seconds it is expected to take, where there is a model of it.
    pub seconds: Option<f64>,
    /// Why, or why not.
    pub reason: String,
}

/// The decision.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Direction.
    pub strategy: TransferStrategy,
    /// The engine.
    pub engine: Engine,
    /// How the host engine runs it, or the host's half of a bounce.
    pub host: HostMode,
    /// Whether the host engine writes around the caches.
    pub hint: CopyHint,
    /// Whether the caller forced the engine.
    pub forced: bool,
    /// CTAs of a kernel that are enough for its direction, within what the caller allows; short rows need a few more.
    pub max_ctas: u32,
    /// Most CTAs of a kernel that the caller allows.
    pub num_sms: Option<u32>,
    facts: Option<Facts>,
}

/// What the decision between GPU engines went by.
#[derive(Clone, Debug)]
struct Facts {
    model: Arc<CostModel>,
    work: Work,
    pageable: bool,
    kernels: Kernels,
    staged: Staged,
}

/// Whether a kernel may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    Able,
    /// Only a kernel may: a graph is being captured, or the ids are on the device.
    Only(&'static str),
}

/// Whether the ring may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Staged {
    Able,
    /// A block is larger than a slot of so many bytes.
    TooLarge(u64),
    /// The ring is between host and device.
    NoHost,
    /// A slot is held by a job that waits for a caller's stream.
    HeldUp,
}

/// What is asked of the choice besides the plan and the options.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// A dependency must be waited for.
    pub(crate) waits: bool,
    /// Copy threads.
    pub(crate) threads: usize,
    /// Of the GPU that carries the copy; `None` for host copies.
    pub(crate) gpu: Option<GpuAsked>,
}

/// The GPU's side of it.
#[derive(Clone, Debug)]
pub(crate) struct GpuAsked {
    pub(crate) model: Arc<CostModel>,
    pub(crate) sm_count: u32,
    pub(crate) stage_slot: u64,
    pub(crate) bounce_slot: u64,
    /// Only the kernel engine will do, for this reason.
    pub(crate) kernel_only: Option<&'static str>,
    pub(crate) held_up: bool,
}

impl GpuAsked {
    /// For a plan without a GPU at hand: the shipped constants and default limits.
    pub(crate) fn by_default() -> GpuAsked {
        GpuAsked {
            model: Arc::new(CostModel::h200()),
            sm_count: 132,
            stage_slot: STAGE_SLOT,
            bounce_slot: 3 << 20,
            kernel_only: None,
            held_up: false,
        }
    }
}

impl Choice {
    /// The same decision for a part of the work, by another engine: for a hop of a transfer.
    pub(crate) fn of_part(&self, engine: Engine, work: Work) -> Choice {
        let facts = self.facts.clone().map(|facts| Facts { work, ..facts });
        Choice { engine, facts, ..self.clone() }
    }

    /// Seconds that the chosen engine is expected to take, where there is a model of it.
    pub fn seconds(&self) -> Option<f64> {
        let facts = self.facts.as_ref()?;
        facts.model.predict(self.engine, self.strategy, &facts.work)
    }

    /// Every engine with its verdict, for people.
    pub fn candidates(&self) -> Vec<Candidate> {
        Engine::ALL.into_iter().map(|engine| self.candidate(engine)).collect()
    }

    fn candidate(&self, engine: Engine) -> Candidate {
        let no = |reason: &str| Candidate { engine, able: false, seconds: None, reason: reason.to_owned() };
        let yes = |reason: String| Candidate { engine, able: true, seconds: None, reason };
        match (engine, &self.facts) {
            (Engine::Disk, _) => return no("neither side is a file"),
            (Engine::Remote, _) => return no("both sides are on this machine"),
            (Engine::Host, None) => return yes(self.host_reason()),
            (_, None) => return no("no GPU memory on either side"),
            (Engine::Host, Some(_)) => return no("the CPU cannot address GPU memory"),
            _ => {}
        }
        let Some(facts) = &self.facts else { return no("no GPU memory on either side") };
        match facts.refusal(engine) {
            Some(reason) => no(&reason),
            None => Candidate {
                seconds: facts.model.predict(engine, self.strategy, &facts.work),
                ..yes(facts.reason(engine, self.max_ctas))
            },
        }
    }

    fn host_reason(&self) -> String {
        match self.host {
            HostMode::Inline => {
                format!("at most {} KiB: copied on the calling thread, at once", INLINE_BYTES >> 10)
            }
            HostMode::Pooled { threads } => {
                let stores = match self.hint {
                    CopyHint::Temporal => "ordinary stores",
                    CopyHint::NonTemporal | CopyHint::Relay => {
                        "streaming stores, as it is too large to stay in the cache"
                    }
                };
                format!("both sides are host memory: {threads} copy thread(s), {stores}")
            }
        }
    }
}

impl Facts {
    /// Why an engine cannot; `None` if it can.
    fn refusal(&self, engine: Engine) -> Option<String> {
        if let Kernels::Only(why) = self.kernels
            && engine != Engine::Kernel
        {
            return Some(why.to_owned());
        }
        match engine {
            Engine::Bounce if !self.pageable => {
                Some("the host memory is pinned, which the GPU addresses itself".to_owned())
            }
            Engine::Kernel | Engine::Batch | Engine::Staged if self.pageable => {
                Some("the host memory is pageable, which the GPU cannot address".to_owned())
            }
            Engine::Staged => match self.staged {
                Staged::Able => None,
                Staged::TooLarge(slot) => {
                    Some(format!("a block is larger than a slot of the device ring, {slot} bytes"))
                }
                Staged::NoHost => Some("both sides are GPU memory, which needs no staging".to_owned()),
                Staged::HeldUp => {
                    Some("the device ring is held by a job that waits for a caller's stream".to_owned())
                }
            },
            Engine::Host | Engine::Disk | Engine::Remote => Some("it does not move GPU memory".to_owned()),
            _ => None,
        }
    }

    fn reason(&self, engine: Engine, max_ctas: u32) -> String {
        match engine {
            Engine::Kernel => format!("runs of {} bytes by at most {max_ctas} CTAs", self.work.run),
            Engine::Batch => {
                format!("one copy-engine copy per run of {} bytes, no multiprocessor", self.work.run)
            }
            Engine::Staged => format!(
                "copies of up to {} bytes between host and device ring, a kernel for the rest",
                self.work.hop_run
            ),
            _ => "copy threads between pageable memory and a pinned ring, the GPU behind it".to_owned(),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.forced { "asked for" } else { "chosen" };
        writeln!(f, "engine: {} ({how}), direction {}", self.engine, self.strategy)?;
        // Engines with one verdict share a line.
        let candidates = self.candidates();
        for (index, candidate) in candidates.iter().enumerate() {
            let same = |other: &&Candidate| other.able == candidate.able && other.reason == candidate.reason;
            if candidates[..index].iter().any(|other| same(&other)) {
                continue;
            }
            let names: Vec<_> = candidates.iter().filter(same).map(|other| other.engine.name()).collect();
            let verdict = if candidate.able { "can" } else { "cannot" };
            write!(f, "  {} {verdict}", names.join(", "))?;
            if let Some(seconds) = candidate.seconds {
                write!(f, ", about {:.1} us", seconds * 1e6)?;
            }
            writeln!(f, ": {}", candidate.reason)?;
        }
        if let Some(facts) = &self.facts {
            writeln!(f, "  times from {}", facts.model.source)?;
        }
        Ok(())
    }
}

/// Direction of a copy between two kinds of memory, checked against the caller's expectation.
pub(crate) fn strategy(
    src: MemoryKind,
    dst: MemoryKind,
    asked: Option<TransferStrategy>,
) -> Result<TransferStrategy> {
    let derived = TransferStrategy::between(src, dst);
    match asked {
        Some(asked) if asked != derived => Err(Error::StrategyMismatch { asked, derived, src, dst }),
        _ => Ok(derived),
    }
}

fn refuse<T>(what: String, why: impl Into<String>) -> Result<T> {
    Err(Error::Unsupported { what, why: why.into() })
}

pub(crate) fn choose(
    plan: &CopyPlan,
    (src, dst): (MemoryKind, MemoryKind),
    strategy: TransferStrategy,
    options: &TransferOptions,
    asked: Asked,
) -> Result<Choice> {
    if let Some(engine @ (Engine::Disk | Engine::Remote)) = options.engine {
        return refuse(format!("engine {engine}"), "it is not in this build");
    }
    match (strategy, asked.gpu) {
        (TransferStrategy::Memcpy, _) => choose_host(plan, options, asked.waits, asked.threads),
        (_, Some(gpu)) => {
            let pageable = src == MemoryKind::System || dst == MemoryKind::System;
            choose_gpu(plan, strategy, options, pageable, asked.threads, gpu)
        }
        (_, None) => refuse(
            format!("a {strategy} transfer in a context without a GPU"),
            "give the context a device: TransferContext(device=0)",
        ),
    }
}

fn choose_host(plan: &CopyPlan, options: &TransferOptions, waits: bool, threads: usize) -> Result<Choice> {
    match options.engine {
        None | Some(Engine::Host) => {}
        Some(engine) => {
            return refuse(format!("engine {engine} for host memory"), "it needs a GPU on one side");
        }
    }
    if options.stream.is_some() {
        return refuse(
            "stream= for host memory".to_owned(),
            "CPU threads carry it out; use after= to order it",
        );
    }
    if options.num_sms.is_some() {
        return refuse("num_sms= for host memory".to_owned(), "no multiprocessor takes part");
    }
    let runs = u64::from(plan.blocks()) * plan.pair().runs_per_block();
    let small = plan.bytes() <= INLINE_BYTES && runs <= INLINE_RUNS && !waits && !options.per_layer;
    let host = if small { HostMode::Inline } else { HostMode::Pooled { threads } };
    let hint = hint(plan.bytes(), plan.pair().run_bytes(), last_level_cache());
    let strategy = TransferStrategy::Memcpy;
    let forced = options.engine.is_some();
    Ok(Choice { strategy, engine: Engine::Host, host, hint, forced, max_ctas: 0, num_sms: None, facts: None })
}

fn choose_gpu(
    plan: &CopyPlan,
    strategy: TransferStrategy,
    options: &TransferOptions,
    pageable: bool,
    threads: usize,
    gpu: GpuAsked,
) -> Result<Choice> {
    let pair = plan.pair();
    let host_side = match strategy {
        TransferStrategy::CudaAsyncH2D => Some(Side::Source),
        TransferStrategy::CudaAsyncD2H => Some(Side::Destination),
        _ => None,
    };
    let segments = plan.num_segments().max(1) as u64;
    let joined = (u64::from(plan.blocks()) / segments).max(1);
    let work = Work {
        bytes: plan.bytes(),
        run: pair.run_bytes() * joined,
        hop_run: host_side.map_or(0, |side| pair.run_bytes_of(side)),
        group: gpu.stage_slot,
    };
    let staged = match host_side {
        None => Staged::NoHost,
        Some(_) if pair.block_bytes() > gpu.stage_slot => Staged::TooLarge(gpu.stage_slot),
        Some(_) if gpu.held_up && options.engine.is_none() => Staged::HeldUp,
        Some(_) => Staged::Able,
    };
    let kernels = gpu.kernel_only.map_or(Kernels::Able, Kernels::Only);
    let facts = Facts { model: gpu.model, work, pageable, kernels, staged };
    let engine = match options.engine {
        Some(engine) => match facts.refusal(engine) {
            Some(why) => return refuse(format!("engine {engine} for this {strategy} transfer"), why),
            None => engine,
        },
        None if pageable => Engine::Bounce,
        None => {
            let seconds = |&engine: &Engine| facts.model.predict(engine, strategy, &work).unwrap_or(f64::MAX);
            [Engine::Kernel, Engine::Batch, Engine::Staged]
                .into_iter()
                .filter(|&engine| facts.refusal(engine).is_none())
                .min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
                .unwrap_or(Engine::Kernel)
        }
    };
    if pageable {
        if let Kernels::Only(why) = kernels {
            return refuse(format!("a {strategy} transfer of pageable memory here"), why);
        }
        if options.stream.is_some() {
            return refuse(
                "stream= for pageable host memory".to_owned(),
                "CPU threads take part, which no stream can order: pin or register the memory, or leave stream= out",
            );
        }
        if pair.block_bytes() > gpu.bounce_slot {
            return refuse(
                format!("blocks of {} bytes of pageable memory", pair.block_bytes()),
                format!(
                    "a slot of the pinned ring has {} bytes: raise pinned_bytes, move fewer layers, or pin the memory",
                    gpu.bounce_slot
                ),
            );
        }
    }
    let usual = match engine {
        // Between ring and layout all is GPU memory.
        Engine::Staged => gpu.sm_count,
        _ => facts.model.direction(strategy).map_or(1, |direction| direction.ctas),
    };
    let max_ctas = options.num_sms.map_or(usual, |most| most.min(usual)).max(1);
    let hint = hint(plan.bytes(), pair.run_bytes(), last_level_cache());
    let forced = options.engine.is_some();
    let host = HostMode::Pooled { threads };
    Ok(Choice {
        strategy,
        engine,
        host,
        hint,
        forced,
        max_ctas,
        num_sms: options.num_sms,
        facts: Some(facts),
    })
}
