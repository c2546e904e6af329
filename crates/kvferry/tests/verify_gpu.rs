//! Fills and checks give on device memory what they give on host memory with the same bytes. Runs on a GPU or on the
//! simulated driver (cuda/fake), with or without kernels; skips without either, unless `KVFERRY_REQUIRE_GPU=1`.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::layouts::{Dice, Made, alignment, cases, dims, form, ids, own_kinds};
use common::{Bound, FC, config, made};
use kvferry::cuda::{DeviceBuffer, DeviceRegion, Driver, PinnedBuffer, PrimaryContext};
use kvferry::layout::oracle::{OracleLayout, POISON};
use kvferry::layout::{Axis, ForeignArray};
use kvferry::{BlockId, Dtype, Error, KvOrder, Layout, LayoutKind, MemoryKind, PhysicalLayout, Region};
use proptest::prelude::*;

/// Number of GPUs; 0 skips.
fn gpus() -> u32 {
    match Driver::get() {
        Ok(driver) => driver.device_count(),
        Err(error) if std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("KVFERRY_REQUIRE_GPU=1 and there is no GPU: {error}")
        }
        Err(_) => 0,
    }
}

/// The same layout with the same bytes, guards included, in host memory and on the last device.
struct Twins {
    host: Bound,
    /// As `host.layout`.
    device: Arc<PhysicalLayout>,
    whole: DeviceRegion,
}

impl Twins {
    fn new(made: Made, skew: u64) -> Twins {
        let ordinal = gpus() - 1;
        let host = Bound::new(made, skew);
        let bytes = host.dump();
        let whole = DeviceRegion::of_buffer(Arc::new(DeviceBuffer::new(bytes.len(), ordinal).unwrap()));
        whole.write(0, &bytes).unwrap();
        let base = host.whole.addr();
        let regions = (host.layout.spans().iter())
            .map(|span| Region::Device(whole.part(span.addr - base, span.len).unwrap()))
            .collect();
        let kind = MemoryKind::Device(ordinal);
        let device = PhysicalLayout::from_regions(host.layout.layout().clone(), kind, regions).unwrap();
        Twins { host, device, whole }
    }

    fn with_page_size(self, page: u64) -> (Arc<PhysicalLayout>, Arc<PhysicalLayout>, Twins) {
        (self.host.layout.with_page_size(page).unwrap(), self.device.with_page_size(page).unwrap(), self)
    }

    fn dump(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.whole.len() as usize];
        self.whole.read(0, &mut bytes).unwrap();
        bytes
    }

    fn equal(&self) -> bool {
        self.dump() == self.host.dump()
    }

    /// Changes one byte of both, in a region or between regions.
    fn flip(&self, dice: &mut Dice) {
        let offset = dice.below(self.whole.len());
        let found = self.host.dump()[offset as usize] ^ 0x10;
        self.whole.write(offset, &[found]).unwrap();
        self.host.whole.write(offset, &[found]).unwrap();
    }
}

/// What a call gives on either memory, errors in full.
fn both<T: std::fmt::Debug>(
    layouts: [&PhysicalLayout; 2],
    call: impl Fn(&PhysicalLayout) -> kvferry::Result<T>,
) -> (String, bool) {
    let [host, device] = layouts.map(&call);
    let (shown, found) = (format!("{host:?}"), format!("{device:?}"));
    assert_eq!(shown, found);
    (shown, host.is_ok())
}

