//! Products with query rows, fewer than a block, as columns of blocks: tokens are rows.
//!
//! Therefore K is not transposed, and bf16 at one stride is multiplied in place. Each term of a
//! query is a column, and each term of a weight a row: a product of blocks takes as long for one
//! row as for sixteen.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use super::pack::{PAIRS, Terms, remainder};
use super::runs::BlockRows;
use super::table::PackedQueries;
use super::unit::{Operand, Unit, Words};
use super::{BLOCK, BLOCK_WORDS, Memory, TILE_TOKENS};
use crate::decode::GROUP;
use crate::layout::RowLayout;
use crate::prefetch::Prefetch;
use crate::rows::TileRows;
use crate::simd::LINE;

/// Computes the scores of a tile for query rows that are columns.
#[inline(always)]
pub(crate) fn scores<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    (words, shape): PackedQueries<'_>,
    (tile, memory): (&TileRows<'_>, &mut Memory<'_>),
    to: &mut [f32],
    prefetch: &mut Prefetch<'_>,
) {
    let layout = tile.layout();
    let (steps, per_block) = (shape.dim.div_ceil(GROUP), BLOCK / shape.terms);
    let columns = shape.rows.div_ceil(per_block);
    assert!(
        shape.dim == layout.dim()
            && words.len() == shape.column_words()
            && memory.k.words.len() >= E::TERMS * steps * BLOCK_WORDS
            && memory.products.len() >= 2 * columns * BLOCK_WORDS
            && memory.copies.len() >= tile.copied_bytes()
            && to.len() >= shape.rows.next_multiple_of(BLOCK) * TILE_TOKENS,
        "blocks and score rows lie inside their slices"
    );
    let count = tile.len().div_ceil(BLOCK);
    let blocks = tile.blocks(count, memory.copies);
    let step_words = BLOCK * shape.columns;
    let mut lines = *prefetch;
    let pace = lines.pace(count);
    for next in 0..=count {
        // Results of the unit arrive late, so those of a block are read after the next block's
        // products are issued.
        if let Some(rows) = blocks[..count].get(next) {
            // SAFETY: rows of the layout, and room for their blocks, by the assertion.
            let left = unsafe { key_operands::<W, U, E>((w, unit), *rows, layout, memory.k.words) };
            let products = &mut memory.products[next % 2 * columns * BLOCK_WORDS..];
            let products = products.as_chunks_mut::<BLOCK_WORDS>().0;
            for (q, products) in words.chunks_exact(steps * step_words).zip(products) {
                let q = Operand { at: q.as_ptr(), stride: 4 * shape.columns, step: 4 * step_words };
                // Small products first.
                for (i, left) in left[..E::TERMS].iter().rev().enumerate() {
                    // SAFETY: rows of K, blocks of queries and one of results.
                    unsafe { unit.multiply::<true>(*left, q, steps, (products, i > 0)) };
                }
            }
            lines.step(w, pace);
        }
        if let Some(block) = next.checked_sub(1) {
            let products = &memory.products[block % 2 * columns * BLOCK_WORDS..];
            let all = products.as_chunks::<BLOCK_WORDS>().0.iter();
            for (products, first) in all.zip((0..shape.rows).step_by(per_block)) {
                let rows = (shape.rows - first).min(per_block);
                let to = &mut to[first * TILE_TOKENS + block * BLOCK..];
                store_columns(w, products, (rows, shape.terms), to);
            }
        }
    }
    lines.finish(w);
    *prefetch = lines;
}

/// Adds every `terms` columns of products and writes each sum as a row of scores.
#[inline(always)]
fn store_columns<W: Words>(
    w: W,
    products: &[f32; BLOCK_WORDS],
    (rows, terms): (usize, usize),
    to: &mut [f32],
) {
    let mut transposed = [0.0_f32; BLOCK_WORDS];
    let columns = rows * terms;
    let written = if terms == 1 { rows.next_multiple_of(4) } else { rows };
    assert!(
        columns <= BLOCK && to.len() >= (written - 1) * TILE_TOKENS + BLOCK,
        "score rows lie inside their slice"
    );
    let from = products.as_ptr().cast();
    if terms == 1 {
        let to = (to.as_mut_ptr().cast(), TILE_TOKENS);
        // SAFETY: a block, and rows of scores by the assertion, up to a multiple of four.
        unsafe { w.transpose(from, to, columns) };
        return;
    }
    // SAFETY: blocks.
    unsafe { w.transpose(from, (transposed.as_mut_ptr().cast(), BLOCK), columns) };
    for (row, terms) in transposed.chunks_exact(terms * BLOCK).enumerate().take(rows) {
        // SAFETY: a row of the block.
        let mut sum = unsafe { w.load(terms.as_ptr(), terms.len() - BLOCK) };
        for at in (0..terms.len() - BLOCK).step_by(BLOCK).rev() {
            // SAFETY: as above.
            sum = w.add(sum, unsafe { w.load(terms.as_ptr(), at) });
        }
        // SAFETY: a row of scores, by the assertion.
        unsafe { w.store(to.as_mut_ptr(), row * TILE_TOKENS, sum) };
    }
}

