//! `kvferry.memcpy_batch` and `kvferry.vectorized_copy`: copies between raw addresses on a caller's stream.

use std::sync::{Arc, Mutex, PoisonError};

use kvferry::cuda::{Gpu, MemcpyBatchPath, PointerKind, pointer_kind};
use kvferry::{Dtype, MemcpyBatchMode, StreamHandle};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arrays::raw;
use crate::errors::{OrRaise, plain};
use crate::numbers::whole;
use crate::words::words;

/// Opened devices by ordinal. Loading kernels takes milliseconds, and nothing else may hold a device between two calls of
/// a primitive. Never dropped: at the end of the process the driver may be gone.
static OPENED: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

fn opened(ordinal: u32) -> kvferry::Result<Arc<Gpu>> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = opened.iter().find(|gpu| gpu.ordinal() == ordinal) {
        return Ok(gpu.clone());
    }
    let gpu = Gpu::open(ordinal)?;
    opened.push(gpu.clone());
    Ok(gpu)
}

/// The device that a stream belongs to; `usual` for a default stream, which every device has.
fn device_of(stream: StreamHandle, usual: u32) -> kvferry::Result<Arc<Gpu>> {
    let gpu = opened(usual)?;
    let cx = gpu.enter()?;
    let ordinal = gpu.stream_device(&cx, stream)?;
    if ordinal == usual {
        drop(cx);
        return Ok(gpu);
    }
    opened(ordinal)
}

/// The GPU that holds an address, if one does.
fn holder(addr: u64) -> Option<u32> {
    match pointer_kind(addr) {
        Ok(PointerKind::Device(ordinal)) => Some(ordinal),
        _ => None,
    }
}

/// Copies sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], in one call of the driver where it has one.
#[pyfunction]
#[pyo3(signature = (src_ptrs, dst_ptrs, sizes, *, stream, mode="batched_with_fallback"))]
pub(crate) fn memcpy_batch(
    py: Python<'_>,
    src_ptrs: &Bound<'_, PyAny>,
    dst_ptrs: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
    stream: &Bound<'_, PyAny>,
    mode: &str,
) -> PyResult<&'static str> {
    let mode = match mode {
        "batched_with_fallback" => MemcpyBatchMode::BatchedWithFallback,
        "fallback_only" => MemcpyBatchMode::FallbackOnly,
        "batch_without_fallback" => MemcpyBatchMode::BatchWithoutFallback,
        other => {
            let message = format!(
                "mode must be one of batched_with_fallback, fallback_only, batch_without_fallback, got {other:?}"
            );
            return Err(plain(py, "OptionError", message));
        }
    };
    let handle = crate::streams::stream("stream", stream)?;
    let (src, dst) = (words(src_ptrs, "src_ptrs")?, words(dst_ptrs, "dst_ptrs")?);
    let sizes = words(sizes, "sizes")?;
    for (name, list) in [("src_ptrs", &src), ("dst_ptrs", &dst)] {
        // The driver takes null for pageable memory, and reads it.
        if let Some(index) = list.iter().zip(&sizes).position(|(&addr, &size)| addr == 0 && size > 0) {
            return Err(plain(py, "OptionError", format!("{name} is null at index {index}")));
        }
    }
    let path = py.detach(|| {
        let usual = dst.iter().take(1).chain(src.iter().take(1)).find_map(|&addr| holder(addr)).unwrap_or(0);
        let gpu = device_of(handle, usual)?;
        // SAFETY: raw addresses are the caller's promise, which is what this function is for; its documentation says until
        // when they must stay valid.
        unsafe { kvferry::memcpy_batch(&gpu, &src, &dst, &sizes, handle, mode) }.map_err(kvferry::Error::from)
    });
    Ok(match path.or_raise(py)? {
        MemcpyBatchPath::Nothing => "nothing",
        MemcpyBatchPath::Batched => "batched",
        MemcpyBatchPath::PerCopy => "per_copy",
    })
}

/// A table of addresses: where it lies and how many it has.
fn table(array: &Bound<'_, PyAny>, name: &str) -> PyResult<(u64, u64)> {
    let py = array.py();
    let found = raw(array, name)?;
    let words = found.dtype == Some(Dtype::Int64) || (found.item_bytes == 8 && found.relabel);
    if !words {
        let message = format!("{name} must hold 64-bit integers, got {}", found.dtype_name);
        return Err(PyTypeError::new_err(message));
    }
    let &[count] = &found.shape[..] else {
        let message = format!("{name} must be one-dimensional, got {} dimensions", found.shape.len());
        return Err(plain(py, "LayoutError", message));
    };
    if count > 1 && found.strides != [8] {
        return Err(plain(py, "LayoutError", format!("{name} must be contiguous")));
    }
    if count == 0 {
        return Ok((0, 0));
    }
    if let PointerKind::System | PointerKind::Managed = py.detach(|| pointer_kind(found.addr)).or_raise(py)? {
        let message = format!(
            "{name} in pageable or managed memory is not supported: a kernel reads the table, put it in memory of \
             the GPU or in pinned memory"
        );
        return Err(plain(py, "Unsupported", message));
    }
    Ok((found.addr, count))
}

/// Copies nbytes from each address in one table to the address at the same place in the other, by a kernel.
#[pyfunction]
#[pyo3(signature = (src_ptrs, dst_ptrs, nbytes, *, stream, num_sms=None))]
pub(crate) fn vectorized_copy(
    py: Python<'_>,
    src_ptrs: &Bound<'_, PyAny>,
    dst_ptrs: &Bound<'_, PyAny>,
    nbytes: &Bound<'_, PyAny>,
    stream: &Bound<'_, PyAny>,
    num_sms: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let handle = crate::streams::stream("stream", stream)?;
    let nbytes = whole("OptionError", "nbytes", nbytes, i64::MAX as u64)?;
    let most = match num_sms {
        None => None,
        Some(value) => match whole("OptionError", "num_sms", value, u32::MAX.into())? {
            0 => return Err(plain(py, "OptionError", "num_sms must be at least 1, got 0")),
            most => Some(most as u32),
        },
    };
    let ((src, count), (dst, others)) = (table(src_ptrs, "src_ptrs")?, table(dst_ptrs, "dst_ptrs")?);
    if count != others {
        let message =
            format!("src_ptrs has {count} addresses, dst_ptrs {others}: the tables must be equally long");
        return Err(plain(py, "OptionError", message));
    }
    if count == 0 {
        return Ok(());
    }
    py.detach(|| {
        let gpu = device_of(handle, holder(dst).or_else(|| holder(src)).unwrap_or(0))?;
        // SAFETY: the tables hold `count` words that kernels can read, as just checked; they and the addresses in them stay
        // valid until the stream is past the copy, which the documentation asks of the caller.
        unsafe { kvferry::vectorized_copy(&gpu, src, dst, count, nbytes, handle, most) }
            .map_err(kvferry::Error::from)
    })
    .or_raise(py)
}
