//! Block tables: the blocks of each sequence, in token order.
use crate::error::PlanError;
use crate::ids::BlockId;
use crate::invariant::Invariant;
use crate::num::{list_bytes, to_u32, to_usize};

/// Block tables of all sequences of one group: one row per sequence, as long as its blocks.
///
/// A step changes only entries that change, so planning costs nothing for tokens that were cached
/// before. The memory of each row follows its length and is freed when the row becomes shorter: one
/// long sequence costs the others nothing. [`Self::csr`] and [`Self::padded`] produce the two forms
/// that kernels of other systems use, for the rows of one batch.
///
/// Invariant: every entry is below `num_blocks`, so a plane may be indexed with any entry.
#[derive(Debug, Clone)]
pub struct BlockTables {
    num_blocks: u32,
    /// Initial capacity of a row.
    width: usize,
    rows: Vec<Row>,
}

/// The blocks of one sequence.
#[derive(Debug, Clone, Default)]
struct Row {
    blocks: Vec<BlockId>,
    /// Leading tokens that are codes.
    coded: u32,
    /// First held entry after the sink tokens' blocks of the sink tokens: those before it left a
    /// window.
    live: u32,
    /// Number of changes other than appending.
    revision: u64,
}

/// Entries in a cache line: the initial capacity of a row, which it keeps when it is empty.
const LINE: usize = 16;

impl Row {
    /// Removes the entries from `len` on, and frees memory if most of it is unused.
    fn truncate(&mut self, len: usize) {
        self.blocks.truncate(len);
        let (len, capacity) = (self.blocks.len(), self.blocks.capacity());
        if capacity > LINE && len <= capacity / 4 {
            self.blocks.shrink_to((len * 2).max(LINE));
        }
    }
}

impl BlockTables {
    /// Creates tables for a pool of `num_blocks`. A row gets a capacity of `width` blocks, at most
    /// a cache line, with its first block.
    pub fn new(num_blocks: u32, width: u32) -> Self {
        Self { num_blocks, width: to_usize(width).min(LINE), rows: Vec::new() }
    }

    /// Makes sure that rows `0..rows` exist; new rows are empty.
    pub fn ensure_rows(&mut self, rows: usize) {
        if rows > self.rows.len() {
            self.rows.resize_with(rows, Row::default);
        }
    }

