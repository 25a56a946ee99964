//! Rows that follow each other: where they lie, or as copies.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted by callers, and loops must melt into the function \
              that carries the target features"
)]
use super::{BLOCK, PARTS, TileRows};

/// Rows that follow each other, so many bytes apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct EvenRows {
    pub(super) first: *const u8,
    pub(super) stride: usize,
}

impl EvenRows {
    #[inline(always)]
    pub(super) fn at(self, index: usize) -> *const u8 {
        self.first.wrapping_add(index * self.stride)
    }
    /// Those from a row on.
    #[inline(always)]
    pub(super) fn from(self, index: usize) -> Self {
        Self { first: self.at(index), ..self }
    }
}

/// The rows of so many blocks of tokens, so many bytes of each made so many by zeros: where they
/// lie or, if they do not follow each other or are too short, where they are copied to; zeros for
/// tokens that there are not.
#[inline(always)]
pub(super) fn even_parts(
    rows: &TileRows<'_>,
    (parts, bytes, width): (usize, usize, usize),
    to: &mut [u8],
) -> [EvenRows; PARTS] {
    let mut found = [EvenRows { first: to.as_ptr(), stride: width }; PARTS];
    let places = found.iter_mut().zip(to.chunks_exact_mut(BLOCK * width)).take(parts);
    for (part, (even, to)) in places.enumerate() {
        if let Some((first, stride)) = rows.even(part).filter(|_| bytes == width) {
            *even = EvenRows { first, stride };
            continue;
        }
        to.fill(0);
        let rows = rows.iter().skip(part * BLOCK).take(BLOCK);
        for (to, row) in to.chunks_exact_mut(width).zip(rows) {
            to[..bytes].copy_from_slice(&row[..bytes]);
        }
        even.first = to.as_ptr();
    }
    found
}
