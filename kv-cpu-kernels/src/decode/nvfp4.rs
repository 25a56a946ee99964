//! NVFP4: E2M1 in nibbles, one E4M3 scale for 16 values.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use super::{Decode, HALF, Rest, group_scale, rest_begin};
use crate::layout::RowLayout;
use crate::simd::{LANES_MAX, Simd};

/// E2M1 in nibbles, one E4M3 scale for 16.
pub(crate) struct Nvfp4;

/// Magnitudes of E2M1.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl Nvfp4 {
    /// Decodes the vector of codes at `codes + offset`, whose 16 values share scale `index`.
    ///
    /// # Safety
    /// 1. The bytes of the vector's codes are readable, and the row has the scale.
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        (row, layout): (*const u8, &RowLayout),
        (codes, offset): (*const u8, usize),
        index: usize,
    ) -> S::F {
        // SAFETY: condition 1.
        let codes = unsafe { s.load_nibbles(codes, offset) };
        // SAFETY: condition 1.
        let scale = unsafe { group_scale(row, layout, index) };
        s.mul(s.symmetric16(&E2M1, codes), s.splat(scale))
    }
}

impl Decode for Nvfp4 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        let at = group + offset;
        // SAFETY: inside the row's codes, and a vector lies in one group of 16, by condition 2.
        let first = unsafe { Self::load(s, (row, layout), (row, at), at / HALF) };
        // SAFETY: as above.
        [first, unsafe { Self::load(s, (row, layout), (row, at + HALF), at / HALF + 1) }]
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        let begin = rest_begin(layout.dim());
        let n = layout.dim() - begin;
        let mut bytes = [0; LANES_MAX];
        let len = n.div_ceil(2).min(LANES_MAX);
        let codes = row.wrapping_add(begin / 2);
        // SAFETY: the last bytes of codes, as `begin` is even; the array is new.
        unsafe { std::ptr::copy_nonoverlapping(codes, bytes.as_mut_ptr(), len) };
        let mut rest = [0.0; super::GROUP];
        for i in (0..n).step_by(S::LANES) {
            let index = (begin + i) / HALF;
            // SAFETY: the array has codes of a whole group, and value `i` has a scale.
            let values = unsafe { Self::load(s, (row, layout), (bytes.as_ptr(), i), index) };
            // SAFETY: `i + LANES` is at most `GROUP`.
            unsafe { s.store(rest.as_mut_ptr(), i, values) };
        }
        rest[n..].fill(0.0);
        rest
    }
    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        let begin = rest_begin(layout.dim());
        // SAFETY: the last group of sixteen is whole, by condition 2.
        unsafe { Self::load(s, (row, layout), (row, begin + offset), begin / HALF) }
    }
}
