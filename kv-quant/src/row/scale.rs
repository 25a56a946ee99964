//! Scales that a row brings along: how they are chosen from the largest magnitude, and stored.
#![expect(
    clippy::inline_always,
    reason = "what encodes is compiled for the instruction set of its caller"
)]
use half::f16;

/// The bits of the largest magnitude, as an unsigned number: for floats without sign the order of
/// the bits is the order of the values, infinity behind all numbers and NaN behind infinity.
///
/// A maximum of integers is vector code, of floats it is not.
#[inline(always)]
pub(super) fn amax_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |amax, value| amax.max(value.abs().to_bits()))
}

/// The largest magnitude; `None` where a value is NaN.
#[inline(always)]
pub(super) fn amax(values: &[f32]) -> Option<f32> {
    let amax = f32::from_bits(amax_bits(values));
    (!amax.is_nan()).then_some(amax)
}

/// The stored scale at which the largest magnitude takes the code worth `largest`.
///
/// Rounded to nearest. Where f16 has fewer bits than usual (below 2^-14) it is rounded up instead,
/// so that nothing is clipped; beyond f16 it is 65504, and large values saturate.
#[inline(always)]
pub(super) fn from_amax(amax: f32, largest: f32) -> f16 {
    let scale = amax / largest;
    let stored = saturated(scale);
    if stored < f16::MIN_POSITIVE && stored.to_f32() < scale {
        return f16::from_bits(stored.to_bits().saturating_add(1));
    }
    stored
}

/// Rounded to nearest, ties to even; 65504 where that is infinite.
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

/// The scale in the first two bytes of `from`; NaN where there are none, which no row's length
/// allows.
#[inline]
pub(super) fn get(from: &[u8]) -> f32 {
    from.first_chunk().map_or(f32::NAN, |bytes| f16::from_le_bytes(*bytes).to_f32())
}