/// Every call on both, with a breach and without.
fn same(made: Made, page: u64, skew: u64, seed: u64) {
    let (host, device, twins) = Twins::new(made, skew).with_page_size(page);
    let layouts = [&*host, &*device];
    let mut dice = Dice(seed);
    let count = host.layout().config().num_blocks();
    let mut some: Vec<BlockId> = ids(0..count);
    dice.shuffle(&mut some);
    some.truncate(1 + dice.below(count) as usize);
    let layers = dice.range(host.layout().config().num_layers());

    assert!(both(layouts, |l| l.fill_pattern(seed, Some(&some))).1);
    assert!(twins.equal(), "fill_pattern of some");
    assert!(both(layouts, |l| l.check_fill(POISON, &some)).1);
    assert!(both(layouts, |l| l.verify_pattern(seed, Some(&some), None, Some(layers.clone()))).1);
    both(layouts, |l| l.check_fill(POISON, &some[1..]));
    assert!(both(layouts, |l| l.fill_pattern(seed, None)).1);
    assert!(twins.equal(), "fill_pattern of all");
    some.push(some[0]);
    assert!(both(layouts, |l| l.checksum(&some, Some(layers.clone()))).1);
    for _ in 0..4 {
        twins.flip(&mut dice);
        both(layouts, |l| l.verify_pattern(seed, None, None, None));
        both(layouts, |l| l.check_fill(POISON, &ids(0..count)));
        both(layouts, |l| l.checksum(&some, None));
    }
    assert!(twins.equal());
    assert!(both(layouts, |l| l.fill(0x3C)).1);
    assert!(twins.equal(), "fill");
    assert!(both(layouts, |l| l.check_fill(0x3C, &[])).1);
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn small_layouts(
        dims in dims(4), form in form(), alignment in alignment(), split in 1u64..=3, skew in 0u64..16, seed: u64,
    ) {
        if gpus() > 0 {
            let page = dims.page;
            let stored = common::layouts::Dims { page: page * split, ..dims };
            same(Made::new(stored.config(alignment), &form), page, skew, seed);
        }
    }
}

/// Large enough that rows of a chunk lie too far apart for one copy, and that guarded bytes need many.
#[test]
fn large_layouts() {
    if gpus() == 0 {
        return;
    }
    let sizes = config(3, 24, 16, 4, 128);
    for (index, kind) in own_kinds().into_iter().enumerate() {
        same(made(sizes, kind), [16, 4][index % 2], 1, index as u64);
    }
}

/// Tokens outside of blocks, and gaps between rows: every chunk is several parts, each with bytes that must stay.
#[test]
fn parts_with_gaps() {
    if gpus() == 0 {
        return;
    }
    let axes = [Axis::Page, Axis::Block, Axis::Head, Axis::Dim];
    let strides = [100_000, 900, 160, 2];
    let shape = vec![8, 3, 4, 64];
    let array = |layer| ForeignArray {
        name: format!("layers[{layer}]"),
        shape: shape.clone(),
        strides: strides.map(|stride| stride as i64).to_vec(),
    };
    let arrays = [array(0), array(1)];
    let layout = Layout::from_arrays(&arrays, &axes, false, Dtype::BFloat16, None).unwrap();
    let named: Vec<(Axis, u64)> = axes.into_iter().zip(strides).collect();
    let oracle = OracleLayout::foreign(layout.config(), &named, false);
    for seed in 0..4 {
        same(Made { layout: layout.clone(), oracle: oracle.clone() }, [8, 4][seed as usize % 2], 1, seed);
    }
}

/// The first of several wrong bytes is named, wherever it lies.
#[test]
fn breaches_are_found_at_every_place() {
    if gpus() == 0 {
        return;
    }
    // Regions of 3 MiB, payload with holes in it.
    let twins = Twins::new(made(config(12, 1, 64, 8, 128), LayoutKind::SplitKv { order: KvOrder::Nhd }), 5);
    let len = twins.device.spans()[1].len;
    assert_eq!(len, 12 * 64 * 8 * 256);
    for at in [0, 1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, len - 1] {
        let (Region::Device(region), block) = (&twins.device.regions()[1], at / (64 * 8 * 256)) else {
            panic!()
        };
        let mut byte = [0];
        region.read(at, &mut byte).unwrap();
        region.write(at, &[byte[0] ^ 1]).unwrap();
        // Later bytes are not the first.
        region.write(len - 1, &[POISON ^ 1]).unwrap();
        let refused = twins.device.check_fill(POISON, &[]);
        let Err(Error::Guard(breach)) = refused else { panic!("{refused:?}") };
        assert_eq!((breach.region, breach.offset, breach.found), (1, at, POISON ^ 1));
        assert_eq!(breach.block, Some(BlockId(block as u32)));
        // Not looked at where the block is excepted.
        let except = ids([block, 11]);
        twins.device.check_fill(POISON, &except).unwrap();
        region.fill(0, len, POISON).unwrap();
    }
}

