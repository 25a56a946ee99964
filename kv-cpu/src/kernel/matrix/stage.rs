//! How values are brought into blocks: terms of queries, of rows, of weights.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::TILE;
use super::super::ahead::{Ahead, part};
use super::super::simd::Simd;
use super::super::stored::{Bf16, Bf16Pairs, E4m3, E5m2, F16, F32, GROUP, Int8, Stored, whole};
use super::super::tile::{Factors, check_rows};
use super::codes::{self, Codes};
use super::even::{EvenRows, even_parts};
use super::unit::{Unit, Words};
use super::{BLOCK, Blocks, Memory, PARTS, QueryShape, StoredRows, UPPER, VISIT, WORDS};
use crate::encoding::{Element, RowLayout};

/// An encoding whose values are the sum of few bf16.
pub(super) trait Terms: Stored + Sized {
    /// How few: 1 or 2.
    const TERMS: usize = 1;
    /// Whether words of memory are those that a block has.
    const IN_PLACE: bool = false;
    /// What its codes are, if a value is a code of a byte.
    const CODES: Option<&'static Codes> = None;

    /// Brings a group of each of a block's rows into a block, a row of words each; terms lie
    /// `apart` words from each other.
    ///
    /// # Safety
    /// 1. The bytes of the rows are readable, and the blocks are writable.
    /// 2. `begin` is a multiple of [`GROUP`] and less than a row has values.
    #[inline(always)]
    unsafe fn words<W: Words, U: Unit>(
        (w, unit): (W, U),
        rows: EvenRows,
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
                    values = rest(w, values);
                }
            }
        }
    }

    /// Brings the values of a group of some pairs of tokens into a row of words a pair, for each
    /// half of the group, which are [`WORDS`] apart, and for each term, which are `apart`.
    ///
    /// # Safety
    /// 1. The bytes of the rows are readable, and the rows of words are writable.
    /// 2. `begin` is a multiple of [`GROUP`] and less than a row has values.
    #[inline(always)]
    unsafe fn pairs<W: Words, U: Unit>(
        (w, unit): (W, U),
        rows: [EvenRows; 2],
        (layout, begin): (&RowLayout, usize),
        (to, apart): (*mut u32, usize),
    ) {
        if let Some(codes) = Self::CODES.filter(|_| begin + GROUP <= layout.dim()) {
            for i in (0..PAIRS).step_by(2) {
                let from = |row: usize| rows.map(|rows| rows.at(row).wrapping_add(begin));
                let ([a, b], [c, d]) = (from(i), from(i + 1));
                let [first, second] = [i, i + 1].map(|i| to.wrapping_add(i * BLOCK));
                let to = [first, first.wrapping_add(WORDS), second, second.wrapping_add(WORDS)];
                // SAFETY: groups of rows, by condition 2, and rows of words.
                unsafe { unit.code_pairs(codes, [a, b, c, d], to) };
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
                    let to = to.wrapping_add(term * apart + half * WORDS);
                    // SAFETY: a row of words, by condition 1.
                    unsafe { w.store_words(to, first[half], second[half]) };
                }
                if term + 1 < Self::TERMS {
                    (first, second) = (rest(w, first), rest(w, second));
                }
            }
        }
    }
}

/// Pairs of tokens that are brought in together.
pub(super) const PAIRS: usize = 8;

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
        rows: [EvenRows; 2],
        (layout, begin): (&RowLayout, usize),
        to: (*mut u32, usize),
    ) {
        if begin + GROUP > layout.dim() {
            // SAFETY: the conditions are passed on; what is no whole group is in order.
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
            unsafe { of.0.store_halves([to, to.wrapping_add(WORDS)], a, b) };
        }
    }
}

