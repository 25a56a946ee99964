//! The few number conversions the crate needs, each in one place.

/// Indexes are `usize`, geometry is `u32`; this crate runs where the first holds the second.
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

/// For figures: exact up to 2^53.
#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn to_f64(n: u64) -> f64 {
    n as f64
}

/// Rounds to the nearest `f32`.
#[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "rounding is meant")]
pub(crate) fn to_f32(x: f64) -> f32 {
    x as f32
}

/// `count / seconds`, zero when no time passed.
pub(crate) fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { to_f64(count) / seconds } else { 0.0 }
}

/// The whole part of a count that was computed, within what `u32` holds.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the conversion saturates"
)]
pub(crate) fn to_count(x: f64) -> u32 {
    x as u32
}
