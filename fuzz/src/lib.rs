//! What the fuzz targets share: generators over a fuzzer's bytes, layouts with an address formula of their own, and
//! a cap on single allocations.
//!
//! Targets assert; a failed assertion, a panic, an overflow, a big allocation or a hang is a finding.

mod limit;
mod model;

use arbitrary::{Result, Unstructured};
use kvferry_layout::{Axis, BlockDim, KvOrder, Layout, LayoutKind, PerAxis};

pub use limit::{LimitedAlloc, limit_allocations};
pub use model::{Case, Made, Sizes, bind};

/// Every allocation of every target goes through it.
#[global_allocator]
static ALLOC: LimitedAlloc = LimitedAlloc;

/// Every kind of our own making with every order, also those that the kind cannot hold.
pub fn own_kind(u: &mut Unstructured<'_>) -> Result<LayoutKind> {
    let order = *u.choose(&KvOrder::ALL)?;
    Ok(match u.int_in_range(0..=4)? {
        0 => LayoutKind::FullyContiguous { order },
        1 => LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order },
        2 => LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order },
        3 => LayoutKind::SplitKv { order },
        _ => LayoutKind::BlockPool { order },
    })
}

/// A number that likes edges: small, near a power of two, near the limits of ids and addresses, or any.
pub fn wild(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=7)? {
        0..=2 => u.int_in_range(0..=9)?,
        3 | 4 => (1u64 << u.int_in_range(0..=63)?).wrapping_add(u.int_in_range(0..=4)?).wrapping_sub(2),
        5 => u64::from(u32::MAX).wrapping_add(u.int_in_range(0..=4)?) - 2,
        6 => (i64::MAX as u64).wrapping_add(u.int_in_range(0..=4)?) - 2,
        _ => u.arbitrary()?,
    })
}

/// Some items in any order, each at most once.
pub fn some_of<T: Copy>(u: &mut Unstructured<'_>, items: &[T], all: bool) -> Result<Vec<T>> {
    let mut left = items.to_vec();
    let mut chosen = Vec::new();
    let count = if all { items.len() } else { u.int_in_range(0..=items.len())? };
    while chosen.len() < count {
        chosen.push(left.swap_remove(u.choose_index(left.len())?));
    }
    Ok(chosen)
}

/// Coordinates inside `layout`: corners as often as anything else.
pub fn inside(u: &mut Unstructured<'_>, layout: &Layout) -> Result<PerAxis<u64>> {
    let mut at = PerAxis::splat(0);
    for axis in Axis::ALL {
        let last = layout.view().extent(axis) - 1;
        at[axis] = match u.int_in_range(0..=3)? {
            0 => 0,
            1 => last,
            _ => u.int_in_range(0..=last)?,
        };
    }
    Ok(at)
}

/// What holds of any layout, at any size: corners have places inside the regions, places are told apart and found
/// again, and the descriptor round-trips.
pub fn check_any(layout: &Layout, places: &[PerAxis<u64>]) {
    let view = layout.view();
    let (regions, span, width) = (layout.num_regions(), layout.region_bytes(), view.elem_bytes());
    assert!(regions >= 1 && span >= width && span <= i64::MAX as u64);
    // The sum over all regions may leave 63 bits; then it must be refused and not wrap.
    let total = u128::from(regions) * u128::from(span);
    assert_eq!(layout.total_bytes().ok(), u64::try_from(total).ok().filter(|&v| v <= i64::MAX as u64));

    let last = PerAxis::from_fn(|axis| view.extent(axis) - 1);
    let mut seen: Vec<(u64, u64, PerAxis<u64>)> = Vec::new();
    for &at in places.iter().chain(&[last, PerAxis::splat(0)]) {
        let place = view.place(at).expect("coordinates are in range");
        assert!(place.region < regions, "{at:?} lies in region {} of {regions}", place.region);
        assert!(place.offset <= span - width, "{at:?} lies at {} of {span}", place.offset);
        assert_eq!(view.locate(place), Some(at));
        for &(region, offset, other) in &seen {
            let apart = region != place.region || offset.abs_diff(place.offset) >= width;
            assert!(apart || other == at, "{at:?} and {other:?} share bytes");
        }
        seen.push((place.region, place.offset, at));
        let (block, layer, outer) = (at[Axis::Block], at[Axis::Layer], at[Axis::Outer]);
        match layout.memory_region(block, layer, outer) {
            Ok(part) => {
                assert!(part.place.region < regions && part.nbytes <= span);
                assert!(part.place.offset <= span - part.nbytes);
                assert_eq!(part.nbytes, layout.config().chunk_bytes());
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    for axis in Axis::ALL {
        let mut beyond = last;
        beyond[axis] = view.extent(axis);
        assert!(view.place(beyond).is_err());
    }

    let text = layout.to_json().expect("serialises");
    let back = Layout::from_json(&text).expect("our own descriptor is read");
    assert_eq!(&back, layout, "{text}");
    assert_eq!(back.to_json().expect("serialises"), text);
    assert_eq!(back.digest().expect("digests"), layout.digest().expect("digests"));
}