/// The values of a group, zeros behind the row's last one.
///
/// # Safety
/// 1. The bytes of the row are readable.
/// 2. `begin` is a multiple of [`GROUP`] and less than the row has values.
#[inline(always)]
pub(super) unsafe fn group<S: Simd, E: Stored>(
    s: S,
    row: *const u8,
    layout: &RowLayout,
    begin: usize,
) -> [S::F; 2] {
    const { assert!(S::LANES == BLOCK && GROUP == 2 * BLOCK, "vectors of half a group") };
    let dim = layout.dim();
    if begin + GROUP <= dim {
        // SAFETY: conditions 1 and 2, and the group is whole.
        return unsafe { E::load_pair(s, row, layout, begin, 0) };
    }
    let (mut values, mut at) = ([0.0; GROUP], begin);
    if at < whole::<S, E>(dim) {
        // SAFETY: condition 1, and the vector is whole.
        let first = unsafe { E::load(s, row, layout, begin, 0) };
        // SAFETY: half of the array.
        unsafe { s.store(values.as_mut_ptr(), 0, first) };
        at += BLOCK;
    }
    if at < dim {
        // SAFETY: condition 1, and the rest begins here.
        let rest = unsafe { E::rest(s, row, layout, at) };
        values[at - begin..].copy_from_slice(&rest[..begin + GROUP - at]);
    }
    // SAFETY: half of the array.
    let first = unsafe { s.load(values.as_ptr(), 0) };
    // SAFETY: the other half.
    [first, unsafe { s.load(values.as_ptr(), BLOCK) }]
}

/// What values are more than their first terms.
#[inline(always)]
pub(super) fn rest<W: Words>(w: W, [a, b]: [W::F; 2]) -> [W::F; 2] {
    let minus = w.splat(-1.0);
    [w.fma(w.cut(a), minus, a), w.fma(w.cut(b), minus, b)]
}

/// Whether no value is infinite or NaN. Looks at all of them, as most have none.
#[inline(always)]
pub(super) fn is_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, value| all & value.is_finite())
}

/// Terms that hold all queries exactly.
#[inline(always)]
pub(super) fn terms(queries: &[f32]) -> usize {
    // Bits of second terms, and of third ones.
    let (mut second, mut third) = (0, 0);
    for query in queries {
        let rest = query - f32::from_bits(query.to_bits() & UPPER);
        second |= rest.to_bits();
        third |= rest.to_bits() & !UPPER;
    }
    1 + usize::from(second != 0) + usize::from(third != 0)
}

/// Brings query rows into blocks, a row of words for each.
#[inline(always)]
pub(super) fn queries<W: Words>(
    w: W,
    (rows, stride): (&[f32], usize),
    shape: QueryShape,
    to: &mut [u32],
) {
    let (steps, terms) = (shape.dim.div_ceil(GROUP), shape.terms);
    assert!(
        rows.len() >= shape.rows * stride && shape.dim <= stride && to.len() >= shape.words(),
        "rows lie inside their slices"
    );
    let layout = RowLayout::plain(Element::F32, shape.dim);
    to.fill(0);
    for (row, from) in rows.chunks_exact(stride).enumerate().take(shape.rows) {
        for step in 0..steps {
            let from = from.as_ptr().cast();
            // SAFETY: a row of `dim` floats, whose groups are `steps`.
            let mut values = unsafe { group::<W, F32>(w, from, &layout, step * GROUP) };
            for term in 0..terms {
                let block = ((row / BLOCK * terms + term) * steps + step) * WORDS;
                let words = to[block + row % BLOCK * BLOCK..][..BLOCK].as_mut_ptr();
                // SAFETY: a row of words.
                unsafe { w.store_words(words, values[0], values[1]) };
                values = rest(w, values);
            }
        }
    }
}

/// Brings K of a tile into blocks, a column of words for each token, zeros for tokens that there
/// are not.
#[inline(always)]
pub(super) fn keys<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    tile: &StoredRows<'_>,
    memory: &mut Memory<'_>,
    ahead: &mut Ahead<'_>,
) {
    let steps = tile.layout.dim().div_ceil(GROUP);
    let apart = PARTS * steps * WORDS;
    let from = begin::<W, E>(w, tile, (&mut memory.k, apart), memory.rows);
    let parts = tile.rows.len().div_ceil(VISIT) * (VISIT / BLOCK);
    let pace = ahead.pace(part::SCORES, parts * steps);
    // A row of words for each token, before a block is turned.
    let mut blocks = [[0_u32; WORDS]; 2];
    for (part, rows) in from.into_iter().enumerate().take(parts) {
        for step in 0..steps {
            ahead.fetch(w, pace);
            let words = blocks.as_mut_ptr().cast();
            // SAFETY: rows of the layout, a group that they have, and a block for each term.
            unsafe {
                E::words((w, unit), rows, (tile.layout, step * GROUP), (words, WORDS));
            }
            for (term, block) in blocks.iter().enumerate().take(E::TERMS) {
                let at = term * apart + (part * steps + step) * WORDS;
                let to = memory.k.words.as_mut_ptr().wrapping_add(at);
                // SAFETY: blocks, by what `begin` asserts.
                unsafe { w.turn(block.as_ptr(), (to, BLOCK), BLOCK) };
            }
        }
    }
}

