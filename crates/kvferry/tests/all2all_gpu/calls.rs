//! What calls give back.

use kvferry::all2all::{All2AllBuilder, CallOptions, ExchangeArray, ExchangeDevice, GatherAxis, Landing};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error, Region};
use proptest::prelude::*;

use ExchangeOp::{AllGatherHeads, AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::exchange::{Strides, Whole, memory, options_of};
use crate::gpus::{gpus, on_gpus};

pub(crate) fn plain(builder: All2AllBuilder) -> All2AllBuilder {
    builder
}

#[test]
fn every_operation_in_worlds_of_one_to_all() {
    let Some(count) = gpus(2) else { return };
    for world in 1..=count.min(4) {
        let tokens: Vec<u64> = (0..world as u64).map(|rank| (rank * 3 + 2) % 5).collect();
        let whole = Whole::new(2, &tokens, 9, 6, Dtype::BFloat16);
        let same = Whole { tokens: vec![3; world], ..whole.clone() };
        on_gpus(world, plain, |at| {
            assert_eq!(at.comm.stats().transport.name, "same process");
            for round in 0..3 {
                for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
                    at.checked(&whole.seeded(round), op);
                }
                at.checked(&same.seeded(round), AllGatherHeads);
            }
            let stats = at.comm.stats();
            assert_eq!((stats.calls, stats.epoch, stats.buffers_free), (12, 12, 4));
            at.comm.close().unwrap();
        });
    }
}

#[test]
fn ranks_on_the_devices_of_others() {
    let Some(_) = gpus(2) else { return };
    let whole = Whole::new(1, &[3, 4], 4, 8, Dtype::Float16);
    let name = crate::exchange::fresh_name();
    crate::exchange::threads(2, |rank| {
        let device = ExchangeDevice::Gpu(1 - rank as u32);
        let comm = crate::exchange::builder(rank, 2, &name).device(device).connect().unwrap();
        crate::gpus::Rank::new(comm).checked(&whole, SendRecvHeads);
    });
}

#[test]
fn tensors_of_one_call_in_both_layouts() {
    if gpus(2).is_none() {
        return;
    }
    // Grouped-query attention: 8 query heads, 1 KV head on both ranks.
    let tokens = [5, 3];
    let q = Whole::new(1, &tokens, 8, 16, Dtype::Float16);
    let mut k = Whole::new(1, &tokens, 1, 16, Dtype::Float16).seeded(2);
    k.ranges = vec![0..1, 0..1];
    let v = Whole { dim: 5, dtype: Dtype::Float8E4M3Fn, ..k.seeded(3) };
    let wholes = [q, k, v];
    for layout in [HeadLayout::Bnhd, HeadLayout::Bhnd] {
        on_gpus(2, plain, |at| {
            let arrays: Vec<_> =
                wholes.iter().map(|whole| at.input(whole, SendRecvHeads, &Strides::default())).collect();
            let stream = Some(at.stream.handle());
            let options = CallOptions {
                layout,
                rank_tokens: Some(vec![tokens.to_vec()]),
                stream,
                ..CallOptions::default()
            };
            let results = at.comm.send_recv_heads(&arrays, &options).unwrap();
            assert_eq!(at.comm.stats().buffers_free, 3);
            for (whole, result) in wholes.iter().zip(&results) {
                at.check(whole, SendRecvHeads, layout, result);
            }
            // And back, with the pool as input.
            let arrays: Vec<ExchangeArray> = results.iter().map(|result| result.array()).collect();
            let back = CallOptions {
                rank_tokens: Some(vec![tokens.to_vec()]),
                num_heads: Some(vec![8, 1, 1]),
                stream,
                ..CallOptions::default()
            };
            let back = at.comm.gather_heads(&arrays, &back).unwrap();
            drop(results);
            for (whole, result) in wholes.iter().zip(&back) {
                at.check(whole, GatherHeads, HeadLayout::Bnhd, result);
            }
            at.comm.check().unwrap();
        });
    }
}

