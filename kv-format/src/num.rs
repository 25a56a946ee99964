//! Conversions of numbers, for the crates of this workspace.

// Token counts and offsets are `u32` and `u64`; memory of a narrower host cannot hold them.
const _: () = assert!(usize::BITS >= 32 && usize::BITS <= 64, "usize must be 32 or 64 bits wide");

/// Widens a count or an index.
#[inline]
pub const fn to_usize(n: u32) -> usize {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as usize
    }
}

/// Widens a length.
#[inline]
pub const fn to_u64(n: usize) -> u64 {
    #[expect(clippy::as_conversions, reason = "widening, by the assertion above")]
    {
        n as u64
    }
}

/// Narrows a length that an earlier check has bounded.
///
/// # Panics
/// If that check is wrong.
#[inline]
pub fn to_u32(n: usize) -> u32 {
    let narrow = u32::try_from(n);
    assert!(narrow.is_ok(), "{n} passed its check and does not fit 32 bits");
    narrow.unwrap_or_default()
}

/// Narrows a number of bytes of host memory, or an offset into it.
///
/// # Panics
/// If it does not fit a pointer, which is impossible for sizes of memory.
#[inline]
pub fn to_offset(n: u64) -> usize {
    let narrow = usize::try_from(n);
    assert!(narrow.is_ok(), "{n} bytes are more than this host addresses");
    narrow.unwrap_or_default()
}

/// Converts a count for a figure; exact up to 2^53.
#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "figures for people")]
#[inline]
pub const fn to_f64(n: u64) -> f64 {
    n as f64
}

/// Rounds to the nearest `f32`.
#[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "rounding is meant")]
#[inline]
pub const fn to_f32(x: f64) -> f32 {
    x as f32
}

/// Returns the whole part of a computed count, saturated to `u32`.
#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the conversion saturates"
)]
#[inline]
pub const fn to_count(x: f64) -> u32 {
    x as u32
}