/// Returns the terms of a block of rows as operands: in place, or packed.
///
/// # Safety
/// 1. The rows are of the layout, and there is room for blocks of all terms.
#[inline(always)]
unsafe fn key_operands<W: Words, U: Unit, E: Terms>(
    of: (W, U),
    rows: BlockRows,
    layout: &RowLayout,
    blocks: &mut [u32],
) -> [Operand; 2] {
    let steps = layout.dim().div_ceil(GROUP);
    if E::IN_PLACE && layout.dim().is_multiple_of(GROUP) {
        return [Operand { at: rows.first.cast(), stride: rows.stride, step: LINE }; 2];
    }
    let mut lines = 0;
    if let Some(codes) = E::CODES {
        lines = layout.dim() / LINE;
        assert!(blocks.len() >= steps * BLOCK_WORDS, "blocks lie inside their slice");
        for line in 0..lines {
            let mut from = rows.at(0).wrapping_add(line * LINE);
            let mut to = blocks.as_mut_ptr().wrapping_add(2 * line * BLOCK_WORDS);
            for _ in 0..BLOCK {
                // SAFETY: a line of a row, by condition 1, and rows of words of two steps.
                unsafe { of.1.code_line(codes, from, [to, to.wrapping_add(BLOCK_WORDS)]) };
                (from, to) = (from.wrapping_add(rows.stride), to.wrapping_add(BLOCK));
            }
        }
    }
    for step in 2 * lines..steps {
        let to = blocks[step * BLOCK_WORDS..].as_mut_ptr();
        // SAFETY: condition 1, and a group that the rows have.
        unsafe { E::words(of, rows, (layout, step * GROUP), (to, steps * BLOCK_WORDS)) };
    }
    [0, (E::TERMS - 1) * steps * BLOCK_WORDS].map(|begin| Operand {
        at: blocks[begin..].as_ptr(),
        stride: LINE,
        step: BLOCK * LINE,
    })
}

/// Adds a tile of V to an output row for each row of weights; a weight has `TERMS` terms, 2 or 3.
/// All tokens of a group of values are added before the next group, so that its blocks stay in L1.
#[inline(always)]
pub(crate) fn sums<W: Words, U: Unit, E: Terms, const TERMS: usize>(
    (w, unit): (W, U),
    (tile, memory): (&TileRows<'_>, &mut Memory<'_>),
    (weights, rows): (&[f32], usize),
    (out, stride): (&mut [f32], usize),
    prefetch: &mut Prefetch<'_>,
) {
    let layout = tile.layout();
    let groups = layout.dim().div_ceil(GROUP);
    // Parts of [`GROUP`] tokens, which one product takes.
    let parts = tile.len().div_ceil(GROUP);
    let blocks = rows.div_ceil(BLOCK / TERMS);
    let group_words = 2 * parts * E::TERMS * BLOCK_WORDS;
    assert!(
        stride.is_multiple_of(BLOCK)
            && (1..=stride).contains(&layout.dim())
            && memory.copies.len() >= tile.copied_bytes()
            && memory.v.words.len() >= group_words
            && memory.products.len() >= 4 * blocks * BLOCK_WORDS
            && memory.weights.len() >= parts * blocks * BLOCK_WORDS
            && weights.len() >= rows * TILE_TOKENS
            && out.len() >= rows * stride,
        "blocks, weights and output rows lie inside their slices"
    );
    unit.keep_powered();
    pack_weights::<W, TERMS>(w, (&weights[..rows * TILE_TOKENS], parts), memory.weights);
    let from = tile.blocks(2 * parts, memory.copies);
    let from = &from.as_chunks::<2>().0[..parts];
    let weights = &memory.weights[..parts * blocks * BLOCK_WORDS];
    let mut lines = *prefetch;
    let pace = lines.pace(groups * parts);
    for index in 0..=groups {
        // As for scores: products of a group are read after those of the next are issued.
        let odd = index % 2;
        if index < groups {
            let words = memory.v.words[..group_words].as_mut_ptr();
            let at = (layout, index * GROUP);
            // SAFETY: rows of the layout, a group that it has, and room for its blocks.
            unsafe { pack_group::<W, U, E>((w, unit), from, at, words, (&mut lines, pace)) };
            let to = &mut memory.products[odd * 2 * blocks * BLOCK_WORDS..];
            // SAFETY: blocks of the group.
            unsafe { multiply_group::<U, E>(unit, (weights, parts), words, to.as_chunks_mut().0) };
        }
        if let Some(index) = index.checked_sub(1) {
            let products = &memory.products[(1 - odd) * 2 * blocks * BLOCK_WORDS..];
            add_group::<W, TERMS>(w, products.as_chunks().0, (rows, index), (out, stride));
        }
    }
    lines.finish(w);
    *prefetch = lines;
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
    to: &mut [[f32; BLOCK_WORDS]],
) {
    for (left, to) in weights.chunks_exact(parts * BLOCK_WORDS).zip(to.chunks_exact_mut(2)) {
        let left = Operand { at: left.as_ptr(), stride: LINE, step: BLOCK * LINE };
        for (column, to) in to.iter_mut().enumerate() {
            // Small products first.
            for (i, term) in (0..E::TERMS).rev().enumerate() {
                let right = words.wrapping_add((2 * term + column) * BLOCK_WORDS);
                let step = 2 * E::TERMS * BLOCK * LINE;
                let right = Operand { at: right, stride: LINE, step };
                // SAFETY: blocks of all parts, by condition 1, and one of results.
                unsafe { unit.multiply::<false>(left, right, parts, (to, i > 0)) };
            }
        }
    }
}

