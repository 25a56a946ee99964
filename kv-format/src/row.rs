//! Encoding and decoding of one row: one token of one kv head.
//!
//! Owns the meaning of the bytes of every [`KvFormat`]; `docs/formats.md` draws them. Sizes and the
//! place of the scales come from the format ([`KvFormat::row_bytes`], [`KvFormat::scales_begin`]).
//! Knows nothing of blocks, transforms or devices.
//!
//! | format | a value is | scale, and its source |
//! |---|---|---|
//! | `f32`, `f16`, `bf16` | itself, rounded to nearest, ties to even | none |
//! | `fp8-*`, `int8-tensor`, `int8-head` | `code * scale` | f32, given |
//! | `fp8-*-row`, `int8` | `code * scale` | f16, from the row's largest magnitude |
//! | `l6`, `l4`, `l3` | `±magnitude[index] * scale` | f16, by search; unbiased |
//! | `l6-g32`, `l4-g32`, `l3-g32` | `±magnitude[index] * scale` | E4M3 for 32 values, by search |
//! | `q8_0`, `q4_0` | `code * scale` | f16 for 32 values, as llama.cpp |
//! | `nvfp4` | `code * (block scale * scale)` | E4M3 for 16 values, and a given f32 |
//!
//! # NaN, infinities, zeros
//! | input | formats with a scale of their own | formats without |
//! |---|---|---|
//! | NaN | its scale becomes NaN, so all values that share it decode to NaN | NaN; `int8`: 0 |
//! | infinity, too large | saturates | saturates; `f16` becomes infinite |
//! | all zeros | zeros | zeros |
//!
//! A row never changes what another row decodes to. Unused bytes are 0.
//!
//! ```
//! use kv_format::KvFormat;
//! use kv_format::row::{decode_row, encode_row};
//!
//! let format: KvFormat = "int8".parse()?;
//! let values = [254.0, -2.0, 100.0];
//! let mut row = [0; 6];
//! assert_eq!(format.row_bytes(3), 6);
//! encode_row(format, 1.0, &values, &mut row); // rows have their own scale: 1.0 is ignored
//! assert_eq!(row, [127, 0xFF, 50, 0, 0x00, 0x40]);
//!
//! let mut decoded = [0.0; 3];
//! decode_row(format, 1.0, &row, &mut decoded);
//! assert_eq!(decoded, values);
//! # Ok::<(), kv_format::UnknownName>(())
//! ```
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]

mod ggml;
mod lloyd_max;
mod nvfp4;
mod planes;
mod scale;
mod scaled;
mod sums;
#[cfg(test)]
mod tests;

use crate::format::{KvFormat, ScaleGroup, Scaling};
use crate::lloyd::{Book3, Book4, Book6, Codebook};
use half::{bf16, f16};
use scaled::{E4m3, E5m2, Int8};

/// Encodes `values`, the `head_dim` values of a row, into `row`.
///
/// `inv_scale` is the reciprocal of the given scale; formats without a
/// [given scale](KvFormat::given_scales) ignore it.
///
/// All of it is inlined: a caller with target features gets vector code for them, with the same
/// results.
///
/// # Panics
/// If `row` does not have [`KvFormat::row_bytes`] bytes for that number of values.
#[inline(always)]
pub fn encode_row(format: KvFormat, inv_scale: f32, values: &[f32], row: &mut [u8]) {
    let cut = Cut::new(format, values.len(), row.len());
    match format {
        KvFormat::F32 => store(values, row, f32::to_le_bytes),
        KvFormat::F16 => store(values, row, |value| f16::from_f32(value).to_le_bytes()),
        KvFormat::Bf16 => store(values, row, |value| bf16::from_f32(value).to_le_bytes()),
        _ => {
            row.fill(0);
            let (codes, scales) = row.split_at_mut(cut.scales_begin);
            encode_codes(format, inv_scale, values, &mut codes[..cut.code_bytes], scales);
        }
    }
}

