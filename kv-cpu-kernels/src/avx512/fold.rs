//! Sums of eight vectors at once.
use std::arch::x86_64::{
    __m512, _mm256_storeu_ps, _mm512_add_ps, _mm512_castps512_ps256, _mm512_mask_blend_ps,
    _mm512_permute_ps, _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_setr_epi32,
    _mm512_shuffle_f32x4, _mm512_shuffle_ps,
};

/// The sum of the lanes of each vector. Adds halves, quarters, pairs, then neighbours, which is the
/// order of `_mm512_reduce_add_ps`; lanes that one of two vectors no longer needs take the other's,
/// so a blend and a permutation serve both.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn reduce_add8([a, b, c, d, e, f, g, h]: [__m512; 8]) -> [f32; 8] {
    let [ab, cd, ef, gh] = [halves(a, b), halves(c, d), halves(e, f), halves(g, h)];
    let all = pairs(quarters(ab, cd), quarters(ef, gh));
    let all = _mm512_add_ps(all, _mm512_permute_ps::<0b10_11_00_01>(all));
    let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    let sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all));
    let mut to = [0.0; 8];
    // SAFETY: the array has room for eight floats.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), sums) };
    to
}

/// Adds the halves of both: those of `a` to the lower half of the result, of `b` to the upper one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn halves(a: __m512, b: __m512) -> __m512 {
    let kept = _mm512_mask_blend_ps(0xff00, a, b);
    _mm512_add_ps(kept, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b))
}

/// The same within halves: quarters of `a` in the even ones, of `b` in the odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quarters(a: __m512, b: __m512) -> __m512 {
    let order = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    let kept = _mm512_mask_blend_ps(0xf0f0, a, b);
    _mm512_add_ps(kept, _mm512_permutex2var_ps(a, order, b))
}

/// The same within quarters.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn pairs(a: __m512, b: __m512) -> __m512 {
    let kept = _mm512_mask_blend_ps(0xcccc, a, b);
    _mm512_add_ps(kept, _mm512_shuffle_ps::<0b01_00_11_10>(a, b))
}
