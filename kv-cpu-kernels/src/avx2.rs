//! Vectors of eight: AVX2, FMA and F16C.
//!
//! Each primitive is a function with the target features, in which intrinsics need no `unsafe`; the
//! trait's method calls it. The only place that makes an [`Avx2`] is the table below, inside
//! functions with the same features.
#![expect(
    clippy::many_single_char_names,
    reason = "kernel code: the eight vectors that are summed at once"
)]
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use crate::simd::{LINE, Simd};

/// Witness that the instructions may run: made only inside functions that carry the features.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[cfg(test)]
impl Avx2 {
    /// The witness, for tests on CPUs that have the instructions.
    pub(crate) const fn witness() -> Self {
        Self(())
    }
}

/// Writes each primitive twice: as a function with the target features, and as the trait's method
/// that calls it.
macro_rules! primitives {
    ($(
        $(#[$attribute:meta])* fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block
    )*) => {
        impl Simd for Avx2 {
            type F = __m256;
            type I = __m256i;
            const LANES: usize = 8;
            const SUMS: usize = 8;
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "avx2,fma,f16c")]
                $(#[$attribute])*
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: an `Avx2` exists only where the features do.
                unsafe { inner($($arg),*) }
            })*

            #[inline(always)]
            fn prefetch_l1(self, at: *const u8) {
                // SAFETY: SSE is part of x86-64, and a prefetch faults at no address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }
            #[inline(always)]
            fn prefetch_l2(self, at: *const u8) {
                // SAFETY: SSE is part of x86-64, and a prefetch faults at no address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
            }
            #[inline(always)]
            unsafe fn stream(self, from: &[u8; LINE], to: &mut [u8; LINE]) {
                for half in [0, 32] {
                    let (from, to) = (from.as_ptr().wrapping_add(half), to.as_mut_ptr());
                    // SAFETY: half of the array, and an `Avx2` exists only where the features do.
                    let line = unsafe { _mm256_loadu_si256(from.cast()) };
                    // SAFETY: as above, and aligned by condition 1.
                    unsafe { _mm256_stream_si256(to.wrapping_add(half).cast(), line) };
                }
            }
            #[inline(always)]
            fn fence(self) {
                // SAFETY: SSE is part of x86-64.
                unsafe { _mm_sfence() }
            }
            #[inline(always)]
            unsafe fn load(self, from: *const f32, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                unsafe { _mm256_loadu_ps(from.wrapping_add(at)) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32, at: usize, v: __m256) {
                // SAFETY: condition 1 of `Simd::store`, and an `Avx2` exists only where the
                // features do.
                unsafe { _mm256_storeu_ps(to.wrapping_add(at), v) }
            }
            #[inline(always)]
            unsafe fn load_f16(self, from: *const u16, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bits = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_f16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bits = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [__m256; 2] {
                // SAFETY: condition 1 of `Simd::load_bf16_pairs`, and an `Avx2` exists only where
                // the features do.
                let words = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
                [lower_bf16(self, words), upper_bf16(self, words)]
            }
            #[inline(always)]
            unsafe fn store_f16(self, to: *mut u16, at: usize, v: __m256) {
                let bits = narrow_f16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and an `Avx2` exists only where the
                // features do.
                unsafe { _mm_storeu_si128(to.wrapping_add(at).cast(), bits) }
            }
            #[inline(always)]
            unsafe fn store_bf16(self, to: *mut u16, at: usize, v: __m256) {
                let bits = narrow_bf16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and an `Avx2` exists only where the
                // features do.
                unsafe { _mm_storeu_si128(to.wrapping_add(at).cast(), bits) }
            }
            #[inline(always)]
            unsafe fn load_bits(self, from: *const u32, at: usize) -> __m256i {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) }
            }
            #[inline(always)]
            unsafe fn load_bytes(self, from: *const u8, at: usize) -> __m256i {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bytes = unsafe { _mm_loadl_epi64(from.wrapping_add(at).cast()) };
                widen_bytes(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_of_8(self, from: *const u8, _at: usize) -> __m256i {
                // SAFETY: condition 1 of `Simd::load_of_8`: all eight, from the first on.
                unsafe { self.load_bytes(from, 0) }
            }
            #[inline(always)]
            unsafe fn load_nibbles(self, from: *const u8, at: usize) -> __m256i {
                // SAFETY: condition 1 of `Simd::load_nibbles`.
                let bytes = unsafe { from.wrapping_add(at / 2).cast::<[u8; 4]>().read() };
                spread_nibbles(self, u32::from_le_bytes(bytes))
            }
            #[inline(always)]
            unsafe fn load_i8(self, from: *const i8, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bytes = unsafe { _mm_loadl_epi64(from.wrapping_add(at).cast()) };
                widen_i8(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_e4m3(self, from: *const u8, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bytes = unsafe { _mm_loadl_epi64(from.wrapping_add(at).cast()) };
                let [values, _] = widen_e4m3(self, bytes);
                values
            }
            #[inline(always)]
            unsafe fn load_e4m3_pair(
                self,
                from: *const u8,
                at: usize,
                apart: usize,
            ) -> [__m256; 2] {
                let from = from.wrapping_add(at);
                // SAFETY: condition 1 of `Simd::load_e4m3_pair`, and an `Avx2` exists only where
                // the features do.
                let bytes = unsafe {
                    let second = _mm_loadl_epi64(from.wrapping_add(apart).cast());
                    _mm_unpacklo_epi64(_mm_loadl_epi64(from.cast()), second)
                };
                widen_e4m3(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_e5m2(self, from: *const u8, at: usize) -> __m256 {
                // SAFETY: condition 1 of `Simd::load`, and an `Avx2` exists only where the features
                // do.
                let bytes = unsafe { _mm_loadl_epi64(from.wrapping_add(at).cast()) };
                widen_e5m2(self, bytes)
            }
        }
    };
}

primitives! {
    fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    // The second operand is the result where either is NaN.
    fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    // Builds the biased exponent. For NaN the result is arbitrary: it is multiplied with the NaN.
    fn pow2(n: __m256) -> __m256 {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
    fn zero_below(x: __m256, limit: f32, value: __m256) -> __m256 {
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(limit));
        _mm256_andnot_ps(below, value)
    }
    // Neighbours, then pairs, then halves: the order of `reduce_add8`.
    fn reduce_add(v: __m256) -> f32 {
        let pairs = _mm256_hadd_ps(v, v);
        let quads = _mm256_hadd_ps(pairs, pairs);
        let high = _mm256_extractf128_ps::<1>(quads);
        _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), high))
    }
    fn reduce_max(v: __m256) -> f32 {
        let halves = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let pairs = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
        _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps::<1>(pairs, pairs)))
    }
    fn reduce_add8(v: [__m256; 8]) -> [f32; 8] {
        let [a, b, c, d, e, f, g, h] = v;
        // Four sums of each half of a..d, and of e..h.
        let first = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let second = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
        let low = _mm256_permute2f128_ps::<0x20>(first, second);
        let high = _mm256_permute2f128_ps::<0x31>(first, second);
        let mut sums = [0.0; 8];
        let total = _mm256_add_ps(low, high);
        // SAFETY: the array has room for eight floats.
        unsafe { _mm256_storeu_ps(sums.as_mut_ptr(), total) };
        sums
    }
    fn splat_bits(word: u32) -> __m256i {
        _mm256_set1_epi32(word.cast_signed())
    }
    // Counts are constants where the primitives are used, and become immediates.
    fn shl(x: __m256i, bits: u32) -> __m256i {
        _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits.cast_signed()))
    }
    fn shr(x: __m256i, bits: u32) -> __m256i {
        _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits.cast_signed()))
    }
    fn shl_each(x: __m256i, bits: __m256i) -> __m256i {
        _mm256_sllv_epi32(x, bits)
    }
    fn shr_each(x: __m256i, bits: __m256i) -> __m256i {
        _mm256_srlv_epi32(x, bits)
    }
    fn nibble(x: __m256i) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)))
    }
    fn flip(x: __m256, signs: __m256i) -> __m256 {
        let signs = _mm256_and_ps(_mm256_castsi256_ps(signs), _mm256_set1_ps(-0.0));
        _mm256_xor_ps(x, signs)
    }
    fn lookup4(table: &[f32; 4], code: __m256i) -> __m256 {
        let [a, b, c, d] = *table;
        _mm256_permutevar_ps(_mm256_setr_ps(a, b, c, d, a, b, c, d), code)
    }
    // A permutation reads three bits of an index: four permutations, and the other two bits select.
    fn lookup32(table: &[f32; 32], low: __m256i, high: __m256i) -> __m256 {
        let part = |begin: usize| {
            let from = table.as_ptr().wrapping_add(begin);
            // SAFETY: `begin` is 0, 8, 16 or 24.
            let eight = unsafe { _mm256_loadu_ps(from) };
            _mm256_permutevar8x32_ps(eight, low)
        };
        let third = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(low));
        let lower = _mm256_blendv_ps(part(0), part(8), third);
        let upper = _mm256_blendv_ps(part(16), part(24), third);
        _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32::<31>(high)))
    }
    // A code shifted to the top has its sign in the sign bit of a float, and its three index bits
    // in the exponent. Entries of the table carry the same index bits, so that XOR cancels them.
    fn symmetric16(magnitudes: &[f32; 8], code: __m256i) -> __m256 {
        // SAFETY: an array of eight.
        let magnitudes = unsafe { _mm256_loadu_ps(magnitudes.as_ptr()) };
        let indices = _mm256_slli_epi32::<28>(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        let table = _mm256_xor_ps(magnitudes, _mm256_castsi256_ps(indices));
        let code_on_top = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(code));
        _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code), code_on_top)
    }
    fn splat_f16(bits: u16) -> __m256 {
        _mm256_cvtph_ps(_mm_set1_epi16(bits.cast_signed()))
    }
}

