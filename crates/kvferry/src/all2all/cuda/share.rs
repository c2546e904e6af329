//! How ranks come to reach one another's memory: file descriptors of device memory, or CUDA IPC where those cannot be.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use kvferry_cuda::{CudaError, ExchangeMemory, Gpu, IpcHandle, PeerMemory, vmm_supported};

use super::near;
use crate::all2all::backend::{Setup, Transport};
use crate::all2all::mesh::Part;
use crate::all2all::setup::SetupError;
use crate::error::{Error, Result};
use crate::transfer::lock;

/// Name of the transport by file descriptors.
const VMM: &str = "vmm";
/// Name of the transport by CUDA IPC.
pub(super) const IPC: &str = "ipc";
/// Name of the transport between threads.
const NEAR: &str = "same process";

/// `vmm` or `ipc`: tries nothing else. The same on every rank.
const CHOICE: &str = "KVFERRY_ALL2ALL_TRANSPORT";

/// Longest reason that is passed on.
const MOST_TEXT: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Vmm,
    Ipc,
}

/// Why a rank could not.
enum Obstacle {
    /// Another way may do.
    Way(Error),
    /// No way will.
    All(Error),
}

/// Memory of all ranks, mapped.
pub(super) struct Mapped {
    pub(super) own: Arc<ExchangeMemory>,
    pub(super) peers: Vec<PeerMemory>,
    pub(super) transport: Transport,
}

/// Allocates this rank's memory and maps everybody else's, in the first way in which all ranks can.
pub(super) fn map(setup: &Setup<'_>, gpu: &Arc<Gpu>) -> Result<Mapped> {
    let wish = wish(setup)?;
    let mut why = String::new();
    for way in [Way::Vmm, Way::Ipc] {
        if wish.is_some_and(|wish| wish != way) {
            continue;
        }
        match try_way(setup, gpu, way)? {
            Ok((own, peers)) => {
                let transport = Transport { name: name_of(setup, way), why: reason(setup, way, &why) };
                return Ok(Mapped { own, peers, transport });
            }
            Err(obstacle) => {
                tracing::debug!(?way, %obstacle, "all2all ranks cannot share memory this way");
                let sep = if why.is_empty() { "" } else { "; " };
                let name = if way == Way::Vmm { "file descriptors" } else { "CUDA IPC" };
                why = format!("{why}{sep}{name}: {obstacle}");
            }
        }
    }
    Err(Error::Unsupported { what: "sharing GPU memory between the ranks".to_owned(), why })
}

/// What the environment asks for, if all ranks ask for the same.
fn wish(setup: &Setup<'_>) -> Result<Option<Way>> {
    let mine = std::env::var(CHOICE).unwrap_or_default();
    let all = setup.mesh.gather("transport", mine.as_bytes(), setup.patience)?;
    let parsed = match mine.as_str() {
        "" => Ok(None),
        "vmm" => Ok(Some(Way::Vmm)),
        "ipc" => Ok(Some(Way::Ipc)),
        _ => Err(Error::InvalidOption {
            option: CHOICE,
            expected: "vmm or ipc".to_owned(),
            value: mine.clone(),
        }),
    };
    let odd = all.iter().position(|other| *other != all[0]);
    let outcome = match odd {
        Some(rank) => {
            Err(SetupError::Disagree { rank, reason: format!("its {CHOICE} is another than rank 0's") }
                .into())
        }
        None => parsed,
    };
    agreed(setup, "transport agreed", outcome)
}

type Memories = (Arc<ExchangeMemory>, Vec<PeerMemory>);

/// This rank's memory, and what tells other processes of it.
struct Offer {
    own: Arc<ExchangeMemory>,
    fd: Option<OwnedFd>,
    /// Length of the allocation, then an IPC handle if that is the way.
    message: Vec<u8>,
}

