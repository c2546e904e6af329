//! Arrays that somebody else declares: any shape, strides, axes, pairing and expected configuration.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use kvferry_fuzz::{check_any, inside, limit_allocations, some_of, wild};
use kvferry_layout::{Axis, Dtype, ForeignArray, Layout, LayoutConfig, PerAxis, RegionSpan};
use libfuzzer_sys::{Corpus, fuzz_target};

/// Most elements for which the answer about shared bytes is checked byte by byte.
const FEW: u128 = 2000;

#[derive(Debug)]
struct Declared {
    arrays: Vec<ForeignArray>,
    axes: Vec<Axis>,
    split: bool,
    dtype: Dtype,
    expect: Option<LayoutConfig>,
}

fuzz_target!(
    init: limit_allocations(1 << 20),
    |bytes: &[u8]| -> Corpus {
        let mut u = Unstructured::new(bytes);
        let Ok(declared) = Declared::arbitrary(&mut u) else { return Corpus::Reject };
        let Declared { arrays, axes, split, dtype, expect } = &declared;
        let layout = match Layout::from_arrays(arrays, axes, *split, *dtype, expect.as_ref()) {
            Ok(layout) => layout,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return Corpus::Keep;
            }
        };
        let Ok(()) = accepted(&mut u, &declared, &layout) else { return Corpus::Reject };
        Corpus::Keep
    }
);

impl<'a> Arbitrary<'a> for Declared {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Declared> {
        let dtype = *u.choose(Dtype::ALL)?;
        let mut axes = some_of(u, &Axis::ALL, false)?;
        for needed in [Axis::Block, Axis::Dim] {
            if !axes.contains(&needed) && u.ratio(15, 16)? {
                axes.insert(u.int_in_range(0..=axes.len())?, needed);
            }
        }
        if u.ratio(1, 32)? {
            axes.push(*u.choose(&Axis::ALL)?);
        }
        let small = u.arbitrary()?;
        let mut shape = Vec::new();
        for _ in 0..axes.len() {
            shape.push(if small || u.ratio(3, 4)? { u.int_in_range(1..=5)? } else { wild(u)? });
        }
        let mut strides = vec![0i64; axes.len()];
        let mut step = dtype.bytes();
        for index in (0..axes.len()).rev() {
            if u.ratio(1, 4)? {
                step = step.saturating_add(u.int_in_range(0..=9)?);
            }
            strides[index] = if !small && u.ratio(1, 16)? { wild(u)? as i64 } else { step as i64 };
            step = step.saturating_mul(shape[index]);
        }
        if u.ratio(1, 4)? && strides.len() > 1 {
            // Axes in another order than their strides.
            let (a, b) = (u.choose_index(strides.len())?, u.choose_index(strides.len())?);
            strides.swap(a, b);
        }
        let split: bool = u.arbitrary()?;
        let count = u.int_in_range(0..=3)? * if split { 2 } else { 1 } + usize::from(u.ratio(1, 16)?);
        let mut arrays = Vec::new();
        for index in 0..count {
            let mut array =
                ForeignArray { name: format!("a[{index}]"), shape: shape.clone(), strides: strides.clone() };
            if u.ratio(1, 16)? {
                match u.int_in_range(0..=3)? {
                    0 => array.shape.push(wild(u)?),
                    1 => drop(array.strides.pop()),
                    2 if !shape.is_empty() => array.shape[u.choose_index(shape.len())?] = wild(u)?,
                    _ if !strides.is_empty() => {
                        array.strides[u.choose_index(strides.len())?] = u.arbitrary()?
                    }
                    _ => {}
                }
            }
            arrays.push(array);
        }
        let expect = if u.ratio(1, 3)? { expected(u, &axes, &shape, count, split, dtype)? } else { None };
        Ok(Declared { arrays, axes, split, dtype, expect })
    }
}

/// What the arrays come to, or with one thing changed.
fn expected(
    u: &mut Unstructured<'_>,
    axes: &[Axis],
    shape: &[u64],
    count: usize,
    split: bool,
    dtype: Dtype,
) -> Result<Option<LayoutConfig>> {
    let mut extents = PerAxis::splat(1);
    if !axes.contains(&Axis::Layer) {
        extents[Axis::Layer] = count as u64 / if split { 2 } else { 1 };
    }
    if split {
        extents[Axis::Outer] = 2;
    }
    for (&axis, &extent) in axes.iter().zip(shape) {
        extents[axis] = extent;
    }
    if u.ratio(1, 8)? {
        extents[*u.choose(&Axis::ALL)?] = wild(u)?;
    }
    let builder = LayoutConfig::builder()
        .num_blocks(extents[Axis::Block])
        .num_layers(extents[Axis::Layer])
        .outer_dim(extents[Axis::Outer])
        .page_size(extents[Axis::Page])
        .num_heads(extents[Axis::Head])
        .head_dim(extents[Axis::Dim])
        .dtype(if u.ratio(1, 16)? { *u.choose(Dtype::ALL)? } else { dtype })
        .alignment(1 << u.int_in_range(0..=30)?)
        .first_head(if u.arbitrary()? { 0 } else { wild(u)? });
    Ok(builder.build().ok())
}

