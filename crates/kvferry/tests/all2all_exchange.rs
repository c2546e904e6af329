//! What calls give back, against results computed element by element.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod exchange;

use exchange::*;
use kvferry::Dtype;
use kvferry::all2all::{All2AllBuilder, CallOptions, ExchangeArray, GatherAxis, Landing};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Error, Region};
use proptest::prelude::*;

use ExchangeOp::{AllGatherHeads, AllGatherTokens, GatherHeads, SendRecvHeads};

fn plain(builder: All2AllBuilder) -> All2AllBuilder {
    builder
}

#[test]
fn every_operation_in_worlds_of_one_to_sixteen() {
    for world in 1..=16 {
        let tokens: Vec<u64> = (0..world as u64).map(|rank| (rank * 3) % 5).collect();
        let whole = Whole::new(2, &tokens, 19, 6, Dtype::BFloat16);
        let same = Whole { tokens: vec![3; world], ..whole.clone() };
        ranks(world, plain, |comm| {
            for round in 0..3 {
                for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
                    call(&comm, &whole.seeded(round), op).unwrap();
                }
                call(&comm, &same.seeded(round), AllGatherHeads).unwrap();
            }
            comm.close().unwrap();
        });
    }
}

#[test]
fn defaults_need_no_options() {
    let whole = Whole::new(1, &[4, 4, 4], 7, 8, Dtype::Float32);
    ranks(3, plain, |comm| {
        let rank = comm.rank();
        let x = whole.input(SendRecvHeads, rank);
        let y = comm.send_recv_heads(&[x.array], &CallOptions::default()).unwrap().remove(0);
        whole.check(SendRecvHeads, rank, HeadLayout::Bnhd, &y);
        assert_eq!(comm.head_range(7, None).unwrap(), whole.ranges[rank]);
        let back = CallOptions { num_heads: Some(vec![7]), ..CallOptions::default() };
        let z = comm.gather_heads(&[y.array()], &back).unwrap().remove(0);
        whole.check(GatherHeads, rank, HeadLayout::Bnhd, &z);
        let all =
            comm.allgather(&[z.array()], GatherAxis::Tokens, &CallOptions::default()).unwrap().remove(0);
        whole.check(AllGatherTokens, rank, HeadLayout::Bnhd, &all);
    });
}

#[test]
fn tensors_of_one_call_share_a_buffer_and_keep_apart() {
    // Grouped-query attention over four ranks: 8 query heads, 2 KV heads, each KV head on two ranks.
    let tokens = [5, 0, 2, 9];
    let q = Whole::new(1, &tokens, 8, 16, Dtype::Float16);
    let mut k = Whole::new(1, &tokens, 2, 16, Dtype::Float16).seeded(2);
    k.ranges = vec![0..1, 0..1, 1..2, 1..2];
    let v = Whole { dim: 5, dtype: Dtype::Float8E4M3Fn, ..k.seeded(3) };
    let wholes = [q, k, v];
    for layout in [HeadLayout::Bnhd, HeadLayout::Bhnd] {
        ranks(4, plain, |comm| {
            let rank = comm.rank();
            let inputs = wholes.each_ref().map(|whole| whole.input(SendRecvHeads, rank));
            let arrays = inputs.each_ref().map(|input| input.array.clone());
            let options =
                CallOptions { layout, rank_tokens: Some(vec![tokens.to_vec()]), ..CallOptions::default() };
            let results = comm.send_recv_heads(&arrays, &options).unwrap();
            assert_eq!(comm.stats().buffers_free, 3);
            for (whole, result) in wholes.iter().zip(&results) {
                whole.check(SendRecvHeads, rank, layout, result);
                assert_eq!(result.region().span().addr % 256, 0);
            }
            // And back, from BHND memory too.
            let arrays: Vec<ExchangeArray> = results.iter().map(|result| result.array()).collect();
            let back = CallOptions {
                rank_tokens: Some(vec![tokens.to_vec()]),
                num_heads: Some(vec![8, 2, 2]),
                ..CallOptions::default()
            };
            let back = comm.gather_heads(&arrays, &back).unwrap();
            for (whole, result) in wholes.iter().zip(&back) {
                whole.check(GatherHeads, rank, HeadLayout::Bnhd, result);
            }
            drop(results);
            assert_eq!(comm.stats().buffers_free, 3);
            drop(back);
            assert_eq!(comm.stats().buffers_free, 4);
        });
    }
}

