//! `check_ids`: exact positions, at every size and by every method.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::collections::HashMap;

use common::{Dice, cases, ids};
use kvferry_layout::{BlockId, PlanError, Side, check_ids};
use proptest::prelude::*;

/// The first position whose id was given before, and where.
fn twice(list: &[BlockId]) -> Option<PlanError> {
    let mut seen = HashMap::new();
    list.iter().enumerate().find_map(|(second, &id)| {
        let first = seen.insert(id, second)?;
        Some(PlanError::DuplicateDestination { value: id.0, first, second })
    })
}

/// Limits that choose the bitmap and (more blocks than the ids are worth) the hash table.
const LIMITS: [u64; 3] = [4096, 1 << 20, u32::MAX as u64];

#[test]
fn duplicates_at_every_position_and_size() {
    for limit in LIMITS {
        for len in [2, 3, 15, 16, 17, 18, 40] {
            for first in 0..len {
                for second in first + 1..len {
                    // Rising, but for the one id that comes back; and the same list shuffled beforehand.
                    for seed in [None, Some(first * 64 + second)] {
                        let mut list = ids((0..len).map(|i| limit - 1 - (len - i) * 7));
                        if let Some(seed) = seed {
                            Dice(seed).shuffle(&mut list);
                        }
                        list[second as usize] = list[first as usize];
                        let got = check_ids(Side::Destination, &list, limit);
                        let value = list[first as usize].0;
                        let (first, second) = (first as usize, second as usize);
                        assert_eq!(got, Err(PlanError::DuplicateDestination { value, first, second }));
                        assert_eq!(check_ids(Side::Source, &list, limit), Ok(()), "a source may repeat");
                    }
                }
            }
        }
    }
}

#[test]
fn ids_out_of_range_are_named_with_their_position() {
    for side in [Side::Source, Side::Destination] {
        for len in [1u64, 16, 17, 100] {
            for index in 0..len {
                let mut list = ids((0..len).rev());
                list[index as usize] = BlockId(len as u32);
                let error = PlanError::BlockId { side, index: index as usize, value: len as i64, limit: len };
                assert_eq!(check_ids(side, &list, len), Err(error));
            }
            assert_eq!(check_ids(side, &ids((0..len).rev()), len), Ok(()));
        }
        assert_eq!(check_ids(side, &[], 1), Ok(()));
        let (last, limit) = (BlockId(u32::MAX), u64::from(u32::MAX));
        let error = PlanError::BlockId { side, index: 0, value: i64::from(u32::MAX), limit };
        assert_eq!(check_ids(side, &[last], limit), Err(error));
    }
}

/// An id out of range is reported before a duplicate, wherever the two are.
#[test]
fn range_comes_before_duplicates() {
    let error = PlanError::BlockId { side: Side::Destination, index: 2, value: 9, limit: 9 };
    assert_eq!(check_ids(Side::Destination, &ids([1, 1, 9]), 9), Err(error));
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn any_list(len in 0usize..80, spread in 1u64..200, pick in 0usize..3, seed in any::<u64>()) {
        let mut dice = Dice(seed);
        let list = ids((0..len).map(|_| dice.below(spread)));
        let limit = LIMITS[pick];
        prop_assert_eq!(check_ids(Side::Destination, &list, limit).err(), twice(&list));
        prop_assert_eq!(check_ids(Side::Source, &list, limit), Ok(()));
    }
}