fn accepted(u: &mut Unstructured<'_>, declared: &Declared, layout: &Layout) -> Result<()> {
    let Declared { arrays, axes, split, .. } = declared;
    assert_eq!(layout.num_regions(), arrays.len() as u64);
    let coordinates = (0..6).map(|_| inside(u, layout)).collect::<Result<Vec<_>>>()?;
    check_any(layout, &coordinates);
    // The declared strides say where an element lies.
    let mut offsets = Vec::new();
    for at in &coordinates {
        let place = layout.view().place(*at).expect("coordinates are in range");
        let mut offset = 0i128;
        for (&axis, &stride) in axes.iter().zip(&arrays[place.region as usize].strides) {
            offset += i128::from(at[axis]) * i128::from(stride);
        }
        assert_eq!(offset, i128::from(place.offset));
        let layer = if axes.contains(&Axis::Layer) { 0 } else { at[Axis::Layer] };
        assert_eq!(place.region, if *split { 2 * layer + at[Axis::Outer] } else { layer });
        offsets.push(place.offset);
    }

    // Bases: anywhere, or apart by about what some place is.
    let mut regions: Vec<RegionSpan> = Vec::new();
    for _ in 0..arrays.len() {
        let addr = match u.int_in_range(0..=2)? {
            0 => wild(u)?,
            1 => u.int_in_range(0..=200)?,
            _ => {
                let near = regions.last().map_or(1000, |span| span.addr);
                near.saturating_add(*u.choose(&offsets)?).saturating_add(u.int_in_range(0..=16)?)
            }
        };
        regions.push(RegionSpan { addr, len: layout.region_bytes() });
    }
    let _ = layout.check_regions(&regions);
    let aliased = layout.aliased_regions(&regions);
    if let Some((a, b)) = aliased {
        assert!(a < b && b < regions.len());
        assert!(regions[a].addr.abs_diff(regions[b].addr) < layout.region_bytes());
    }
    let elements: u128 = Axis::ALL.into_iter().map(|axis| u128::from(layout.view().extent(axis))).product();
    if elements <= FEW {
        let expected = shared(layout, &regions);
        match aliased {
            None => assert!(expected.is_empty(), "regions {expected:?} share bytes"),
            Some(pair) => assert!(expected.contains(&pair), "regions {pair:?} do not share bytes"),
        }
    }

    if let Ok(paged) = layout.with_page_size(if u.arbitrary()? { u.int_in_range(1..=4)? } else { wild(u)? }) {
        assert_eq!(paged.region_bytes(), layout.region_bytes());
        assert_eq!(paged.num_regions(), layout.num_regions());
        let coordinates = (0..4).map(|_| inside(u, &paged)).collect::<Result<Vec<_>>>()?;
        check_any(&paged, &coordinates);
        assert_eq!(paged.aliased_regions(&regions).is_some(), aliased.is_some());
    }
    Ok(())
}

/// Every pair of regions with an address that both cover.
fn shared(layout: &Layout, regions: &[RegionSpan]) -> Vec<(usize, usize)> {
    let mut bytes: Vec<(u128, usize)> = Vec::new();
    let extents = PerAxis::from_fn(|axis| layout.view().extent(axis));
    let total: u64 = Axis::ALL.into_iter().map(|axis| extents[axis]).product();
    for number in 0..total {
        let mut left = number;
        let at = PerAxis::from_fn(|axis| {
            let value = left % extents[axis];
            left /= extents[axis];
            value
        });
        let place = layout.view().place(at).expect("coordinates are in range");
        let region = place.region as usize;
        let start = u128::from(regions[region].addr) + u128::from(place.offset);
        bytes.extend((start..start + u128::from(layout.view().elem_bytes())).map(|addr| (addr, region)));
    }
    bytes.sort_unstable();
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for same in bytes.chunk_by(|a, b| a.0 == b.0) {
        for (at, &(_, first)) in same.iter().enumerate() {
            for &(_, second) in &same[at + 1..] {
                if !pairs.contains(&(first, second)) {
                    pairs.push((first, second));
                }
            }
        }
    }
    pairs
}
