//! Floats of 8 and 4 bits: OCP FP8 E4M3 and E5M2, E2M1 (FP4), and the scale type E8M0.
//!
//! Owns the rounding. Encoders round to nearest, ties to even, and saturate, at infinities too, as
//! CUDA's conversions with `__NV_SATFINITE` do. The sign of zero is kept. Decoders are tables,
//! which device kernels may copy.
//!
//! | kind | sign, exponent, mantissa | bias | largest | smallest | infinity | NaN |
//! |---|---|---|---|---|---|---|
//! | E4M3 | 1, 4, 3 | 7 | 448 | 2^-9 | none | `0x7F`, `0xFF` |
//! | E5M2 | 1, 5, 2 | 15 | 57344 | 2^-16 | `0x7C`, `0xFC` | `0x7D` to `0x7F`, with sign too |
//! | E2M1 | 1, 2, 1 | 1 | 6 | 0.5 | none | none |
//! | E8M0 | 0, 8, 0 | 127 | 2^127 | 2^-127 | none, nor zero | `0xFF` |
//!
//! # Source
//! Open Compute Project, "OFP8 Formats for Deep Learning" 1.0 and "Microscaling Formats (MX)" 1.0.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "bit fields of at most 32 bits; tables have an entry for every code"
)]

#[cfg(test)]
mod tests;

/// The value of every E4M3 code.
pub static E4M3: [f32; 256] = table::<3, 7, 256>(Specials::LastIsNan);
/// The value of every E5M2 code.
pub static E5M2: [f32; 256] = table::<2, 15, 256>(Specials::Ieee);
/// The value of every E2M1 code.
pub static E2M1: [f32; 16] = table::<1, 1, 16>(Specials::None);

/// NaN of both FP8 kinds, as encoders write it.
const FP8_NAN: u8 = 0x7F;
/// E2M1's code for NaN: 6, as CUDA converts it.
const E2M1_NAN: u8 = 0x7;

/// Encodes `value` as the nearest E4M3 code; NaN becomes `0x7F`.
#[inline(always)]
pub fn e4m3_encode(value: f32) -> u8 {
    let code = magnitude::<3, 7>(value, 448.0) | sign(value, 7);
    if value.is_nan() { FP8_NAN } else { code }
}

