//! What pairs and plans refuse, with exact fields and in the documented order.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::{Dims, ids};
use kvferry_layout::{
    Axis, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, LayoutError, PairPlan, PairRequest, PlanError,
    Side, Transform,
};

const DIMS: Dims = Dims { blocks: 6, layers: 4, outer: 2, page: 4, heads: 8, dim: 5, dtype: Dtype::Float16 };

fn layout(config: LayoutConfig) -> Layout {
    Layout::fully_contiguous(config, KvOrder::Nhd).unwrap()
}

fn of(dims: Dims) -> Layout {
    layout(dims.config(1))
}

fn pair(src: &Layout, dst: &Layout, request: PairRequest) -> Result<PairPlan, PlanError> {
    PairPlan::new(src, dst, &request)
}

#[test]
fn layouts_of_different_models() {
    let src = of(DIMS);
    let table = [
        (Dims { layers: 3, ..DIMS }, PlanError::LayerCount { src: 4, dst: 3 }),
        (Dims { outer: 1, ..DIMS }, PlanError::OuterDim { src: 2, dst: 1 }),
        (Dims { page: 6, ..DIMS }, PlanError::PageSize { src: 4, dst: 6 }),
        (Dims { dim: 7, ..DIMS }, PlanError::HeadDim { src: 5, dst: 7 }),
        (Dims { heads: 4, ..DIMS }, PlanError::TotalHeads { src: 8, dst: 4 }),
        (
            // Same width is not the same type.
            Dims { dtype: Dtype::BFloat16, ..DIMS },
            PlanError::Dtype { src: Dtype::Float16, dst: Dtype::BFloat16 },
        ),
    ];
    for (dims, error) in table {
        assert_eq!(pair(&src, &of(dims), PairRequest::default()), Err(error));
    }
    // All wrong at once: repaired one by one, they are named in this order.
    let mut dims = Dims { layers: 1, outer: 1, page: 3, heads: 3, dim: 1, dtype: Dtype::Int8, ..DIMS };
    let next = |dims| pair(&src, &of(dims), PairRequest::default()).unwrap_err();
    assert!(matches!(next(dims), PlanError::LayerCount { .. }));
    dims.layers = DIMS.layers;
    assert!(matches!(next(dims), PlanError::OuterDim { .. }));
    dims.outer = DIMS.outer;
    assert!(matches!(next(dims), PlanError::Dtype { .. }));
    dims.dtype = DIMS.dtype;
    assert!(matches!(next(dims), PlanError::HeadDim { .. }));
    dims.dim = DIMS.dim;
    assert!(matches!(next(dims), PlanError::TotalHeads { .. }));
    dims.heads = DIMS.heads;
    assert!(matches!(next(dims), PlanError::PageSize { .. }));
    dims.page = DIMS.page;
    assert!(pair(&src, &of(dims), PairRequest::default()).is_ok());
}

#[test]
fn shards_without_a_common_head() {
    let config = DIMS.config(1);
    let shard = |rank, world| layout(config.shard_heads(rank, world).unwrap());
    assert_eq!(
        pair(&shard(0, 2), &shard(3, 4), PairRequest::default()),
        Err(PlanError::NoCommonHead { src_start: 0, src_end: 4, dst_start: 6, dst_end: 8 })
    );
    assert!(pair(&shard(1, 2), &shard(3, 4), PairRequest::default()).is_ok());
}

