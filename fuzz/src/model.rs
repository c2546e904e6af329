//! Small random layouts, each with a formula of addresses that shares nothing with the planner, and transfers
//! between two of them.

use std::ops::Range;

use arbitrary::{Arbitrary, Result, Unstructured};
use kvferry_layout::oracle::OracleLayout;
use kvferry_layout::{
    Axis, BlockId, Dtype, ForeignArray, Layout, LayoutConfig, LayoutError, PairRequest, PerAxis, RegionSpan,
    Transform,
};

use crate::{own_kind, some_of};

/// Most bytes of one layout.
const MOST_BYTES: u64 = 1 << 14;

/// Sizes of a small cache, or the shard of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub blocks: u64,
    pub layers: u64,
    pub outer: u64,
    pub page: u64,
    pub heads: u64,
    pub dim: u64,
    pub dtype: Dtype,
    pub first_head: u64,
    pub total_heads: u64,
    pub align: u64,
}

impl Sizes {
    pub fn any(u: &mut Unstructured<'_>) -> Result<Sizes> {
        let heads = u.int_in_range(1..=4)?;
        Ok(Sizes {
            blocks: u.int_in_range(1..=6)?,
            layers: u.int_in_range(1..=3)?,
            outer: u.int_in_range(1..=2)?,
            page: u.int_in_range(1..=4)?,
            heads,
            dim: u.int_in_range(1..=4)?,
            dtype: *u.choose(Dtype::ALL)?,
            first_head: 0,
            total_heads: heads,
            align: 1,
        })
    }

    pub fn config(&self) -> LayoutConfig {
        LayoutConfig::builder()
            .num_blocks(self.blocks)
            .num_layers(self.layers)
            .outer_dim(self.outer)
            .page_size(self.page)
            .num_heads(self.heads)
            .head_dim(self.dim)
            .dtype(self.dtype)
            .first_head(self.first_head)
            .total_heads(self.total_heads)
            .alignment(self.align)
            .build()
            .expect("small sizes are legal")
    }
}

#[derive(Clone, Debug)]
enum Formula {
    Oracle(OracleLayout),
    /// Bytes and regions per coordinate, of the layout before it was split.
    Strided {
        strides: PerAxis<u64>,
        regions: PerAxis<u64>,
    },
}

/// A layout and where its elements must lie.
#[derive(Clone, Debug)]
pub struct Made {
    pub layout: Layout,
    /// Sizes as addressed, after the split.
    pub sizes: Sizes,
    /// Addressed pages per stored block.
    pub parts: u64,
    formula: Formula,
}

impl Made {
    /// A layout of any kind; `sizes` are those of stored blocks, which `parts` pages share. None where it is refused
    /// or too large.
    pub fn any(u: &mut Unstructured<'_>, sizes: Sizes, parts: u64) -> Result<Option<Made>> {
        let config = sizes.config();
        let made = match u.int_in_range(0..=5)? {
            0..=2 => {
                let kind = own_kind(u)?;
                Layout::of_kind(config, kind).map(|layout| {
                    let oracle = OracleLayout::new(&config, kind).expect("own kinds have an oracle");
                    (layout, Formula::Oracle(oracle))
                })
            }
            3 | 4 => arrays(u, &config)?,
            _ => strided(u, &config)?,
        };
        let Ok((layout, formula)) = made else { return Ok(None) };
        if layout.total_bytes().map_or(true, |bytes| bytes > MOST_BYTES) {
            return Ok(None);
        }
        if parts == 1 {
            return Ok(Some(Made { layout, sizes, parts, formula }));
        }
        let page = sizes.page / parts;
        let layout = layout.with_page_size(page).expect("the page size divides");
        Ok(Some(Made {
            layout,
            sizes: Sizes { blocks: sizes.blocks * parts, page, ..sizes },
            parts,
            formula,
        }))
    }

