//! Few query rows by rows of signed bytes, which are multiplied as they are.
//!
//! Values of a query become integers of up to 31 bits, in steps of `2^-31` to `2^-30` of the
//! largest, and those four digits of base 256, from -128 to 127. A digit is a column of its own;
//! products of digits and bytes are added as integers, exactly, and as `f32` only after that.
//!
//! Weights are no integers: small ones count where V is zero for the others.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::TILE;
use super::super::ahead::{Ahead, part};
use super::super::simd::LINE;
use super::super::stored::Int8;
use super::super::tile::{Factors, check_rows};
use super::even::even_parts;
use super::unit::{Side, Unit, Words};
use super::{BLOCK, Memory, Queries, QueryShape, StoredRows, WORDS};

/// Digits of a number.
pub(super) const DIGITS: usize = 4;
/// Rows whose digits fill a block.
const ROWS: usize = BLOCK / DIGITS;

impl QueryShape {
    fn byte_steps(self) -> usize {
        self.dim.div_ceil(LINE)
    }

    /// Words of the rows as columns of digits, and of a factor for each.
    pub(crate) fn byte_words(self) -> usize {
        let blocks = self.rows.div_ceil(ROWS);
        let words = blocks.saturating_mul(self.byte_steps()).saturating_mul(WORDS);
        words.saturating_add(self.rows)
    }
}

/// The power of two that makes integers of 31 bits of finite numbers of which this is the largest,
/// and its inverse. Of tiny numbers fewer bits are left.
#[inline(always)]
fn scale_of(largest: f32) -> (f32, f32) {
    // Biased exponents: that of `2^(29 - e)`, where `e` is the largest's.
    let exponent = (127 + 29 + 127 - (largest.to_bits() >> 23)).min(253);
    (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23))
}

/// The largest of some numbers, or one that is not finite, without its sign.
#[inline(always)]
fn largest(numbers: &[f32]) -> f32 {
    // In the order of bits, numbers that are not finite come last.
    f32::from_bits(numbers.iter().fold(0, |top, x| top.max(x.to_bits() & !SIGN)))
}
const SIGN: u32 = 1 << 31;

/// Brings the digits of a line of numbers into rows of bytes, the lowest first, in the order of
/// [`Words::store_digits`]. Returns what the integers are multiplied with to be the numbers, which
/// is NaN where one is not finite.
#[inline(always)]
fn digits<W: Words>(w: W, numbers: &[f32; LINE], largest: f32, to: &mut [u8]) -> f32 {
    assert!(to.len() == DIGITS * LINE, "rows of bytes");
    if !largest.is_finite() {
        to.fill(0);
        return f32::NAN;
    }
    let (scale, inverse) = scale_of(largest);
    let mut values = [w.splat(0.0); LINE / BLOCK];
    for (i, values) in values.iter_mut().enumerate() {
        // SAFETY: a quarter of the numbers.
        *values = unsafe { w.load(numbers.as_ptr(), i * BLOCK) };
    }
    // SAFETY: four rows of bytes; numbers of 31 bits after the scale, by `scale_of`.
    unsafe { w.store_digits(to.as_mut_ptr(), values, scale) };
    inverse
}

/// Brings query rows into blocks, a column of words for each digit of each, and behind them what
/// the integers of each row are multiplied with.
#[inline(always)]
pub(super) fn columns<W: Words>(
    w: W,
    (rows, stride): (&[f32], usize),
    shape: QueryShape,
    to: &mut [u32],
) {
    let (steps, columns) = (shape.byte_steps(), shape.columns);
    assert!(
        rows.len() >= shape.rows * stride
            && (1..=stride).contains(&shape.dim)
            && columns <= BLOCK
            && to.len() >= shape.byte_words(),
        "rows lie inside their slices"
    );
    let (to, inverses) = to.split_at_mut(shape.rows.div_ceil(ROWS) * steps * BLOCK * columns);
    let rows = rows[..shape.rows * stride].chunks(ROWS * stride);
    for (block, (rows, to)) in rows.zip(to.chunks_exact_mut(steps * BLOCK * columns)).enumerate() {
        for (step, to) in to.chunks_exact_mut(BLOCK * columns).enumerate() {
            // A row of bytes for each column, before the block is turned.
            let mut bytes = [0_u32; WORDS];
            let of_row = bytemuck::cast_slice_mut(&mut bytes).chunks_exact_mut(DIGITS * LINE);
            for (i, (row, to)) in rows.chunks_exact(stride).zip(of_row).enumerate() {
                let row = &row[..shape.dim];
                let some = &row[step * LINE..shape.dim.min((step + 1) * LINE)];
                let mut line = [0.0; LINE];
                line[..some.len()].copy_from_slice(some);
                inverses[block * ROWS + i] = digits(w, &line, largest(row), to).to_bits();
            }
            let mut turned = [0_u32; WORDS];
            // SAFETY: blocks.
            unsafe { w.turn(bytes.as_ptr(), (turned.as_mut_ptr(), BLOCK), BLOCK) };
            for (i, to) in to.chunks_exact_mut(columns).enumerate() {
                // Where `store_digits` leaves numbers `4 i` to `4 i + 3`.
                let from = &turned[(i % 4 * 4 + i / 4) * BLOCK..];
                to.copy_from_slice(&from[..columns]);
            }
        }
    }
}

