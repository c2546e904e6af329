//! `kvferry.PhysicalLayout`.

use std::sync::Arc;

use kvferry::{Axis, BlockDim, Dtype, ForeignArray, KvOrder, LayoutKind};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arrays;
use crate::config::LayoutConfig;
use crate::errors::{OrRaise, plain};
use crate::memory::Memory;
use crate::numbers::whole;
use crate::region::Region;
use crate::users::Users;
use crate::verify;

/// A layout bound to memory, owned or borrowed.
#[pyclass(frozen, module = "kvferry")]
pub(crate) struct PhysicalLayout {
    pub(crate) core: Arc<kvferry::PhysicalLayout>,
    /// Whose streams work on this memory.
    pub(crate) users: Arc<Users>,
}

impl PhysicalLayout {
    /// A layout whose memory these libraries use.
    fn new(core: Arc<kvferry::PhysicalLayout>, users: Users) -> PhysicalLayout {
        PhysicalLayout { core, users: Arc::new(users) }
    }
}

fn make(
    py: Python<'_>,
    config: &LayoutConfig,
    memory: &Memory,
    kind: LayoutKind,
) -> PyResult<PhysicalLayout> {
    let (config, memory) = (config.0, *memory);
    let made = py.detach(|| {
        let layout = kvferry::Layout::of_kind(config, kind)?;
        memory.allocate(layout)
    });
    Ok(PhysicalLayout::new(made.or_raise(py)?, Users::default()))
}

#[pymethods]
impl PhysicalLayout {
    /// One allocation, blocks outermost.
    #[staticmethod]
    #[pyo3(signature = (config, memory, *, order="NHD"))]
    fn fully_contiguous(
        py: Python<'_>,
        config: &LayoutConfig,
        memory: &Memory,
        order: &str,
    ) -> PyResult<Self> {
        make(
            py,
            config,
            memory,
            LayoutKind::FullyContiguous { order: order.parse::<KvOrder>().or_raise(py)? },
        )
    }

    /// One allocation per layer.
    #[staticmethod]
    #[pyo3(signature = (config, memory, *, block_dim="block_first", order="NHD"))]
    fn layer_separate(
        py: Python<'_>,
        config: &LayoutConfig,
        memory: &Memory,
        block_dim: &str,
        order: &str,
    ) -> PyResult<Self> {
        let block_dim = block_dim.parse::<BlockDim>().or_raise(py)?;
        let order = order.parse::<KvOrder>().or_raise(py)?;
        make(py, config, memory, LayoutKind::LayerSeparate { block_dim, order })
    }

    /// One allocation per layer for K and one for V.
    #[staticmethod]
    #[pyo3(signature = (config, memory, *, order="NHD"))]
    fn split_kv(py: Python<'_>, config: &LayoutConfig, memory: &Memory, order: &str) -> PyResult<Self> {
        make(py, config, memory, LayoutKind::SplitKv { order: order.parse::<KvOrder>().or_raise(py)? })
    }

    /// One region per block.
    #[staticmethod]
    #[pyo3(signature = (config, memory, *, order="NHD"))]
    fn block_pool(py: Python<'_>, config: &LayoutConfig, memory: &Memory, order: &str) -> PyResult<Self> {
        make(py, config, memory, LayoutKind::BlockPool { order: order.parse::<KvOrder>().or_raise(py)? })
    }

