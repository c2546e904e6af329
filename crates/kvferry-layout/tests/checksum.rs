//! Rows in chunks, and the checksum over them: the same in every layout, additive, and sensitive to every swap.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::{Dice, Dims, Form, Made, alignment, cases, dims, form, own_kinds};
use kvferry_layout::oracle::{self, OracleLayout};
use kvferry_layout::{
    BlockId, Dtype, KvOrder, Layout, LayoutConfig, LayoutError, LayoutKind, MAX_ROW_HEADS, RowAt, RowChunks,
    View, row_checksum, step,
};
use proptest::prelude::*;

type Memory = Vec<Vec<u8>>;

/// The checksum as an engine computes it: chunks of at most `max_bytes`, gathered into a dense buffer.
fn checksum(view: &View, mem: &Memory, block: u64, max_bytes: u64) -> u64 {
    let chunks = RowChunks::new(view, max_bytes).unwrap();
    let (mut sum, mut rows) = (0u64, Vec::new());
    for index in 0..chunks.per_block() {
        let chunk = chunks.chunk(BlockId(block as u32), index);
        assert!((1..=chunks.max_tokens()).contains(&chunk.tokens));
        let len = chunks.chunk_bytes(chunk.tokens);
        assert!(len <= max_bytes || chunk.tokens == 1);
        let mut dense = vec![0; len as usize];
        let (run, loops) = chunks.gather(chunk.tokens);
        let count: u64 = loops.iter().map(|l| l.count).product();
        assert_eq!(count * run, len);
        let origin = kvferry_layout::Place { region: 0, offset: 0 };
        for piece in 0..count {
            let (from, to) = step(&loops, piece, chunk.place, origin);
            dense[to.offset as usize..][..run as usize]
                .copy_from_slice(&mem[from.region as usize][from.offset as usize..][..run as usize]);
        }
        for (row, at) in dense.chunks(chunks.row_bytes() as usize).zip(chunks.rows(&chunk)) {
            rows.push(at);
            sum = sum.wrapping_add(row_checksum(row, at));
        }
    }
    assert!(rows.is_sorted_by(|a, b| a < b), "rows come in order, each once");
    assert_eq!(rows.len() as u64 * chunks.row_bytes(), chunks.block_bytes());
    sum
}

/// The checksum by the formula alone, rows picked up element by element.
fn plain(config: &LayoutConfig, oracle: &OracleLayout, mem: &Memory, block: u64) -> u64 {
    let mut sum = 0u64;
    for (layer, outer) in
        (0..config.num_layers()).flat_map(|layer| (0..config.outer_dim()).map(move |outer| (layer, outer)))
    {
        for (token, head) in
            (0..oracle.page_size()).flat_map(|token| (0..config.num_heads()).map(move |head| (token, head)))
        {
            let mut row = Vec::new();
            for dim in 0..config.head_dim() {
                let (region, offset) = oracle.element(block, layer, outer, token, head, dim);
                row.extend_from_slice(&mem[region][offset..][..oracle.elem_bytes()]);
            }
            let head = config.first_head() + head;
            sum = sum.wrapping_add(row_checksum(&row, RowAt { layer, outer, token, head }));
        }
    }
    sum
}

fn filled(made: &Made, seed: u64) -> Memory {
    let mut mem = made.oracle.alloc();
    oracle::poison(&mut mem);
    made.oracle.fill_unique(&mut mem, seed);
    mem
}