    /// Region and byte offset of the element at `at`: block, layer, outer, page, local head, dim.
    pub fn element(&self, at: [u64; 6]) -> (usize, usize) {
        let [block, layer, outer, page, head, dim] = at;
        let token = block % self.parts * self.sizes.page + page;
        let block = block / self.parts;
        match &self.formula {
            Formula::Oracle(oracle) => oracle.element(block, layer, outer, token, head, dim),
            Formula::Strided { strides, regions } => {
                let at = [block, layer, outer, token, head, dim];
                let sum = |steps: &PerAxis<u64>| -> u64 {
                    Axis::ALL.into_iter().zip(at).map(|(axis, at)| steps[axis] * at).sum()
                };
                (sum(regions) as usize, sum(strides) as usize)
            }
        }
    }

    /// Coordinates of every element of `blocks`, `layers` and global `heads`.
    pub fn each(
        &self,
        blocks: impl IntoIterator<Item = u64>,
        layers: Range<u64>,
        heads: Range<u64>,
        mut f: impl FnMut([u64; 6]),
    ) {
        let s = self.sizes;
        for block in blocks {
            for layer in layers.clone() {
                for outer in 0..s.outer {
                    for page in 0..s.page {
                        for head in heads.clone() {
                            for dim in 0..s.dim {
                                f([block, layer, outer, page, head - s.first_head, dim]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Global numbers of the heads held.
    pub fn heads(&self) -> Range<u64> {
        self.sizes.first_head..self.sizes.first_head + self.sizes.heads
    }

    pub fn width(&self) -> usize {
        self.sizes.dtype.bytes() as usize
    }

    /// Memory for all regions, filled with `byte`.
    pub fn memory(&self, byte: u8) -> Vec<Vec<u8>> {
        vec![vec![byte; self.layout.region_bytes() as usize]; self.layout.num_regions() as usize]
    }

    /// Every element where the formula says, no byte twice, and nothing beyond the regions' length.
    pub fn check(&self) {
        let view = self.layout.view();
        let mut owner = self.memory(0);
        let mut farthest = 0;
        let mut count = 0;
        self.each(0..self.sizes.blocks, 0..self.sizes.layers, self.heads(), |at| {
            let (region, offset) = self.element(at);
            let mut named = PerAxis::splat(0);
            for (axis, value) in Axis::ALL.into_iter().zip(at) {
                named[axis] = value;
            }
            let place = view.place(named).expect("coordinates are in range");
            assert_eq!((place.region as usize, place.offset as usize), (region, offset), "{at:?}");
            // The slow part: all of few, some of many.
            count += 1;
            if count < 200 || count % 7 == 0 {
                assert_eq!(view.locate(place), Some(named));
            }
            farthest = farthest.max(offset + self.width());
            for byte in &mut owner[region][offset..offset + self.width()] {
                assert_eq!(*byte, 0, "two elements share a byte");
                *byte = 1;
            }
        });
        assert_eq!(farthest as u64, self.layout.region_bytes());
        // Bytes of nobody are found to be nobody's.
        for (region, bytes) in owner.iter().enumerate() {
            for offset in (0..bytes.len()).filter(|&offset| bytes[offset] == 0).take(100) {
                let place = kvferry_layout::Place { region: region as u64, offset: offset as u64 };
                assert_eq!(view.locate(place), None);
            }
        }
    }
}

/// Strides for `axes`, outermost first: boxes with gaps, spans with gaps, or with some of them anything.
fn some_strides(u: &mut Unstructured<'_>, axes: &[Axis], config: &LayoutConfig) -> Result<Vec<u64>> {
    let extents = config.extents();
    let (tight, wild) = (u.arbitrary()?, u.ratio(1, 6)?);
    let mut strides = vec![0; axes.len()];
    let mut step = config.dtype().bytes();
    for (index, &axis) in axes.iter().enumerate().rev() {
        let gap = if u.ratio(1, 3)? { u.int_in_range(0..=3)? } else { 0u64 };
        strides[index] = step;
        if wild && u.ratio(1, 2)? {
            strides[index] = u.int_in_range(0..=200)?;
        }
        if tight {
            step += (extents[axis] - 1) * strides[index] + gap;
        } else {
            step *= extents[axis] + gap;
        }
    }
    Ok(strides)
}

/// Arrays in the form [`Layout::from_arrays`] takes.
fn arrays(
    u: &mut Unstructured<'_>,
    config: &LayoutConfig,
) -> Result<std::result::Result<(Layout, Formula), LayoutError>> {
    let extents = config.extents();
    let layer_named: bool = u.arbitrary()?;
    let split = config.outer_dim() == 2 && u.arbitrary()?;
    let mut axes = Vec::new();
    for axis in some_of(u, &Axis::ALL, true)? {
        let named = match axis {
            Axis::Block | Axis::Dim => true,
            Axis::Layer => layer_named,
            Axis::Outer => !split && (extents[axis] > 1 || u.arbitrary()?),
            // An axis of extent 1 may stay unnamed.
            Axis::Page | Axis::Head => extents[axis] > 1 || u.arbitrary()?,
        };
        if named {
            axes.push(axis);
        }
    }
    let strides = some_strides(u, &axes, config)?;
    let count = if layer_named { 1 } else { config.num_layers() } * if split { 2 } else { 1 };
    let mut list = Vec::new();
    for index in 0..count {
        let mut given: Vec<i64> = strides.iter().map(|&stride| stride as i64).collect();
        for (&axis, stride) in axes.iter().zip(&mut given) {
            // Never stepped, so anything goes; the first array's are kept where they are not negative.
            if extents[axis] == 1 && u.ratio(1, 8)? {
                *stride = u.arbitrary()?;
            }
        }
        list.push(ForeignArray {
            name: format!("tensors[{index}]"),
            shape: axes.iter().map(|&axis| extents[axis]).collect(),
            strides: given,
        });
    }
    let named: Vec<(Axis, u64)> = axes.iter().copied().zip(strides).collect();
    let layout = Layout::from_arrays(&list, &axes, split, config.dtype(), Some(config));
    Ok(layout.map(|layout| (layout, Formula::Oracle(OracleLayout::foreign(config, &named, split)))))
}

/// Strides in the form [`Layout::strided`] takes: any of block, layer and outer may be region axes, in any order.
fn strided(
    u: &mut Unstructured<'_>,
    config: &LayoutConfig,
) -> Result<std::result::Result<(Layout, Formula), LayoutError>> {
    let extents = config.extents();
    let order = some_of(u, &Axis::ALL, true)?;
    let over = some_of(u, &[Axis::Block, Axis::Layer, Axis::Outer], false)?;
    let axes: Vec<Axis> = order.iter().copied().filter(|axis| !over.contains(axis)).collect();
    let mut strides = PerAxis::splat(0);
    for (&axis, stride) in axes.iter().zip(some_strides(u, &axes, config)?) {
        strides[axis] = stride;
    }
    let mut regions = PerAxis::splat(0);
    let mut step = 1;
    for &axis in over.iter().rev() {
        regions[axis] = step;
        step *= extents[axis];
    }
    let order: [Axis; 6] = order.try_into().expect("six axes");
    let layout = Layout::strided(*config, order, strides, &over);
    Ok(layout.map(|layout| (layout, Formula::Strided { strides, regions })))
}

/// A transfer, legal more often than not.
#[derive(Clone, Debug)]
pub struct Case {
    pub src: Made,
    pub dst: Made,
    pub request: PairRequest,
    pub src_ids: Vec<BlockId>,
    pub dst_ids: Vec<BlockId>,
    /// Seeds of the regions' addresses.
    pub bases: [Vec<u16>; 2],
    /// Both sides lie at the same addresses.
    pub same_bases: bool,
}

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Case> {
        let sizes = Sizes::any(u)?;
        let same = u.ratio(1, 4)?;
        let src = side(u, sizes)?;
        let dst = if same { src.clone() } else { side(u, sizes)? };
        let (src_ids, dst_ids) = ids(u, &src, &dst)?;
        let request = PairRequest {
            layers: if u.arbitrary()? { None } else { Some(range(u, sizes.layers)?) },
            heads: if u.arbitrary()? { None } else { Some(range(u, sizes.heads)?) },
            transform: if u.ratio(1, 8)? { Transform::Forbid } else { Transform::Auto },
        };
        let mut bases = [Vec::new(), Vec::new()];
        for (list, made) in bases.iter_mut().zip([&src, &dst]) {
            for _ in 0..made.layout.num_regions() {
                list.push(u.arbitrary()?);
            }
        }
        Ok(Case { src, dst, request, src_ids, dst_ids, bases, same_bases: u.arbitrary()? })
    }
}

/// A part of `0..limit`, now and then empty or beyond it.
fn range(u: &mut Unstructured<'_>, limit: u64) -> Result<Range<u64>> {
    let start = u.int_in_range(0..=limit - 1)?;
    if u.ratio(1, 12)? {
        return Ok(start..u.int_in_range(0..=limit + 1)?);
    }
    Ok(start..u.int_in_range(start + 1..=limit)?)
}

fn side(u: &mut Unstructured<'_>, model: Sizes) -> Result<Made> {
    let mut sizes = model;
    sizes.blocks = u.int_in_range(1..=6)?;
    if u.arbitrary()? {
        sizes.first_head = u.int_in_range(0..=model.heads - 1)?;
        sizes.heads = u.int_in_range(1..=model.heads - sizes.first_head)?;
    }
    if u.ratio(1, 3)? {
        sizes.page *= u.int_in_range(2..=3)?;
    }
    if u.ratio(1, 4)? {
        sizes.align = 1 << u.int_in_range(0..=8)?;
    }
    if u.ratio(1, 24)? {
        // Something that does not fit the other side.
        match u.int_in_range(0..=5)? {
            0 => sizes.layers += 1,
            1 => sizes.outer = 3 - sizes.outer,
            2 => sizes.dim += 1,
            3 => sizes.page += 1,
            4 => sizes.dtype = *u.choose(Dtype::ALL)?,
            _ => sizes.total_heads += 1,
        }
    }
    let parts = if u.ratio(1, 4)? { u.int_in_range(2..=3)? } else { 1 };
    sizes.page *= parts;
    Made::any(u, sizes, parts)?.ok_or(arbitrary::Error::IncorrectFormat)
}

/// Ids for both sides: strings of neighbours, up or down, of matching lengths; now and then something else.
fn ids(u: &mut Unstructured<'_>, src: &Made, dst: &Made) -> Result<(Vec<BlockId>, Vec<BlockId>)> {
    if u.ratio(1, 8)? {
        let mut list = |limit: u64| -> Result<Vec<BlockId>> {
            let count = u.int_in_range(0..=8)?;
            (0..count).map(|_| Ok(BlockId(u.int_in_range(0..=limit as u32)?))).collect()
        };
        return Ok((list(src.sizes.blocks)?, list(dst.sizes.blocks)?));
    }
    let page = src.sizes.page.max(dst.sizes.page);
    let (src_each, dst_each) = (page / src.sizes.page, page / dst.sizes.page);
    let groups = u.int_in_range(0..=dst.sizes.blocks / dst_each)?;
    let strings =
        |u: &mut Unstructured<'_>, limit: u64, count: u64, distinct: bool| -> Result<Vec<BlockId>> {
            let mut list: Vec<BlockId> = Vec::new();
            while (list.len() as u64) < count {
                let (mut id, up) = (u.int_in_range(0..=limit - 1)?, u.ratio(3, 4)?);
                for _ in 0..u.int_in_range(1..=4)? {
                    while distinct && list.contains(&BlockId(id as u32)) {
                        id = (id + 1) % limit;
                    }
                    list.push(BlockId(id as u32));
                    if list.len() as u64 == count {
                        break;
                    }
                    id = if up { id + 1 } else { id + limit - 1 } % limit;
                }
            }
            Ok(list)
        };
    let distinct = u.ratio(15, 16)?;
    let dst_ids = strings(u, dst.sizes.blocks, groups * dst_each, distinct)?;
    Ok((strings(u, src.sizes.blocks, groups * src_each, false)?, dst_ids))
}

/// Regions of `made` at addresses made of `seeds`: near one another, so that they meet, interleave or miss.
pub fn bind(made: &Made, seeds: &[u16]) -> Vec<RegionSpan> {
    let len = made.layout.region_bytes();
    let align = made.layout.config().alignment();
    let reach = (len * made.layout.num_regions()).clamp(16, 1 << 15) * 2;
    seeds.iter().map(|&seed| RegionSpan { addr: u64::from(seed) % reach / align * align, len }).collect()
}
