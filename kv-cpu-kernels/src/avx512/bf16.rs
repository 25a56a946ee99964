//! Products of bf16: AVX-512 BF16.
#![expect(
    clippy::inline_always,
    reason = "kernel code: helpers must inline into the function that carries the target features"
)]
use std::arch::x86_64::{__m512, __m512bh, __m512i, _mm512_dpbf16_ps};

use super::Avx512;
use crate::qk::DotBf16;

/// Witness that the instructions may run, as [`Avx512`] is.
#[derive(Clone, Copy)]
pub(super) struct Bf16(pub(super) Avx512);

impl DotBf16 for Bf16 {
    type S = Avx512;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
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
        // SAFETY: a `Bf16` exists only where the features do.
        unsafe { inner(a, b, sums) }
    }
}
