//! From connected ranks to armed ones. Every stage ends in a meeting: all ranks go on, or all raise.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kvferry_cuda::{ExchangeLink, ExchangePage, ExchangeQueue, Gpu, PROBE_BYTES, PeerReach, ProbeState};

use super::fences::Fences;
use super::gate::Gate;
use super::share::{Mapped, agreed, map};
use super::{CudaBackend, MARGIN, near};
use crate::all2all::backend::{Backend, Setup};
use crate::all2all::setup::SetupError;
use crate::error::{Error, Result};
use crate::memory::Region;

/// How long the probe waits for a peer's kernel: all ranks have just met.
const PROBE: Duration = Duration::from_secs(10);

/// Sets up a rank on the GPU `ordinal`.
pub(in crate::all2all) fn connect(setup: &Setup<'_>, ordinal: u32) -> Result<Arc<dyn Backend>> {
    let gpu = agreed(setup, "device", open(ordinal))?;
    reach(setup, &gpu)?;
    // The probe needs room in the pools.
    let pool_bytes = setup.pool_bytes.max(PROBE_BYTES * setup.world as u64);
    let Mapped { own, peers, transport } = map(&Setup { pool_bytes, ..*setup }, &gpu)?;
    let members = (0..setup.world).filter(|&rank| setup.mesh.same_process(rank));
    let members = members.fold(0_u64, |bits, rank| bits | 1 << rank);
    let gate = near::gate(setup.mesh.nonce(), members);

    let linked = || -> Result<(ExchangeQueue, Arc<ExchangePage>)> {
        let page = ExchangePage::new(&gpu)?;
        page.set_timeout(setup.timeout);
        let link = ExchangeLink::new(setup.rank, Arc::clone(&own), peers, Arc::clone(&page))?;
        link.zero()?;
        Ok((ExchangeQueue::new(&link)?, page))
    };
    // When all have agreed, nobody's zeroes can wipe out what a peer writes.
    let (queue, page) = agreed(setup, "control words", linked())?;
    agreed(setup, "probe", probe(setup, queue.link(), gate.as_deref()))?;

    let timeout = u64::try_from(setup.timeout.as_nanos()).unwrap_or(u64::MAX);
    Ok(Arc::new(CudaBackend {
        rank: setup.rank,
        world: setup.world,
        fences: Fences::new(&gpu),
        transport,
        pool: Region::Device(own.pool()),
        page,
        queue: Mutex::new(Some(queue)),
        gate,
        timeout: AtomicU64::new(timeout),
        calls: AtomicU64::new(0),
        left: AtomicU64::new(0),
        captured: AtomicBool::new(false),
        mute: AtomicBool::new(false),
        captures: Mutex::default(),
        attached: OnceLock::new(),
        ticker: OnceLock::new(),
        attend: setup.mesh.attend().clone(),
        gpu,
    }))
}

fn open(ordinal: u32) -> Result<Arc<Gpu>> {
    let gpu = Gpu::open(ordinal)?;
    if gpu.has_kernels() { Ok(gpu) } else { Err(kvferry_cuda::CudaError::NoKernels.into()) }
}

/// What a rank tells of itself: where it runs, and whether its launches block.
#[derive(Debug, PartialEq, Eq)]
struct Facts {
    pid: u32,
    blocking: bool,
    uuid: String,
}

