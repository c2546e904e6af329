//! All pieces of all ranks of a call, against a permutation done element by element.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::exchange::{Call, GUARD, Source, op_and_layout, random_call, run};
use common::{Dice, cases};
use kvferry_layout::{ExchangeOp, HeadLayout, mix64};
use proptest::prelude::*;

/// Every byte of every result comes from the byte that the naive permutation names, and no other byte is written.
fn check(call: &Call) {
    let contract = call.contract(0).unwrap();
    let results = run(&contract, &call.strides, |rank, tensor, offset| (rank, tensor, offset));
    for (rank, result) in results.iter().enumerate() {
        let mut expected = vec![None; result.len()];
        for (tensor, at, offset) in call.result_rows(rank) {
            let source = call.source(rank, tensor, at);
            let first = call.input_offset(source);
            for byte in 0..call.row(tensor) {
                expected[offset + byte] = Some((source.0, tensor, first + byte as i64));
            }
        }
        assert!(expected[expected.len() - GUARD..].iter().all(Option::is_none));
        if let Some(byte) = (0..result.len()).find(|&byte| result[byte] != expected[byte]) {
            panic!("rank {rank}, byte {byte}: {:?}, expected {:?}", result[byte], expected[byte]);
        }
    }
}

/// The inputs of a call in memory: bytes of a rank's tensor, and where its first element is.
struct Memory(Vec<Vec<(Vec<u8>, i64)>>);

impl Memory {
    /// Strided memory of every input, poisoned, then filled row by row.
    fn of(call: &Call, mut row: impl FnMut(Source) -> Vec<u8>) -> Memory {
        let tensor_memory = |rank: usize, tensor: usize, row: &mut dyn FnMut(Source) -> Vec<u8>| {
            let rows = rows(call.input_shape(rank, tensor), |at| (rank, tensor, at));
            let offsets: Vec<i64> = rows.iter().map(|&source| call.input_offset(source)).collect();
            let low = offsets.iter().copied().min().unwrap_or(0);
            let high = offsets.iter().copied().max().unwrap_or(0) + call.row(tensor) as i64;
            let mut bytes = vec![0xA5; (high - low) as usize];
            for (source, offset) in rows.into_iter().zip(offsets) {
                let start = (offset - low) as usize;
                bytes[start..start + call.row(tensor)].copy_from_slice(&row(source));
            }
            (bytes, -low)
        };
        Memory(
            (0..call.world())
                .map(|rank| (0..call.tensors.len()).map(|t| tensor_memory(rank, t, &mut row)).collect())
                .collect(),
        )
    }

    fn byte(&self, rank: usize, tensor: usize, offset: i64) -> u8 {
        let (bytes, zero) = &self.0[rank][tensor];
        bytes[usize::try_from(zero + offset).expect("inside the input")]
    }

    fn row(&self, call: &Call, source: Source) -> Vec<u8> {
        let first = call.input_offset(source);
        (0..call.row(source.1) as i64).map(|i| self.byte(source.0, source.1, first + i)).collect()
    }
}

fn rows<T>([batch, tokens, heads, _]: [u64; 4], name: impl Fn([u64; 3]) -> T) -> Vec<T> {
    let mut rows = Vec::new();
    for b in 0..batch {
        for n in 0..tokens {
            rows.extend((0..heads).map(|h| name([b, n, h])));
        }
    }
    rows
}

/// Bytes unique per rank, tensor, batch, token, head and place in the row.
fn unique(call: &Call, (rank, tensor, [b, n, h]): Source) -> Vec<u8> {
    let key = [rank as u64, tensor as u64, b, n, h].iter().fold(7, |key, &part| mix64(key ^ mix64(part)));
    (0..call.row(tensor)).map(|byte| mix64(key ^ mix64(byte as u64)) as u8).collect()
}

