//! Blocking access to regions of device memory.
#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod common;

use std::sync::Arc;

use common::{Graph, gpu, memory, pattern, pinned, read, region};
use kvferry_cuda::{BatchCopies, CudaError, DeviceBuffer, DeviceRegion, Driver, Flight, Stream};

#[test]
fn regions_are_read_and_written_within_bounds() {
    let Some(_gpu) = gpu() else { return };
    // Of every device, from a thread without a context.
    for ordinal in 0..Driver::get().unwrap().device_count() {
        let len = 10_007;
        let buffer = Arc::new(DeviceBuffer::new(len, ordinal).unwrap());
        let mut expected = pattern(len, 1);
        region(&buffer).write(0, &expected).unwrap();
        let part = region(&buffer).part(1000, 2000).unwrap();
        part.write(10, &[1, 2, 3]).unwrap();
        part.fill(1990, 10, 0xEE).unwrap();
        expected[1010..1013].copy_from_slice(&[1, 2, 3]);
        expected[2990..3000].fill(0xEE);
        let mut back = vec![0; 2000];
        part.read(0, &mut back).unwrap();
        assert!(back == expected[1000..3000] && read(&buffer) == expected);

        let out = |offset, len| Err(CudaError::OutOfBounds { offset, len, limit: 2000 });
        assert_eq!(part.read(1999, &mut [0; 2]), out(1999, 2));
        assert_eq!(part.write(2000, &[0]), out(2000, 1));
        assert_eq!(part.fill(u64::MAX, 2, 0), out(usize::MAX, 2));
        assert_eq!(part.fill(1, u64::MAX, 0), out(1, usize::MAX));
        assert_eq!((part.read(2000, &mut []), part.fill(2000, 0, 0)), (Ok(()), Ok(())));

        let lent = part.read_only();
        let refused = Err(CudaError::ReadOnlyMemory { addr: buffer.addr() + 1000 });
        assert_eq!(lent.write(0, &[0]), refused);
        assert_eq!(lent.fill(0, 1, 0), refused);
        lent.read(0, &mut back).unwrap();
        assert!(back == expected[1000..3000] && read(&buffer) == expected);
    }
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    let Some(_gpu) = gpu() else { return };
    let count = Driver::get().unwrap().device_count();
    // SAFETY: refused before the address is used.
    let nowhere = unsafe { DeviceRegion::from_raw(1 << 32, 10, count, Arc::new(())) };
    assert_eq!(nowhere.read(0, &mut [0]), Err(CudaError::InvalidDevice { ordinal: count, count }));
}

/// Somebody checks memory while a graph is captured in the mode that forbids most: the capture survives, and the check
/// happened at once.
#[test]
fn captures_are_left_alone() {
    let Some(gpu) = gpu() else { return };
    let cx = gpu.enter().unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let (_, source) = pinned(&gpu, &[7; 64]);
    let buffer = common::device(&gpu, &[1; 64]);
    let graph = Graph::capture(&cx, &stream, |cx, stream| {
        let mut copies = BatchCopies::new(std::slice::from_ref(&source), &[memory(&buffer)]);
        copies.push(0, 0, 0, 0, 64).unwrap();
        let mut flight = Flight::new(&gpu, cx).unwrap();
        copies.enqueue_each(cx, stream, &mut flight).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(read(&buffer) == [1; 64]));
        });
        region(&buffer).fill(0, 64, 2).unwrap();
        assert!(read(&buffer) == [2; 64]);
        flight.capture(cx, stream).unwrap();
    });
    assert!(read(&buffer) == [2; 64]);
    graph.run(&stream);
    stream.synchronize().unwrap();
    assert!(read(&buffer) == [7; 64]);
}
