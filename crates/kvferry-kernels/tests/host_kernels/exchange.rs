//! Exchanges that go well: any shape, any division among CTAs, any order of events.

use proptest::prelude::*;

use crate::copy_case::any_order;
use crate::exchange_case::{Case, RankShape, Tensor, Way};
use crate::ffi::Order;

fn any_tensor(world: usize) -> impl Strategy<Value = Tensor> {
    let dims = prop_oneof![1u64..24, Just(16), Just(32), Just(48), Just(128)];
    let pads = prop_oneof![
        Just([0, 0, 0]),
        (0u64..3, 0u64..3, 0u64..3).prop_map(|(head, token, start)| [head * 16, token * 16, start * 16]),
        (0u64..20, 0u64..20, 0u64..20).prop_map(|(head, token, start)| [head, token, start]),
    ];
    (
        1u64..3,
        prop::collection::vec(0u64..4, world),
        prop::collection::vec(0u64..4, world),
        dims,
        pads,
        any::<bool>(),
        prop_oneof![Just(0u64), 0u64..33],
    )
        .prop_map(|(batch, tokens, heads, dim, pad, reversed, gap)| Tensor {
            batch,
            tokens,
            heads,
            dim,
            pad,
            reversed,
            gap,
        })
}

fn any_rank(world: usize) -> impl Strategy<Value = RankShape> {
    let ways = prop_oneof![4 => Just(Way::Whole), 2 => Just(Way::Split), 1 => Just(Way::Copy)];
    (world as u32..9, 1u32..6, prop::collection::vec(1u32..4, world), ways)
        .prop_map(|(block, max_ctas, lanes, way)| RankShape { block, max_ctas, lanes, way })
}

pub(crate) fn any_case() -> impl Strategy<Value = Case> {
    (1usize..6).prop_flat_map(|world| {
        (
            prop::collection::vec(any_rank(world), world),
            prop::collection::vec(prop::collection::vec(any_tensor(world), 1..4), 1..5),
            any_order(),
        )
            .prop_map(|(ranks, calls, order)| Case { ranks, calls, order })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn any_exchange(case in any_case()) {
        prop_assert_eq!(case.check(), Ok(()));
    }
}

/// Aligned tensors, as models have them.
pub(crate) fn plain(world: usize, calls: usize, order: Order) -> Case {
    let tensor = Tensor {
        batch: 1,
        tokens: vec![2; world],
        heads: vec![2; world],
        dim: 32,
        pad: [0, 0, 0],
        reversed: false,
        gap: 0,
    };
    let rank = |rank: usize| RankShape {
        block: (4 + 4 * (rank as u32 % 2)).max(world as u32),
        max_ctas: 4 + rank as u32,
        lanes: vec![1 + rank as u32 % 3; world],
        way: Way::Whole,
    };
    Case { ranks: (0..world).map(rank).collect(), calls: vec![vec![tensor]; calls], order }
}

#[test]
fn many_calls_in_one_place() {
    for world in 2..4 {
        for seed in 0..12 {
            let case = plain(world, 6, Order::Random(seed));
            assert_eq!(case.check(), Ok(()), "{world} ranks, seed {seed}");
        }
        for order in [Order::Forward, Order::Reversed] {
            assert_eq!(plain(world, 6, order).check(), Ok(()), "{world} ranks, {order:?}");
        }
    }
}

/// A graph launches the same parameters again and again; everything that changes lies on the device.
#[test]
fn the_same_parameters_again() {
    for way in [Way::Whole, Way::Split, Way::Copy] {
        for seed in 0..8 {
            let mut case = plain(3, 1, Order::Random(seed));
            for rank in &mut case.ranks {
                rank.way = way;
            }
            let mut stage = case.stage();
            for _ in 0..5 {
                for rank in 0..3 {
                    case.enqueue(&mut stage, 0, rank);
                }
            }
            stage.world.run(3, case.order);
            for rank in 0..3 {
                assert!(
                    stage.world.reports[rank].is_clean(),
                    "{way:?} {seed}: {:?}",
                    stage.world.reports[rank]
                );
                assert_eq!(stage.state(rank).epoch, 5);
                // The last one; what an earlier one left was overwritten when it was consumed.
                assert_eq!(case.check_result(&stage, 0, rank), Ok(()), "{way:?} {seed}");
            }
        }
    }
}

/// Nine ranks do not fit the small parameters.
#[test]
fn more_ranks_than_the_small_parameters_hold() {
    for seed in 0..4 {
        assert_eq!(plain(9, 3, Order::Random(seed)).check(), Ok(()), "seed {seed}");
    }
}
