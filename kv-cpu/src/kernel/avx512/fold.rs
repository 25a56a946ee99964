//! Vectors folded: lanes of two of them added to those of one.
use std::arch::x86_64::{
    __m512, _mm512_mask_blend_ps, _mm512_permutex2var_ps, _mm512_setr_epi32, _mm512_shuffle_f32x4,
    _mm512_shuffle_ps,
};

/// One step of [`fold_eight`].
macro_rules! fold {
    ($with:ident, $parts:expr) => {{
        let [a, b] = $parts;
        $with(a, b)
    }};
}

/// Folds eight vectors: halves, quarters, pairs, neighbours, which is the order of `reduce_add`.
/// What one of two vectors keeps the other gives up, so a blend and a permutation serve both. A
/// macro, as closures do not carry the features.
macro_rules! fold_eight {
    ($v:expr, $with:ident) => {{
        let [a, b, c, d, e, f, g, h] = $v;
        let [ab, cd, ef, gh] = [
            fold!($with, halves(a, b)),
            fold!($with, halves(c, d)),
            fold!($with, halves(e, f)),
            fold!($with, halves(g, h)),
        ];
        let [abcd, efgh] = [fold!($with, quarters(ab, cd)), fold!($with, quarters(ef, gh))];
        let all = fold!($with, pairs(abcd, efgh));
        let all = $with(all, _mm512_permute_ps::<0b10_11_00_01>(all));
        let order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 0, 0, 0, 0, 0, 0, 0, 0);
        let folded = _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all));
        let mut to = [0.0; 8];
        // SAFETY: the array has room for eight floats.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), folded) };
        to
    }};
}

pub(super) use {fold, fold_eight};

/// What a fold by a bit of the lane's number brings together. The bit is constant where it is used,
/// and one of these is left.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn by_bit(bit: u32, a: __m512, b: __m512) -> [__m512; 2] {
    match bit {
        0 => neighbours(a, b),
        1 => pairs(a, b),
        2 => quarters(a, b),
        _ => halves(a, b),
    }
}

/// What a fold of two vectors brings together: halves of `a` come to lie in the lower half of both
/// results, of `b` in the upper one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn halves(a: __m512, b: __m512) -> [__m512; 2] {
    [_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b)]
}

/// The same within halves: quarters of `a` in the even ones, of `b` in the odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn quarters(a: __m512, b: __m512) -> [__m512; 2] {
    let order = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    [_mm512_mask_blend_ps(0xf0f0, a, b), _mm512_permutex2var_ps(a, order, b)]
}

/// The same within quarters.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn pairs(a: __m512, b: __m512) -> [__m512; 2] {
    [_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps::<0b01_00_11_10>(a, b)]
}

/// The same within pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn neighbours(a: __m512, b: __m512) -> [__m512; 2] {
    let order = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    [_mm512_mask_blend_ps(0xaaaa, a, b), _mm512_permutex2var_ps(a, order, b)]
}
