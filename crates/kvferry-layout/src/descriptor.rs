//! JSON descriptors of layouts, read as hostile input.
//!
//! A descriptor says everything about a layout but where its memory lies. Reading one goes through the same checked
//! constructors as any other layout, and what the descriptor claims about regions must follow from the rest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::axis::{Axis, PerAxis};
use crate::config::LayoutConfig;
use crate::dtype::Dtype;
use crate::error::LayoutError;
use crate::kind::{BlockDim, KvOrder, LayoutKind};
use crate::layout::Layout;

/// Version written, and the newest that is read.
pub const DESCRIPTOR_VERSION: u32 = 1;

/// Longest descriptor that is read, in bytes: ten times what the largest legal one takes.
pub const MAX_DESCRIPTOR_BYTES: usize = 16 << 10;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    version: u32,
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    order: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_dim: Option<String>,
    config: Config,
    /// Tokens per id, where it is not the page size of the configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    page_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strided: Option<Strided>,
    num_regions: u64,
    region_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    num_blocks: u64,
    num_layers: u64,
    outer_dim: u64,
    page_size: u64,
    num_heads: u64,
    head_dim: u64,
    dtype: String,
    alignment: u64,
    first_head: u64,
    total_heads: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Strided {
    /// Outermost first.
    axes: Vec<String>,
    /// Byte strides by axis name.
    strides: BTreeMap<String, u64>,
    region_axes: Vec<String>,
}

const KINDS: [(&str, &str); 5] = [
    ("fully_contiguous", "FullyContiguous"),
    ("layer_separate", "LayerSeparate"),
    ("split_kv", "SplitKv"),
    ("block_pool", "BlockPool"),
    ("strided", "Strided"),
];

impl Layout {
    /// The layout as JSON, keys in a fixed order: equal layouts have equal text.
    ///
    /// # Errors
    /// None in practice; serialisation errors are passed on.
    pub fn to_json(&self) -> Result<String, LayoutError> {
        let config = self.stored_config();
        let kind = self.kind();
        let name = KINDS.iter().find(|(_, name)| *name == kind.name()).map_or("strided", |(word, _)| word);
        let descriptor = Descriptor {
            version: DESCRIPTOR_VERSION,
            kind: name.to_owned(),
            order: kind.order().map(|order| order.name().to_owned()),
            block_dim: match kind {
                LayoutKind::LayerSeparate { block_dim, .. } => Some(block_dim.name().to_owned()),
                _ => None,
            },
            config: Config {
                num_blocks: config.num_blocks(),
                num_layers: config.num_layers(),
                outer_dim: config.outer_dim(),
                page_size: config.page_size(),
                num_heads: config.num_heads(),
                head_dim: config.head_dim(),
                dtype: config.dtype().name().to_owned(),
                alignment: config.alignment(),
                first_head: config.first_head(),
                total_heads: config.total_heads(),
            },
            page_size: (self.config().page_size() != config.page_size()).then(|| self.config().page_size()),
            strided: (kind == LayoutKind::Strided).then(|| self.strided_descriptor()),
            num_regions: self.num_regions(),
            region_bytes: self.region_bytes(),
        };
        serde_json::to_string(&descriptor)
            .map_err(|error| LayoutError::Descriptor { reason: error.to_string() })
    }

    fn strided_descriptor(&self) -> Strided {
        let view = self.view();
        let names = |axes: &[Axis]| axes.iter().map(|axis| axis.name().to_owned()).collect();
        let mut regions: Vec<Axis> =
            Axis::ALL.into_iter().filter(|&axis| view.region_stride(axis) != 0).collect();
        // Of axes with one stride, only the outermost can be longer than 1: read back, it must not step the others.
        let stored = self.stored_config().extents();
        regions.sort_by_key(|&axis| std::cmp::Reverse((view.region_stride(axis), stored[axis])));
        Strided {
            axes: names(&view.order()),
            strides: Axis::ALL.into_iter().map(|axis| (axis.name().to_owned(), view.stride(axis))).collect(),
            region_axes: names(&regions),
        }
    }

