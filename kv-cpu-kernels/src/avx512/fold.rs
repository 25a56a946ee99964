//! Sums of eight or sixteen vectors at once.
#![expect(
    clippy::large_types_passed_by_value,
    clippy::many_single_char_names,
    reason = "vectors in registers: functions are inlined"
)]
use std::arch::x86_64::{
    __m512, _mm256_storeu_ps, _mm512_add_ps, _mm512_castps512_ps256, _mm512_mask_blend_ps,
    _mm512_permute_ps, _mm512_permutex2var_ps, _mm512_permutexvar_ps, _mm512_setr_epi32,
    _mm512_shuffle_f32x4, _mm512_shuffle_ps, _mm512_storeu_ps,
};

/// The sum of the lanes of each vector. Adds halves, quarters, pairs, then neighbours, which is the
/// order of `_mm512_reduce_add_ps`; lanes that one vector no longer needs take those of another, so
/// a blend and a permutation serve two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn reduce_add16([a, b]: [[__m512; 8]; 2]) -> [f32; 16] {
    let all = neighbours(eight(a), eight(b));
    // Which lane has the sum of which vector.
    let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    let sums = _mm512_permutexvar_ps(order, all);
    let mut to = [0.0; 16];
    // SAFETY: the array has room for sixteen floats.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), sums) };
    to
}

/// The same for eight vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn reduce_add8(v: [__m512; 8]) -> [f32; 8] {
    let all = eight(v);
    let all = _mm512_add_ps(all, _mm512_permute_ps::<0b10_11_00_01>(all));
    let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    let mut to = [0.0; 8];
    let sums = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all));
    // SAFETY: the array has room for eight floats.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), sums) };
    to
}

/// Adds halves, quarters and pairs of eight vectors: two lanes of each are left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn eight([a, b, c, d, e, f, g, h]: [__m512; 8]) -> __m512 {
    let [ab, cd, ef, gh] = [halves(a, b), halves(c, d), halves(e, f), halves(g, h)];
    pairs(quarters(ab, cd), quarters(ef, gh))
}

/// Adds the halves of both: those of `a` to the lower half of the result, of `b` to the upper one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn halves(a: __m512, b: __m512) -> __m512 {
    let kept = _mm512_mask_blend_ps(0xff00, a, b);
    _mm512_add_ps(kept, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b))
}

/// Adds the quarters within halves: of `a` to the even quarters, of `b` to the odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn quarters(a: __m512, b: __m512) -> __m512 {
    let order = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    let kept = _mm512_mask_blend_ps(0xf0f0, a, b);
    _mm512_add_ps(kept, _mm512_permutex2var_ps(a, order, b))
}

/// Adds the pairs within quarters, likewise.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn pairs(a: __m512, b: __m512) -> __m512 {
    let kept = _mm512_mask_blend_ps(0xcccc, a, b);
    _mm512_add_ps(kept, _mm512_shuffle_ps::<0b01_00_11_10>(a, b))
}

/// Adds the lanes within pairs, likewise.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn neighbours(a: __m512, b: __m512) -> __m512 {
    let kept = _mm512_mask_blend_ps(0xaaaa, a, b);
    let order = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    _mm512_add_ps(kept, _mm512_permutex2var_ps(a, order, b))
}
