//! Sizes, bases, offsets and ids at which other libraries went wrong. `tests/unit/test_bad_input.py` lists every case
//! and where it is tested.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]
#![allow(clippy::print_stdout, reason = "a skip says why")]

mod common;

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::layouts::{Dice, Form, Made, ids};
use common::{Bound, FC, Gate, PATIENCE, after, context, small_pair};
use kvferry::host::{HostBuffer, HostOptions, HostRegion};
use kvferry::layout::oracle;
use kvferry::{
    BlockDim, BlockId, Dtype, Error, KvOrder, Layout, LayoutConfig, LayoutError, LayoutKind, MemoryKind,
    PhysicalLayout, PlanError, Region, Side, TransferOptions,
};

const LW: LayoutKind = LayoutKind::LayerSeparate { block_dim: BlockDim::BlockFirst, order: KvOrder::Nhd };
const OUTER_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dim: BlockDim::OuterFirst, order: KvOrder::Nhd };
const UNIVERSAL: LayoutKind = LayoutKind::FullyContiguous { order: KvOrder::Universal };

/// Block sizes that are no multiple of any word, and those of models: fp8 with scales, MLA rows, pages with a header.
const SIZES: [u64; 12] = [1, 3, 7, 15, 17, 132, 257, 576, 584, 656, 1152, 4104];
const BASES: [u64; 5] = [0, 1, 2, 4, 8];

/// Blocks of `bytes` opaque bytes in each of `layers`.
fn opaque(blocks: u64, layers: u64, bytes: u64) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(layers).outer_dim(1).page_size(1);
    config.inner_dim(bytes).dtype(Dtype::UInt8).build().unwrap()
}

/// Copies between two guarded layouts and compares every byte of the destination, guards included.
fn copy_and_compare(src: &Bound, dst: &Bound, from: &[BlockId], to: &[BlockId], what: &str) {
    let config = src.made.layout.config();
    let (mem, mut expected) = (src.fill_unique(from.len() as u64), dst.poisoned());
    let (layers, heads) = (0..config.num_layers(), 0..config.num_heads());
    oracle::copy(&src.made.oracle, &mem, &dst.made.oracle, &mut expected, from, to, layers, heads);
    let job = context(2).transfer(&src.layout, &dst.layout, from, to, &TransferOptions::default());
    job.unwrap().wait(Some(PATIENCE)).unwrap();
    assert!(dst.dump() == dst.image(&expected), "{what}");
    assert!(src.dump() == src.image(&mem), "the source of {what}");
}

#[test]
fn odd_block_sizes_at_odd_bases() {
    let forms = [
        [Form::Own(FC), Form::Own(FC)],
        [Form::Own(LW), Form::Own(FC)],
        // A gap of up to three bytes between blocks or layers.
        [Form::Own(FC), Form::Foreign { seed: 3, pad: 3, tight: false }],
    ];
    for bytes in SIZES {
        for (src_base, dst_base) in BASES.into_iter().flat_map(|a| BASES.map(|b| (a, b))) {
            for [src, dst] in &forms {
                let config = opaque(6, 2, bytes);
                let src = Bound::new(Made::new(config, src), src_base);
                let dst = Bound::new(Made::new(config, dst), dst_base);
                let what = format!("blocks of {bytes} bytes, bases off by {src_base} and {dst_base}");
                // Two neighbours, one alone, one read twice.
                copy_and_compare(&src, &dst, &ids([1, 2, 5, 1]), &ids([3, 4, 0, 2]), &what);
            }
        }
    }
}

#[test]
fn odd_rows_whose_order_changes() {
    for bytes in SIZES {
        for base in BASES {
            let config =
                opaque(3, 2, bytes).to_builder().page_size(2).num_heads(2).total_heads(2).head_dim(bytes);
            let config = config.build().unwrap();
            let src = Bound::new(Made::new(config, &Form::Own(OUTER_FIRST)), base);
            let dst = Bound::new(Made::new(config, &Form::Own(UNIVERSAL)), 8 - base);
            copy_and_compare(
                &src,
                &dst,
                &ids([2, 0]),
                &ids([1, 2]),
                &format!("rows of {bytes}, base {base}"),
            );
        }
    }
}

/// A layout whose region `i` starts `offsets[i]` bytes off a cache line, in one guarded buffer.
fn at_offsets(layout: &Layout, offsets: &[u64]) -> (Arc<PhysicalLayout>, HostRegion, Vec<u64>) {
    let len = layout.region_bytes();
    let step = (len + 192).next_multiple_of(64);
    let buffer = HostBuffer::new((step * offsets.len() as u64 + 64) as usize, HostOptions::default());
    let whole = HostRegion::of_buffer(Arc::new(buffer.unwrap()));
    whole.fill(0, whole.len(), 0xEE).unwrap();
    let starts: Vec<u64> = offsets.iter().zip(0..).map(|(off, index)| 64 + index * step + off).collect();
    let regions = starts.iter().map(|&start| Region::Host(whole.part(start, len).unwrap())).collect();
    let layout = PhysicalLayout::from_regions(layout.clone(), MemoryKind::System, regions).unwrap();
    (layout, whole, starts)
}

