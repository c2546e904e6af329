//! The hash of a contract: equal where ranks agree, different for any change.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashMap;
use std::ops::Range;

use common::cases;
use common::exchange::{op_and_layout, random_call};
use kvferry_layout::{Contract, Dtype, ExchangeOp, ExchangeRequest, HeadLayout, TensorInput};
use proptest::prelude::*;

/// A request that owns its parts.
#[derive(Clone)]
struct Owned {
    op: ExchangeOp,
    layout: HeadLayout,
    world: usize,
    rank: usize,
    tensors: Vec<([u64; 4], Dtype)>,
    rank_tokens: Option<Vec<Vec<u64>>>,
    num_heads: Option<Vec<u64>>,
    query_heads: Option<u64>,
    head_splits: Option<Vec<Vec<Range<u64>>>>,
}

impl Owned {
    fn contract(&self) -> Contract {
        let input = |&(shape, dtype)| TensorInput::contiguous(shape, self.layout, dtype).unwrap();
        let tensors: Vec<_> = self.tensors.iter().map(input).collect();
        Contract::new(&ExchangeRequest {
            layout: self.layout,
            rank_tokens: self.rank_tokens.as_deref(),
            num_heads: self.num_heads.as_deref(),
            query_heads: self.query_heads,
            head_splits: self.head_splits.as_deref(),
            ..ExchangeRequest::new(self.op, self.world, self.rank, &tensors)
        })
        .unwrap()
    }

    fn hash(&self) -> u64 {
        self.contract().hash(11, 22)
    }

    fn but(&self, change: impl FnOnce(&mut Owned)) -> Owned {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }
}

fn base() -> Owned {
    Owned {
        op: ExchangeOp::SendRecvHeads,
        layout: HeadLayout::Bnhd,
        world: 2,
        rank: 0,
        tensors: vec![([2, 6, 8, 16], Dtype::BFloat16), ([2, 6, 4, 16], Dtype::BFloat16)],
        rank_tokens: Some(vec![vec![6, 4]]),
        num_heads: None,
        query_heads: None,
        head_splits: None,
    }
}

#[test]
fn every_field_is_in_the_hash() {
    let base = base();
    let splits =
        |first: [Range<u64>; 2], second: [Range<u64>; 2]| Some(vec![first.to_vec(), second.to_vec()]);
    let changes = [
        ("unchanged", base.clone()),
        // The same contract would need inputs of another shape for gathers of heads: these keep the shapes.
        ("allgather tokens", base.but(|c| c.op = ExchangeOp::AllGatherTokens)),
        ("layout", base.but(|c| c.layout = HeadLayout::Bhnd)),
        ("dtype of the same width", base.but(|c| c.tensors[0].1 = Dtype::Float16)),
        ("dtype of another width", base.but(|c| c.tensors[0].1 = Dtype::Float32)),
        ("dtype of the second tensor", base.but(|c| c.tensors[1].1 = Dtype::Int16)),
        ("batch", base.but(|c| c.tensors[0].0[0] = 3)),
        ("batch of the second tensor", base.but(|c| c.tensors[1].0[0] = 1)),
        ("dim", base.but(|c| c.tensors[0].0[3] = 8)),
        ("dim of the second tensor", base.but(|c| c.tensors[1].0[3] = 32)),
        ("heads", base.but(|c| c.tensors[0].0[2] = 16)),
        ("heads of the second tensor", base.but(|c| c.tensors[1].0[2] = 8)),
        ("tokens of another rank", base.but(|c| c.rank_tokens = Some(vec![vec![6, 5]]))),
        (
            "tokens of another rank, second tensor",
            base.but(|c| c.rank_tokens = Some(vec![vec![6, 4], vec![6, 5]])),
        ),
        ("no tokens there", base.but(|c| c.rank_tokens = Some(vec![vec![6, 0]]))),
        ("as many as mine", base.but(|c| c.rank_tokens = None)),
        (
            "world",
            base.but(|c| {
                c.world = 4;
                c.rank_tokens = Some(vec![vec![6, 4, 0, 0]]);
            }),
        ),
        ("splits", base.but(|c| c.head_splits = splits([0..5, 5..8], [0..2, 2..4]))),
        ("splits of the second tensor", base.but(|c| c.head_splits = splits([0..4, 4..8], [0..3, 3..4]))),
        ("overlapping splits", base.but(|c| c.head_splits = splits([0..4, 4..8], [0..3, 2..4]))),
        ("splits by rank", base.but(|c| c.head_splits = splits([4..8, 0..4], [0..2, 2..4]))),
        (
            "query heads",
            base.but(|c| {
                c.world = 2;
                c.query_heads = Some(64);
                c.tensors = vec![([2, 6, 1, 16], Dtype::BFloat16), ([2, 6, 4, 16], Dtype::BFloat16)];
            }),
        ),
        (
            "fewer tensors",
            base.but(|c| {
                c.tensors.pop();
            }),
        ),
        ("more tensors", base.but(|c| c.tensors.push(c.tensors[1]))),
        ("order of tensors", base.but(|c| c.tensors.swap(0, 1))),
    ];
    let mut seen = HashMap::new();
    for (name, changed) in changes {
        if let Some(before) = seen.insert(changed.hash(), name) {
            panic!("{name:?} hashes like {before:?}");
        }
    }
}

