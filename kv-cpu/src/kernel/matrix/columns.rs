//! Few query rows as columns, in the order in which rows of K bring their values.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::simd::LINE;
use super::super::stored::{F32, GROUP};
use super::stage::{group, rest};
use super::unit::Words;
use super::{BLOCK, QueryShape, WORDS};
use crate::encoding::{Element, RowLayout};

impl QueryShape {
    /// Words of the rows as columns.
    pub(crate) fn column_words(self) -> usize {
        let blocks = self.rows.div_ceil(BLOCK / self.terms);
        blocks.saturating_mul(self.dim.div_ceil(GROUP)).saturating_mul(BLOCK * self.columns)
    }
}

/// Brings query rows into blocks, a column of words for each term of each, for rows of codes if
/// `ARE_CODES`.
#[inline(always)]
pub(super) fn columns<W: Words, const ARE_CODES: bool>(
    w: W,
    (rows, stride): (&[f32], usize),
    shape: QueryShape,
    to: &mut [u32],
) {
    let (steps, per_block) = (shape.dim.div_ceil(GROUP), BLOCK / shape.terms);
    assert!(
        rows.len() >= shape.rows * stride
            && (1..=stride).contains(&shape.dim)
            && to.len() >= shape.column_words(),
        "rows lie inside their slices"
    );
    let layout = RowLayout::plain(Element::F32, shape.dim);
    let columns = shape.columns;
    let blocks = rows[..shape.rows * stride].chunks(per_block * stride);
    for (rows, to) in blocks.zip(to.chunks_exact_mut(steps * BLOCK * columns)) {
        for (step, to) in to.chunks_exact_mut(BLOCK * columns).enumerate() {
            // A row of words for each column, before the block is turned.
            let (mut block, mut turned) = ([0_u32; WORDS], [0_u32; WORDS]);
            for (i, row) in rows.chunks_exact(stride).enumerate() {
                let line = row[..shape.dim].as_chunks::<LINE>().0.get(step / 2);
                let mut values = if let Some(line) = line.filter(|_| ARE_CODES) {
                    in_line(w, line, step % 2)
                } else {
                    // SAFETY: a row of `dim` floats, whose groups are `steps`.
                    unsafe { group::<W, F32>(w, row.as_ptr().cast(), &layout, step * GROUP) }
                };
                for term in 0..shape.terms {
                    let words = block[(i * shape.terms + term) * BLOCK..][..BLOCK].as_mut_ptr();
                    // SAFETY: a row of words.
                    unsafe { w.store_words(words, values[0], values[1]) };
                    values = rest(w, values);
                }
            }
            // SAFETY: blocks.
            unsafe { w.turn(block.as_ptr(), (turned.as_mut_ptr(), BLOCK), BLOCK) };
            for (to, from) in to.chunks_exact_mut(columns).zip(turned.as_chunks::<BLOCK>().0) {
                to.copy_from_slice(&from[..columns]);
            }
        }
    }
}

/// What of a line of values is multiplied with a row of [`super::unit::Unit::code_line`].
#[inline(always)]
fn in_line<W: Words>(w: W, line: &[f32; LINE], row: usize) -> [W::F; 2] {
    const { assert!(LINE == 4 * BLOCK, "four values a word of both rows") };
    let (mut low, mut high) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (i, values) in line.as_chunks::<4>().0.iter().enumerate() {
        (low[i], high[i]) = (values[row], values[row + 2]);
    }
    // SAFETY: a vector.
    let low = unsafe { w.load(low.as_ptr(), 0) };
    // SAFETY: as above.
    [low, unsafe { w.load(high.as_ptr(), 0) }]
}
