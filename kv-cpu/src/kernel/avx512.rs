//! Vectors of sixteen: AVX-512 F, BW, DQ and VL.
//!
//! Built like the file for AVX2; see there for how the features and the witness go together.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use super::simd::Simd;

/// Witness that the instructions may run: made only inside functions that carry the features.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

/// Writes each primitive twice: behind the features, and as the trait's method that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl Simd for Avx512 {
            type F = __m512;
            const LANES: usize = 16;
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: an `Avx512` exists only where the features do.
                unsafe { inner($($arg),*) }
            })*

            #[inline(always)]
            fn prefetch(self, at: *const u8) {
                // SAFETY: SSE is part of x86-64, and a prefetch faults at no address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }
            #[inline(always)]
            unsafe fn load(self, from: *const f32, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                unsafe { _mm512_loadu_ps(from.wrapping_add(at)) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32, at: usize, v: __m512) {
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { _mm512_storeu_ps(to.wrapping_add(at), v) }
            }
            #[inline(always)]
            unsafe fn load_f16(self, from: *const u16, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
                widen_f16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
                widen_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn store_f16(self, to: *mut u16, at: usize, v: __m512) {
                let bits = narrow_f16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { _mm256_storeu_si256(to.wrapping_add(at).cast(), bits) }
            }
            #[inline(always)]
            unsafe fn store_bf16(self, to: *mut u16, at: usize, v: __m512) {
                let bits = narrow_bf16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { _mm256_storeu_si256(to.wrapping_add(at).cast(), bits) }
            }
        }
    };
}

primitives! {
    fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    // The second operand is the result where either is NaN.
    fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    fn round(x: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
    }
    // The exponent's bits, biased; of a NaN something that the NaN is then multiplied with.
    fn pow2(n: __m512) -> __m512 {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    fn zero_below(x: __m512, limit: f32, value: __m512) -> __m512 {
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
        _mm512_maskz_mov_ps(keep, value)
    }
    fn reduce_add(v: __m512) -> f32 {
        _mm512_reduce_add_ps(v)
    }
    fn reduce_max(v: __m512) -> f32 {
        _mm512_reduce_max_ps(v)
    }
}

/// Conversions with 16-bit vectors, which the trait does not name.
macro_rules! conversions {
    ($(fn $name:ident($arg:ident: $type:ty) -> $result:ty $body:block)*) => {$(
        #[inline(always)]
        fn $name(_witness: Avx512, $arg: $type) -> $result {
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
    fn narrow_f16(v: __m512) -> __m256i {
        _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)
    }
    fn widen_bf16(bits: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
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
}

super::table! { [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]]
Avx512(()) }
