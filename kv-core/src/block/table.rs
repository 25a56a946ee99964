//! Which block holds which tokens of which sequence.
use crate::error::PlanError;
use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};

/// Tables of all sequences of one group: a row a sequence, in one padded array that lives as long
/// as the cache.
///
/// A step changes only the entries that change, so planning costs nothing for the tokens that were
/// there before. [`Self::csr`] and [`Self::padded`] make the two forms that kernels of other
/// systems take.
///
/// Invariant: every entry is below `num_blocks`, so a holder of `&BlockTables` may index a plane
/// with any entry it reads.
#[derive(Debug, Clone)]
pub struct BlockTables {
    num_blocks: u32,
    stride: usize,
    entries: Vec<BlockId>,
    lens: Vec<u32>,
    coded: Vec<u32>,
    /// First entry that is held behind the sinks' blocks, by row: those before fell out of a
    /// window.
    live: Vec<u32>,
    /// How often entries of a row changed other than by appending.
    revisions: Vec<u64>,
}

impl BlockTables {
    /// Tables for a pool of `num_blocks`, with room for `width` blocks a row before rows move.
    pub fn new(num_blocks: u32, width: u32) -> Self {
        Self {
            num_blocks,
            stride: stride(to_usize(width)),
            entries: Vec::new(),
            lens: Vec::new(),
            coded: Vec::new(),
            live: Vec::new(),
            revisions: Vec::new(),
        }
    }

    /// Makes sure that rows `0..rows` exist; new rows are empty.
    pub fn ensure_rows(&mut self, rows: usize) {
        if rows > self.lens.len() {
            self.lens.resize(rows, 0);
            self.coded.resize(rows, 0);
            self.live.resize(rows, 0);
            self.revisions.resize(rows, 0);
            self.entries.resize(rows.saturating_mul(self.stride), BlockId(0));
        }
    }

    /// Blocks the pool has; every entry is below it.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }
    /// Number of rows, empty ones included.
    pub fn num_rows(&self) -> usize {
        self.lens.len()
    }
    /// Entries from one row to the next in [`Self::entries`].
    pub fn stride(&self) -> usize {
        self.stride
    }
    /// All rows, `stride` entries each; entries past a row's length are meaningless but in range.
    pub fn entries(&self) -> &[BlockId] {
        &self.entries
    }
    /// The blocks of row `row` in token order; empty for an unknown row.
    #[inline]
    pub fn row(&self, row: u32) -> &[BlockId] {
        let row = to_usize(row);
        let len = self.lens.get(row).copied().map_or(0, to_usize);
        let start = row.saturating_mul(self.stride);
        self.entries.get(start..start.saturating_add(len)).unwrap_or_default()
    }

    /// How many leading tokens of a row are codes, where the rest is in a tail; see
    /// [`SlotMap`](crate::SlotMap). Says nothing without a tail.
    pub fn coded(&self, row: u32) -> u32 {
        self.coded.get(to_usize(row)).copied().unwrap_or(0)
    }
    /// Sets how many leading tokens of a row are codes; no change for an unknown row.
    pub fn set_coded(&mut self, row: u32, tokens: u32) {
        if let Some(coded) = self.coded.get_mut(to_usize(row)) {
            *coded = tokens;
        }
    }

    /// First entry of a row behind its vacant ones: blocks that fell out of a sliding window, whose
    /// entries mean nothing. The blocks of the group's sink tokens come before them and are held.
    pub fn live(&self, row: u32) -> u32 {
        self.live.get(to_usize(row)).copied().unwrap_or(0)
    }
    /// Sets the first entry behind the vacant ones; no change for an unknown row.
    pub fn set_live(&mut self, row: u32, index: u32) {
        if let Some(live) = self.live.get_mut(to_usize(row)) {
            *live = index;
        }
    }

    /// A number that stays as long as a row's entries are only appended to: a copy of the row that
    /// was made under the same number lacks the entries behind its end and nothing else. 0 for an
    /// unknown row.
    pub fn revision(&self, row: u32) -> u64 {
        self.revisions.get(to_usize(row)).copied().unwrap_or(0)
    }
    fn revise(&mut self, row: u32) {
        if let Some(revision) = self.revisions.get_mut(to_usize(row)) {
            *revision = revision.wrapping_add(1);
        }
    }