/// Decodes `row` into `values`, the `head_dim` values of a row.
///
/// `scale` is the given scale; formats without a [given scale](KvFormat::given_scales) ignore it.
///
/// # Panics
/// If `row` does not have [`KvFormat::row_bytes`] bytes for that number of values.
#[inline]
pub fn decode_row(format: KvFormat, scale: f32, row: &[u8], values: &mut [f32]) {
    let cut = Cut::new(format, values.len(), row.len());
    match format {
        KvFormat::F32 => load(row, values, f32::from_le_bytes),
        KvFormat::F16 => load(row, values, |bytes| f16::from_le_bytes(bytes).to_f32()),
        KvFormat::Bf16 => load(row, values, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => {
            let (codes, scales) = row.split_at(cut.scales_begin);
            decode_codes(format, scale, &codes[..cut.code_bytes], scales, values);
        }
    }
}

#[inline(always)]
fn encode_codes(
    format: KvFormat,
    inv_scale: f32,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
) {
    match format {
        KvFormat::Fp8E4m3(Scaling::Row) => scaled::encode_own::<E4m3>(values, codes, scales),
        KvFormat::Fp8E4m3(_) => scaled::encode_given::<E4m3>(inv_scale, values, codes),
        KvFormat::Fp8E5m2(Scaling::Row) => scaled::encode_own::<E5m2>(values, codes, scales),
        KvFormat::Fp8E5m2(_) => scaled::encode_given::<E5m2>(inv_scale, values, codes),
        KvFormat::Int8(Scaling::Row) => scaled::encode_own::<Int8>(values, codes, scales),
        KvFormat::Int8(_) => scaled::encode_given::<Int8>(inv_scale, values, codes),
        KvFormat::L6(group) => encode_lloyd::<Book6>(group, values, codes, scales),
        KvFormat::L4(group) => encode_lloyd::<Book4>(group, values, codes, scales),
        KvFormat::L3(group) => encode_lloyd::<Book3>(group, values, codes, scales),
        KvFormat::Q8_0 => ggml::encode_q8_0(values, codes),
        KvFormat::Q4_0 => ggml::encode_q4_0(values, codes),
        KvFormat::Nvfp4 => nvfp4::encode(inv_scale, values, codes, scales),
        other => no_codec(other),
    }
}

fn decode_codes(format: KvFormat, given: f32, codes: &[u8], scales: &[u8], values: &mut [f32]) {
    match format {
        KvFormat::Fp8E4m3(Scaling::Row) => scaled::decode_own::<E4m3>(codes, scales, values),
        KvFormat::Fp8E4m3(_) => scaled::decode_given::<E4m3>(given, codes, values),
        KvFormat::Fp8E5m2(Scaling::Row) => scaled::decode_own::<E5m2>(codes, scales, values),
        KvFormat::Fp8E5m2(_) => scaled::decode_given::<E5m2>(given, codes, values),
        KvFormat::Int8(Scaling::Row) => scaled::decode_own::<Int8>(codes, scales, values),
        KvFormat::Int8(_) => scaled::decode_given::<Int8>(given, codes, values),
        KvFormat::L6(group) => lloyd_max::decode::<Book6>(group, codes, scales, values),
        KvFormat::L4(group) => lloyd_max::decode::<Book4>(group, codes, scales, values),
        KvFormat::L3(group) => lloyd_max::decode::<Book3>(group, codes, scales, values),
        KvFormat::Q8_0 => ggml::decode_q8_0(codes, values),
        KvFormat::Q4_0 => ggml::decode_q4_0(codes, values),
        KvFormat::Nvfp4 => nvfp4::decode(given, codes, scales, values),
        other => no_codec(other),
    }
}

#[inline(always)]
fn encode_lloyd<B: Codebook>(
    group: ScaleGroup,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
) {
    match group {
        ScaleGroup::Row => lloyd_max::encode::<B>(values, codes, scales),
        ScaleGroup::Group32 => lloyd_max::encode_groups::<B>(values, codes, scales),
    }
}

/// The parts of a row: codes and scales.
struct Cut {
    code_bytes: usize,
    scales_begin: usize,
}

impl Cut {
    /// Asserts that a row has the length of its format, and finds its parts.
    fn new(format: KvFormat, head_dim: usize, row_bytes: usize) -> Self {
        // A longer row fails the assertion: no slice has that many bytes.
        let head_dim = u32::try_from(head_dim).unwrap_or(u32::MAX);
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let expected = size(format.row_bytes(head_dim));
        assert_eq!(row_bytes, expected, "bytes of a row of {head_dim} values in {format}");
        Self {
            code_bytes: size(format.code_bytes(head_dim)),
            scales_begin: size(format.scales_begin(head_dim)),
        }
    }
}

#[inline]
fn store<const N: usize>(values: &[f32], row: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (value, to) in values.iter().zip(row.as_chunks_mut::<N>().0) {
        *to = bytes(*value);
    }
}

#[inline]
fn load<const N: usize>(row: &[u8], values: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (to, bytes) in values.iter_mut().zip(row.as_chunks::<N>().0) {
        *to = value(*bytes);
    }
}

/// Panics for a format without a codec: a test covers all.
#[expect(clippy::panic, reason = "our own bug, found by the first test that names the format")]
fn no_codec(format: KvFormat) -> ! {
    panic!("{format} has no codec")
}