    /// Returns the blocks of the pool; every entry is below it.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }
    /// Returns the number of rows, empty ones included.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }
    /// Iterates over the blocks of every row in token order, row after row.
    pub fn rows(&self) -> impl Iterator<Item = &[BlockId]> + '_ {
        self.rows.iter().map(|row| row.blocks.as_slice())
    }
    /// Returns the blocks of row `row` in token order; none for an unknown row.
    #[inline]
    pub fn row(&self, row: u32) -> &[BlockId] {
        self.rows.get(to_usize(row)).map_or(&[], |row| &row.blocks)
    }
    /// Returns the bytes of host memory of the tables, unused capacity included.
    pub fn host_bytes(&self) -> usize {
        let entries = self.rows.iter().map(|row| list_bytes(&row.blocks));
        list_bytes(&self.rows) + entries.sum::<usize>()
    }

    /// Returns the number of leading tokens of a row that are quantised, if the rest is in a tail;
    /// see [`SlotMap`](crate::backend::SlotMap). Meaningless without a tail.
    pub fn coded(&self, row: u32) -> u32 {
        self.rows.get(to_usize(row)).map_or(0, |row| row.coded)
    }
    /// Sets the number of leading tokens of a row that are quantised.
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn set_coded(&mut self, row: u32, tokens: u32) {
        self.row_mut(row).coded = tokens;
    }

    /// Returns the first entry of a row after its vacant ones: blocks that left a sliding window,
    /// whose entries are meaningless. Held blocks of the group's sink tokens come before them.
    pub fn live(&self, row: u32) -> u32 {
        self.rows.get(to_usize(row)).map_or(0, |row| row.live)
    }
    /// Sets the first entry after the vacant ones.
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn set_live(&mut self, row: u32, index: u32) {
        self.row_mut(row).live = index;
    }

    /// Returns a number that does not change while a row's entries are only appended to: a copy of
    /// the row with the same number lacks only the entries after its end. 0 for an unknown row.
    pub fn revision(&self, row: u32) -> u64 {
        self.rows.get(to_usize(row)).map_or(0, |row| row.revision)
    }
    #[track_caller]
    fn row_mut(&mut self, row: u32) -> &mut Row {
        let rows = self.rows.len();
        assert!(to_usize(row) < rows, "row {row} of block tables with {rows} rows");
        &mut self.rows[to_usize(row)]
    }
    /// Returns the row at an index, for a change other than appending.
    #[track_caller]
    fn revise(&mut self, row: u32) -> &mut Row {
        let row = self.row_mut(row);
        row.revision = row.revision.wrapping_add(1);
        row
    }

    /// Moves the first `by` blocks from `begin` on to the end of a row.
    ///
    /// # Panics
    /// If the row does not exist, or has fewer blocks.
    pub fn rotate(&mut self, row: u32, begin: usize, by: usize) {
        self.revise(row).blocks[begin..].rotate_left(by);
    }
    /// Undoes [`Self::rotate`].
    ///
    /// # Panics
    /// If the row does not exist, or has fewer blocks.
    pub fn rotate_back(&mut self, row: u32, begin: usize, by: usize) {
        self.revise(row).blocks[begin..].rotate_right(by);
    }

    /// Returns the number of blocks of a row; 0 for an unknown one.
    #[inline]
    pub fn row_len(&self, row: u32) -> u32 {
        to_u32(self.row(row).len())
    }

    /// Appends a block to a row.
    ///
    /// # Errors
    /// [`PlanError::BlockOutOfRange`]; [`PlanError::TooMany`] for an unknown row.
    #[inline]
    pub fn push(&mut self, row: u32, block: BlockId) -> Result<(), PlanError> {
        self.check(block)?;
        let (rows, width) = (self.rows.len(), self.width);
        let Some(row) = self.rows.get_mut(to_usize(row)) else {
            let got = u64::from(row) + 1;
            return Err(PlanError::TooMany { what: "rows", got, max: u64::from(to_u32(rows)) });
        };
        if row.blocks.capacity() == 0 {
            row.blocks.reserve_exact(width);
        }
        row.blocks.push(block);
        Ok(())
    }

    /// Appends the first `len` blocks of row `from` to row `to`, with the same numbers of quantised
    /// tokens and vacant entries.
    ///
    /// # Panics
    /// If the rows are the same, one of them does not exist, or `from` is shorter.
    pub(crate) fn fork_row(&mut self, from: u32, to: u32, len: usize) {
        let pair = self.rows.get_disjoint_mut([to_usize(from), to_usize(to)]);
        let [from, to] = pair.invariant("a row is copied to another, and both exist");
        to.blocks.extend_from_slice(&from.blocks[..len]);
        (to.coded, to.live) = (from.coded, from.live);
    }

    /// Removes the last block of a row; `None` if it has none.
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn pop(&mut self, row: u32) -> Option<BlockId> {
        let blocks = &self.row_mut(row).blocks;
        let (block, len) = (blocks.last().copied()?, blocks.len() - 1);
        self.truncate(row, len);
        Some(block)
    }

    /// Removes the blocks of a row from entry `len` on; does nothing for a shorter row.
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn truncate(&mut self, row: u32, len: usize) {
        if len < self.row_mut(row).blocks.len() {
            self.revise(row).truncate(len);
        }
    }

    /// Replaces entry `index` of a row and returns the old one; `None` past the row's end.
    ///
    /// # Errors
    /// [`PlanError::BlockOutOfRange`].
    ///
    /// # Panics
    /// If the row does not exist.
    pub fn replace(
        &mut self,
        row: u32,
        index: usize,
        block: BlockId,
    ) -> Result<Option<BlockId>, PlanError> {
        self.check(block)?;
        if index >= self.row_mut(row).blocks.len() {
            return Ok(None);
        }
        Ok(Some(std::mem::replace(&mut self.revise(row).blocks[index], block)))
    }

    /// Writes the rows of a batch as compressed sparse rows: `offsets` (batch + 1) into `blocks`.
    pub fn csr(&self, rows: &[u32], offsets: &mut Vec<u32>, blocks: &mut Vec<BlockId>) {
        offsets.clear();
        blocks.clear();
        offsets.push(0);
        for &row in rows {
            blocks.extend_from_slice(self.row(row));
            offsets.push(to_u32(blocks.len()));
        }
    }

    /// Writes the rows of a batch as `[rows, width]`, with unused entries 0 and longer rows
    /// truncated. The longest [`Self::row_len`] of the batch is a sufficient width.
    pub fn padded(&self, rows: &[u32], width: usize, out: &mut Vec<u32>) {
        out.clear();
        for &row in rows {
            let blocks = self.row(row).iter().map(|block| block.0);
            out.extend(blocks.chain(std::iter::repeat(0)).take(width));
        }
    }

    fn check(&self, block: BlockId) -> Result<(), PlanError> {
        if block.0 < self.num_blocks {
            return Ok(());
        }
        Err(PlanError::BlockOutOfRange { block: block.0, num_blocks: self.num_blocks })
    }
}

#[cfg(test)]
mod tests;
