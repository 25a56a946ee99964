//! Products of words of 16 bits: AVX-512 VNNI.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512;
use super::fold::by_bit;
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
        let [kept, moved] = by_bit(bit, a, b);
        _mm512_add_epi32(_mm512_castps_si512(kept), _mm512_castps_si512(moved))
    }
    fn floats(sums: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(sums)
    }
}
