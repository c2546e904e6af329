//! What calls give back.

use kvferry::Dtype;
use kvferry::all2all::All2AllBuilder;
use kvferry::layout::exchange::{ExchangeOp, HeadLayout};

use ExchangeOp::{AllGatherHeads, AllGatherTokens, GatherHeads, SendRecvHeads};

use crate::exchange::{Strides, Whole};
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
            for round in 0..3 {
                for op in [SendRecvHeads, GatherHeads, AllGatherTokens] {
                    at.checked(&whole.seeded(round), op);
                }
                at.checked(&same.seeded(round), AllGatherHeads);
            }
            at.comm.close().unwrap();
        });
    }
    let _ = (Strides::default(), HeadLayout::Bnhd);
}
