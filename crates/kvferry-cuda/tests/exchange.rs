//! The device side of the exchange: what is refused before it reaches a stream, what is kept until the device is done, and
//! calls of two ranks driven by hand.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use common::{Gate, Graph, Graveyard, device, pattern, region};
use kvferry_cuda::{
    CudaError, DeviceBuffer, DeviceRegion, Driver, ExchangeLink, ExchangeLoop, ExchangeMemory, ExchangeMode,
    ExchangeOut, ExchangePage, ExchangeQueue, ExchangeRoute, Gpu, PeerMemory, PeerReach, ProbeState,
    RecordKind, RouteInput, RoutePiece, RouteShape, Stream, abort_word, drain_deferred,
};

const POOL: u64 = 64 << 10;
const SOON: Duration = Duration::from_secs(20);

/// Two GPUs, if there are.
fn two() -> Option<[Arc<Gpu>; 2]> {
    common::gpu()?;
    if Driver::get().unwrap().device_count() < 2 {
        eprintln!("skipped: one GPU");
        return None;
    }
    Some([Gpu::open(0).unwrap(), Gpu::open(1).unwrap()])
}

struct Rank {
    gpu: Arc<Gpu>,
    memory: Arc<ExchangeMemory>,
    page: Arc<ExchangePage>,
    queue: ExchangeQueue,
    stream: Stream,
}

/// Two ranks in this process, reset and ready.
fn ranks(gpus: &[Arc<Gpu>; 2], plain: bool) -> [Rank; 2] {
    let memory = gpus.each_ref().map(|gpu| {
        let made =
            if plain { ExchangeMemory::plain(gpu, POOL) } else { ExchangeMemory::shareable(gpu, POOL) };
        made.unwrap()
    });
    let rank = |rank: usize| {
        let gpu = &gpus[rank];
        let page = ExchangePage::new(gpu).unwrap();
        page.set_timeout(SOON);
        let peers = memory.iter().map(|memory| PeerMemory::near(memory, gpu).unwrap()).collect();
        let link = ExchangeLink::new(rank, Arc::clone(&memory[rank]), peers, Arc::clone(&page)).unwrap();
        link.zero().unwrap();
        let queue = ExchangeQueue::new(&link).unwrap();
        let (memory, stream) = (Arc::clone(&memory[rank]), Stream::new(gpu).unwrap());
        Rank { gpu: Arc::clone(gpu), memory, page, queue, stream }
    };
    [rank(0), rank(1)]
}

/// Every rank's 1,000 bytes go to everybody, one after the other.
fn shape() -> RouteShape {
    let piece = |rank: u64| RoutePiece {
        input: 0,
        src_offset: 0,
        dst_offset: 1000 * rank,
        run_bytes: 1000,
        loops: vec![],
    };
    RouteShape { op: 3, inputs: 1, result_bytes: 2000, pieces: vec![vec![piece(0)]; 2], num_sms: None }
}

impl Rank {
    fn route(&self, rank: u64) -> ExchangeRoute {
        let mut shape = shape();
        shape.pieces.iter_mut().flatten().for_each(|piece| piece.dst_offset = 1000 * rank);
        ExchangeRoute::new(self.queue.link(), shape).unwrap()
    }

    fn call(
        &mut self,
        route: &mut ExchangeRoute,
        input: &DeviceRegion,
        place: u64,
        mode: ExchangeMode<'_>,
    ) -> Result<(), CudaError> {
        let gpu = Arc::clone(&self.gpu);
        let cx = gpu.enter().unwrap();
        let way = self.queue.look(&cx, self.stream.handle())?;
        let inputs = [RouteInput { region: input, offset: 0 }];
        self.queue.call(&cx, &way, route, &inputs, place, 77, mode, None).map_err(|stopped| stopped.error)
    }