    /// Foreign arrays as a layout, without copying.
    #[staticmethod]
    #[pyo3(signature = (tensors, *, axes, config=None, dtype=None))]
    fn from_tensors(
        py: Python<'_>,
        tensors: &Bound<'_, PyAny>,
        axes: &str,
        config: Option<&LayoutConfig>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let axes = Axis::parse_list(axes).or_raise(py)?;
        let declared = match dtype {
            Some(value) => Some(crate::config::dtype(value)?),
            None => config.map(|config| config.0.dtype()),
        };
        let (found, pairs) = arrays::collect(tensors, declared)?;
        let users = Users::default();
        let (element, memory) = match found.first() {
            Some(first) => (first.dtype, first.memory),
            None => return Err(plain(py, "LayoutError", "tensors is empty")),
        };
        let (mut shapes, mut regions) = (Vec::new(), Vec::new());
        for array in found {
            users.join(&array.users);
            shapes.push(array.array);
            regions.push(array.region);
        }
        let layout = kvferry::Layout::from_arrays(&shapes, &axes, pairs, element, config.map(|c| &c.0))
            .or_raise(py)?;
        if let Some(config) = config {
            aligned(py, &layout, &shapes, &regions, config.0.alignment())?;
        }
        let made = kvferry::PhysicalLayout::from_regions(layout, memory, regions).or_raise(py)?;
        Ok(PhysicalLayout::new(made, users))
    }

    /// Opaque pages: each array is [blocks, bytes], one array in all or one per layer, without copying.
    #[staticmethod]
    fn from_pages(tensors: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = tensors.py();
        let (found, pairs) = arrays::collect(tensors, None)?;
        let users = Users::default();
        if pairs {
            return Err(plain(py, "LayoutError", "pages are opaque: pass arrays, not (K, V) pairs"));
        }
        let memory = match found.first() {
            Some(first) => first.memory,
            None => return Err(plain(py, "LayoutError", "tensors is empty")),
        };
        let (mut shapes, mut regions) = (Vec::new(), Vec::new());
        for mut array in found {
            users.join(&array.users);
            // A row of elements is a row of bytes, if it is a row at all.
            let width = array.dtype.bytes();
            if let ([_, row], [_, step]) = (&mut array.array.shape[..], &mut array.array.strides[..]) {
                if *row > 1 && *step != width as i64 {
                    let message = format!("{}: its pages are not contiguous bytes", array.array.name);
                    return Err(plain(py, "LayoutError", message));
                }
                (*row, *step) = (row.saturating_mul(width), 1);
            }
            shapes.push(array.array);
            regions.push(array.region);
        }
        let layout =
            kvferry::Layout::from_arrays(&shapes, &[Axis::Block, Axis::Dim], false, Dtype::UInt8, None)
                .or_raise(py)?;
        let made = kvferry::PhysicalLayout::from_regions(layout, memory, regions).or_raise(py)?;
        Ok(PhysicalLayout::new(made, users))
    }

