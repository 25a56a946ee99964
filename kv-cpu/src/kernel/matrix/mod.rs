//! Scores and sums of whole tiles on a unit that multiplies matrices, which is AMX.
//!
//! Such a unit multiplies bf16 and adds in `f32`. A value of 16 or 8 bits is one bf16 or the sum of
//! two, a query or a weight the sum of up to three; so terms of K are multiplied with terms of
//! queries, and terms of V with those of weights. Left out are products that are too small for the
//! last bit of an `f32`, and the third term of weights where outputs have 16 bits.
//!
//! Words of 32 bits hold two values each, 16 apart in a group of 32: values of a row for scores,
//! tokens of a tile for sums. That is how [`super::stored::Stored::load_pair`] brings them. For
//! scores of few query rows by codes of a byte they are two apart, where a line is whole
//! (`unit::Unit::code_line`).
//!
//! Query rows that fill a block or more are rows, and K is turned: `stage` and `products`.
//! Fewer are `columns`, and K stays as it is: `few`, and `bytes` where K is signed bytes. For both,
//! `even` finds rows that follow each other, and `codes` says what a code of a byte is as bf16.
//!
//! Only finite numbers are the sum of terms. Of others comes a number that is not finite either,
//! but perhaps another one, and in all rows that met it, whether they see it or not; so results
//! that are not finite are worth nothing. Numbers below the least normal `f32` count as zero.
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod bytes;
mod codes;
mod columns;
#[cfg(test)]
pub(super) mod emulated;
mod even;
mod few;
mod products;
mod stage;
mod table;
mod unit;

use std::marker::PhantomData;

pub(super) use table::Table;

use super::ahead::Ahead;
use super::simd::LINE;
use super::stored::GROUP;
use super::tile::Factors;
use super::{Kernels, RowScale, TILE, TileRows};
use crate::encoding::{Encoding, RowLayout};

/// Rows and columns of a block, and words of its rows.
pub(crate) const BLOCK: usize = 16;
/// Words of a block.
const WORDS: usize = BLOCK * BLOCK;
/// Most terms that a value has.
const TERMS: usize = 3;
/// Tokens that many query rows meet at a time.
pub(crate) const VISIT: usize = 4 * BLOCK;
/// Blocks that the tokens of a tile fill.
const PARTS: usize = TILE / BLOCK;

/// Rows of a tile that are stored alike.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    pub(crate) rows: &'a TileRows<'a>,
    pub(crate) layout: &'a RowLayout,
    pub(crate) scale: RowScale<'a>,
}

/// How a thread's unit is set up, in the unit's own form.
#[repr(C, align(64))]
struct Setting([u8; 64]);

/// The unit, at work for one thread.
pub(crate) struct Matrix {
    table: &'static Table,
    /// How the unit was set up before, perhaps by another library.
    before: Setting,
    /// The unit is the thread's.
    here: PhantomData<*const ()>,
}

/// Query rows of one kv head as the unit takes them: by 16 rows, by term, by 32 values; or, where
/// they are few, as columns of both, by 32 values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queries<'a> {
    pub(crate) shape: QueryShape,
    /// As many as the shape says.
    pub(crate) words: &'a [u32],
    /// The same for rows of codes, if they are few.
    pub(crate) codes: &'a [u32],
    /// And for rows of signed bytes.
    pub(crate) bytes: &'a [u32],
}

/// What few query rows are columns for: rows of K bring values to words in different orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Columns {
    Words,
    Codes,
    Bytes,
}

impl Columns {
    pub(crate) const fn of(k: Encoding) -> Self {
        match k {
            Encoding::E4m3 | Encoding::E5m2 => Self::Codes,
            Encoding::Int8 => Self::Bytes,
            _ => Self::Words,
        }
    }
}

/// How many rows of how many values there are, and how many terms each value has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryShape {
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) terms: usize,
    /// Columns of a block of few rows, a multiple of four.
    pub(crate) columns: usize,
}

impl QueryShape {
    pub(crate) fn words(self) -> usize {
        let blocks = self.rows.div_ceil(BLOCK).saturating_mul(self.dim.div_ceil(GROUP));
        blocks.saturating_mul(self.terms).saturating_mul(WORDS)
    }
}

/// The upper half of a word.
const UPPER: u32 = 0xffff_0000;

