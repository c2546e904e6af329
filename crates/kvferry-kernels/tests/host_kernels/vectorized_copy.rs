//! The body of `vectorized_copy`: every byte of every pair is stored once, nothing else is touched.

use proptest::prelude::*;

use crate::copy_case::{CopyCase, Shape, any_case, any_order, any_shape};
use crate::ffi::Order;

const BODY: &std::ffi::CStr = c"vectorized_copy";
const ORDERS: [Order; 3] = [Order::Forward, Order::Reversed, Order::Random(7)];

proptest! {
    #[test]
    fn any_batch_in_any_shape(case in any_case(), shape in any_shape()) {
        prop_assert_eq!(case.check(BODY, shape), Ok(()));
    }

    #[test]
    fn any_batch_in_the_shape_we_launch(
        case in any_case(),
        sms in 1u32..12,
        max_ctas in prop::option::of(1u32..6),
        order in any_order(),
    ) {
        let shape = case.geometry(sms, max_ctas, order);
        prop_assert_eq!(case.check(BODY, shape), Ok(()));
    }
}

#[test]
fn every_pair_of_misalignments() {
    let misaligned: Vec<_> = (0..256).map(|i| (i / 16, i % 16)).collect();
    for bytes in [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 132, 257] {
        let case = CopyCase::in_order(bytes, misaligned.clone());
        for order in ORDERS {
            let shape = Shape { grid: 3, block: 32, chunk_bytes: 48, team_shift: 2, order };
            assert_eq!(case.check(BODY, shape), Ok(()), "{bytes} bytes");
        }
    }
}

/// The grid wraps while alignments change from pair to pair: where a unit chosen once per CTA goes wrong.
#[test]
fn more_pairs_than_a_grid_may_have_in_y() {
    let misaligned: Vec<_> = (0..70_001).map(|i| (i % 16, (i * 7 / 3) % 16)).collect();
    let case = CopyCase::in_order(19, misaligned);
    for (order, max_ctas) in [(Order::Forward, None), (Order::Random(11), Some(4))] {
        assert_eq!(case.check(BODY, case.geometry(132, max_ctas, order)), Ok(()));
    }
}

#[test]
fn one_large_pair_over_many_ctas() {
    for misaligned in [(0, 0), (5, 5), (8, 0), (3, 4)] {
        let case = CopyCase::in_order((1 << 20) + 13, vec![misaligned]);
        for order in ORDERS {
            let shape = case.geometry(16, None, order);
            assert!(shape.grid >= 8);
            assert_eq!(case.check(BODY, shape), Ok(()));
        }
    }
}

/// A source that several pairs read is no fault.
#[test]
fn a_source_may_be_read_by_several_pairs() {
    let mut case = CopyCase::in_order(100, vec![(4, 0), (4, 4), (4, 9)]);
    case.src_slots = vec![1, 1, 1];
    assert_eq!(case.check(BODY, case.geometry(2, None, Order::Forward)), Ok(()));
}

#[test]
fn nothing_to_copy_touches_nothing() {
    for case in [CopyCase::in_order(0, vec![(0, 0); 5]), CopyCase::in_order(64, Vec::new())] {
        // The library launches nothing; the kernel does nothing if launched all the same.
        assert_eq!(case.geometry(132, None, Order::Forward).grid, 0);
        let shape = Shape { grid: 2, block: 64, chunk_bytes: 16, team_shift: 3, order: Order::Forward };
        assert_eq!(case.check(BODY, shape), Ok(()));
    }
}
