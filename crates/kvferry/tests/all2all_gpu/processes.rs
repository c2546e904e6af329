//! Ranks as processes: this binary starts itself again, once per rank.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry::Dtype;
use kvferry::all2all::{All2All, All2AllBuilder, ExchangeDevice, ExchangeFailure, rendezvous};
use kvferry::cuda::faults;
use kvferry::layout::exchange::ExchangeOp;

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::exchange::{PATIENCE, Whole};
use crate::gpus::{Rank, gpus};

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What a rank's process knows.
pub(crate) struct Process {
    pub(crate) rank: usize,
    pub(crate) world: usize,
}

impl Process {
    /// A builder of this rank, on the GPU of its number.
    pub(crate) fn builder(&self, name: &str) -> All2AllBuilder {
        let url = var("KVF_URL").unwrap();
        let meet = rendezvous(&url, self.rank, self.world, PATIENCE).expect("rendezvous");
        All2All::builder(self.rank, self.world)
            .name(name)
            .rendezvous(meet)
            .capacity_bytes(1 << 20)
            .timeout(PATIENCE)
            .device(ExchangeDevice::Gpu(self.rank as u32))
    }

    pub(crate) fn connect(&self) -> Rank {
        Rank::new(self.builder("one").connect().expect("set-up"))
    }
}

/// A rank's process, killed when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        // Gone already, as a rule.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `body` in `world` processes. `test` is the path of the calling test, `env` what the processes find in their
/// environment besides. In the parent it returns when all have ended well; what is expected to be killed says so by
/// exiting with 9 in its place.
pub(crate) fn in_processes(test: &str, world: usize, env: &[(&str, &str)], body: impl FnOnce(&Process)) {
    if let Some(rank) = var("KVF_RANK") {
        return body(&Process { rank: rank.parse().unwrap(), world });
    }
    if gpus(world).is_none() {
        return;
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let url = format!("file://{}/kvf-gpu-{}-{number}", std::env::temp_dir().display(), std::process::id());
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1", "--include-ignored"]);
        command.env("KVF_RANK", rank.to_string()).env("KVF_URL", &url);
        command.envs(env.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Started(command.spawn().unwrap())
    };
    let mut ranks: Vec<Started> = (0..world).map(start).collect();
    let deadline = Instant::now() + PATIENCE + PATIENCE;
    let mut failed = Vec::new();
    for (rank, Started(child)) in ranks.iter_mut().enumerate() {
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if Instant::now() > deadline => break None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        if !status.is_some_and(|status| status.success() || status.code() == Some(9)) {
            failed.push((rank, status));
        }
    }
    if failed.is_empty() {
        return;
    }
    for Started(child) in &mut ranks {
        let _ = child.kill();
        let mut text = String::new();
        let _ = child.stdout.take().unwrap().read_to_string(&mut text);
        let _ = child.stderr.take().unwrap().read_to_string(&mut text);
        eprintln!("--- a rank said:\n{text}");
    }
    panic!("ranks that failed: {failed:?}");
}

fn everything(at: &Rank, world: usize) {
    let tokens: Vec<u64> = (0..world as u64).map(|rank| 3 + rank).collect();
    let whole = Whole::new(2, &tokens, 6, 8, Dtype::Float16);
    for seed in 0..3 {
        for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
            at.checked(&whole.seeded(seed), op);
        }
    }
}

#[test]
fn memory_travels_by_file_descriptors() {
    in_processes("processes::memory_travels_by_file_descriptors", 2, &[], |process| {
        let at = process.connect();
        let transport = at.comm.stats().transport;
        assert_eq!(transport.name, "vmm", "{}", transport.why);
        everything(&at, 2);
        at.comm.close().unwrap();
        assert_eq!(kvferry::all2all::quarantined_bytes(), 0);
    });
}

#[test]
fn memory_travels_by_ipc_where_asked_for() {
    let env = [("KVFERRY_ALL2ALL_TRANSPORT", "ipc")];
    in_processes("processes::memory_travels_by_ipc_where_asked_for", 2, &env, |process| {
        let at = process.connect();
        let transport = at.comm.stats().transport;
        assert_eq!(transport.name, "ipc");
        assert!(transport.why.contains("KVFERRY_ALL2ALL_TRANSPORT"), "{}", transport.why);
        everything(&at, 2);
        at.comm.close().unwrap();
    });
}