#[test]
fn ranges_outside_a_side() {
    let (src, dst) = (of(DIMS), layout(DIMS.config(1).shard_heads(1, 2).unwrap()));
    let layers = |range| PairRequest { layers: Some(range), ..PairRequest::default() };
    let heads = |range| PairRequest { heads: Some(range), ..PairRequest::default() };
    let range = |side, axis, start, end, first, limit| {
        Err(PlanError::Range { side, source: LayoutError::Range { axis, start, end, first, limit } })
    };
    assert_eq!(pair(&src, &dst, layers(0..5)), range(Side::Source, Axis::Layer, 0, 5, 0, 4));
    assert_eq!(pair(&src, &dst, layers(2..2)), range(Side::Source, Axis::Layer, 2, 2, 0, 4));
    assert_eq!(pair(&src, &dst, layers(0..u64::MAX)), range(Side::Source, Axis::Layer, 0, u64::MAX, 0, 4));
    assert_eq!(pair(&src, &dst, heads(7..9)), range(Side::Source, Axis::Head, 7, 9, 0, 8));
    assert_eq!(pair(&src, &dst, heads(3..6)), range(Side::Destination, Axis::Head, 3, 6, 4, 8));
    assert_eq!(pair(&src, &dst, heads(5..7)).map(|pair| pair.block_bytes()), Ok(4 * 2 * 4 * 2 * 10));

    // Re-addressed in the other side's pages, a side may have too many blocks.
    let tiny = Dims { layers: 1, outer: 1, heads: 1, dim: 1, dtype: Dtype::UInt8, ..DIMS };
    let (coarse, fine) = (Dims { blocks: 1 << 31, page: 4, ..tiny }, Dims { page: 1, ..tiny });
    let source = LayoutError::Size { field: "num_blocks", value: 1 << 33, min: 1, max: (1 << 32) - 1 };
    let side = Side::Destination;
    assert_eq!(pair(&of(fine), &of(coarse), PairRequest::default()), Err(PlanError::Range { side, source }));
}

#[test]
fn a_forbidden_change_of_order() {
    let forbid = PairRequest { transform: Transform::Forbid, ..PairRequest::default() };
    let (src, dst) = (of(DIMS), Layout::fully_contiguous(DIMS.config(1), KvOrder::Universal).unwrap());
    let error = PlanError::TransformForbidden {
        src: "layer outer page head dim".into(),
        dst: "head layer outer page dim".into(),
    };
    assert_eq!(pair(&src, &dst, forbid.clone()), Err(error));
    assert!(pair(&src, &src, forbid.clone()).is_ok());
    assert!(pair(&src, &dst, PairRequest::default()).unwrap().transforms());
    // One head leaves nothing to reorder.
    assert!(!pair(&src, &dst, PairRequest { heads: Some(2..3), ..forbid }).unwrap().transforms());
}

#[test]
fn ids_that_do_not_pair_up() {
    let (src, dst) = (of(DIMS), of(Dims { page: 2, blocks: 9, ..DIMS }));
    let pair = Arc::new(pair(&src, &dst, PairRequest::default()).unwrap());
    let plan = |src: &[u64], dst: &[u64]| {
        CopyPlan::new(pair.clone(), &ids(src.iter().copied()), &ids(dst.iter().copied()))
            .map(|plan| plan.blocks())
    };
    let count = |src, dst| Err(PlanError::IdCount { src, src_page: 4, dst, dst_page: 2 });
    assert_eq!(plan(&[1], &[0]), count(1, 1));
    assert_eq!(plan(&[1, 2], &[0, 1, 2]), count(2, 3));
    assert_eq!(plan(&[], &[0]), count(0, 1));
    assert_eq!(plan(&[1], &[0, 8]), Ok(2));
    assert_eq!(plan(&[], &[]), Ok(0));
    // Ids are in each layout's own pages, and so are limits and positions.
    let block = |side, index, value, limit| Err(PlanError::BlockId { side, index, value, limit });
    assert_eq!(plan(&[5, 6], &[0, 1, 2, 3]), block(Side::Source, 1, 6, 6));
    assert_eq!(plan(&[5, 5], &[0, 1, 2, 9]), block(Side::Destination, 3, 9, 9));
    let error = PlanError::DuplicateDestination { value: 4, first: 1, second: 2 };
    assert_eq!(plan(&[5, 5], &[8, 4, 4, 1]), Err(error));
}

#[test]
fn messages_name_sides_and_values() {
    let error = PlanError::BlockId { side: Side::Destination, index: 3, value: 9, limit: 9 };
    assert_eq!(
        error.to_string(),
        "destination block id 9 at index 3 is out of range: the layout has 9 blocks"
    );
    let error = PlanError::LayerCount { src: 4, dst: 3 };
    assert_eq!(error.to_string(), "layer counts differ: source has 4, destination has 3");
    let source = LayoutError::Range { axis: Axis::Layer, start: 0, end: 5, first: 0, limit: 4 };
    let error = PlanError::Range { side: Side::Source, source };
    assert_eq!(error.to_string(), "source: layer range 0..5 is not a non-empty part of 0..4");
}
