//! What a configuration and the words of its options refuse, with exact fields.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use kvferry_layout::{
    Axis, BlockDim, Dtype, KvOrder, LayoutConfig, LayoutConfigBuilder, LayoutError, MAX_ALIGNMENT, MAX_BLOCKS,
};

const MAX: u64 = i64::MAX as u64;

fn good() -> LayoutConfigBuilder {
    LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .outer_dim(2)
        .page_size(16)
        .num_heads(8)
        .head_dim(64)
        .dtype(Dtype::BFloat16)
}

/// Two heads fewer fields: for `inner_dim`.
fn headless() -> LayoutConfigBuilder {
    LayoutConfig::builder().num_blocks(4).num_layers(2).page_size(16).dtype(Dtype::BFloat16)
}

#[test]
fn sizes_out_of_range() {
    let size = |field, value, min, max| LayoutError::Size { field, value, min, max };
    let table = [
        (good().num_blocks(0), size("num_blocks", 0, 1, MAX_BLOCKS)),
        (good().num_blocks(1 << 32), size("num_blocks", 1 << 32, 1, MAX_BLOCKS)),
        (good().num_layers(0), size("num_layers", 0, 1, MAX)),
        (good().num_layers(u64::MAX), size("num_layers", u64::MAX, 1, MAX)),
        (good().outer_dim(0), size("outer_dim", 0, 1, 2)),
        (good().outer_dim(3), size("outer_dim", 3, 1, 2)),
        (good().page_size(0), size("page_size", 0, 1, MAX)),
        (good().page_size(1 << 63), size("page_size", 1 << 63, 1, MAX)),
        (good().num_heads(0), size("num_heads", 0, 1, MAX)),
        (good().num_heads(u64::MAX), size("num_heads", u64::MAX, 1, MAX)),
        (good().head_dim(0), size("head_dim", 0, 1, MAX)),
        (headless().inner_dim(0), size("inner_dim", 0, 1, MAX)),
        (good().alignment(0), size("alignment", 0, 1, MAX_ALIGNMENT)),
        (good().alignment(MAX_ALIGNMENT * 2), size("alignment", MAX_ALIGNMENT * 2, 1, MAX_ALIGNMENT)),
        (good().first_head(MAX - 7), size("first_head", MAX - 7, 0, MAX - 8)),
        (good().first_head(u64::MAX), size("first_head", u64::MAX, 0, MAX - 8)),
        (good().total_heads(7), size("total_heads", 7, 8, MAX)),
        (good().first_head(8).total_heads(15), size("total_heads", 15, 16, MAX)),
        (good().total_heads(u64::MAX), size("total_heads", u64::MAX, 8, MAX)),
    ];
    for (builder, error) in table {
        assert_eq!(builder.build(), Err(error));
    }
}

#[test]
fn missing_and_exclusive_fields() {
    let missing = |field| LayoutError::Missing { field };
    let exclusive = |right| LayoutError::Exclusive { left: "inner_dim", right };
    let base = LayoutConfig::builder;
    let table = [
        (base(), missing("num_heads")),
        (base().num_heads(1), missing("head_dim")),
        (base().num_heads(1).head_dim(1), missing("num_blocks")),
        (base().num_heads(1).head_dim(1).num_blocks(1), missing("num_layers")),
        (base().inner_dim(1).num_blocks(1).num_layers(1), missing("page_size")),
        (base().inner_dim(1).num_blocks(1).num_layers(1).page_size(1), missing("dtype")),
        (good().inner_dim(512), exclusive("num_heads")),
        (headless().inner_dim(512).num_heads(8), exclusive("num_heads")),
        (headless().inner_dim(512).head_dim(64), exclusive("head_dim")),
    ];
    for (builder, error) in table {
        assert_eq!(builder.build(), Err(error));
    }
}

#[test]
fn alignment_is_a_power_of_two() {
    for value in [3, 5, 6, 7, 12, 48, 511, MAX_ALIGNMENT - 1] {
        assert_eq!(good().alignment(value).build(), Err(LayoutError::Alignment { value }));
    }
    for log in 0..=30 {
        assert_eq!(good().alignment(1 << log).build().map(|config| config.alignment()), Ok(1 << log));
    }
}

