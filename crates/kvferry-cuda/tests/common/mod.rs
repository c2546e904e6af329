//! What the GPU tests share: finding the GPU, patterns, a gate that holds a stream, graphs.
#![allow(clippy::panic, clippy::print_stderr, clippy::unwrap_used, reason = "test helpers stop and speak")]
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::any::Any;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use kvferry_cuda::{
    ContextGuard, DeviceBuffer, DeviceRegion, Gpu, GpuMemory, PinnedBuffer, Stream, StreamHandle,
};

/// Device 0, for one test at a time. Tests hold streams by gates, and freeing memory waits for all work of the device, with
/// a lock of the driver held: a test that frees would wait for another one's gate, and that one for the lock.
pub(crate) struct TestGpu {
    gpu: Arc<Gpu>,
    _alone: MutexGuard<'static, ()>,
}

impl Deref for TestGpu {
    type Target = Arc<Gpu>;

    fn deref(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

/// The GPU, or None after saying why the test skips. With `KVFERRY_REQUIRE_GPU=1` a skip is a failure.
pub(crate) fn gpu() -> Option<TestGpu> {
    static TURN: Mutex<()> = Mutex::new(());
    let _alone = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match Gpu::open(0) {
        Ok(gpu) => Some(TestGpu { gpu, _alone }),
        Err(error) if required() => panic!("KVFERRY_REQUIRE_GPU=1 and there is no usable GPU: {error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// As [`gpu`], with kernels in this build.
pub(crate) fn gpu_with_kernels() -> Option<TestGpu> {
    let gpu = gpu()?;
    if gpu.has_kernels() {
        return Some(gpu);
    }
    assert!(!required(), "KVFERRY_REQUIRE_GPU=1 and this build has no kernels");
    eprintln!("skipped: this build has no kernels");
    None
}

fn required() -> bool {
    std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1")
}

/// Bytes that differ from place to place, and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| ((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ seed.rotate_left(17)) >> 29) as u8)
        .collect()
}

/// Device memory with `bytes` in it.
pub(crate) fn device(gpu: &Gpu, bytes: &[u8]) -> Arc<DeviceBuffer> {
    let buffer = DeviceBuffer::new(bytes.len(), gpu.ordinal()).unwrap();
    buffer.copy_from_host(0, bytes).unwrap();
    Arc::new(buffer)
}

pub(crate) fn region(buffer: &Arc<DeviceBuffer>) -> DeviceRegion {
    DeviceRegion::of_buffer(Arc::clone(buffer))
}

pub(crate) fn memory(buffer: &Arc<DeviceBuffer>) -> GpuMemory {
    GpuMemory::of_device(&region(buffer))
}

pub(crate) fn read(buffer: &DeviceBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.copy_to_host(0, &mut bytes).unwrap();
    bytes
}

/// Pinned memory with `bytes` in it, as memory for engines.
pub(crate) fn pinned(gpu: &Gpu, bytes: &[u8]) -> (kvferry_host::HostRegion, GpuMemory) {
    let region = PinnedBuffer::new(bytes.len(), gpu.ordinal()).unwrap().into_region();
    region.write(0, bytes).unwrap();
    let memory = GpuMemory::of_host(&region).unwrap();
    (region, memory)
}

pub(crate) fn read_host(region: &kvferry_host::HostRegion) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// Counts how many of its tokens are gone.
#[derive(Clone, Default)]
pub(crate) struct Graveyard(Arc<AtomicUsize>);

struct Token(Arc<AtomicUsize>);

impl Drop for Token {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Graveyard {
    pub(crate) fn token(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::new(Token(Arc::clone(&self.0)))
    }

    pub(crate) fn dropped(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Holds a stream until it is opened: a host function that waits.
pub(crate) struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    open: Mutex<bool>,
    changed: Condvar,
    reached: AtomicBool,
}

impl Gate {
    /// A gate on `stream`; work put there afterwards waits.
    pub(crate) fn on(stream: StreamHandle) -> Gate {
        let state = Arc::new(GateState::default());
        let raw = Arc::into_raw(Arc::clone(&state)).cast_mut().cast::<c_void>();
        // SAFETY: the stream is live and its context current; the function takes the Arc back once.
        let status = unsafe { sys::cuLaunchHostFunc(as_stream(stream), Some(wait_at_gate), raw) };
        assert_eq!(status as u32, 0);
        Gate(state)
    }

    pub(crate) fn open(&self) {
        *self.0.open.lock().unwrap() = true;
        self.0.changed.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

unsafe extern "C" fn wait_at_gate(state: *mut c_void) {
    // SAFETY: made by `Gate::on`, taken back once.
    let state = unsafe { Arc::from_raw(state.cast::<GateState>()) };
    state.reached.store(true, Ordering::SeqCst);
    let mut open = state.open.lock().unwrap();
    while !*open {
        open = state.changed.wait(open).unwrap();
    }
}

pub(crate) fn as_stream(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.raw() as usize)
}

/// A graph under construction on a stream of its own, then ready to run.
pub(crate) struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures what `work` puts on `stream`, in the mode that spoils most.
    pub(crate) fn capture(
        cx: &ContextGuard<'_>,
        stream: &Stream,
        work: impl FnOnce(&ContextGuard<'_>, StreamHandle),
    ) -> Graph {
        let handle = as_stream(stream.handle());
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: the stream is live and its context current.
        assert_eq!(unsafe { sys::cuStreamBeginCapture_v2(handle, mode) } as u32, 0);
        work(cx, stream.handle());
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the capture was begun above.
        let ended = unsafe { sys::cuStreamEndCapture(handle, &mut graph) };
        assert_eq!(ended as u32, 0, "the capture was spoiled");
        // SAFETY: the graph is whole.
        assert_eq!(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) } as u32, 0);
        Graph { graph, exec }
    }

    pub(crate) fn run(&self, stream: &Stream) {
        // SAFETY: both live, the context is current.
        assert_eq!(unsafe { sys::cuGraphLaunch(self.exec, as_stream(stream.handle())) } as u32, 0);
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by us, destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
        // SAFETY: captured by us, destroyed once.
        unsafe { sys::cuGraphDestroy(self.graph) };
    }
}