    /// Moves the first `by` blocks from `begin` on to the end of a row; no change outside it.
    pub fn rotate(&mut self, row: u32, begin: usize, by: usize) {
        self.revise(row);
        if let Some(range) = self.tail_mut(row, begin).filter(|range| by <= range.len()) {
            range.rotate_left(by);
        }
    }
    /// Takes [`Self::rotate`] back.
    pub fn rotate_back(&mut self, row: u32, begin: usize, by: usize) {
        self.revise(row);
        if let Some(range) = self.tail_mut(row, begin).filter(|range| by <= range.len()) {
            range.rotate_right(by);
        }
    }
    fn tail_mut(&mut self, row: u32, begin: usize) -> Option<&mut [BlockId]> {
        let len = self.lens.get(to_usize(row)).copied().map_or(0, to_usize);
        let start = to_usize(row).saturating_mul(self.stride);
        let (begin, end) = (start.saturating_add(begin), start.saturating_add(len));
        self.entries.get_mut(begin..end)
    }

    /// Blocks of a row; 0 for an unknown one.
    #[inline]
    pub fn row_len(&self, row: u32) -> u32 {
        self.lens.get(to_usize(row)).copied().unwrap_or(0)
    }

    /// Appends a block to a row.
    ///
    /// # Errors
    /// [`PlanError::BlockOutOfRange`]; [`PlanError::TooMany`] for a row that does not exist.
    #[inline]
    pub fn push(&mut self, row: u32, block: BlockId) -> Result<(), PlanError> {
        self.check(block)?;
        let rows = self.lens.len();
        let index = to_usize(row);
        let Some(len) = self.lens.get(index).copied() else {
            let got = u64::from(row).saturating_add(1);
            return Err(PlanError::TooMany { what: "rows", got, max: u64::from(to_u32(rows)) });
        };
        if to_usize(len) == self.stride {
            self.widen();
        }
        let at = index.saturating_mul(self.stride).saturating_add(to_usize(len));
        if let (Some(entry), Some(len)) = (self.entries.get_mut(at), self.lens.get_mut(index)) {
            *entry = block;
            *len = len.saturating_add(1);
        }
        Ok(())
    }

    /// Takes the last block of a row off.
    pub fn pop(&mut self, row: u32) -> Option<BlockId> {
        let block = self.row(row).last().copied()?;
        self.revise(row);
        if let Some(len) = self.lens.get_mut(to_usize(row)) {
            *len = len.saturating_sub(1);
        }
        Some(block)
    }