/// Decodes an E4M3 code.
#[inline(always)]
pub fn e4m3_decode(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

/// Encodes `value` as the nearest finite E5M2 code; NaN becomes `0x7F`.
#[inline(always)]
pub fn e5m2_encode(value: f32) -> u8 {
    let code = magnitude::<2, 15>(value, 57344.0) | sign(value, 7);
    if value.is_nan() { FP8_NAN } else { code }
}

/// Decodes an E5M2 code; infinities and NaNs are decoded as such.
#[inline]
pub fn e5m2_decode(code: u8) -> f32 {
    E5M2[usize::from(code)]
}

/// Encodes `value` as the nearest E2M1 code, in the low 4 bits; NaN, which has no code, becomes
/// `0x7`.
#[inline(always)]
pub fn e2m1_encode(value: f32) -> u8 {
    let code = magnitude::<1, 1>(value, 6.0) | sign(value, 3);
    if value.is_nan() { E2M1_NAN } else { code }
}

/// Decodes an E2M1 code; the high 4 bits are ignored.
#[inline]
pub fn e2m1_decode(code: u8) -> f32 {
    E2M1[usize::from(code & 0xF)]
}

/// Rounds `value` to the nearest E2M1 value without a table; vectorises in a loop.
#[inline(always)]
pub(crate) fn e2m1_round(value: f32) -> f32 {
    // Below 1, values are 1/2 apart, as floats from 2^22 on; above, 1 bit of mantissa is kept.
    const ROUNDER: f32 = 4_194_304.0;
    const DROPPED: u32 = 22;
    let magnitude = value.abs();
    let magnitude = if magnitude < 6.0 { magnitude } else { 6.0 };
    let bits = magnitude.to_bits();
    let kept = (bits + (1 << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1)) >> DROPPED << DROPPED;
    let subnormal = (magnitude + ROUNDER) - ROUNDER;
    (if magnitude < 1.0 { subnormal } else { f32::from_bits(kept) }).copysign(value)
}

/// Encodes the magnitude of `value` as the nearest E8M0 code, nearest in value and not in exponent:
/// halfway (1.5 times a power of two) rounds up. Zero becomes the smallest code, too large a value
/// or infinity the largest; NaN becomes `0xFF`.
///
/// Libraries disagree about this rounding. PyTorch and `ml_dtypes` round like this for positive
/// numbers up to 1.5 * 2^127. The microscaling specification chooses a block's scale by the
/// exponent of the largest magnitude instead.
#[inline]
pub fn e8m0_encode(value: f32) -> u8 {
    if value.is_nan() {
        return 0xFF;
    }
    let bits = value.abs().to_bits();
    // Below 2^-126 a float has no implied one: the fraction counts units of 2^-149, and 2^-127 is
    // half its range.
    let code = match bits >> 23 {
        0 => u32::from(bits >= 0x60_0000),
        exponent => exponent + (bits >> 22 & 1),
    };
    code.min(0xFE) as u8
}

/// Decodes an E8M0 code, a power of two.
#[inline]
pub fn e8m0_decode(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x40_0000),
        0xFF => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Returns the code of `|value|`, saturated at `largest`. Computes both branches and selects one,
/// so that loops over values vectorise.
#[inline(always)]
fn magnitude<const MANTISSA: u32, const BIAS: u32>(value: f32, largest: f32) -> u8 {
    let smallest_normal = f32::from_bits((127 + 1 - BIAS) << 23);
    // A float whose last bit is worth the kind's smallest number: adding it rounds.
    let rounder = f32::from_bits((127 + 23 + 1 - BIAS - MANTISSA) << 23);
    let dropped = 23 - MANTISSA;
    let value = value.abs();
    let value = if value < largest { value } else { largest };

    let subnormal = (value + rounder).to_bits().wrapping_sub(rounder.to_bits());
    let bits = value.to_bits();
    let nearest = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1);
    let normal = (nearest >> dropped).wrapping_sub((127 - BIAS) << MANTISSA);
    (if value < smallest_normal { subnormal } else { normal }) as u8
}

#[inline(always)]
fn sign(value: f32, at: u32) -> u8 {
    (value.to_bits() >> 31 << at) as u8
}

/// Codes that are not numbers.
#[derive(Clone, Copy)]
enum Specials {
    /// None.
    None,
    /// All ones are NaN, with either sign.
    LastIsNan,
    /// The largest exponent means infinity and NaN, as in IEEE 754.
    Ieee,
}

/// Computes the values of all codes of a kind.
const fn table<const MANTISSA: u32, const BIAS: u32, const CODES: usize>(
    specials: Specials,
) -> [f32; CODES] {
    let mut values = [0.0; CODES];
    let half = CODES / 2;
    let mut code = 0;
    while code < half {
        let exponent = code as u32 >> MANTISSA;
        let mantissa = code as u32 & ((1 << MANTISSA) - 1);
        let largest_exponent = exponent == (half as u32 - 1) >> MANTISSA;
        let value = match specials {
            Specials::LastIsNan if code == half - 1 => f32::NAN,
            Specials::Ieee if largest_exponent && mantissa == 0 => f32::INFINITY,
            Specials::Ieee if largest_exponent => f32::NAN,
            // mantissa * 2^(1 - bias - MANTISSA); exact.
            _ if exponent == 0 => {
                mantissa as f32 * f32::from_bits((127 + 1 - BIAS - MANTISSA) << 23)
            }
            _ => f32::from_bits((exponent + 127 - BIAS) << 23 | mantissa << (23 - MANTISSA)),
        };
        values[code] = value;
        values[code + half] = -value;
        code += 1;
    }
    values
}
