//! Parameters: what is counted, how it is divided, where it is refused.

use proptest::prelude::*;
use zerocopy::FromBytes;

use super::*;
use crate::Kernel;

const MB: u64 = 1 << 20;
const LIMITS: ExchangeLimits = ExchangeLimits { sm_count: 132, num_sms: None, max_block: 1024 };

fn peers(world: usize) -> Vec<ExchangePeer> {
    (0..world as u64)
        .map(|rank| ExchangePeer {
            control: 0x1000 + (rank << 40),
            pool: 0x6000 + (rank << 40),
            pool_bytes: 1 << 39,
        })
        .collect()
}

fn piece(src: u64, dst_offset: u64, run_bytes: u64, loops: &[ExchangeLoop]) -> ExchangePiece<'_> {
    ExchangePiece { src, dst_offset, run_bytes, loops }
}

fn call<'a>(peers: &'a [ExchangePeer], pieces: &'a [Vec<ExchangePiece<'a>>]) -> ExchangeCall<'a> {
    ExchangeCall {
        rank: 0,
        peers,
        state: 0x100,
        host_page: 0x200,
        op: 3,
        hash: 9,
        place: 512,
        result_bytes: 4096,
        pieces,
        grid: ExchangeGrid { block: 64, max_ctas: 16, lanes: [2; MAX_RANKS] },
        copy_engine: false,
    }
}

/// The structs in the parameters of a part.
fn parse(part: &ExchangePart<'_>) -> (ExchangeHeader, Vec<ExchangePeerParams>, Vec<ExchangeItemParams>) {
    let room = if part.kernel == Kernel::Exchange { MAX_EXCHANGE_PEERS_SMALL } else { MAX_RANKS };
    let (header, rest) = ExchangeHeader::read_from_prefix(part.params).unwrap();
    let (peers, items) = rest.split_at(room * size_of::<ExchangePeerParams>());
    let peers: Vec<_> = peers
        .chunks_exact(size_of::<ExchangePeerParams>())
        .take(header.world as usize)
        .map(|bytes| ExchangePeerParams::read_from_bytes(bytes).unwrap())
        .collect();
    let count: u32 = peers.iter().map(|peer| peer.items).sum();
    let items = items
        .chunks_exact(size_of::<ExchangeItemParams>())
        .take(count as usize)
        .map(|bytes| ExchangeItemParams::read_from_bytes(bytes).unwrap())
        .collect();
    (header, peers, items)
}

#[test]
fn control_words_do_not_meet() {
    let mut seen = std::collections::BTreeSet::from([BELL_OFFSET]);
    for parity in 0..2 {
        for source in 0..MAX_RANKS {
            assert!(seen.insert(header_cell_offset(parity, source)));
            assert!(seen.insert(arrival_offset(parity, source)));
            assert_eq!(header_cell_offset(parity + 2, source), header_cell_offset(parity, source));
        }
    }
    assert!(seen.iter().zip(seen.iter().skip(1)).all(|(a, b)| b - a >= 64));
    const { assert!(BELL_OFFSET + 4 <= PROBE_OFFSET) };
    assert_eq!(split_abort_word(abort_word(7, 63)), (7, 63));
    for code in 0..9 {
        assert_eq!(
            RecordKind::from_code(code).map(RecordKind::code),
            (1..=6).contains(&code).then_some(code)
        );
    }
}

#[test]
fn a_call_becomes_items() {
    let peers = peers(2);
    let loops = [
        ExchangeLoop { count: 1, src_stride: 5, dst_stride: 3 },
        ExchangeLoop { count: 10, src_stride: -4096, dst_stride: 512 },
    ];
    let pieces = [
        vec![piece(0x10000, 0, 256, &loops), piece(0x20004, 5120, 8, &[])],
        vec![piece(0x10100, 0, 256, &loops), piece(0x30000, 6000, 0, &[]), piece(0x30001, 7000, 33, &[])],
    ];
    let mut buffer = ExchangeParamBuffer::new();
    let mut launch = call(&peers, &pieces).build(&mut buffer).unwrap();
    assert_eq!((launch.lanes(), launch.own_lanes()), (4, 2));
    let part = launch.part(ExchangeFlags::WHOLE);
    assert_eq!((part.kernel, part.params.len()), (Kernel::Exchange, EXCHANGE_PARAM_BYTES_SMALL));
    assert_eq!(
        (part.geometry.grid, part.geometry.block, part.geometry.shared),
        (4, 64, EXCHANGE_SHARED_BYTES)
    );
    let (header, peer, item) = parse(&part);
    assert_eq!((header.rank, header.world, header.flags, header.lanes, header.op), (0, 2, 63, 4, 3));
    // Words of 16 bytes, one loop left; then of 4 bytes, because of the address.
    assert_eq!((item[0].word_shift, item[0].words, item[0].loops, item[0].first_chunk), (4, 160, 1, 0));
    assert_eq!((item[1].word_shift, item[1].words, item[1].loops, item[1].first_chunk), (2, 2, 0, 1));
    assert_eq!((item[3].word_shift, item[3].words), (0, 33));
    assert_eq!(
        (peer[0].items, peer[0].chunks, peer[0].lanes, peer[0].arrivals, peer[0].reach),
        (2, 2, 2, 0, 5128)
    );
    assert_eq!(
        (peer[1].items, peer[1].chunks, peer[1].lanes, peer[1].arrivals, peer[1].reach),
        (2, 2, 2, 2, 7033)
    );
    assert_eq!((peer[0].first_lane, peer[1].first_lane, peer[1].first_item), (0, 2, 2));
}

