//! Default head splits, replication and query groups, against their definitions; capacity.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::cases;
use common::exchange::{dealt, grouped, op_and_layout, random_call};
use kvferry_layout::{
    CapacityRequest, Contract, Dtype, ExchangeError, ExchangeOp, ExchangeRequest, GlobalTensor, HeadLayout,
    TensorInput, capacity_for, head_ranges,
};
use proptest::prelude::*;
use std::ops::Range;

fn ranges(shares: &[(u64, u64)]) -> Vec<Range<u64>> {
    shares.iter().map(|&(first, count)| first..first + count).collect()
}

#[test]
fn thirty_heads_over_four_ranks() {
    assert_eq!(head_ranges(30, 4, None).unwrap(), [0..8, 8..16, 16..23, 23..30]);
}

#[test]
fn four_kv_heads_over_eight_ranks_are_replicated() {
    let expected = [0..1, 0..1, 1..2, 1..2, 2..3, 2..3, 3..4, 3..4];
    assert_eq!(head_ranges(4, 8, None).unwrap(), expected);
    assert_eq!(head_ranges(4, 8, Some(32)).unwrap(), expected);
    // Beside its queries in one call, the same.
    let inputs = [32, 4]
        .map(|heads| TensorInput::contiguous([1, 2, heads, 8], HeadLayout::Bnhd, Dtype::BFloat16).unwrap());
    let contract = Contract::new(&ExchangeRequest::new(ExchangeOp::SendRecvHeads, 8, 3, &inputs)).unwrap();
    for (rank, expected) in expected.into_iter().enumerate() {
        assert_eq!(contract.head_range(1, rank), expected);
        assert_eq!(contract.head_range(0, rank), rank as u64 * 4..rank as u64 * 4 + 4);
    }
}

#[test]
fn whole_groups_stay_together_and_cut_ones_are_refused() {
    assert_eq!(head_ranges(8, 4, Some(32)).unwrap(), [0..2, 2..4, 4..6, 6..8]);
    // 28 query heads in 7 groups of 4: rank 0 of two would get three groups and a half.
    let error = head_ranges(7, 2, Some(28)).unwrap_err();
    assert_eq!(error, ExchangeError::GroupCut { tensor: 0, rank: 0, start: 0, end: 14, group: 4 });
    assert!(error.to_string().contains("give head_splits"), "{error}");
    // 12 over 8 ranks is 2, 2, 2, 2, 1, ...: rank 1 has one query head of each of two groups of 3.
    let error = head_ranges(4, 8, Some(12)).unwrap_err();
    assert_eq!(error, ExchangeError::GroupCut { tensor: 0, rank: 1, start: 2, end: 4, group: 3 });
}

#[test]
fn one_kv_head_is_everybodys() {
    for world in 1..=64 {
        assert_eq!(head_ranges(1, world, None).unwrap(), vec![0..1; world]);
        assert_eq!(head_ranges(1, world, Some(128)).unwrap(), vec![0..1; world]);
    }
}

#[test]
fn head_counts_that_fit_no_rule_are_refused() {
    assert_eq!(head_ranges(3, 4, None), Err(ExchangeError::FewHeads { tensor: 0, heads: 3, world: 4 }));
    assert_eq!(head_ranges(1, 4, Some(3)), Err(ExchangeError::FewHeads { tensor: 0, heads: 3, world: 4 }));
    let error = head_ranges(5, 4, Some(32));
    assert_eq!(error, Err(ExchangeError::NotGrouped { tensor: 0, heads: 5, query_heads: 32 }));
    let error = head_ranges(33, 4, Some(32));
    assert_eq!(error, Err(ExchangeError::QueryHeads { tensor: 0, value: 32, limit: 33 }));
    assert_eq!(head_ranges(0, 4, None), Err(ExchangeError::EmptyAxis { tensor: 0, axis: "heads" }));
    assert_eq!(head_ranges(8, 0, None), Err(ExchangeError::World { value: 0, limit: 64 }));
    assert_eq!(head_ranges(128, 65, None), Err(ExchangeError::World { value: 65, limit: 64 }));
}

