//! Vectors of sixteen: AVX-512 F, BW, DQ and VL.
//!
//! Structured like `avx2`, which explains the target features and the witness.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
mod bf16;
mod convert;
mod fold;
mod parts;
mod vbmi;

use std::arch::x86_64::*;

use self::convert::{
    lower_bf16, narrow_bf16, narrow_f16, spread_nibbles, upper_bf16, widen_bf16, widen_bytes,
    widen_e4m3, widen_e5m2, widen_f16, widen_f16_words, widen_i8, widen_twice, words_apart,
};
pub(crate) use self::parts::{lookups, qk_words};
use crate::simd::{LINE, Simd, exp};

/// Witness that the instructions may run: made only inside functions that carry the features.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The witness, for functions that carry the features.
    pub(crate) const fn witness() -> Self {
        Self(())
    }
}

/// Writes each primitive twice: as a function with the target features, and as the trait's method
/// that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl Simd for Avx512 {
            type F = __m512;
            type I = __m512i;
            const LANES: usize = 16;
            const SUMS: usize = 16;
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: an `Avx512` exists only where the features do.
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
                // SAFETY: the array, and the witness.
                let line = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
                // SAFETY: the array, aligned by condition 1, and the witness.
                unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), line) };
            }
            #[inline(always)]
            fn fence(self) {
                // SAFETY: SSE is part of x86-64.
                unsafe { _mm_sfence() }
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
            unsafe fn gather_f16(self, from: *const u8, stride: u32) -> __m512 {
                // SAFETY: condition 1 is passed on.
                let words = unsafe { words_apart(from, kv_format::num::to_usize(stride)) };
                widen_f16_words(self, words)
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { _mm256_loadu_si256(from.wrapping_add(at).cast()) };
                widen_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [__m512; 2] {
                // SAFETY: condition 1 of `Simd::load_bf16_pairs`, and the witness.
                let words = unsafe { _mm512_loadu_si512(from.wrapping_add(at).cast()) };
                [lower_bf16(self, words), upper_bf16(self, words)]
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
            #[inline(always)]
            unsafe fn load_bits(self, from: *const u32, at: usize) -> __m512i {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                unsafe { _mm512_loadu_si512(from.wrapping_add(at).cast()) }
            }
            #[inline(always)]
            unsafe fn load_bytes(self, from: *const u8, at: usize) -> __m512i {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bytes = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_bytes(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_of_8(self, from: *const u8, _at: usize) -> __m512i {
                // SAFETY: condition 1 of `Simd::load_of_8`, and the witness.
                let bytes = unsafe { _mm_loadl_epi64(from.cast()) };
                widen_twice(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_nibbles(self, from: *const u8, at: usize) -> __m512i {
                // SAFETY: condition 1 of `Simd::load_nibbles`, and the witness.
                let bytes = unsafe { _mm_loadl_epi64(from.wrapping_add(at / 2).cast()) };
                spread_nibbles(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_i8(self, from: *const i8, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bytes = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_i8(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_e4m3(self, from: *const u8, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bytes = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_e4m3(self, bytes)
            }
            #[inline(always)]
            unsafe fn load_e5m2(self, from: *const u8, at: usize) -> __m512 {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bytes = unsafe { _mm_loadu_si128(from.wrapping_add(at).cast()) };
                widen_e5m2(self, bytes)
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
    fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    // The second operand is the result where either is NaN.
    fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    // Builds the biased exponent. For NaN the result is arbitrary: it is multiplied with the NaN.
    fn pow2(n: __m512) -> __m512 {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    }
    fn zero_below(x: __m512, limit: f32, value: __m512) -> __m512 {
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
        _mm512_maskz_mov_ps(keep, value)
    }
    // As in the trait, but VSCALEF sets the exponent, whatever its size.
    fn exp(x: __m512) -> __m512 {
        let (one, round) = (_mm512_set1_ps(1.0), _mm512_set1_ps(exp::ROUND));
        let n = _mm512_fmadd_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E), round);
        let n = _mm512_sub_ps(n, round);
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN2_HIGH), x);
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(exp::LN2_LOW), r);
        let [first, second, third, fourth, fifth] = exp::SERIES;
        let p = _mm512_fmadd_ps(_mm512_set1_ps(first), r, _mm512_set1_ps(second));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(third));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(fourth));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(fifth));
        let p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), one);
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(exp::LEAST));
        _mm512_maskz_scalef_ps(keep, p, n)
    }
    fn exp_short(x: __m512) -> __m512 {
        let (one, round) = (_mm512_set1_ps(1.0), _mm512_set1_ps(exp::ROUND));
        let log2_e = _mm512_set1_ps(std::f32::consts::LOG2_E);
        let n = _mm512_sub_ps(_mm512_fmadd_ps(x, log2_e, round), round);
        let r = _mm512_fmsub_ps(x, log2_e, n);
        let [first, second, third, fourth] = exp::SHORT;
        let p = _mm512_fmadd_ps(_mm512_set1_ps(first), r, _mm512_set1_ps(second));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(third));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(fourth));
        let p = _mm512_fmadd_ps(p, r, one);
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(exp::LEAST));
        _mm512_maskz_scalef_ps(keep, p, n)
    }
    fn split_pairs(group: &mut [f32; 32]) -> () {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        permute(group, [even, odd]);
    }
    fn join_pairs(group: &mut [f32; 32]) -> () {
        let first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        permute(group, [first, second]);
    }
    fn reduce_add(v: __m512) -> f32 {
        _mm512_reduce_add_ps(v)
    }
    fn reduce_max(v: __m512) -> f32 {
        _mm512_reduce_max_ps(v)
    }
    fn reduce_add8(v: [__m512; 8]) -> [f32; 8] {
        fold::reduce_add8(v)
    }
    fn reduce_add16(v: [[__m512; 8]; 2]) -> [f32; 16] {
        fold::reduce_add16(v)
    }
    fn any_greater(a: __m512, b: __m512) -> bool {
        _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0
    }
    fn splat_bits(word: u32) -> __m512i {
        _mm512_set1_epi32(word.cast_signed())
    }
    // Counts are constants where the primitives are used, and become immediates.
    fn shl(x: __m512i, bits: u32) -> __m512i {
        _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits.cast_signed()))
    }
    fn shr(x: __m512i, bits: u32) -> __m512i {
        _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits.cast_signed()))
    }
    fn shl_each(x: __m512i, bits: __m512i) -> __m512i {
        _mm512_sllv_epi32(x, bits)
    }
    fn shr_each(x: __m512i, bits: __m512i) -> __m512i {
        _mm512_srlv_epi32(x, bits)
    }
    fn nibble(x: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)))
    }
    fn flip(x: __m512, signs: __m512i) -> __m512 {
        let signs = _mm512_and_si512(signs, _mm512_set1_epi32(i32::MIN));
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), signs))
    }
    fn lookup4(table: &[f32; 4], code: __m512i) -> __m512 {
        // SAFETY: an array of four.
        let four = unsafe { _mm_loadu_ps(table.as_ptr()) };
        _mm512_permutevar_ps(_mm512_broadcast_f32x4(four), code)
    }
    fn lookup32(table: &[f32; 32], low: __m512i, high: __m512i) -> __m512 {
        // SAFETY: the first sixteen of 32.
        let lower = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        // SAFETY: the other sixteen.
        let upper = unsafe { _mm512_loadu_ps(table.as_ptr().wrapping_add(16)) };
        let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
        // The instruction reads five bits of an index; the highest selects the table.
        let index = _mm512_or_si512(low, _mm512_slli_epi32::<4>(high));
        _mm512_permutex2var_ps(lower, index, upper)
    }
    // A permutation reads four bits of an index: sign and magnitude at once.
    fn symmetric16(magnitudes: &[f32; 8], code: __m512i) -> __m512 {
        // SAFETY: an array of eight.
        let positive = unsafe { _mm256_loadu_ps(magnitudes.as_ptr()) };
        let negative = _mm256_xor_ps(positive, _mm256_set1_ps(-0.0));
        let both = _mm512_insertf32x8::<1>(_mm512_castps256_ps512(positive), negative);
        _mm512_permutexvar_ps(code, both)
    }
    fn splat_f16(bits: u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_set1_epi16(bits.cast_signed()))
    }
}

/// Permutes 32 values: each half is taken from the given indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn permute(group: &mut [f32; 32], from: [__m512i; 2]) {
    let [first, second] = [0, 16].map(|at| group.as_ptr().wrapping_add(at));
    // SAFETY: the first sixteen.
    let first = unsafe { _mm512_loadu_ps(first) };
    // SAFETY: the other sixteen.
    let second = unsafe { _mm512_loadu_ps(second) };
    for (half, from) in group.as_chunks_mut::<16>().0.iter_mut().zip(from) {
        let values = _mm512_permutex2var_ps(first, from, second);
        // SAFETY: sixteen floats.
        unsafe { _mm512_storeu_ps(half.as_mut_ptr(), values) };
    }
}

crate::table::table! {
    [#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]] Avx512, Avx512(())
}
