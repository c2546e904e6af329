//! Random layouts, each with its oracle.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

pub mod exchange;
pub mod pairs;

use kvferry_layout::oracle::OracleLayout;
use kvferry_layout::{
    Axis, BlockDim, BlockId, Dtype, ForeignArray, KvOrder, Layout, LayoutConfig, LayoutKind,
};
use proptest::prelude::*;
use proptest::test_runner::Config;

/// `default` cases unless PROPTEST_CASES says otherwise.
pub fn cases(default: u32) -> Config {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = default;
    }
    config
}

/// A small deterministic generator for choices that depend on other choices.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % limit
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index as u64 + 1) as usize);
        }
    }

    /// A non-empty part of `0..limit`.
    pub fn range(&mut self, limit: u64) -> std::ops::Range<u64> {
        let start = self.below(limit);
        start..start + 1 + self.below(limit - start)
    }
}

/// Every kind of our own making with every order it can hold.
pub fn own_kinds() -> Vec<LayoutKind> {
    let mut kinds = Vec::new();
    for order in KvOrder::ALL {
        kinds.push(LayoutKind::FullyContiguous { order });
        kinds.push(LayoutKind::BlockPool { order });
        if order != KvOrder::Universal {
            kinds.push(LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order });
            kinds.push(LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order });
            kinds.push(LayoutKind::SplitKv { order });
        }
    }
    kinds
}

/// How to lay out a configuration.
#[derive(Clone, Debug)]
pub enum Form {
    Own(LayoutKind),
    /// Axes in random order; `pad` gaps between them; `tight` strides step over the span of what is inside and not
    /// over its padded box, as `as_strided` can.
    Foreign {
        seed: u64,
        pad: u64,
        tight: bool,
    },
}

impl Form {
    /// Whether strides are those of a box cut out of a larger box.
    pub fn regular(&self) -> bool {
        !matches!(self, Form::Foreign { tight: true, .. })
    }
}

pub fn form() -> impl Strategy<Value = Form> {
    prop_oneof![
        3 => prop::sample::select(own_kinds()).prop_map(Form::Own),
        1 => (any::<u64>(), 0u64..4, any::<bool>()).prop_map(|(seed, pad, tight)| Form::Foreign { seed, pad, tight }),
    ]
}

pub fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

pub fn alignment() -> impl Strategy<Value = u64> {
    (0u32..10).prop_map(|log| 1 << log)
}

/// A layout and the oracle that knows where its bytes are.
#[derive(Clone, Debug)]
pub struct Made {
    pub layout: Layout,
    pub oracle: OracleLayout,
}

impl Made {
    pub fn new(config: LayoutConfig, form: &Form) -> Made {
        match *form {
            Form::Own(kind) => Made {
                layout: Layout::of_kind(config, kind).expect("own layout"),
                oracle: OracleLayout::new(&config, kind).expect("own oracle"),
            },
            Form::Foreign { seed, pad, tight } => foreign(config, seed, pad, tight),
        }
    }

    pub fn with_page_size(&self, page_size: u64) -> Made {
        Made {
            layout: self.layout.with_page_size(page_size).expect("page size divides"),
            oracle: self.oracle.with_page_size(page_size),
        }
    }
}

fn foreign(config: LayoutConfig, seed: u64, pad: u64, tight: bool) -> Made {
    let mut dice = Dice(seed);
    let extents = config.extents();
    let layer_named = dice.below(2) == 0;
    let split = config.outer_dim() == 2 && dice.below(2) == 0;
    let mut axes: Vec<Axis> = Axis::ALL
        .into_iter()
        .filter(|&axis| match axis {
            Axis::Block | Axis::Dim => true,
            Axis::Layer => layer_named,
            // An axis of extent 1 may stay unnamed.
            Axis::Outer => !split && (extents[axis] > 1 || dice.below(2) == 0),
            Axis::Page | Axis::Head => extents[axis] > 1 || dice.below(2) == 0,
        })
        .collect();
    dice.shuffle(&mut axes);
    let width = config.dtype().bytes();
    let mut strides = vec![0; axes.len()];
    let mut step = width;
    for (index, &axis) in axes.iter().enumerate().rev() {
        let gap = dice.below(pad + 1);
        if tight {
            strides[index] = step + gap;
            step += (extents[axis] - 1) * strides[index];
        } else {
            strides[index] = step;
            step *= extents[axis] + gap;
        }
    }
    let arrays = if layer_named { 1 } else { config.num_layers() } * if split { 2 } else { 1 };
    let arrays: Vec<ForeignArray> = (0..arrays)
        .map(|index| ForeignArray {
            name: format!("tensors[{index}]"),
            shape: axes.iter().map(|&axis| extents[axis]).collect(),
            strides: strides.iter().map(|&stride| stride as i64).collect(),
        })
        .collect();
    let named: Vec<(Axis, u64)> = axes.iter().copied().zip(strides).collect();
    Made {
        layout: Layout::from_arrays(&arrays, &axes, split, config.dtype(), Some(&config))
            .expect("foreign layout"),
        oracle: OracleLayout::foreign(&config, &named, split),
    }
}

/// Sizes of a cache, small and odd.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    pub blocks: u64,
    pub layers: u64,
    pub outer: u64,
    pub page: u64,
    pub heads: u64,
    pub dim: u64,
    pub dtype: Dtype,
}

prop_compose! {
    pub fn dims(limit: u64)(
        blocks in 1..=limit, layers in 1..=limit.min(4), outer in 1u64..=2, page in 1..=limit,
        heads in 1..=limit, dim in 1..=limit, dtype in dtype(),
    ) -> Dims {
        Dims { blocks, layers, outer, page, heads, dim, dtype }
    }
}

impl Dims {
    pub fn config(&self, alignment: u64) -> LayoutConfig {
        LayoutConfig::builder()
            .num_blocks(self.blocks)
            .num_layers(self.layers)
            .outer_dim(self.outer)
            .page_size(self.page)
            .num_heads(self.heads)
            .head_dim(self.dim)
            .dtype(self.dtype)
            .alignment(alignment)
            .build()
            .expect("legal sizes")
    }
}

pub fn ids(list: impl IntoIterator<Item = u64>) -> Vec<BlockId> {
    list.into_iter().map(|id| BlockId(id as u32)).collect()
}
