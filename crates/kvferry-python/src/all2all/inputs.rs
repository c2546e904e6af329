//! Arrays into an exchange: torch tensors by the shortest way, everything else by the protocols of `arrays`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kvferry::all2all::ExchangeArray;
use kvferry::cuda::DeviceRegion;
use kvferry::host::{HostRegion, Owner};
use kvferry::layout::{ExchangeError, HeadLayout, MAX_TENSORS};
use kvferry::{Dtype, MemoryKind, Region};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::array;
use super::torch::torch;
use crate::arrays::{PyOwner, Raw, memory_of, ndarray, raw};
use crate::dlpack::{self, DEVICE_CPU, DEVICE_CUDA, DEVICE_CUDA_HOST, DlDataType};
use crate::errors::{OrRaise, plain};
use crate::users::Users;

/// The library that an array belongs to: its results do too.
pub(crate) enum Library<'py> {
    /// Element type as torch names it in DLPack: kvferry moves types that it has no name for.
    Torch(DlDataType),
    /// The array's dtype object.
    NumPy(Bound<'py, PyAny>),
    Other,
}

/// One array of a call.
pub(crate) struct Input<'py> {
    pub(crate) object: Bound<'py, PyAny>,
    pub(crate) array: ExchangeArray,
    pub(crate) library: Library<'py>,
    /// It has three axes.
    pub(crate) flat: bool,
    /// Its element type where that has no name in kvferry, as its library tells it.
    pub(crate) unnamed: Option<String>,
}

/// The arrays of a call.
pub(crate) struct Inputs<'py> {
    pub(crate) each: Vec<Input<'py>>,
    /// They came as one array, not as a list.
    pub(crate) single: bool,
}

impl<'py> Inputs<'py> {
    /// Reads one array, or a list or tuple of them. `home`: where an array without elements is taken to lie.
    pub(crate) fn read(
        tensors: &Bound<'py, PyAny>,
        layout: HeadLayout,
        declared: Option<Dtype>,
        home: MemoryKind,
    ) -> PyResult<Inputs<'py>> {
        let several = tensors.is_instance_of::<PyTuple>() || tensors.is_instance_of::<PyList>();
        if !several {
            let each = vec![input(tensors.clone(), 0, layout, declared, home)?];
            return Ok(Inputs { each, single: true });
        }
        // Before any of them is looked at.
        let (value, limit) = (tensors.len()?, MAX_TENSORS);
        if value > limit {
            return Err(ExchangeError::TensorCount { value, limit }).or_raise(tensors.py());
        }
        let mut each = Vec::with_capacity(value);
        for (index, tensor) in tensors.try_iter()?.enumerate() {
            each.push(input(tensor?, index, layout, declared, home)?);
        }
        Ok(Inputs { each, single: false })
    }

    /// One number for the element types without a name, the same wherever they are the same; 0 if there are none.
    pub(crate) fn kinds(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let unnamed =
            self.each.iter().enumerate().filter_map(|(index, input)| Some((index, input.unnamed.as_ref()?)));
        let mut any = false;
        for one in unnamed {
            any = true;
            one.hash(&mut hasher);
        }
        if any { hasher.finish() } else { 0 }
    }

    pub(crate) fn arrays(&self) -> Vec<ExchangeArray> {
        self.each.iter().map(|input| input.array.clone()).collect()
    }
}

fn input<'py>(
    object: Bound<'py, PyAny>,
    index: usize,
    layout: HeadLayout,
    declared: Option<Dtype>,
    home: MemoryKind,
) -> PyResult<Input<'py>> {
    let py = object.py();
    if let Some(torch) = torch(py)?
        && torch.is_tensor(&object)?
    {
        if torch.needs_grad(&object)? {
            let message = format!(
                "tensor {index} requires grad, and this call would cut it off from its gradient: use kvferry.torch, \
                 or give tensor.detach()"
            );
            return Err(plain(py, "Unsupported", message));
        }
        if let Some(found) = torch.read(&object)? {
            return from_torch(object, &found, index, layout, declared);
        }
        let raw = raw(&object, &name(index))?;
        let known = raw.dtype.map(crate::export::dl_type).transpose()?;
        let (array, flat) = place(py, &raw, index, layout, declared, (known.is_none(), home))?;
        let library = Library::Torch(known.map_or_else(|| crate::export::dl_type(array.dtype), Ok)?);
        let unnamed = known.is_none().then(|| raw.dtype_name.clone());
        return Ok(Input { object, array, library, flat, unnamed });
    }
    if let Ok(ours) = object.cast::<array::ExchangeArray>() {
        let ours = ours.get();
        if ours.axes.layout == layout && declared.is_none_or(|declared| declared == ours.dtype()) {
            let (array, flat) = (ours.held.result().array(), ours.axes.flat);
            return Ok(Input { object, array, library: Library::Other, flat, unnamed: None });
        }
    }
    let numpy = numpy_dtype(&object)?;
    if let Some(dtype) = &numpy
        && dtype.getattr(intern!(py, "hasobject"))?.is_truthy()?
    {
        let message = format!(
            "tensor {index}: an array of Python objects holds addresses, which mean nothing to a peer"
        );
        return Err(plain(py, "LayoutError", message));
    }
    let raw = raw(&object, &name(index))?;
    let (array, flat) = place(py, &raw, index, layout, declared, (numpy.is_some(), home))?;
    let unnamed = match &numpy {
        // Byte order and all.
        Some(dtype) if raw.dtype.is_none() => Some(dtype.str()?.to_string()),
        _ => None,
    };
    Ok(Input { object, array, library: numpy.map_or(Library::Other, Library::NumPy), flat, unnamed })
}

