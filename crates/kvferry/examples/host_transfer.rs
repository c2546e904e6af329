//! Moves blocks of a paged cache, one tensor per layer, into a pool of universal blocks, and looks at the result.
//!
//! `cargo run --release -p kvferry --example host_transfer`
#![allow(clippy::print_stdout, reason = "a program for people")]

use kvferry::{
    BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig, MemoryKind, PhysicalLayout, TransferContext,
    TransferOptions,
};

fn main() -> anyhow::Result<()> {
    let config = LayoutConfig::builder()
        .num_blocks(64)
        .num_layers(32)
        .page_size(16)
        .num_heads(8)
        .head_dim(128)
        .dtype(Dtype::BFloat16)
        .build()?;
    let cache = Layout::layer_separate(config, BlockDim::BlockFirst, KvOrder::Nhd)?;
    let pool = Layout::fully_contiguous(config, KvOrder::Universal)?;
    let cache = PhysicalLayout::allocate(cache, MemoryKind::System)?;
    let pool = PhysicalLayout::allocate(pool, MemoryKind::System)?;
    cache.fill(7)?;

    let ctx = TransferContext::host()?;
    let (from, to) = ([3, 5].map(BlockId), [0, 1].map(BlockId));
    let options = TransferOptions::default();
    println!("{}", ctx.plan(&cache, &pool, &from, &to, &options)?.explain());
    let result = ctx.transfer(&cache, &pool, &from, &to, &options)?.wait(None)?;
    println!("moved {} bytes in {:.3} ms", result.bytes, result.seconds * 1e3);

    let mut row = [0; 4];
    pool.host_region(0)?.read(config.block_bytes(), &mut row)?;
    anyhow::ensure!(row == [7; 4], "block 1 did not arrive");
    Ok(())
}
