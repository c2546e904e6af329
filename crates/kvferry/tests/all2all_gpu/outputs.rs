//! Outputs that every rank knows the places of, and the copy engine, which needs them.

use kvferry::all2all::{CallOptions, ExchangeEngine, Landing};
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};
use kvferry::{Dtype, Error};
use proptest::prelude::*;

use ExchangeOp::{AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::calls::plain;
use crate::exchange::{Strides, Whole};
use crate::gpus::{Rank, bytes, gpus, on_gpus};

/// The shape of a result of this rank.
fn shape(at: &Rank, whole: &Whole, op: ExchangeOp) -> [u64; 4] {
    let (tokens, heads) = whole.after(op, at.rank);
    [whole.batch, tokens.end - tokens.start, heads.end - heads.start, whole.dim]
}

#[test]
fn calls_into_outputs_by_every_engine() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(2, &[5, 3], 6, 8, Dtype::Float16);
    for layout in [HeadLayout::Bnhd, HeadLayout::Bhnd] {
        on_gpus(2, plain, |at| {
            for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
                let shape = shape(at, &whole, op);
                let out = at.comm.empty_output(&[(shape, whole.dtype)], layout).unwrap();
                for (seed, engine) in (0..).zip([
                    ExchangeEngine::Push,
                    ExchangeEngine::Copy,
                    ExchangeEngine::Auto,
                    ExchangeEngine::Copy,
                    ExchangeEngine::Copy,
                ]) {
                    let whole = whole.seeded(seed);
                    let input = at.input(&whole, op, &Strides::default());
                    let mut options = whole.options(op, layout);
                    (options.stream, options.engine) = (Some(at.stream.handle()), engine);
                    options.out = Some(out.clone());
                    let y = at.comm.exchange(op, &[input], &options, Landing::Pool).unwrap().remove(0);
                    at.check(&whole, op, layout, &y);
                    assert!(bytes(&y) == bytes(&out.results().unwrap()[0]));
                    // Between calls by the copy engine, one by the kernel, into a buffer.
                    at.checked(&whole.seeded(100 + seed), SendRecvHeads);
                }
                assert_eq!(at.comm.stats().buffers_free, 3);
            }
            assert_eq!(at.comm.stats().buffers_free, 4);
            at.comm.check().unwrap();
        });
    }
}

#[test]
fn the_copy_engine_is_refused_without_an_output_and_for_what_takes_thousands_of_copies() {
    if gpus(2).is_none() {
        return;
    }
    let whole = Whole::new(1, &[2, 2], 4, 8, Dtype::Float16);
    on_gpus(2, plain, |at| {
        let input = at.input(&whole, SendRecvHeads, &Strides::default());
        let stream = Some(at.stream.handle());
        let options = CallOptions { stream, engine: ExchangeEngine::Copy, ..CallOptions::default() };
        let refused = at.comm.send_recv_heads(&[input], &options).unwrap_err();
        assert!(refused.to_string().contains("out="), "{refused}");
        at.comm.reset().unwrap();
        // Tokens backwards: one copy per token.
        let whole = Whole::new(1, &[5000, 4], 2, 4, Dtype::UInt8);
        let how = Strides { backwards: [false, true, false], ..Strides::default() };
        let input = at.input(&whole, SendRecvHeads, &how);
        let mut options = whole.options(SendRecvHeads, HeadLayout::Bnhd);
        (options.stream, options.engine) = (stream, ExchangeEngine::Copy);
        let shape = shape(at, &whole, SendRecvHeads);
        options.out = Some(at.comm.empty_output(&[(shape, whole.dtype)], HeadLayout::Bnhd).unwrap());
        let failed = at.comm.exchange(SendRecvHeads, &[input], &options, Landing::Pool);
        if at.rank == 0 {
            assert!(matches!(&failed, Err(Error::Unsupported { .. })), "{failed:?}");
        }
        at.stream.synchronize().unwrap();
        assert!(at.comm.check().is_err());
    });
}

#[test]
fn random_strides_by_the_copy_engine() {
    let Some(count) = gpus(2) else { return };
    let world = count.min(3);
    let order = prop::sample::select(vec![[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]]);
    let strategy = (
        (1_u64..3, prop::collection::vec(0_u64..7, world), 1_u64..7, 1_u64..20),
        (order, 0_u64..3, prop::array::uniform3(prop::bool::weighted(0.2)), 0_u64..5, any::<bool>()),
    );
    let mut runner = proptest::test_runner::TestRunner::new(proptest::test_runner::Config::with_cases(24));
    runner
        .run(&strategy, |((batch, tokens, heads, dim), (order, gap, backwards, skew, bhnd))| {
            let whole = Whole::new(batch, &tokens, heads, dim, Dtype::Float16);
            let how = Strides { order, gap, backwards, skew };
            let layout = if bhnd { HeadLayout::Bhnd } else { HeadLayout::Bnhd };
            on_gpus(world, plain, |at| {
                for op in [SendRecvHeads, GatherHeads] {
                    let shape = shape(at, &whole, op);
                    let out = at.comm.empty_output(&[(shape, whole.dtype)], layout).unwrap();
                    let input = at.input(&whole, op, &how);
                    let mut options = whole.options(op, layout);
                    (options.stream, options.engine) = (Some(at.stream.handle()), ExchangeEngine::Copy);
                    options.out = Some(out);
                    let y = at.comm.exchange(op, &[input], &options, Landing::Pool).unwrap().remove(0);
                    at.check(&whole, op, layout, &y);
                }
                at.comm.check().unwrap();
            });
            Ok(())
        })
        .unwrap();
}