#[test]
fn three_separate_calls_held_together() {
    let whole = Whole::new(2, &[3, 4], 6, 8, Dtype::BFloat16);
    ranks(2, plain, |comm| {
        let mut held = Vec::new();
        for seed in 0..3 {
            held.push(call(&comm, &whole.seeded(seed), SendRecvHeads).unwrap());
        }
        for (seed, result) in held.iter().enumerate() {
            whole.seeded(seed as u64).check(SendRecvHeads, comm.rank(), HeadLayout::Bnhd, result);
        }
    });
}

#[test]
fn results_are_the_caller_s_across_calls_and_after_close() {
    let whole = Whole::new(1, &[3, 1, 2], 6, 8, Dtype::Float16);
    ranks(3, plain, |comm| {
        let rank = comm.rank();
        let first = call(&comm, &whole.seeded(100), SendRecvHeads).unwrap();
        for seed in 0..10 {
            call(&comm, &whole.seeded(seed), SendRecvHeads).unwrap();
        }
        whole.seeded(100).check(SendRecvHeads, rank, HeadLayout::Bnhd, &first);
        let last = call(&comm, &whole.seeded(101), GatherHeads).unwrap();
        comm.close().unwrap();
        comm.close().unwrap();
        assert!(matches!(comm.check(), Err(Error::ExchangeClosed)));
        let refused = call(&comm, &whole, SendRecvHeads);
        assert!(matches!(refused, Err(Error::ExchangeClosed)), "{refused:?}");
        drop(comm);
        whole.seeded(100).check(SendRecvHeads, rank, HeadLayout::Bnhd, &first);
        whole.seeded(101).check(GatherHeads, rank, HeadLayout::Bnhd, &last);
    });
}

#[test]
fn a_full_pool_is_busy_until_a_result_is_dropped() {
    let whole = Whole::new(1, &[3, 3], 4, 8, Dtype::Float16);
    ranks(
        2,
        |builder| builder.buffers(2),
        |comm| {
            let rank = comm.rank();
            let mut held: Vec<_> =
                (0..2).map(|seed| call(&comm, &whole.seeded(seed), SendRecvHeads).unwrap()).collect();
            let busy = call(&comm, &whole, SendRecvHeads);
            assert!(matches!(busy, Err(Error::Busy { limit: 2, .. })), "{busy:?}");
            // Nothing is broken: rank 1 drops late, rank 0 waits for it in the call.
            if rank == 1 {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let busy = call(&comm, &whole, SendRecvHeads);
                assert!(matches!(busy, Err(Error::Busy { .. })));
            }
            held.remove(0);
            held.push(call(&comm, &whole.seeded(7), SendRecvHeads).unwrap());
            for (seed, result) in [1, 7].into_iter().zip(&held) {
                whole.seeded(seed).check(SendRecvHeads, rank, HeadLayout::Bnhd, result);
            }
            assert_eq!(comm.stats().busy, 1 + rank as u64);
        },
    );
}