    fn pool(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.pool().read(offset, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn two_ranks_exchange_in_every_mode_over_both_kinds_of_memory() {
    let Some(gpus) = two() else { return };
    for plain in [false, true] {
        let mut ranks = ranks(&gpus, plain);
        let mut routes = [ranks[0].route(0), ranks[1].route(1)];
        let places = [4096, 8192];
        for (seed, mode) in (1_u64..).zip([
            ExchangeMode::Push,
            ExchangeMode::OpenedPush,
            ExchangeMode::CopyEngine(&places),
            ExchangeMode::Push,
            ExchangeMode::CopyEngine(&places),
        ]) {
            let data = [pattern(1000, seed), pattern(1000, 100 + seed)];
            for (at, rank) in ranks.iter_mut().enumerate() {
                routes[at].copies().unwrap();
                let input = region(&device(&rank.gpu, &data[at]));
                rank.call(&mut routes[at], &input, places[at], mode).unwrap();
            }
            for (at, rank) in ranks.iter_mut().enumerate() {
                assert!(rank.queue.settle(SOON).unwrap());
                assert!(rank.page.record().is_none(), "{:?}", rank.page.record());
                assert!(rank.pool(places[at], 2000) == data.concat(), "rank {at}, call {seed}");
            }
        }
    }
}

#[test]
fn devices_say_how_they_reach_each_other() {
    let Some([first, second]) = two() else { return };
    assert_eq!(first.reach(&first.info().uuid), Ok(PeerReach::Same));
    assert!(matches!(first.reach(&second.info().uuid), Ok(PeerReach::Direct { .. } | PeerReach::None)));
    assert_eq!(first.reach("GPU-of-nobody"), Ok(PeerReach::Unknown));
}

#[test]
fn the_probe_finds_good_links_and_a_peer_that_is_not_there() {
    let Some(gpus) = two() else { return };
    let ranks = ranks(&gpus, false);
    let running: Vec<_> = (ranks.iter())
        .map(|rank| {
            let cx = rank.gpu.enter().unwrap();
            rank.queue.link().probe(&cx, 99, SOON).unwrap()
        })
        .collect();
    for (at, probe) in running.into_iter().enumerate() {
        assert_eq!(probe.finish(SOON).unwrap()[1 - at].outcome(), ProbeState::Good);
    }
    // Alone, on fresh words.
    ranks.iter().for_each(|rank| rank.queue.link().zero().unwrap());
    let cx = ranks[0].gpu.enter().unwrap();
    let alone = ranks[0].queue.link().probe(&cx, 99, Duration::from_millis(20)).unwrap();
    assert_eq!(alone.finish(SOON).unwrap()[1].outcome(), ProbeState::Timeout);
}

#[test]
fn what_does_not_fit_is_refused_before_it_reaches_a_stream() {
    let Some(gpus) = two() else { return };
    let [mut first, second] = ranks(&gpus, false);
    let link = Arc::clone(first.queue.link());
    let mut route = first.route(0);
    let small = region(&Arc::new(DeviceBuffer::new(999, 0).unwrap()));
    let good = region(&device(&first.gpu, &pattern(1000, 1)));
    let far = region(&device(&second.gpu, &pattern(1000, 1)));
    let refused = |outcome: Result<(), CudaError>| outcome.unwrap_err();
    assert!(matches!(
        refused(first.call(&mut route, &small, 0, ExchangeMode::Push)),
        CudaError::OutOfBounds { .. }
    ));
    assert!(matches!(
        refused(first.call(&mut route, &far, 0, ExchangeMode::Push)),
        CudaError::WrongDevice { .. }
    ));
    for place in [8, POOL, POOL - 1024, u64::MAX - 255] {
        let found = refused(first.call(&mut route, &good, place, ExchangeMode::Push));
        assert!(matches!(found, CudaError::Argument { what: "the landing place", .. }), "{place}: {found}");
    }
    for places in [&[0, POOL - 999][..], &[256, 0], &[0], &[0, u64::MAX]] {
        let found = refused(first.call(&mut route, &good, 0, ExchangeMode::CopyEngine(places)));
        assert!(matches!(found, CudaError::Argument { .. }), "{places:?}: {found}");
    }
    // A route of another link.
    let mut other = second.route(0);
    assert!(matches!(
        refused(first.call(&mut other, &good, 0, ExchangeMode::Push)),
        CudaError::Argument { .. }
    ));
    // Shapes.
    let with = |change: &dyn Fn(&mut RouteShape)| {
        let mut shape = shape();
        change(&mut shape);
        ExchangeRoute::new(&link, shape)
            .and_then(|mut route| route.check(&mut kvferry_cuda::ExchangeParamBuffer::new()))
    };
    assert!(with(&|_| {}).is_ok());
    assert!(with(&|shape| shape.pieces.truncate(1)).is_err());
    assert!(with(&|shape| shape.pieces[1][0].input = 1).is_err());
    assert!(with(&|shape| shape.pieces[1][0].dst_offset = POOL - 999).is_err());
    assert!(with(&|shape| shape.result_bytes = POOL + 1).is_err());
    // The own share beyond the own results, for which alone a call finds room.
    assert!(matches!(
        with(&|shape| shape.pieces[0][0].dst_offset = 2000),
        Err(CudaError::Argument { what: "the own share's reach", .. })
    ));
    let endless = ExchangeLoop { count: 1 << 62, src_stride: 4, dst_stride: 4 };
    assert!(with(&|shape| shape.pieces[1][0].loops = vec![endless]).is_err());
    // Copies out of the pool.
    let cx = first.gpu.enter().unwrap();
    let stream = first.stream.handle();
    let gpu = Arc::clone(&first.gpu);
    let mut out = |from, region: &DeviceRegion, offset, run_bytes| {
        let _held = &gpu;
        let to = RouteInput { region, offset };
        first.queue.copy_out(&cx, stream, &[ExchangeOut { from, to, run_bytes, loops: &[] }])
    };
    assert!(matches!(out(POOL - 10, &good, 0, 11), Err(CudaError::OutOfBounds { .. })));
    assert!(matches!(out(0, &good, 990, 11), Err(CudaError::OutOfBounds { .. })));
    assert!(matches!(out(0, &good.clone().read_only(), 0, 1), Err(CudaError::ReadOnlyMemory { .. })));
    assert!(matches!(out(0, &far, 0, 1), Err(CudaError::WrongDevice { .. })));
    assert!(out(POOL - 10, &good, 990, 10).is_ok());
    // Nothing was launched but the last copy, and nothing waits for a peer.
    assert!(first.queue.settle(SOON).unwrap());
    // Links.
    let own = || PeerMemory::near(&second.memory, &second.gpu).unwrap();
    let page = || ExchangePage::new(&second.gpu).unwrap();
    let memory = || Arc::clone(&second.memory);
    assert!(ExchangeLink::new(0, memory(), vec![], page()).is_err());
    assert!(ExchangeLink::new(1, memory(), vec![own()], page()).is_err());
    assert!(ExchangeLink::new(0, memory(), (0..65).map(|_| own()).collect(), page()).is_err());
    let foreign = PeerMemory::near(&first.memory, &first.gpu).unwrap();
    assert!(ExchangeLink::new(0, memory(), vec![own(), foreign], page()).is_err());
}

#[test]
fn sizes_from_peers_are_not_believed() {
    let Some([gpu, _]) = two() else { return };
    let memory = ExchangeMemory::shareable(&gpu, POOL).unwrap();
    let fd = memory.export().unwrap();
    let len = memory.len();
    assert!(matches!(PeerMemory::import(fd.as_fd(), len, len, &gpu), Err(CudaError::OutOfBounds { .. })));
    assert!(PeerMemory::import(fd.as_fd(), len, u64::MAX, &gpu).is_err());
    assert!(PeerMemory::import(fd.as_fd(), 1 << 40, POOL, &gpu).is_err());
    let mapped = PeerMemory::import(fd.as_fd(), len, POOL, &gpu).unwrap();
    assert_eq!(mapped.pool_bytes(), POOL);
    assert!(ExchangeMemory::plain(&gpu, POOL).unwrap().export().is_err());
    assert!(memory.ipc().is_err(), "mapped memory has no IPC handle");
}

#[test]
fn owners_are_kept_until_the_device_is_done_unless_they_free_in_stream_order() {
    let Some(gpus) = two() else { return };
    let [mut first, mut second] = ranks(&gpus, false);
    let mut routes = [first.route(0), second.route(1)];
    let keep = |gpu: &Arc<Gpu>, grave: &Graveyard, ordered: bool| {
        let buffer = device(gpu, &pattern(1000, 1));
        let (addr, owner) = (buffer.addr(), Arc::new((buffer, grave.token())));
        // SAFETY: the buffer is the owner's.
        let region = unsafe { DeviceRegion::from_raw(addr, 1000, gpu.ordinal(), owner) };
        // SAFETY: the test waits for the stream before the owner lets go of the buffer.
        if ordered { unsafe { region.in_stream_order() } } else { region }
    };
    for ordered in [false, true] {
        let grave = Graveyard::default();
        // A free that waits for the gate would let nobody launch.
        drain_deferred();
        let gate = Gate::on(first.stream.handle());
        let input = keep(&first.gpu, &grave, ordered);
        first.call(&mut routes[0], &input, 0, ExchangeMode::Push).unwrap();
        // Such an owner would free in the order of the stream; this one does so when its stream is done.
        let kept = ordered.then(|| input.clone());
        drop(input);
        assert_eq!(grave.dropped(), 0, "{ordered}");
        let other = region(&device(&second.gpu, &pattern(1000, 2)));
        second.call(&mut routes[1], &other, 0, ExchangeMode::Push).unwrap();
        if ordered {
            assert!(Arc::strong_count(kept.as_ref().unwrap().owner()) == 1);
        }
        gate.open();
        assert!(first.queue.settle(SOON).unwrap() && second.queue.settle(SOON).unwrap());
        drop(kept);
        assert_eq!(grave.dropped(), 1);
    }
    // A queue that is dropped with a call on its way: what the call uses goes when it has ended.
    let grave = Graveyard::default();
    drain_deferred();
    let gate = Gate::on(first.stream.handle());
    let input = keep(&first.gpu, &grave, false);
    first.call(&mut routes[0], &input, 0, ExchangeMode::Push).unwrap();
    drop(input);
    let other = region(&device(&second.gpu, &pattern(1000, 2)));
    second.call(&mut routes[1], &other, 0, ExchangeMode::Push).unwrap();
    drop(first.queue);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(grave.dropped(), 0);
    gate.open();
    assert!(second.queue.settle(SOON).unwrap());
    let start = std::time::Instant::now();
    while grave.dropped() == 0 {
        assert!(start.elapsed() < SOON);
        std::thread::sleep(Duration::from_millis(1));
    }
    drain_deferred();
}

#[test]
fn a_graph_keeps_what_its_calls_use() {
    let Some(gpus) = two() else { return };
    let [mut first, mut second] = ranks(&gpus, false);
    let mut routes = [first.route(0), second.route(1)];
    let grave = Graveyard::default();
    let data = pattern(1000, 5);
    let input = {
        let buffer = device(&first.gpu, &data);
        let (addr, owner) = (buffer.addr(), Arc::new((buffer, grave.token())));
        // SAFETY: the buffer is the owner's.
        unsafe { DeviceRegion::from_raw(addr, 1000, 0, owner) }
    };
    let (gpu, stream) = (Arc::clone(&first.gpu), Stream::new(&first.gpu).unwrap());
    let cx = gpu.enter().unwrap();
    let graph = Graph::capture(&cx, &stream, |cx, at| {
        let way = first.queue.look(cx, at).unwrap();
        assert!(way.capture().is_some());
        let inputs = [RouteInput { region: &input, offset: 0 }];
        first.queue.call(cx, &way, &mut routes[0], &inputs, 256, 77, ExchangeMode::Push, None).unwrap();
        assert!(first.queue.refuse(cx, &way, 3, 1).is_err());
    });
    // What was seen outside a capture is of no use inside.
    let way = first.queue.look(&cx, stream.handle()).unwrap();
    drop(Graph::capture(&cx, &stream, |cx, _| {
        let inputs = [RouteInput { region: &input, offset: 0 }];
        let stale = first.queue.call(cx, &way, &mut routes[0], &inputs, 256, 77, ExchangeMode::Push, None);
        assert!(matches!(stale.unwrap_err().error, CudaError::StreamIsCapturing { .. }));
    }));
    drop((input, first.queue));
    drain_deferred();
    for seed in 0..3 {
        let other = pattern(1000, 50 + seed);
        graph.run(&stream);
        let input = region(&device(&second.gpu, &other));
        second.call(&mut routes[1], &input, 512, ExchangeMode::Push).unwrap();
        assert!(second.queue.settle(SOON).unwrap());
        stream.synchronize().unwrap();
        let mut found = vec![0; 2000];
        first.memory.pool().read(256, &mut found).unwrap();
        assert!(found == [&data[..], &other[..]].concat());
    }
    assert_eq!(grave.dropped(), 0);
    drop(graph);
    // The driver's thread first, then ours.
    let start = std::time::Instant::now();
    while grave.dropped() == 0 {
        assert!(start.elapsed() < SOON);
        drain_deferred();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn pages_carry_aborts_and_records() {
    let Some(gpus) = two() else { return };
    let [mut first, second] = ranks(&gpus, false);
    let mut route = first.route(0);
    let input = region(&device(&first.gpu, &pattern(1000, 1)));
    first.call(&mut route, &input, 0, ExchangeMode::Push).unwrap();
    assert!(!first.queue.settle(Duration::from_millis(50)).unwrap());
    assert!(first.page.abort(abort_word(9, 1)) && !first.page.abort(abort_word(8, 0)));
    assert!(first.queue.settle(SOON).unwrap());
    let record = first.page.record().unwrap();
    assert_eq!(RecordKind::from_code(record.kind), Some(RecordKind::Aborted));
    assert_eq!((record.epoch, record.op, record.value), (1, 3, abort_word(9, 1)));
    assert!(first.pool(0, 2000).iter().all(|&byte| byte == 0xFF));
    first.queue.link().zero().unwrap();
    assert!(first.page.record().is_none() && first.page.aborted() == 0);
    first.page.set_timeout(Duration::from_millis(30));
    first.call(&mut route, &input, 0, ExchangeMode::Push).unwrap();
    assert!(first.queue.settle(SOON).unwrap());
    let record = first.page.record().unwrap();
    assert_eq!((RecordKind::from_code(record.kind), record.peer), (Some(RecordKind::HeaderTimeout), 1));
    drop(second);
}
