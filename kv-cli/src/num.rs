//! The few number conversions the program needs, each in one place.

/// Indexes are `usize`, geometry is `u32`; this program runs where the first holds the second.
pub(crate) fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Counts of tokens and blocks; beyond `u32` they are refused elsewhere.
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Lengths as bytes.
pub(crate) fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// For reports: exact up to 2^53.
#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn to_f64(n: u64) -> f64 {
    n as f64
}