#[test]
fn mixed_alignment_in_one_call() {
    // One call of 3,000 scattered blocks in eight regions, no two of which are aligned alike.
    for bytes in [17, 132, 584] {
        let layout = Layout::of_kind(opaque(3_000, 8, bytes), LW).unwrap();
        let (src, ..) = at_offsets(&layout, &[0, 1, 2, 4, 8, 3, 16, 7]);
        let (dst, whole, starts) = at_offsets(&layout, &[5, 8, 0, 1, 2, 32, 4, 9]);
        src.fill_pattern(7, None).unwrap();
        let (mut from, mut to): (Vec<u64>, Vec<u64>) = ((0..3_000).collect(), (0..3_000).collect());
        Dice(1).shuffle(&mut from);
        Dice(2).shuffle(&mut to);
        let (from, to) = (ids(from.into_iter().take(2_900)), ids(to.into_iter().take(2_900)));
        let job = context(2).transfer(&src, &dst, &from, &to, &TransferOptions::default()).unwrap();
        job.wait(Some(PATIENCE)).unwrap();
        dst.verify_pattern(7, Some(&to), Some(&from), None).unwrap();
        dst.check_fill(0xEE, &to).unwrap();
        let mut outside = vec![0; whole.len() as usize];
        whole.read(0, &mut outside).unwrap();
        for start in starts {
            outside[start as usize..][..layout.region_bytes() as usize].fill(0xEE);
        }
        assert!(outside.iter().all(|&byte| byte == 0xEE), "guards around blocks of {bytes} bytes");
    }
}

