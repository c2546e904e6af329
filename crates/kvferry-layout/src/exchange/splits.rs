//! Who gets which heads.

use std::ops::Range;

use super::MAX_RANKS;
use super::error::ExchangeError;

/// The heads of every rank, by default.
///
/// Heads are split as evenly as possible, the first ranks getting one more (30 over 4 ranks: 8, 8, 7, 7). Fewer heads
/// than ranks are replicated if a whole number of ranks can share each. With `query_heads` above `num_heads` these
/// are KV heads: a rank gets those that its query heads are grouped under, so a KV head may go to several ranks.
///
/// ```
/// use kvferry_layout::head_ranges;
/// assert_eq!(head_ranges(30, 4, None)?, [0..8, 8..16, 16..23, 23..30]);
/// assert_eq!(head_ranges(2, 4, Some(8))?, [0..1, 0..1, 1..2, 1..2]);
/// # Ok::<(), kvferry_layout::ExchangeError>(())
/// ```
///
/// # Errors
/// World size out of range, no heads, heads that neither split nor replicate, query groups that straddle ranks (a
/// rank's query heads must lie inside one group or be whole groups). Errors speak of tensor 0.
pub fn head_ranges(
    num_heads: u64,
    world: usize,
    query_heads: Option<u64>,
) -> Result<Vec<Range<u64>>, ExchangeError> {
    check_world(world)?;
    if num_heads == 0 {
        return Err(ExchangeError::EmptyAxis { tensor: 0, axis: "heads" });
    }
    default_ranges(0, num_heads, world, query_heads.unwrap_or(num_heads))
}

pub(super) fn check_world(world: usize) -> Result<(), ExchangeError> {
    if world == 0 || world > MAX_RANKS {
        return Err(ExchangeError::World { value: world, limit: MAX_RANKS });
    }
    Ok(())
}

/// `total` cut into `world` ranges as equal as possible, the longer ones first.
pub(super) fn even_ranges(total: u64, world: usize) -> Vec<Range<u64>> {
    let world = world as u64;
    let (share, longer) = (total / world, total % world);
    let start = |rank: u64| rank * share + rank.min(longer);
    (0..world).map(|rank| start(rank)..start(rank + 1)).collect()
}

/// The default heads of every rank; `heads` is at least 1.
pub(super) fn default_ranges(
    tensor: usize,
    heads: u64,
    world: usize,
    query_heads: u64,
) -> Result<Vec<Range<u64>>, ExchangeError> {
    if heads > query_heads {
        return Err(ExchangeError::QueryHeads { tensor, value: query_heads, limit: heads });
    }
    let queries = if query_heads >= world as u64 {
        even_ranges(query_heads, world)
    } else if (world as u64).is_multiple_of(query_heads) {
        let per_head = world as u64 / query_heads;
        (0..world as u64).map(|rank| rank / per_head..rank / per_head + 1).collect()
    } else {
        return Err(ExchangeError::FewHeads { tensor, heads: query_heads, world });
    };
    if heads == query_heads {
        return Ok(queries);
    }
    if !query_heads.is_multiple_of(heads) {
        return Err(ExchangeError::NotGrouped { tensor, heads, query_heads });
    }
    let group = query_heads / heads;
    queries
        .into_iter()
        .enumerate()
        .map(|(rank, Range { start, end })| {
            let inside = start / group == (end - 1) / group;
            let whole = start.is_multiple_of(group) && end.is_multiple_of(group);
            if !inside && !whole {
                return Err(ExchangeError::GroupCut { tensor, rank, start, end, group });
            }
            Ok(start / group..end.div_ceil(group))
        })
        .collect()
}

/// Splits given by the caller: parts of `0..heads` that leave no head out. They may overlap and be empty.
pub(super) fn check_splits(tensor: usize, heads: u64, splits: &[Range<u64>]) -> Result<(), ExchangeError> {
    for (rank, split) in splits.iter().enumerate() {
        if split.start > split.end || split.end > heads {
            let Range { start, end } = *split;
            return Err(ExchangeError::Split { tensor, rank, start, end, limit: heads });
        }
    }
    let mut sorted: Vec<&Range<u64>> = splits.iter().collect();
    sorted.sort_by_key(|split| split.start);
    let mut covered = 0;
    for split in sorted {
        if split.start > covered {
            break;
        }
        covered = covered.max(split.end);
    }
    if covered < heads {
        return Err(ExchangeError::SplitGap { tensor, head: covered, limit: heads });
    }
    Ok(())
}

/// What is left of `of` once `taken` are removed: in rising order, none empty.
pub(super) fn without(of: Range<u64>, taken: &[Range<u64>]) -> Vec<Range<u64>> {
    let meets = |gone: &&Range<u64>| gone.start.max(of.start) < gone.end.min(of.end);
    let mut left = vec![of.clone()];
    for gone in taken.iter().filter(meets) {
        let around =
            |part: Range<u64>| [part.start..part.end.min(gone.start), part.start.max(gone.end)..part.end];
        left = left.into_iter().flat_map(around).collect();
        left.retain(|part| !part.is_empty());
    }
    left.retain(|part| !part.is_empty());
    left
}
