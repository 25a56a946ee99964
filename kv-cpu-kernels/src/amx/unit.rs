//! The primitives of AMX kernels: of the unit, and of the vector instructions that serve it.
use super::BLOCK_WORDS;
use super::codes::Codes;
use crate::simd::Simd;

/// Blocks of one side of a product, one per step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) at: *const u32,
    /// Bytes from a row to the next.
    pub(crate) stride: usize,
    /// Bytes from a block to the next.
    pub(crate) step: usize,
}

/// A unit that multiplies blocks. A token of it exists only between `enter` and `leave`.
pub(crate) trait Unit: Copy {
    /// Writes 16 rows of scores of [`super::GEMM_TOKENS`] tokens, `stride` floats apart: the
    /// products of queries and K over `steps` blocks, added to the old scores if `more`. Blocks of
    /// queries have a row for each query, one block per step. Blocks of K have a column for each
    /// token: all steps of the first 16 tokens, then those of the next 16.
    ///
    /// # Safety
    /// 1. The blocks are readable, and the rows of scores are writable, and readable if `more`.
    /// 2. `steps` is not 0.
    unsafe fn gemm_scores(
        self,
        q: *const u32,
        k: *const u32,
        steps: usize,
        to: (*mut f32, usize),
        more: bool,
    );

    /// Adds the products of weights and values to 16 rows of sums, `stride` floats apart. For each
    /// half of [`super::GEMM_TOKENS`] tokens, the weights are a block for each of `LEFT` terms; the
    /// values have `RIGHT` terms, `apart` words from each other, and a block for each 16 columns of
    /// sums.
    ///
    /// # Safety
    /// 1. Weights and values are readable, and `columns` blocks of sums are writable.
    /// 2. `LEFT` is 2 or 3, `RIGHT` is 1 or 2, and `columns` is not 0.
    unsafe fn gemm_sums<const LEFT: usize, const RIGHT: usize>(
        self,
        weights: *const u32,
        values: (*const u32, usize),
        columns: usize,
        to: (*mut f32, usize),
    );

    /// Issues a product whose result is not read, with narrow tiles. The unit powers down after
    /// half a microsecond without work, and takes a quarter of a microsecond to wake up.
    fn keep_powered(self);

    /// Writes a block of sums over `steps` blocks of both sides, added to the old sums if `more`. A
    /// word of a row of the left operand, two bf16, is multiplied with the row of the right operand
    /// that has its index. The sizes are those given to [`super::table::Table::narrow`]: for
    /// `SCORES`, columns of all blocks but the left ones; for sums, rows of all blocks but the
    /// right ones.
    ///
    /// # Safety
    /// 1. The blocks are readable, and that of sums is writable, and readable if `more`.
    /// 2. `steps` is not 0.
    unsafe fn multiply<const SCORES: bool>(
        self,
        left: Operand,
        right: Operand,
        steps: usize,
        to: (*mut [f32; BLOCK_WORDS], bool),
    );

    /// Writes four rows of words, each of a group of one-byte codes: word `i` is codes `i` and
    /// `i + 16` of the group, as bf16.
    ///
    /// # Safety
    /// 1. The groups are readable, and 16 words from each `to` on are writable.
    unsafe fn code_words(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]);

    /// Writes two rows of words of a line of codes: word `i` of the first is codes `4 i` and
    /// `4 i + 2`, of the second `4 i + 1` and `4 i + 3`, as bf16.
    ///
    /// # Safety
    /// 1. The line is readable, and 16 words from each `to` on are writable.
    unsafe fn code_line(self, codes: &Codes, from: *const u8, to: [*mut u32; 2]);

    /// Writes two rows of words of the first two groups, and two of the others: word `i` is code
    /// `i` of both, in the second row `i + 16` of both.
    ///
    /// # Safety
    /// 1. The groups are readable, and 16 words from each `to` on are writable.
    unsafe fn code_pairs(self, codes: &Codes, from: [*const u8; 4], to: [*mut u32; 4]);
}

/// Vectors of sixteen that pack values into blocks.
pub(crate) trait Words: Simd {
    /// Clears the lower half of each value's bits, which leaves a bf16.
    fn truncate(self, v: Self::F) -> Self::F;
    /// Stores a row of words: the upper halves of `low`, and those of `high` above them.
    ///
    /// # Safety
    /// 1. `to[..16]` is writable.
    unsafe fn store_words(self, to: *mut u32, low: Self::F, high: Self::F);
    /// Stores two rows of words: the lower halves of `low` and `high`, then the upper halves; in
    /// each word the half of `high` is above.
    ///
    /// # Safety
    /// 1. `to[..16]` of both is writable.
    unsafe fn store_halves(self, to: [*mut u32; 2], low: Self::I, high: Self::I);
    /// Writes the first `columns` columns of a block as rows, `stride` words apart.
    ///
    /// # Safety
    /// 1. `from` is readable for a block, and `to` is writable for `columns` rows, rounded up to a
    ///    multiple of four.
    unsafe fn transpose(self, from: *const u32, to: (*mut u32, usize), columns: usize);
}

/// Pairs of terms whose products count, smallest first: a term of a query or weight (1 to 3 terms),
/// and a term of a stored value (1 or 2).
pub(crate) const fn pairs(left: usize, right: usize) -> &'static [(usize, usize)] {
    match (left, right) {
        (1, 1) => &[(0, 0)],
        (2, 1) => &[(1, 0), (0, 0)],
        (_, 1) => &[(2, 0), (1, 0), (0, 0)],
        (1, _) => &[(0, 1), (0, 0)],
        (2, _) => &[(1, 1), (0, 1), (1, 0), (0, 0)],
        _ => &[(2, 0), (1, 1), (0, 1), (1, 0), (0, 0)],
    }
}
