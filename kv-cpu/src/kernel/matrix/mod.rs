//! Scores and sums of whole tiles on a unit that multiplies matrices, which is AMX.
//!
//! Such a unit multiplies bf16 and adds in `f32`. A value of 16 or 8 bits is one bf16 or the sum of
//! two, a query or a weight the sum of up to three; so terms of K are multiplied with terms of
//! queries, and terms of V with those of weights. Left out are products that are too small for the
//! last bit of an `f32`, and the third term of weights where outputs have 16 bits.
//!
//! Words of 32 bits hold two values each, 16 apart in a group of 32: values of a row for scores,
//! tokens of a tile for sums. That is how [`super::stored::Stored::load_pair`] brings them.
//!
//! Only finite numbers are the sum of terms. Of others comes a number that is not finite either,
//! but perhaps another one, and in all rows that met it, whether they see it or not; so results
//! that are not finite are worth nothing. Numbers below the least normal `f32` count as zero.
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(test)]
pub(super) mod emulated;
mod products;
mod stage;
mod unit;

use std::marker::PhantomData;

use super::ahead::Ahead;
use super::stored::GROUP;
use super::{Kernels, RowScale, TILE};
use crate::encoding::{Encoding, RowLayout};

/// Rows and columns of a block, and words of its rows.
pub(crate) const BLOCK: usize = 16;
/// Words of a block.
const WORDS: usize = BLOCK * BLOCK;
/// Most terms that a value has.
const TERMS: usize = 3;
/// Blocks that the tokens of a tile fill.
const PARTS: usize = TILE / BLOCK;

/// What the unit of one instruction set computes. Calling an entry is sound only on a CPU that has
/// the set, and between `enter` and `leave` on the same thread.
pub(crate) struct Table {
    /// Sets the unit up and returns how it was; the other sets it back.
    enter: unsafe fn() -> Setting,
    leave: unsafe fn(&Setting),
    terms: unsafe fn(&[f32]) -> usize,
    is_finite: unsafe fn(&[f32]) -> bool,
    queries: unsafe fn((&[f32], usize), QueryShape, &mut [u32]),
    /// What brings K of an encoding into blocks, and V.
    stage: fn(Encoding) -> Option<[Stage; 2]>,
    scores: unsafe fn(&Queries<'_>, usize, &Memory<'_>, &mut [f32]),
    /// With weights of two terms, and of three.
    sums: [SumsBy; 2],
}

type SumsBy = unsafe fn(&mut Memory<'_>, &mut [f32], (&mut [f32], usize));
type Stage = unsafe fn(&StoredRows<'_>, &mut Memory<'_>, &mut Ahead<'_>);

/// Rows of a tile that are stored alike.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredRows<'a> {
    pub(crate) rows: &'a [&'a [u8]],
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

/// Query rows of one kv head as the unit takes them: by 16 rows, by term, by 32 values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queries<'a> {
    pub(crate) shape: QueryShape,
    /// As many as the shape says.
    pub(crate) words: &'a [u32],
}

/// How many rows of how many values there are, and how many terms each value has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryShape {
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) terms: usize,
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
}

/// Rows of a tile in blocks, term by term.
#[derive(Debug)]
struct Blocks<'a> {
    words: &'a mut [u32],
    /// How many terms there are.
    terms: usize,
    /// Values of a row.
    dim: usize,
    /// What scores or weights are multiplied with, by token.
    factors: Option<[f32; TILE]>,
}

impl<'a> Blocks<'a> {
    /// Words of two terms: a word is two values, and the last group of a row is whole.
    fn words(dim: usize) -> usize {
        dim.div_ceil(GROUP).saturating_mul(2 * PARTS * WORDS)
    }

    fn new(words: &'a mut [u32], dim: usize) -> Self {
        Self { words, terms: 0, dim, factors: None }
    }
}

impl<'a> Memory<'a> {
    const WEIGHTS: usize = 2 * TERMS * WORDS;

