//! Number conversions of this crate, each in one place.

/// Converts a size to an index; `usize` has at least 32 bits here.
pub(crate) fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Converts a count of tokens or blocks; counts beyond `u32` are refused elsewhere.
pub(crate) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Converts a length to bytes.
pub(crate) fn to_u64(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

/// Converts a count for a figure; exact up to 2^53.
#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn to_f64(n: u64) -> f64 {
    n as f64
}

/// Rounds to the nearest `f32`.
#[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "rounding is meant")]
pub(crate) fn to_f32(x: f64) -> f32 {
    x as f32
}

/// Returns the whole part of a computed count, saturated to `u32`.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the conversion saturates"
)]
pub(crate) fn to_count(x: f64) -> u32 {
    x as u32
}