proptest! {
    #![proptest_config(cases(192))]

    #[test]
    fn any_layout_any_chunk_size_is_the_formula(
        dims in dims(6), form in form(), alignment in alignment(), split in 1u64..=3, max_bytes in 1u64..400,
    ) {
        let page = dims.page;
        let stored = Made::new(Dims { page: page * split, ..dims }.config(alignment), &form);
        let mem = filled(&stored, 1);
        let made = stored.with_page_size(page);
        for block in 0..made.oracle.num_blocks() {
            let expected = plain(made.layout.config(), &made.oracle, &mem, block);
            prop_assert_eq!(checksum(made.layout.view(), &mem, block, max_bytes), expected);
        }
    }

    /// Two layouts that hold the same block have the same checksum, whatever the id and the padding.
    #[test]
    fn order_layout_and_place_do_not_count(
        dims in dims(5), a in form(), b in form(), align_a in alignment(), align_b in alignment(), seed: u64,
    ) {
        let (src, dst) = (Made::new(dims.config(align_a), &a), Made::new(dims.config(align_b), &b));
        let src_mem = filled(&src, seed);
        let mut dst_mem = dst.oracle.alloc();
        let mut dice = Dice(seed);
        let (from, to) = (dice.below(dims.blocks), dice.below(dims.blocks));
        let ids = |id: u64| [BlockId(id as u32)];
        oracle::copy(&src.oracle, &src_mem, &dst.oracle, &mut dst_mem, &ids(from), &ids(to), 0..dims.layers, src.oracle.heads());
        prop_assert_eq!(
            checksum(src.layout.view(), &src_mem, from, 256),
            checksum(dst.layout.view(), &dst_mem, to, 1000)
        );
    }

    #[test]
    fn layers_and_shards_add_up(
        dims in dims(4), world in 1u64..=4, form in form(), shard_kind in prop::sample::select(own_kinds()),
        cut in 1u64..=4, seed: u64,
    ) {
        let config = Dims { heads: dims.heads * world, ..dims }.config(1);
        let whole = Made::new(config, &form);
        let mem = filled(&whole, seed);
        let block = seed % dims.blocks;
        let expected = checksum(whole.layout.view(), &mem, block, 300);

        let cut = cut.min(dims.layers - 1);
        let layers = [0..cut, cut..dims.layers].into_iter().filter(|layers| !layers.is_empty());
        let sum = layers.fold(0u64, |sum, layers| {
            let part = whole.layout.view().slice(kvferry_layout::Axis::Layer, layers).unwrap();
            sum.wrapping_add(checksum(&part, &mem, block, 300))
        });
        prop_assert_eq!(sum, expected);

        let ids = [BlockId(block as u32)];
        let sum = (0..world).fold(0u64, |sum, rank| {
            let shard = Made::new(config.shard_heads(rank, world).unwrap(), &Form::Own(shard_kind));
            let mut held = shard.oracle.alloc();
            let heads = shard.oracle.heads();
            oracle::copy(&whole.oracle, &mem, &shard.oracle, &mut held, &ids, &[BlockId(0)], 0..dims.layers, heads);
            sum.wrapping_add(checksum(shard.layout.view(), &held, 0, 300))
        });
        prop_assert_eq!(sum, expected);
    }

    /// Two coordinates of one axis exchanged, in all their rows: it shows unless they held the same, as one-byte rows can.
    #[test]
    fn a_swap_on_any_axis_shows(dims in dims(5), form in form(), axis in 0usize..4, seed: u64) {
        let made = Made::new(dims.config(1), &form);
        let extent = [dims.layers, dims.outer, dims.page, dims.heads][axis];
        let mem = filled(&made, seed);
        let mut swapped = mem.clone();
        let width = made.oracle.elem_bytes();
        made.oracle.for_each(|[b, l, o, t, h, d], (region, offset)| {
            let mut at = [l, o, t, h];
            at[axis] = match at[axis] { 0 => extent - 1, last if last == extent - 1 => 0, other => other };
            let (from, from_offset) = made.oracle.element(b, at[0], at[1], at[2], at[3], d);
            swapped[region][offset..offset + width].copy_from_slice(&mem[from][from_offset..from_offset + width]);
        });
        for block in 0..dims.blocks {
            let same = checksum(made.layout.view(), &mem, block, 256) == checksum(made.layout.view(), &swapped, block, 256);
            let bytes = |mem: &Memory| {
                let mut bytes = Vec::new();
                made.oracle.for_each(|at, (region, offset)| {
                    if at[0] == block {
                        bytes.extend_from_slice(&mem[region][offset..offset + width]);
                    }
                });
                bytes
            };
            prop_assert_eq!(same, bytes(&mem) == bytes(&swapped));
        }
    }
}

#[test]
fn coordinates_beyond_the_word_are_refused() {
    let build = |heads: u64, first: u64, page: u64, layers: u64| {
        let config = LayoutConfig::builder()
            .num_blocks(1)
            .num_layers(layers)
            .page_size(page)
            .num_heads(heads)
            .first_head(first)
            .head_dim(1)
            .dtype(Dtype::UInt8)
            .build()
            .unwrap();
        let layout = Layout::of_kind(config, LayoutKind::FullyContiguous { order: KvOrder::Nhd }).unwrap();
        RowChunks::new(layout.view(), 1 << 16).map(|_| ())
    };
    assert_eq!(build(1, MAX_ROW_HEADS - 1, 1 << 24, 1 << 16), Ok(()));
    let refused = |field, value, max| Err(LayoutError::Size { field, value, min: 1, max });
    assert_eq!(build(1, MAX_ROW_HEADS, 1, 1), refused("global heads", MAX_ROW_HEADS + 1, MAX_ROW_HEADS));
    assert_eq!(build(1, 0, (1 << 24) + 1, 1), refused("tokens of a block", (1 << 24) + 1, 1 << 24));
    assert_eq!(build(1, 0, 1, (1 << 16) + 1), refused("layers", (1 << 16) + 1, 1 << 16));
}
