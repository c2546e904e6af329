//! How ranks come to share memory.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use kvferry_host::{SharedMemory, SharedWords};
use kvferry_kernels::{BELL_OFFSET, CONTROL_BYTES, PROBE_OFFSET};

use super::wait::spin_limit;
use super::{CpuBackend, Local, Mapped, nanoseconds, page};
use crate::all2all::backend::{Backend, Setup, Transport};
use crate::all2all::setup::SetupError;
use crate::error::{Error, Result};
use crate::memory::Region;

/// Whether a word of the control block belongs to the bell, which outlives resets.
pub(super) fn is_bell(index: usize) -> bool {
    let bell = (BELL_OFFSET / 8) as usize;
    (bell..bell + kvferry_host::BELL_BYTES.div_ceil(8) as usize).contains(&index)
}

fn map(memory: &SharedMemory, pool_bytes: u64) -> Result<Mapped> {
    Ok(Mapped {
        words: memory.words(0, (CONTROL_BYTES / 8) as usize)?,
        bell: memory.bell(BELL_OFFSET)?,
        pool: memory.region().part(CONTROL_BYTES, pool_bytes)?,
    })
}

/// Sets up this rank's memory and maps everybody else's. All ranks succeed, or all fail.
pub(in crate::all2all) fn connect(setup: &Setup<'_>) -> Result<Arc<dyn Backend>> {
    let Setup { rank, world, mesh, pool_bytes, patience, .. } = *setup;
    let len = CONTROL_BYTES + pool_bytes;
    let made = || -> Result<(SharedMemory, Mapped)> {
        let memory = SharedMemory::create(&format!("kvferry-{}-{rank}", setup.name), len)?;
        let own = map(&memory, pool_bytes)?;
        Ok((memory, own))
    };
    let (memory, own) = agree(mesh, "memory", made())?;

    let mapped = || -> Result<Vec<Option<Mapped>>> {
        let fds = mesh.exchange_fds(memory.fd(), patience)?;
        let one = |fd: Option<_>| fd.map(|fd| map(&SharedMemory::from_fd(fd, len)?, pool_bytes)).transpose();
        fds.into_iter().map(one).collect()
    };
    let peers = agree(mesh, "mapping", mapped())?;

    agree(mesh, "probe", probe(setup, &own, &peers))?;

    let page = SharedWords::local(page::WORDS);
    page.store(page::TIMEOUT, nanoseconds(setup.timeout));
    Ok(Arc::new(CpuBackend {
        rank,
        world,
        pool_bytes,
        transport: Transport {
            name: "shared memory",
            why: "the ranks compute on the CPU of one host".to_owned(),
        },
        pool: Region::Host(own.pool.clone()),
        own,
        peers: RwLock::new(peers),
        page,
        local: Mutex::new(Local::new()),
        epoch: AtomicU64::new(0),
        spin: spin_limit(world),
        attend: mesh.attend().clone(),
    }))
}

/// Everybody writes to everybody's last pool byte, then a word, then rings: whoever sees the word must see the byte.
/// Finds memory mapped twice to the wrong rank, or not shared at all, before a call does.
fn probe(setup: &Setup<'_>, own: &Mapped, peers: &[Option<Mapped>]) -> Result<()> {
    let flag = |rank: usize| (PROBE_OFFSET / 8) as usize + 1 + rank;
    let mark = |from: usize, to: usize| (1 + from as u64) << 8 | (1 + to as u64);
    for (to, peer) in peers.iter().enumerate() {
        if let Some(Mapped { words, bell, pool }) = peer {
            // A byte of its own per source.
            pool.write(setup.rank as u64, &[0xA0 ^ setup.rank as u8])?;
            words.store(flag(setup.rank), mark(setup.rank, to));
            bell.ring();
        }
    }
    let start = Instant::now();
    let mut attending = setup.mesh.attend().begin();
    for (from, _) in peers.iter().enumerate().filter(|(_, peer)| peer.is_some()) {
        loop {
            let seen = own.bell.value();
            if own.words.load(flag(from)) == mark(from, setup.rank) {
                break;
            }
            let Some(rest) = setup.patience.checked_sub(start.elapsed()) else {
                let reason = "what it wrote to shared memory does not arrive".to_owned();
                return Err(SetupError::Disagree { rank: from, reason }.into());
            };
            own.bell.wait(seen, attending.nap(rest));
            if attending.gives_up() {
                return Err(SetupError::Interrupted { what: "probe".to_owned() }.into());
            }
        }
        let mut byte = [0];
        own.pool.read(from as u64, &mut byte)?;
        if byte != [0xA0 ^ from as u8] {
            let reason = format!("the probe found {:#x} in shared memory", byte[0]);
            return Err(SetupError::Disagree { rank: from, reason }.into());
        }
    }
    own.pool.fill(0, setup.world as u64, 0)?;
    Ok(())
}

/// Ends a stage: everybody's outcome counts. Own errors come back as they are.
fn agree<T>(mesh: &crate::all2all::mesh::Mesh, stage: &str, outcome: Result<T>) -> Result<T> {
    let (value, mine) = match outcome {
        Ok(value) => (Some(value), Ok(())),
        Err(error) => (None, Err(error)),
    };
    mesh.agree(stage, mine)?;
    value.ok_or(Error::ExchangeClosed)
}