#[test]
fn parts_have_the_grid_they_need() {
    let peers = peers(3);
    let pieces: Vec<_> = (0..3).map(|target| vec![piece(0, target << 20, 1 << 16, &[])]).collect();
    let mut buffer = ExchangeParamBuffer::new();
    let mut description = call(&peers, &pieces);
    description.rank = 1;
    description.grid.max_ctas = 5;
    let mut launch = description.build(&mut buffer).unwrap();
    for (flags, grid) in [
        (ExchangeFlags::OPEN, 1),
        (ExchangeFlags::MOVE, 5),
        (ExchangeFlags::OWN, 2),
        (ExchangeFlags::CLOSE, 1),
    ] {
        let part = launch.part(flags);
        assert_eq!(part.geometry.grid, grid, "{flags:?}");
        let (header, peer, _) = parse(&part);
        assert_eq!(header.flags, flags.bits());
        // Its own first, then the next rank, then round.
        assert_eq!([1, 2, 0].map(|rank: usize| peer[rank].first_lane), [0, 2, 4]);
    }
    description.copy_engine = true;
    let mut launch = description.build(&mut buffer).unwrap();
    let (_, peer, _) = parse(&launch.part(ExchangeFlags::OPEN));
    assert_eq!([peer[0].arrivals, peer[1].arrivals, peer[2].arrivals], [1, 0, 1]);
}

#[test]
fn the_large_form_takes_over() {
    for (world, each, kernel) in
        [(8, 3, Kernel::Exchange), (8, 4, Kernel::ExchangeLarge), (9, 1, Kernel::ExchangeLarge)]
    {
        let peers = peers(world);
        let pieces: Vec<_> = (0..world).map(|_| vec![piece(64, 0, 32, &[]); each]).collect();
        let mut buffer = ExchangeParamBuffer::new();
        let mut launch = call(&peers, &pieces).build(&mut buffer).unwrap();
        let part = launch.part(ExchangeFlags::WHOLE);
        assert_eq!((part.kernel, part.params.len()), (kernel, kernel.param_bytes()));
        let (_, _, items) = parse(&part);
        assert!(items.iter().all(|item| item.src == 64 && item.words == 2));
        assert_eq!(items.len(), world * each);
    }
}

#[test]
fn a_refusal_says_so() {
    let peers = peers(2);
    let mut buffer = ExchangeParamBuffer::new();
    let mut launch = ExchangeLaunch::refusal(1, &peers, 0x100, 0x200, 3, 41, &mut buffer).unwrap();
    let part = launch.part(ExchangeFlags::POST);
    let (header, peer, _) = parse(&part);
    assert_eq!((header.verdict, header.flags, header.rank, part.geometry.grid), (41, 1, 1, 1));
    assert_eq!((peer[0].control, peer[0].arrivals), (0x1000, 0));
    let none = ExchangeLaunch::refusal(1, &peers, 0x100, 0x200, 3, 0, &mut buffer);
    assert_eq!(none.unwrap_err(), ExchangeBuildError::Verdict);
}

/// For as long as the test runs.
fn kept<T, const N: usize>(values: [T; N]) -> &'static [T] {
    Vec::from(values).leak()
}