/// Scores of query rows that are columns of digits by the tokens of a tile.
#[inline(always)]
pub(super) fn scores<W: Words, U: Unit>(
    (w, unit): (W, U),
    queries: &Queries<'_>,
    (tile, memory): (&StoredRows<'_>, &mut Memory<'_>),
    out: &mut [f32],
    ahead: &mut Ahead<'_>,
) {
    let (shape, layout, tokens) = (queries.shape, tile.layout, tile.rows.len());
    let (steps, blocks) = (shape.byte_steps(), shape.rows.div_ceil(ROWS));
    check_rows(tile.rows, (0, tokens), layout);
    assert!(
        (1..=TILE).contains(&tokens)
            && shape.dim > 0
            && shape.dim == layout.dim()
            && queries.bytes.len() == shape.byte_words()
            && memory.products.len() >= 2 * blocks * WORDS
            && memory.rows.len() >= TILE * steps * LINE
            && out.len() >= shape.rows * TILE,
        "blocks and score rows lie inside their slices"
    );
    let parts = tokens.div_ceil(BLOCK);
    let from = even_parts(tile.rows, (parts, shape.dim, steps * LINE), memory.rows);
    let of_step = BLOCK * shape.columns;
    let (words, inverses) = queries.bytes.split_at(blocks * steps * of_step);
    let pace = ahead.pace(part::SCORES, parts);
    for next in 0..=parts {
        // Two parts at once: what a unit has stored is there late.
        let products = &mut memory.products[next % 2 * blocks * WORDS..];
        if let Some(rows) = from[..parts].get(next) {
            let left = Side { at: rows.first.cast(), stride: rows.stride, step: LINE };
            let products = products.as_chunks_mut::<WORDS>().0;
            for (q, products) in words.chunks_exact(steps * of_step).zip(products) {
                let right = Side { at: q.as_ptr(), stride: 4 * shape.columns, step: 4 * of_step };
                // SAFETY: rows of K, blocks of queries and one of results.
                unsafe { unit.multiply::<true, true>(left, right, steps, (products, false)) };
            }
            ahead.fetch(w, pace);
        }
        if let Some(part) = next.checked_sub(1) {
            let products = &memory.products[part % 2 * blocks * WORDS..];
            let all =
                products.as_chunks::<WORDS>().0.iter().zip(inverses[..shape.rows].chunks(ROWS));
            for (block, (products, inverses)) in all.enumerate() {
                let to = &mut out[block * ROWS * TILE + part * BLOCK..];
                add_columns(w, products, inverses, to);
            }
        }
    }
    if let Some(factors) = Factors::of::<W, Int8>(w, tile.rows, (0, tokens), layout, tile.scale) {
        factors.apply(w, &mut out[..shape.rows * TILE]);
    }
}

/// Writes the sums of the columns of digits of some rows, whose integers are multiplied with these,
/// to rows of scores.
#[inline(always)]
fn add_columns<W: Words>(w: W, products: &[f32; WORDS], inverses: &[u32], to: &mut [f32]) {
    let rows = inverses.len();
    assert!((1..=ROWS).contains(&rows) && to.len() >= (rows - 1) * TILE + BLOCK, "rows of scores");
    let mut turned = [0_u32; WORDS];
    // SAFETY: blocks.
    unsafe { w.turn(products.as_ptr().cast(), (turned.as_mut_ptr(), BLOCK), rows * DIGITS) };
    let rows = turned.as_chunks::<WORDS_OF_ROW>().0.iter().zip(inverses);
    for (row, (digits, inverse)) in rows.enumerate() {
        // SAFETY: sums of the row's digits.
        let sum = unsafe { sum(w, digits.as_ptr(), BLOCK) };
        let scores = w.mul(sum, w.splat(f32::from_bits(*inverse)));
        // SAFETY: a block of the scores of a row, by the assertion.
        unsafe { w.store(to.as_mut_ptr(), row * TILE, scores) };
    }
}

/// Words of the sums of one row's digits.
const WORDS_OF_ROW: usize = DIGITS * BLOCK;

/// Integers of which there are four vectors of digits, `apart` words from each other.
///
/// # Safety
/// 1. They are readable.
#[inline(always)]
unsafe fn sum<W: Words>(w: W, digits: *const u32, apart: usize) -> W::F {
    let mut sum = w.splat(0.0);
    for (i, weight) in [1.0, 256.0, 65536.0, 16_777_216.0].into_iter().enumerate() {
        // SAFETY: the caller's condition.
        let digit = w.integers(unsafe { w.load_bits(digits, i * apart) });
        sum = w.fma(digit, w.splat(weight), sum);
    }
    sum
}