/// A tile in blocks.
#[derive(Debug)]
pub(crate) struct Memory<'a> {
    k: Blocks<'a>,
    v: Blocks<'a>,
    weights: &'a mut [u32],
    /// Blocks of products, of few query rows.
    products: &'a mut [f32],
    /// Rows that do not follow each other.
    rows: &'a mut [u8],
}

/// Rows of a tile in blocks, term by term.
#[derive(Debug)]
struct Blocks<'a> {
    words: &'a mut [u32],
    /// How many terms there are, and tokens.
    terms: usize,
    tokens: usize,
    /// Values of a row.
    dim: usize,
    /// What scores or weights are multiplied with.
    factors: Option<Factors>,
}

impl<'a> Blocks<'a> {
    /// Words of two terms: a word is two values, and the last group of a row is whole.
    fn words(dim: usize) -> usize {
        dim.div_ceil(GROUP).saturating_mul(2 * PARTS * WORDS)
    }

    fn new(words: &'a mut [u32], dim: usize) -> Self {
        Self { words, terms: 0, tokens: 0, dim, factors: None }
    }
}

impl<'a> Memory<'a> {
    const WEIGHTS: usize = PARTS / 2 * TERMS * WORDS;

    /// Blocks of a tile's tokens, or of two groups of columns and all terms of weights.
    const PRODUCTS: usize = 4 * TERMS * WORDS;

    /// Floats for rows of K and V of so many values.
    pub(crate) fn len(dim_k: usize, dim_v: usize) -> usize {
        let blocks = Blocks::words(dim_k).saturating_add(Blocks::words(dim_v));
        let others = Self::WEIGHTS + Self::PRODUCTS;
        blocks.saturating_add(others).saturating_add(Self::rows(dim_k, dim_v))
    }

    /// Rows of whole lines of 16 bits a value, and a scale behind them.
    fn rows(dim_k: usize, dim_v: usize) -> usize {
        let bytes = dim_k.max(dim_v).next_multiple_of(LINE).saturating_add(1).saturating_mul(2);
        bytes.saturating_mul(TILE).div_ceil(4)
    }

    /// Takes [`Self::len`] of them.
    ///
    /// # Panics
    /// When they are fewer.
    pub(crate) fn new(floats: &'a mut [f32], dim_k: usize, dim_v: usize) -> Self {
        let (products, words) = floats.split_at_mut(Self::PRODUCTS);
        let words: &mut [u32] = bytemuck::cast_slice_mut(words);
        let (k, words) = words.split_at_mut(Blocks::words(dim_k));
        let (v, words) = words.split_at_mut(Blocks::words(dim_v));
        let (weights, rows) = words.split_at_mut(Self::WEIGHTS);
        let rows = bytemuck::cast_slice_mut(rows);
        Self { k: Blocks::new(k, dim_k), v: Blocks::new(v, dim_v), weights, products, rows }
    }
}

impl Kernels {
    /// Whether there is a unit that takes rows of this encoding.
    pub(crate) fn has_matrix(self, encoding: Encoding) -> bool {
        self.matrix.is_some_and(|table| (table.stage)(encoding).is_some())
    }

    /// The unit, where this instruction set has one.
    pub(crate) fn matrix(self) -> Option<Matrix> {
        let table = self.matrix?;
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        let before = unsafe { (table.enter)() };
        Some(Matrix { table, before, here: PhantomData })
    }
}

