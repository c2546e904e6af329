//! The CUDA border on whatever machine this is: typed errors without a driver, real memory with one.
//!
//! Tests that need a GPU say why they skip; with `KVFERRY_REQUIRE_GPU=1` they fail instead.
#![allow(clippy::panic, clippy::print_stderr, reason = "test helpers stop and speak")]

use kvferry_cuda::{
    CudaError, DeviceBuffer, DeviceInfo, Driver, KERNELS_NEED, PinnedBuffer, PointerKind, PrimaryContext,
    RelaxedCapture, devices, pointer_kind,
};

/// The driver, or None after saying why the test skips.
fn gpu() -> Option<&'static Driver> {
    match Driver::get() {
        Ok(driver) => Some(driver),
        Err(error) if std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("KVFERRY_REQUIRE_GPU=1 and there is no GPU: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
}

#[test]
fn without_a_driver_every_entry_says_so() {
    let Err(expected) = Driver::get() else {
        eprintln!("skipped: this machine has a driver");
        return;
    };
    assert!(
        matches!(
            expected,
            CudaError::DriverNotFound { .. }
                | CudaError::MissingSymbol { .. }
                | CudaError::NoDevice
                | CudaError::Driver { .. }
        ),
        "{expected:?}"
    );
    if let CudaError::DriverNotFound { looked_for } = &expected {
        assert!(looked_for.contains("libcuda.so.1"), "{looked_for}");
    }
    // Twice: the outcome is kept.
    for _ in 0..2 {
        assert_eq!(Driver::get().err().as_ref(), Some(&expected));
        assert_eq!(devices().err().as_ref(), Some(&expected));
        assert_eq!(DeviceInfo::get(0).err().as_ref(), Some(&expected));
        assert_eq!(PrimaryContext::get(0).err().as_ref(), Some(&expected));
        assert_eq!(RelaxedCapture::enter().err().as_ref(), Some(&expected));
        assert_eq!(PinnedBuffer::new(1, 0).err().as_ref(), Some(&expected));
        assert_eq!(DeviceBuffer::new(1, 0).err().as_ref(), Some(&expected));
        assert_eq!(pointer_kind(0x1000).err().as_ref(), Some(&expected));
    }
}

#[test]
fn empty_buffers_are_refused_everywhere() {
    assert_eq!(PinnedBuffer::new(0, 0).err(), Some(CudaError::ZeroLength { what: "pinned" }));
    assert_eq!(DeviceBuffer::new(0, 0).err(), Some(CudaError::ZeroLength { what: "device" }));
}

#[test]
fn devices_are_described() {
    let Some(driver) = gpu() else { return };
    let all = devices().unwrap();
    assert_eq!(all.len(), driver.device_count() as usize);
    eprintln!("driver API {}, {all:#?}", driver.driver_version());
    for (ordinal, device) in all.iter().enumerate() {
        assert_eq!(device.ordinal as usize, ordinal);
        assert!(!device.name.is_empty());
        assert_eq!(device.uuid.len(), 40);
        assert!(device.uuid.starts_with("GPU-"));
        assert!(device.compute_capability.0 >= 5);
        assert!(device.sm_count >= 1);
        assert!(device.total_memory > 1 << 20);
        assert!(device.pci_bus_id.contains(':'));
        assert_eq!(DeviceInfo::get(device.ordinal).as_ref(), Ok(device));
    }
    let count = driver.device_count();
    for ordinal in [count, u32::MAX] {
        let expected = Some(CudaError::InvalidDevice { ordinal, count });
        assert_eq!(DeviceInfo::get(ordinal).err(), expected);
        assert_eq!(PrimaryContext::get(ordinal).err(), expected);
        assert_eq!(DeviceBuffer::new(1, ordinal).err(), expected);
    }
    assert_eq!(driver.require_kernels().is_ok(), driver.driver_version() >= KERNELS_NEED);
}

#[test]
fn device_memory_round_trips_within_bounds() {
    if gpu().is_none() {
        return;
    }
    let len = 100_003;
    let buffer = DeviceBuffer::new(len, 0).unwrap();
    assert_eq!((buffer.len(), buffer.ordinal(), buffer.addr() % 256), (len, 0, 0));
    let (data, mut back) = (pattern(len), vec![0; len]);
    buffer.copy_from_host(0, &data).unwrap();
    buffer.copy_to_host(0, &mut back).unwrap();
    assert!(back == data);

    buffer.memset(7, 1000, 0xEE).unwrap();
    buffer.copy_from_host(len - 3, &[1, 2, 3]).unwrap();
    buffer.copy_to_host(0, &mut back).unwrap();
    assert!(back[..7] == data[..7] && back[1007..len - 3] == data[1007..len - 3]);
    assert!(back[7..1007].iter().all(|&b| b == 0xEE) && back[len - 3..] == [1, 2, 3]);

    let out = |offset, len_| Err(CudaError::OutOfBounds { offset, len: len_, limit: len });
    assert_eq!(buffer.copy_to_host(len - 1, &mut [0; 2]), out(len - 1, 2));
    assert_eq!(buffer.copy_from_host(len, &[0]), out(len, 1));
    assert_eq!(buffer.memset(usize::MAX, 2, 0), out(usize::MAX, 2));
    assert_eq!(buffer.memset(len, 0, 0), Ok(()));
    let mut again = vec![0; len];
    buffer.copy_to_host(0, &mut again).unwrap();
    assert!(again == back, "a refused access changed memory");
}

#[test]
fn pinned_memory_is_host_memory_that_devices_see() {
    if gpu().is_none() {
        return;
    }
    let len = 4097;
    let pinned = PinnedBuffer::new(len, 0).unwrap();
    assert_eq!((pinned.len(), pinned.ordinal(), pinned.addr() % 4096), (len, 0, 0));
    assert_eq!(pinned.device_addr(), pinned.addr(), "addressing is unified on 64-bit Linux");
    // SAFETY: the buffer is ours, `len` bytes long, and no device work is running on it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(pinned.as_ptr(), len) };
    bytes.copy_from_slice(&pattern(len));
    let device = DeviceBuffer::new(len, 0).unwrap();
    device.copy_from_host(0, bytes).unwrap();
    bytes.fill(0);
    device.copy_to_host(0, bytes).unwrap();
    assert!(bytes == pattern(len));
}

#[test]
fn pointers_are_told_apart() {
    if gpu().is_none() {
        return;
    }
    let (pinned, device) = (PinnedBuffer::new(64, 0).unwrap(), DeviceBuffer::new(64, 0).unwrap());
    let pageable = Box::new([0_u8; 64]);
    // On a thread of its own: nothing is current there.
    let (pinned_at, device_at, pageable_at) = (pinned.addr(), device.addr(), pageable.as_ptr() as u64);
    std::thread::spawn(move || {
        assert_eq!(pointer_kind(pinned_at), Ok(PointerKind::Pinned));
        assert_eq!(pointer_kind(pinned_at + 63), Ok(PointerKind::Pinned));
        assert_eq!(pointer_kind(device_at + 63), Ok(PointerKind::Device(0)));
        assert_eq!(pointer_kind(pageable_at), Ok(PointerKind::System));
    })
    .join()
    .unwrap();
}

#[test]
fn running_out_of_device_memory_names_the_bytes() {
    let Some(driver) = gpu() else { return };
    let ordinal = driver.device_count() - 1;
    let bytes = DeviceInfo::get(ordinal).unwrap().total_memory + (1 << 30);
    let expected = CudaError::OutOfMemory { bytes, ordinal, call: "cuMemAlloc_v2" };
    assert_eq!(DeviceBuffer::new(bytes, ordinal).err(), Some(expected));
    // The context survives.
    DeviceBuffer::new(1 << 20, ordinal).unwrap().memset(0, 1 << 20, 1).unwrap();
}

#[test]
fn contexts_are_shared_and_buffers_cross_threads() {
    if gpu().is_none() {
        return;
    }
    let (one, two) = (PrimaryContext::get(0).unwrap(), PrimaryContext::get(0).unwrap());
    assert!(std::sync::Arc::ptr_eq(&one, &two));
    let _outer = one.enter().unwrap();
    let _inner = two.enter().unwrap();
    let buffer = DeviceBuffer::new(1 << 16, 0).unwrap();
    std::thread::spawn(move || {
        buffer.memset(0, 1 << 16, 3).unwrap();
        drop(buffer);
    })
    .join()
    .unwrap();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| PinnedBuffer::new(4096, 0).unwrap());
            }
        });
    }
}
