//! Few query rows, fewer than a block: they are columns, and tokens are rows.
//!
//! So K need not be turned, and rows of bf16 that follow each other are multiplied where they lie.
//! Terms of a query are columns of their own, and terms of a weight rows of their own, as a product
//! of blocks takes as long for one row as for sixteen.
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
use super::super::stored::GROUP;
use super::super::tile::{Factors, check_rows};
use super::even::{EvenRows, even_parts};
use super::stage::{PAIRS, Terms, rest};
use super::unit::{Side, Unit, Words};
use super::{BLOCK, Memory, Queries, StoredRows, WORDS};
use crate::encoding::RowLayout;

/// Scores of query rows that are columns by the tokens of a tile.
#[inline(always)]
pub(super) fn scores<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    queries: &Queries<'_>,
    (tile, memory): (&StoredRows<'_>, &mut Memory<'_>),
    out: &mut [f32],
    ahead: &mut Ahead<'_>,
) {
    let (shape, layout, tokens) = (queries.shape, tile.layout, tile.rows.len());
    let (steps, of_block) = (shape.dim.div_ceil(GROUP), BLOCK / shape.terms);
    let blocks = shape.rows.div_ceil(of_block);
    let words = if E::CODES.is_some() { queries.codes } else { queries.words };
    check_rows(tile.rows, (0, tokens), layout);
    assert!(
        (1..=TILE).contains(&tokens)
            && shape.dim > 0
            && shape.dim == layout.dim()
            && words.len() == shape.column_words()
            && memory.k.words.len() >= E::TERMS * steps * WORDS
            && memory.products.len() >= 2 * blocks * WORDS
            && memory.rows.len() >= TILE * tile.rows.bytes()
            && out.len() >= shape.rows.next_multiple_of(BLOCK) * TILE,
        "blocks and score rows lie inside their slices"
    );
    let (parts, bytes) = (tokens.div_ceil(BLOCK), tile.rows.bytes());
    let from = even_parts(tile.rows, (parts, bytes, bytes), memory.rows);
    let of_step = BLOCK * shape.columns;
    let pace = ahead.pace(part::SCORES, parts);
    for next in 0..=parts {
        // Two parts at once: what a unit has stored is there late.
        if let Some(rows) = from[..parts].get(next) {
            // SAFETY: rows of the layout, and room for their blocks, by the assertion.
            let left = unsafe { lefts::<W, U, E>((w, unit), *rows, layout, memory.k.words) };
            let products = &mut memory.products[next % 2 * blocks * WORDS..];
            let products = products.as_chunks_mut::<WORDS>().0;
            for (q, products) in words.chunks_exact(steps * of_step).zip(products) {
                let q = Side { at: q.as_ptr(), stride: 4 * shape.columns, step: 4 * of_step };
                // Small products first.
                for (i, left) in left[..E::TERMS].iter().rev().enumerate() {
                    // SAFETY: rows of K, blocks of queries and one of results.
                    unsafe { unit.multiply::<true, false>(*left, q, steps, (products, i > 0)) };
                }
            }
            ahead.fetch(w, pace);
        }
        if let Some(part) = next.checked_sub(1) {
            let products = &memory.products[part % 2 * blocks * WORDS..];
            let all = products.as_chunks::<WORDS>().0.iter();
            for (products, first) in all.zip((0..shape.rows).step_by(of_block)) {
                let rows = (shape.rows - first).min(of_block);
                let to = &mut out[first * TILE + part * BLOCK..];
                add_columns(w, products, (rows, shape.terms), to);
            }
        }
    }
    if let Some(factors) = Factors::of::<W, E>(w, tile.rows, (0, tokens), layout, tile.scale) {
        factors.apply(w, &mut out[..shape.rows * TILE]);
    }
}

/// Writes the sums of `terms` columns each to as many rows of scores.
#[inline(always)]
fn add_columns<W: Words>(
    w: W,
    products: &[f32; WORDS],
    (rows, terms): (usize, usize),
    to: &mut [f32],
) {
    let mut turned = [0.0_f32; WORDS];
    let columns = rows * terms;
    let written = if terms == 1 { rows.next_multiple_of(4) } else { rows };
    assert!(
        columns <= BLOCK && to.len() >= (written - 1) * TILE + BLOCK,
        "sums lie inside their slice"
    );
    if terms == 1 {
        // SAFETY: a block, and rows of scores by the assertion, up to a multiple of four.
        unsafe { w.turn(products.as_ptr().cast(), (to.as_mut_ptr().cast(), TILE), columns) };
        return;
    }
    // SAFETY: blocks.
    unsafe { w.turn(products.as_ptr().cast(), (turned.as_mut_ptr().cast(), BLOCK), columns) };
    for (row, terms) in turned.chunks_exact(terms * BLOCK).enumerate().take(rows) {
        // SAFETY: a row of the block.
        let mut sum = unsafe { w.load(terms.as_ptr(), terms.len() - BLOCK) };
        for at in (0..terms.len() - BLOCK).step_by(BLOCK).rev() {
            // SAFETY: as above.
            sum = w.add(sum, unsafe { w.load(terms.as_ptr(), at) });
        }
        // SAFETY: a row of scores, by the assertion.
        unsafe { w.store(to.as_mut_ptr(), row * TILE, sum) };
    }
}

