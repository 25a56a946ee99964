//! FP8 and INT8: a byte per value, and one scale, given or of the row.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
use half::f16;

use super::scale;
use crate::minifloat;

/// Meaning of a byte.
pub(super) trait Byte {
    /// The largest value that has a code.
    const LARGEST: f32;
    /// Encodes `value` as the nearest code, ties to even, saturated.
    fn encode(value: f32) -> u8;
    /// Decodes a code.
    fn decode(code: u8) -> f32;
}

pub(super) enum E4m3 {}
pub(super) enum E5m2 {}
/// Two's complement in -127..=127: symmetric, so that a row and its negative have equal magnitudes.
pub(super) enum Int8 {}

impl Byte for E4m3 {
    const LARGEST: f32 = 448.0;
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        minifloat::e4m3_encode(value)
    }
    #[inline]
    fn decode(code: u8) -> f32 {
        minifloat::e4m3_decode(code)
    }
}

impl Byte for E5m2 {
    const LARGEST: f32 = 57344.0;
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        minifloat::e5m2_encode(value)
    }
    #[inline]
    fn decode(code: u8) -> f32 {
        minifloat::e5m2_decode(code)
    }
}

impl Byte for Int8 {
    const LARGEST: f32 = 127.0;
    /// Encodes NaN as 0, like CUDA's saturating conversions.
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        // The last bit of floats from 2^23 to 2^24 is worth 1: adding 1.5 * 2^23 rounds and leaves
        // the integer in the low bits. `round_ties_even` would be a function call for every value.
        const ROUNDER: f32 = 12_582_912.0;
        let number = if value.is_nan() { 0.0 } else { value };
        let below = if number < Self::LARGEST { number } else { Self::LARGEST };
        let inside = if below > -Self::LARGEST { below } else { -Self::LARGEST };
        let [low, ..] = (inside + ROUNDER).to_le_bytes();
        low
    }
    #[inline]
    fn decode(code: u8) -> f32 {
        f32::from(code.cast_signed())
    }
}

#[inline(always)]
pub(super) fn encode_given<B: Byte>(inv_scale: f32, values: &[f32], codes: &mut [u8]) {
    for (code, value) in codes.iter_mut().zip(values) {
        *code = B::encode(value * inv_scale);
    }
}

#[inline]
pub(super) fn decode_given<B: Byte>(scale: f32, codes: &[u8], values: &mut [f32]) {
    for (value, code) in values.iter_mut().zip(codes) {
        *value = B::decode(*code) * scale;
    }
}

/// Encodes a row with its own scale. Expects `codes` and `scales` to be zeroed.
#[inline(always)]
pub(super) fn encode_own<B: Byte>(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let Some(amax) = scale::amax(values) else {
        // Codes of 0 times a NaN scale: every value decodes to NaN.
        scale::put(f16::NAN, scales);
        return;
    };
    let stored = scale::from_amax(amax, B::LARGEST);
    scale::put(stored, scales);
    let scale = stored.to_f32();
    if scale > 0.0 {
        for (code, value) in codes.iter_mut().zip(values) {
            *code = B::encode(value / scale);
        }
    }
}

#[inline]
pub(super) fn decode_own<B: Byte>(codes: &[u8], scales: &[u8], values: &mut [f32]) {
    decode_given::<B>(scale::get(scales), codes, values);
}
