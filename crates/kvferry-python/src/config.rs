//! `kvferry.LayoutConfig`.

use kvferry::{Dtype, LayoutConfigBuilder};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::errors::{OrRaise, plain, shown};
use crate::numbers::whole;

/// Logical shape of a KV cache. Immutable, hashable, picklable.
#[pyclass(frozen, eq, hash, module = "kvferry")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct LayoutConfig(pub(crate) kvferry::LayoutConfig);

/// Longer than any name of a dtype.
const LONGEST_NAME: usize = 256;

/// A dtype by name: a string, a torch dtype (`torch.bfloat16`), a NumPy dtype or scalar type (`np.float16`).
pub(crate) fn dtype(value: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let py = value.py();
    let name = if let Ok(name) = value.extract::<String>() {
        name
    } else if let Some(name) =
        ["name", "__name__"].iter().find_map(|attr| value.getattr(attr).ok()?.extract().ok())
    {
        name
    } else {
        let text = value.str()?.to_string_lossy().into_owned();
        if text.len() > LONGEST_NAME {
            return Err(PyTypeError::new_err(format!(
                "dtype must be a dtype or its name, got {}",
                shown(value)
            )));
        }
        text
    };
    name.parse::<Dtype>().or_raise(py)
}

const FIELDS: [&str; 11] = [
    "num_blocks",
    "num_layers",
    "outer_dim",
    "page_size",
    "num_heads",
    "head_dim",
    "inner_dim",
    "dtype",
    "alignment",
    "first_head",
    "total_heads",
];

/// A size; the library judges its limits.
fn size(field: &'static str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    whole("LayoutError", field, value, i64::MAX as u64)
}

fn apply(mut builder: LayoutConfigBuilder, fields: &Bound<'_, PyDict>) -> PyResult<LayoutConfigBuilder> {
    for field in FIELDS {
        let Some(value) = fields.get_item(field)?.filter(|value| !value.is_none()) else { continue };
        builder = match field {
            "dtype" => builder.dtype(dtype(&value)?),
            "num_blocks" => builder.num_blocks(size(field, &value)?),
            "num_layers" => builder.num_layers(size(field, &value)?),
            "outer_dim" => builder.outer_dim(size(field, &value)?),
            "page_size" => builder.page_size(size(field, &value)?),
            "num_heads" => builder.num_heads(size(field, &value)?),
            "head_dim" => builder.head_dim(size(field, &value)?),
            "inner_dim" => builder.inner_dim(size(field, &value)?),
            "alignment" => builder.alignment(size(field, &value)?),
            "first_head" => builder.first_head(size(field, &value)?),
            _ => builder.total_heads(size(field, &value)?),
        };
    }
    Ok(builder)
}

