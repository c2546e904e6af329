//! Communicators of threads with a GPU each, and arrays on them.

use std::sync::Arc;

use kvferry::Region;
use kvferry::all2all::{All2All, All2AllBuilder, ExchangeArray, ExchangeDevice, ExchangeResult, Landing};
use kvferry::cuda::{DeviceBuffer, DeviceRegion, Driver, Gpu, Stream};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};

use crate::exchange::{Strides, Whole, builder, fresh_name, threads};

/// How many GPUs there are, if at least `wanted`; otherwise why the test skips. With `KVFERRY_REQUIRE_GPU=1` two must be
/// there.
pub(crate) fn gpus(wanted: usize) -> Option<usize> {
    let required = std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|value| value == "1");
    match Driver::get().map(Driver::device_count) {
        Ok(count) if count as usize >= wanted => Some(count as usize),
        found if required && wanted <= 2 => panic!("KVFERRY_REQUIRE_GPU=1, {wanted} GPUs wanted: {found:?}"),
        found => {
            eprintln!("skipped: {wanted} GPUs wanted, {found:?}");
            None
        }
    }
}

/// Runs every rank in a thread of its own with the GPU of its number.
pub(crate) fn on_gpus<T: Send>(
    world: usize,
    configure: impl Fn(All2AllBuilder) -> All2AllBuilder + Sync,
    body: impl Fn(&Rank) -> T + Sync,
) -> Vec<T> {
    let name = fresh_name();
    threads(world, |rank| {
        let builder = builder(rank, world, &name).device(ExchangeDevice::Gpu(rank as u32));
        let comm = configure(builder).connect().expect("set-up");
        body(&Rank::new(comm))
    })
}

/// A communicator and a stream on its GPU.
pub(crate) struct Rank {
    pub(crate) comm: All2All,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) stream: Stream,
    pub(crate) rank: usize,
}

impl Rank {
    pub(crate) fn new(comm: All2All) -> Rank {
        let ExchangeDevice::Gpu(ordinal) = comm.device() else { panic!("a communicator of GPUs") };
        let gpu = Gpu::open(ordinal).unwrap();
        let (stream, rank) = (Stream::new(&gpu).unwrap(), comm.rank());
        Rank { comm, gpu, stream, rank }
    }

    /// Device memory with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8]) -> DeviceRegion {
        let buffer = DeviceBuffer::new(bytes.len().max(1), self.gpu.ordinal()).unwrap();
        buffer.copy_from_host(0, bytes).unwrap();
        DeviceRegion::of_buffer(Arc::new(buffer))
    }

    /// An input of the whole, with all that surrounds it.
    pub(crate) fn input(&self, whole: &Whole, op: ExchangeOp, how: &Strides) -> ExchangeArray {
        let host = whole.strided(op, self.rank, how).array;
        let region = host.region.host().unwrap();
        let mut image = vec![0; region.len() as usize];
        region.read(0, &mut image).unwrap();
        ExchangeArray { region: Region::Device(self.upload(&image)), ..host }
    }

    /// One call of one tensor on the rank's stream.
    pub(crate) fn call(&self, whole: &Whole, op: ExchangeOp) -> kvferry::Result<ExchangeResult> {
        let input = self.input(whole, op, &Strides::default());
        let mut options = whole.options(op, HeadLayout::Bnhd);
        options.stream = Some(self.stream.handle());
        Ok(self.comm.exchange(op, &[input], &options, Landing::Pool)?.remove(0))
    }

    /// Looks at every byte of a result, once the stream is done.
    pub(crate) fn check(&self, whole: &Whole, op: ExchangeOp, layout: HeadLayout, result: &ExchangeResult) {
        self.stream.synchronize().unwrap();
        let (found, expected) = (bytes(result), whole.expected(op, self.rank, layout));
        assert_eq!(found.len(), expected.len());
        if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            let (rank, found) = (self.rank, found[at]);
            panic!("{op} on rank {rank}: byte {at} of {} is {found:#x}", expected.len());
        }
    }

    /// One call, and a look at its result.
    pub(crate) fn checked(&self, whole: &Whole, op: ExchangeOp) -> ExchangeResult {
        let result = self.call(whole, op).unwrap();
        self.check(whole, op, HeadLayout::Bnhd, &result);
        self.comm.check().unwrap();
        result
    }
}

/// All bytes of a result that is contiguous. What wrote it has ended.
pub(crate) fn bytes(result: &ExchangeResult) -> Vec<u8> {
    let count = result.shape().iter().product::<u64>() * result.dtype().bytes();
    let mut bytes = vec![0; count as usize];
    let Region::Device(region) = result.region() else { panic!("a result on a GPU") };
    region.read(result.offset(), &mut bytes).unwrap();
    bytes
}

/// All bytes of the region that a result lies in. What wrote it has ended.
pub(crate) fn image(result: &ExchangeResult) -> Vec<u8> {
    let Region::Device(region) = result.region() else { panic!("a result on a GPU") };
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// A function of the loaded driver that the library has no use for.
///
/// # Safety
/// `F` is a pointer to a function of its type.
unsafe fn symbol<F: Copy>(name: &std::ffi::CStr) -> Option<F> {
    // SAFETY: the driver is loaded already; this only names it again.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: a handle of dlopen, or null, and a name that ends with a null.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert_eq!(size_of::<F>(), size_of_val(&found));
    // SAFETY: the caller vouches for the type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// How many things of a kind the simulated driver holds.
pub(crate) fn live(kind: &std::ffi::CStr) -> Option<u64> {
    type Live = unsafe extern "C" fn(*const std::ffi::c_char) -> u64;
    // SAFETY: the type is the simulation's.
    let live = unsafe { symbol::<Live>(c"kvferryFakeLive") }?;
    // SAFETY: a text that ends with a null.
    Some(unsafe { live(kind.as_ptr()) })
}

/// Holds a stream until opened or dropped: what is put on it later waits.
pub(crate) struct Hold {
    flag: kvferry::cuda::PinnedBuffer,
}

impl Hold {
    pub(crate) fn on(gpu: &Gpu, stream: &Stream) -> Hold {
        type Wait = unsafe extern "C" fn(*mut std::ffi::c_void, u64, u32, u32) -> i32;
        let flag = kvferry::cuda::PinnedBuffer::new(4096, gpu.ordinal()).unwrap();
        // SAFETY: a whole, aligned word of the buffer.
        unsafe { flag.as_ptr().cast::<u32>().write_volatile(0) };
        // SAFETY: the type is the driver's (cuStreamWaitValue32_v2).
        let wait = unsafe { symbol::<Wait>(c"cuStreamWaitValue32_v2") }.unwrap();
        let handle = std::ptr::with_exposed_provenance_mut(stream.handle().raw() as usize);
        let _current = gpu.enter().unwrap();
        // SAFETY: the stream exists; the word is pinned and outlives the wait, which dropping ends. 1: equal.
        assert_eq!(unsafe { wait(handle, flag.device_addr(), 1, 1) }, 0);
        Hold { flag }
    }

    pub(crate) fn open(&self) {
        // SAFETY: as above.
        unsafe { self.flag.as_ptr().cast::<u32>().write_volatile(1) };
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.open();
    }
}