#[test]
fn the_three_that_gather_differ_though_nothing_else_does() {
    // One head per rank, one token per rank: the same input serves all four.
    let hashes: std::collections::HashSet<u64> = ExchangeOp::ALL
        .into_iter()
        .map(|op| {
            let request = Owned {
                op,
                world: 1,
                tensors: vec![([1, 1, 1, 4], Dtype::Int8)],
                rank_tokens: None,
                ..base()
            };
            request.hash()
        })
        .collect();
    assert_eq!(hashes.len(), ExchangeOp::ALL.len());
}

#[test]
fn nonce_and_output_are_in_the_hash_and_not_each_other() {
    let contract = base().contract();
    let hashes: std::collections::HashSet<u64> =
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (1, 2)].map(|(nonce, out)| contract.hash(nonce, out)).into();
    assert_eq!(hashes.len(), 6);
    assert_eq!(contract.hash(1, 2), base().contract().hash(1, 2));
}

#[test]
fn defaults_hash_like_the_same_values_spelled_out() {
    let base = base().but(|c| c.rank_tokens = None);
    let splits = vec![vec![0..4, 4..8], vec![0..2, 2..4]];
    for same in [
        base.but(|c| c.rank = 1),
        base.but(|c| c.rank_tokens = Some(vec![vec![6, 6]])),
        base.but(|c| c.rank_tokens = Some(vec![vec![6, 6]; 2])),
        base.but(|c| c.num_heads = Some(vec![8, 4])),
        base.but(|c| c.query_heads = Some(8)),
        base.but(|c| c.head_splits = Some(splits)),
    ] {
        assert_eq!(same.contract(), base.contract());
        assert_eq!(same.hash(), base.hash());
    }
}

/// Changing the encoding makes builds that cannot talk to each other: then change `ENCODING` and this number.
#[test]
fn the_encoding_is_pinned() {
    assert_eq!(base().hash(), PINNED, "{:#x}", base().hash());
}

const PINNED: u64 = 0x184c_2453_c9fb_212b;

#[test]
fn strides_are_not_in_the_hash() {
    let mut input = TensorInput::contiguous([2, 6, 8, 16], HeadLayout::Bnhd, Dtype::Int8).unwrap();
    let of = |input: &TensorInput| {
        let inputs = std::slice::from_ref(input);
        Contract::new(&ExchangeRequest::new(ExchangeOp::SendRecvHeads, 2, 0, inputs)).unwrap().hash(0, 0)
    };
    let packed = of(&input);
    input.strides = [1 << 20, -77, 4096];
    assert_eq!(of(&input), packed);
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn contracts_are_equal_exactly_when_their_hashes_are(
        (op, layout) in op_and_layout(), world in 1usize..=3, seeds in any::<[u64; 2]>(),
    ) {
        // Small worlds and one tensor, so that equal contracts do come up.
        let [one, two] = seeds.map(|seed| random_call(op, layout, world, 1, seed).contract(0).unwrap());
        prop_assert_eq!(one == two, one.hash(5, 6) == two.hash(5, 6));
    }
}
