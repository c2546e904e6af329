//! Parameters kept from call to call.

use zerocopy::IntoBytes;

use super::build::LaunchShape;
use super::params::{items_offset, put};
use super::{ExchangeFlags, ExchangeHeader, ExchangeItemParams, ExchangePart, PLACE_ALIGN};
use crate::Kernel;

/// Of an address: what the width of words depends on.
const LOW_BITS: u64 = 15;

/// The parameters of a call, for inputs and landing places that change from call to call. Aiming it costs some
/// nanoseconds per item; [`ExchangeCall::build`](super::ExchangeCall::build) costs a hundred.
#[derive(Clone, Debug)]
pub struct ExchangeTemplate {
    words: Box<[u64]>,
    header: ExchangeHeader,
    kernel: Kernel,
    shape: LaunchShape,
    /// Per item: the input that it reads, and where it begins there (wrapping).
    sources: Box<[(usize, u64)]>,
    /// Low bits of the inputs' addresses.
    low: Box<[u64]>,
}

impl ExchangeTemplate {
    pub(super) fn new(
        bytes: &[u8],
        header: ExchangeHeader,
        kernel: Kernel,
        shape: LaunchShape,
        sources: Box<[(usize, u64)]>,
        bases: &[u64],
    ) -> Self {
        let mut words = vec![0; bytes.len().div_ceil(8)].into_boxed_slice();
        put(words.as_mut_bytes(), 0, bytes);
        let low = bases.iter().map(|base| base & LOW_BITS).collect();
        Self { words, header, kernel, shape, sources, low }
    }

    /// Whether it serves inputs at these addresses: they must be aligned as those that it was built with.
    #[must_use]
    pub fn fits(&self, bases: &[u64]) -> bool {
        self.low.len() == bases.len() && self.low.iter().zip(bases).all(|(low, base)| *low == base & LOW_BITS)
    }

    /// Points it at inputs that it [`fits`](Self::fits), and at a landing place in the own pool (a multiple of [`PLACE_ALIGN`] that
    /// leaves room for the results; the caller checks both).
    pub fn aim(&mut self, bases: &[u64], place: u64, hash: u64) {
        debug_assert!(self.fits(bases) && place.is_multiple_of(PLACE_ALIGN), "{bases:x?} {place:#x}");
        (self.header.place, self.header.hash) = (place, hash);
        let items = items_offset(self.kernel == Kernel::ExchangeLarge) / 8;
        let step = size_of::<ExchangeItemParams>() / 8;
        // `src` is the first word of an item.
        let slots = self.words.get_mut(items..).unwrap_or_default().iter_mut().step_by(step);
        for (slot, &(input, offset)) in slots.zip(&self.sources) {
            *slot = bases.get(input).copied().unwrap_or(0).wrapping_add(offset);
        }
    }

    /// The launch that does these steps of the call. Valid until the next part is asked for.
    pub fn part(&mut self, flags: ExchangeFlags) -> ExchangePart<'_> {
        self.header.flags = flags.bits();
        put(self.words.as_mut_bytes(), 0, self.header.as_bytes());
        ExchangePart {
            kernel: self.kernel,
            geometry: self.shape.geometry(flags, self.header.lanes),
            params: self.words.as_bytes(),
        }
    }

    /// Bytes of the results from the landing place on.
    #[must_use]
    pub const fn result_bytes(&self) -> u64 {
        self.header.result_bytes
    }
}

const _: () = assert!(std::mem::offset_of!(ExchangeItemParams, src) == 0);
const _: () = assert!(items_offset(false).is_multiple_of(8) && items_offset(true).is_multiple_of(8));

#[cfg(test)]
mod tests {
    use crate::{
        ExchangeCall, ExchangeFlags, ExchangeGrid, ExchangeLimits, ExchangeLoop, ExchangeParamBuffer,
        ExchangePeer, ExchangePiece, Kernel,
    };

    /// What a call built for these addresses launches, in the parts that calls have.
    fn built(world: usize, bases: &[u64], place: u64, hash: u64, template: bool) -> Vec<(Kernel, Vec<u8>)> {
        let loops = [ExchangeLoop { count: 5, src_stride: -640, dst_stride: 64 }];
        let piece = |target: usize, input: usize, at: &[u64]| ExchangePiece {
            src: at[input] + 64 * target as u64,
            dst_offset: 320 * input as u64,
            run_bytes: 64,
            loops: &loops,
        };
        let pieces = |at: &[u64]| -> Vec<Vec<ExchangePiece<'_>>> {
            (0..world).map(|target| (0..at.len()).map(|input| piece(target, input, at)).collect()).collect()
        };
        let peers: Vec<_> = (0..world as u64)
            .map(|at| ExchangePeer {
                control: 1 << (20 + at % 8),
                pool: (1 << 30) + (at << 20),
                pool_bytes: 1 << 20,
            })
            .collect();
        let limits = ExchangeLimits { sm_count: 4, num_sms: None, max_block: 1024 };
        let grid = ExchangeGrid::choose(&vec![640; world], &limits);
        let parts = [ExchangeFlags::OPEN, ExchangeFlags::MOVE, ExchangeFlags::WHOLE];
        let mut buffer = ExchangeParamBuffer::new();
        // A template is built for other addresses than it is used with.
        let first: Vec<u64> =
            if template { bases.iter().map(|base| base + (7 << 24)).collect() } else { bases.into() };
        let pieces = pieces(&first);
        let call = ExchangeCall {
            rank: 1,
            peers: &peers,
            state: 4096,
            host_page: 8192,
            op: 3,
            hash: if template { 1 } else { hash },
            place: if template { 0 } else { place },
            result_bytes: 1280,
            pieces: &pieces,
            grid,
            copy_engine: false,
        };
        let mut launch = call.build(&mut buffer).unwrap();
        let owned = |part: crate::ExchangePart<'_>| (part.kernel, part.params.to_vec());
        if !template {
            return parts.map(|flags| owned(launch.part(flags))).into();
        }
        let mut kept = launch.template(&first, |_, index| index);
        assert!(kept.fits(bases) && !kept.fits(&bases[1..]));
        assert!(!kept.fits(&bases.iter().map(|base| base + 8).collect::<Vec<_>>()));
        kept.aim(bases, place, hash);
        for flags in parts {
            assert_eq!(kept.part(flags).geometry, launch.part(flags).geometry);
        }
        parts.map(|flags| owned(kept.part(flags))).into()
    }

    #[test]
    fn aimed_templates_are_what_would_have_been_built() {
        for (world, inputs) in [(2, 1), (2, 3), (8, 3), (9, 2), (33, 4)] {
            let bases: Vec<u64> = (0..inputs as u64).map(|at| (1 << 40) + (at << 26) + at).collect();
            let fresh = built(world, &bases, 4096, 0xABCD, false);
            assert!(fresh == built(world, &bases, 4096, 0xABCD, true), "{world} ranks, {inputs} inputs");
        }
    }
}
