//! The primitives of matrix products: those of the unit, and those of vectors that serve it.
use super::super::simd::Simd;
use super::WORDS;
use super::codes::Codes;

/// Blocks of one side of a product, one for each step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) at: *const u32,
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
    /// Bytes from one block to the next.
    pub(crate) step: usize,
}

/// A unit that multiplies blocks. A token of it exists only where its instructions may run.
pub(crate) trait Unit: Copy {
    /// Writes 16 rows of sums, `stride` floats apart, of [`super::VISIT`] tokens: over `steps`
    /// blocks the products of queries and K; adds them if `more`. Blocks of queries have a row for
    /// each, those of K a column for each token; they follow each other by step, K by 16 tokens
    /// before that.
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
    /// half of [`super::VISIT`] tokens, the weights are a block for each of `LEFT` terms; the
    /// values have `RIGHT` terms, `apart` words from each other, and a block for each 16 columns of
    /// sums.
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

    /// Multiplies something, after [`super::Matrix::narrow`], only so that the unit stays awake: it
    /// sleeps when it had nothing to do for half a microsecond, and takes a quarter to awake.
    fn stay_awake(self);

    /// Writes a block of sums, over `steps` blocks of both sides; adds them to what is there if
    /// `more`. A word of a row of the left ones is multiplied with the row of the right ones that
    /// has its index: two bf16, or four signed `BYTES`, and then sums are integers. Of scores, all
    /// blocks but the left ones have so many columns as the unit was told; of sums, all but the
    /// right ones so many rows.
    ///
    /// # Safety
    /// 1. The blocks are readable, and that of sums is writable, and readable if `more`.
    /// 2. `steps` is not 0.
    unsafe fn multiply<const SCORES: bool, const BYTES: bool>(
        self,
        left: Side,
        right: Side,
        steps: usize,
        to: (*mut [f32; WORDS], bool),
    );

    /// Writes four rows of words, each of a group of codes of a byte from one place on: word `i` is
    /// codes `i` and `i + 16` of the group, as bf16.
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

/// Vectors of sixteen that bring values into blocks and back.
pub(crate) trait Words: Simd {
    /// The values without the lower halves of their bits, which are bf16.
    fn cut(self, v: Self::F) -> Self::F;
    /// Stores a row of words: the upper halves of `low`, and those of `high` above them.
    ///
    /// # Safety
    /// 1. `to[..16]` is writable.
    unsafe fn store_words(self, to: *mut u32, low: Self::F, high: Self::F);
    /// Stores two rows of words: the lower halves of both, and the upper ones, those of `high`
    /// above the others.
    ///
    /// # Safety
    /// 1. `to[..16]` of both is writable.
    unsafe fn store_halves(self, to: [*mut u32; 2], low: Self::I, high: Self::I);
    /// Rounds the products of 64 numbers and a scale, of up to 31 bits, to integers, and stores
    /// four rows of bytes, a cache line apart: the lowest of four digits of base 256, -128 to 127,
    /// of each, and so on. Word `4 i + j` of a row is of numbers `16 j + 4 i` to `16 j + 4 i + 3`.
    ///
    /// # Safety
    /// 1. `to` is writable for as many.
    unsafe fn store_digits(self, to: *mut u8, numbers: [Self::F; 4], scale: f32);
    /// Signed integers as numbers.
    fn integers(self, words: Self::I) -> Self::F;
    /// Makes the first columns of a block, so many, rows that lie `stride` words apart.
    ///
    /// # Safety
    /// 1. `from` is readable for a block, and `to` is writable for as many rows, up to the next
    ///    multiple of four.
    unsafe fn turn(self, from: *const u32, to: (*mut u32, usize), columns: usize);
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
