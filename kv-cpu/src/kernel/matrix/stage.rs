//! How values are brought into blocks.
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
use super::super::tile::{check_rows, factors};
use super::unit::Words;
use super::{BLOCK, Blocks, PARTS, QueryShape, StoredRows, UPPER, WORDS};
use crate::encoding::{Element, RowLayout};

/// An encoding whose values are the sum of few bf16.
pub(super) trait Terms: Stored + Sized {
    /// How few: 1 or 2.
    const TERMS: usize = 1;
    /// Whether words of memory are those that a block has.
    const IN_PLACE: bool = false;

    /// Brings the values of a group of some pairs of tokens into a row of words a pair, for each
    /// half of the group, which are [`WORDS`] apart, and for each term, which are twice as far.
    ///
    /// # Safety
    /// 1. The bytes of the rows are readable, and the rows of words are writable.
    /// 2. `begin` is a multiple of [`GROUP`] and less than a row has values.
    #[inline(always)]
    unsafe fn pairs<W: Words>(
        w: W,
        rows: [EvenRows; 2],
        (layout, begin): (&RowLayout, usize),
        to: *mut u32,
    ) {
        for i in 0..PAIRS {
            let to = to.wrapping_add(i * BLOCK);
            // SAFETY: conditions 1 and 2.
            let mut first = unsafe { group::<W, Self>(w, rows[0].at(i), layout, begin) };
            // SAFETY: as above.
            let mut second = unsafe { group::<W, Self>(w, rows[1].at(i), layout, begin) };
            for term in 0..Self::TERMS {
                for half in 0..2 {
                    let to = to.wrapping_add((2 * term + half) * WORDS);
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

impl Terms for F16 {
    const TERMS: usize = 2;
}
impl Terms for Bf16 {}
impl Terms for E4m3 {}
impl Terms for E5m2 {}
impl Terms for Int8 {}
impl Terms for Bf16Pairs {
    const IN_PLACE: bool = true;

    #[inline(always)]
    unsafe fn pairs<W: Words>(
        w: W,
        rows: [EvenRows; 2],
        (layout, begin): (&RowLayout, usize),
        to: *mut u32,
    ) {
        if begin + GROUP > layout.dim() {
            // SAFETY: the conditions are passed on; what is no whole group is in order.
            return unsafe { Bf16::pairs(w, rows, (layout, begin), to) };
        }
        for i in 0..PAIRS {
            let [a, b] = rows.map(|rows| rows.at(i).wrapping_add(2 * begin).cast());
            // SAFETY: a whole group, by condition 1.
            let a = unsafe { w.load_bits(a, 0) };
            // SAFETY: as above.
            let b = unsafe { w.load_bits(b, 0) };
            let to = to.wrapping_add(i * BLOCK);
            // SAFETY: rows of words, by condition 1.
            unsafe { w.store_halves([to, to.wrapping_add(WORDS)], a, b) };
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
pub(super) fn keys<W: Words, E: Terms>(
    w: W,
    tile: &StoredRows<'_>,
    to: &mut Blocks<'_>,
    ahead: &mut Ahead<'_>,
) {
    let (rows, layout) = (tile.rows.at(), tile.layout);
    let steps = layout.dim().div_ceil(GROUP);
    let apart = PARTS * steps * WORDS;
    begin::<W, E>(w, tile, to, apart);
    let pace = ahead.pace(part::SCORES, TILE / 4);
    // A row of words for each token, before a block is turned.
    let mut blocks = [[0_u32; WORDS]; 2];
    for part in 0..PARTS {
        let rows = &rows[rows.len().min(part * BLOCK)..rows.len().min((part + 1) * BLOCK)];
        for block in &mut blocks[..E::TERMS] {
            block[rows.len() * BLOCK..].fill(0);
        }
        for step in 0..steps {
            for (i, row) in rows.iter().enumerate() {
                if step == 0 && i % 4 == 0 {
                    ahead.fetch(w, pace);
                }
                // SAFETY: a row of the layout, and values that it has.
                let mut values = unsafe { group::<W, E>(w, *row, layout, step * GROUP) };
                for (term, block) in blocks.iter_mut().enumerate().take(E::TERMS) {
                    let words = block[i * BLOCK..][..BLOCK].as_mut_ptr();
                    // SAFETY: a row of words.
                    unsafe { w.store_words(words, values[0], values[1]) };
                    if term + 1 < E::TERMS {
                        values = rest(w, values);
                    }
                }
            }
            for (term, block) in blocks.iter().enumerate().take(E::TERMS) {
                let at = term * apart + (part * steps + step) * WORDS;
                let to = to.words.as_mut_ptr().wrapping_add(at);
                // SAFETY: blocks, by what `begin` asserts.
                unsafe { w.turn(block.as_ptr(), (to, BLOCK), BLOCK) };
            }
        }
    }
}

/// Brings V of a tile into blocks of 16 values, of each half of the tile two tokens a row of words,
/// zeros for tokens that there are not.
#[inline(always)]
pub(super) fn values<W: Words, E: Terms>(
    w: W,
    tile: &StoredRows<'_>,
    to: &mut Blocks<'_>,
    (ahead, part): (&mut Ahead<'_>, usize),
) {
    let (rows, layout) = (tile.rows.at(), tile.layout);
    let apart = layout.dim().div_ceil(GROUP) * 2 * WORDS;
    begin::<W, E>(w, tile, to, 2 * apart);
    let pace = ahead.pace(part, TILE / 2);
    for token in (0..BLOCK).chain(GROUP..GROUP + BLOCK) {
        ahead.fetch(w, pace);
        let half = token / GROUP * E::TERMS * apart;
        let to = to.words.as_mut_ptr().wrapping_add(half + token % GROUP * BLOCK);
        match (rows.get(token), rows.get(token + BLOCK)) {
            (Some(first), Some(second)) => {
                let rows = [*first, *second];
                // SAFETY: rows of the layout, and rows of the blocks by what `begin` asserts.
                unsafe { value_words::<W, E, 2>(w, rows, layout, (to, apart)) };
            }
            (Some(first), None) => {
                // SAFETY: as above.
                unsafe { value_words::<W, E, 1>(w, [*first], layout, (to, apart)) };
            }
            // SAFETY: as above.
            _ => unsafe { value_words::<W, E, 0>(w, [], layout, (to, apart)) },
        }
    }
}

/// Checks the rows of a tile and the room for their blocks, `apart` words a term, and notes what is
/// known of them.
#[inline(always)]
fn begin<W: Words, E: Terms>(w: W, tile: &StoredRows<'_>, to: &mut Blocks<'_>, apart: usize) {
    let all = (0, tile.rows.len());
    check_rows(tile.rows, all, tile.layout);
    assert!(
        tile.layout.dim() == to.dim && to.words.len() >= E::TERMS * apart,
        "blocks of all terms"
    );
    to.terms = E::TERMS;
    to.factors = factors(w, tile.rows, all, tile.layout, tile.scale);
}

/// Words of the rows of two tokens, or of fewer. They go to one row of each block; terms lie
/// `apart` words from each other.
///
/// # Safety
/// 1. The bytes of the rows are readable, and the blocks' rows are writable.
#[inline(always)]
unsafe fn value_words<W: Words, E: Terms, const N: usize>(
    w: W,
    rows: [*const u8; N],
    layout: &RowLayout,
    (to, apart): (*mut u32, usize),
) {
    let mut begin = 0;
    while begin < layout.dim() {
        let mut values = [[w.splat(0.0); 2]; 2];
        for i in 0..N {
            // SAFETY: a row, and values that it has.
            values[i] = unsafe { group::<W, E>(w, rows[i], layout, begin) };
        }
        let [mut first, mut second] = values;
        for term in 0..E::TERMS {
            for column in 0..2 {
                let at = term * apart + (begin / BLOCK + column) * WORDS;
                // SAFETY: a row of words, by condition 1.
                unsafe { w.store_words(to.wrapping_add(at), first[column], second[column]) };
            }
            if term + 1 < E::TERMS {
                (first, second) = (rest(w, first), rest(w, second));
            }
        }
        begin += GROUP;
    }
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