fn name(index: usize) -> String {
    format!("tensor {index}")
}

/// The dtype of a NumPy array; `None` for anything else.
fn numpy_dtype<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    match ndarray(object.py())? {
        Some(array) if object.is_instance(array)? => object.getattr(intern!(object.py(), "dtype")).map(Some),
        _ => Ok(None),
    }
}

fn from_torch<'py>(
    object: Bound<'py, PyAny>,
    found: &dlpack::DlTensor,
    index: usize,
    layout: HeadLayout,
    declared: Option<Dtype>,
) -> PyResult<Input<'py>> {
    let py = object.py();
    let DlDataType { code, bits, lanes } = found.dtype;
    let item_bytes = if bits.is_multiple_of(8) && lanes == 1 { u64::from(bits / 8) } else { 0 };
    let (shape, strides) = dlpack::sizes(found, item_bytes);
    let known = dlpack::dtype(found.dtype);
    let name = || format!("torch's type code {code} of {bits} bits");
    let dtype = element(py, index, known, declared, item_bytes, true, name)?;
    let addr = if found.data.is_null() { 0 } else { (found.data as u64).wrapping_add(found.byte_offset) };
    let memory = match found.device.device_type {
        DEVICE_CPU | DEVICE_CUDA_HOST => MemoryKind::System,
        // torch counts devices as the driver does for this process.
        DEVICE_CUDA => MemoryKind::Device(u32::try_from(found.device.device_id).unwrap_or(0)),
        other => {
            let message = format!("tensor {index}: memory of DLPack device type {other} is not supported");
            return Err(plain(py, "Unsupported", message));
        }
    };
    let owner: Owner = Arc::new(PyOwner(object.clone().unbind()));
    let at = Placed { addr, shape: &shape, strides: &strides, dtype, memory };
    let (array, flat) = bind(py, &at, owner, index, layout)?;
    let unnamed = known.is_none().then(name);
    Ok(Input { object, array, library: Library::Torch(found.dtype), flat, unnamed })
}

/// Where an array lies, as every protocol tells it; strides in bytes.
struct Placed<'a> {
    addr: u64,
    shape: &'a [u64],
    strides: &'a [i64],
    dtype: Dtype,
    memory: MemoryKind,
}

fn place(
    py: Python<'_>,
    raw: &Raw,
    index: usize,
    layout: HeadLayout,
    declared: Option<Dtype>,
    (unnamed, home): (bool, MemoryKind),
) -> PyResult<(ExchangeArray, bool)> {
    let dtype = element(py, index, raw.dtype, declared, raw.item_bytes, unnamed, || raw.dtype_name.clone())?;
    // The driver knows no memory where nothing lies.
    let memory = if raw.shape.contains(&0) { home } else { memory_of(py, &name(index), raw)? };
    let owner: Owner = Arc::new(PyOwner(raw.keep.clone_ref(py)));
    let Raw { addr, ref shape, ref strides, .. } = *raw;
    bind(py, &Placed { addr, shape, strides, dtype, memory }, owner, index, layout)
}

/// The type that an array's elements travel as: their own, a declared one of the same width, or (where the result gets
/// its type from the caller's library) an integer of that width.
fn element(
    py: Python<'_>,
    index: usize,
    known: Option<Dtype>,
    declared: Option<Dtype>,
    item_bytes: u64,
    unnamed: bool,
    name: impl Fn() -> String,
) -> PyResult<Dtype> {
    match (known, declared) {
        (Some(known), None) => Ok(known),
        (Some(known), Some(declared)) if known.bytes() == declared.bytes() => Ok(declared),
        (None, Some(declared)) if declared.bytes() == item_bytes => Ok(declared),
        (_, Some(declared)) => {
            let message = format!("tensor {index}: elements ({}) cannot be {declared}", name());
            Err(plain(py, "LayoutError", message))
        }
        (None, None) => match item_bytes {
            1 if unnamed => Ok(Dtype::UInt8),
            2 if unnamed => Ok(Dtype::Int16),
            4 if unnamed => Ok(Dtype::Int32),
            8 if unnamed => Ok(Dtype::Int64),
            _ => {
                let hint = if unnamed {
                    "is no whole number of 1, 2, 4 or 8 bytes"
                } else {
                    "has no kvferry dtype; declare one with dtype="
                };
                Err(plain(py, "LayoutError", format!("tensor {index}: element type ({}) {hint}", name())))
            }
        },
    }
}

