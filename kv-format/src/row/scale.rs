//! Scales that rows have of their own: their choice from the largest magnitude, and their storage.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
use half::f16;

/// Returns the bits of the largest magnitude as an integer. The bits of unsigned floats order as
/// the values do, with infinity above all numbers and NaN above infinity.
///
/// A maximum of integers vectorises, one of floats does not.
#[inline(always)]
pub(super) fn amax_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |amax, value| amax.max(value.abs().to_bits()))
}

/// Returns the largest magnitude; `None` if a value is NaN.
#[inline(always)]
pub(super) fn amax(values: &[f32]) -> Option<f32> {
    let amax = f32::from_bits(amax_bits(values));
    (!amax.is_nan()).then_some(amax)
}

/// Returns the stored scale at which the largest magnitude gets the code of value `largest`.
///
/// It is rounded to nearest. Subnormal f16 (below 2^-14) are rounded up instead, so that nothing is
/// clipped; beyond f16 the scale is 65504, and large values saturate.
#[inline(always)]
pub(super) fn from_amax(amax: f32, largest: f32) -> f16 {
    let scale = amax / largest;
    let stored = saturated(scale);
    if stored < f16::MIN_POSITIVE && stored.to_f32() < scale {
        return f16::from_bits(stored.to_bits().saturating_add(1));
    }
    stored
}

/// Rounds to nearest, ties to even; 65504 if that is infinite.
#[inline(always)]
pub(super) fn saturated(scale: f32) -> f16 {
    f16::from_f32(scale.clamp(-65504.0, 65504.0))
}

/// Writes a scale to the first two bytes of `to`.
#[inline(always)]
pub(super) fn put(scale: f16, to: &mut [u8]) {
    if let Some(to) = to.first_chunk_mut() {
        *to = scale.to_le_bytes();
    }
}

/// Reads the scale in the first two bytes of `from`; NaN for fewer bytes, which no valid row has.
#[inline]
pub(super) fn get(from: &[u8]) -> f32 {
    from.first_chunk().map_or(f32::NAN, |bytes| f16::from_le_bytes(*bytes).to_f32())
}
