//! Shapes of query rows and blocks, and the scratch memory of a tile.
use crate::decode::GROUP;
use crate::layout::Encoding;

/// Rows of a block, and words of each.
pub const BLOCK: usize = 16;
/// Maximum number of tokens of a tile, and floats from a row of scores or weights to the next.
pub const TILE_TOKENS: usize = 128;
/// Tokens that [`Gemm`](super::Gemm) multiplies at a time; weights up to a multiple of it are
/// read.
pub const GEMM_TOKENS: usize = 4 * BLOCK;
/// Tokens that [`Narrow`](super::Narrow) multiplies at a time; weights up to a multiple of it are
/// read.
pub const NARROW_TOKENS: usize = GROUP;

/// Words of a block.
pub(crate) const BLOCK_WORDS: usize = BLOCK * BLOCK;
/// Maximum number of terms of a value.
pub(super) const TERMS: usize = 3;
/// Blocks of a tile's tokens.
pub(crate) const TILE_BLOCKS: usize = TILE_TOKENS / BLOCK;
/// The upper half of a word.
pub(crate) const UPPER: u32 = 0xffff_0000;

/// Query rows of some kv heads.
#[derive(Debug, Clone, Copy)]
pub struct QueryRows<'a> {
    /// The rows of all heads, `stride` floats apart, zero after their values.
    pub values: &'a [f32],
    /// Floats from a row to the next, at least `dim` rounded up to 32.
    pub stride: usize,
    /// Rows of each head.
    pub rows: usize,
    /// Values of a row.
    pub dim: usize,
    /// Whether sums need the precision of `f32`: weights then have three terms of bf16, else two.
    pub exact: bool,
}

/// Number and size of the query rows of one kv head, and terms of each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryShape {
    pub(crate) rows: usize,
    pub(crate) dim: usize,
    pub(crate) stride: usize,
    pub(crate) terms: usize,
    /// Columns of a block of [`Narrow`](super::Narrow), a multiple of four.
    pub(crate) columns: usize,
}

impl QueryShape {
    pub(super) fn of(queries: &QueryRows<'_>, terms: usize) -> Self {
        let QueryRows { stride, rows, dim, .. } = *queries;
        assert!(
            rows > 0 && dim > 0 && dim.next_multiple_of(GROUP) <= stride,
            "{rows} query rows of {dim} values, padded"
        );
        Self { rows, dim, stride, terms, columns: BLOCK }
    }

    /// Words of the rows as rows of blocks.
    pub(crate) fn row_words(self) -> usize {
        let blocks = self.rows.div_ceil(BLOCK) * self.dim.div_ceil(GROUP);
        blocks * self.terms * BLOCK_WORDS
    }

    /// Words of the rows as columns of blocks.
    pub(crate) fn column_words(self) -> usize {
        let per_block = BLOCK.checked_div(self.terms).unwrap_or(BLOCK);
        let blocks = self.rows.div_ceil(per_block) * self.dim.div_ceil(GROUP);
        blocks * BLOCK * self.columns
    }
}

/// Order of values in query rows that are columns: the order in which words of K hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ColumnOrder {
    /// For rows of 16-bit values.
    Values,
    /// For rows of one-byte codes.
    Codes,
}

impl ColumnOrder {
    /// Returns the order for rows of K in an encoding.
    pub fn of(k: Encoding) -> Self {
        match k {
            Encoding::E4m3 | Encoding::E5m2 | Encoding::Int8 => Self::Codes,
            _ => Self::Values,
        }
    }
}

/// Rows of a tile in blocks, term by term.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    pub(crate) words: &'a mut [u32],
    /// Number of terms, and of tokens.
    pub(crate) terms: usize,
    pub(crate) tokens: usize,
    /// Values of a row.
    pub(crate) dim: usize,
}

impl<'a> Blocks<'a> {
    /// Returns the words of two terms: a word is two values, and the last group of a row is padded.
    fn words(dim: usize) -> usize {
        dim.div_ceil(GROUP) * 2 * TILE_BLOCKS * BLOCK_WORDS
    }

    fn new(words: &'a mut [u32], dim: usize) -> Self {
        Self { words, terms: 0, tokens: 0, dim }
    }
}

/// Scratch memory for one tile.
#[derive(Debug)]
pub struct Memory<'a> {
    pub(crate) k: Blocks<'a>,
    pub(crate) v: Blocks<'a>,
    pub(crate) weights: &'a mut [u32],
    /// Blocks of products of [`Narrow`](super::Narrow).
    pub(crate) products: &'a mut [f32],
    /// Copies of rows that are not at one stride.
    pub(crate) copies: &'a mut [u8],
}

impl<'a> Memory<'a> {
    const WEIGHTS: usize = TILE_BLOCKS / 2 * TERMS * BLOCK_WORDS;
    /// Blocks of two groups of columns and all terms of weights.
    const PRODUCTS: usize = 4 * TERMS * BLOCK_WORDS;

    /// Floats for rows of K and V of `dim_k` and `dim_v` values.
    pub fn floats(dim_k: usize, dim_v: usize) -> usize {
        let blocks = Blocks::words(dim_k) + Blocks::words(dim_v);
        // Rows of 16 bits a value, or of codes and a scale after them.
        let row = (dim_k.max(dim_v) + 1) * 2;
        let copies = (row * TILE_TOKENS).div_ceil(4);
        blocks + Self::WEIGHTS + Self::PRODUCTS + copies
    }

    /// Divides [`Self::floats`] floats, which should begin with a cache line.
    ///
    /// # Panics
    /// If `floats` is shorter.
    pub fn new(floats: &'a mut [f32], dim_k: usize, dim_v: usize) -> Self {
        let (products, words) = floats.split_at_mut(Self::PRODUCTS);
        let words: &mut [u32] = bytemuck::cast_slice_mut(words);
        let (k, words) = words.split_at_mut(Blocks::words(dim_k));
        let (v, words) = words.split_at_mut(Blocks::words(dim_v));
        let (weights, copies) = words.split_at_mut(Self::WEIGHTS);
        let copies = bytemuck::cast_slice_mut(copies);
        Self { k: Blocks::new(k, dim_k), v: Blocks::new(v, dim_v), weights, products, copies }
    }
}