fn bind(
    py: Python<'_>,
    at: &Placed<'_>,
    owner: Owner,
    index: usize,
    layout: HeadLayout,
) -> PyResult<(ExchangeArray, bool)> {
    let refuse = |what: String| Err(plain(py, "LayoutError", format!("tensor {index}{what}")));
    let item = at.dtype.bytes();
    let (shape, strides, flat) = match (at.shape, at.strides) {
        (&[a, b, c, d], &[of_a, of_b, of_c, of_d]) => {
            if d > 1 && of_d != item as i64 && !at.shape.contains(&0) {
                return refuse(format!(
                    ": the last axis must be contiguous (a step of {item} bytes), got one of {of_d}"
                ));
            }
            ([a, b, c, d], [of_a, of_b, of_c], false)
        }
        (&[a, b, c], &[of_a, of_b, of_c]) => ([a, b, c, 1], [of_a, of_b, of_c], true),
        (shape, _) => {
            let names = if layout == HeadLayout::Bnhd { "[B, N, H, D]" } else { "[B, H, N, D]" };
            return refuse(format!(" must be {names}, or the same without D, got {} axes", shape.len()));
        }
    };
    let [batch, second, third, dim] = shape;
    let [of_batch, of_second, of_third] = strides;
    let (shape, strides) = match layout {
        HeadLayout::Bnhd => (shape, strides),
        HeadLayout::Bhnd => ([batch, third, second, dim], [of_batch, of_third, of_second]),
    };
    // First and one past the last byte, counted from element 0.
    let mut reach = (0_i128, i128::from(item) * i128::from(dim));
    if shape.contains(&0) {
        reach = (0, 0);
    } else {
        for (&extent, &stride) in shape.iter().zip(&strides) {
            let last = i128::from(extent - 1) * i128::from(stride);
            if last < 0 {
                reach.0 += last;
            } else {
                reach.1 += last;
            }
        }
        if at.addr == 0 {
            return refuse(": its data pointer is null".to_owned());
        }
    }
    let first = i128::from(at.addr) + reach.0;
    let (Ok(addr), Ok(len), Ok(offset)) =
        (u64::try_from(first), i64::try_from(reach.1 - reach.0), u64::try_from(-reach.0))
    else {
        return refuse(": its extents and strides exceed the address space".to_owned());
    };
    let len = len as u64;
    let region = match at.memory {
        MemoryKind::Device(ordinal) => {
            // SAFETY: as for host memory below, and driver or torch says that the address is this device's.
            let region = unsafe { DeviceRegion::from_raw(addr, len, ordinal, owner) };
            Region::Device(region.read_only())
        }
        // SAFETY: the exporter promises all bytes that extents and strides reach, `addr..addr + len`, for as long as its
        // buffer, capsule or array is referenced, and `owner` holds that reference; inputs are only read. We hold no
        // Rust reference to the bytes.
        _ => Region::Host(unsafe { HostRegion::from_raw(addr, len, false, owner) }),
    };
    let array = ExchangeArray { region, offset, shape, strides, dtype: at.dtype };
    Ok((array, flat))
}

impl Input<'_> {
    /// Whether torch and whether CuPy may be at work on the array. Of our own results it is not known who is.
    pub(crate) fn users(&self) -> PyResult<(bool, bool)> {
        if self.object.is_instance_of::<array::ExchangeArray>() {
            return Ok((true, true));
        }
        Ok(Users::of(&self.object)?.torch_and_cupy())
    }
}

/// A tensor of the caller's library to copy a result of type `dtype` to.
pub(crate) fn target(tensor: &Bound<'_, PyAny>, layout: HeadLayout, dtype: Dtype) -> PyResult<ExchangeArray> {
    let Input { mut array, .. } = input(tensor.clone(), 0, layout, Some(dtype), MemoryKind::System)?;
    array.region = match array.region {
        // SAFETY: memory that the caller's library has just allocated for this, writable, kept by the same owner.
        Region::Host(region) => Region::Host(unsafe {
            HostRegion::from_raw(region.addr(), region.len(), true, region.owner().clone())
        }),
        // SAFETY: as above.
        Region::Device(region) => Region::Device(unsafe {
            DeviceRegion::from_raw(region.addr(), region.len(), region.ordinal(), region.owner().clone())
        }),
    };
    Ok(array)
}
