//! Tiles of scores and sums as matrix products on AMX.
//!
//! AMX multiplies blocks of bf16 and adds in `f32`. A value of 16 or 8 bits is one bf16 or the sum
//! of two, a query or a weight the sum of up to three: terms of K are multiplied with terms of
//! queries, and terms of V with terms of weights. Products too small for the last bit of an `f32`
//! are left out, and so is the third term of weights where outputs have 16 bits.
//!
//! A word of 32 bits holds two values, 16 apart in a group of 32: values of a row for scores,
//! tokens of a tile for sums. That is how `Decode::load_pair` loads them. In [`ColumnOrder::Codes`]
//! they are two apart where a line of codes is whole (`Unit::code_line`).
//!
//! | file | what |
//! |---|---|
//! | `runs` | rows of a tile, in blocks of 16 at one stride |
//! | `pack` | K, V, queries and weights to blocks |
//! | `gemm` | [`Gemm`]: query rows fill blocks as rows, K is transposed |
//! | `narrow` | [`Narrow`]: fewer query rows are columns, K stays as it is |
//! | `codes` | codes of one byte to bf16 |
//! | `unit`, `x86`, `x86_codes`, `x86_words` | primitives |
//!
//! Only finite numbers are sums of terms. An infinity or a NaN makes the sums of all rows of its
//! tile non-finite, even of rows that do not see it: the caller checks [`Gemm::is_finite`] or
//! [`Narrow::is_finite`] and discards such results. Subnormal `f32` count as zero.
pub(crate) mod codes;
pub(crate) mod gemm;
pub(crate) mod narrow;
pub(crate) mod pack;
mod runs;
mod shape;
pub(crate) mod table;
#[cfg(test)]
mod tests;
pub(crate) mod unit;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_codes;
#[cfg(target_arch = "x86_64")]
mod x86_words;

use std::cell::Cell;
use std::marker::PhantomData;

use self::shape::TERMS;
pub use self::shape::{
    BLOCK, ColumnOrder, GEMM_TOKENS, Memory, NARROW_TOKENS, QueryRows, TILE_TOKENS,
};
pub(crate) use self::shape::{BLOCK_WORDS, Blocks, QueryShape, TILE_BLOCKS, UPPER};
use self::table::{Kernel, Table, TileConfig};
#[cfg(target_arch = "x86_64")]
pub(crate) use self::x86::{TABLE, is_available};
use crate::kernels::Kernels;
use crate::prefetch::Prefetch;
use crate::rows::TileRows;

thread_local! {
    /// Whether this thread has a [`Session`].
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// The tile registers of this thread, configured until it is dropped.
struct Session {
    table: &'static Table,
    /// The configuration before the session, perhaps another library's.
    before: TileConfig,
    /// Tile registers belong to a thread.
    of_thread: PhantomData<*const ()>,
}

impl Session {
    fn new(table: &'static Table) -> Self {
        assert!(!IS_OPEN.replace(true), "a thread has one AMX session at a time");
        // SAFETY: the CPU has the instruction set, by `Kernels::new`.
        let before = unsafe { (table.enter)() };
        Self { table, before, of_thread: PhantomData }
    }

    fn is_finite(&self, values: &[f32]) -> bool {
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (self.table.is_finite)(values) }
    }

    /// Returns the kernels for the encoding of a tile.
    fn kernel(&self, tile: &TileRows<'_>) -> Kernel {
        assert!(tile.len() <= TILE_TOKENS, "{} rows of a tile", tile.len());
        let encoding = tile.layout().encoding();
        let kernel = (self.table.kernel)(encoding);
        assert!(kernel.is_some(), "rows of {encoding:?} have no AMX kernels");
        #[expect(clippy::unwrap_used, reason = "asserted")]
        kernel.unwrap()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (self.table.leave)(&self.before) };
        IS_OPEN.set(false);
    }
}

