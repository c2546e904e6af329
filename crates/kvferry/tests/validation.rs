//! Every refusal comes before anything moves.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::{Bound, FC, config, context, made, occupy, small_pair};
use kvferry::cuda::Driver;
use kvferry::host::HostRegion;
use kvferry::layout::oracle::POISON;
use kvferry::{
    BlockDim, BlockId, Dtype, Engine, Error, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind,
    PhysicalLayout, PlanError, Region, Side, TransferContext, TransferOptions, TransferStrategy, Transform,
};

fn base() -> LayoutConfig {
    config(4, 2, 4, 2, 8)
}

fn block_ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().copied().map(BlockId).collect()
}

/// The error of a transfer between `src` and a poisoned FC of `dst_config`, whose bytes must stay.
fn refused(
    src_config: LayoutConfig,
    dst_config: LayoutConfig,
    src: &[u32],
    dst: &[u32],
    options: &TransferOptions,
) -> Error {
    let (from, to) = (Bound::new(made(src_config, FC), 0), Bound::new(made(dst_config, FC), 0));
    from.fill_unique(1);
    let ctx = context(2);
    let error = ctx
        .transfer(&from.layout, &to.layout, &block_ids(src), &block_ids(dst), options)
        .expect_err("should have been refused");
    assert!(to.dump().iter().all(|&byte| byte == POISON), "bytes moved before {error}");
    assert_eq!(ctx.in_flight(), 0);
    assert!(!error.to_string().is_empty());
    error
}

fn plan_error(error: Error) -> PlanError {
    match error {
        Error::Plan(error) => error,
        other => panic!("expected a plan error, got {other:?}"),
    }
}

#[test]
fn ids() {
    let cfg = base();
    let with =
        |src: &[u32], dst: &[u32]| plan_error(refused(cfg, cfg, src, dst, &TransferOptions::default()));
    assert_eq!(
        with(&[0, 4], &[0, 1]),
        PlanError::BlockId { side: Side::Source, index: 1, value: 4, limit: 4 }
    );
    assert_eq!(
        with(&[0, 1, 2], &[0, 1, u32::MAX]),
        PlanError::BlockId { side: Side::Destination, index: 2, value: u32::MAX.into(), limit: 4 }
    );
    assert_eq!(
        with(&[0, 1, 2], &[3, 1, 3]),
        PlanError::DuplicateDestination { value: 3, first: 0, second: 2 }
    );
    assert_eq!(with(&[0, 1], &[3]), PlanError::IdCount { src: 2, src_page: 4, dst: 1, dst_page: 4 });
}

#[test]
fn shapes() {
    let cfg = base();
    let with = |other: LayoutConfig| plan_error(refused(cfg, other, &[0], &[0], &TransferOptions::default()));
    let change = || cfg.to_builder();
    assert_eq!(with(change().num_layers(3).build().unwrap()), PlanError::LayerCount { src: 2, dst: 3 });
    assert_eq!(with(change().outer_dim(1).build().unwrap()), PlanError::OuterDim { src: 2, dst: 1 });
    let half = change().dtype(Dtype::Float16).build().unwrap();
    assert_eq!(with(half), PlanError::Dtype { src: Dtype::BFloat16, dst: Dtype::Float16 });
    assert_eq!(with(change().head_dim(16).build().unwrap()), PlanError::HeadDim { src: 8, dst: 16 });
    let wide = change().num_heads(4).total_heads(4).build().unwrap();
    assert_eq!(with(wide), PlanError::TotalHeads { src: 2, dst: 4 });
    assert_eq!(with(change().page_size(3).build().unwrap()), PlanError::PageSize { src: 4, dst: 3 });
}

#[test]
fn ranges_and_orders() {
    let cfg = base();
    let with = |options: TransferOptions| plan_error(refused(cfg, cfg, &[0], &[0], &options));
    #[allow(clippy::reversed_empty_ranges, reason = "that is the point")]
    for layers in [0..3, 2..3, 1..1, 2..1, 0..u64::MAX] {
        let error = with(TransferOptions { layers: Some(layers), ..TransferOptions::default() });
        assert!(matches!(error, PlanError::Range { side: Side::Source, .. }), "{error:?}");
    }
    let error = with(TransferOptions { heads: Some(1..3), ..TransferOptions::default() });
    assert!(matches!(error, PlanError::Range { .. }), "{error:?}");

    let (src, dst) = (Bound::new(made(cfg, FC), 0), Bound::new(made(cfg, HND), 0));
    let options = TransferOptions { transform: Transform::Forbid, ..TransferOptions::default() };
    let error = context(1).transfer(&src.layout, &dst.layout, &[BlockId(0)], &[BlockId(0)], &options);
    assert!(matches!(error, Err(Error::Plan(PlanError::TransformForbidden { .. }))), "{error:?}");
    assert!(dst.dump().iter().all(|&byte| byte == POISON));
}

