//! Products of words of 16 bits: AVX-512 VNNI.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512;
use super::fold::{halves, neighbours, pairs, quarters};
use crate::kernel::piece::DotWords;

/// Witness that the instructions may run, as [`Avx512`] is.
#[derive(Clone, Copy)]
pub(super) struct Vnni(pub(super) Avx512);

/// Writes each primitive twice: behind the features, and as the trait's method that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl DotWords for Vnni {
            type S = Avx512;

            #[inline(always)]
            fn simd(self) -> Avx512 {
                self.0
            }
            #[inline(always)]
            unsafe fn load(self, from: *const u8) -> __m512i {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw")]
                fn widen(bytes: __m256i) -> __m512i {
                    _mm512_cvtepi8_epi16(bytes)
                }
                // SAFETY: condition 1 of `DotWords::load`, and the witness.
                let bytes = unsafe { _mm256_loadu_si256(from.cast()) };
                // SAFETY: the witness.
                unsafe { widen(bytes) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u32, at: usize, v: __m512i) {
                // SAFETY: condition 1 of `DotWords::store`, and the witness.
                unsafe { _mm512_storeu_si512(to.wrapping_add(at).cast(), v) }
            }
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: a `Vnni` exists only where the features do.
                unsafe { inner($($arg),*) }
            })*
        }
    };
}

primitives! {
    // The compiler makes two instructions of the intrinsic.
    fn dot(a: __m512i, b: __m512i, sums: __m512i) -> __m512i {
        let mut sums = sums;
        // SAFETY: this changes no more than the register, and the witness.
        unsafe {
            asm!(
                "vpdpwssd {sums}, {a}, {b}",
                sums = inout(zmm_reg) sums,
                a = in(zmm_reg) a,
                b = in(zmm_reg) b,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sums
    }
    fn add(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    fn fold(bit: u32, a: __m512i, b: __m512i) -> __m512i {
        let [a, b] = [_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)];
        let [kept, moved] = match bit {
            0 => neighbours(a, b),
            1 => pairs(a, b),
            2 => quarters(a, b),
            _ => halves(a, b),
        };
        _mm512_add_epi32(_mm512_castps_si512(kept), _mm512_castps_si512(moved))
    }
    fn floats(sums: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(sums)
    }
    fn beside(a: __m512i, b: __m512i) -> [__m512i; 2] {
        [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)]
    }
    // The lower one has the first half of each quarter of the words.
    fn in_order(sums: [__m512i; 2]) -> [__m512; 2] {
        let first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        let second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        let [lower, upper] = sums;
        [_mm512_cvtepi32_ps(_mm512_permutex2var_epi32(lower, first, upper)),
         _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(lower, second, upper))]
    }
    fn is_finite(v: __m512) -> bool {
        _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(v, _mm512_set1_ps(f32::MAX)) == 0
    }
    fn exponent(v: __m512, n: usize) -> __m512 {
        let mut v = _mm512_max_ps(v, _mm512_permute_ps::<0b10_11_00_01>(v));
        if n > 2 {
            v = _mm512_max_ps(v, _mm512_permute_ps::<0b01_00_11_10>(v));
        }
        if n > 4 {
            v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
        }
        if n > 8 {
            v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
        }
        _mm512_sub_ps(_mm512_set1_ps(14.0), _mm512_getexp_ps(v))
    }
    fn times_power(v: __m512, exponent: __m512) -> __m512 {
        _mm512_scalef_ps(v, exponent)
    }
    fn round_to_pairs(v: __m512) -> __m512i {
        let even = _mm512_min_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(0x7fff));
        let odd = _mm512_srli_epi64::<16>(even);
        _mm512_mask_blend_epi16(0xaaaa_aaaa, even, odd)
    }
}
