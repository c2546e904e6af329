//! The copy primitives against a byte-by-byte reference, with guard zones and poison around every buffer.

use kvferry_host::copy::{CopyHint, CopyNest, Loop, copy_bytes, copy_nest, fill_bytes};
use proptest::prelude::*;

const GUARD: usize = 97;
const POISON: u8 = 0xA5;

/// A byte that depends on its place and differs between neighbours.
fn byte_at(place: usize) -> u8 {
    (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn source(len: usize) -> Vec<u8> {
    (0..len).map(byte_at).collect()
}

/// One axis of a random nest: how often, and how many spare bytes between steps on each side.
#[derive(Debug, Clone)]
struct Axis {
    count: u64,
    src_gap: usize,
    dst_gap: usize,
    src_back: bool,
    dst_back: bool,
}

fn axis() -> impl Strategy<Value = Axis> {
    (1_u64..5, 0_usize..40, 0_usize..40, any::<bool>(), any::<bool>()).prop_map(
        |(count, src_gap, dst_gap, src_back, dst_back)| Axis { count, src_gap, dst_gap, src_back, dst_back },
    )
}

fn run_bytes() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 1_usize..5000,
        3 => prop::sample::select(vec![1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 384, 512, 640, 1024, 4096]),
        2 => 1_usize..80,
    ]
}

/// Strides such that the axes, taken in the order `nesting` (fastest first), never overlap on that side.
fn strides(axes: &[Axis], run: usize, nesting: &[usize], gap: fn(&Axis) -> (usize, bool)) -> Vec<i64> {
    let mut strides = vec![0_i64; axes.len()];
    let mut span = run;
    for &at in nesting {
        let (spare, back) = gap(&axes[at]);
        let stride = span + spare;
        strides[at] = if back { -(stride as i64) } else { stride as i64 };
        span += stride * (axes[at].count as usize - 1);
    }
    strides
}

fn nest_strategy() -> impl Strategy<Value = (usize, Vec<Loop>)> {
    (run_bytes(), prop::collection::vec(axis(), 0..=6)).prop_flat_map(|(run, axes)| {
        let order: Vec<usize> = (0..axes.len()).collect();
        (Just(run), Just(axes), Just(order.clone()).prop_shuffle(), Just(order).prop_shuffle()).prop_map(
            |(run, axes, src_nesting, dst_nesting)| {
                let src = strides(&axes, run, &src_nesting, |a| (a.src_gap, a.src_back));
                let dst = strides(&axes, run, &dst_nesting, |a| (a.dst_gap, a.dst_back));
                let loops = axes.iter().zip(src.iter().zip(&dst));
                let loops = loops.map(|(a, (&src_stride, &dst_stride))| Loop {
                    count: a.count,
                    src_stride,
                    dst_stride,
                });
                (run, loops.collect())
            },
        )
    })
}

