//! Runs are as long, and loops as few, as the strides allow.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::cases;
use common::exchange::{op_and_layout, random_call};
use kvferry_layout::{
    Contract, Dtype, ExchangeOp, ExchangeRequest, HeadLayout, Piece, PieceLoop, TensorInput,
};
use proptest::prelude::*;

use ExchangeOp::{AllGatherHeads, AllGatherTokens, GatherHeads, SendRecvHeads};
use HeadLayout::{Bhnd, Bnhd};

/// The pieces from rank 0 to rank `peer` for one contiguous bf16 input.
fn pieces(op: ExchangeOp, layout: HeadLayout, world: usize, shape: [u64; 4], peer: usize) -> Vec<Piece> {
    let input = [TensorInput::contiguous(shape, layout, Dtype::BFloat16).unwrap()];
    strided(op, layout, world, &input, peer)
}

fn strided(
    op: ExchangeOp,
    layout: HeadLayout,
    world: usize,
    input: &[TensorInput],
    peer: usize,
) -> Vec<Piece> {
    let request = ExchangeRequest { layout, ..ExchangeRequest::new(op, world, 0, input) };
    Contract::new(&request).unwrap().pieces(0, peer, &[input[0].strides])
}

fn looped(count: u64, src_stride: i64, dst_stride: u64) -> PieceLoop {
    PieceLoop { count, src_stride, dst_stride }
}

fn piece(src_offset: i64, dst_offset: u64, run_bytes: u64, loops: Vec<PieceLoop>) -> Vec<Piece> {
    vec![Piece { tensor: 0, src_offset, dst_offset, run_bytes, loops }]
}

#[test]
fn one_rank_with_contiguous_tensors_is_one_run() {
    for op in ExchangeOp::ALL {
        for layout in [Bnhd, Bhnd] {
            assert_eq!(
                pieces(op, layout, 1, [2, 5, 3, 8], 0),
                piece(0, 0, 2 * 5 * 3 * 8 * 2, vec![]),
                "{op}"
            );
        }
    }
}

#[test]
fn two_ranks_send_the_heads_of_a_token_in_one_run() {
    // 128 tokens of 32 heads of 128: rows of 256 bytes, 16 of them side by side on both sides.
    let row = 256;
    let expected = piece(16 * row, 0, 16 * row as u64, vec![looped(128, 32 * row, 16 * row as u64)]);
    assert_eq!(pieces(SendRecvHeads, Bnhd, 2, [1, 128, 32, 128], 1), expected);
    // A batch of two: the result has room for the tokens of both ranks between them, so it stays a loop.
    let loops =
        vec![looped(2, 128 * 32 * row, 256 * 16 * row as u64), looped(128, 32 * row, 16 * row as u64)];
    assert_eq!(
        pieces(SendRecvHeads, Bnhd, 2, [2, 128, 32, 128], 1),
        piece(16 * row, 0, 16 * row as u64, loops)
    );
}

#[test]
fn in_head_major_tensors_the_tokens_of_a_head_are_one_run() {
    // Per head, my 128 tokens of the 256.
    let row = 256;
    let loops = vec![looped(16, 128 * row, 256 * row as u64)];
    assert_eq!(
        pieces(SendRecvHeads, Bhnd, 2, [1, 128, 32, 128], 1),
        piece(16 * 128 * row, 0, 128 * row as u64, loops)
    );
}

#[test]
fn gathering_runs_over_the_heads_of_a_token_too() {
    let row = 256;
    let loops = vec![looped(64, 16 * row, 32 * row as u64)];
    assert_eq!(
        pieces(GatherHeads, Bnhd, 2, [1, 128, 16, 128], 1),
        piece(64 * 16 * row, 0, 16 * row as u64, loops)
    );
}

#[test]
fn all_tokens_are_one_run_and_heads_loop_over_tokens() {
    assert_eq!(pieces(AllGatherTokens, Bnhd, 4, [1, 10, 3, 8], 2), piece(0, 0, 10 * 3 * 8 * 2, vec![]));
    // Two batches and ten tokens step alike on both sides: one loop.
    assert_eq!(
        pieces(AllGatherHeads, Bnhd, 4, [2, 10, 3, 8], 2),
        piece(0, 0, 48, vec![looped(20, 48, 4 * 48)])
    );
}

#[test]
fn a_slice_of_a_fused_projection_needs_no_copy_and_one_loop() {
    // q out of [N, 3, H, D]: tokens step over q, k and v.
    let row = 256;
    let input =
        [TensorInput { shape: [1, 64, 32, 128], strides: [0, 3 * 32 * row, row], dtype: Dtype::BFloat16 }];
    let loops = vec![looped(64, 3 * 32 * row, 16 * row as u64)];
    assert_eq!(strided(SendRecvHeads, Bnhd, 2, &input, 1), piece(16 * row, 0, 16 * row as u64, loops));
}

