//! Packs K, V, queries and weights into blocks, term by term.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use super::codes::{self, Codes};
use super::runs::BlockRows;
use super::unit::{Unit, Words};
use super::{
    BLOCK, BLOCK_WORDS, Blocks, GEMM_TOKENS, Memory, QueryShape, TILE_BLOCKS, TILE_TOKENS, UPPER,
};
use crate::decode::{Bf16, Bf16Pairs, Decode, E4m3, E5m2, F16, GROUP, Int8};
use crate::layout::RowLayout;
use crate::prefetch::Prefetch;
use crate::rows::TileRows;
use crate::simd::{LINE, Simd};

/// Pairs of tokens that are packed together.
pub(crate) const PAIRS: usize = 8;

/// An encoding whose values are sums of few bf16.
pub(crate) trait Terms: Decode + Sized {
    /// Number of bf16: 1 or 2.
    const TERMS: usize = 1;
    /// Whether rows in memory are already words of a block.
    const IN_PLACE: bool = false;
    /// The bf16 of each code, if a value is a code of one byte.
    const CODES: Option<&'static Codes> = None;

    /// Packs a group of values of 16 rows into a block, a row of words each; terms lie `apart`
    /// words from each other.
    ///
    /// # Safety
    /// 1. The bytes of the rows are readable, and the blocks are writable.
    /// 2. `begin` is a multiple of [`GROUP`] and less than a row has values.
    #[inline(always)]
    unsafe fn words<W: Words, U: Unit>(
        (w, unit): (W, U),
        rows: BlockRows,
        (layout, begin): (&RowLayout, usize),
        (to, apart): (*mut u32, usize),
    ) {
        if let Some(codes) = Self::CODES.filter(|_| begin + GROUP <= layout.dim()) {
            for i in (0..BLOCK).step_by(4) {
                let all = [i, i + 1, i + 2, i + 3];
                let from = all.map(|i| rows.at(i).wrapping_add(begin));
                // SAFETY: groups of rows, by condition 2, and rows of words.
                unsafe { unit.code_words(codes, from, all.map(|i| to.wrapping_add(i * BLOCK))) };
            }
            return;
        }
        for i in 0..BLOCK {
            // SAFETY: conditions 1 and 2.
            let mut values = unsafe { group::<W, Self>(w, rows.at(i), layout, begin) };
            for term in 0..Self::TERMS {
                let to = to.wrapping_add(term * apart + i * BLOCK);
                // SAFETY: a row of words, by condition 1.
                unsafe { w.store_words(to, values[0], values[1]) };
                if term + 1 < Self::TERMS {
                    values = remainder(w, values);
                }
            }
        }
    }

    /// Packs a group of values of [`PAIRS`] pairs of tokens, a row of words per pair, for each half
    /// of the group, which are [`BLOCK_WORDS`] apart, and for each term, which are `apart`.
    ///
    /// # Safety
    /// 1. The bytes of the rows are readable, and the rows of words are writable.
    /// 2. `begin` is a multiple of [`GROUP`] and less than a row has values.
    #[inline(always)]
    unsafe fn pairs<W: Words, U: Unit>(
        (w, unit): (W, U),
        rows: [BlockRows; 2],
        (layout, begin): (&RowLayout, usize),
        (to, apart): (*mut u32, usize),
    ) {
        if let Some(codes) = Self::CODES.filter(|_| begin + GROUP <= layout.dim()) {
            for i in (0..PAIRS).step_by(2) {
                let from = |row: usize| rows.map(|rows| rows.at(row).wrapping_add(begin));
                let ([a, b], [c, d]) = (from(i), from(i + 1));
                let [first, second] = [i, i + 1].map(|i| to.wrapping_add(i * BLOCK));
                let halves = [first, second].map(|to| [to, to.wrapping_add(BLOCK_WORDS)]);
                let [[e, f], [g, h]] = halves;
                // SAFETY: groups of rows, by condition 2, and rows of words.
                unsafe { unit.code_pairs(codes, [a, b, c, d], [e, f, g, h]) };
            }
            return;
        }
        for i in 0..PAIRS {
            let to = to.wrapping_add(i * BLOCK);
            // SAFETY: conditions 1 and 2.
            let mut first = unsafe { group::<W, Self>(w, rows[0].at(i), layout, begin) };
            // SAFETY: as above.
            let mut second = unsafe { group::<W, Self>(w, rows[1].at(i), layout, begin) };
            for term in 0..Self::TERMS {
                for half in 0..2 {
                    let to = to.wrapping_add(term * apart + half * BLOCK_WORDS);
                    // SAFETY: a row of words, by condition 1.
                    unsafe { w.store_words(to, first[half], second[half]) };
                }
                if term + 1 < Self::TERMS {
                    (first, second) = (remainder(w, first), remainder(w, second));
                }
            }
        }
    }
}

