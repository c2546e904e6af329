//! Element types. kvferry moves bytes; a type is a width and a name to compare.

use std::fmt;
use std::str::FromStr;

use crate::error::LayoutError;

macro_rules! dtypes {
    ($($variant:ident, $name:literal, $bits:literal, $doc:literal;)*) => {
        /// Element type of a cache.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Dtype {
            $(#[doc = $doc] $variant,)*
        }

        impl Dtype {
            /// Every type, in table order.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant),*];

            /// The name as users type it (torch's and NumPy's).
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Width in bits.
            pub const fn bits(self) -> u32 {
                match self { $(Dtype::$variant => $bits,)* }
            }
        }
    };
}

dtypes! {
    Float16, "float16", 16, "IEEE half.";
    BFloat16, "bfloat16", 16, "bfloat16.";
    Float32, "float32", 32, "IEEE single.";
    Float64, "float64", 64, "IEEE double.";
    Float8E4M3Fn, "float8_e4m3fn", 8, "FP8, 4 exponent bits, no infinities (OCP OFP8).";
    Float8E5M2, "float8_e5m2", 8, "FP8, 5 exponent bits (OCP OFP8).";
    Int8, "int8", 8, "Signed byte.";
    UInt8, "uint8", 8, "Byte; also opaque pages.";
    Int16, "int16", 16, "Signed 16 bits.";
    Int32, "int32", 32, "Signed 32 bits.";
    Int64, "int64", 64, "Signed 64 bits.";
}

impl Dtype {
    /// Width in bytes. Every type here is a whole number of bytes.
    pub const fn bytes(self) -> u64 {
        (self.bits() / 8) as u64
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = LayoutError;

    /// Accepts the plain name and torch's `torch.` prefix.
    fn from_str(name: &str) -> Result<Self, LayoutError> {
        let plain = name.strip_prefix("torch.").unwrap_or(name);
        Dtype::ALL
            .iter()
            .copied()
            .find(|dtype| dtype.name() == plain)
            .ok_or_else(|| LayoutError::UnknownDtype { name: name.to_owned() })
    }
}
