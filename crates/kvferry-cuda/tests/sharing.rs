//! Memory for other processes, as far as one process can see.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;

use common::{device, gpu, pattern, read, region};
use kvferry_cuda::{
    BatchCopies, CudaError, DeviceRegion, Flight, GpuMemory, IpcHandle, IpcMapping, PointerKind, Stream,
    VmmBuffer, pointer_kind,
};

/// A region of `len` bytes of a mapping.
fn mapped(buffer: &Arc<VmmBuffer>, len: u64) -> GpuMemory {
    // SAFETY: the mapping is longer than `len`, and lives as long as the owner.
    let region =
        unsafe { DeviceRegion::from_raw(buffer.addr(), len, buffer.ordinal(), Arc::clone(buffer) as _) };
    GpuMemory::of_device(&region)
}

#[test]
fn shareable_memory_is_one_memory_under_two_addresses() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    assert_eq!(VmmBuffer::new(0, 0).err(), Some(CudaError::ZeroLength { what: "shareable device" }));
    let original = Arc::new(VmmBuffer::new(100_000, 0).unwrap());
    assert!(original.len() >= 100_000 && original.len().is_multiple_of(4096));
    assert_eq!(pointer_kind(original.addr()), Ok(PointerKind::Device(0)));
    let fd = original.export().unwrap();
    let copy = Arc::new(VmmBuffer::import(fd.as_fd(), original.len(), 0, 0).unwrap());
    drop(fd);
    assert_ne!(original.addr(), copy.addr());
    let data = pattern(100_000, 1);
    let (src, dst) = (device(&gpu, &data), device(&gpu, &vec![0; 100_000]));
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    for (from, to) in
        [(common::memory(&src), mapped(&original, 100_000)), (mapped(&copy, 100_000), common::memory(&dst))]
    {
        let mut copies = BatchCopies::new(&[from], &[to]);
        copies.push(0, 0, 0, 0, 100_000).unwrap();
        copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
    }
    flight.land(&cx, stream.handle()).unwrap();
    flight.wait().unwrap();
    drop(flight);
    assert!(read(&dst) == data);
    // The physical memory outlives the first mapping of it.
    drop(original);
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    dst.memset(0, 100_000, 0).unwrap();
    let mut copies = BatchCopies::new(&[mapped(&copy, 100_000)], &[common::memory(&dst)]);
    copies.push(0, 0, 0, 0, 100_000).unwrap();
    copies.enqueue_each(&cx, stream.handle(), &mut flight).unwrap();
    flight.land(&cx, stream.handle()).unwrap();
    flight.wait().unwrap();
    assert!(read(&dst) == data);
}

#[test]
fn wrong_descriptors_are_refused() {
    let Some(_gpu) = gpu() else { return };
    let file = std::fs::File::open("/dev/null").unwrap();
    let refused = VmmBuffer::import(file.as_fd(), 1 << 21, 0, 0);
    assert!(matches!(refused, Err(CudaError::Driver { .. })), "{refused:?}");
    assert!(matches!(
        VmmBuffer::import(file.as_fd(), 1, 99, 0),
        Err(CudaError::InvalidDevice { ordinal: 99, .. })
    ));
}

#[test]
fn handles_name_a_part_of_an_allocation() {
    let Some(gpu) = gpu() else { return };
    let buffer = device(&gpu, &[0; 5000]);
    let whole = IpcHandle::of(&region(&buffer)).unwrap();
    let part = IpcHandle::of(&region(&buffer).part(1000, 500).unwrap()).unwrap();
    assert_eq!((part.offset - whole.offset, part.len), (1000, 500));
    assert_eq!(part.bytes, whole.bytes);
    // A process may not open its own handle.
    let own = IpcMapping::open(&whole, 0);
    assert!(matches!(own, Err(CudaError::Driver { .. })), "{own:?}");
    let mapped = Arc::new(VmmBuffer::new(1, 0).unwrap());
    // SAFETY: all of the mapping.
    let region = unsafe { DeviceRegion::from_raw(mapped.addr(), 1, 0, mapped) };
    let refused = IpcHandle::of(&region);
    assert!(matches!(refused, Err(CudaError::SharingUnsupported { .. })), "{refused:?}");
}