    /// Allocates memory for a layout given as JSON (see to_json). The text is validated as hostile input.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str, memory: &Memory) -> PyResult<Self> {
        let memory = *memory;
        let made = py.detach(|| {
            let layout = kvferry::Layout::from_json(text)?;
            memory.allocate(layout)
        });
        Ok(PhysicalLayout::new(made.or_raise(py)?, Users::default()))
    }

    /// The layout without its memory, as JSON with a version.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        self.core.layout().to_json().or_raise(py)
    }

    /// 16 hexadecimal digits that are equal for equal layouts, on any machine; the memory does not count.
    #[getter]
    fn digest(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("{:016x}", self.core.layout().digest().or_raise(py)?))
    }

    /// Why blocks cannot move from this layout to another: all reasons, none if they can.
    fn incompatibilities(&self, dst: &PhysicalLayout) -> Vec<String> {
        let reasons = kvferry::layout::incompatibilities(self.core.layout(), dst.core.layout());
        reasons.into_iter().map(|reason| reason.to_string()).collect()
    }

    #[getter]
    fn config(&self) -> LayoutConfig {
        LayoutConfig(*self.core.layout().config())
    }

    /// "FullyContiguous", "LayerSeparate", "SplitKv", "BlockPool" or "Strided".
    #[getter]
    fn kind(&self) -> &'static str {
        self.core.layout().kind().name()
    }

    /// "NHD", "HND", "universal", or None for foreign memory.
    #[getter]
    fn order(&self) -> Option<&'static str> {
        self.core.layout().kind().order().map(KvOrder::name)
    }

    /// Axes inside a block, outermost first, as they lie in memory.
    #[getter]
    fn axes(&self) -> Vec<&'static str> {
        self.core.layout().view().stride_order().into_iter().map(Axis::name).collect()
    }

    /// Where it lies, with the options it was allocated with: system() for host memory that was wrapped.
    #[getter]
    fn memory(&self) -> Memory {
        Memory::of(&self.core)
    }

    #[getter]
    fn num_blocks(&self) -> u64 {
        self.core.layout().config().num_blocks()
    }

    #[getter]
    fn num_regions(&self) -> usize {
        self.core.regions().len()
    }

    /// Bytes of all regions.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.core.spans().iter().map(|span| span.len).sum()
    }

    /// Byte strides by axis; 0 on axes that step regions.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for axis in Axis::ALL {
            dict.set_item(axis.name(), self.core.layout().view().stride(axis))?;
        }
        Ok(dict)
    }

    /// The contiguous bytes of (block, layer, outer); LayoutError where they are not contiguous.
    #[pyo3(signature = (block, layer, outer=None), text_signature = "($self, block, layer, outer=0)")]
    fn region(
        slf: &Bound<'_, Self>,
        block: &Bound<'_, PyAny>,
        layer: &Bound<'_, PyAny>,
        outer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Region> {
        let at = |axis, value| whole("LayoutError", axis, value, i64::MAX as u64);
        let (block, layer) = (at("block", block)?, at("layer", layer)?);
        let outer = outer.map_or(Ok(0), |outer| at("outer", outer))?;
        let PhysicalLayout { core: layout, users } = slf.get();
        let span = layout.memory_region(block, layer, outer).or_raise(slf.py())?;
        Ok(Region::new(layout, users, span, Dtype::UInt8, &[span.len], &[1]))
    }

    /// Every region as a zero-copy view with its own axes; see `region_axes`. Types NumPy lacks appear as raw integers to it.
    #[getter]
    fn regions(slf: &Bound<'_, Self>) -> PyResult<Vec<Region>> {
        let PhysicalLayout { core: layout, users } = slf.get();
        let view = layout.layout().view();
        let axes = region_axes(layout);
        let shape: Vec<u64> = axes.iter().map(|&axis| view.extent(axis)).collect();
        let strides: Vec<u64> = axes.iter().map(|&axis| view.stride(axis)).collect();
        if view.block_step().parts > 1 && axes.contains(&Axis::Block) {
            let message =
                "a layout re-addressed in finer pages has no plain strided view; take it of the original";
            return Err(plain(slf.py(), "LayoutError", message));
        }
        let dtype = layout.layout().config().dtype();
        Ok(layout
            .spans()
            .iter()
            .map(|&span| Region::new(layout, users, span, dtype, &shape, &strides))
            .collect())
    }

    /// Axes of each item of `regions`, outermost first.
    #[getter]
    fn region_axes(&self) -> Vec<&'static str> {
        region_axes(&self.core).into_iter().map(Axis::name).collect()
    }

    /// Zero-copy NumPy view: one array, or a list with one array per region. Needs NumPy.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if !slf.get().core.memory_kind().is_host() {
            return Err(plain(
                py,
                "Unsupported",
                format!("a NumPy view of {} memory", slf.get().core.memory_kind()),
            ));
        }
        let numpy = py.import("numpy")?;
        let arrays = PyList::empty(py);
        for region in Self::regions(slf)? {
            arrays.append(numpy.call_method1("asarray", (Bound::new(py, region)?,))?)?;
        }
        if arrays.len() == 1 { arrays.get_item(0) } else { Ok(arrays.into_any()) }
    }

    /// Sets every byte of every region, padding included.
    fn fill(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = value.py();
        let value = whole("OptionError", "value", value, 255)? as u8;
        py.detach(|| self.core.fill(value)).or_raise(py)
    }

    /// One checksum per block: the same in every order, layout and memory, additive (mod 2**64) over layers and shards.
    #[pyo3(signature = (blocks=None, layers=None))]
    fn checksum(
        &self,
        py: Python<'_>,
        blocks: Option<&Bound<'_, PyAny>>,
        layers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u64>> {
        verify::checksum(py, &self.core, blocks, layers)
    }

    /// Fills every head row with the stream that seed, block, layer, outer, token and global head determine.
    #[pyo3(signature = (seed, blocks=None))]
    fn fill_pattern(&self, seed: &Bound<'_, PyAny>, blocks: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        verify::fill_pattern(&self.core, seed, blocks)
    }

    /// Raises MismatchError unless blocks[i] holds the pattern of as_blocks[i] (default: of its own id).
    #[pyo3(signature = (seed, blocks=None, as_blocks=None, layers=None))]
    fn verify_pattern(
        &self,
        seed: &Bound<'_, PyAny>,
        blocks: Option<&Bound<'_, PyAny>>,
        as_blocks: Option<&Bound<'_, PyAny>>,
        layers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        verify::verify_pattern(&self.core, seed, blocks, as_blocks, layers)
    }

    /// Raises GuardError unless every byte but the payload of except_blocks, padding and gaps included, is value.
    #[pyo3(signature = (value, except_blocks=None), text_signature = "($self, value, except_blocks=())")]
    fn check_fill(&self, value: &Bound<'_, PyAny>, except_blocks: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        verify::check_fill(&self.core, value, except_blocks)
    }

    /// The same memory re-addressed in pages of `page_size` tokens: id = parts * block + part.
    fn with_page_size(&self, page_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = page_size.py();
        let page_size = whole("LayoutError", "page_size", page_size, i64::MAX as u64)?;
        let core = self.core.with_page_size(page_size).or_raise(py)?;
        Ok(PhysicalLayout { core, users: self.users.clone() })
    }

    fn __repr__(&self) -> String {
        let layout = self.core.layout();
        let c = layout.config();
        let order = layout.kind().order().map(|order| format!(" {order}")).unwrap_or_default();
        let first = self.core.spans().first().map_or(0, |span| span.addr);
        format!(
            "PhysicalLayout({}{order}, {} blocks x {} layers x {} outer x {} tokens x {} heads x {} {}, \
             {} region(s) of {} bytes in {} memory, first at {first:#x})",
            self.kind(),
            c.num_blocks(),
            c.num_layers(),
            c.outer_dim(),
            c.page_size(),
            c.num_heads(),
            c.head_dim(),
            c.dtype(),
            self.core.regions().len(),
            layout.region_bytes(),
            self.core.memory_kind(),
        )
    }
}

/// Checks a declared alignment of blocks against arrays as they lie.
fn aligned(
    py: Python<'_>,
    layout: &kvferry::Layout,
    arrays: &[ForeignArray],
    regions: &[kvferry::Region],
    alignment: u64,
) -> PyResult<()> {
    let step = layout.view().stride(Axis::Block);
    for (array, region) in arrays.iter().zip(regions) {
        let addr = region.span().addr;
        if !addr.is_multiple_of(alignment)
            || (layout.config().num_blocks() > 1 && !step.is_multiple_of(alignment))
        {
            let message = format!(
                "{}: blocks start at {addr:#x} in steps of {step} bytes, the configuration aligns them to {alignment}",
                array.name
            );
            return Err(plain(py, "LayoutError", message));
        }
    }
    Ok(())
}

fn region_axes(layout: &kvferry::PhysicalLayout) -> Vec<Axis> {
    let view = layout.layout().view();
    // Axes that foreign arrays did not name step nothing at all.
    let named = |axis| layout.layout().kind() != LayoutKind::Strided || view.stride(axis) != 0;
    view.order().into_iter().filter(|&axis| view.region_stride(axis) == 0 && named(axis)).collect()
}
