//! Rows of every format: bytes by hand, bounds, bad input, targets.
mod bounds;
mod bytes;
mod ggml;
mod special;
mod targets;

use crate::KvFormat;

use super::{decode_row, encode_row};

/// Head dims with partial groups and bytes, and common ones.
const HEAD_DIMS: [usize; 10] = [1, 5, 16, 31, 32, 33, 80, 96, 100, 128];

fn format(name: &str) -> KvFormat {
    name.parse().unwrap()
}

fn encode(format: KvFormat, scale: f32, values: &[f32]) -> Vec<u8> {
    let head_dim = u32::try_from(values.len()).unwrap();
    // Not zero, so that bytes the encoder leaves out show.
    let mut row = vec![0xA5; usize::try_from(format.row_bytes(head_dim)).unwrap()];
    encode_row(format, scale.recip(), values, &mut row);
    row
}

fn decode(format: KvFormat, scale: f32, row: &[u8], head_dim: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; head_dim];
    decode_row(format, scale, row, &mut values);
    values
}

/// Encodes and decodes a row.
fn round(format: KvFormat, scale: f32, values: &[f32]) -> Vec<f32> {
    decode(format, scale, &encode(format, scale, values), values.len())
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |amax, value| amax.max(value.abs()))
}

fn dot(left: &[f32], right: &[f32]) -> f64 {
    left.iter().zip(right).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns whether rows of the format have their own scales.
fn is_self_scaled(format: KvFormat) -> bool {
    format.is_quantised() && format.given_scales().is_none()
}

/// A seeded standard normal distribution: `SplitMix64` and the Box-Muller method.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let high = u32::try_from((z ^ (z >> 31)) >> 32).unwrap();
        (f64::from(high) + 0.5) / 4_294_967_296.0
    }
    #[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounding")]
    fn next(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }
    fn row(&mut self, head_dim: usize) -> Vec<f32> {
        (0..head_dim).map(|_| self.next()).collect()
    }
}

#[test]
#[should_panic(expected = "bytes of a row of 5 values in int8")]
fn encoding_a_row_of_another_length_panics() {
    encode_row(format("int8"), 1.0, &[0.0; 5], &mut [0; 7]);
}

#[test]
#[should_panic(expected = "bytes of a row of 4 values in bf16")]
fn decoding_a_row_of_another_length_panics() {
    decode_row(format("bf16"), 1.0, &[0; 6], &mut [0.0; 4]);
}