/// Where terms of a block of rows may be multiplied: where they lie, or in blocks.
///
/// # Safety
/// 1. The rows are of the layout, there is one at least, and there is room for blocks of all terms.
#[inline(always)]
unsafe fn lefts<W: Words, U: Unit, E: Terms>(
    of: (W, U),
    rows: EvenRows,
    layout: &RowLayout,
    blocks: &mut [u32],
) -> [Side; 2] {
    let steps = layout.dim().div_ceil(GROUP);
    if E::IN_PLACE && layout.dim().is_multiple_of(GROUP) {
        return [Side { at: rows.first.cast(), stride: rows.stride, step: LINE }; 2];
    }
    let mut lines = 0;
    if let Some(codes) = E::CODES {
        lines = layout.dim() / LINE;
        assert!(blocks.len() >= steps * WORDS, "blocks");
        for line in 0..lines {
            let mut from = rows.at(0).wrapping_add(line * LINE);
            let mut to = blocks.as_mut_ptr().wrapping_add(2 * line * WORDS);
            for _ in 0..BLOCK {
                // SAFETY: a line of a row, by condition 1, and rows of words of two steps.
                unsafe { of.1.code_line(codes, from, [to, to.wrapping_add(WORDS)]) };
                (from, to) = (from.wrapping_add(rows.stride), to.wrapping_add(BLOCK));
            }
        }
    }
    for step in 2 * lines..steps {
        let to = blocks[step * WORDS..].as_mut_ptr();
        // SAFETY: condition 1, and a group that the rows have.
        unsafe { E::words(of, rows, (layout, step * GROUP), (to, steps * WORDS)) };
    }
    [0, (E::TERMS - 1) * steps * WORDS].map(|begin| Side {
        at: blocks[begin..].as_ptr(),
        stride: LINE,
        step: BLOCK * LINE,
    })
}

/// Adds `weight * V` to output rows that are fewer than a block; weights have `TERMS` terms, 2 or
/// 3. A group of values goes all the way before the next one, so that its blocks stay in the first
/// cache.
#[inline(always)]
pub(super) fn sums<W: Words, U: Unit, E: Terms, const TERMS: usize>(
    (w, unit): (W, U),
    (tile, memory): (&StoredRows<'_>, &mut Memory<'_>),
    weights: &mut [f32],
    (out, stride): (&mut [f32], usize),
    ahead: &mut Ahead<'_>,
) {
    let (rows, layout, tokens) = (weights.len() / TILE, tile.layout, tile.rows.len());
    let groups = layout.dim().div_ceil(GROUP);
    // Parts of as many tokens, which a product takes together.
    let parts = tokens.div_ceil(GROUP);
    let blocks = rows.div_ceil(BLOCK / TERMS);
    let of_group = 2 * parts * E::TERMS * WORDS;
    check_rows(tile.rows, (0, tokens), layout);
    assert!(
        rows > 0
            && stride.is_multiple_of(BLOCK)
            && (1..=stride).contains(&layout.dim())
            && memory.rows.len() >= TILE * tile.rows.bytes()
            && memory.v.words.len() >= of_group
            && memory.products.len() >= 4 * blocks * WORDS
            && memory.weights.len() >= parts * blocks * WORDS
            && out.len() >= rows * stride,
        "blocks, weights and output rows lie inside their slices"
    );
    unit.stay_awake();
    if let Some(factors) = Factors::of::<W, E>(w, tile.rows, (0, tokens), layout, tile.scale) {
        factors.apply(w, weights);
    }
    weight_rows::<W, TERMS>(w, (weights, parts), memory.weights);
    let bytes = tile.rows.bytes();
    let from = even_parts(tile.rows, (2 * parts, bytes, bytes), memory.rows);
    let pace = ahead.pace(part::BEHIND_SCORES, groups * parts);
    let from = &from.as_chunks::<2>().0[..parts];
    let weights = &memory.weights[..parts * blocks * WORDS];
    for index in 0..=groups {
        // Products of two groups at once: what a unit has stored is there late.
        let odd = index % 2;
        if index < groups {
            let words = memory.v.words[..of_group].as_mut_ptr();
            // SAFETY: rows of the layout, a group that it has, and room for its blocks.
            unsafe {
                pairs_of::<W, U, E>((w, unit), from, (layout, index * GROUP), words, (ahead, pace));
            }
            let to = &mut memory.products[odd * 2 * blocks * WORDS..];
            // SAFETY: blocks of the group.
            unsafe { multiply_group::<U, E>(unit, (weights, parts), words, to.as_chunks_mut().0) };
        }
        if let Some(index) = index.checked_sub(1) {
            let products = &memory.products[(1 - odd) * 2 * blocks * WORDS..];
            add_group::<W, TERMS>(w, products.as_chunks().0, (rows, index), (out, stride));
        }
    }
}

