//! Products with query rows as rows of blocks: scores of a packed tile of K, and sums of a packed
//! tile of V.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use super::table::PackedQueries;
use super::unit::{Unit, Words, pairs};
use super::{BLOCK, BLOCK_WORDS, GEMM_TOKENS, Memory, TILE_BLOCKS, TILE_TOKENS, pack};
use crate::decode::GROUP;

/// Computes the scores of the packed tile for a block of query rows, from row `first` on.
#[inline(always)]
pub(crate) fn scores<U: Unit>(
    unit: U,
    ((words, shape), first): (PackedQueries<'_>, usize),
    memory: &Memory<'_>,
    to: &mut [f32],
) {
    let k = &memory.k;
    let step_words = shape.dim.div_ceil(GROUP) * BLOCK_WORDS;
    assert!(
        shape.dim == k.dim
            && first.is_multiple_of(BLOCK)
            && first < shape.rows
            && words.len() >= shape.row_words()
            && k.tokens <= TILE_TOKENS
            && k.words.len() >= k.terms * TILE_BLOCKS * step_words
            && to.len() >= BLOCK * TILE_TOKENS,
        "blocks and score rows lie inside their slices"
    );
    for token in (0..k.tokens).step_by(GEMM_TOKENS) {
        for (i, (q_term, k_term)) in pairs(shape.terms, k.terms).iter().enumerate() {
            let q = words[(first / BLOCK * shape.terms + q_term) * step_words..].as_ptr();
            let k = k.words[(k_term * TILE_BLOCKS + token / BLOCK) * step_words..].as_ptr();
            let to = to.as_mut_ptr().wrapping_add(token);
            // SAFETY: blocks of all terms, and score rows, by the assertion.
            unsafe { unit.gemm_scores(q, k, step_words / BLOCK_WORDS, (to, TILE_TOKENS), i > 0) };
        }
    }
}

/// Adds the packed tile to a block of output rows; weights have `TERMS` terms, 2 or 3.
#[inline(always)]
pub(crate) fn sums<W: Words, U: Unit, const TERMS: usize>(
    (w, unit): (W, U),
    memory: &mut Memory<'_>,
    weights: &[f32],
    (out, stride): (&mut [f32], usize),
) {
    let v = &memory.v;
    let (columns, apart) = (stride / BLOCK, v.dim.div_ceil(GROUP) * 2 * BLOCK_WORDS);
    assert!(
        stride.is_multiple_of(BLOCK)
            && (1..=stride).contains(&v.dim)
            && columns * BLOCK_WORDS <= apart
            && v.tokens <= TILE_TOKENS
            && v.words.len() >= TILE_BLOCKS / 2 * v.terms * apart
            && memory.weights.len() >= 2 * TERMS * BLOCK_WORDS
            && weights.len() >= BLOCK * TILE_TOKENS
            && out.len() >= BLOCK * stride,
        "blocks, weights and output rows lie inside their slices"
    );
    for token in (0..v.tokens).step_by(GEMM_TOKENS) {
        for half in 0..2 {
            let to = &mut memory.weights[half * TERMS * BLOCK_WORDS..];
            pack::weights::<W, TERMS>(w, (weights, token + half * GROUP), to);
        }
        let weights = memory.weights.as_ptr();
        let values = (v.words[token / GROUP * v.terms * apart..].as_ptr(), apart);
        let to = (out.as_mut_ptr(), stride);
        if v.terms == 1 {
            // SAFETY: blocks of all terms, and output rows, by the assertion.
            unsafe { unit.gemm_sums::<TERMS, 1>(weights, values, columns, to) }
        } else {
            // SAFETY: as above.
            unsafe { unit.gemm_sums::<TERMS, 2>(weights, values, columns, to) }
        }
    }
}

const _: () = assert!(
    GEMM_TOKENS == 2 * GROUP && TILE_TOKENS.is_multiple_of(GEMM_TOKENS),
    "tokens in two halves"
);