/// Brings V of a tile into blocks of 16 values, of each [`GROUP`] of tokens two a row of words,
/// zeros for tokens that there are not.
#[inline(always)]
pub(super) fn values<W: Words, U: Unit, E: Terms>(
    (w, unit): (W, U),
    tile: &StoredRows<'_>,
    memory: &mut Memory<'_>,
    (ahead, part): (&mut Ahead<'_>, usize),
) {
    let groups = tile.layout.dim().div_ceil(GROUP);
    let apart = groups * 2 * WORDS;
    let from = begin::<W, E>(w, tile, (&mut memory.v, PARTS / 2 * apart), memory.rows);
    let halves = 2 * tile.rows.len().div_ceil(VISIT);
    let pace = ahead.pace(part, groups * halves * (BLOCK / PAIRS));
    for group in 0..groups {
        for (half, rows) in from.as_chunks::<2>().0.iter().enumerate().take(halves) {
            for i in (0..BLOCK).step_by(PAIRS) {
                ahead.fetch(w, pace);
                let at = half * E::TERMS * apart + group * 2 * WORDS + i * BLOCK;
                let to = memory.v.words.as_mut_ptr().wrapping_add(at);
                let rows = rows.map(|rows| rows.from(i));
                // SAFETY: rows of the layout, a group that they have, and rows of the blocks by
                // what `begin` asserts.
                unsafe { E::pairs((w, unit), rows, (tile.layout, group * GROUP), (to, apart)) };
            }
        }
    }
}

/// Checks the rows of a tile and the room for their blocks, `apart` words a term, and notes what is
/// known of them.
#[inline(always)]
fn begin<W: Words, E: Terms>(
    w: W,
    tile: &StoredRows<'_>,
    (to, apart): (&mut Blocks<'_>, usize),
    copies: &mut [u8],
) -> [EvenRows; PARTS] {
    let all = (0, tile.rows.len());
    check_rows(tile.rows, all, tile.layout);
    assert!(
        tile.layout.dim() == to.dim
            && to.words.len() >= E::TERMS * apart
            && copies.len() >= TILE * tile.rows.bytes(),
        "blocks of all terms"
    );
    (to.terms, to.tokens) = (E::TERMS, tile.rows.len());
    to.factors = Factors::of::<W, E>(w, tile.rows, all, tile.layout, tile.scale);
    let (parts, bytes) = (tile.rows.len().div_ceil(VISIT) * (VISIT / BLOCK), tile.rows.bytes());
    even_parts(tile.rows, (parts, bytes, bytes), copies)
}

/// Brings weights of [`GROUP`] tokens from `token` on into blocks, one a term: a row of words for
/// each of [`BLOCK`] rows.
#[inline(always)]
pub(super) fn weights<W: Words, const TERMS: usize>(
    w: W,
    (weights, token): (&[f32], usize),
    to: &mut [u32],
) {
    assert!(
        weights.len() == BLOCK * TILE && token + GROUP <= TILE && to.len() >= TERMS * WORDS,
        "blocks of all terms"
    );
    for (row, weights) in weights.chunks_exact(TILE).enumerate() {
        // SAFETY: `GROUP` of `TILE` weights, by the assertion.
        let first = unsafe { w.load(weights.as_ptr(), token) };
        // SAFETY: as above.
        let mut values = [first, unsafe { w.load(weights.as_ptr(), token + BLOCK) }];
        for term in 0..TERMS {
            let words = to.as_mut_ptr().wrapping_add(term * WORDS + row * BLOCK);
            // SAFETY: a row of words, by the assertion.
            unsafe { w.store_words(words, values[0], values[1]) };
            if term + 1 < TERMS {
                values = rest(w, values);
            }
        }
    }
}
