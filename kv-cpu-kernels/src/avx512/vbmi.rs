//! FP8 by lookups of bytes: AVX-512 VBMI.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use super::Avx512;
use crate::decode::{Fp8Table, LookUp};

/// Witness that the instructions may run, as [`Avx512`] is.
#[derive(Clone, Copy)]
pub(super) struct Vbmi(pub(super) Avx512);

/// Writes each primitive twice: as a function with the target features, and as the trait's method
/// that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl LookUp for Vbmi {
            type S = Avx512;

            #[inline(always)]
            fn simd(self) -> Avx512 {
                self.0
            }
            $(#[inline(always)]
            unsafe fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
                unsafe fn inner($($arg: $type),*) -> $result $body
                // SAFETY: condition 1, and a `Vbmi` exists only where the features do.
                unsafe { inner($($arg),*) }
            })*
        }
    };
}

primitives! {
    // Unpacking interleaves within quarters of 128 bits, so the 64-bit halves of the codes are
    // reordered first.
    fn words(table: &'static Fp8Table, from: *const u8) -> [__m512i; 2] {
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        // SAFETY: condition 1.
        let of = _mm512_permutexvar_epi64(order, unsafe { _mm512_loadu_si512(from.cast()) });
        let [lower, upper] = look_up(table, of);
        [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)]
    }
    fn floats(table: &'static Fp8Table, from: *const u8) -> [__m512; 4] {
        // SAFETY: condition 1.
        let of = in_quarters(unsafe { _mm512_loadu_si512(from.cast()) });
        let [lower, upper] = look_up(table, of);
        let [a, b] = widen(_mm512_unpacklo_epi8(lower, upper));
        let [c, d] = widen(_mm512_unpackhi_epi8(lower, upper));
        [a, b, c, d]
    }
    fn half(table: &'static Fp8Table, from: *const u8) -> [__m512; 2] {
        // SAFETY: condition 1.
        let half = _mm512_castsi256_si512(unsafe { _mm256_loadu_si256(from.cast()) });
        let [lower, upper] = look_up(table, in_quarters(half));
        widen(_mm512_unpacklo_epi8(lower, upper))
    }
}

/// Transposes 4 by 4 words of four codes; unpacking twice transposes them back.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_quarters(codes: __m512i) -> __m512i {
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, codes)
}

/// Returns the lower and upper bytes of 64 codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up(table: &'static Fp8Table, of: __m512i) -> [__m512i; 2] {
    // The instruction reads seven bits of an index, which leaves out the sign.
    let lower = _mm512_permutex2var_epi8(load(&table.lower[0]), of, load(&table.lower[1]));
    let upper = _mm512_permutex2var_epi8(load(&table.upper[0]), of, load(&table.upper[1]));
    // The first operand, with the bits of the second where the third is set.
    let sign = _mm512_set1_epi8(i8::MIN);
    [lower, _mm512_ternarylogic_epi32::<0xf8>(upper, of, sign)]
}

/// Widens words to the upper halves of `f32`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen(words: __m512i) -> [__m512; 2] {
    let zero = _mm512_setzero_si512();
    let lower = _mm512_unpacklo_epi16(zero, words);
    [_mm512_castsi512_ps(lower), _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, words))]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &'static [u8; 64]) -> __m512i {
    // SAFETY: an array of as many bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
