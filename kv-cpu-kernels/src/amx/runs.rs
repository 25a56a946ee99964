//! Rows of a tile, and blocks of 16 rows at one stride: where they lie, or as copies.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: tokens are counted by `TileRuns::new`, and loops must inline into the \
              `#[target_feature]` caller"
)]
use super::{BLOCK, TILE_BLOCKS, TILE_TOKENS};
use crate::layout::RowLayout;
use crate::rows::KeyRows;

/// Rows of K or V of a tile: runs of one layout, one after another.
#[derive(Debug, Clone, Copy)]
pub struct TileRuns<'a> {
    runs: &'a [KeyRows<'a>],
    layout: &'a RowLayout,
    len: usize,
}

impl<'a> TileRuns<'a> {
    /// The rows of some runs.
    ///
    /// # Panics
    /// When they are none, more than [`TILE_TOKENS`], or of several layouts.
    pub fn new(runs: &'a [KeyRows<'a>]) -> Self {
        assert!(!runs.is_empty(), "a tile has rows");
        let layout = runs[0].layout();
        let is_alike = |other: &RowLayout| std::ptr::eq(other, layout) || other == layout;
        let len = runs.iter().map(KeyRows::len).sum();
        assert!(
            (1..=TILE_TOKENS).contains(&len) && runs.iter().all(|run| is_alike(run.layout())),
            "{len} rows of one layout"
        );
        Self { runs, layout, len }
    }

    /// Number of rows, at least one.
    #[expect(clippy::len_without_is_empty, reason = "a tile is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
    /// Layout of each row.
    pub fn layout(&self) -> &'a RowLayout {
        self.layout
    }

    /// Bytes to which [`Self::blocks`] may copy rows.
    pub(crate) fn copied_bytes(&self) -> usize {
        TILE_TOKENS * self.layout.bytes()
    }

    /// The rows of the first `count` blocks of tokens: where they lie in one run, else copied to
    /// `copies`, with zeros for tokens that do not exist.
    #[inline(always)]
    pub(crate) fn blocks(&self, count: usize, copies: &mut [u8]) -> [BlockRows; TILE_BLOCKS] {
        let bytes = self.layout.bytes();
        let mut found = [BlockRows { first: copies.as_ptr(), stride: bytes }; TILE_BLOCKS];
        let mut places = copies.chunks_exact_mut(BLOCK * bytes);
        // The run at hand, and its row that comes next.
        let (mut run, mut row) = (0, 0);
        for (block, place) in found[..count].iter_mut().zip(&mut places) {
            if let Some(rows) = self.runs.get(run)
                && row + BLOCK <= rows.len()
            {
                *block = BlockRows { first: rows.at(row), stride: rows.stride() };
                row += BLOCK;
            } else {
                self.copy(&mut run, &mut row, place);
                block.first = place.as_ptr();
            }
            if self.runs.get(run).is_some_and(|rows| row == rows.len()) {
                (run, row) = (run + 1, 0);
            }
        }
        found
    }

    /// Copies the rows of a block, from one of a run on.
    fn copy(&self, run: &mut usize, row: &mut usize, to: &mut [u8]) {
        let mut places = to.chunks_exact_mut(self.layout.bytes());
        for place in &mut places {
            while self.runs.get(*run).is_some_and(|rows| *row == rows.len()) {
                (*run, *row) = (*run + 1, 0);
            }
            match self.runs.get(*run) {
                Some(rows) => place.copy_from_slice(rows.row(*row)),
                None => place.fill(0),
            }
            *row += 1;
        }
    }
}

/// Rows of [`BLOCK`] tokens at one stride.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRows {
    pub(crate) first: *const u8,
    /// Bytes from a row to the next.
    pub(crate) stride: usize,
}

impl BlockRows {
    /// Where a row begins.
    #[inline(always)]
    pub(crate) fn at(self, index: usize) -> *const u8 {
        self.first.wrapping_add(index * self.stride)
    }
    /// The rows from one on.
    #[inline(always)]
    pub(crate) fn from(self, index: usize) -> Self {
        Self { first: self.at(index), ..self }
    }
}