#[test]
fn results_are_copied_out_when_asked_for_or_needed() {
    let whole = Whole::new(2, &[3, 2], 5, 4, Dtype::Float32);
    ranks(
        2,
        |builder| builder.buffers(1),
        |comm| {
            let rank = comm.rank();
            let mut asked = 0;
            let mut target = |shapes: &[kvferry::all2all::ResultShape]| {
                asked += 1;
                let shape = shapes[0];
                // Padded rows: the copy has to walk.
                let row = (shape.shape[3] * 4 + 8) as i64;
                let strides =
                    [row * (shape.shape[1] * shape.shape[2]) as i64, row * shape.shape[2] as i64, row];
                let region = memory(strides[0] as u64 * shape.shape[0] + 16);
                let (shape, dtype) = (shape.shape, shape.dtype);
                Ok(vec![ExchangeArray { region: Region::Host(region), offset: 16, shape, strides, dtype }])
            };
            let exchange = |seed: u64, landing: Landing<'_>| {
                let whole = whole.seeded(seed);
                let input = whole.input(SendRecvHeads, rank);
                let options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
                comm.exchange(SendRecvHeads, &[input.array], &options, landing).unwrap().remove(0)
            };
            let held = exchange(1, Landing::PoolOrCopy(&mut target));
            assert!(!held.copied());
            let copies = [
                exchange(2, Landing::PoolOrCopy(&mut target)),
                exchange(3, Landing::PoolOrCopy(&mut target)),
            ];
            drop(held);
            let third = exchange(4, Landing::Copy(&mut target));
            assert_eq!((asked, comm.stats().copied_out, comm.stats().buffers_free), (3, 3, 1));
            for (seed, result) in [2, 3, 4].into_iter().zip(copies.iter().chain([&third])) {
                assert!(result.copied());
                // Gather the padded rows.
                let expected = whole.seeded(seed).expected(SendRecvHeads, rank, HeadLayout::Bnhd);
                let [b, n, h, d] = result.shape();
                let mut all = vec![0; result.region().span().len as usize];
                result.region().host().unwrap().read(0, &mut all).unwrap();
                let rows = all[16..].chunks_exact((d * 4 + 8) as usize).take((b * n * h) as usize);
                let found: Vec<u8> = rows.clone().flat_map(|row| row[..(d * 4) as usize].to_vec()).collect();
                assert!(found == expected, "rank {rank}, seed {seed}");
                assert!(rows.flat_map(|row| &row[(d * 4) as usize..]).all(|&byte| byte == POISON));
                assert!(all[..16].iter().all(|&byte| byte == POISON));
            }
        },
    );
}

#[test]
fn calls_into_an_output() {
    let whole = Whole::new(1, &[3, 2, 4], 7, 8, Dtype::BFloat16);
    ranks(3, plain, |comm| {
        let rank = comm.rank();
        let (tokens, heads) = whole.after(SendRecvHeads, rank);
        let shape = [1, tokens.end - tokens.start, heads.end - heads.start, 8];
        // Rank 1 holds something: its place is another.
        let held = call(&comm, &whole, SendRecvHeads).unwrap();
        let held = (rank == 1).then_some(held);
        let free = 3 - rank as u64 % 2;
        let out = comm.empty_output(&[(shape, Dtype::BFloat16)], HeadLayout::Bnhd).unwrap();
        assert_eq!(u64::from(comm.stats().buffers_free), free);
        for seed in 0..5 {
            let whole = whole.seeded(seed);
            let input = whole.input(SendRecvHeads, rank);
            let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
            options.out = Some(out.clone());
            let result = comm.send_recv_heads(&[input.array], &options).unwrap().remove(0);
            whole.check(SendRecvHeads, rank, HeadLayout::Bnhd, &result);
            let view = out.results().unwrap().remove(0);
            assert_eq!(view.region().span(), result.region().span());
            assert_eq!(u64::from(comm.stats().buffers_free), free);
        }
        drop((out, held));
        assert_eq!(comm.stats().buffers_free, 4);
        comm.close().unwrap();
    });
}