    /// Exchanges entry `index` of a row and returns what was there; `None` past the row's end.
    ///
    /// # Errors
    /// [`PlanError::BlockOutOfRange`].
    pub fn replace(
        &mut self,
        row: u32,
        index: usize,
        block: BlockId,
    ) -> Result<Option<BlockId>, PlanError> {
        self.check(block)?;
        let len = self.lens.get(to_usize(row)).copied().map_or(0, to_usize);
        if index >= len {
            return Ok(None);
        }
        self.revise(row);
        let at = to_usize(row).saturating_mul(self.stride).saturating_add(index);
        Ok(self.entries.get_mut(at).map(|entry| std::mem::replace(entry, block)))
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

    /// Writes the rows of a batch as `[rows, width]`, unused entries 0 and longer rows cut.
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

    /// Doubles the stride. Amortised over the pushes that made it necessary.
    fn widen(&mut self) {
        let stride = stride(self.stride.saturating_mul(2));
        let mut entries = vec![BlockId(0); stride.saturating_mul(self.lens.len())];
        for (new, old) in
            entries.chunks_exact_mut(stride).zip(self.entries.chunks_exact(self.stride))
        {
            if let Some(start) = new.get_mut(..self.stride) {
                start.copy_from_slice(old);
            }
        }
        self.stride = stride;
        self.entries = entries;
    }
}

/// Entries of a cache line.
const LINE: usize = 16;

/// Entries from one row to the next where `width` are asked for. Whole lines, and an odd number of
/// them: a step reads the ends of all rows, and at a distance of a power of two they would contend
/// for the same few lines of a processor's cache.
fn stride(width: usize) -> usize {
    if width < LINE { width.max(1) } else { (width.div_ceil(LINE) | 1).saturating_mul(LINE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> BlockTables {
        let mut tables = BlockTables::new(10, 2);
        tables.ensure_rows(2);
        for block in [3, 1, 4] {
            tables.push(0, BlockId(block)).unwrap();
        }
        tables.push(1, BlockId(5)).unwrap();
        tables
    }

    #[test]
    fn rows_survive_widening() {
        let tables = tables();
        assert_eq!(tables.stride(), 4);
        assert_eq!(tables.row(0), [BlockId(3), BlockId(1), BlockId(4)]);
        assert_eq!(tables.row(1), [BlockId(5)]);
    }

    #[test]
    fn long_rows_lie_an_odd_number_of_lines_apart() {
        let strides = [0, 1, 15, 16, 17, 1024].map(|width| BlockTables::new(10, width).stride());
        assert_eq!(strides, [1, 1, 15, 16, 48, 1040]);
    }

    #[test]
    fn csr_and_padded_agree_with_the_rows() {
        let tables = tables();
        let (mut offsets, mut blocks, mut padded) = (Vec::new(), Vec::new(), Vec::new());
        tables.csr(&[1, 0], &mut offsets, &mut blocks);
        assert_eq!(offsets, [0, 1, 4]);
        assert_eq!(blocks, [BlockId(5), BlockId(3), BlockId(1), BlockId(4)]);
        tables.padded(&[1, 0], 2, &mut padded);
        assert_eq!(padded, [5, 0, 3, 1]);
    }

    #[test]
    fn refuses_a_block_the_pool_does_not_have() {
        let mut tables = tables();
        let refused = Err(PlanError::BlockOutOfRange { block: 10, num_blocks: 10 });
        assert_eq!(tables.push(0, BlockId(10)), refused);
        assert!(tables.replace(0, 0, BlockId(10)).is_err());
        assert_eq!(tables.row(0).len(), 3);
    }

    #[test]
    fn rotations_stay_inside_the_row() {
        let mut tables = tables();
        tables.rotate(0, 1, 1);
        assert_eq!(tables.row(0), [BlockId(3), BlockId(4), BlockId(1)]);
        tables.rotate_back(0, 1, 1);
        assert_eq!(tables.row(0), [BlockId(3), BlockId(1), BlockId(4)]);
        tables.rotate(0, 2, 2);
        tables.rotate(0, 4, 0);
        tables.rotate(7, 0, 0);
        assert_eq!(tables.row(0), [BlockId(3), BlockId(1), BlockId(4)]);
        tables.set_coded(1, 9);
        tables.set_coded(7, 9);
        assert_eq!((tables.coded(0), tables.coded(1), tables.coded(7)), (0, 9, 0));
    }

    #[test]
    fn a_revision_tells_appending_from_any_other_change() {
        let mut tables = tables();
        let before = tables.revision(0);
        tables.push(0, BlockId(2)).unwrap();
        assert_eq!(tables.revision(0), before);
        let mut last = before;
        let changes: [fn(&mut BlockTables); 4] = [
            |tables| {
                tables.pop(0).unwrap();
            },
            |tables| {
                tables.replace(0, 0, BlockId(7)).unwrap();
            },
            |tables| tables.rotate(0, 0, 1),
            |tables| tables.rotate_back(0, 0, 1),
        ];
        for change in changes {
            change(&mut tables);
            assert_ne!(tables.revision(0), last);
            last = tables.revision(0);
        }
        assert_eq!(tables.revision(1), 0, "of another row");
    }

    #[test]
    fn pop_and_replace_stay_inside_the_row() {
        let mut tables = tables();
        assert_eq!(tables.replace(1, 1, BlockId(2)), Ok(None));
        assert_eq!(tables.replace(1, 0, BlockId(2)), Ok(Some(BlockId(5))));
        assert_eq!(tables.pop(1), Some(BlockId(2)));
        assert_eq!(tables.pop(1), None);
        assert_eq!(tables.pop(7), None);
    }
}
