//! What the loops over the rows of a tile share: bounds, scales of rows, rests.
//!
//! [`super::scores`] has the dot products with K, [`super::sums`] the weighted sums of V.
//!
//! A sum has the same bits however its rows are grouped: every product of a row is added in the
//! same order for one, two or four rows at a time, and in every encoding. That order takes a group
//! of 32 values as pairs of vectors 16 values apart, which is how nibbles lie in bytes, so that
//! what is loaded for one vector serves the other.
//!
//! A row's own scale multiplies its scores and weights instead of its values: the exact result is
//! the same, but products are rounded before the scale instead of after it, and a score is rounded
//! once more.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use std::mem::MaybeUninit;

use super::simd::{LANES_MAX, Simd};
use super::stored::{GROUP, Rest, Stored, whole};
use super::{BLOCK, ROWS, RowScale, TILE, TileRows};
use crate::encoding::RowLayout;
use crate::num::to_u32;

/// From one vector of a pair to the other.
pub(super) const HALF: usize = GROUP / 2;

pub(super) fn check_rows(rows: &TileRows<'_>, (begin, end): (usize, usize), layout: &RowLayout) {
    assert!(begin <= end && end <= rows.len(), "a token range lies inside its tile");
    assert!(rows.bytes() >= layout.bytes(), "a row holds its values");
}

/// How often so many rows meet a tile: [`ROWS`] at a time, then two, then one.
pub(super) const fn visits(rows: usize) -> usize {
    rows / ROWS + rows % ROWS / 2 + rows % 2
}

/// What the tokens of a tile are multiplied with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    /// By token; 1 outside of their range.
    all: [f32; TILE],
    /// One past the last that may be something else, in whole vectors.
    end: usize,
}

impl Factors {
    /// Those of the tokens of a range; `None` where that is 1 for all.
    #[inline(always)]
    pub(super) fn of<S: Simd, E: Stored>(
        s: S,
        rows: &TileRows<'_>,
        (begin, end): (usize, usize),
        layout: &RowLayout,
        scale: RowScale<'_>,
    ) -> Option<Self> {
        let mut all = [1.0; TILE];
        match scale {
            RowScale::Given(scale) if (scale * E::FACTOR).to_bits() == 1.0_f32.to_bits() => {
                return None;
            }
            RowScale::Given(scale) => all[begin..end].fill(scale),
            RowScale::Each(scales) => all[begin..end].copy_from_slice(&scales[begin..end]),
            RowScale::Stored => stored(s, rows, (begin, end), layout, &mut all),
        }
        if E::FACTOR.to_bits() != 1.0_f32.to_bits() {
            for factor in &mut all[begin..end] {
                *factor *= E::FACTOR;
            }
        }
        Some(Self { all, end: end.next_multiple_of(S::LANES) })
    }

    /// Multiplies rows of scores or weights of a tile.
    #[inline(always)]
    pub(super) fn apply<S: Simd>(&self, s: S, rows: &mut [f32]) {
        for row in rows.as_chunks_mut::<TILE>().0 {
            let mut i = 0;
            while i < self.end {
                // SAFETY: `i + LANES <= TILE`, as `LANES` divides both.
                let values = unsafe { s.load(row.as_ptr(), i) };
                // SAFETY: as above.
                let factors = unsafe { s.load(self.all.as_ptr(), i) };
                // SAFETY: as above.
                unsafe { s.store(row.as_mut_ptr(), i, s.mul(values, factors)) };
                i += S::LANES;
            }
        }
    }
}

/// The scales behind the codes of the rows of a range; leaves others as they are.
#[inline(always)]
fn stored<S: Simd>(
    s: S,
    rows: &TileRows<'_>,
    (begin, end): (usize, usize),
    layout: &RowLayout,
    to: &mut [f32; TILE],
) {
    const ONE: u16 = 0x3c00;
    let at = layout.scales();
    let mut i = begin / S::LANES * S::LANES;
    while i < end {
        let even = rows.even(i / BLOCK).filter(|_| at >= 2 && begin <= i && i + BLOCK <= end);
        let values = if let Some((first, stride)) = even
            && stride < 1 << 27
        {
            let first = first.wrapping_add(i % BLOCK * stride + at);
            // SAFETY: scales behind the codes of rows, which callers have checked, and bytes of
            // codes before them; not too far from each other.
            unsafe { s.gather_f16(first, to_u32(stride)) }
        } else {
            let mut bits = [ONE; LANES_MAX];
            for token in begin.max(i)..end.min(i + S::LANES) {
                let scale = rows.at()[token].wrapping_add(at).cast::<[u8; 2]>();
                // SAFETY: the scale behind the codes of a row, which callers have checked.
                bits[token - i] = u16::from_le_bytes(unsafe { scale.read() });
            }
            // SAFETY: an array of as many.
            unsafe { s.load_f16(bits.as_ptr(), 0) }
        };
        // SAFETY: `i + LANES <= TILE`, as `LANES` divides both.
        unsafe { s.store(to.as_mut_ptr(), i, values) };
        i += S::LANES;
    }
}

/// The scales of a tile's rows.
#[inline(always)]
pub(super) fn row_scales<S: Simd>(s: S, rows: &TileRows<'_>, layout: &RowLayout) -> [f32; TILE] {
    check_rows(rows, (0, rows.len()), layout);
    let mut scales = [1.0; TILE];
    stored(s, rows, (0, rows.len()), layout, &mut scales);
    scales
}

/// Rests of the rows of a tile. Most rows have none, and four kilobytes are not cleared for them.
pub(super) type Rests = [MaybeUninit<Rest>; TILE];
/// None decoded yet.
pub(super) const NO_RESTS: Rests = [const { MaybeUninit::uninit() }; TILE];

/// Decodes the values of the tokens of a range that fill no vector, once for all query rows;
/// writes nothing where rows have none.
#[inline(always)]
pub(super) fn decode_rests<S: Simd, E: Stored>(
    s: S,
    rows: &TileRows<'_>,
    (begin, end): (usize, usize),
    layout: &RowLayout,
    rests: &mut Rests,
) {
    let whole = whole::<S, E>(layout.dim());
    if whole < layout.dim() {
        for (row, rest) in rows.at()[begin..end].iter().zip(&mut rests[begin..end]) {
            // SAFETY: a row of the layout, as callers have asserted, and where its rest begins.
            rest.write(unsafe { E::rest(s, *row, layout, whole) });
        }
    }
}