/// Returns the table of `kernels` and the number of terms that hold every query exactly; any number
/// where a query is not finite.
fn terms(kernels: Kernels, queries: &QueryRows<'_>) -> Option<(&'static Table, usize)> {
    let table = kernels.amx()?;
    // SAFETY: the CPU has the instruction set, by `Kernels::new`.
    Some((table, unsafe { (table.terms)(queries.values) }))
}

/// AMX products with query rows as rows of blocks: K and V of a tile are packed once, for any
/// number of rows.
///
/// A thread has one [`Gemm`] or [`Narrow`] at a time.
pub struct Gemm {
    session: Session,
    shape: QueryShape,
    exact: bool,
}

impl std::fmt::Debug for Gemm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gemm").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Gemm {
    /// Configures this thread's tile registers. `None` without AMX.
    ///
    /// # Panics
    /// If query rows are not padded, or the thread has another session.
    pub fn new(kernels: Kernels, queries: &QueryRows<'_>) -> Option<Self> {
        let (table, terms) = terms(kernels, queries)?;
        let shape = QueryShape::of(queries, terms);
        Some(Self { session: Session::new(table), shape, exact: queries.exact })
    }

    /// Returns the words of the query rows of one head.
    pub fn query_words(&self) -> usize {
        self.shape.row_words()
    }

    /// Terms of bf16 that a query value is split into.
    pub fn terms(&self) -> usize {
        self.shape.terms
    }

    /// Packs the query rows of one head.
    ///
    /// # Panics
    /// If rows or words are too few.
    pub fn pack_queries(&self, rows: &[f32], to: &mut [u32]) {
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (self.session.table.pack_rows)(rows, self.shape, to) }
    }

    /// Packs K of a tile; issues prefetches meanwhile.
    ///
    /// # Panics
    /// If the encoding has no kernels, the tile more than [`TILE_TOKENS`] rows, or `memory` is
    /// for rows of another length.
    pub fn pack_keys(
        &self,
        k: &TileRows<'_>,
        memory: &mut Memory<'_>,
        prefetch: &mut Prefetch<'_>,
    ) {
        let kernel = self.session.kernel(k);
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (kernel.pack_keys)(k, memory, prefetch) }
    }

    /// Packs V of a tile; issues prefetches meanwhile.
    ///
    /// # Panics
    /// As [`Self::pack_keys`].
    pub fn pack_values(
        &self,
        v: &TileRows<'_>,
        memory: &mut Memory<'_>,
        prefetch: &mut Prefetch<'_>,
    ) {
        let kernel = self.session.kernel(v);
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (kernel.pack_values)(v, memory, prefetch) }
    }

    /// Computes the scores of the packed tile for [`BLOCK`] query rows from `first` on, a multiple
    /// of [`BLOCK`]. `words` are the packed query rows of the head; a row of `to` has
    /// [`TILE_TOKENS`] scores, of which a multiple of [`GEMM_TOKENS`] is written.
    ///
    /// # Panics
    /// If rows lie outside of their slices.
    pub fn scores(&self, words: &[u32], first: usize, memory: &Memory<'_>, to: &mut [f32]) {
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { (self.session.table.gemm_scores)((words, self.shape), first, memory, to) }
    }

    /// Adds the packed tile to [`BLOCK`] output rows, multiplied with [`TILE_TOKENS`] weights per
    /// row, which are finite up to a multiple of [`GEMM_TOKENS`]. `out` comes with its stride in
    /// floats.
    ///
    /// # Panics
    /// If rows lie outside of their slices.
    pub fn sums(&self, memory: &mut Memory<'_>, weights: &[f32], out: (&mut [f32], usize)) {
        let [two, three] = self.session.table.gemm_sums;
        let kernel = if self.exact { three } else { two };
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { kernel(memory, weights, out) }
    }

    /// Returns whether all values are finite.
    pub fn is_finite(&self, values: &[f32]) -> bool {
        self.session.is_finite(values)
    }
}