/// Conversions with shorter vectors, which are not part of the trait.
macro_rules! conversions {
    ($(fn $name:ident($arg:ident: $type:ty) -> $result:ty $body:block)*) => {$(
        #[inline(always)]
        fn $name(_witness: Avx2, $arg: $type) -> $result {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn inner($arg: $type) -> $result $body
            // SAFETY: an `Avx2` exists only where the features do.
            unsafe { inner($arg) }
        }
    )*};
}

conversions! {
    fn widen_f16(bits: __m128i) -> __m256 {
        _mm256_cvtph_ps(bits)
    }
    fn narrow_f16(v: __m256) -> __m128i {
        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)
    }
    fn widen_bf16(bits: __m128i) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    }
    fn lower_bf16(words: __m256i) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }
    fn upper_bf16(words: __m256i) -> __m256 {
        let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
        _mm256_castsi256_ps(_mm256_and_si256(words, upper))
    }
    // Adds just under half of the last place kept, or half where that place is odd; a NaN keeps its
    // upper bits and becomes quiet.
    fn narrow_bf16(v: __m256) -> __m128i {
        let bits = _mm256_castps_si256(v);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let words = _mm256_blendv_epi8(rounded, quiet, nan);
        let low = _mm256_castsi256_si128(words);
        _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(words))
    }
    fn widen_bytes(bytes: __m128i) -> __m256i {
        _mm256_cvtepu8_epi32(bytes)
    }
    fn widen_i8(bytes: __m128i) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
    }
    fn spread_nibbles(word: u32) -> __m256i {
        let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        _mm256_srlv_epi32(_mm256_set1_epi32(word.cast_signed()), shifts)
    }
    // The upper byte of a binary16.
    fn widen_e5m2(bytes: __m128i) -> __m256 {
        _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes))
    }
    // Read as a binary16, its bits are the value times 2^-8, except for NaN: all ones is an
    // ordinary number there.
    fn widen_e4m3(bytes: __m128i) -> [__m256; 2] {
        let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
        let bits = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80_u16.cast_signed()));
        let unsigned = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f80));
        let nan = _mm256_cmpeq_epi16(unsigned, _mm256_set1_epi16(0x3f80));
        let all = _mm256_or_si256(bits, nan);
        let second = _mm256_extracti128_si256::<1>(all);
        [_mm256_cvtph_ps(_mm256_castsi256_si128(all)), _mm256_cvtph_ps(second)]
    }
}

crate::table::table! { [#[target_feature(enable = "avx2,fma,f16c")]] Avx2, Avx2(()) }