#[test]
fn defaults_need_no_options_and_no_stream() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(1, &[4, 4], 7, 8, Dtype::Float32);
    on_gpus(2, plain, |at| {
        let x = at.input(&whole, SendRecvHeads, &Strides::default());
        let y = at.comm.send_recv_heads(&[x], &CallOptions::default()).unwrap().remove(0);
        let back = CallOptions { num_heads: Some(vec![7]), ..CallOptions::default() };
        let z = at.comm.gather_heads(&[y.array()], &back).unwrap().remove(0);
        let all =
            at.comm.allgather(&[z.array()], GatherAxis::Tokens, &CallOptions::default()).unwrap().remove(0);
        // Reads come after the legacy stream, which the calls were on.
        at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &y);
        at.check(&whole, GatherHeads, HeadLayout::Bnhd, &z);
        at.check(&whole, AllGatherTokens, HeadLayout::Bnhd, &all);
    });
}

#[test]
fn large_calls_open_with_a_kernel_of_their_own() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(1, &[1300, 1242], 40, 256, Dtype::Float32);
    assert!(whole.tokens.iter().all(|tokens| tokens * 40 * 1024 > 48 << 20));
    on_gpus(
        2,
        |builder| builder.capacity_bytes(64 << 20).buffers(1),
        |at| {
            let first = at.checked(&whole, SendRecvHeads);
            drop(first);
            at.checked(&whole.seeded(2), SendRecvHeads);
        },
    );
}

#[test]
fn as_many_ctas_as_asked_for_and_different_ones_per_rank() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(2, &[40, 31], 6, 64, Dtype::Float32);
    on_gpus(2, plain, |at| {
        let input = at.input(&whole, SendRecvHeads, &Strides::default());
        for num_sms in [None, Some(1), Some(2), Some(3), Some(1)] {
            let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
            options.stream = Some(at.stream.handle());
            options.num_sms = num_sms.map(|sms| sms + at.rank as u32);
            let y = at.comm.send_recv_heads(std::slice::from_ref(&input), &options).unwrap().remove(0);
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &y);
        }
    });
}

#[test]
fn memory_of_the_host_and_of_other_gpus_is_refused_by_both_ranks() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(1, &[2, 2], 4, 8, Dtype::Float16);
    on_gpus(2, plain, |at| {
        let mut x = at.input(&whole, SendRecvHeads, &Strides::default());
        if at.rank == 0 {
            x.region = Region::Host(memory(4096));
        }
        let options = CallOptions { stream: Some(at.stream.handle()), ..CallOptions::default() };
        let failed = at.comm.send_recv_heads(&[x], &options);
        if at.rank == 0 {
            assert!(matches!(failed, Err(Error::Unsupported { .. })), "{failed:?}");
        }
        at.stream.synchronize().unwrap();
        assert!(at.comm.check().is_err());
    });
}

#[test]
fn without_a_free_buffer_results_are_copied_out_or_refused() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(2, &[3, 5], 4, 8, Dtype::Float16);
    on_gpus(
        2,
        |builder| builder.buffers(1),
        |at| {
            let held = at.checked(&whole, SendRecvHeads);
            let options = CallOptions {
                stream: Some(at.stream.handle()),
                ..whole.options(SendRecvHeads, HeadLayout::Bnhd)
            };
            for seed in 2..5 {
                let whole = whole.seeded(seed);
                let input = at.input(&whole, SendRecvHeads, &Strides::default());
                let mut memory = |shapes: &[kvferry::all2all::ResultShape]| {
                    let one = |shape: &kvferry::all2all::ResultShape| {
                        // Rows apart from each other in every second call.
                        let gap = if seed == 3 { 16 } else { 0 };
                        let [_, tokens, heads, dim] = shape.shape;
                        let row = (dim * 2 + gap) as i64;
                        let strides = [row * (heads * tokens) as i64, row * heads as i64, row];
                        let bytes = vec![0xEE; (2 * strides[0]) as usize];
                        let region = Region::Device(at.upload(&bytes));
                        ExchangeArray { region, offset: 0, shape: shape.shape, strides, dtype: shape.dtype }
                    };
                    Ok(shapes.iter().map(one).collect())
                };
                let landing = Landing::PoolOrCopy(&mut memory);
                let y = at.comm.exchange(SendRecvHeads, &[input], &options, landing).unwrap().remove(0);
                assert!(y.copied());
                at.stream.synchronize().unwrap();
                if seed == 3 {
                    let image = crate::gpus::image(&y);
                    let expected = whole.expected(SendRecvHeads, at.rank, HeadLayout::Bnhd);
                    for (index, row) in expected.chunks(16).enumerate() {
                        assert_eq!(&image[index * 32..][..16], row);
                        assert!(image[index * 32 + 16..][..16].iter().all(|&byte| byte == 0xEE));
                    }
                } else {
                    at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &y);
                }
            }
            assert_eq!(at.comm.stats().copied_out, 3);
            at.check(&whole, SendRecvHeads, HeadLayout::Bnhd, &held);
            let busy = at.call(&whole, SendRecvHeads);
            assert!(matches!(busy, Err(Error::Busy { .. })), "{busy:?}");
            drop(held);
            at.checked(&whole.seeded(9), SendRecvHeads);
        },
    );
}

