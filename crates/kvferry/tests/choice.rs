//! Which engine a plan gets by the shipped constants, and what is refused by name. No GPU takes part.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use kvferry::{
    BlockDim, BlockId, CostModel, Dtype, Engine, Error, KvOrder, Layout, LayoutConfig, MemoryKind,
    TransferOptions, TransferPlan, plan_layouts,
};

const DEVICE: MemoryKind = MemoryKind::Device(0);

/// Llama-3.1-8B: 2 MiB blocks, 32 KiB per layer and K or V.
fn config() -> LayoutConfig {
    let cfg =
        LayoutConfig::builder().num_blocks(1024).num_layers(32).page_size(16).num_heads(8).head_dim(128);
    cfg.dtype(Dtype::BFloat16).build().unwrap()
}

fn fc() -> Layout {
    Layout::fully_contiguous(config(), KvOrder::Nhd).unwrap()
}

fn lw() -> Layout {
    Layout::layer_separate(config(), BlockDim::OuterFirst, KvOrder::Nhd).unwrap()
}

/// Every second block, so that none join.
fn ids(count: u32) -> Vec<BlockId> {
    (0..count).map(|at| BlockId(2 * at)).collect()
}

fn plan(
    (src, from): (&Layout, MemoryKind),
    (dst, to): (&Layout, MemoryKind),
    blocks: u32,
    engine: Option<Engine>,
) -> Result<TransferPlan, Error> {
    let options = TransferOptions { engine, ..TransferOptions::default() };
    plan_layouts((src, from), (dst, to), &ids(blocks), &ids(blocks), &options)
}

fn chosen(src: (&Layout, MemoryKind), dst: (&Layout, MemoryKind), blocks: u32) -> Engine {
    plan(src, dst, blocks, None).unwrap().choice().engine
}

#[test]
fn the_engine_follows_run_length_and_direction() {
    let (fc, lw) = (fc(), lw());
    let (host_fc, pool) = ((&fc, MemoryKind::Pinned), (&fc, DEVICE));
    let cache = (&lw, DEVICE);
    for blocks in [1, 8, 64, 256] {
        assert_eq!(chosen(host_fc, pool, blocks), Engine::Batch, "whole blocks, {blocks}");
        assert_eq!(chosen(pool, host_fc, blocks), Engine::Batch, "whole blocks, {blocks}");
    }
    for blocks in [64, 256] {
        assert_eq!(chosen(host_fc, cache, blocks), Engine::Staged, "{blocks}");
        assert_eq!(chosen(cache, host_fc, blocks), Engine::Staged, "{blocks}");
    }
    assert_eq!(chosen(host_fc, cache, 1), Engine::Kernel);
    assert_eq!(chosen(cache, host_fc, 1), Engine::Kernel);
    assert_eq!(chosen(pool, cache, 64), Engine::Kernel);
    assert_eq!(chosen(cache, (&lw, MemoryKind::Device(1)), 64), Engine::Kernel);
    // A host side in layers has no long runs to stage.
    assert_eq!(chosen((&lw, MemoryKind::Pinned), pool, 64), Engine::Kernel);
    assert_eq!(chosen((&fc, MemoryKind::System), cache, 8), Engine::Bounce);
    assert_eq!(chosen((&fc, MemoryKind::System), (&lw, MemoryKind::Pinned), 8), Engine::Host);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let (fc, lw) = (fc(), lw());
    let refused = |src, dst, engine| match plan(src, dst, 2, Some(engine)) {
        Err(Error::Unsupported { what, why }) => format!("{what}: {why}"),
        other => panic!("{other:?}"),
    };
    let (pinned, system) = ((&fc, MemoryKind::Pinned), (&fc, MemoryKind::System));
    let device = (&lw, DEVICE);
    for (src, dst, engine, said) in [
        (pinned, device, Engine::Host, "engine host"),
        (pinned, device, Engine::Bounce, "pinned"),
        (system, device, Engine::Kernel, "pageable"),
        (system, device, Engine::Batch, "pageable"),
        (device, device, Engine::Staged, "no staging"),
        (pinned, device, Engine::Disk, "not in this build"),
        (system, pinned, Engine::Kernel, "GPU"),
    ] {
        let text = refused(src, dst, engine);
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn explain_has_every_candidate_with_its_time() {
    let (fc, lw) = (fc(), lw());
    let plan = plan((&fc, MemoryKind::Pinned), (&lw, DEVICE), 64, None).unwrap();
    let text = plan.explain();
    for said in
        ["engine: staged (chosen), direction h2d", "kernel can, about", "batch can, about", "bounce cannot"]
    {
        assert!(text.contains(said), "{text}");
    }
    assert!(text.contains(&CostModel::h200().source), "{text}");
    let seconds =
        |engine| plan.choice().candidates().into_iter().find(|c| c.engine == engine).unwrap().seconds;
    let (staged, kernel, batch) = (seconds(Engine::Staged), seconds(Engine::Kernel), seconds(Engine::Batch));
    assert!(staged < kernel && kernel < batch && plan.choice().seconds() == staged);
}