/// All ranks succeed, or all are told why not: outside, in a way that no other way will cure; inside, otherwise.
fn try_way(setup: &Setup<'_>, gpu: &Arc<Gpu>, way: Way) -> Result<std::result::Result<Memories, String>> {
    let offer = match vote(setup, "memory", offer(setup, gpu, way))? {
        Ok(offer) => offer,
        Err(why) => return Ok(Err(why)),
    };
    // Threads find it before anybody can have agreed on what comes next.
    near::announce(setup.mesh.nonce(), setup.rank, &offer.own);
    let fd = offer.fd.as_ref().map(AsFd::as_fd);
    let parts = setup.mesh.swap("handles", &offer.message, fd, setup.patience)?;
    let mapped = (0..setup.world).map(|rank| map_one(setup, gpu, way, rank, parts.get(rank)));
    // The memory of a failed try is freed once nobody maps it: all have let go when all have voted.
    let mapped = mapped.collect::<std::result::Result<Vec<_>, _>>();
    Ok(vote(setup, "mapping", mapped)?.map(|peers| (offer.own, peers)))
}

fn offer(setup: &Setup<'_>, gpu: &Arc<Gpu>, way: Way) -> std::result::Result<Offer, Obstacle> {
    // A lone rank, or threads, need not share with anybody outside.
    let far = (0..setup.world).any(|rank| !setup.mesh.same_process(rank));
    let made = || -> std::result::Result<Offer, CudaError> {
        let own = match way {
            Way::Vmm => {
                vmm_supported(gpu.ordinal())?;
                ExchangeMemory::shareable(gpu, setup.pool_bytes)?
            }
            Way::Ipc => ExchangeMemory::plain(gpu, setup.pool_bytes)?,
        };
        let fd = if far && way == Way::Vmm { Some(own.export()?) } else { None };
        let handle = if far && way == Way::Ipc { encode(&own.ipc()?) } else { Vec::new() };
        let message = [&own.len().to_le_bytes()[..], &handle].concat();
        Ok(Offer { own, fd, message })
    };
    made().map_err(|error| match error {
        CudaError::OutOfMemory { .. } => Obstacle::All(error.into()),
        other => Obstacle::Way(other.into()),
    })
}

fn map_one(
    setup: &Setup<'_>,
    gpu: &Arc<Gpu>,
    way: Way,
    rank: usize,
    part: Option<&Part>,
) -> std::result::Result<PeerMemory, Obstacle> {
    let disagree = |reason: String| Obstacle::Way(SetupError::Disagree { rank, reason }.into());
    let mapped = if setup.mesh.same_process(rank) {
        match near::find(setup.mesh.nonce(), rank) {
            Some(memory) => PeerMemory::near(&memory, gpu),
            None => return Err(disagree("its memory is gone".to_owned())),
        }
    } else {
        let nothing = || disagree("its part is malformed".to_owned());
        let part = part.ok_or_else(nothing)?;
        let len = part.bytes.first_chunk().map(|len| u64::from_le_bytes(*len)).ok_or_else(nothing)?;
        match way {
            Way::Vmm => {
                let fd = part.fd.as_ref().ok_or_else(nothing)?;
                PeerMemory::import(fd.as_fd(), len, setup.pool_bytes, gpu)
            }
            Way::Ipc => {
                let handle = decode(part.bytes.get(8..).unwrap_or_default(), len).ok_or_else(nothing)?;
                PeerMemory::open(&handle, setup.pool_bytes, gpu)
            }
        }
    };
    mapped.map_err(|error| disagree(format!("its memory cannot be mapped: {error}")))
}

fn encode(handle: &IpcHandle) -> Vec<u8> {
    [&handle.bytes[..], &handle.offset.to_le_bytes()].concat()
}

fn decode(bytes: &[u8], len: u64) -> Option<IpcHandle> {
    let (name, offset) = bytes.split_first_chunk::<64>()?;
    let offset = u64::from_le_bytes(offset.try_into().ok()?);
    Some(IpcHandle { bytes: *name, offset, len })
}

