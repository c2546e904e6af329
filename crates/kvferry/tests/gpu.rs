//! Random transfers through every GPU engine give exactly the oracle's bytes, guards and padding included. Runs on a GPU
//! or on the simulated driver (cuda/fake); skips without either, unless `KVFERRY_REQUIRE_GPU=1`.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a failing helper fails its test")]

mod common;

use std::sync::Arc;

use common::layouts::Made;
use common::layouts::cases;
use common::layouts::pairs::{Case, case};
use kvferry::cuda::{DeviceBuffer, DeviceRegion, Driver, PinnedBuffer};
use kvferry::host::{HostBuffer, HostOptions, HostRegion};
use kvferry::layout::oracle::{self, POISON};
use kvferry::{
    Engine, Error, MemoryKind, PhysicalLayout, Region, TransferContext, TransferOptions, TransferStrategy,
};
use proptest::prelude::*;

const GUARD: u64 = 96;

fn gpus() -> u32 {
    match Driver::get() {
        Ok(driver) => driver.device_count(),
        Err(error) if std::env::var_os("KVFERRY_REQUIRE_GPU").is_some_and(|v| v == "1") => {
            panic!("KVFERRY_REQUIRE_GPU=1 and there is no GPU: {error}")
        }
        Err(_) => 0,
    }
}

enum Whole {
    Host(HostRegion),
    Device(Arc<DeviceBuffer>),
}

/// A layout in guarded memory of any kind.
struct Bound {
    made: Made,
    layout: Arc<PhysicalLayout>,
    whole: Whole,
    len: usize,
    starts: Vec<u64>,
}

impl Bound {
    fn new(made: Made, skew: u64, kind: MemoryKind) -> Bound {
        let (count, len) = (made.layout.num_regions(), made.layout.region_bytes());
        let alignment = made.layout.config().alignment();
        let first = if alignment == 1 { GUARD + skew } else { GUARD.next_multiple_of(alignment) };
        let step = (len + GUARD).next_multiple_of(alignment);
        let total = (first + count * step) as usize;
        let starts: Vec<u64> = (0..count).map(|index| first + index * step).collect();
        let (whole, regions): (Whole, Vec<Region>) = match kind {
            MemoryKind::Device(ordinal) => {
                let buffer = Arc::new(DeviceBuffer::new(total, ordinal).unwrap());
                let region = DeviceRegion::of_buffer(buffer.clone());
                let part = |&start: &u64| Region::Device(region.part(start, len).unwrap());
                (Whole::Device(buffer), starts.iter().map(part).collect())
            }
            kind => {
                let region = if kind == MemoryKind::Pinned {
                    PinnedBuffer::new(total, 0).unwrap().into_region()
                } else {
                    HostRegion::of_buffer(Arc::new(HostBuffer::new(total, HostOptions::default()).unwrap()))
                };
                let parts =
                    starts.iter().map(|&start| Region::Host(region.part(start, len).unwrap())).collect();
                (Whole::Host(region), parts)
            }
        };
        let layout = PhysicalLayout::from_regions(made.layout.clone(), kind, regions).unwrap();
        let bound = Bound { made, layout, whole, len: total, starts };
        bound.write(&vec![POISON; total]);
        bound
    }

    fn write(&self, bytes: &[u8]) {
        match &self.whole {
            Whole::Host(region) => region.write(0, bytes).unwrap(),
            Whole::Device(buffer) => buffer.copy_from_host(0, bytes).unwrap(),
        }
    }

    fn dump(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        match &self.whole {
            Whole::Host(region) => region.read(0, &mut bytes).unwrap(),
            Whole::Device(buffer) => buffer.copy_to_host(0, &mut bytes).unwrap(),
        }
        bytes
    }

    fn image(&self, mem: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![POISON; self.len];
        for (region, &start) in mem.iter().zip(&self.starts) {
            bytes[start as usize..][..region.len()].copy_from_slice(region);
        }
        bytes
    }

    fn poisoned(&self) -> Vec<Vec<u8>> {
        let mut mem = self.made.oracle.alloc();
        oracle::poison(&mut mem);
        mem
    }

    fn fill_unique(&self) -> Vec<Vec<u8>> {
        let mut mem = self.poisoned();
        self.made.oracle.fill_unique(&mut mem, 0x5EED);
        self.write(&self.image(&mem));
        mem
    }
}

fn check(
    case: Case,
    skew: [u64; 2],
    kinds: [MemoryKind; 2],
    engine: Option<Engine>,
    per_layer: bool,
    ctx: &TransferContext,
) -> Result<(), TestCaseError> {
    let (src, dst) = (Bound::new(case.src, skew[0], kinds[0]), Bound::new(case.dst, skew[1], kinds[1]));
    let src_mem = src.fill_unique();
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
    let options = TransferOptions {
        layers: case.request.layers,
        heads: case.request.heads,
        transform: case.request.transform,
        engine,
        per_layer,
        ..TransferOptions::default()
    };
    let job = match ctx.transfer(&src.layout, &dst.layout, &case.src_ids, &case.dst_ids, &options) {
        Ok(job) => job,
        Err(Error::Unsupported { what, why }) => {
            prop_assert!(engine.is_some(), "{what}: {why}");
            return Ok(());
        }
        Err(error) => panic!("{error}"),
    };
    let result = job.wait(Some(common::PATIENCE)).unwrap();
    prop_assert!(dst.dump() == dst.image(&expected), "wrong bytes in the destination by {:?}", result.engine);
    prop_assert!(src.dump() == src.image(&src_mem), "the source changed");
    prop_assert_eq!(result.strategy, TransferStrategy::between(kinds[0], kinds[1]));
    prop_assert_eq!(ctx.in_flight(), 0);
    Ok(())
}

fn context() -> TransferContext {
    TransferContext::builder().device(0).threads(2).build().unwrap()
}

const DEVICE: MemoryKind = MemoryKind::Device(0);

fn directions() -> Vec<[MemoryKind; 2]> {
    let mut all = vec![
        [MemoryKind::Pinned, DEVICE],
        [DEVICE, MemoryKind::Pinned],
        [DEVICE, DEVICE],
        [MemoryKind::System, DEVICE],
        [DEVICE, MemoryKind::System],
    ];
    if gpus() > 1 {
        all.extend([[DEVICE, MemoryKind::Device(1)], [MemoryKind::Device(1), DEVICE]]);
    }
    all
}

proptest! {
    #![proptest_config(cases(600))]

    #[test]
    fn like_the_oracle(
        case in case(6), skew in [0u64..16, 0u64..16], direction in any::<prop::sample::Index>(),
        engine in prop::sample::select(vec![None, Some(Engine::Kernel), Some(Engine::Batch), Some(Engine::Staged)]),
        per_layer: bool,
    ) {
        if gpus() > 0 {
            thread_local!(static CTX: TransferContext = context());
            let all = directions();
            let kinds = all[direction.index(all.len())];
            CTX.with(|ctx| check(case, skew, kinds, engine, per_layer, ctx))?;
        }
    }
}