/// AMX products with query rows, fewer than [`BLOCK`], as columns of blocks: rows of K are not
/// transposed, and bf16 is multiplied where it lies.
///
/// A thread has one [`Gemm`] or [`Narrow`] at a time.
pub struct Narrow {
    session: Session,
    shape: QueryShape,
    exact: bool,
}

impl std::fmt::Debug for Narrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Narrow").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Narrow {
    /// Configures this thread's tile registers for `rows` rows. `None` without AMX.
    ///
    /// # Panics
    /// If query rows are not padded or fill a block, or the thread has another session.
    pub fn new(kernels: Kernels, queries: &QueryRows<'_>) -> Option<Self> {
        let (table, terms) = terms(kernels, queries)?;
        let QueryRows { rows, exact, .. } = *queries;
        assert!(rows < BLOCK, "{rows} query rows are fewer than a block");
        // All terms of a row lie in one block.
        let filled = |terms: usize| {
            let most = BLOCK.checked_div(terms).unwrap_or(0);
            rows.min(most) * terms
        };
        let columns = filled(terms).next_multiple_of(4);
        let shape = QueryShape { columns, ..QueryShape::of(queries, terms) };
        let session = Session::new(table);
        // SAFETY: between `enter` and `leave`, as there is a `Session`; one row at least.
        unsafe { (table.narrow)(columns, filled(if exact { TERMS } else { TERMS - 1 })) };
        Some(Self { session, shape, exact })
    }

    /// Returns the words of the query rows of one head.
    pub fn query_words(&self) -> usize {
        self.shape.column_words()
    }

    /// Packs the query rows of one head in the order that an encoding of K needs.
    ///
    /// # Panics
    /// If rows or words are too few.
    pub fn pack_queries(&self, rows: &[f32], order: ColumnOrder, to: &mut [u32]) {
        let [values, codes] = self.session.table.pack_columns;
        let kernel = match order {
            ColumnOrder::Values => values,
            ColumnOrder::Codes => codes,
        };
        // SAFETY: between `enter` and `leave`, as there is a `Session`.
        unsafe { kernel(rows, self.shape, to) }
    }

    /// Computes the scores of a tile for the query rows of a head, whose `words` are in the
    /// [`ColumnOrder`] of K; issues prefetches meanwhile. `to` has [`TILE_TOKENS`] scores per row
    /// and room for a block of rows; a multiple of [`BLOCK`] scores is written.
    ///
    /// # Panics
    /// If the encoding has no kernels, the tile more than [`TILE_TOKENS`] rows, or rows lie
    /// outside of their slices.
    pub fn scores(
        &self,
        words: &[u32],
        (k, memory): (&TileRows<'_>, &mut Memory<'_>),
        to: &mut [f32],
        prefetch: &mut Prefetch<'_>,
    ) {
        let kernel = self.session.kernel(k);
        // SAFETY: between `enter` and `leave`, as there is a `Session`, and configured for as many
        // rows.
        unsafe { (kernel.narrow_scores)((words, self.shape), (k, memory), to, prefetch) }
    }

    /// Adds V of a tile to output rows, multiplied with [`TILE_TOKENS`] weights per row, which are
    /// finite up to a multiple of [`NARROW_TOKENS`]; issues prefetches meanwhile. `out` comes with
    /// its stride in floats.
    ///
    /// # Panics
    /// As [`Self::scores`].
    pub fn sums(
        &self,
        (v, memory): (&TileRows<'_>, &mut Memory<'_>),
        weights: &[f32],
        out: (&mut [f32], usize),
        prefetch: &mut Prefetch<'_>,
    ) {
        let [two, three] = self.session.kernel(v).narrow_sums;
        let kernel = if self.exact { three } else { two };
        let weights = (weights, self.shape.rows);
        // SAFETY: as for `scores`.
        unsafe { kernel((v, memory), weights, out, prefetch) }
    }

    /// Returns whether all values are finite.
    pub fn is_finite(&self, values: &[f32]) -> bool {
        self.session.is_finite(values)
    }
}