#[test]
fn head_counts_near_the_end_of_the_integers_do_not_overflow() {
    let split = head_ranges(u64::MAX, 64, None).unwrap();
    assert_eq!(split[63].end, u64::MAX);
    assert_eq!(head_ranges(u64::MAX / 2, 1, Some(u64::MAX - 1)).unwrap(), vec![0..u64::MAX / 2; 1]);
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn default_splits_follow_their_definition(heads in 1u64..=160, world in 1u64..=64) {
        let split = head_ranges(heads, world as usize, None);
        if heads >= world || world % heads == 0 {
            prop_assert_eq!(split.unwrap(), ranges(&dealt(heads, world)));
        } else {
            prop_assert_eq!(split, Err(ExchangeError::FewHeads { tensor: 0, heads, world: world as usize }));
        }
    }

    #[test]
    fn kv_heads_go_where_their_queries_are(kv in 1u64..=24, group in 2u64..=12, world in 1u64..=16) {
        let queries = kv * group;
        let split = head_ranges(kv, world as usize, Some(queries));
        prop_assume!(queries >= world || world % queries == 0);
        let query_split = dealt(queries, world);
        // A rank is fine if the groups it touches hold nobody else's queries, or if it is all in one group.
        let fine = |&(first, count): &(u64, u64)| {
            let mine: Vec<u64> = (first..first + count).collect();
            let touched: Vec<u64> = (0..queries).filter(|q| mine.iter().any(|m| m / group == q / group)).collect();
            touched == mine || mine.iter().all(|m| m / group == first / group)
        };
        match query_split.iter().position(|share| !fine(share)) {
            None => prop_assert_eq!(split.unwrap(), ranges(&grouped(&query_split, group))),
            Some(rank) => {
                let (start, count) = query_split[rank];
                let error = ExchangeError::GroupCut { tensor: 0, rank, start, end: start + count, group };
                prop_assert_eq!(split, Err(error));
            }
        }
    }

    #[test]
    fn capacity_is_the_largest_result_of_the_call(
        (op, layout) in op_and_layout(), world in 1usize..=16, count in 1usize..=4, seed in any::<u64>(),
    ) {
        let call = random_call(op, layout, world, count, seed);
        let tensors: Vec<GlobalTensor> = call.tensors.iter().map(|whole| {
            let tokens = if op == ExchangeOp::AllGatherHeads { whole.tokens[0] } else { whole.total() };
            GlobalTensor { shape: [whole.batch, tokens, whole.heads, whole.dim], dtype: whole.dtype }
        }).collect();
        let rank_tokens: Vec<Vec<u64>> = call.tensors.iter().map(|whole| whole.tokens.clone()).collect();
        let capacity = capacity_for(&CapacityRequest {
            rank_tokens: Some(&rank_tokens),
            query_heads: call.query_heads,
            head_splits: call.head_splits.as_deref(),
            ..CapacityRequest::new(op, world, &tensors)
        });
        prop_assert_eq!(capacity.unwrap(), call.contract(0).unwrap().largest_result());
    }
}

#[test]
fn capacity_of_shapes_worked_out_by_hand() {
    let of = |op, world, shapes: &[[u64; 4]]| {
        let tensors: Vec<_> =
            shapes.iter().map(|&shape| GlobalTensor { shape, dtype: Dtype::BFloat16 }).collect();
        capacity_for(&CapacityRequest::new(op, world, &tensors)).unwrap()
    };
    assert_eq!(of(ExchangeOp::SendRecvHeads, 4, &[[1, 100, 30, 64]]), 100 * 8 * 64 * 2);
    assert_eq!(of(ExchangeOp::GatherHeads, 4, &[[1, 100, 30, 64]]), 25 * 30 * 64 * 2);
    // Tokens that do not divide: the longest share.
    assert_eq!(of(ExchangeOp::GatherHeads, 4, &[[2, 101, 30, 64]]), 2 * 26 * 30 * 64 * 2);
    assert_eq!(of(ExchangeOp::AllGatherTokens, 4, &[[1, 100, 3, 64]]), 100 * 3 * 64 * 2);
    assert_eq!(of(ExchangeOp::AllGatherHeads, 4, &[[1, 100, 30, 64]]), 100 * 30 * 64 * 2);
    // Every tensor begins at a multiple of 256: 8 KV heads on 8 ranks beside 32 query heads.
    let (q, kv) = (3 * 4 * 5 * 2, 3 * 5 * 2);
    assert_eq!(of(ExchangeOp::SendRecvHeads, 8, &[[1, 3, 32, 5], [1, 3, 8, 5], [1, 3, 8, 5]]), 512 + kv);
    assert!(q < 256);
}

#[test]
fn capacity_refuses_what_calls_refuse() {
    let whole = |shape| [GlobalTensor { shape, dtype: Dtype::Float32 }];
    let (x, empty) = (whole([1, 10, 8, 4]), whole([0, 10, 8, 4]));
    let send = |world, tensors| CapacityRequest::new(ExchangeOp::SendRecvHeads, world, tensors);
    assert_eq!(capacity_for(&send(0, &x)), Err(ExchangeError::World { value: 0, limit: 64 }));
    assert_eq!(capacity_for(&send(2, &[])), Err(ExchangeError::TensorCount { value: 0, limit: 16 }));
    assert_eq!(capacity_for(&send(2, &empty)), Err(ExchangeError::EmptyAxis { tensor: 0, axis: "batch" }));
    let huge = whole([1, u64::MAX, 8, 4]);
    assert_eq!(capacity_for(&send(2, &huge)), Err(ExchangeError::Overflow { tensor: 0, what: "tensor" }));
    let tokens = [vec![4, 5]];
    let request = CapacityRequest { rank_tokens: Some(&tokens), ..send(2, &x) };
    assert_eq!(capacity_for(&request), Err(ExchangeError::TotalTokens { tensor: 0, value: 10, expected: 9 }));
    let request = CapacityRequest { op: ExchangeOp::AllGatherHeads, ..request };
    let error = ExchangeError::Tokens { tensor: 0, rank: 0, value: 10, expected: 4 };
    assert_eq!(capacity_for(&request), Err(error));
    let tokens = [vec![10]];
    let request = CapacityRequest { rank_tokens: Some(&tokens), ..send(2, &x) };
    let error = ExchangeError::ListLength { option: "rank_tokens", index: 0, value: 1, limit: 2 };
    assert_eq!(capacity_for(&request), Err(error));
}
