//! Speed of checksum, fill_pattern, verify_pattern and check_fill, on the CPUs this process may use (`taskset` sets
//! them): `cargo run --release -p kvferry --example verify_speed`
#![allow(clippy::print_stdout, reason = "an example")]

use std::time::Instant;

use kvferry::{
    BlockDim, BlockId, Dtype, KvOrder, Layout, LayoutConfig, LayoutKind, MemoryKind, PhysicalLayout,
};

fn main() -> anyhow::Result<()> {
    let order = |order| LayoutKind::FullyContiguous { order };
    let kinds = [
        order(KvOrder::Nhd),
        order(KvOrder::Hnd),
        order(KvOrder::Universal),
        LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order: KvOrder::Nhd },
    ];
    println!("{} CPUs; GB/s", kvferry::host::cpu::usable_cpus());
    println!("{:<28} {:>9} {:>9} {:>9} {:>9}", "layout, head rows", "checksum", "fill", "verify", "guard");
    // Head dimensions: 128 (most models) and 576 (one latent head, MLA).
    for (heads, dim, outer) in [(8, 128, 2), (8, 64, 2), (1, 576, 1)] {
        for kind in kinds {
            let cfg = LayoutConfig::builder()
                .num_blocks(128)
                .num_layers(32)
                .outer_dim(outer)
                .page_size(16)
                .num_heads(heads)
                .head_dim(dim)
                .dtype(Dtype::BFloat16)
                .build()?;
            let layout = PhysicalLayout::allocate(Layout::of_kind(cfg, kind)?, MemoryKind::System)?;
            let blocks: Vec<BlockId> = (0..128).map(BlockId).collect();
            let bytes = (128 * cfg.block_bytes()) as f64;
            let time = |f: &dyn Fn() -> kvferry::Result<()>| -> kvferry::Result<f64> {
                let mut best = f64::INFINITY;
                for _ in 0..5 {
                    let start = Instant::now();
                    f()?;
                    best = best.min(start.elapsed().as_secs_f64());
                }
                Ok(bytes / best / 1e9)
            };
            let fill = time(&|| layout.fill_pattern(1, None))?;
            let checksum = time(&|| layout.checksum(&blocks, None).map(drop))?;
            let verify = time(&|| layout.verify_pattern(1, None, None, None))?;
            layout.fill(0xA5)?;
            let guard = time(&|| layout.check_fill(0xA5, &[]))?;
            let name =
                format!("{} {} x {}", kind.name(), kind.order().map_or("", KvOrder::name), cfg.row_bytes());
            println!("{name:<28} {checksum:>9.2} {fill:>9.2} {verify:>9.2} {guard:>9.2}");
        }
    }
    Ok(())
}
