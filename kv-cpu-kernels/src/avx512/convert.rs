//! Conversions with shorter vectors, which are not part of the trait.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use super::Avx512;

/// Writes each as a function with the target features that takes the witness.
macro_rules! conversions {
    ($(fn $name:ident($arg:ident: $type:ty) -> $result:ty $body:block)*) => {$(
        #[inline(always)]
        pub(super) fn $name(_witness: Avx512, $arg: $type) -> $result {
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn inner($arg: $type) -> $result $body
            // SAFETY: an `Avx512` exists only where the features do.
            unsafe { inner($arg) }
        }
    )*};
}

conversions! {
    fn widen_f16(bits: __m256i) -> __m512 {
        _mm512_cvtph_ps(bits)
    }
    fn widen_f16_words(words: [u64; 4]) -> __m512 {
        let [a, b, c, d] = words.map(u64::cast_signed);
        _mm512_cvtph_ps(_mm256_set_epi64x(d, c, b, a))
    }
    fn narrow_f16(v: __m512) -> __m256i {
        _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)
    }
    fn widen_bf16(bits: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }
    fn lower_bf16(words: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
    fn upper_bf16(words: __m512i) -> __m512 {
        let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
        _mm512_castsi512_ps(_mm512_and_si512(words, upper))
    }
    // Adds just under half of the last place kept, or half where that place is odd; a NaN keeps its
    // upper bits and becomes quiet.
    fn narrow_bf16(v: __m512) -> __m256i {
        let bits = _mm512_castps_si512(v);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet))
    }
    fn widen_bytes(bytes: __m128i) -> __m512i {
        _mm512_cvtepu8_epi32(bytes)
    }
    fn widen_twice(bytes: __m128i) -> __m512i {
        _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(bytes, bytes))
    }
    fn widen_i8(bytes: __m128i) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
    }
    fn spread_nibbles(bytes: __m128i) -> __m512i {
        let words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let words = _mm512_permutexvar_epi32(words, _mm512_castsi128_si512(bytes));
        let shifts =
            _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        _mm512_srlv_epi32(words, shifts)
    }
    // Read as a binary16, its bits are the value times 2^-8, except for NaN: all ones is an
    // ordinary number there. Above the sign of a code are copies of it, of which one is cleared.
    fn widen_e4m3(bytes: __m128i) -> __m512 {
        let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
        let bits = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80_u16.cast_signed()));
        let unsigned = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f80));
        let nan = _mm256_cmpeq_epi16(unsigned, _mm256_set1_epi16(0x3f80));
        _mm512_cvtph_ps(_mm256_or_si256(bits, nan))
    }
    // The upper byte of a binary16.
    fn widen_e5m2(bytes: __m128i) -> __m512 {
        _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(bytes)))
    }
}

/// Loads sixteen words of 16 bits, `stride` bytes apart, and joins them by shifts: a gather is
/// slower.
///
/// # Safety
/// 1. They are readable. Alignment is not needed.
#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "places of sixteen words that the caller has; loads inline into what takes them"
)]
pub(super) unsafe fn words_apart(from: *const u8, stride: usize) -> [u64; 4] {
    let mut words = [0; 4];
    for (i, word) in words.iter_mut().enumerate() {
        for j in 0..4 {
            let at = from.wrapping_add((4 * i + j) * stride).cast::<[u8; 2]>();
            // SAFETY: condition 1.
            let bits = u16::from_le_bytes(unsafe { at.read() });
            *word |= u64::from(bits) << (16 * j);
        }
    }
    words
}
