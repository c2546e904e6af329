//! Which engine carries out a plan, and why.

use std::fmt;

use kvferry_host::CopyHint;
use kvferry_layout::CopyPlan;

use super::host::{hint, last_level_cache};
use super::options::TransferOptions;
use super::strategy::{Engine, TransferStrategy};
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The engine.
    pub engine: Engine,
    /// Whether it could carry out the plan.
    pub able: bool,
    /// Why, or why not.
    pub reason: String,
}

/// The decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Direction.
    pub strategy: TransferStrategy,
    /// The engine.
    pub engine: Engine,
    /// How the host engine runs it.
    pub host: HostMode,
    /// Whether the host engine writes around the caches.
    pub hint: CopyHint,
    /// Whether the caller forced the engine.
    pub forced: bool,
}

impl Choice {
    /// Every engine with its verdict, for people.
    pub fn candidates(&self) -> Vec<Candidate> {
        Engine::ALL
            .into_iter()
            .map(|engine| match engine {
                Engine::Host => Candidate {
                    engine,
                    able: true,
                    reason: match self.host {
                        HostMode::Inline => {
                            format!(
                                "at most {} KiB: copied on the calling thread, at once",
                                INLINE_BYTES >> 10
                            )
                        }
                        HostMode::Pooled { threads } => {
                            let stores = match self.hint {
                                CopyHint::Temporal => "ordinary stores",
                                CopyHint::NonTemporal => {
                                    "streaming stores, as it is too large to stay in the cache"
                                }
                            };
                            format!("both sides are host memory: {threads} copy thread(s), {stores}")
                        }
                    },
                },
                Engine::Batch | Engine::Kernel | Engine::Staged => {
                    Candidate { engine, able: false, reason: "no GPU memory on either side".to_owned() }
                }
                Engine::Disk => {
                    Candidate { engine, able: false, reason: "neither side is a file".to_owned() }
                }
                Engine::Remote => {
                    Candidate { engine, able: false, reason: "both sides are on this machine".to_owned() }
                }
            })
            .collect()
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
            writeln!(f, "  {} {verdict}: {}", names.join(", "), candidate.reason)?;
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

pub(crate) fn choose(
    plan: &CopyPlan,
    strategy: TransferStrategy,
    options: &TransferOptions,
    waits: bool,
    threads: usize,
) -> Result<Choice> {
    let refuse = |what: String, why: &str| Err(Error::Unsupported { what, why: why.to_owned() });
    if strategy != TransferStrategy::Memcpy {
        return refuse(
            format!("a {strategy} transfer"),
            "this build moves host memory; the CUDA engines are not in it",
        );
    }
    match options.engine {
        None | Some(Engine::Host) => {}
        Some(engine @ (Engine::Batch | Engine::Kernel | Engine::Staged)) => {
            return refuse(format!("engine {engine} for host memory"), "it needs a GPU on one side");
        }
        Some(engine) => return refuse(format!("engine {engine}"), "it is not in this build"),
    }
    let runs = u64::from(plan.blocks()) * plan.pair().runs_per_block();
    let small = plan.bytes() <= INLINE_BYTES && runs <= INLINE_RUNS && !waits && !options.per_layer;
    let host = if small { HostMode::Inline } else { HostMode::Pooled { threads } };
    let hint = hint(plan.bytes(), plan.pair().run_bytes(), last_level_cache());
    Ok(Choice { strategy, engine: Engine::Host, host, hint, forced: options.engine.is_some() })
}
