//! Random transfers through the host engine give exactly the oracle's bytes, guards and padding included.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use common::layouts::cases;
use common::layouts::pairs::{Case, case};
use common::{Bound, context, pooled};
use kvferry::layout::oracle;
use kvferry::{Engine, TransferContext, TransferOptions, TransferStrategy};
use proptest::prelude::*;

fn check(case: Case, skew: [u64; 2], ctx: &TransferContext, through_pool: bool) -> Result<(), TestCaseError> {
    let (src, dst) = (Bound::new(case.src, skew[0]), Bound::new(case.dst, skew[1]));
    let src_mem = src.fill_unique(0x5EED);
    let mut expected = dst.poisoned();
    oracle::copy(
        &src.made.oracle,
        &src_mem,
        &dst.made.oracle,
        &mut expected,
        &case.src_ids,
        &case.dst_ids,
        case.layers.clone(),
        case.heads.clone(),
    );
    let base = if through_pool { pooled() } else { TransferOptions::default() };
    let options = TransferOptions {
        layers: case.request.layers,
        heads: case.request.heads,
        transform: case.request.transform,
        strategy: Some(TransferStrategy::Memcpy),
        ..base
    };
    let job = ctx.transfer(&src.layout, &dst.layout, &case.src_ids, &case.dst_ids, &options).unwrap();
    let result = job.wait(Some(common::PATIENCE)).unwrap();
    prop_assert!(dst.dump() == dst.image(&expected), "wrong bytes in the destination");
    prop_assert!(src.dump() == src.image(&src_mem), "the source changed");
    let config = src.made.layout.config();
    let row = config.outer_dim() * config.row_bytes();
    let (layers, heads) = (case.layers.end - case.layers.start, case.heads.end - case.heads.start);
    let tokens = case.src_ids.len() as u64 * config.page_size();
    prop_assert_eq!(result.bytes, tokens * layers * heads * row);
    prop_assert_eq!((result.engine, result.strategy), (Engine::Host, TransferStrategy::Memcpy));
    prop_assert_eq!(ctx.in_flight(), 0);
    Ok(())
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn like_the_oracle(
        case in case(6), skew in [0u64..16, 0u64..16], threads in 1usize..=4, through_pool: bool,
    ) {
        check(case, skew, &context(threads), through_pool)?;
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn like_the_oracle_with_larger_sizes(case in case(16), skew in [0u64..64, 0u64..64], threads in 1usize..=4) {
        check(case, skew, &context(threads), false)?;
    }
}