impl Terms for F16 {
    const TERMS: usize = 2;
}
impl Terms for Bf16 {}
impl Terms for E4m3 {
    const CODES: Option<&'static Codes> = Some(&codes::E4M3);
}
impl Terms for E5m2 {
    const CODES: Option<&'static Codes> = Some(&codes::E5M2);
}
impl Terms for Int8 {
    const CODES: Option<&'static Codes> = Some(&codes::INT8);
}
impl Terms for Bf16Pairs {
    const IN_PLACE: bool = true;

    #[inline(always)]
    unsafe fn pairs<W: Words, U: Unit>(
        of: (W, U),
        rows: [BlockRows; 2],
        (layout, begin): (&RowLayout, usize),
        to: (*mut u32, usize),
    ) {
        if begin + GROUP > layout.dim() {
            // SAFETY: the conditions of this function; an incomplete group is stored in order.
            return unsafe { Bf16::pairs(of, rows, (layout, begin), to) };
        }
        for i in 0..PAIRS {
            let [a, b] = rows.map(|rows| rows.at(i).wrapping_add(2 * begin).cast());
            // SAFETY: a whole group, by condition 1.
            let a = unsafe { of.0.load_bits(a, 0) };
            // SAFETY: as above.
            let b = unsafe { of.0.load_bits(b, 0) };
            let to = to.0.wrapping_add(i * BLOCK);
            // SAFETY: rows of words, by condition 1.
            unsafe { of.0.store_halves([to, to.wrapping_add(BLOCK_WORDS)], a, b) };
        }
    }
}

/// Decodes a group of values exactly, with zeros after the row's last one.
///
/// # Safety
/// 1. The bytes of the row are readable.
/// 2. `begin` is a multiple of [`GROUP`] and less than the row has values.
#[inline(always)]
unsafe fn group<S: Simd, E: Decode>(
    s: S,
    row: *const u8,
    layout: &RowLayout,
    begin: usize,
) -> [S::F; 2] {
    const { assert!(S::LANES == BLOCK && GROUP == 2 * BLOCK, "vectors of half a group") };
    let [mut first, mut second] = if begin + GROUP <= layout.dim() {
        // SAFETY: conditions 1 and 2, and the group is whole.
        unsafe { E::load_pair(s, row, layout, begin, 0) }
    } else {
        // SAFETY: condition 1, and there is a rest by condition 2.
        let rest = unsafe { E::rest(s, row, layout) };
        // SAFETY: an array of a group.
        unsafe { float_group(s, rest.as_ptr()) }
    };
    if E::FACTOR.to_bits() != 1.0_f32.to_bits() {
        let factor = s.splat(E::FACTOR);
        (first, second) = (s.mul(first, factor), s.mul(second, factor));
    }
    [first, second]
}

/// Loads a group of floats.
///
/// # Safety
/// 1. They are readable.
#[inline(always)]
unsafe fn float_group<S: Simd>(s: S, from: *const f32) -> [S::F; 2] {
    // SAFETY: condition 1.
    let first = unsafe { s.load(from, 0) };
    // SAFETY: as above.
    [first, unsafe { s.load(from, BLOCK) }]
}

/// Subtracts the first term of each value.
#[inline(always)]
pub(crate) fn remainder<W: Words>(w: W, [a, b]: [W::F; 2]) -> [W::F; 2] {
    let minus = w.splat(-1.0);
    [w.fma(w.truncate(a), minus, a), w.fma(w.truncate(b), minus, b)]
}

/// Returns whether no value is infinite or NaN. No early exit: nearly always all are finite.
#[inline(always)]
pub(crate) fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

/// Number of terms that hold all queries exactly.
#[inline(always)]
pub(crate) fn terms(queries: &[f32]) -> usize {
    // Bits that need a second term, and bits that need a third one.
    let (mut second, mut third) = (0, 0);
    for query in queries {
        let remainder = query - f32::from_bits(query.to_bits() & UPPER);
        second |= remainder.to_bits();
        third |= remainder.to_bits() & !UPPER;
    }
    1 + usize::from(second != 0) + usize::from(third != 0)
}