#[test]
fn ipc_is_what_is_left_when_descriptors_fail_on_one_rank() {
    in_processes("processes::ipc_is_what_is_left_when_descriptors_fail_on_one_rank", 2, &[], |process| {
        for call in
            ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemMap"]
        {
            if process.rank == 1 {
                // The second mapping is that of the peer's memory.
                faults::inject(call, if call == "cuMemMap" { 2 } else { 1 }, 801);
            }
            let at = Rank::new(process.builder(call).connect().unwrap());
            let transport = at.comm.stats().transport;
            assert_eq!(transport.name, "ipc", "{call}");
            assert!(transport.why.contains("rank 1") && transport.why.contains(call), "{}", transport.why);
            everything(&at, 2);
            at.comm.close().unwrap();
        }
    });
}

#[test]
fn without_any_way_both_ranks_say_so() {
    let env = [("KVFERRY_FAKE_NO_IPC", "1"), ("KVFERRY_ALL2ALL_TRANSPORT", "ipc")];
    in_processes("processes::without_any_way_both_ranks_say_so", 2, &env, |process| {
        // The variable means something to the simulated driver only.
        let Err(error) = process.builder("one").connect() else { return };
        assert!(matches!(&error, kvferry::Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("CUDA IPC"), "{error}");
    });
}

#[test]
fn two_processes_may_share_a_gpu() {
    in_processes("processes::two_processes_may_share_a_gpu", 2, &[], |process| {
        let builder = process.builder("one").device(ExchangeDevice::Gpu(0));
        everything(&Rank::new(builder.connect().unwrap()), 2);
    });
}

#[test]
fn three_ranks_of_which_one_refuses() {
    if gpus(3).is_none() {
        return;
    }
    in_processes("processes::three_ranks_of_which_one_refuses", 3, &[], |process| {
        let at = process.connect();
        everything(&at, 3);
        let whole = Whole::new(1, &[2, 2, 2], 3, 4, Dtype::Float16);
        if process.rank == 2 {
            let options =
                kvferry::all2all::CallOptions { stream: Some(at.stream.handle()), ..Default::default() };
            at.comm.refuse(SendRecvHeads, "a test's whim", &options).unwrap();
        } else {
            at.call(&whole, SendRecvHeads).unwrap();
        }
        let failure = broken(&at, SOON);
        assert!(matches!(failure, ExchangeFailure::Mismatch { rank: 2, .. }), "{failure}");
        at.comm.reset().unwrap();
        everything(&at, 3);
    });
}

/// Long enough for what should be at once.
const SOON: Duration = Duration::from_secs(5);

/// Waits until the communicator says what broke it.
pub(crate) fn broken(at: &Rank, patience: Duration) -> ExchangeFailure {
    let start = Instant::now();
    loop {
        match at.comm.check() {
            Err(kvferry::Error::Exchange(failure)) => return failure,
            Err(other) => panic!("{other}"),
            Ok(()) => assert!(start.elapsed() < patience, "not broken after {patience:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_that_dies_is_named_and_the_context_lives_on() {
    in_processes("processes::a_rank_that_dies_is_named_and_the_context_lives_on", 2, &[], |process| {
        let at = process.connect();
        let whole = Whole::new(1, &[2, 2], 4, 8, Dtype::Float16);
        for seed in 0..5 {
            // Without a look at the communicator's health: rank 1 may be gone already.
            let whole = whole.seeded(seed);
            let result = at.call(&whole, SendRecvHeads).unwrap();
            at.check(&whole, SendRecvHeads, kvferry::layout::exchange::HeadLayout::Bnhd, &result);
        }
        if process.rank == 1 {
            // Not before rank 0 has looked at its results; then no destructor runs, no goodbye is said.
            std::thread::sleep(Duration::from_millis(300));
            std::process::exit(9);
        }
        // The kernel waits for a header that never comes, unless the death is known before the call.
        let start = Instant::now();
        let result = at.call(&whole, SendRecvHeads);
        let failure = broken(&at, SOON);
        assert!(matches!(failure, ExchangeFailure::PeerDied { peer: 1, .. }), "{failure}");
        at.stream.synchronize().unwrap();
        assert!(start.elapsed() < Duration::from_secs(2));
        if let Ok(result) = result {
            assert!(crate::gpus::bytes(&result).iter().all(|&byte| byte == 0xFF));
        }
        assert!(at.call(&whole, SendRecvHeads).is_err());
        assert!(at.comm.close().is_err());
        // The GPU still works.
        let alone =
            All2All::builder(0, 1).capacity_bytes(1 << 20).device(ExchangeDevice::Gpu(0)).connect().unwrap();
        let alone = Rank::new(alone);
        alone.checked(&Whole::new(1, &[4], 4, 8, Dtype::Float16), SendRecvHeads);
    });
}