#[test]
fn an_output_that_one_rank_cannot_have_nobody_gets() {
    ranks(
        2,
        |builder| builder.buffers(1).capacity_bytes(4096),
        |comm| {
            let rank = comm.rank() as u64;
            let made = comm.empty_output(&[([1, 1 + 4096 * rank, 1, 1], Dtype::Int8)], HeadLayout::Bnhd);
            assert!(
                matches!(made, Err(Error::Capacity { rank: 1, needed: 4097, capacity: 4096 })),
                "{made:?}"
            );
            let first = comm.empty_output(&[([1, 4096, 1, 1], Dtype::Int8)], HeadLayout::Bnhd).unwrap();
            let held = (rank == 0).then_some(first);
            let busy = comm.empty_output(&[([1, 1, 1, 1], Dtype::Int8)], HeadLayout::Bnhd);
            assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
            drop(held);
            comm.empty_output(&[([1, 1, 1, 1], Dtype::Int8)], HeadLayout::Bnhd).unwrap();
            comm.check().unwrap();
        },
    );
}

#[test]
fn results_of_nothing_are_results() {
    let none = Whole::new(2, &[0, 0, 0], 4, 8, Dtype::Float16);
    let mut headless = Whole::new(1, &[2, 3, 1], 4, 8, Dtype::Float16);
    headless.ranges = vec![0..4, 4..4, 0..0];
    ranks(3, plain, |comm| {
        for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
            call(&comm, &none, op).unwrap();
            call(&comm, &headless, op).unwrap();
        }
    });
}

#[test]
fn a_lone_rank_needs_nobody_and_breaks_nothing() {
    let comm = kvferry::all2all::All2All::builder(0, 1).capacity_bytes(4096).connect().unwrap();
    let whole = Whole::new(2, &[3], 4, 8, Dtype::Float16);
    for op in [SendRecvHeads, GatherHeads, AllGatherTokens, AllGatherHeads] {
        let result = call(&comm, &whole, op).unwrap();
        assert_eq!(bytes(&result), whole.expected(SendRecvHeads, 0, HeadLayout::Bnhd));
    }
    let large = Whole::new(1, &[65], 8, 8, Dtype::Int8);
    let refused = call(&comm, &large, SendRecvHeads);
    assert!(matches!(refused, Err(Error::Capacity { rank: 0, needed: 4160, capacity: 4096 })), "{refused:?}");
    call(&comm, &whole, SendRecvHeads).unwrap();
    comm.reset().unwrap();
    call(&comm, &whole, SendRecvHeads).unwrap();
    comm.close().unwrap();
}

#[test]
fn two_communicators_do_not_meet() {
    let whole = Whole::new(1, &[3, 2], 4, 8, Dtype::Float16);
    let name = fresh_name();
    threads(2, |rank| {
        let one = builder(rank, 2, &name).name("one").connect().unwrap();
        let two = builder(rank, 2, &name).name("two").connect().unwrap();
        let mut held = Vec::new();
        for seed in 0..3 {
            held.push((seed, call(&one, &whole.seeded(seed), SendRecvHeads).unwrap()));
            held.push((10 + seed, call(&two, &whole.seeded(10 + seed), SendRecvHeads).unwrap()));
        }
        for (seed, result) in &held {
            whole.seeded(*seed).check(SendRecvHeads, rank, HeadLayout::Bnhd, result);
        }
        one.abort("enough").unwrap();
        assert!(one.check().is_err());
        call(&two, &whole, GatherHeads).unwrap();
    });
}

#[test]
fn callers_of_one_rank_queue() {
    let whole = Whole::new(1, &[3, 2], 4, 8, Dtype::Float16);
    ranks(
        2,
        |builder| builder.buffers(8),
        |comm| {
            // The same call from every thread: any order is the same order on both ranks.
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for _ in 0..25 {
                            call(&comm, &whole, SendRecvHeads).unwrap();
                        }
                    });
                }
            });
            assert_eq!((comm.epoch(), comm.stats().calls), (100, 100));
            let all = whole.total() * 4 * 8 * 2;
            assert!(comm.stats().bytes_sent > 0 && comm.stats().bytes_sent < 100 * all);
        },
    );
}

/// Whether there is time (`make soak`).
fn soak() -> bool {
    std::env::var_os("KVFERRY_SOAK").is_some()
}