/// Packs query rows as rows of blocks.
#[inline(always)]
pub(crate) fn query_rows<W: Words>(w: W, rows: &[f32], shape: QueryShape, to: &mut [u32]) {
    let (steps, terms) = (shape.dim.div_ceil(GROUP), shape.terms);
    assert!(
        rows.len() >= shape.rows * shape.stride
            && steps * GROUP <= shape.stride
            && to.len() >= shape.row_words(),
        "rows and their words lie inside their slices"
    );
    to.fill(0);
    for (row, from) in rows.chunks_exact(shape.stride).enumerate().take(shape.rows) {
        for step in 0..steps {
            // SAFETY: a group of a padded row.
            let mut values = unsafe { float_group(w, from.as_ptr().wrapping_add(step * GROUP)) };
            for term in 0..terms {
                let block = ((row / BLOCK * terms + term) * steps + step) * BLOCK_WORDS;
                let words = to[block + row % BLOCK * BLOCK..][..BLOCK].as_mut_ptr();
                // SAFETY: a row of words.
                unsafe { w.store_words(words, values[0], values[1]) };
                values = remainder(w, values);
            }
        }
    }
}

/// Packs query rows as columns of blocks, a column for each term of each row; in the order of
/// [`Unit::code_line`] if `ARE_CODES`.
#[inline(always)]
pub(crate) fn query_columns<W: Words, const ARE_CODES: bool>(
    w: W,
    rows: &[f32],
    shape: QueryShape,
    to: &mut [u32],
) {
    let (stride, columns) = (shape.stride, shape.columns);
    let (steps, per_block) = (shape.dim.div_ceil(GROUP), BLOCK / shape.terms);
    assert!(
        rows.len() >= shape.rows * stride
            && steps * GROUP <= stride
            && to.len() >= shape.column_words(),
        "rows and their words lie inside their slices"
    );
    let blocks = rows[..shape.rows * stride].chunks(per_block * stride);
    for (rows, to) in blocks.zip(to.chunks_exact_mut(steps * BLOCK * columns)) {
        for (step, to) in to.chunks_exact_mut(BLOCK * columns).enumerate() {
            // A row of words for each column, before the block is transposed.
            let (mut block, mut transposed) = ([0_u32; BLOCK_WORDS], [0_u32; BLOCK_WORDS]);
            for (i, row) in rows.chunks_exact(stride).enumerate() {
                let line = row[..shape.dim].as_chunks::<LINE>().0.get(step / 2);
                let mut values = if let Some(line) = line.filter(|_| ARE_CODES) {
                    line_values(w, line, step % 2)
                } else {
                    // SAFETY: a group of a padded row.
                    unsafe { float_group(w, row.as_ptr().wrapping_add(step * GROUP)) }
                };
                for term in 0..shape.terms {
                    let words = block[(i * shape.terms + term) * BLOCK..][..BLOCK].as_mut_ptr();
                    // SAFETY: a row of words.
                    unsafe { w.store_words(words, values[0], values[1]) };
                    values = remainder(w, values);
                }
            }
            // SAFETY: blocks.
            unsafe { w.transpose(block.as_ptr(), (transposed.as_mut_ptr(), BLOCK), BLOCK) };
            for (to, from) in to.chunks_exact_mut(columns).zip(transposed.as_chunks::<BLOCK>().0) {
                to.copy_from_slice(&from[..columns]);
            }
        }
    }
}

/// Values of a line that are multiplied with a row of words of [`Unit::code_line`].
#[inline(always)]
fn line_values<W: Words>(w: W, line: &[f32; LINE], row: usize) -> [W::F; 2] {
    const { assert!(LINE == 4 * BLOCK, "four values a word of both rows") };
    let mut values = [0.0; GROUP];
    for (i, four) in line.as_chunks::<4>().0.iter().enumerate() {
        (values[i], values[BLOCK + i]) = (four[row], four[row + 2]);
    }
    // SAFETY: an array of a group.
    unsafe { float_group(w, values.as_ptr()) }
}