    /// Words for rows of K and V of so many values.
    pub(crate) fn words(dim_k: usize, dim_v: usize) -> usize {
        let blocks = Blocks::words(dim_k).saturating_add(Blocks::words(dim_v));
        blocks.saturating_add(Self::WEIGHTS)
    }

    /// Takes [`Self::words`] of them.
    ///
    /// # Panics
    /// When they are fewer.
    pub(crate) fn new(words: &'a mut [u32], dim_k: usize, dim_v: usize) -> Self {
        let (k, words) = words.split_at_mut(Blocks::words(dim_k));
        let (v, words) = words.split_at_mut(Blocks::words(dim_v));
        let (weights, _) = words.split_at_mut(Self::WEIGHTS);
        Self { k: Blocks::new(k, dim_k), v: Blocks::new(v, dim_v), weights }
    }
}

impl Kernels {
    /// Whether there is a unit that takes rows of this encoding.
    pub(crate) fn has_matrix(self, encoding: Encoding) -> bool {
        self.1.is_some_and(|table| (table.stage)(encoding).is_some())
    }

    /// The unit, where this instruction set has one.
    pub(crate) fn matrix(self) -> Option<Matrix> {
        let table = self.1?;
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

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: the unit is at work, as there is a `Matrix`.
        unsafe { (self.table.leave)(&self.before) }
    }
}

/// Instantiates the loops for one unit and the vectors that serve it, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr, $unit:expr, $enter:path, $leave:path) => {
        /// The unit's loops.
        pub(in super::super) static TABLE: super::Table = {
            use super::super::stored::{Bf16, Bf16Pairs, E4m3, E5m2, F16, Int8};
            use super::super::Ahead;
            use super::stage::Terms;
            use super::{Memory, Queries, QueryShape, Stage, Table, StoredRows};
            use crate::encoding::Encoding;

            $(#[$attribute])*
            fn terms(queries: &[f32]) -> usize {
                super::stage::terms(queries)
            }
            $(#[$attribute])*
            fn is_finite(values: &[f32]) -> bool {
                super::stage::is_finite(values)
            }
            $(#[$attribute])*
            fn queries(rows: (&[f32], usize), shape: QueryShape, to: &mut [u32]) {
                super::stage::queries($simd, rows, shape, to);
            }
            $(#[$attribute])*
            fn keys<E: Terms>(
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                ahead: &mut Ahead<'_>,
            ) {
                super::stage::keys::<_, E>($simd, tile, &mut memory.k, ahead);
            }
            $(#[$attribute])*
            fn values<E: Terms>(
                tile: &StoredRows<'_>,
                memory: &mut Memory<'_>,
                ahead: &mut Ahead<'_>,
            ) {
                super::stage::values::<_, E>($simd, tile, &mut memory.v, ahead);
            }
            $(#[$attribute])*
            fn scores(
                queries: &Queries<'_>,
                first: usize,
                memory: &Memory<'_>,
                out: &mut [f32],
            ) {
                super::products::scores(($simd, $unit), (queries, first), memory, out);
            }
            $(#[$attribute])*
            fn sums<const TERMS: usize>(
                memory: &mut Memory<'_>,
                weights: &mut [f32],
                out: (&mut [f32], usize),
            ) {
                super::products::sums::<_, _, TERMS>(($simd, $unit), memory, weights, out);
            }
            fn of<E: Terms>() -> Option<[Stage; 2]> {
                Some([keys::<E>, values::<E>])
            }
            Table {
                enter: $enter,
                leave: $leave,
                terms,
                is_finite,
                queries,
                stage: |encoding| match encoding {
                    Encoding::F16 => of::<F16>(),
                    Encoding::Bf16 => of::<Bf16>(),
                    Encoding::E4m3 => of::<E4m3>(),
                    Encoding::E5m2 => of::<E5m2>(),
                    Encoding::Int8 => of::<Int8>(),
                    Encoding::Bf16Pairs => of::<Bf16Pairs>(),
                    _ => None,
                },
                scores,
                sums: [sums::<2>, sums::<3>],
            }
        };
    };
}
use table;
