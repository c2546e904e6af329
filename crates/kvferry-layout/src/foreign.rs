//! Foreign arrays: layouts whose strides somebody else chose.

use crate::axis::{Axis, PerAxis};
use crate::config::LayoutConfig;
use crate::dtype::Dtype;
use crate::error::LayoutError;
use crate::kind::LayoutKind;
use crate::layout::Layout;

/// One array of somebody else's memory: shape, byte strides and element type, no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignArray {
    /// Name used in errors, such as `tensors[3]` or a dict key.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Byte strides, one per extent.
    pub strides: Vec<i64>,
}

impl Layout {
    /// Foreign arrays as a layout: `axes` names the dimensions of every array, outermost first. Arrays are the
    /// regions: one array, one per layer, or (`split_outer`) K and V of layer 0, K and V of layer 1, …
    ///
    /// An axis that is neither named nor a region axis has extent 1. All arrays must agree in shape and strides.
    /// With `expect`, every extent and the dtype must agree with it.
    ///
    /// # Errors
    /// No array, names that do not match the dimensions, arrays that differ from the first or from `expect`,
    /// strides that are negative or make elements overlap.
    pub fn from_arrays(
        arrays: &[ForeignArray],
        axes: &[Axis],
        split_outer: bool,
        dtype: Dtype,
        expect: Option<&LayoutConfig>,
    ) -> Result<Layout, LayoutError> {
        let kind = LayoutKind::Strided;
        let Some(first) = arrays.first() else {
            return Err(LayoutError::RegionCount { kind: kind.name(), expected: 1, got: 0 });
        };
        let per_layer = if split_outer { 2 } else { 1 };
        if !arrays.len().is_multiple_of(per_layer) {
            return Err(LayoutError::NotDivisible {
                what: "arrays of (K, V) pairs",
                value: arrays.len() as u64,
                by: 2,
            });
        }
        if let Some((_, &axis)) = axes.iter().enumerate().find(|&(index, axis)| axes[..index].contains(axis))
        {
            return Err(LayoutError::AxisTwice { axis });
        }
        let layers = (arrays.len() / per_layer) as u64;
        let regions = foreign_regions(axes, layers, split_outer)?;
        for array in arrays {
            for got in [array.shape.len(), array.strides.len()] {
                if got != axes.len() {
                    return Err(LayoutError::Rank { what: array.name.clone(), got, expected: axes.len() });
                }
            }
            same_geometry(first, array, axes)?;
        }
        let mut extents = PerAxis::splat(1u64);
        let mut strides = PerAxis::splat(0u64);
        for ((&axis, &extent), &stride) in axes.iter().zip(&first.shape).zip(&first.strides) {
            extents[axis] = extent;
            strides[axis] = match u64::try_from(stride) {
                Ok(stride) => stride,
                // NumPy leaves a negative stride on an axis of extent 1 that was flipped; it is never stepped.
                Err(_) if extent == 1 => 0,
                Err(_) => return Err(LayoutError::NegativeStride { what: first.name.clone(), axis, stride }),
            };
        }
        if regions.contains(&Axis::Layer) {
            extents[Axis::Layer] = layers;
        }
        if split_outer {
            extents[Axis::Outer] = 2;
        }
        let mut builder =
            expect.map_or_else(LayoutConfig::builder, |config| config.to_builder().alignment(1));
        builder = builder
            .num_blocks(extents[Axis::Block])
            .num_layers(extents[Axis::Layer])
            .outer_dim(extents[Axis::Outer])
            .page_size(extents[Axis::Page])
            .num_heads(extents[Axis::Head])
            .head_dim(extents[Axis::Dim])
            .dtype(dtype);
        if let Some(config) = expect {
            agree(&first.name, config, &extents, dtype)?;
        }
        let mut listed = regions.clone();
        listed.extend(axes);
        listed.extend(Axis::ALL.into_iter().filter(|axis| !listed.contains(axis)).collect::<Vec<_>>());
        let mut order = [Axis::Block; 6];
        order.copy_from_slice(&listed);
        Layout::strided(builder.build()?, order, strides, &regions)
    }
}

fn foreign_regions(axes: &[Axis], layers: u64, split_outer: bool) -> Result<Vec<Axis>, LayoutError> {
    let mut regions = Vec::new();
    for needed in [Axis::Block, Axis::Dim] {
        if !axes.contains(&needed) {
            return Err(LayoutError::AxisMissing { axis: needed, why: "every array has blocks and rows" });
        }
    }
    if axes.contains(&Axis::Layer) {
        if layers > 1 {
            return Err(LayoutError::Exclusive {
                left: "a list of arrays (one per layer)",
                right: "the axis layer",
            });
        }
    } else {
        regions.push(Axis::Layer);
    }
    if split_outer {
        if axes.contains(&Axis::Outer) {
            return Err(LayoutError::Exclusive { left: "(K, V) pairs", right: "the axis outer" });
        }
        regions.push(Axis::Outer);
    }
    Ok(regions)
}

fn same_geometry(first: &ForeignArray, array: &ForeignArray, axes: &[Axis]) -> Result<(), LayoutError> {
    for (index, &axis) in axes.iter().enumerate() {
        if array.shape[index] != first.shape[index] {
            return Err(LayoutError::ExtentMismatch {
                what: format!("{} differs from {}", array.name, first.name),
                axis,
                got: array.shape[index],
                expected: first.shape[index],
            });
        }
    }
    // Strides follow from extents: of an array of another shape, the shape is what to name.
    for (index, &axis) in axes.iter().enumerate() {
        // The stride of an axis of extent 1 is never used, and frameworks put anything there.
        if first.shape[index] > 1 && array.strides[index] != first.strides[index] {
            return Err(LayoutError::StrideMismatch {
                what: format!("{} differs from {}", array.name, first.name),
                axis,
                got: array.strides[index],
                expected: first.strides[index],
            });
        }
    }
    Ok(())
}

fn agree(name: &str, config: &LayoutConfig, extents: &PerAxis<u64>, dtype: Dtype) -> Result<(), LayoutError> {
    let declared = config.extents();
    for axis in Axis::ALL {
        if extents[axis] != declared[axis] {
            return Err(LayoutError::ExtentMismatch {
                what: format!("{name} against the configuration"),
                axis,
                got: extents[axis],
                expected: declared[axis],
            });
        }
    }
    if dtype != config.dtype() {
        return Err(LayoutError::DtypeMismatch {
            what: name.to_owned(),
            got: dtype,
            expected: config.dtype(),
        });
    }
    Ok(())
}
