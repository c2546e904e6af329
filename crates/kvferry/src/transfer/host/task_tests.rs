//! Every cut of a plan into tasks moves what the oracle moves. (Through the public door tasks are 512 KiB, so that small
//! random layouts never meet the cuts.)
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

use std::sync::Arc;

use kvferry_host::CopyHint;
use kvferry_layout::oracle::{self, OracleLayout};
use kvferry_layout::{
    BlockDim, BlockId, CopyPlan, Dtype, KvOrder, Layout, LayoutConfig, LayoutKind, PairPlan, PairRequest,
};
use proptest::prelude::*;

use super::split::Split;
use super::task::Work;
use crate::{MemoryKind, PhysicalLayout};

fn kind() -> impl Strategy<Value = LayoutKind> {
    let order = prop::sample::select(KvOrder::ALL.to_vec());
    let by_layer = prop::sample::select(vec![KvOrder::Nhd, KvOrder::Hnd]);
    let block_dim = prop::sample::select(vec![BlockDim::BlockFirst, BlockDim::OuterFirst]);
    prop_oneof![
        order.clone().prop_map(|order| LayoutKind::FullyContiguous { order }),
        order.prop_map(|order| LayoutKind::BlockPool { order }),
        (block_dim, by_layer.clone())
            .prop_map(|(block_dim, order)| LayoutKind::LayerSeparate { block_dim, order }),
        by_layer.prop_map(|order| LayoutKind::SplitKv { order }),
    ]
}

fn bind(cfg: &LayoutConfig, kind: LayoutKind) -> (OracleLayout, Arc<PhysicalLayout>) {
    let layout = Layout::of_kind(*cfg, kind).unwrap();
    (OracleLayout::new(cfg, kind).unwrap(), PhysicalLayout::allocate(layout, MemoryKind::System).unwrap())
}

fn write(layout: &PhysicalLayout, mem: &[Vec<u8>]) {
    for (index, region) in mem.iter().enumerate() {
        layout.host_region(index).unwrap().write(0, region).unwrap();
    }
}

fn read(layout: &PhysicalLayout, like: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut mem = like.to_vec();
    for (index, region) in mem.iter_mut().enumerate() {
        layout.host_region(index).unwrap().read(0, region).unwrap();
    }
    mem
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tasks_move_what_the_oracle_moves(
        (src_kind, dst_kind) in (kind(), kind()),
        (blocks, layers, page, heads, dim) in (1u64..9, 1u64..4, 1u64..6, 1u64..4, 1u64..70),
        layer_count in 1u64..4, task_bytes in prop_oneof![1u64..400, 400u64..5000], joined: bool, rotate in 0u32..9,
        stream: bool, backwards: bool,
    ) {
        let cfg = LayoutConfig::builder().num_blocks(blocks).num_layers(layers).page_size(page).num_heads(heads)
            .head_dim(dim).dtype(Dtype::Float16).build().unwrap();
        let (src, from) = bind(&cfg, src_kind);
        let (dst, to) = bind(&cfg, dst_kind);
        let mut src_mem = src.alloc();
        src.fill_unique(&mut src_mem, 3);
        let mut expected = dst.alloc();
        oracle::poison(&mut expected);
        write(&from, &src_mem);
        write(&to, &expected);

        let count = blocks as u32;
        let src_ids: Vec<BlockId> = (0..count).map(BlockId).collect();
        let shift = |id: u32| if joined { id } else { (id * (count + 1) + rotate) % count };
        let dst_ids: Vec<BlockId> = (0..count).map(|id| BlockId(shift(id))).collect();
        let range = 0..layer_count.min(layers);
        let request = PairRequest { layers: Some(range.clone()), ..PairRequest::default() };
        let pair = Arc::new(PairPlan::new(from.layout(), to.layout(), &request).unwrap());
        let plan = CopyPlan::new(pair, &src_ids, &dst_ids).unwrap();
        let split = Split::new(&plan, task_bytes);
        let hint = if stream { CopyHint::NonTemporal } else { CopyHint::Temporal };
        let work = Work { plan, src: from, dst: to, split, hint };

        let mut named: Vec<u32> = Vec::new();
        for index in 0..split.tasks() {
            let task = split.task(if backwards { split.tasks() - 1 - index } else { index });
            work.run(task).unwrap();
            named.extend(work.blocks_of(task));
        }
        oracle::copy(&src, &src_mem, &dst, &mut expected, &src_ids, &dst_ids, range, 0..heads);
        prop_assert!(read(&work.dst, &expected) == expected, "{split:?}");

        named.sort_unstable();
        named.dedup();
        let mut ids: Vec<u32> = dst_ids.iter().map(|id| id.0).collect();
        ids.sort_unstable();
        prop_assert_eq!(&named, &ids);
        let mut all = work.all_blocks();
        all.sort_unstable();
        prop_assert_eq!(all, ids);
    }
}