/// Ends a stage that may be tried in another way.
fn vote<T>(
    setup: &Setup<'_>,
    stage: &str,
    outcome: std::result::Result<T, Obstacle>,
) -> Result<std::result::Result<T, String>> {
    let text = |error: &Error| {
        let mut text = error.to_string();
        while text.len() > MOST_TEXT {
            text.pop();
        }
        text
    };
    let mine = match &outcome {
        Ok(_) => vec![0],
        Err(Obstacle::Way(error)) => [&[1], text(error).as_bytes()].concat(),
        Err(Obstacle::All(error)) => [&[2], text(error).as_bytes()].concat(),
    };
    let votes = setup.mesh.gather(stage, &mine, setup.patience);
    if let Err(Obstacle::All(error)) = outcome {
        return Err(error);
    }
    let votes = votes?;
    let reason = |vote: &[u8]| String::from_utf8_lossy(vote.get(1..).unwrap_or_default()).into_owned();
    for code in [2, 1] {
        if let Some((rank, vote)) = votes.iter().enumerate().find(|(_, vote)| vote.first() == Some(&code)) {
            let reason = reason(vote);
            if code == 2 {
                return Err(SetupError::Disagree { rank, reason }.into());
            }
            return Ok(Err(format!("rank {rank}: {reason}")));
        }
    }
    match outcome {
        Ok(value) => Ok(Ok(value)),
        // Its vote was counted above.
        Err(Obstacle::Way(error) | Obstacle::All(error)) => Err(error),
    }
}

/// Ends a stage that has one way only.
pub(super) fn agreed<T>(setup: &Setup<'_>, stage: &str, outcome: Result<T>) -> Result<T> {
    let (value, mine) = match outcome {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    setup.mesh.agree(stage, mine)?;
    value.ok_or(Error::ExchangeClosed)
}

fn all_near(setup: &Setup<'_>) -> bool {
    (0..setup.world).all(|rank| setup.mesh.same_process(rank))
}

fn name_of(setup: &Setup<'_>, way: Way) -> &'static str {
    match way {
        _ if all_near(setup) => NEAR,
        Way::Vmm => VMM,
        Way::Ipc => IPC,
    }
}

fn reason(setup: &Setup<'_>, way: Way, failed: &str) -> String {
    let reached = if all_near(setup) {
        "all ranks are threads of one process".to_owned()
    } else if std::env::var_os(CHOICE).is_some_and(|wish| !wish.is_empty()) {
        format!("{CHOICE} asks for it")
    } else {
        match way {
            Way::Vmm => "file descriptors of device memory reach every rank".to_owned(),
            Way::Ipc => "CUDA IPC, the second choice".to_owned(),
        }
    };
    if failed.is_empty() { reached } else { format!("{reached} ({failed})") }
}

/// Memory that peers may still have mapped by CUDA IPC, which must not be freed before they have let go. They no longer
/// tell, so it stays for the life of the process. Imported descriptors need none of this: they keep the memory themselves.
static QUARANTINE: Mutex<Vec<Arc<ExchangeMemory>>> = Mutex::new(Vec::new());

/// Never frees this memory.
pub(super) fn quarantine(memory: &Arc<ExchangeMemory>) {
    tracing::warn!(
        bytes = memory.len(),
        "device memory is kept, as a peer may still have it mapped by CUDA IPC"
    );
    lock(&QUARANTINE).push(Arc::clone(memory));
}

/// Bytes of device memory of closed communicators that are kept for good, as peers that did not close may have them mapped.
pub fn quarantined_bytes() -> u64 {
    lock(&QUARANTINE).iter().map(|memory| memory.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_the_way() {
        let handle = IpcHandle { bytes: std::array::from_fn(|at| at as u8), offset: 77, len: 4096 };
        assert_eq!(decode(&encode(&handle), 4096), Some(handle));
        assert_eq!(decode(&encode(&handle)[1..], 4096), None);
        assert_eq!(decode(&[], 4096), None);
    }
}