#[test]
fn what_is_refused_writes_nothing() {
    if gpus() == 0 {
        return;
    }
    let twins = Twins::new(made(config(4, 2, 2, 2, 16), FC), 0);
    let layouts = [&*twins.host.layout, &*twins.device];
    for list in [ids([1, 4]), ids([2, 0, 2])] {
        assert!(!both(layouts, |l| l.fill_pattern(1, Some(&list))).1);
    }
    assert!(!both(layouts, |l| l.checksum(&ids([4]), None)).1);
    assert!(!both(layouts, |l| l.verify_pattern(1, Some(&ids([4])), None, None)).1);
    assert!(!both(layouts, |l| l.check_fill(1, &ids([4]))).1);
    assert!(!both(layouts, |l| l.checksum(&ids([0]), Some(0..3))).1);
    assert!(both(layouts, |l| l.checksum(&[], None)).1);

    // Lent for reading only, in part: checks work, nothing writes.
    let shared = made(config(2, 1, 2, 2, 16), LayoutKind::SplitKv { order: KvOrder::Nhd });
    let two = Twins::new(shared.clone(), 0);
    let lent = (two.device.regions().iter().enumerate())
        .map(|(index, region)| match region {
            Region::Device(region) if index == 1 => Region::Device(region.clone().read_only()),
            region => region.clone(),
        })
        .collect();
    let kind = two.device.memory_kind();
    let lent = PhysicalLayout::from_regions(shared.layout.clone(), kind, lent).unwrap();
    assert_eq!(lent.read_only_region(), Some(1));
    for refused in [lent.fill(1), lent.fill_pattern(1, None)] {
        assert!(matches!(refused, Err(Error::ReadOnlyDestination { region: 1 })), "{refused:?}");
    }
    lent.check_fill(POISON, &[]).unwrap();
    assert_eq!(lent.checksum(&ids([0]), None).unwrap(), two.device.checksum(&ids([0]), None).unwrap());

    // One tensor given twice.
    let twice = vec![two.device.regions()[0].clone(); 2];
    let twice = PhysicalLayout::from_regions(shared.layout, kind, twice).unwrap();
    let refused = twice.fill_pattern(1, None);
    assert!(matches!(refused, Err(Error::Layout(_))), "{refused:?}");
    assert!(twins.equal() && two.equal());

    // The CPU cannot look at it directly.
    assert!(matches!(twins.device.host_region(0), Err(Error::Unsupported { .. })));
}

#[test]
fn allocated_memory_is_filled_and_checked() {
    if gpus() == 0 {
        return;
    }
    let layout = made(config(4, 3, 4, 2, 16), LayoutKind::BlockPool { order: KvOrder::Hnd }).layout;
    let host = PhysicalLayout::allocate(layout.clone(), MemoryKind::System).unwrap();
    host.fill_pattern(3, None).unwrap();
    let sums = host.checksum(&ids(0..4), None).unwrap();
    for kind in (0..gpus()).map(MemoryKind::Device).chain([MemoryKind::Pinned]) {
        let there = PhysicalLayout::allocate(layout.clone(), kind).unwrap();
        there.fill(0x77).unwrap();
        there.fill_pattern(3, None).unwrap();
        there.check_fill(0x77, &ids(0..4)).unwrap();
        there.verify_pattern(3, None, None, None).unwrap();
        assert_eq!(there.checksum(&ids(0..4), None).unwrap(), sums);
    }
}

#[test]
fn pinned_memory_is_made_through_the_current_device() {
    if gpus() == 0 {
        return;
    }
    let via = |asked: Option<u32>| {
        let layout = made(config(2, 1, 2, 2, 16), FC).layout;
        let pinned = match asked {
            None => PhysicalLayout::allocate(layout, MemoryKind::Pinned).unwrap(),
            asked => PhysicalLayout::allocate_pinned(layout, asked).unwrap(),
        };
        assert_eq!(pinned.memory_kind(), MemoryKind::Pinned);
        pinned.fill(1).unwrap();
        let owner = pinned.host_region(0).unwrap().owner().clone();
        owner.downcast::<PinnedBuffer>().unwrap().ordinal()
    };
    let last = gpus() - 1;
    // A fresh thread: nothing is current there.
    std::thread::spawn(move || {
        assert_eq!((via(None), via(Some(last))), (0, last));
        let context = PrimaryContext::get(last).unwrap();
        let current = context.enter().unwrap();
        assert_eq!((via(None), via(Some(0))), (last, 0));
        drop(current);
        assert_eq!(via(None), 0);
    })
    .join()
    .unwrap();
    let layout = made(config(2, 1, 2, 2, 16), FC).layout;
    let refused = PhysicalLayout::allocate_pinned(layout, Some(gpus()));
    assert!(matches!(refused, Err(Error::Cuda(_))), "{refused:?}");
}
