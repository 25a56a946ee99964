//! llama.cpp's blocks of 32: `q8_0` and `q4_0`.
//!
//! # Source
//! `quantize_row_q8_0_ref`, `quantize_row_q4_0_ref` and their inverses in ggml's `ggml-quants.c`,
//! bit for bit. (llama.cpp's vectorised quantiser of `q8_0` rounds halves to even and may differ in
//! the last bit.) Three cases differ: a scale beyond f16 is 65504, where ggml's is infinite and its
//! block decodes to NaN; a NaN makes its block's scale NaN, where ggml ignores it; the reciprocal
//! of a scale so small that it is infinite counts as 0.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "floats, and blocks of known size"
)]

use half::f16;

use super::scale;

const BLOCK: usize = 32;
const SCALE_BYTES: usize = 2;
const Q8_0_BYTES: usize = SCALE_BYTES + BLOCK;
const Q4_0_BYTES: usize = SCALE_BYTES + BLOCK / 2;

/// Encodes a row. Expects `blocks` to be zeroed.
#[inline(always)]
pub(super) fn encode_q8_0(values: &[f32], blocks: &mut [u8]) {
    for_blocks::<Q8_0_BYTES>(values, blocks, |values, block| {
        let (to, codes) = block.split_at_mut(SCALE_BYTES);
        let Some(amax) = scale::amax(values) else {
            scale::put(f16::NAN, to);
            return;
        };
        let inverse = put_scale(amax / 127.0, to);
        for (code, value) in codes.iter_mut().zip(values) {
            *code = round_half_away(value * inverse);
        }
    });
}

/// Encodes a row. Expects `blocks` to be zeroed.
#[inline(always)]
pub(super) fn encode_q4_0(values: &[f32], blocks: &mut [u8]) {
    for_blocks::<Q4_0_BYTES>(values, blocks, |values, block| {
        let (to, codes) = block.split_at_mut(SCALE_BYTES);
        let Some(amax) = scale::amax(values) else {
            scale::put(f16::NAN, to);
            return;
        };
        // The first value of the largest magnitude becomes -8, whatever its sign: of the 16 codes,
        // the negative ones reach one further.
        let extreme = values.iter().find(|value| amax > 0.0 && value.abs() >= amax);
        let inverse = put_scale(extreme.unwrap_or(&0.0) / -8.0, to);
        let nibbles = values.map(|value| nibble(value * inverse + 8.5));
        let (low, high) = nibbles.split_at(BLOCK / 2);
        for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
            *code = low | high << 4;
        }
    });
}

pub(super) fn decode_q8_0(blocks: &[u8], values: &mut [f32]) {
    let blocks = blocks.as_chunks::<Q8_0_BYTES>().0;
    for (values, block) in values.chunks_mut(BLOCK).zip(blocks) {
        let scale = scale::get(block);
        for (value, code) in values.iter_mut().zip(&block[SCALE_BYTES..]) {
            *value = f32::from(code.cast_signed()) * scale;
        }
    }
}

pub(super) fn decode_q4_0(blocks: &[u8], values: &mut [f32]) {
    let blocks = blocks.as_chunks::<Q4_0_BYTES>().0;
    for (values, block) in values.chunks_mut(BLOCK).zip(blocks) {
        let (scale, codes) = (scale::get(block), &block[SCALE_BYTES..]);
        let codes = codes.iter().map(|byte| byte & 0xF).chain(codes.iter().map(|byte| byte >> 4));
        for (value, code) in values.iter_mut().zip(codes) {
            *value = (f32::from(code) - 8.0) * scale;
        }
    }
}

/// Calls `encode` for every block of values; the last one is padded with zeros.
#[inline(always)]
fn for_blocks<const BYTES: usize>(
    values: &[f32],
    blocks: &mut [u8],
    encode: impl Fn(&[f32; BLOCK], &mut [u8; BYTES]),
) {
    let (whole, rest) = values.as_chunks::<BLOCK>();
    let blocks = blocks.as_chunks_mut::<BYTES>().0;
    let mut last = [0.0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    for (values, block) in whole.iter().chain([&last]).zip(blocks) {
        encode(values, block);
    }
}

/// Stores a scale and returns the factor for values, which ggml computes from the unrounded scale.
#[inline(always)]
fn put_scale(scale: f32, to: &mut [u8]) -> f32 {
    let stored = f16::from_f32(scale);
    let saturates = stored.is_infinite();
    let stored = if saturates { scale::saturated(scale) } else { stored };
    scale::put(stored, to);
    let inverse = if saturates { stored.to_f32() } else { scale }.recip();
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Rounds down to an integer in 0..=15; NaN becomes 0. A cast would branch for every value.
#[inline(always)]
fn nibble(value: f32) -> u8 {
    // Adding a float whose last bit is worth 1 rounds to even; correct what was rounded up.
    const ROUNDER: f32 = 8_388_608.0;
    let value = if value > 0.0 { value } else { 0.0 };
    let value = if value < 15.0 { value } else { 15.0 };
    let even = (value + ROUNDER) - ROUNDER;
    let below = if even > value { even - 1.0 } else { even };
    (below + ROUNDER).to_bits() as u8
}

/// Rounds to the nearest integer in -127..=127, halves away from zero as C's `roundf`, in two's
/// complement. `f32::round` would be a function call for every value.
#[inline(always)]
fn round_half_away(value: f32) -> u8 {
    // Adding a float whose last bit is worth 1 rounds to even; correct halves that were rounded
    // down.
    const ROUNDER: f32 = 8_388_608.0;
    let magnitude = value.abs();
    let magnitude = if magnitude < 127.0 { magnitude } else { 127.0 };
    let even = (magnitude + ROUNDER) - ROUNDER;
    let rounded = if magnitude - even >= 0.5 { even + 1.0 } else { even };
    let code = (rounded + ROUNDER).to_bits() as u8;
    if value.is_sign_negative() { code.wrapping_neg() } else { code }
}
