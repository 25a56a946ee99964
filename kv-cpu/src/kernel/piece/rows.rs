//! Rows of K or V of a piece: where they lie, and what they are multiplied with.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and helpers must melt into the \
              function that carries the target features"
)]
use super::super::RowScale;
use super::super::simd::Simd;
use super::{Meeting, PIECE, Piece};
use crate::encoding::RowLayout;
use crate::num::to_u32;

/// Rows of K or V of a piece.
pub(in super::super) struct Rows<'a> {
    pub(super) first: *const u8,
    pub(super) stride: usize,
    pub(super) tokens: usize,
    pub(super) layout: &'a RowLayout,
}

impl<'a> Rows<'a> {
    /// Those of K, or those of V.
    ///
    /// # Safety
    /// 1. The piece is one of the strip, which was checked: so many rows of the layout lie there.
    #[inline(always)]
    pub(super) unsafe fn new(args: &Meeting<'a>, piece: &Piece, plane: usize) -> Self {
        Self {
            first: piece.begins[plane],
            stride: args.strip.planes[plane].stride,
            tokens: piece.tokens,
            layout: args.layouts[plane],
        }
    }

    /// Where the row of a token begins; of those behind the last one, that of the last one.
    #[inline(always)]
    pub(super) fn at(&self, token: usize) -> *const u8 {
        self.first.wrapping_add(token.min(self.tokens - 1) * self.stride)
    }

    /// What the tokens are multiplied with, and with a factor; `None` where that is 1 for all.
    #[inline(always)]
    pub(super) fn factors<S: Simd>(
        &self,
        s: S,
        scale: RowScale<'_>,
        factor: f32,
    ) -> Option<[f32; PIECE]> {
        match scale {
            RowScale::Given(scale) if (scale * factor).to_bits() == 1.0_f32.to_bits() => None,
            RowScale::Given(scale) => Some([scale * factor; PIECE]),
            RowScale::Each(scales) => {
                let mut all = [1.0; PIECE];
                all[..self.tokens].copy_from_slice(&scales[..self.tokens]);
                Some(all.map(|scale| scale * factor))
            }
            RowScale::Stored => Some(self.stored_scales(s, factor)),
        }
    }

    /// The scales behind the codes of the rows, times a factor.
    #[inline(always)]
    fn stored_scales<S: Simd>(&self, s: S, factor: f32) -> [f32; PIECE] {
        let (at, mut scales) = (self.layout.scales(), [0.0; PIECE]);
        let values = if self.tokens == PIECE && at >= 2 && self.stride < 1 << 27 {
            // SAFETY: scales behind the codes of rows, see `new`, and bytes of codes before them;
            // not too far from each other.
            unsafe { s.gather_f16(self.first.wrapping_add(at), to_u32(self.stride)) }
        } else {
            let mut bits = [0; PIECE];
            for token in 0..self.tokens {
                let scale = self.at(token).wrapping_add(at).cast::<[u8; 2]>();
                // SAFETY: the scale behind the codes of a row, see `new`.
                bits[token] = u16::from_le_bytes(unsafe { scale.read() });
            }
            // SAFETY: an array of as many.
            unsafe { s.load_f16(bits.as_ptr(), 0) }
        };
        // SAFETY: an array of as many.
        unsafe { s.store(scales.as_mut_ptr(), 0, s.mul(values, s.splat(factor))) };
        scales
    }

    /// Whether codes of E4M3 are such as [`FiniteE4m3`](super::super::stored::FiniteE4m3) takes.
    #[inline(always)]
    pub(super) fn are_finite<S: Simd>(&self, s: S) -> bool {
        let dim = self.layout.dim();
        if self.stride == dim {
            // SAFETY: rows that follow each other, all bytes of which are values, see `new`.
            return !unsafe { s.has_nan_e4m3(&[self.first], self.tokens * dim) };
        }
        let mut rows = [self.first; PIECE];
        for token in 0..PIECE {
            rows[token] = self.at(token);
        }
        // SAFETY: rows of the layout, see `new`, whose values are their first bytes.
        !unsafe { s.has_nan_e4m3(&rows, dim) }
    }
}