    /// Reads a descriptor.
    ///
    /// # Errors
    /// [`LayoutError::Descriptor`] for text that is too long, not JSON, of another version, with unknown or missing
    /// fields, or whose regions do not follow from its sizes; any error of the constructors otherwise.
    pub fn from_json(text: &str) -> Result<Layout, LayoutError> {
        let bad = |reason: String| LayoutError::Descriptor { reason };
        if text.len() > MAX_DESCRIPTOR_BYTES {
            return Err(bad(format!("{} bytes long, at most {MAX_DESCRIPTOR_BYTES} are read", text.len())));
        }
        let version = serde_json::from_str::<Version>(text).map_err(|error| bad(error.to_string()))?.version;
        if version != DESCRIPTOR_VERSION {
            return Err(bad(format!(
                "version {version} is not readable, this is version {DESCRIPTOR_VERSION}"
            )));
        }
        let d: Descriptor = serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        let c = &d.config;
        let config = LayoutConfig::builder()
            .num_blocks(c.num_blocks)
            .num_layers(c.num_layers)
            .outer_dim(c.outer_dim)
            .page_size(c.page_size)
            .num_heads(c.num_heads)
            .head_dim(c.head_dim)
            .dtype(c.dtype.parse::<Dtype>()?)
            .alignment(c.alignment)
            .first_head(c.first_head)
            .total_heads(c.total_heads)
            .build()?;
        let mut layout = d.build(config)?;
        if let Some(page_size) = d.page_size {
            layout = layout.with_page_size(page_size)?;
        }
        if (layout.num_regions(), layout.region_bytes()) != (d.num_regions, d.region_bytes) {
            return Err(bad(format!(
                "it claims {} regions of {} bytes, its sizes make {} of {}",
                d.num_regions,
                d.region_bytes,
                layout.num_regions(),
                layout.region_bytes()
            )));
        }
        Ok(layout)
    }

    /// A 64-bit digest of everything but the memory (XXH3 of [`Layout::to_json`]): equal for equal layouts on any
    /// machine, and different, but for chance, otherwise.
    ///
    /// # Errors
    /// As [`Layout::to_json`].
    pub fn digest(&self) -> Result<u64, LayoutError> {
        Ok(twox_hash::XxHash3_64::oneshot(self.to_json()?.as_bytes()))
    }
}

/// Read first, so that a newer version is named as such and not as a list of unknown fields.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Descriptor {
    fn build(&self, config: LayoutConfig) -> Result<Layout, LayoutError> {
        let bad = |reason: String| LayoutError::Descriptor { reason };
        let need = |field: &Option<String>, name: &str| {
            field.clone().ok_or_else(|| bad(format!("{name} is required for kind {:?}", self.kind)))
        };
        if !KINDS.iter().any(|(word, _)| *word == self.kind) {
            return Err(bad(format!("unknown kind {:?}", self.kind)));
        }
        let order = || need(&self.order, "order")?.parse::<KvOrder>();
        let unused = [
            ("order", self.order.is_some(), self.kind != "strided"),
            ("block_dim", self.block_dim.is_some(), self.kind == "layer_separate"),
            ("strided", self.strided.is_some(), self.kind == "strided"),
        ];
        if let Some((name, ..)) = unused.iter().find(|(_, given, wanted)| *given && !*wanted) {
            return Err(bad(format!("{name} has no meaning for kind {:?}", self.kind)));
        }
        let kind = match self.kind.as_str() {
            "fully_contiguous" => LayoutKind::FullyContiguous { order: order()? },
            "layer_separate" => LayoutKind::LayerSeparate {
                block_dim: need(&self.block_dim, "block_dim")?.parse::<BlockDim>()?,
                order: order()?,
            },
            "split_kv" => LayoutKind::SplitKv { order: order()? },
            "block_pool" => LayoutKind::BlockPool { order: order()? },
            _ => {
                let strided = self.strided.as_ref().ok_or_else(|| bad("strided is required".to_owned()))?;
                return strided.build(config);
            }
        };
        Layout::of_kind(config, kind)
    }
}

impl Strided {
    fn build(&self, config: LayoutConfig) -> Result<Layout, LayoutError> {
        let axes =
            |names: &[String]| names.iter().map(|name| Axis::parse(name)).collect::<Result<Vec<_>, _>>();
        let listed = axes(&self.axes)?;
        let order: [Axis; 6] = listed.try_into().map_err(|found: Vec<Axis>| LayoutError::Descriptor {
            reason: format!("strided.axes must name all six axes, got {}", found.len()),
        })?;
        let mut strides = PerAxis::splat(0);
        for (name, &stride) in &self.strides {
            strides[Axis::parse(name)?] = stride;
        }
        if let Some(missing) = Axis::ALL.into_iter().find(|axis| !self.strides.contains_key(axis.name())) {
            return Err(LayoutError::AxisMissing {
                axis: missing,
                why: "strided.strides gives every axis a stride",
            });
        }
        let region_axes = axes(&self.region_axes)?;
        if let Some((_, &axis)) =
            region_axes.iter().enumerate().find(|&(index, axis)| region_axes[..index].contains(axis))
        {
            return Err(LayoutError::AxisTwice { axis });
        }
        Layout::strided(config, order, strides, &region_axes)
    }
}