/// Back to back without a pause, with ranks that are late in turn; the next call must never write what is still read.
fn skewed(calls: u64) {
    let whole = Whole::new(1, &[2, 3, 1], 6, 4, Dtype::Float16);
    ranks(3, plain, |comm| {
        let rank = comm.rank() as u64;
        let mut held = std::collections::VecDeque::new();
        for seed in 0..calls {
            if seed % 7 == rank {
                for _ in 0..(seed * 37) % 20_000 {
                    std::hint::spin_loop();
                }
            }
            if seed % 97 == rank * 31 {
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
            let op = [SendRecvHeads, GatherHeads, AllGatherTokens][(seed % 3) as usize];
            held.push_back((op, seed, call(&comm, &whole.seeded(seed), op).unwrap()));
            if held.len() == 4 {
                let (op, seed, result) = held.pop_front().unwrap();
                whole.seeded(seed).check(op, comm.rank(), HeadLayout::Bnhd, &result);
            }
        }
        assert_eq!(comm.epoch(), calls);
    });
}

#[test]
fn skewed_back_to_back_calls() {
    skewed(if soak() { 10_000 } else { 300 });
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

fn placements() -> impl Strategy<Value = Strides> {
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    (prop::sample::select(&ORDERS[..]), 0..3_u64, any::<[bool; 3]>(), 0..9_u64)
        .prop_map(|(order, gap, backwards, skew)| Strides { order, gap, backwards, skew })
}

prop_compose! {
    /// Cuts `heads` into `world` ranges that leave out none, empty ones among them.
    fn splits(world: usize)(heads in 1..20_u64, cuts in prop::collection::vec(0..20_u64, world - 1))
        -> (u64, Vec<std::ops::Range<u64>>) {
        let mut cuts: Vec<u64> = cuts.into_iter().map(|cut| cut.min(heads)).collect();
        cuts.sort_unstable();
        let starts = [&[0], &cuts[..]].concat();
        let ends = [&cuts[..], &[heads]].concat();
        (heads, starts.into_iter().zip(ends).map(|(start, end)| start..end).collect())
    }
}

fn tensors(world: usize) -> impl Strategy<Value = Whole> {
    let tokens = prop::collection::vec(0..7_u64, world);
    (1..3_u64, tokens, splits(world), 1..20_u64, dtypes(), any::<u64>()).prop_map(
        |(batch, tokens, (heads, ranges), dim, dtype, seed)| Whole {
            batch,
            tokens,
            heads,
            dim,
            dtype,
            ranges,
            seed,
        },
    )
}

fn calls() -> impl Strategy<Value = (usize, ExchangeOp, HeadLayout, Vec<Whole>, Vec<Strides>)> {
    (1..10_usize).prop_flat_map(|world| {
        let ops = prop::sample::select(&ExchangeOp::ALL[..]);
        let layouts = prop::sample::select(&[HeadLayout::Bnhd, HeadLayout::Bhnd][..]);
        let wholes = prop::collection::vec(tensors(world), 1..4);
        let placed = prop::collection::vec(placements(), 4 * world);
        (Just(world), ops, layouts, wholes, placed)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if soak() { 2000 } else { 80 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_call_is_the_permutation_it_should_be((world, op, layout, wholes, placed) in calls()) {
        ranks(world, plain, |comm| {
            let rank = comm.rank();
            let inputs: Vec<Input> = wholes
                .iter()
                .zip(&placed[rank * 4..])
                .map(|(whole, placement)| whole.strided(op, rank, placement))
                .collect();
            let arrays: Vec<ExchangeArray> = inputs.iter().map(|input| input.array.clone()).collect();
            let options = options_of(&wholes, op, layout);
            for _ in 0..2 {
                let results = comm.exchange(op, &arrays, &options, Landing::Pool).unwrap();
                for (whole, result) in wholes.iter().zip(&results) {
                    whole.check(op, rank, layout, result);
                }
                inputs.iter().for_each(Input::check_untouched);
            }
            comm.close().unwrap();
        });
    }
}