/// Reserved address space, of which only touched pages are memory.
struct Sparse {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the mapping belongs to the process; only its address is kept here.
unsafe impl Send for Sparse {}
// SAFETY: nothing can be read or written through a shared reference.
unsafe impl Sync for Sparse {}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of a mapping of ours that nothing refers to any more.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

/// Address space of `len` bytes, or None where the system refuses it: the test then says so.
fn sparse(len: u64) -> Option<HostRegion> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a null hint without MAP_FIXED replaces no mapping.
    let base = unsafe { libc::mmap(ptr::null_mut(), len as usize, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        println!("skipped: {len} bytes of address space: {}", std::io::Error::last_os_error());
        return None;
    }
    let owner = Sparse { base, len: len as usize };
    // SAFETY: the owner keeps the mapping, which is readable and writable.
    Some(unsafe { HostRegion::from_raw(base as u64, len, true, Arc::new(owner)) })
}

fn bind(config: LayoutConfig, kind: LayoutKind, whole: &HostRegion) -> Arc<PhysicalLayout> {
    let layout = Layout::of_kind(config, kind).unwrap();
    let len = layout.region_bytes();
    let regions = (0..layout.num_regions()).map(|at| Region::Host(whole.part(at * len, len).unwrap()));
    PhysicalLayout::from_regions(layout.clone(), MemoryKind::System, regions.collect()).unwrap()
}

#[test]
fn ids_beyond_31_bits() {
    // 3 * 2^30 blocks of two bytes, 6 GiB.
    let count = 3u64 << 30;
    let Some(whole) = sparse(2 * count) else { return };
    let huge = bind(opaque(count, 1, 2), FC, &whole);
    let small = Layout::of_kind(opaque(64, 1, 2), FC).unwrap();
    let small = PhysicalLayout::allocate(small, MemoryKind::System).unwrap();
    let places = [(1 << 31) - 1, 1 << 31, (1 << 31) + 1, count - 1, 0, count - 3, (1 << 31) + 7];
    for (value, &place) in (1u8..).zip(&places) {
        whole.write(2 * place, &[value, 0x80 | value]).unwrap();
    }
    let ctx = context(2);
    let to = ids(0..places.len() as u64);
    let copy = |src, dst, from: &[BlockId], to: &[BlockId]| {
        ctx.transfer(src, dst, from, to, &TransferOptions::default())?.wait(Some(PATIENCE)).map(drop)
    };
    copy(&huge, &small, &ids(places), &to).unwrap();
    let mut got = vec![0; 2 * places.len()];
    small.host_region(0).unwrap().read(0, &mut got).unwrap();
    let expected: Vec<u8> = (1..=places.len() as u8).flat_map(|value| [value, 0x80 | value]).collect();
    assert_eq!(got, expected);

    // And back, to other blocks far up, 20 of them in no order: every neighbour stays zero.
    let far: Vec<u64> = (0..20).map(|at| count - 100 - (at * 7) % 20 * 3).collect();
    small.host_region(0).unwrap().write(0, &[9; 40]).unwrap();
    copy(&small, &huge, &ids(0..20), &ids(far.iter().copied())).unwrap();
    let mut got = vec![0; 400];
    whole.read(2 * (count - 200), &mut got).unwrap();
    for (index, pair) in got.chunks(2).enumerate() {
        let place = count - 200 + index as u64;
        let (hit, old) = (far.contains(&place), places.iter().position(|&old| old == place));
        let expected = if hit { [9, 9] } else { old.map_or([0, 0], |at| [at as u8 + 1, 0x81 + at as u8]) };
        assert_eq!(pair, expected, "block {place}");
    }

    // One beyond, and the same one twice, by value.
    let error = copy(&huge, &small, &ids([0, count]), &ids([0, 1])).unwrap_err();
    let expected = PlanError::BlockId { side: Side::Source, index: 1, value: count as i64, limit: count };
    assert!(matches!(&error, Error::Plan(found) if *found == expected), "{error:?}");
    let mut twice = far.clone();
    twice[17] = twice[3];
    let error = copy(&small, &huge, &ids(0..20), &ids(twice.iter().copied())).unwrap_err();
    let expected = PlanError::DuplicateDestination { value: twice[3] as u32, first: 3, second: 17 };
    assert!(matches!(&error, Error::Plan(found) if *found == expected), "{error:?}");
}

#[test]
fn offsets_beyond_4_gib() {
    // Blocks of 1 MiB: block 4,095 ends at 4 GiB, layer 1 starts at 5 GiB, K and V are 2.5 GiB apart or 5.
    const BLOCK: u64 = 1 << 20;
    let config = |blocks| {
        let config = LayoutConfig::builder().num_blocks(blocks).num_layers(2).page_size(16).num_heads(8);
        config.head_dim(1024).dtype(Dtype::BFloat16).build().unwrap()
    };
    assert_eq!(config(1).block_bytes(), BLOCK);
    for (kind, blocks) in [(FC, 6 << 10), (OUTER_FIRST, 10 << 10), (LW, 10 << 10)] {
        let Some(whole) = sparse(blocks * BLOCK) else { return };
        let huge = bind(config(blocks), kind, &whole);
        let near =
            PhysicalLayout::allocate(Layout::of_kind(config(8), UNIVERSAL).unwrap(), MemoryKind::System);
        let near = near.unwrap();
        let far = ids([4_095, 4_096, 4_097, blocks - 1, 0]);
        huge.fill_pattern(3, Some(&far)).unwrap();
        let ctx = context(2);
        let to = ids([7, 0, 3, 4, 6]);
        let job = ctx.transfer(&huge, &near, &far, &to, &TransferOptions::default()).unwrap();
        job.wait(Some(PATIENCE)).unwrap();
        near.verify_pattern(3, Some(&to), Some(&far), None).unwrap();
        near.check_fill(0, &to).unwrap();

        let back = ids([blocks - 2, 4_093, 1, 4_098, 2]);
        let job = ctx.transfer(&near, &huge, &to, &back, &TransferOptions::default()).unwrap();
        job.wait(Some(PATIENCE)).unwrap();
        huge.verify_pattern(3, Some(&back), Some(&far), None).unwrap();
        huge.verify_pattern(3, Some(&far), None, None).unwrap();
        // Where a formula of 32 bits would have put block 4,097 or layer 1.
        if kind == FC {
            let mut low = vec![0; BLOCK as usize];
            for block in [5, 4_094] {
                whole.read(block * BLOCK, &mut low).unwrap();
                assert!(low.iter().all(|&byte| byte == 0), "block {block} was written");
            }
        }
    }
}

#[test]
fn a_window_that_starts_within_a_block_touches_129() {
    // 4,096 tokens in blocks of 32, from token 7 of a block to token 19 of another: 129 blocks on both sides.
    let config = common::config(130, 2, 32, 2, 8);
    let make = |kind| PhysicalLayout::allocate(Layout::of_kind(config, kind).unwrap(), MemoryKind::System);
    let tokens = |layout: &PhysicalLayout| layout.with_page_size(1).unwrap();
    let (src, dst) = (make(LW).unwrap(), make(UNIVERSAL).unwrap());
    let (src_tokens, dst_tokens) = (tokens(&src), tokens(&dst));
    src_tokens.fill_pattern(1, None).unwrap();
    dst.fill(0xEE).unwrap();
    let (from, to) = (ids(7..7 + 4_096), ids(19..19 + 4_096));
    let blocks = |list: &[BlockId]| {
        let mut blocks: Vec<u32> = list.iter().map(|id| id.0 / 32).collect();
        blocks.dedup();
        blocks.len()
    };
    assert_eq!((blocks(&from), blocks(&to)), (129, 129));
    let ctx = context(2);
    let job = ctx.transfer(&src_tokens, &dst_tokens, &from, &to, &TransferOptions::default()).unwrap();
    job.wait(Some(PATIENCE)).unwrap();
    dst_tokens.verify_pattern(1, Some(&to), Some(&from), None).unwrap();
    dst_tokens.check_fill(0xEE, &to).unwrap();

    // All 129 of them whole.
    let (from, to) = (ids(0..129), ids((1..130).rev()));
    src.fill_pattern(2, None).unwrap();
    ctx.transfer(&src, &dst, &from, &to, &TransferOptions::default()).unwrap().wait(Some(PATIENCE)).unwrap();
    dst.verify_pattern(2, Some(&to), Some(&from), None).unwrap();
}

/// Memory that says when it goes.
struct Told {
    _buffer: HostBuffer,
    gone: Arc<AtomicBool>,
}

impl Drop for Told {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::SeqCst);
    }
}

