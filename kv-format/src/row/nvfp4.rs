//! NVFP4: E2M1 values in pairs, an E4M3 scale for every 16, and a given f32 scale.
//!
//! A value is `code * (block scale * given scale)`; the product in brackets is first rounded to
//! f32.
//!
//! The largest magnitude of a block gets either the code for 6 or the code for 4, whichever gives
//! the smaller squared error ("four over six"): codes are 2 apart at the top, and a scale larger by
//! half moves values between 4 and 6 to finer codes. Decoders need not know.
//!
//! # Source
//! NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; Cook et al., "Four Over Six",
//! 2025.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]

use super::scale;
use super::sums::sum;
use crate::minifloat::{e2m1_decode, e2m1_encode, e2m1_round, e4m3_decode, e4m3_encode};

const BLOCK: usize = 16;
const E4M3_NAN: u8 = 0x7F;

/// Encodes a row. Expects `codes` and `scales` to be zeroed.
#[inline(always)]
pub(super) fn encode(inv_scale: f32, values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let blocks = codes.chunks_mut(BLOCK / 2);
    for ((values, codes), stored) in values.chunks(BLOCK).zip(blocks).zip(scales) {
        // Constant length for whole blocks, so that loops unroll.
        *stored = match values.as_array::<BLOCK>() {
            Some(whole) => encode_block(inv_scale, whole, codes),
            None => encode_block(inv_scale, values, codes),
        };
    }
}

/// Encodes a block and returns the code of its scale. Expects `codes` to be zeroed.
#[inline(always)]
fn encode_block(inv_scale: f32, values: &[f32], codes: &mut [u8]) -> u8 {
    let Some(amax) = scale::amax(values) else {
        return E4M3_NAN;
    };
    let stored = block_scale(inv_scale, amax, values);
    let scale = e4m3_decode(stored);
    if scale > 0.0 {
        let mut nibbles = [0; BLOCK];
        for (nibble, value) in nibbles.iter_mut().zip(values) {
            *nibble = e2m1_encode(value * inv_scale / scale);
        }
        for (code, [low, high]) in codes.iter_mut().zip(nibbles.as_chunks().0) {
            *code = low | high << 4;
        }
    }
    stored
}

/// Returns the code of the scale with the smaller squared error.
#[inline(always)]
fn block_scale(inv_scale: f32, amax: f32, values: &[f32]) -> u8 {
    let over_6 = e4m3_encode(amax / 6.0 * inv_scale);
    let over_4 = e4m3_encode(amax / 4.0 * inv_scale);
    // Relative to the largest magnitude, so that no square overflows.
    let of = (inv_scale, (amax * inv_scale).recip());
    // NaN if the largest is infinite or zero: then over 6.
    let is_less = squared_error(values, of, over_4) < squared_error(values, of, over_6);
    let best = if is_less { over_4 } else { over_6 };
    // A nonzero block whose scale would round to 0 takes the smallest scale, if that has less
    // error.
    let takes_smallest = best == 0 && squared_error(values, of, 1) < squared_error(values, of, 0);
    if takes_smallest { 1 } else { best }
}

/// Returns the squared error at the scale of a code; `unit` is the reciprocal of the error's unit.
/// A function, because a closure lacks its caller's target features unless it is inlined.
#[inline(always)]
fn squared_error(values: &[f32], (inv_scale, unit): (f32, f32), code: u8) -> f32 {
    let scale = e4m3_decode(code);
    // Two simple loops vectorise better than one that does both.
    let mut errors = [0.0; BLOCK];
    let errors = &mut errors[..values.len()];
    for (error, value) in errors.iter_mut().zip(values) {
        let value = value * inv_scale;
        let decoded = if scale > 0.0 { e2m1_round(value / scale) * scale } else { 0.0 };
        *error = (value - decoded) * unit;
    }
    sum(errors, errors, |error, _| error * error)
}

pub(super) fn decode(given: f32, codes: &[u8], scales: &[u8], values: &mut [f32]) {
    let blocks = codes.chunks(BLOCK / 2);
    for ((values, codes), stored) in values.chunks_mut(BLOCK).zip(blocks).zip(scales) {
        let scale = e4m3_decode(*stored) * given;
        for (pair, byte) in values.chunks_mut(2).zip(codes) {
            for (value, nibble) in pair.iter_mut().zip([byte & 0xF, byte >> 4]) {
                *value = e2m1_decode(nibble) * scale;
            }
        }
    }
}