const HND: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Hnd };

#[test]
fn strategies_and_engines() {
    let cfg = base();
    for asked in TransferStrategy::ALL.into_iter().filter(|&asked| asked != TransferStrategy::Memcpy) {
        let options = TransferOptions { strategy: Some(asked), ..TransferOptions::default() };
        let error = refused(cfg, cfg, &[0], &[1], &options);
        assert!(
            matches!(error, Error::StrategyMismatch { asked: a, derived: TransferStrategy::Memcpy, .. } if a == asked)
        );
    }
    for engine in Engine::ALL.into_iter().filter(|&engine| engine != Engine::Host) {
        let options = TransferOptions { engine: Some(engine), ..TransferOptions::default() };
        let error = refused(cfg, cfg, &[0], &[1], &options);
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(engine.name()), "{error}");
    }
}

#[test]
fn overlap_within_one_layout() {
    let cache = Bound::new(made(base(), FC), 0);
    let mem = cache.fill_unique(1);
    let ctx = context(2);
    let copy = |src: &[u32], dst: &[u32]| {
        ctx.transfer(
            &cache.layout,
            &cache.layout,
            &block_ids(src),
            &block_ids(dst),
            &TransferOptions::default(),
        )
    };
    for (src, dst) in [([0, 1], [1, 2]), ([0, 1], [0, 1]), ([3, 2], [1, 3])] {
        let error = copy(&src, &dst).unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::Overlap { .. })), "{error:?}");
        assert!(cache.dump() == cache.image(&mem));
    }
    copy(&[0, 1], &[2, 3]).unwrap().wait(None).unwrap();
    assert!(cache.dump() != cache.image(&mem));
}

#[test]
fn interleaved_k_and_v_views_are_apart_and_shifted_ones_are_not() {
    // One tensor [block, outer, ...] seen as a K cache and a V cache.
    let cfg = base().to_builder().outer_dim(1).num_layers(1).build().unwrap();
    let page = cfg.block_bytes();
    let whole = PhysicalLayout::allocate(
        Layout::fully_contiguous(base().to_builder().num_layers(1).build().unwrap(), KvOrder::Nhd).unwrap(),
        MemoryKind::System,
    )
    .unwrap();
    let array = kvferry::ForeignArray {
        name: "kv".to_owned(),
        shape: vec![4, 4, 2, 8],
        strides: vec![2 * page as i64, 32, 16, 2],
    };
    let axes = kvferry::Axis::parse_list("block page head dim").unwrap();
    let view = |start: u64| {
        let layout =
            Layout::from_arrays(std::slice::from_ref(&array), &axes, false, Dtype::BFloat16, None).unwrap();
        let region = whole.host_region(0).unwrap().part(start, layout.region_bytes()).unwrap();
        PhysicalLayout::from_regions(layout, MemoryKind::System, vec![Region::Host(region)]).unwrap()
    };
    let (k, v, shifted) = (view(0), view(page), view(page / 2));
    whole.fill(1).unwrap();
    whole.host_region(0).unwrap().fill(0, page, 2).unwrap();
    let ctx = context(1);
    let all = block_ids(&[0, 1, 2, 3]);
    ctx.transfer(&k, &v, &all, &all, &TransferOptions::default()).unwrap().wait(None).unwrap();
    let bytes = common::first_bytes(&whole, 4 * page as usize);
    assert!(bytes[..2 * page as usize].iter().all(|&byte| byte == 2));
    assert!(bytes[2 * page as usize..].iter().all(|&byte| byte == 1));
    let error = ctx.transfer(&k, &shifted, &all, &all, &TransferOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Plan(PlanError::Overlap { src: 0, dst: 0, .. })), "{error:?}");
}