/// Adds the products of a group to the output rows.
#[inline(always)]
fn add_group<W: Words, const TERMS: usize>(
    w: W,
    products: &[[f32; BLOCK_WORDS]],
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

/// Packs one group of values of all tokens of a tile: of each [`GROUP`] of tokens by term, of each
/// term by column.
///
/// # Safety
/// 1. The rows are of the layout, which has the group, and there is room for the blocks.
#[inline(always)]
unsafe fn pack_group<W: Words, U: Unit, E: Terms>(
    of: (W, U),
    from: &[[BlockRows; 2]],
    (layout, begin): (&RowLayout, usize),
    to: *mut u32,
    (prefetch, pace): (&mut Prefetch<'_>, usize),
) {
    for (part, rows) in from.iter().enumerate() {
        for i in (0..BLOCK).step_by(PAIRS) {
            let to = to.wrapping_add(part * 2 * E::TERMS * BLOCK_WORDS + i * BLOCK);
            let rows = rows.map(|rows| rows.from(i));
            // SAFETY: rows, a group that they have, and rows of words.
            unsafe { E::pairs(of, rows, (layout, begin), (to, 2 * BLOCK_WORDS)) };
        }
        prefetch.step(of.0, pace);
    }
}

/// Packs the weights of `parts` groups of [`GROUP`] tokens into blocks: a row of words for each
/// term of each query row.
#[inline(always)]
fn pack_weights<W: Words, const TERMS: usize>(
    w: W,
    (weights, parts): (&[f32], usize),
    to: &mut [u32],
) {
    for (block, weights) in weights.chunks(BLOCK / TERMS * TILE_TOKENS).enumerate() {
        for part in 0..parts {
            let to = &mut to[(parts * block + part) * BLOCK_WORDS..][..BLOCK_WORDS];
            for (row, weights) in weights.chunks_exact(TILE_TOKENS).enumerate() {
                // SAFETY: `GROUP` of `TILE_TOKENS` weights.
                let first = unsafe { w.load(weights.as_ptr(), part * GROUP) };
                // SAFETY: as above.
                let second = unsafe { w.load(weights.as_ptr(), part * GROUP + BLOCK) };
                let mut values = [first, second];
                for term in 0..TERMS {
                    let words = to[(row * TERMS + term) * BLOCK..][..BLOCK].as_mut_ptr();
                    // SAFETY: a row of words.
                    unsafe { w.store_words(words, values[0], values[1]) };
                    if term + 1 < TERMS {
                        values = remainder(w, values);
                    }
                }
            }
        }
    }
}

/// Adds every `TERMS` rows of products to one block of columns of an output row.
#[inline(always)]
fn add_rows<W: Words, const TERMS: usize>(
    w: W,
    products: &[f32; BLOCK_WORDS],
    rows: usize,
    (out, stride, column): (&mut [f32], usize, usize),
) {
    assert!(
        rows * TERMS <= BLOCK && out.len() >= (rows - 1) * stride + (column + 1) * BLOCK,
        "output rows lie inside their slice"
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
