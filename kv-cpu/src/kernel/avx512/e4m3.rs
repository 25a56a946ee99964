//! FP8 E4M3, and whether there is NaN among its codes.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
#![expect(clippy::arithmetic_side_effects, reason = "places of lines below the length of a row")]
use std::arch::x86_64::*;

use super::super::simd::LINE;

/// Where a code's bits are in a binary16, but for copies of its sign.
const SIGN_AND_REST: i16 = 0xbf80_u16.cast_signed();

/// As `Simd::has_nan_e4m3`. Of all codes, one more changes the highest bit of NaN alone.
///
/// # Safety
/// 1. The first `n` bytes of each row are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn has_nan(rows: &[*const u8], n: usize) -> bool {
    let mut changed = _mm512_setzero_si512();
    for row in rows {
        let lines = n / LINE;
        for i in 0..lines {
            // SAFETY: condition 1, as this line ends at or before byte `n`.
            let codes = unsafe { _mm512_loadu_si512(row.wrapping_add(i * LINE).cast()) };
            changed = or_changed(changed, codes);
        }
        if lines * LINE < n {
            let valid = u64::MAX >> (LINE - n % LINE);
            let rest = row.wrapping_add(lines * LINE).cast();
            // SAFETY: condition 1; others than `valid` are not read.
            changed = or_changed(changed, unsafe { _mm512_maskz_loadu_epi8(valid, rest) });
        }
    }
    _mm512_movepi8_mask(changed) != 0
}

/// Sets the highest bit where one more changes that of a code, and leaves it set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn or_changed(changed: __m512i, codes: __m512i) -> __m512i {
    let next = _mm512_sub_epi8(codes, _mm512_set1_epi8(-1));
    // The first, or where the others differ.
    _mm512_ternarylogic_epi32::<0xf6>(changed, codes, next)
}

/// Its bits in the place of binary16's are the value times 2^-8, but for NaN: all ones is an
/// ordinary number there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn widen(codes: __m128i) -> __m512 {
    let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
    let bits = _mm256_and_si256(shifted, _mm256_set1_epi16(SIGN_AND_REST));
    let unsigned = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f80));
    let nan = _mm256_cmpeq_epi16(unsigned, _mm256_set1_epi16(0x3f80));
    _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(bits, nan)), _mm512_set1_ps(256.0))
}

/// 2^-8 of the values; none is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn widen_finite(codes: __m256i) -> [__m512; 2] {
    let shifted = _mm512_slli_epi16::<7>(_mm512_cvtepi8_epi16(codes));
    let bits = _mm512_and_si512(shifted, _mm512_set1_epi16(SIGN_AND_REST));
    let upper = _mm512_extracti64x4_epi64::<1>(bits);
    [_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(upper)]
}