#[pymethods]
impl LayoutConfig {
    #[new]
    #[pyo3(signature = (*, num_blocks, num_layers, page_size, dtype, outer_dim=None, num_heads=None, head_dim=None,
                        inner_dim=None, alignment=None, first_head=None, total_heads=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        num_blocks: &Bound<'_, PyAny>,
        num_layers: &Bound<'_, PyAny>,
        page_size: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        outer_dim: Option<&Bound<'_, PyAny>>,
        num_heads: Option<&Bound<'_, PyAny>>,
        head_dim: Option<&Bound<'_, PyAny>>,
        inner_dim: Option<&Bound<'_, PyAny>>,
        alignment: Option<&Bound<'_, PyAny>>,
        first_head: Option<&Bound<'_, PyAny>>,
        total_heads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let given = [
            Some(num_blocks),
            Some(num_layers),
            outer_dim,
            Some(page_size),
            num_heads,
            head_dim,
            inner_dim,
            Some(dtype),
            alignment,
            first_head,
            total_heads,
        ];
        let fields = PyDict::new(py);
        for (name, value) in FIELDS.into_iter().zip(given) {
            fields.set_item(name, value)?;
        }
        let builder = apply(kvferry::LayoutConfig::builder(), &fields)?;
        Ok(LayoutConfig(builder.build().or_raise(py)?))
    }

    /// The same configuration with some fields changed.
    #[pyo3(signature = (**changes))]
    fn replace(&self, py: Python<'_>, changes: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let Some(changes) = changes else { return Ok(self.clone()) };
        for name in changes.keys() {
            let name: String = name.extract()?;
            if !FIELDS.contains(&name.as_str()) {
                return Err(plain(
                    py,
                    "OptionError",
                    format!("unknown field {name:?}; fields are {}", FIELDS.join(", ")),
                ));
            }
        }
        // The number of heads in the model follows the heads unless it is given.
        let mut builder = self.0.to_builder();
        if changes.contains("num_heads")?
            && !changes.contains("total_heads")?
            && self.0.total_heads() == self.0.num_heads()
        {
            let heads = size("num_heads", &changes.get_item("num_heads")?.into_pyobject(py)?)?;
            builder = builder.total_heads(self.0.first_head().saturating_add(heads));
        }
        let changes = changes.copy()?;
        // One head is how a configuration with an inner_dim is kept.
        let heads_given = changes.contains("num_heads")? || changes.contains("head_dim")?;
        if self.0.num_heads() == 1
            && !heads_given
            && let Some(inner) = changes.get_item("inner_dim")?
        {
            changes.del_item("inner_dim")?;
            changes.set_item("head_dim", inner)?;
        }
        Ok(LayoutConfig(apply(builder, &changes)?.build().or_raise(py)?))
    }

    /// The part that tensor-parallel rank `rank` of `world` holds, heads split evenly.
    fn shard_heads(&self, rank: &Bound<'_, PyAny>, world: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, rank, world) = (rank.py(), size("rank", rank)?, size("world", world)?);
        Ok(LayoutConfig(self.0.shard_heads(rank, world).or_raise(py)?))
    }

    #[getter]
    fn num_blocks(&self) -> u64 {
        self.0.num_blocks()
    }

    #[getter]
    fn num_layers(&self) -> u64 {
        self.0.num_layers()
    }

    #[getter]
    fn outer_dim(&self) -> u64 {
        self.0.outer_dim()
    }

    #[getter]
    fn page_size(&self) -> u64 {
        self.0.page_size()
    }

    #[getter]
    fn num_heads(&self) -> u64 {
        self.0.num_heads()
    }

    #[getter]
    fn head_dim(&self) -> u64 {
        self.0.head_dim()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype().name()
    }

    #[getter]
    fn alignment(&self) -> u64 {
        self.0.alignment()
    }

    #[getter]
    fn first_head(&self) -> u64 {
        self.0.first_head()
    }

    #[getter]
    fn total_heads(&self) -> u64 {
        self.0.total_heads()
    }

    /// Payload bytes of one block over all layers.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.0.block_bytes()
    }

    /// Payload bytes of one (layer, outer) part of a block.
    #[getter]
    fn chunk_bytes(&self) -> u64 {
        self.0.chunk_bytes()
    }

    fn __repr__(&self) -> String {
        let c = &self.0;
        let mut text = format!(
            "LayoutConfig(num_blocks={}, num_layers={}, outer_dim={}, page_size={}, num_heads={}, head_dim={}, dtype='{}'",
            c.num_blocks(),
            c.num_layers(),
            c.outer_dim(),
            c.page_size(),
            c.num_heads(),
            c.head_dim(),
            c.dtype()
        );
        if c.alignment() != 1 {
            text += &format!(", alignment={}", c.alignment());
        }
        if c.first_head() != 0 || c.total_heads() != c.num_heads() {
            text += &format!(", first_head={}, total_heads={}", c.first_head(), c.total_heads());
        }
        text + ")"
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let fields = PyDict::new(py);
        fields.set_item("num_blocks", self.num_blocks())?;
        fields.set_item("num_layers", self.num_layers())?;
        fields.set_item("outer_dim", self.outer_dim())?;
        fields.set_item("page_size", self.page_size())?;
        fields.set_item("num_heads", self.num_heads())?;
        fields.set_item("head_dim", self.head_dim())?;
        fields.set_item("dtype", self.dtype())?;
        fields.set_item("alignment", self.alignment())?;
        fields.set_item("first_head", self.first_head())?;
        fields.set_item("total_heads", self.total_heads())?;
        Ok((PyTuple::empty(py), fields))
    }
}
