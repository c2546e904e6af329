//! The six named axes of a KV cache and arrays indexed by them.

use std::fmt;
use std::ops::{Index, IndexMut};

use crate::error::LayoutError;

/// A named axis of a KV cache. Views are addressed by name, never by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Cache block (page table entry).
    Block,
    /// Transformer layer.
    Layer,
    /// K and V (extent 2), or 1 for latent caches such as MLA.
    Outer,
    /// Token inside a block.
    Page,
    /// KV head.
    Head,
    /// Element inside a head.
    Dim,
}

impl Axis {
    /// All axes in canonical order.
    pub const ALL: [Axis; 6] = [Axis::Block, Axis::Layer, Axis::Outer, Axis::Page, Axis::Head, Axis::Dim];

    /// The axes inside one block.
    pub const IN_BLOCK: [Axis; 5] = [Axis::Layer, Axis::Outer, Axis::Page, Axis::Head, Axis::Dim];

    /// The axis' name as users type it.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Block => "block",
            Axis::Layer => "layer",
            Axis::Outer => "outer",
            Axis::Page => "page",
            Axis::Head => "head",
            Axis::Dim => "dim",
        }
    }

    /// Parses one axis name.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`] when the name is not one of the six.
    pub fn parse(name: &str) -> Result<Axis, LayoutError> {
        Axis::ALL
            .into_iter()
            .find(|axis| axis.name() == name)
            .ok_or_else(|| LayoutError::UnknownAxis { name: name.to_owned() })
    }

    /// Parses a declared axis order such as `"outer block page head dim"` (outermost first).
    ///
    /// # Errors
    /// [`LayoutError::UnknownAxis`] or [`LayoutError::AxisTwice`].
    pub fn parse_list(axes: &str) -> Result<Vec<Axis>, LayoutError> {
        let mut list = Vec::new();
        for name in axes.split([' ', ',']).filter(|part| !part.is_empty()) {
            let axis = Axis::parse(name)?;
            if list.contains(&axis) {
                return Err(LayoutError::AxisTwice { axis });
            }
            list.push(axis);
        }
        Ok(list)
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One value per axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct PerAxis<T>([T; 6]);

impl<T: Copy> PerAxis<T> {
    /// The same value on every axis.
    pub const fn splat(value: T) -> Self {
        PerAxis([value; 6])
    }

    /// Values computed axis by axis.
    pub fn from_fn(mut f: impl FnMut(Axis) -> T) -> Self {
        PerAxis(Axis::ALL.map(&mut f))
    }
}

impl<T> Index<Axis> for PerAxis<T> {
    type Output = T;

    fn index(&self, axis: Axis) -> &T {
        &self.0[axis as usize]
    }
}

impl<T> IndexMut<Axis> for PerAxis<T> {
    fn index_mut(&mut self, axis: Axis) -> &mut T {
        &mut self.0[axis as usize]
    }
}
