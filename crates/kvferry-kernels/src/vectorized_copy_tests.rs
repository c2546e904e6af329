use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;

fn shape(pairs: u64, bytes: u64, max_ctas: Option<u32>) -> VectorizedCopyGeometry {
    vectorized_copy_geometry(pairs, bytes, 132, max_ctas).unwrap()
}

#[test]
fn nothing_to_copy_is_an_empty_launch() {
    assert!(shape(0, 4096, None).launch.is_empty());
    assert!(shape(7, 0, None).launch.is_empty());
    assert!(!shape(1, 1, None).launch.is_empty());
}

#[test]
fn impossible_launches_are_refused() {
    assert_eq!(vectorized_copy_geometry(1, 1, 0, None), Err(GeometryError::NoMultiprocessors));
    assert_eq!(vectorized_copy_geometry(1, 1, 132, Some(0)), Err(GeometryError::NoCtas));
    for (pairs, bytes_per_pair) in [(u64::MAX, 2), (1 << 32, 1 << 32), (1, (1 << 62) + 1)] {
        let refused = vectorized_copy_geometry(pairs, bytes_per_pair, 132, None);
        assert_eq!(refused, Err(GeometryError::TooLarge { pairs, bytes_per_pair }));
    }
    assert!(vectorized_copy_geometry(1 << 31, 1 << 31, 132, None).is_ok());
}

#[test]
fn one_large_pair_fills_the_gpu() {
    let geometry = shape(1, 1 << 30, None);
    assert_eq!(geometry.launch.grid, 132);
    assert!(geometry.chunks_per_pair >= 132);
}

#[test]
fn few_middling_pairs_fill_the_gpu() {
    // One 2 MiB block of an 8B model: 64 runs of 32 KiB.
    let geometry = shape(64, 32 << 10, None);
    assert!(geometry.launch.grid >= 128, "{geometry:?}");
}

#[test]
fn small_pairs_share_a_cta() {
    let geometry = shape(1 << 20, 132, None);
    assert_eq!((geometry.chunks_per_pair, geometry.team_shift, geometry.launch.block), (1, 3, 1024));
    assert_eq!(geometry.launch.grid, 132);
}

#[test]
fn params_are_plain_bytes() {
    let params = VectorizedCopyParams::new(1, 2, 3, 4, &shape(3, 4, None));
    assert_eq!(params.as_bytes().len(), crate::Kernel::VectorizedCopy.param_bytes());
    assert_eq!(params.as_bytes()[..8], 1u64.to_ne_bytes());
}

/// The (pair, chunk) items each team visits, walked as the kernel does.
fn visits(pairs: u64, geometry: &VectorizedCopyGeometry) -> Vec<u32> {
    let teams = u64::from(geometry.launch.grid) * u64::from(geometry.launch.block >> geometry.team_shift);
    let items = pairs * geometry.chunks_per_pair;
    let mut seen = vec![0; usize::try_from(items).unwrap()];
    for team in 0..teams {
        for item in (team..items).step_by(usize::try_from(teams).unwrap()) {
            seen[usize::try_from(item).unwrap()] += 1;
        }
    }
    seen
}

proptest! {
    #[test]
    fn every_item_is_visited_once_and_chunks_cover_a_pair(
        pairs in 1u64..3000,
        bytes in prop_oneof![1u64..5000, 1u64..(1 << 20)],
        sms in 1u32..200,
        max_ctas in prop::option::of(1u32..64),
    ) {
        let geometry = vectorized_copy_geometry(pairs, bytes, sms, max_ctas).unwrap();
        prop_assert!(visits(pairs, &geometry).iter().all(|count| *count == 1));
        prop_assert!((geometry.chunks_per_pair - 1) * geometry.chunk_bytes < bytes);
        prop_assert!(geometry.chunks_per_pair * geometry.chunk_bytes >= bytes);
        prop_assert_eq!(geometry.chunk_bytes % UNIT, 0);
    }

    #[test]
    fn launches_are_legal_at_any_size(
        pairs in any::<u64>(),
        bytes in any::<u64>(),
        shifts in (0u32..64, 0u32..64),
        sms in 1u32..=1024,
        max_ctas in prop::option::of(1u32..),
    ) {
        let (pairs, bytes) = (pairs >> shifts.0, bytes >> shifts.1);
        match vectorized_copy_geometry(pairs, bytes, sms, max_ctas) {
            Ok(geometry) => {
                let LaunchGeometry { grid, block, .. } = geometry.launch;
                prop_assert_eq!(grid == 0, pairs == 0 || bytes == 0);
                prop_assert!(grid <= i32::MAX as u32 && grid <= max_ctas.unwrap_or(u32::MAX));
                prop_assert!(block.is_power_of_two() && (MIN_BLOCK..=MAX_BLOCK).contains(&block));
                prop_assert!(1 << geometry.team_shift <= block);
                prop_assert!(grid == 0 || u128::from(pairs) * u128::from(geometry.chunks_per_pair) <= 1 << 62);
            }
            Err(error) => {
                let total = u128::from(pairs) * u128::from(bytes);
                prop_assert_eq!(error, GeometryError::TooLarge { pairs, bytes_per_pair: bytes });
                prop_assert!(total > 1 << 62);
            }
        }
    }
}