impl Facts {
    fn of(gpu: &Gpu) -> Facts {
        let blocking =
            std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|set| !set.is_empty() && set != "0");
        Facts { pid: std::process::id(), blocking, uuid: gpu.info().uuid.clone() }
    }

    fn encode(&self) -> Vec<u8> {
        [&self.pid.to_le_bytes()[..], &[self.blocking.into()], self.uuid.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Facts> {
        let (pid, rest) = bytes.split_first_chunk()?;
        let (blocking, uuid) = rest.split_first()?;
        let uuid = String::from_utf8(uuid.to_vec()).ok()?;
        Some(Facts { pid: u32::from_le_bytes(*pid), blocking: *blocking != 0, uuid })
    }
}

/// Finds out whether every GPU can reach every other one, as far as the driver tells.
fn reach(setup: &Setup<'_>, gpu: &Arc<Gpu>) -> Result<()> {
    let mine = Facts::of(gpu);
    let all = setup.mesh.gather("devices", &mine.encode(), setup.patience)?;
    let outcome = || -> Result<()> {
        let mut facts = Vec::with_capacity(all.len());
        for (rank, bytes) in all.iter().enumerate() {
            let malformed =
                || SetupError::Disagree { rank, reason: "its description is malformed".to_owned() };
            facts.push(Facts::decode(bytes).ok_or_else(malformed)?);
        }
        check_threads(setup, &facts)?;
        for (peer, theirs) in facts.iter().enumerate().filter(|&(peer, _)| peer != setup.rank) {
            let why = match gpu.reach(&theirs.uuid)? {
                PeerReach::Same | PeerReach::Unknown | PeerReach::Direct { atomics: true } => continue,
                PeerReach::None => "the driver allows no access from one to the other",
                PeerReach::Direct { atomics: false } => "no native atomics work between them (PCIe)",
            };
            return Err(Error::Unsupported {
                what: format!(
                    "an all2all between rank {} on {} and rank {peer} on {}",
                    setup.rank, mine.uuid, theirs.uuid
                ),
                why: why.to_owned(),
            });
        }
        Ok(())
    };
    agreed(setup, "peer access", outcome())
}

/// What threads of one process must keep to.
fn check_threads(setup: &Setup<'_>, facts: &[Facts]) -> Result<()> {
    let here: Vec<_> = facts.iter().enumerate().filter(|(rank, _)| setup.mesh.same_process(*rank)).collect();
    if here.len() < 2 {
        return Ok(());
    }
    for (at, (rank, one)) in here.iter().enumerate() {
        if let Some((other, _)) = here[..at].iter().find(|(_, other)| other.uuid == one.uuid) {
            return Err(Error::Unsupported {
                what: format!("ranks {other} and {rank} as threads of one process on {}", one.uuid),
                why: "their kernels would wait for each other in one queue: one GPU per thread".to_owned(),
            });
        }
        if one.blocking {
            return Err(Error::Unsupported {
                what: "ranks as threads of one process under CUDA_LAUNCH_BLOCKING".to_owned(),
                why: "a launch that waits for its kernel keeps the others from being launched".to_owned(),
            });
        }
    }
    Ok(())
}

/// Every rank writes to every other one; see [`ExchangeLink::probe`].
fn probe(setup: &Setup<'_>, link: &Arc<ExchangeLink>, gate: Option<&Gate>) -> Result<()> {
    if setup.world == 1 {
        return Ok(());
    }
    let patience = PROBE.min(setup.patience);
    let running = {
        let cx = link.gpu().enter()?;
        let through = gate.map(|gate| gate.pass(setup.rank, patience, || false));
        if let Some(Err(_)) = through {
            let (what, why) = ("a probe between threads of one process", "one of them did not come");
            return Err(Error::Unsupported { what: what.to_owned(), why: why.to_owned() });
        }
        link.probe(&cx, setup.mesh.nonce() | 1, patience)?
    };
    let reports = running.finish(patience.saturating_add(MARGIN))?;
    for (peer, report) in reports.iter().enumerate().filter(|&(peer, _)| peer != setup.rank) {
        let why = match report.outcome() {
            ProbeState::Good => continue,
            ProbeState::Timeout => format!("nothing came from rank {peer} within {patience:?}"),
            ProbeState::Payload => format!("what rank {peer} wrote was not there when its flag was"),
            ProbeState::Atomics => format!("atomic additions add up to {}", report.value),
            _ => "the probe did not end".to_owned(),
        };
        let what = format!("an all2all between ranks {} and {peer} on these GPUs", setup.rank);
        return Err(Error::Unsupported { what, why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_survive_the_way() {
        let facts = Facts { pid: 77, blocking: true, uuid: "GPU-1".to_owned() };
        assert_eq!(Facts::decode(&facts.encode()), Some(facts));
        assert_eq!(Facts::decode(&[1, 2, 3]), None);
    }
}