/// The inverse of a send, with the contiguous results of it as inputs.
fn inverse(call: &Call) -> Call {
    let contract = call.contract(0).unwrap();
    let mut back = Call { op: ExchangeOp::GatherHeads, ..call.clone() };
    back.rank_tokens = Some(call.tensors.iter().map(|whole| whole.tokens.clone()).collect());
    back.num_heads = Some(call.tensors.iter().map(|whole| whole.heads).collect());
    back.strides = (0..call.world())
        .map(|rank| (0..call.tensors.len()).map(|tensor| contract.result_strides(rank, tensor)).collect())
        .collect();
    back
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn every_byte_lands_once_and_where_it_belongs(
        (op, layout) in op_and_layout(), world in 1usize..=16, count in 1usize..=3, seed in any::<u64>(),
    ) {
        check(&random_call(op, layout, world, count, seed));
    }

    #[test]
    fn gathering_what_was_sent_gives_the_inputs_back(
        (_, layout) in op_and_layout(), world in 1usize..=9, count in 1usize..=3, seed in any::<u64>(),
    ) {
        let call = random_call(ExchangeOp::SendRecvHeads, layout, world, count, seed);
        let inputs = Memory::of(&call, |source| unique(&call, source));
        let contract = call.contract(0).unwrap();
        let sent = run(&contract, &call.strides, |rank, tensor, offset| inputs.byte(rank, tensor, offset));

        let back = inverse(&call);
        let contract_back = back.contract(0).unwrap();
        let read = |rank: usize, tensor: usize, offset: i64| {
            let at = contract.result_offset(rank, tensor) + u64::try_from(offset).expect("contiguous");
            sent[rank][at as usize].expect("written")
        };
        let gathered = run(&contract_back, &back.strides, read);
        for (rank, result) in gathered.iter().enumerate() {
            for (tensor, at, offset) in back.result_rows(rank) {
                let row: Vec<u8> =
                    result[offset..offset + call.row(tensor)].iter().map(|byte| byte.expect("written")).collect();
                prop_assert_eq!(row, inputs.row(&call, (rank, tensor, at)));
            }
        }
    }

    #[test]
    fn every_rank_makes_the_same_contract_from_what_it_knows(
        (op, layout) in op_and_layout(), world in 1usize..=16, count in 1usize..=4, seed in any::<u64>(),
    ) {
        let call = random_call(op, layout, world, count, seed);
        let first = call.contract(0).unwrap();
        for rank in 0..world {
            let contract = call.contract(rank).unwrap();
            prop_assert_eq!(contract.hash(3, 4), first.hash(3, 4));
            prop_assert_eq!(&contract, &first);
        }
        prop_assert_eq!((first.op(), first.layout(), first.world()), (op, layout, world));
        prop_assert_eq!(first.num_tensors(), count);
        for (tensor, whole) in call.tensors.iter().enumerate() {
            prop_assert_eq!(first.dtype(tensor), whole.dtype);
            prop_assert_eq!((first.batch(tensor), first.head_dim(tensor)), (whole.batch, whole.dim));
            prop_assert_eq!(first.num_heads(tensor), whole.heads);
            let joined = if op == ExchangeOp::AllGatherHeads { whole.tokens[0] } else { whole.total() };
            prop_assert_eq!(first.total_tokens(tensor), joined);
            let mut before = 0;
            for rank in 0..world {
                prop_assert_eq!(first.input_shape(rank, tensor), call.input_shape(rank, tensor));
                prop_assert_eq!(first.result_shape(rank, tensor), call.result_shape(rank, tensor));
                let tokens = first.token_range(tensor, rank);
                if op == ExchangeOp::AllGatherHeads {
                    prop_assert_eq!(tokens, 0..whole.tokens[0]);
                } else {
                    prop_assert_eq!(tokens, before..before + whole.tokens[rank]);
                    before += whole.tokens[rank];
                }
                let heads = first.head_range(tensor, rank);
                if op == ExchangeOp::AllGatherTokens {
                    prop_assert_eq!(heads, 0..whole.heads);
                } else {
                    prop_assert_eq!(heads, whole.split()[rank].clone());
                }
            }
        }
        let largest = (0..world).map(|rank| {
            let rows = call.result_rows(rank);
            rows.last().map_or(0, |&(tensor, _, offset)| offset + call.row(tensor))
        });
        // Empty tensors at the end of a result may leave alignment behind, never less than what is written.
        prop_assert!(first.largest_result() as usize >= largest.max().unwrap());
    }
}

fn plain(op: ExchangeOp, world: usize, seed: u64) -> Call {
    random_call(op, HeadLayout::Bnhd, world, 1, Dice(seed).below(u64::MAX))
}

#[test]
fn one_rank_is_an_identity() {
    for op in ExchangeOp::ALL {
        for seed in 0..20 {
            let call = plain(op, 1, seed);
            assert_eq!(call.input_shape(0, 0), call.result_shape(0, 0), "{op}");
            check(&call);
        }
    }
}

#[test]
fn no_tokens_at_all_move_nothing() {
    for op in ExchangeOp::ALL {
        let mut call = plain(op, 3, 5);
        call.tensors[0].tokens = vec![0; 3];
        call.rank_tokens = Some(vec![vec![0; 3]]);
        let contract = call.contract(1).unwrap();
        assert_eq!(contract.largest_result(), 0, "{op}");
        assert!(contract.pieces(0, 2, &call.strides[0]).is_empty(), "{op}");
        assert_eq!(contract.sent_bytes(0, 2), 0, "{op}");
    }
}

#[test]
fn sixty_four_ranks_and_sixteen_tensors() {
    for (op, seed) in ExchangeOp::ALL.into_iter().zip(1..) {
        check(&random_call(op, HeadLayout::Bnhd, 64, 1, seed));
        check(&random_call(op, HeadLayout::Bhnd, 2, 16, seed));
    }
}