/// Multiplies blocks of weights with those of a group: two blocks of products for each.
///
/// # Safety
/// 1. The blocks of the group are readable.
#[inline(always)]
unsafe fn multiply_group<U: Unit, E: Terms>(
    unit: U,
    (weights, parts): (&[u32], usize),
    words: *const u32,
    to: &mut [[f32; WORDS]],
) {
    for (left, to) in weights.chunks_exact(parts * WORDS).zip(to.chunks_exact_mut(2)) {
        let left = Side { at: left.as_ptr(), stride: LINE, step: BLOCK * LINE };
        for (column, to) in to.iter_mut().enumerate() {
            // Small products first.
            for (i, term) in (0..E::TERMS).rev().enumerate() {
                let right = words.wrapping_add((2 * term + column) * WORDS);
                let step = 2 * E::TERMS * BLOCK * LINE;
                let right = Side { at: right, stride: LINE, step };
                // SAFETY: blocks of all parts, by condition 1, and one of results.
                unsafe { unit.multiply::<false, false>(left, right, parts, (to, i > 0)) };
            }
        }
    }
}

/// Adds the products of a group to the output rows.
#[inline(always)]
fn add_group<W: Words, const TERMS: usize>(
    w: W,
    products: &[[f32; WORDS]],
    (rows, index): (usize, usize),
    (out, stride): (&mut [f32], usize),
) {
    let blocks = rows.div_ceil(BLOCK / TERMS);
    for (i, products) in products.iter().enumerate().take(2 * blocks) {
        let (first, column) = (i / 2 * (BLOCK / TERMS), 2 * index + i % 2);
        if column * BLOCK < stride {
            let rows = (rows - first).min(BLOCK / TERMS);
            add_rows::<W, TERMS>(w, products, rows, (&mut out[first * stride..], stride, column));
        }
    }
}

/// Brings one group of the values of all tokens of a tile into blocks: of each [`GROUP`] of tokens
/// by term, of each term by column.
///
/// # Safety
/// 1. The rows are of the layout, which has the group, and there is room for the blocks.
#[inline(always)]
unsafe fn pairs_of<W: Words, U: Unit, E: Terms>(
    of: (W, U),
    from: &[[EvenRows; 2]],
    (layout, begin): (&RowLayout, usize),
    to: *mut u32,
    (ahead, pace): (&mut Ahead<'_>, usize),
) {
    for (part, rows) in from.iter().enumerate() {
        for i in (0..BLOCK).step_by(PAIRS) {
            let to = to.wrapping_add(part * 2 * E::TERMS * WORDS + i * BLOCK);
            let rows = rows.map(|rows| rows.from(i));
            // SAFETY: rows, a group that they have, and rows of words.
            unsafe { E::pairs(of, rows, (layout, begin), (to, 2 * WORDS)) };
        }
        ahead.fetch(of.0, pace);
    }
}

/// Brings weights into blocks, those of each [`GROUP`] of tokens, so many, a row of words for each
/// term of each row.
#[inline(always)]
fn weight_rows<W: Words, const TERMS: usize>(
    w: W,
    (weights, parts): (&[f32], usize),
    to: &mut [u32],
) {
    for (block, weights) in weights.chunks(BLOCK / TERMS * TILE).enumerate() {
        for part in 0..parts {
            let to = &mut to[(parts * block + part) * WORDS..][..WORDS];
            for (row, weights) in weights.chunks_exact(TILE).enumerate() {
                // SAFETY: `GROUP` of `TILE` weights.
                let first = unsafe { w.load(weights.as_ptr(), part * GROUP) };
                // SAFETY: as above.
                let second = unsafe { w.load(weights.as_ptr(), part * GROUP + BLOCK) };
                let mut values = [first, second];
                for term in 0..TERMS {
                    let words = to[(row * TERMS + term) * BLOCK..][..BLOCK].as_mut_ptr();
                    // SAFETY: a row of words.
                    unsafe { w.store_words(words, values[0], values[1]) };
                    if term + 1 < TERMS {
                        values = rest(w, values);
                    }
                }
            }
        }
    }
}

/// Adds the sums of `TERMS` rows each to one block of columns of as many output rows.
#[inline(always)]
fn add_rows<W: Words, const TERMS: usize>(
    w: W,
    products: &[f32; WORDS],
    rows: usize,
    (out, stride, column): (&mut [f32], usize, usize),
) {
    assert!(
        rows * TERMS <= BLOCK && out.len() >= (rows - 1) * stride + (column + 1) * BLOCK,
        "sums lie inside their slices"
    );
    for row in 0..rows {
        let at = row * stride + column * BLOCK;
        // SAFETY: columns of an output row, by the assertion.
        let mut sum = unsafe { w.load(out.as_ptr(), at) };
        for term in (0..TERMS).rev() {
            // SAFETY: a row of the block, by the assertion.
            let products = unsafe { w.load(products.as_ptr(), (row * TERMS + term) * BLOCK) };
            sum = w.add(sum, products);
        }
        // SAFETY: as above.
        unsafe { w.store(out.as_mut_ptr(), at, sum) };
    }
}
