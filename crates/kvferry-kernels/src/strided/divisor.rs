//! Division by a number known beforehand.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Divides integers below 2^31 by `count` with one multiplication, exactly.
///
/// With `shift = ceil(log2 count)` and `mul = ceil(2^(31 + shift) / count)`, `n / count` is `n * mul >> (31 + shift)`:
/// `mul` is too large by less than 1 in units of `1 / count`, which adds less than `1 / count` to the quotient while
/// `n < 2^31`. The product is taken of `2n`, so that `count = 1` needs no case of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Divisor {
    count: u32,
    mul: u32,
    shift: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Divisor>() == 16 && align_of::<Divisor>() == 4);

impl Divisor {
    /// Largest divisor, and one more than the largest dividend.
    pub const LIMIT: u32 = 1 << 31;

    /// For `1..=LIMIT`; `None` outside.
    #[must_use]
    pub const fn new(count: u64) -> Option<Self> {
        if count == 0 || count > Self::LIMIT as u64 {
            return None;
        }
        let shift = u64::BITS - (count - 1).leading_zeros();
        let mul = (1_u64 << (31 + shift)).div_ceil(count);
        Some(Self { count: count as u32, mul: mul as u32, shift, reserved: 0 })
    }

    /// The divisor.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// `n / count`, as the kernels compute it; `n` is below [`Divisor::LIMIT`].
    #[must_use]
    pub const fn divide(&self, n: u32) -> u32 {
        (((n << 1) as u64 * self.mul as u64) >> 32) as u32 >> self.shift
    }

    /// Division by 1.
    pub(crate) const ONE: Self = Self { count: 1, mul: 1 << 31, shift: 0, reserved: 0 };
}
