//! Host memory that GPUs reach: pinned, registered, in one piece or several.
#![allow(clippy::print_stderr, clippy::unwrap_used, reason = "helpers of tests stop and speak")]

mod common;

use std::sync::Arc;

use common::{Gate, device, gpu, memory, pattern, pinned, read};
use kvferry_cuda::{
    BatchCopies, CudaError, Flight, GpuMemory, PointerKind, Stream, drain_deferred, pointer_kind,
    register_host, register_in_chunks,
};
use kvferry_host::{HostBuffer, HostOptions, HostRegion};

fn pageable(len: usize) -> HostRegion {
    HostRegion::of_buffer(Arc::new(HostBuffer::new(len, HostOptions::default()).unwrap()))
}

const PAGE: u64 = 4096;

#[test]
fn pageable_memory_is_refused_until_registered() {
    let Some(_gpu) = gpu() else { return };
    let region = pageable(8 * PAGE as usize);
    assert_eq!(GpuMemory::of_host(&region).err(), Some(CudaError::NotPinned { addr: region.addr() }));
    let registration = register_host(&region, 0).unwrap();
    assert!(!registration.foreign());
    assert_eq!(pointer_kind(region.addr() + 100), Ok(PointerKind::Pinned));
    let memory = GpuMemory::of_host(&region).unwrap();
    assert_eq!((memory.addr(), memory.len(), memory.ordinal()), (region.addr(), region.len(), None));
    // Inside: shared. The other handle keeps it registered.
    let inner = region.part(PAGE + 5, 1000).unwrap();
    let shared = register_host(&inner, 0).unwrap();
    drop(registration);
    assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::Pinned));
    drop(shared);
    // Memory in use keeps it registered, too.
    assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::Pinned));
    drop(memory);
    assert!(drain_deferred());
    assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::System));
    assert!(GpuMemory::of_host(&region).is_err());
}

#[test]
fn a_part_that_is_registered_is_named() {
    let Some(_gpu) = gpu() else { return };
    let region = pageable(8 * PAGE as usize);
    let registration = register_host(&region.part(2 * PAGE, 2 * PAGE).unwrap(), 0).unwrap();
    let base = region.addr();
    for (start, len) in [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE), (0, 8 * PAGE), (3 * PAGE, PAGE + 1)] {
        let refused = register_host(&region.part(start, len).unwrap(), 0).err();
        let end = (start + len).next_multiple_of(PAGE);
        let expected = CudaError::RegistrationOverlap {
            start: base + start,
            end: base + end,
            other_start: base + 2 * PAGE,
            other_end: base + 4 * PAGE,
        };
        assert_eq!(refused, Some(expected));
    }
    // Half of it is known to the driver: the first address that is not is named.
    let half = GpuMemory::of_host(&region.part(3 * PAGE, 2 * PAGE).unwrap());
    assert!(matches!(half, Err(CudaError::NotPinned { .. })), "{half:?}");
    // Neighbours are no overlap.
    let next = register_host(&region.part(4 * PAGE, PAGE).unwrap(), 0).unwrap();
    drop((registration, next));
    register_host(&region, 0).unwrap();
}

#[test]
fn pinned_memory_counts_as_registered() {
    let Some(gpu) = gpu() else { return };
    let (region, _) = pinned(&gpu, &[1; 10_000]);
    let registration = register_host(&region, 0).unwrap();
    assert!(registration.foreign());
    drop(registration);
    assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::Pinned));
}

#[test]
fn copies_never_reach_across_two_registrations() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let len = 5 * PAGE as usize;
    let region = pageable(len);
    let data = pattern(len, 1);
    region.write(0, &data).unwrap();
    let refused = register_in_chunks(&region, 0, 1000).err();
    assert!(matches!(refused, Some(CudaError::Argument { value: 1000, .. })), "{refused:?}");
    let _registration = register_in_chunks(&region, 0, 2 * PAGE).unwrap();
    let dst = device(&gpu, &vec![0; len]);
    let mut copies = BatchCopies::new(&[GpuMemory::of_host(&region).unwrap()], &[memory(&dst)]);
    copies.push(0, 10, 0, 20, 5 * PAGE - 30).unwrap();
    assert_eq!(copies.len(), 3, "seams at 2 and 4 pages");
    let mut flight = Flight::new(&gpu, &cx).unwrap();
    copies.enqueue(&cx, stream.handle(), &mut flight).unwrap();
    flight.land(&cx, stream.handle()).unwrap();
    flight.wait().unwrap();
    let mut expected = vec![0; len];
    expected[20..len - 10].copy_from_slice(&data[10..len - 20]);
    assert!(read(&dst) == expected);
    // A part knows the seams that lie inside it.
    let part = GpuMemory::of_host(&region.part(PAGE, 2 * PAGE).unwrap()).unwrap();
    let mut copies = BatchCopies::new(&[part], &[memory(&dst)]);
    copies.push(0, 0, 0, 0, 2 * PAGE).unwrap();
    assert_eq!(copies.len(), 2);
}

/// Nobody who drops the last handle waits for the device, and whoever registers the range again does.
#[test]
fn unregistering_waits_for_the_device_and_its_dropper_does_not() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let region = pageable(2 * PAGE as usize);
    let registration = register_host(&region, 0).unwrap();
    let gate = Gate::on(stream.handle());
    drop(registration);
    gate.open();
    let again = register_host(&region, 0).unwrap();
    assert!(!again.foreign());
    assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::Pinned));
    drop(cx);
}

#[test]
fn many_threads_share_one_registration() {
    let Some(_gpu) = gpu() else { return };
    let region = pageable(16 * PAGE as usize);
    for _ in 0..20 {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let registration = register_host(&region, 0).unwrap();
                    assert!(GpuMemory::of_host(&region).is_ok());
                    drop(registration);
                });
            }
        });
        assert!(drain_deferred());
        assert_eq!(pointer_kind(region.addr()), Ok(PointerKind::System));
    }
}