impl Matrix {
    /// Terms that hold every one of these queries exactly; where one is not finite, any number.
    pub(crate) fn terms(&self, queries: &[f32]) -> usize {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.terms)(queries) }
    }

    /// Whether all of these are finite.
    pub(crate) fn is_finite(&self, values: &[f32]) -> bool {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.is_finite)(values) }
    }

    /// Brings query rows, floats and how many from one row to the next, into the blocks of
    /// [`Queries`].
    pub(crate) fn queries(&self, rows: (&[f32], usize), shape: QueryShape, to: &mut [u32]) {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.queries)(rows, shape, to) }
    }

    /// Brings a tile of K and one of V into blocks; asks for some of `ahead` meanwhile. Their
    /// encodings are such as [`Kernels::has_matrix`] knows.
    pub(crate) fn stage(
        &self,
        [k, v]: [&StoredRows<'_>; 2],
        memory: &mut Memory<'_>,
        ahead: &mut Ahead<'_>,
    ) {
        if let Some([stage, _]) = (self.table.stage)(k.layout.encoding()) {
            // SAFETY: the unit is at work, as there is a `Matrix`.
            unsafe { stage(k, memory, ahead) }
        }
        if let Some([_, stage]) = (self.table.stage)(v.layout.encoding()) {
            // SAFETY: the unit is at work, as there is a `Matrix`.
            unsafe { stage(v, memory, ahead) }
        }
    }

    /// Scores of [`BLOCK`] rows from `first`, a multiple of that, by all tokens of the tile:
    /// [`TILE`] a row.
    pub(crate) fn scores(
        &self,
        queries: &Queries<'_>,
        first: usize,
        memory: &Memory<'_>,
        out: &mut [f32],
    ) {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.scores)(queries, first, memory, out) }
    }

    /// Adds all values of the tile, by [`TILE`] weights a row, to [`BLOCK`] rows of outputs:
    /// floats, and how many from one row to the next. `exact` weights have all their terms.
    pub(crate) fn sums(
        &self,
        memory: &mut Memory<'_>,
        weights: &mut [f32],
        exact: bool,
        out: (&mut [f32], usize),
    ) {
        let [two, three] = self.table.sums;
        let kernel = if exact { three } else { two };
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { kernel(memory, weights, out) }
    }
}

/// Fewer query rows than a block.
impl Matrix {
    /// The shape of few rows, and sets the unit up for them, and for them alone from here on.
    /// `exact` is that of [`Self::sums_of_few`]. Of K, some rows are `bytes`.
    pub(crate) fn narrow(
        &mut self,
        (rows, dim, terms): (usize, usize, usize),
        exact: bool,
        bytes: bool,
    ) -> QueryShape {
        // Parts of a row fill a block together or are left to the next one.
        let filled = |parts: usize| {
            BLOCK.checked_div(parts).map_or(0, |most| rows.min(most).saturating_mul(parts))
        };
        let digits = filled(if bytes { bytes::DIGITS } else { 0 });
        let columns = filled(terms).max(digits).next_multiple_of(4);
        let weights = filled(if exact { TERMS } else { TERMS - 1 });
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.narrow)(columns, weights) }
        QueryShape { rows, dim, terms, columns }
    }

    /// Brings query rows, floats and how many from one row to the next, into columns of
    /// [`Queries`].
    pub(crate) fn columns(
        &self,
        rows: (&[f32], usize),
        shape: QueryShape,
        (to, columns): (&mut [u32], Columns),
    ) {
        let [words, codes, bytes] = self.table.columns;
        let kernel = match columns {
            Columns::Words => words,
            Columns::Codes => codes,
            Columns::Bytes => bytes,
        };
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { kernel(rows, shape, to) }
    }

    /// Scores of query rows that are columns by a tile of K, [`TILE`] a row; there is room for a
    /// block of rows. The encoding is one that [`Kernels::has_matrix`] knows, here and below.
    pub(crate) fn scores_of_few(
        &self,
        queries: &Queries<'_>,
        (k, memory): (&StoredRows<'_>, &mut Memory<'_>),
        out: &mut [f32],
        ahead: &mut Ahead<'_>,
    ) {
        if let Some(few) = (self.table.few)(k.layout.encoding()) {
            // SAFETY: the unit is at work, as there is a `Matrix`.
            unsafe { (few.scores)(queries, k, memory, out, ahead) }
        }
    }

    /// Adds a tile of V, by [`TILE`] weights a row, to as many rows of outputs. See
    /// [`Self::sums`].
    pub(crate) fn sums_of_few(
        &self,
        (v, memory): (&StoredRows<'_>, &mut Memory<'_>),
        (weights, exact): (&mut [f32], bool),
        out: (&mut [f32], usize),
        ahead: &mut Ahead<'_>,
    ) {
        if let Some(few) = (self.table.few)(v.layout.encoding()) {
            let [two, three] = few.sums;
            let kernel = if exact { three } else { two };
            // SAFETY: the unit is at work, as there is a `Matrix`.
            unsafe { kernel(v, memory, weights, out, ahead) }
        }
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.leave)(&self.before) }
    }
}
