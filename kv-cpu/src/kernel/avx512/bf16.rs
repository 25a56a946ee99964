//! Products of bf16: AVX-512 BF16.
#![expect(
    clippy::inline_always,
    reason = "kernel code: helpers must melt into the function that carries the target features"
)]
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_castps_si512, _mm512_dpbf16_ps, _mm512_or_si512,
    _mm512_srli_epi32,
};

use super::Avx512;
use crate::kernel::piece::{self, DotBf16, Loop, Meeting, Piece};

/// Witness that the instructions may run, as [`Avx512`] is.
#[derive(Clone, Copy)]
struct Avx512Bf16(Avx512);

impl DotBf16 for Avx512Bf16 {
    type S = Avx512;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn pairs(self, [even, odd]: [__m512; 2]) -> __m512i {
        #[inline]
        #[target_feature(enable = "avx512f")]
        fn inner(even: __m512, odd: __m512) -> __m512i {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(even));
            _mm512_or_si512(_mm512_castps_si512(odd), low)
        }
        // SAFETY: an `Avx512Bf16` exists only where the features do.
        unsafe { inner(even, odd) }
    }
    #[inline(always)]
    fn dot(self, a: __m512i, b: __m512i, sums: __m512) -> __m512 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bf16")]
        fn inner(a: __m512i, b: __m512i, sums: __m512) -> __m512 {
            // SAFETY: vectors of as many bits, all of which are values of both types.
            let a = unsafe { std::mem::transmute::<__m512i, __m512bh>(a) };
            // SAFETY: as above.
            let b = unsafe { std::mem::transmute::<__m512i, __m512bh>(b) };
            _mm512_dpbf16_ps(sums, a, b)
        }
        // SAFETY: an `Avx512Bf16` exists only where the features do.
        unsafe { inner(a, b, sums) }
    }
}

/// The loop over K of pieces of bf16 for queries of bf16, where the CPU has such products.
pub(in super::super) fn weigh() -> Option<Loop> {
    const WEIGH: Loop = weigh;
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn weigh(args: &mut Meeting<'_>, piece: &Piece) {
        // SAFETY: the condition is passed on.
        unsafe { piece::weigh_bf16(Avx512Bf16(Avx512::witness()), args, piece) };
    }
    is_x86_feature_detected!("avx512bf16").then_some(WEIGH)
}