#[test]
fn results_are_held_across_calls_and_after_close() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(1, &[3, 2], 6, 8, Dtype::Float16);
    on_gpus(2, plain, |at| {
        let first = at.call(&whole.seeded(100), SendRecvHeads).unwrap();
        for seed in 0..10 {
            at.checked(&whole.seeded(seed), SendRecvHeads);
        }
        let last = at.call(&whole.seeded(101), GatherHeads).unwrap();
        at.check(&whole.seeded(100), SendRecvHeads, HeadLayout::Bnhd, &first);
        at.stream.synchronize().unwrap();
        at.comm.close().unwrap();
        at.check(&whole.seeded(100), SendRecvHeads, HeadLayout::Bnhd, &first);
        at.check(&whole.seeded(101), GatherHeads, HeadLayout::Bnhd, &last);
    });
}

/// A tensor and the way its inputs lie in memory.
fn tensor(world: usize) -> impl Strategy<Value = (Whole, Strides)> {
    let dtype = prop::sample::select(vec![
        Dtype::Float16,
        Dtype::Float32,
        Dtype::Float64,
        Dtype::Float8E4M3Fn,
        Dtype::UInt8,
    ]);
    let tokens = prop::collection::vec(0_u64..9, world);
    let order = prop::sample::select(vec![[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]]);
    let how = (order, 0_u64..4, prop::array::uniform3(prop::bool::weighted(0.2)), 0_u64..20);
    ((1_u64..3, tokens, 1_u64..9, 1_u64..40, dtype), how).prop_map(
        |((batch, tokens, heads, dim, dtype), (order, gap, backwards, skew))| {
            (Whole::new(batch, &tokens, heads, dim, dtype), Strides { order, gap, backwards, skew })
        },
    )
}

#[test]
fn random_calls_are_the_permutation() {
    let Some(count) = gpus(2) else { return };
    let world = count.min(3);
    let strategy = prop::collection::vec(
        (
            prop::collection::vec(tensor(world), 1..4),
            prop::sample::select(vec![SendRecvHeads, GatherHeads, AllGatherTokens]),
            any::<bool>(),
        ),
        1..8,
    );
    let mut runner = proptest::test_runner::TestRunner::new(proptest::test_runner::Config::with_cases(24));
    runner
        .run(&strategy, |calls| {
            on_gpus(world, plain, |at| {
                for (seed, (tensors, op, bhnd)) in calls.iter().enumerate() {
                    let layout = if *bhnd { HeadLayout::Bhnd } else { HeadLayout::Bnhd };
                    let wholes: Vec<_> = (tensors.iter().zip(0..))
                        .map(|((whole, _), index)| whole.seeded(100 * seed as u64 + index))
                        .collect();
                    let inputs: Vec<_> = wholes
                        .iter()
                        .zip(tensors)
                        .map(|(whole, (_, how))| at.input(whole, *op, how))
                        .collect();
                    let mut options = options_of(&wholes, *op, layout);
                    options.stream = Some(at.stream.handle());
                    let results = at.comm.exchange(*op, &inputs, &options, Landing::Pool).unwrap();
                    for (whole, result) in wholes.iter().zip(&results) {
                        at.check(whole, *op, layout, result);
                    }
                }
                at.comm.check().unwrap();
            });
            Ok(())
        })
        .unwrap();
}