#[test]
fn memory_let_go_while_a_job_is_pending_stays_until_its_end() {
    let template = small_pair().0.layout().clone();
    let lent = || {
        let len = template.region_bytes();
        let (buffer, gone) = (
            HostBuffer::new(len as usize, HostOptions::default()).unwrap(),
            Arc::new(AtomicBool::new(false)),
        );
        let addr = buffer.addr();
        let owner = Arc::new(Told { _buffer: buffer, gone: gone.clone() });
        // SAFETY: the owner keeps the buffer mapped.
        let region = unsafe { HostRegion::from_raw(addr, len, true, owner) };
        let regions = vec![Region::Host(region)];
        (PhysicalLayout::from_regions(template.clone(), MemoryKind::System, regions).unwrap(), gone)
    };
    for (per_layer, by_route) in [(false, false), (true, false), (false, true)] {
        let ((src, src_gone), (middle, middle_gone)) = (lent(), lent());
        let (_, dst) = small_pair();
        src.fill(5).unwrap();
        let (ctx, gate, one) = (context(1), Gate::new(), [BlockId(2)]);
        let mut options = after(&[&gate.job]);
        options.per_layer = per_layer;
        let first = if by_route {
            ctx.route(&src, &middle, &options).unwrap().submit(&one, &one).unwrap()
        } else {
            ctx.transfer(&src, &middle, &one, &one, &options).unwrap()
        };
        let second = ctx.transfer(&middle, &dst, &one, &one, &after(&[&first])).unwrap();
        drop((src, middle, options, first));
        assert!(!src_gone.load(Ordering::SeqCst) && !middle_gone.load(Ordering::SeqCst));
        gate.open();
        second.wait(Some(PATIENCE)).unwrap();
        let mut block = vec![0; 512];
        dst.host_region(0).unwrap().read(1024, &mut block).unwrap();
        assert!(block.iter().all(|&byte| byte == 5));
        ctx.close(Some(PATIENCE)).unwrap();
        // The context keeps plans, not memory.
        assert!(src_gone.load(Ordering::SeqCst) && middle_gone.load(Ordering::SeqCst));
    }
}

#[test]
fn regions_of_wrong_number_size_and_base() {
    let layout = Layout::of_kind(opaque(4, 3, 64).to_builder().alignment(16).build().unwrap(), LW).unwrap();
    let len = layout.region_bytes();
    let (good, whole, _) = at_offsets(&layout, &[0, 16, 32]);
    let regions = good.regions().to_vec();
    let bind = |regions| {
        PhysicalLayout::from_regions(layout.clone(), MemoryKind::System, regions).err().map(|error| {
            match error {
                Error::Layout(error) => error,
                other => panic!("{other:?}"),
            }
        })
    };
    assert_eq!(bind(regions.clone()), None);
    for count in [0, 1, 2, 4] {
        let error = bind(regions.iter().cycle().take(count).cloned().collect());
        let expected =
            LayoutError::RegionCount { kind: layout.kind().name(), expected: 3, got: count as u64 };
        assert_eq!(error, Some(expected));
    }
    for at in 0..3 {
        let mut short = regions.clone();
        let start = good.spans()[at].addr - whole.addr();
        short[at] = Region::Host(whole.part(start, len - 1).unwrap());
        let expected = LayoutError::RegionTooSmall { region: at as u64, needed: len, got: len - 1 };
        assert_eq!(bind(short), Some(expected));
        for off in [1, 2, 4, 8] {
            let mut shifted = regions.clone();
            shifted[at] = Region::Host(whole.part(start + off, len).unwrap());
            let expected = LayoutError::Misaligned {
                region: at as u64,
                addr: good.spans()[at].addr + off,
                alignment: 16,
            };
            assert_eq!(bind(shifted), Some(expected));
        }
    }
}