/// Every (source offset, destination offset) of the nest in order, by plain recursion.
fn offsets(loops: &[Loop]) -> Vec<(i64, i64)> {
    match loops.split_first() {
        None => vec![(0, 0)],
        Some((head, rest)) => {
            let inner = offsets(rest);
            (0..head.count as i64)
                .flat_map(|i| {
                    inner.iter().map(move |&(s, d)| (i * head.src_stride + s, i * head.dst_stride + d))
                })
                .collect()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn nests_match_the_reference(
        (run, loops) in nest_strategy(),
        skew in (0_usize..64, 0_usize..64),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        hint in prop::sample::select(vec![CopyHint::Temporal, CopyHint::NonTemporal, CopyHint::Relay]),
    ) {
        let nest = CopyNest::new(run, &loops).unwrap();
        let (src_low, src_high) = nest.src_extent();
        let (dst_low, dst_high) = nest.dst_extent();
        prop_assume!(src_high - src_low < 4 << 20 && dst_high - dst_low < 4 << 20);
        let src = source(skew.0 + (src_high - src_low) as usize);
        let src_base = skew.0 as i64 - src_low;
        let mut dst = vec![POISON; 2 * GUARD + skew.1 + (dst_high - dst_low) as usize];
        let dst_base = (GUARD + skew.1) as i64 - dst_low;

        let mut expected = dst.clone();
        let all = offsets(&loops);
        prop_assert_eq!(all.len() as u64, nest.num_runs());
        for &(s, d) in &all {
            for i in 0..run as i64 {
                expected[(dst_base + d + i) as usize] = src[(src_base + s + i) as usize];
            }
        }

        let mut bounds: Vec<u64> = cuts.iter().map(|c| c.index(all.len() + 1) as u64).collect();
        bounds.extend([0, nest.num_runs()]);
        bounds.sort_unstable();
        // Pieces back to front: the order of the pieces must not matter.
        for piece in bounds.windows(2).rev() {
            let from = src.as_ptr().wrapping_offset(src_base as isize);
            let to = dst.as_mut_ptr().wrapping_offset(dst_base as isize);
            // SAFETY: both buffers span the nest's extents around their base, and destinations are disjoint by
            // construction of the strides.
            unsafe { copy_nest(from, to, &nest, piece[0]..piece[1], hint) };
        }
        prop_assert!(dst == expected, "bytes differ");
    }

    #[test]
    fn a_sub_range_touches_only_its_runs(
        (run, loops) in nest_strategy(),
        ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let nest = CopyNest::new(run, &loops).unwrap();
        let (src_low, src_high) = nest.src_extent();
        let (dst_low, dst_high) = nest.dst_extent();
        prop_assume!(src_high - src_low < 1 << 20 && dst_high - dst_low < 1 << 20);
        let src = source((src_high - src_low) as usize);
        let mut dst = vec![POISON; 2 * GUARD + (dst_high - dst_low) as usize];
        let (src_base, dst_base) = (-src_low, GUARD as i64 - dst_low);
        let all = offsets(&loops);
        let (a, b) = (ends.0.index(all.len() + 1), ends.1.index(all.len() + 1));
        let (begin, end) = (a.min(b), a.max(b));

        let mut expected = dst.clone();
        for &(s, d) in &all[begin..end] {
            for i in 0..run as i64 {
                expected[(dst_base + d + i) as usize] = src[(src_base + s + i) as usize];
            }
        }
        let from = src.as_ptr().wrapping_offset(src_base as isize);
        let to = dst.as_mut_ptr().wrapping_offset(dst_base as isize);
        // SAFETY: both buffers span the nest's extents around their base, and destinations are disjoint.
        unsafe { copy_nest(from, to, &nest, begin as u64..end as u64, CopyHint::Temporal) };
        prop_assert!(dst == expected, "bytes differ");
    }

    #[test]
    fn flat_copies_and_fills(
        len in prop_oneof![0_usize..300, 0_usize..70_000],
        skew in (0_usize..80, 0_usize..80),
        hint in prop::sample::select(vec![CopyHint::Temporal, CopyHint::NonTemporal, CopyHint::Relay]),
        value in any::<u8>(),
    ) {
        let src = source(skew.0 + len);
        let begin = GUARD + skew.1;
        let mut dst = vec![POISON; begin + len + GUARD];
        let to = dst.as_mut_ptr().wrapping_add(begin);
        // SAFETY: `len` bytes lie behind both addresses, in two different vectors.
        unsafe { copy_bytes(src.as_ptr().wrapping_add(skew.0), to, len, hint) };
        prop_assert!(dst[begin..begin + len] == src[skew.0..]);
        prop_assert!(dst[..begin].iter().chain(&dst[begin + len..]).all(|&b| b == POISON));
        let to = dst.as_mut_ptr().wrapping_add(begin);
        // SAFETY: `len` bytes lie behind the address.
        unsafe { fill_bytes(to, value, len) };
        prop_assert!(dst[begin..begin + len].iter().all(|&b| b == value));
        prop_assert!(dst[..begin].iter().chain(&dst[begin + len..]).all(|&b| b == POISON));
    }
}

#[test]
fn empty_nests_and_ranges_touch_nothing() {
    let null = (std::ptr::null::<u8>(), std::ptr::null_mut::<u8>());
    let empty = CopyNest::new(8, &[Loop { count: 0, src_stride: 8, dst_stride: 8 }]).unwrap();
    let full = CopyNest::new(8, &[Loop { count: 4, src_stride: 8, dst_stride: 8 }]).unwrap();
    for hint in [CopyHint::Temporal, CopyHint::NonTemporal, CopyHint::Relay] {
        // SAFETY: a nest without runs accesses nothing.
        unsafe { copy_nest(null.0, null.1, &empty, 0..u64::MAX, hint) };
        // SAFETY: an empty range accesses nothing.
        unsafe { copy_nest(null.0, null.1, &full, 2..2, hint) };
        // SAFETY: a range behind the last run accesses nothing.
        unsafe { copy_nest(null.0, null.1, &full, 4..u64::MAX, hint) };
        // SAFETY: no bytes, no access.
        unsafe { copy_bytes(null.0, null.1, 0, hint) };
    }
    // SAFETY: no bytes, no access.
    unsafe { fill_bytes(null.1, 1, 0) };
}

#[test]
fn threads_share_one_nest() {
    // NHD to HND: [page, head, row] to [head, page, row].
    let (pages, heads, row) = (64_u64, 8_u64, 256_usize);
    let loops = [
        Loop { count: heads, src_stride: row as i64, dst_stride: (pages as usize * row) as i64 },
        Loop { count: pages, src_stride: (heads as usize * row) as i64, dst_stride: row as i64 },
    ];
    let nest = CopyNest::new(row, &loops).unwrap();
    let src = source(nest.total_bytes() as usize);
    let mut dst = vec![POISON; src.len()];
    let (from, to) = (src.as_ptr().expose_provenance(), dst.as_mut_ptr().expose_provenance());
    std::thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                let share = nest.num_runs() / 4;
                let range = part * share..(part + 1) * share;
                let from = std::ptr::with_exposed_provenance(from);
                let to = std::ptr::with_exposed_provenance_mut(to);
                // SAFETY: both vectors outlive the scope and span the nest; the four ranges are disjoint.
                unsafe { copy_nest(from, to, &nest, range, CopyHint::NonTemporal) };
            });
        }
    });
    for page in 0..pages as usize {
        for head in 0..heads as usize {
            let s = (page * heads as usize + head) * row;
            let d = (head * pages as usize + page) * row;
            assert_eq!(dst[d..d + row], src[s..s + row]);
        }
    }
}