/// Packs K of a tile, a column of words per token, zeros for tokens that do not exist.
#[inline(always)]
pub(crate) fn keys<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    tile: &TileRows<'_>,
    memory: &mut Memory<'_>,
    prefetch: &mut Prefetch<'_>,
) {
    let layout = tile.layout();
    let steps = layout.dim().div_ceil(GROUP);
    let apart = TILE_BLOCKS * steps * BLOCK_WORDS;
    let count = gemm_blocks(tile);
    let blocks = begin::<E>(tile, (&mut memory.k, apart), memory.copies);
    let mut lines = *prefetch;
    let pace = lines.pace(count * steps);
    // A row of words per token, before a block is transposed.
    let mut words = [[0_u32; BLOCK_WORDS]; 2];
    for (block, rows) in blocks.into_iter().enumerate().take(count) {
        for step in 0..steps {
            lines.step(w, pace);
            let to = (words.as_mut_ptr().cast(), BLOCK_WORDS);
            // SAFETY: rows of the layout, a group that they have, and a block for each term.
            unsafe { E::words((w, unit), rows, (layout, step * GROUP), to) };
            for (term, words) in words.iter().enumerate().take(E::TERMS) {
                let at = term * apart + (block * steps + step) * BLOCK_WORDS;
                let to = memory.k.words.as_mut_ptr().wrapping_add(at);
                // SAFETY: blocks, by the assertion of `begin`.
                unsafe { w.transpose(words.as_ptr(), (to, BLOCK), BLOCK) };
            }
        }
    }
    lines.finish(w);
    *prefetch = lines;
}

/// Packs V of a tile into blocks of 16 values, a row of words for two tokens of a [`GROUP`] of
/// them, zeros for tokens that do not exist.
#[inline(always)]
pub(crate) fn values<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    tile: &TileRows<'_>,
    memory: &mut Memory<'_>,
    prefetch: &mut Prefetch<'_>,
) {
    let layout = tile.layout();
    let groups = layout.dim().div_ceil(GROUP);
    let apart = groups * 2 * BLOCK_WORDS;
    let halves = gemm_blocks(tile) / 2;
    let blocks = begin::<E>(tile, (&mut memory.v, TILE_BLOCKS / 2 * apart), memory.copies);
    let mut lines = *prefetch;
    let pace = lines.pace(groups * halves * (BLOCK / PAIRS));
    for group in 0..groups {
        for (half, rows) in blocks.as_chunks::<2>().0.iter().enumerate().take(halves) {
            for i in (0..BLOCK).step_by(PAIRS) {
                lines.step(w, pace);
                let at = half * E::TERMS * apart + group * 2 * BLOCK_WORDS + i * BLOCK;
                let to = memory.v.words.as_mut_ptr().wrapping_add(at);
                let rows = rows.map(|rows| rows.from(i));
                // SAFETY: rows of the layout, a group that they have, and rows of the blocks by the
                // assertion of `begin`.
                unsafe { E::pairs((w, unit), rows, (layout, group * GROUP), (to, apart)) };
            }
        }
    }
    lines.finish(w);
    *prefetch = lines;
}

/// Returns the blocks of tokens that are packed for a tile.
#[inline(always)]
fn gemm_blocks(tile: &TileRows<'_>) -> usize {
    tile.len().div_ceil(GEMM_TOKENS) * (GEMM_TOKENS / BLOCK)
}

/// Checks the room for the blocks of a tile, `apart` words per term, and finds its rows.
#[inline(always)]
fn begin<E: Terms>(
    tile: &TileRows<'_>,
    (to, apart): (&mut Blocks<'_>, usize),
    copies: &mut [u8],
) -> [BlockRows; TILE_BLOCKS] {
    assert!(
        tile.layout().dim() == to.dim
            && to.words.len() >= E::TERMS * apart
            && copies.len() >= tile.copied_bytes(),
        "blocks of all terms lie inside their slice"
    );
    (to.terms, to.tokens) = (E::TERMS, tile.len());
    tile.blocks(gemm_blocks(tile), copies)
}

/// Packs weights of [`GROUP`] tokens from `token` on, a block a term: a row of words for each of
/// [`BLOCK`] rows.
#[inline(always)]
pub(crate) fn weights<W: Words, const TERMS: usize>(
    w: W,
    (weights, token): (&[f32], usize),
    to: &mut [u32],
) {
    assert!(
        token + GROUP <= TILE_TOKENS && to.len() >= TERMS * BLOCK_WORDS,
        "blocks of all terms lie inside their slice"
    );
    for (row, weights) in weights.chunks_exact(TILE_TOKENS).enumerate().take(BLOCK) {
        // SAFETY: `GROUP` of `TILE_TOKENS` weights, by the assertion.
        let mut values = unsafe { float_group(w, weights.as_ptr().wrapping_add(token)) };
        for term in 0..TERMS {
            let words = to.as_mut_ptr().wrapping_add(term * BLOCK_WORDS + row * BLOCK);
            // SAFETY: a row of words, by the assertion.
            unsafe { w.store_words(words, values[0], values[1]) };
            if term + 1 < TERMS {
                values = remainder(w, values);
            }
        }
    }
}
