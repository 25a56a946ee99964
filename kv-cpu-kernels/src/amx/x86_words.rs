//! Vectors that pack values into blocks: AVX-512.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted by callers, and helpers must inline into the \
              `#[target_feature]` caller"
)]
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::asm;
use std::arch::x86_64::*;

use super::unit::Words;
use super::{BLOCK, UPPER};
use crate::avx512::Avx512;
use crate::simd::Simd;

impl Words for Avx512 {
    #[inline(always)]
    fn truncate(self, v: __m512) -> __m512 {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn inner(v: __m512) -> __m512 {
            let upper = _mm512_set1_epi32(UPPER.cast_signed());
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper))
        }
        // SAFETY: an `Avx512` exists only where the features do.
        unsafe { inner(v) }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut u32, low: __m512, high: __m512) {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn inner(to: *mut u32, low: __m512, high: __m512) {
            let upper = _mm512_set1_epi32(UPPER.cast_signed());
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            let high = _mm512_and_si512(_mm512_castps_si512(high), upper);
            let words = _mm512_or_si512(low, high);
            // SAFETY: the caller's condition.
            unsafe { _mm512_storeu_si512(to.cast(), words) };
        }
        // SAFETY: an `Avx512` exists only where the features do; condition 1.
        unsafe { inner(to, low, high) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, to: [*mut u32; 2], low: __m512i, high: __m512i) {
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        unsafe fn inner([lower, upper]: [*mut u32; 2], low: __m512i, high: __m512i) {
            let upper_half = _mm512_set1_epi32(UPPER.cast_signed());
            let (shifted, down) = (_mm512_slli_epi32::<16>(high), _mm512_srli_epi32::<16>(low));
            // Selects the second operand where the first is set, else the third.
            let lows = _mm512_ternarylogic_epi32::<0xca>(upper_half, shifted, low);
            let highs = _mm512_ternarylogic_epi32::<0xca>(upper_half, high, down);
            // SAFETY: the caller's condition.
            unsafe { _mm512_storeu_si512(lower.cast(), lows) };
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(upper.cast(), highs) };
        }
        // SAFETY: an `Avx512` exists only where the features do; condition 1.
        unsafe { inner(to, low, high) }
    }
    #[inline(always)]
    unsafe fn transpose(
        self,
        from: *const u32,
        (to, stride): (*mut u32, usize),
        column_count: usize,
    ) {
        for first in (0..column_count).step_by(4) {
            // SAFETY: condition 1.
            let columns = unsafe { columns(self, from.wrapping_add(first).cast()) };
            for (i, column) in columns.into_iter().enumerate() {
                let to = to.wrapping_add((first + i) * stride).cast();
                // SAFETY: a row of the block, by condition 1.
                unsafe { self.store(to, 0, column) };
            }
        }
    }
}

/// Returns the first four columns of a block. 128-bit lane `i` of vector `j` is those of row `4 i +
/// j`, and four vectors are transposed at once.
///
/// # Safety
/// 1. They are readable.
#[inline(always)]
unsafe fn columns(_witness: Avx512, from: *const f32) -> [__m512; 4] {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn inner(from: *const f32) -> [__m512; 4] {
        let mut rows = [_mm512_setzero_ps(); 4];
        for (j, row) in rows.iter_mut().enumerate() {
            let from = from.wrapping_add(j * BLOCK);
            // Masked loads. The compiler would emit insertions, which execute on one port only.
            // SAFETY: four floats of four rows, by the caller's condition.
            unsafe {
                asm!(
                    "vmovups {row:x}, [{from}]",
                    "vbroadcastf32x4 {row}{{{second}}}, [{from} + 256]",
                    "vbroadcastf32x4 {row}{{{third}}}, [{from} + 512]",
                    "vbroadcastf32x4 {row}{{{fourth}}}, [{from} + 768]",
                    row = out(zmm_reg) *row, from = in(reg) from,
                    second = in(kreg) 0xf0_u16, third = in(kreg) 0xf00_u16,
                    fourth = in(kreg) 0xf000_u16,
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
        let [a, b, c, d] = rows;
        let [ab, cd] = [_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d)];
        let [ab_high, cd_high] = [_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d)];
        [
            _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd),
            _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd),
            _mm512_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
            _mm512_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
        ]
    }
    // SAFETY: an `Avx512` exists only where the features do; condition 1.
    unsafe { inner(from) }
}
