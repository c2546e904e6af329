//! Checked 63-bit arithmetic: every product of sizes goes through here.

use crate::error::LayoutError;

/// Largest byte count or offset: offsets must also fit a signed 64-bit register.
pub(crate) const MAX_BYTES: u64 = i64::MAX as u64;

pub(crate) fn mul(a: u64, b: u64, what: &'static str) -> Result<u64, LayoutError> {
    a.checked_mul(b).filter(|&v| v <= MAX_BYTES).ok_or(LayoutError::Overflow { what })
}

pub(crate) fn add(a: u64, b: u64, what: &'static str) -> Result<u64, LayoutError> {
    a.checked_add(b).filter(|&v| v <= MAX_BYTES).ok_or(LayoutError::Overflow { what })
}

/// Rounds up to a power of two `to`.
pub(crate) fn round_up(value: u64, to: u64, what: &'static str) -> Result<u64, LayoutError> {
    Ok(add(value, to - 1, what)? & !(to - 1))
}