fn refused(change: impl FnOnce(&mut ExchangeCall<'static>)) -> ExchangeBuildError {
    let peers = peers(2).leak();
    let mut description = call(peers, kept([vec![piece(0, 0, 16, &[])], vec![piece(0, 0, 16, &[])]]));
    change(&mut description);
    description.build(&mut ExchangeParamBuffer::new()).map(|_| ()).unwrap_err()
}

#[test]
fn what_does_not_fit_is_refused() {
    use ExchangeBuildError as E;
    assert_eq!(refused(|c| c.rank = 2), E::Rank { rank: 2, world: 2 });
    assert_eq!(refused(|c| c.place = 128), E::Place { place: 128, align: 256 });
    assert_eq!(refused(|c| c.place = 1 << 40), E::Place { place: 1 << 40, align: 256 });
    assert_eq!(
        refused(|c| c.result_bytes = 1 << 39),
        E::BeyondPool { target: 0, bytes: (1 << 39) + 512, pool_bytes: 1 << 39 }
    );
    assert_eq!(refused(|c| c.grid.block = 1), E::Block { block: 1, world: 2 });
    assert_eq!(refused(|c| c.grid.block = 2048), E::Block { block: 2048, world: 2 });
    assert_eq!(refused(|c| c.grid.lanes[1] = 0), E::Lanes { target: 1, lanes: 0, chunks: 1 });
    assert_eq!(
        refused(|c| c.pieces = &c.pieces[..1]),
        E::WrongLength { what: "lists of pieces", given: 1, wanted: 2 }
    );
    assert_eq!(refused(|c| c.peers = &[]), E::World { world: 0, limit: 64 });
    let odd = kept([ExchangePeer { control: 8, ..ExchangePeer::default() }; 2]);
    assert_eq!(refused(|c| c.peers = odd), E::Misaligned { what: "control block", value: 8 });
    assert_eq!(refused(|c| c.host_page = 8), E::Misaligned { what: "host page", value: 8 });
    assert_eq!(refused(|c| c.state = 4), E::Misaligned { what: "state", value: 4 });
    let l = |count| ExchangeLoop { count, src_stride: 64, dst_stride: 64 };
    let deep = kept([l(2), l(1), l(2), l(2), l(2)]);
    let pieces = kept([vec![], vec![piece(0, 0, 16, deep)]]);
    assert_eq!(refused(|c| c.pieces = pieces), E::TooManyLoops { target: 1, piece: 0, loops: 4, limit: 3 });
    let far = kept([l(1 << 58)]);
    let pieces = kept([vec![], vec![piece(0, 0, 16, &[]), piece(0, 0, 16, far)]]);
    assert_eq!(refused(|c| c.pieces = pieces), E::TooLarge { target: 1, piece: 1 });
    let pieces = kept([vec![], vec![piece(0, 1 << 39, 16, &[])]]);
    assert_eq!(
        refused(|c| c.pieces = pieces),
        E::BeyondPool { target: 1, bytes: (1 << 39) + 16, pool_bytes: 1 << 39 }
    );
    let pieces = kept([vec![piece(0, 0, 16, &[]); 101], vec![piece(0, 0, 16, &[]); 102]]);
    assert_eq!(refused(|c| c.pieces = pieces), E::TooManyItems { items: 203, limit: 202 });
}

/// Address pair of byte `at` of a piece, counted through its runs.
fn of_piece(piece: &ExchangePiece<'_>, at: u64) -> (u64, u64) {
    let mut rest = at / piece.run_bytes;
    let within = at % piece.run_bytes;
    let (mut src, mut dst) = (piece.src + within, piece.dst_offset + within);
    for l in piece.loops.iter().rev() {
        let i = rest % l.count;
        rest /= l.count;
        src = src.wrapping_add_signed(i as i64 * l.src_stride);
        dst += i * l.dst_stride;
    }
    (src, dst)
}

/// As the kernel finds a word of an item.
fn of_item(item: &ExchangeItemParams, word: u32) -> (u64, u64) {
    let mut rest = item.run.divide(word);
    let within = u64::from(word - rest * item.run.count()) << item.word_shift;
    let (mut src, mut dst) = (item.src + within, item.dst_offset + within);
    for l in item.loop_[..item.loops as usize].iter().rev() {
        let outer = l.count.divide(rest);
        let i = u64::from(rest - outer * l.count.count());
        rest = outer;
        src = src.wrapping_add(i.wrapping_mul(l.src_stride));
        dst += i * l.dst_stride;
    }
    (src, dst)
}

proptest! {
    /// However large a piece is, its items name its bytes in its order.
    #[test]
    fn items_cover_their_piece(
        run in prop_oneof![1u64..100, Just(48), (1u64 << 30)..(1 << 35)],
        counts in prop::collection::vec(prop_oneof![1u64..9, 1u64..100_000], 0..4),
        src in prop_oneof![Just(1u64 << 50), (1u64 << 50)..(1 << 50) + 32],
        samples in prop::collection::vec(any::<u64>(), 32),
    ) {
        let mut step = run;
        let mut loops: Vec<_> = counts.iter().rev().map(|&count| {
            let l = ExchangeLoop { count, src_stride: -(step as i64), dst_stride: step };
            step = step.saturating_mul(count);
            l
        }).collect();
        loops.reverse();
        prop_assume!(step < 1 << 38);
        let peers = peers(2);
        let pieces = [vec![piece(src, 0, run, &loops)], vec![]];
        let mut buffer = ExchangeParamBuffer::new();
        let mut launch = match call(&peers, &pieces).build(&mut buffer) {
            Ok(launch) => launch,
            Err(ExchangeBuildError::TooManyItems { limit, .. }) => {
                // 202 items of at most 2^31 bytes: only near 2^38 bytes with odd addresses.
                prop_assert!(step / (1 << 30) > limit as u64 / 2);
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        let (_, peer, items) = parse(&launch.part(ExchangeFlags::WHOLE));
        let bytes: Vec<_> = items.iter().map(|item| u64::from(item.words) << item.word_shift).collect();
        prop_assert_eq!(bytes.iter().sum::<u64>(), step);
        prop_assert_eq!(peer[0].reach, step);
        let mut chunk = 0;
        for item in &items {
            prop_assert!(item.words > 0 && item.words < 1 << 31);
            prop_assert_eq!(item.first_chunk, chunk);
            chunk += item.words.div_ceil(256);
        }
        prop_assert_eq!(peer[0].chunks, chunk);
        for sample in samples {
            let at = sample % step;
            let mut before = 0;
            let index = bytes.iter().position(|bytes| { before += bytes; at < before }).unwrap();
            let item = &items[index];
            let within = at - (before - bytes[index]);
            let (src, dst) = of_item(item, (within >> item.word_shift) as u32);
            let low = within & ((1 << item.word_shift) - 1);
            prop_assert_eq!((src + low, dst + low), of_piece(&pieces[0][0], at));
            prop_assert_eq!((src | dst) & ((1 << item.word_shift) - 1), 0);
        }
    }

    #[test]
    fn every_target_with_bytes_has_a_lane(
        bytes in prop::collection::vec(prop_oneof![Just(0u64), 1u64..1000, 0u64..(1 << 32)], 1..65),
        sms in 1u32..150,
        cap in prop::option::of(1u32..200),
    ) {
        let grid = ExchangeGrid::choose(&bytes, &ExchangeLimits { sm_count: sms, num_sms: cap, max_block: 1024 });
        prop_assert!(grid.block as usize >= bytes.len() && grid.block <= 1024);
        prop_assert_eq!(grid.max_ctas, cap.unwrap_or(sms).min(sms));
        for (lanes, bytes) in grid.lanes.iter().zip(bytes.iter().chain(std::iter::repeat(&0))) {
            prop_assert_eq!(*lanes > 0, *bytes > 0);
        }
        let spread: u32 = grid.lanes.iter().sum();
        prop_assert!(spread <= 2 * 128.min(grid.max_ctas) + bytes.len() as u32);
    }
}

#[test]
fn grids_are_those_that_were_measured() {
    let two = |per_rank: u64, limits: &ExchangeLimits| {
        let grid = ExchangeGrid::choose(&[per_rank / 2, per_rank / 2], limits);
        (grid.block, grid.lanes[0], grid.lanes[1])
    };
    assert_eq!(two(16 << 10, &LIMITS), (512, 1, 1));
    assert_eq!(two(2 << 10, &LIMITS), (128, 1, 1));
    assert_eq!(two(128 << 10, &LIMITS), (128, 8, 8));
    assert_eq!(two(MB, &LIMITS), (512, 16, 16));
    assert_eq!(two(4 * MB, &LIMITS), (512, 16, 16));
    assert_eq!(two(8 * MB, &LIMITS), (512, 16, 16));
    assert_eq!(two(34 * MB, &LIMITS), (1024, 8, 8));
    assert_eq!(two(134 * MB, &LIMITS), (1024, 16, 16));
    assert_eq!(two(134 * MB, &ExchangeLimits { num_sms: Some(16), ..LIMITS }), (1024, 8, 8));
    assert_eq!(two(134 * MB, &ExchangeLimits { max_block: 64, ..LIMITS }), (64, 16, 16));
    assert_eq!(two(134 * MB, &ExchangeLimits { sm_count: 4, num_sms: None, max_block: 64 }), (64, 2, 2));
    // Nothing to send: one CTA posts and waits.
    let grid = ExchangeGrid::choose(&[0, 0], &LIMITS);
    assert_eq!((grid.block, grid.lanes[0], grid.lanes[1]), (128, 0, 0));
}
