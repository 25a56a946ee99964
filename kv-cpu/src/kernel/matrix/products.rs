//! The products: scores of query rows by a tile of K, and sums of a tile of V by weights.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::TILE;
use super::super::stored::GROUP;
use super::unit::{Unit, Words, pairs};
use super::{BLOCK, Memory, PARTS, Queries, VISIT, WORDS, stage};

/// Scores of a block of query rows, the one that begins with row `first`.
#[inline(always)]
pub(super) fn scores<W: Words, U: Unit>(
    (w, unit): (W, U),
    (queries, first): (&Queries<'_>, usize),
    memory: &Memory<'_>,
    out: &mut [f32],
) {
    let (k, shape) = (&memory.k, queries.shape);
    let step_words = shape.dim.div_ceil(GROUP) * WORDS;
    assert!(
        shape.dim > 0
            && shape.dim == k.dim
            && first < shape.rows
            && queries.words.len() >= shape.words()
            && k.tokens <= TILE
            && k.words.len() >= k.terms * PARTS * step_words
            && out.len() >= BLOCK * TILE,
        "blocks and score rows lie inside their slices"
    );
    let scores = &mut out[..BLOCK * TILE];
    let to = scores.as_mut_ptr();
    for token in (0..k.tokens).step_by(VISIT) {
        for (i, (of_q, of_k)) in pairs(shape.terms, k.terms).iter().enumerate() {
            let q = queries.words[(first / BLOCK * shape.terms + of_q) * step_words..].as_ptr();
            let k = k.words[(of_k * PARTS + token / BLOCK) * step_words..].as_ptr();
            let to = to.wrapping_add(token);
            // SAFETY: blocks of all terms, and score rows, by the assertion.
            unsafe { unit.dots(q, k, step_words / WORDS, (to, TILE), i > 0) };
        }
    }
    if let Some(factors) = &k.factors {
        factors.apply(w, scores);
    }
}

/// Adds `weight * V` to a block of output rows; weights have `TERMS` terms, 2 or 3.
#[inline(always)]
pub(super) fn sums<W: Words, U: Unit, const TERMS: usize>(
    (w, unit): (W, U),
    memory: &mut Memory<'_>,
    weights: &mut [f32],
    (out, stride): (&mut [f32], usize),
) {
    let v = &memory.v;
    let (columns, apart) = (stride / BLOCK, v.dim.div_ceil(GROUP) * 2 * WORDS);
    assert!(
        stride.is_multiple_of(BLOCK)
            && (1..=stride).contains(&v.dim)
            && columns * WORDS <= apart
            && v.tokens <= TILE
            && v.words.len() >= PARTS / 2 * v.terms * apart
            && memory.weights.len() >= 2 * TERMS * WORDS
            && weights.len() == BLOCK * TILE
            && out.len() >= BLOCK * stride,
        "blocks, weights and output rows lie inside their slices"
    );
    if let Some(factors) = &v.factors {
        factors.apply(w, weights);
    }
    for token in (0..v.tokens).step_by(VISIT) {
        for half in 0..2 {
            let to = &mut memory.weights[half * TERMS * WORDS..];
            stage::weights::<W, TERMS>(w, (&*weights, token + half * GROUP), to);
        }
        let weights = memory.weights.as_ptr();
        let values = (v.words[token / GROUP * v.terms * apart..].as_ptr(), apart);
        let to = (out.as_mut_ptr(), stride);
        if v.terms == 1 {
            // SAFETY: blocks of all terms, and output rows, by the assertion.
            unsafe { unit.add::<TERMS, 1>(weights, values, columns, to) }
        } else {
            // SAFETY: as above.
            unsafe { unit.add::<TERMS, 2>(weights, values, columns, to) }
        }
    }
}

const _: () = assert!(VISIT == 2 * GROUP && TILE.is_multiple_of(VISIT), "tokens in two halves");