#[test]
fn products_stop_at_63_bits() {
    let one = || {
        let config = LayoutConfig::builder().num_blocks(1).num_layers(1).outer_dim(1).page_size(1);
        config.num_heads(1).head_dim(1).dtype(Dtype::UInt8)
    };
    // The exact edge: 2^63 - 1 = 7 * 7 * 73 * 127 * 337 * 92737 * 649657 bytes.
    let (blocks, layers, page, heads, dim) = (7 * 7 * 73, 127, 337, 92737, 649657);
    let edge = one().num_blocks(blocks).num_layers(layers).page_size(page).num_heads(heads).head_dim(dim);
    let edge = edge.build().unwrap();
    assert_eq!(edge.block_bytes() * edge.num_blocks(), MAX);
    assert_eq!(one().head_dim(MAX).build().map(|config| config.block_bytes()), Ok(MAX));

    let table = [
        (one().head_dim(1 << 62).dtype(Dtype::Float16), "bytes of a head row"),
        (one().head_dim(1 << 32).num_heads(1 << 31), "bytes of a token"),
        (one().head_dim(1 << 21).num_heads(1 << 21).page_size(1 << 21), "bytes of a page"),
        (one().page_size(1 << 62).outer_dim(2), "bytes of a block in one layer"),
        (one().page_size(1 << 60).num_layers(8), "bytes of a block"),
        (one().page_size(1 << 33).num_blocks(1 << 30), "bytes of the cache"),
        // Wraps to a small number in 64 bits.
        (one().head_dim(1 << 62).num_layers(1 << 62), "bytes of a block"),
    ];
    for (builder, what) in table {
        assert_eq!(builder.build(), Err(LayoutError::Overflow { what }), "{what}");
    }
}

#[test]
fn shards_are_even() {
    let config = good().build().unwrap();
    let error = |by| Err(LayoutError::NotDivisible { what: "num_heads", value: 8, by });
    assert_eq!(config.shard_heads(0, 0), error(0));
    assert_eq!(config.shard_heads(0, 3), error(3));
    assert_eq!(config.shard_heads(0, 16), error(16));
    let error = LayoutError::Size { field: "rank", value: 4, min: 0, max: 3 };
    assert_eq!(config.shard_heads(4, 4), Err(error));
    let shard = config.shard_heads(3, 4).unwrap();
    assert_eq!((shard.first_head(), shard.num_heads(), shard.total_heads()), (6, 2, 8));
    let half = shard.shard_heads(1, 2).unwrap();
    assert_eq!((half.first_head(), half.num_heads(), half.total_heads()), (7, 1, 8));
    assert_eq!(config.to_builder().build(), Ok(config));
}

#[test]
fn unknown_words() {
    for name in ["", "bf16", "Float16", "torch.", "torch.torch.int8", "float16 "] {
        assert_eq!(name.parse::<Dtype>(), Err(LayoutError::UnknownDtype { name: name.into() }));
    }
    for &dtype in Dtype::ALL {
        assert_eq!(dtype.name().parse(), Ok(dtype));
        assert_eq!(format!("torch.{dtype}").parse(), Ok(dtype));
        assert_eq!(dtype.bytes() * 8, u64::from(dtype.bits()));
        let message = LayoutError::UnknownDtype { name: "x".into() }.to_string();
        assert!(message.contains(dtype.name()), "the message lists {dtype}");
    }
    for order in KvOrder::ALL {
        assert_eq!(order.name().parse(), Ok(order));
    }
    let allowed = "\"NHD\", \"HND\", \"universal\"";
    let error = LayoutError::UnknownWord { option: "order", allowed, value: "nhd".into() };
    assert_eq!("nhd".parse::<KvOrder>(), Err(error));
    for dim in [BlockDim::BlockFirst, BlockDim::OuterFirst] {
        assert_eq!(dim.name().parse(), Ok(dim));
    }
    let allowed = "\"block_first\", \"outer_first\"";
    let error = LayoutError::UnknownWord { option: "block_dim", allowed, value: "first".into() };
    assert_eq!("first".parse::<BlockDim>(), Err(error));

    assert_eq!(Axis::parse("token"), Err(LayoutError::UnknownAxis { name: "token".into() }));
    assert_eq!(Axis::parse_list("block heads"), Err(LayoutError::UnknownAxis { name: "heads".into() }));
    assert_eq!(Axis::parse_list("block,dim block"), Err(LayoutError::AxisTwice { axis: Axis::Block }));
    assert_eq!(
        Axis::parse_list(" outer, block  page head dim"),
        Ok([2, 0, 3, 4, 5].map(|i| Axis::ALL[i]).to_vec())
    );
}
