//! Names of the kernels and of the modules that hold them.

/// One compiled `.cu` file: the unit that a driver loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Module {
    /// `cuda/vectorized_copy.cu`.
    VectorizedCopy,
    /// `cuda/strided_copy.cu`.
    StridedCopy,
    /// `cuda/exchange.cu`.
    Exchange,
}

impl Module {
    /// Every module; `module as usize` is its index here, so that caches can be arrays.
    pub const ALL: &'static [Self] = &[Self::VectorizedCopy, Self::StridedCopy, Self::Exchange];

    /// The file stem of its source.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VectorizedCopy => "vectorized_copy",
            Self::StridedCopy => "strided_copy",
            Self::Exchange => "exchange",
        }
    }
}

/// One entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kernel {
    /// Copies pairs of equally long runs named by two pointer tables.
    VectorizedCopy,
    /// Copies blocks between strided layouts by chunks of runs; parameters of 4,096 bytes.
    StridedTile,
    /// The same with parameters of 32,760 bytes.
    StridedTileLarge,
    /// Copies blocks between strided layouts unit by unit; parameters of 4,096 bytes.
    StridedWord,
    /// The same with parameters of 32,760 bytes.
    StridedWordLarge,
    /// One call of the head exchange, or a part of one; parameters for 8 ranks and 24 items.
    Exchange,
    /// The same with parameters for 64 ranks and 202 items.
    ExchangeLarge,
    /// Readies the words with which the copy engine tells of its arrival.
    ExchangeArrive,
    /// Tests writes, order and atomics between all ranks.
    ExchangeProbe,
}

impl Kernel {
    /// Every kernel; `kernel as usize` is its index here, so that caches can be arrays.
    pub const ALL: &'static [Self] = &[
        Self::VectorizedCopy,
        Self::StridedTile,
        Self::StridedTileLarge,
        Self::StridedWord,
        Self::StridedWordLarge,
        Self::Exchange,
        Self::ExchangeLarge,
        Self::ExchangeArrive,
        Self::ExchangeProbe,
    ];

    /// The symbol to look up in [`Kernel::module`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::VectorizedCopy => "vectorized_copy",
            Self::StridedTile => "strided_tile",
            Self::StridedTileLarge => "strided_tile_large",
            Self::StridedWord => "strided_word",
            Self::StridedWordLarge => "strided_word_large",
            Self::Exchange => "exchange",
            Self::ExchangeLarge => "exchange_large",
            Self::ExchangeArrive => "exchange_arrive",
            Self::ExchangeProbe => "exchange_probe",
        }
    }

    /// The module that holds it.
    #[must_use]
    pub const fn module(self) -> Module {
        match self {
            Self::VectorizedCopy => Module::VectorizedCopy,
            Self::StridedTile | Self::StridedTileLarge | Self::StridedWord | Self::StridedWordLarge => {
                Module::StridedCopy
            }
            Self::Exchange | Self::ExchangeLarge | Self::ExchangeArrive | Self::ExchangeProbe => {
                Module::Exchange
            }
        }
    }

    /// Bytes of its parameter struct.
    #[must_use]
    pub const fn param_bytes(self) -> usize {
        match self {
            Self::VectorizedCopy => size_of::<crate::VectorizedCopyParams>(),
            Self::StridedTile | Self::StridedWord => crate::PARAM_BYTES_SMALL,
            Self::StridedTileLarge | Self::StridedWordLarge => crate::PARAM_BYTES_LARGE,
            Self::Exchange => crate::EXCHANGE_PARAM_BYTES_SMALL,
            Self::ExchangeLarge => crate::EXCHANGE_PARAM_BYTES_LARGE,
            Self::ExchangeArrive => size_of::<crate::ExchangeArriveParams>(),
            Self::ExchangeProbe => size_of::<crate::ExchangeProbeParams>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_match_positions() {
        for (index, kernel) in Kernel::ALL.iter().enumerate() {
            assert_eq!(*kernel as usize, index);
        }
        for (index, module) in Module::ALL.iter().enumerate() {
            assert_eq!(*module as usize, index);
            assert!(Kernel::ALL.iter().any(|kernel| kernel.module() == *module));
        }
    }
}
