//! The primitives of matrix products: those of the unit, and those of vectors that serve it.
use super::super::simd::Simd;

/// A unit that multiplies blocks. A token of it exists only where its instructions may run.
pub(crate) trait Unit: Copy {
    /// Writes 16 rows of sums, `stride` floats apart, of a tile's tokens: over `steps` blocks the
    /// products of queries and K; adds them if `more`. Blocks of queries have a row for each, those
    /// of K a column for each token; they follow each other by step, K by 16 tokens before that.
    ///
    /// # Safety
    /// 1. The blocks are readable, and the rows of sums are writable, and readable if `more`.
    /// 2. `steps` is not 0.
    unsafe fn dots(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        to: (*mut f32, usize),
        more: bool,
    );

    /// Adds the products of weights and values to 16 rows of sums, `stride` floats apart. Of each
    /// half of a tile, the weights are a block for each of `LEFT` terms; the values have `RIGHT`
    /// terms, `apart` words from each other, and a block for each 16 columns of sums.
    ///
    /// # Safety
    /// 1. Weights and values are readable, and `columns` blocks of sums are writable.
    /// 2. `LEFT` is 2 or 3, `RIGHT` 1 or 2, and `columns` is not 0.
    unsafe fn add<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        values: (*const u32, usize),
        columns: usize,
        to: (*mut f32, usize),
    );
}

/// Vectors of sixteen that bring values into blocks and back.
pub(crate) trait Words: Simd {
    /// The values without the lower halves of their bits, which are bf16.
    fn cut(self, v: Self::F) -> Self::F;
    /// Stores a row of words: the upper halves of `low`, and those of `high` above them.
    ///
    /// # Safety
    /// 1. `to[..16]` is writable.
    unsafe fn store_words(self, to: *mut u32, low: Self::F, high: Self::F);
    /// Makes the columns of a block the rows of another one.
    ///
    /// # Safety
    /// 1. `from` is readable, and `to` is writable for a block.
    unsafe fn turn(self, from: *const u32, to: *mut u32);
}

/// Pairs of terms whose products count, smallest first: of a query or weight of 1 to 3 terms, and
/// of a row's value of 1 or 2.
pub(super) const fn pairs(left: usize, right: usize) -> &'static [(usize, usize)] {
    match (left, right) {
        (1, 1) => &[(0, 0)],
        (2, 1) => &[(1, 0), (0, 0)],
        (_, 1) => &[(2, 0), (1, 0), (0, 0)],
        (1, _) => &[(0, 1), (0, 0)],
        (2, _) => &[(1, 1), (0, 1), (1, 0), (0, 0)],
        _ => &[(2, 0), (1, 1), (0, 1), (1, 0), (0, 0)],
    }
}