#[test]
fn a_permuted_input_loops_with_the_largest_step_of_the_result_outermost() {
    // A head-major input into a token-major result.
    let row = 16;
    let mut input = [TensorInput::contiguous([1, 6, 4, 8], Bhnd, Dtype::BFloat16).unwrap()];
    let loops = vec![looped(6, row, 2 * row as u64), looped(2, 6 * row, row as u64)];
    assert_eq!(strided(SendRecvHeads, Bnhd, 2, &input, 0), piece(0, 0, row as u64, loops));
    // The same backwards over tokens: source steps may fall.
    input[0].strides[1] = -row;
    let loops = vec![looped(6, -row, 2 * row as u64), looped(2, 6 * row, row as u64)];
    assert_eq!(strided(SendRecvHeads, Bnhd, 2, &input, 0), piece(0, 0, row as u64, loops));
}

#[test]
fn a_replica_sends_nothing_back() {
    // Two KV heads on four ranks: ranks 1 and 3 hold copies.
    let input = [TensorInput::contiguous([1, 8, 1, 8], Bnhd, Dtype::BFloat16).unwrap()];
    for (rank, pieces) in [1, 0, 1, 0].into_iter().enumerate() {
        let mut request = ExchangeRequest::new(GatherHeads, 4, rank, &input);
        request.num_heads = Some(&[2]);
        let contract = Contract::new(&request).unwrap();
        // Of ranks 0 to 3: one piece, none, one, none.
        let expected = if rank % 2 == 0 { 1 } else { 0 };
        assert_eq!(contract.pieces(rank, 1, &[input[0].strides]).len(), expected);
        assert_eq!(pieces, expected);
    }
}

#[test]
fn heads_that_a_lower_rank_sends_leave_two_pieces_around_them() {
    // Rank 1 holds all of 0..6, of which rank 0 sends 2..4.
    let splits = [vec![2..4, 0..6]];
    let input = [TensorInput::contiguous([1, 2, 6, 4], Bnhd, Dtype::Int8).unwrap()];
    let mut request = ExchangeRequest::new(GatherHeads, 2, 1, &input);
    request.head_splits = Some(&splits);
    let contract = Contract::new(&request).unwrap();
    let found: Vec<_> = contract
        .pieces(1, 0, &[input[0].strides])
        .into_iter()
        .map(|piece| (piece.src_offset, piece.dst_offset, piece.run_bytes))
        .collect();
    assert_eq!(found, [(0, 0, 8), (16, 16, 8)]);
}

/// Byte pairs of a piece in order of the result.
fn bytes(piece: &Piece) -> Vec<(u64, i64)> {
    let mut starts = vec![(piece.dst_offset, piece.src_offset)];
    for step in &piece.loops {
        let over = |(dst, src)| {
            (0..step.count).map(move |i| (dst + i * step.dst_stride, src + i as i64 * step.src_stride))
        };
        starts = starts.into_iter().flat_map(over).collect();
    }
    let run = |(dst, src)| (0..piece.run_bytes).map(move |i| (dst + i, src + i as i64));
    let mut all: Vec<_> = starts.into_iter().flat_map(run).collect();
    all.sort_unstable();
    all
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn no_run_could_be_longer_and_no_loops_could_be_one(
        (op, layout) in op_and_layout(), world in 1usize..=6, count in 1usize..=2, seed in any::<u64>(),
    ) {
        let call = random_call(op, layout, world, count, seed);
        let contract = call.contract(0).unwrap();
        for rank in 0..world {
            for peer in 0..world {
                for piece in contract.pieces(rank, peer, &call.strides[rank]) {
                    let joined = |pair: &[(u64, i64)]| pair[0].0 + 1 == pair[1].0 && pair[0].1 + 1 == pair[1].1;
                    let pairs = bytes(&piece);
                    let first = 1 + pairs.windows(2).take_while(|pair| joined(pair)).count();
                    prop_assert_eq!(piece.run_bytes, first as u64, "{:?}", piece);
                    for pair in piece.loops.windows(2) {
                        let (outer, inner) = (pair[0], pair[1]);
                        prop_assert!(outer.dst_stride > inner.dst_stride);
                        let merge = outer.dst_stride == inner.dst_stride * inner.count
                            && outer.src_stride == inner.src_stride * inner.count as i64;
                        prop_assert!(!merge, "{:?}", piece);
                    }
                    prop_assert!(piece.loops.iter().all(|step| step.count > 1));
                }
            }
        }
    }
}
