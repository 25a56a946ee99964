//! Blocks of 16 rows of a tile at one stride: where they lie, or as copies.
#![expect(
    clippy::inline_always,
    reason = "kernel code: the entry asserts the length of tiles, and loops must inline into the \
              `#[target_feature]` caller"
)]
use super::{BLOCK, TILE_BLOCKS, TILE_TOKENS};
use crate::rows::TileRows;

impl TileRows<'_> {
    /// Bytes to which [`Self::blocks`] may copy rows.
    pub(crate) fn copied_bytes(&self) -> usize {
        TILE_TOKENS * self.layout().bytes()
    }

    /// The rows of the first `count` blocks of tokens: where they lie in one run, else copied to
    /// `copies`, with zeros for tokens that do not exist.
    #[inline(always)]
    pub(crate) fn blocks(&self, count: usize, copies: &mut [u8]) -> [BlockRows; TILE_BLOCKS] {
        let bytes = self.layout().bytes();
        let mut found = [BlockRows { first: copies.as_ptr(), stride: bytes }; TILE_BLOCKS];
        let mut places = copies.chunks_exact_mut(BLOCK * bytes);
        // The current run, and its next row.
        let (mut run, mut row) = (0, 0);
        for (block, place) in found[..count].iter_mut().zip(&mut places) {
            if let Some(rows) = self.runs().get(run)
                && row + BLOCK <= rows.len()
            {
                *block = BlockRows { first: rows.at(row), stride: rows.stride() };
                row += BLOCK;
            } else {
                self.copy(&mut run, &mut row, place);
                block.first = place.as_ptr();
            }
            if self.runs().get(run).is_some_and(|rows| row == rows.len()) {
                (run, row) = (run + 1, 0);
            }
        }
        found
    }

    /// Copies the rows of a block, from row `row` of run `run` on, and advances both.
    fn copy(&self, run: &mut usize, row: &mut usize, to: &mut [u8]) {
        let mut places = to.chunks_exact_mut(self.layout().bytes());
        for place in &mut places {
            while self.runs().get(*run).is_some_and(|rows| *row == rows.len()) {
                (*run, *row) = (*run + 1, 0);
            }
            match self.runs().get(*run) {
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
    /// Returns the address of a row.
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