#[test]
fn a_read_only_destination() {
    let (src, dst) = small_pair();
    let region = dst.host_region(0).unwrap();
    // SAFETY: the clone of the owner keeps the same memory mapped.
    let lent = unsafe { HostRegion::from_raw(region.addr(), region.len(), false, region.owner().clone()) };
    let lent = Region::Host(lent);
    let lent = PhysicalLayout::from_regions(dst.layout().clone(), MemoryKind::System, vec![lent]).unwrap();
    let ctx = context(1);
    let one = [BlockId(0)];
    let error = ctx.transfer(&src, &lent, &one, &one, &TransferOptions::default()).unwrap_err();
    assert!(matches!(error, Error::ReadOnlyDestination { region: 0 }), "{error:?}");
    assert!(common::first_bytes(&dst, 256).iter().all(|&byte| byte == 0));
    // As a source it is fine.
    ctx.transfer(&lent, &src, &one, &one, &TransferOptions::default()).unwrap();
}

#[test]
fn device_memory() {
    let (src, dst) = small_pair();
    let region = device(0x7000_0000_0000, dst.layout().region_bytes(), 1);
    let there =
        PhysicalLayout::from_regions(dst.layout().clone(), MemoryKind::Device(1), vec![region]).unwrap();
    let one = [BlockId(0)];
    let ctx = context(1);
    for (from, to, name) in [(&src, &there, "h2d"), (&there, &dst, "d2h"), (&there, &there, "d2d")] {
        let error = ctx.transfer(from, to, &one, &[BlockId(1)], &TransferOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(name), "{error:?}");
    }
    if Driver::get().is_err() {
        let error = TransferContext::builder().device(0).build().err();
        assert!(matches!(error, Some(Error::Cuda(_))), "{error:?}");
    }
}

#[test]
fn regions_that_do_not_fit() {
    let (src, _) = small_pair();
    let region = src.host_region(0).unwrap();
    let bind = |regions| PhysicalLayout::from_regions(src.layout().clone(), MemoryKind::System, regions);
    let short = Region::Host(region.part(0, region.len() - 1).unwrap());
    assert!(matches!(bind(vec![short]), Err(Error::Layout(_))));
    assert!(matches!(bind(vec![]), Err(Error::Layout(_))));
    let there = device(0x7000_0000_0000, region.len(), 0);
    assert!(matches!(bind(vec![there]), Err(Error::MixedMemory { region: 0, .. })));
}

#[test]
fn contexts() {
    for threads in [0, 1025, usize::MAX] {
        let error = TransferContext::builder().threads(threads).build().err();
        assert!(matches!(error, Some(Error::InvalidOption { option: "threads", .. })), "{error:?}");
    }
    let ctx = context(1);
    let busy = occupy(&ctx);
    let route = ctx.route(&small_pair().0, &small_pair().1, &TransferOptions::default()).unwrap();
    drop(busy);
    ctx.close(None).unwrap();
    let (src, dst) = small_pair();
    for ids in [vec![], vec![BlockId(0)]] {
        let error = ctx.transfer(&src, &dst, &ids, &ids, &common::pooled()).unwrap_err();
        assert!(matches!(error, Error::Closed), "{error:?}");
        let error = ctx.transfer(&src, &dst, &ids, &ids, &TransferOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Closed), "{error:?}");
        assert!(matches!(route.submit(&ids, &ids), Err(Error::Closed)));
    }
    assert!(common::first_bytes(&dst, 256).iter().all(|&byte| byte == 0));
    drop(ctx);
    assert!(matches!(route.submit(&[], &[]), Err(Error::Closed)));
}

#[test]
fn an_id_late_in_the_list_is_found_before_anything_moves() {
    let kind = LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Hnd };
    let (src, dst) = (Bound::new(made(base(), FC), 0), Bound::new(made(base(), kind), 0));
    let (from, to) = (block_ids(&[0, 1, 9]), block_ids(&[0, 1, 2]));
    context(1).transfer(&src.layout, &dst.layout, &from, &to, &TransferOptions::default()).unwrap_err();
    assert!(dst.dump().iter().all(|&byte| byte == POISON));
}

/// A device region that nothing may touch.
fn device(addr: u64, len: u64, ordinal: u32) -> Region {
    // SAFETY: never reached: everything refuses it first, which is what is tested.
    Region::Device(unsafe { kvferry::cuda::DeviceRegion::from_raw(addr, len, ordinal, Arc::new(())) })
}
