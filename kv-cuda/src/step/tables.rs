//! A group's block tables on the device.
use std::collections::BTreeMap;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use kv_core::block::BlockTables;
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::invariant::Invariant;

use super::StepLimits;
use crate::buffer::CudaBuffer;
use crate::gpu::Gpu;
use crate::params::Address;
use crate::scratch::Scratch;
use kv_core::num::{to_u32, to_usize};

/// One changed entry: `tables[at] = block`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Change {
    pub(super) at: u32,
    pub(super) block: u32,
}

const _: () = assert!(size_of::<Change>() == 8, "two words, as in kernels");

/// The place of a row, and how much of it was sent.
#[derive(Debug, Clone, Copy, Default)]
struct Row {
    /// First entry, and number of entries reserved for the row: a power of two, or 0 for none.
    begin: u32,
    room: u32,
    /// The row's revision plus one; 0 if nothing of it was sent.
    revision: u64,
    len: usize,
}

const FITTED: &str = "rows of a batch are fitted before they are sent";

/// Entries reserved for a short row.
const ROOM_MIN: u32 = 16;

/// Returns the number of entries to reserve for a row of `len` blocks; at most `u32::MAX`.
fn room_for(len: u32) -> u32 {
    len.checked_next_power_of_two().unwrap_or(u32::MAX).max(ROOM_MIN)
}

/// A copy of a group's block tables. Each row is placed where its own blocks fit, so that a long
/// sequence costs the others nothing. With step limits, rows are as wide as the longest sequence
/// and never move.
#[derive(Debug)]
pub(super) struct DeviceTables {
    memory: Scratch,
    address: Address,
    /// Entries of every row, if limits fix them.
    width: Option<u32>,
    rows: Vec<Row>,
    /// Allocated entries, and how many of them, from the first on, rows have used.
    entries: u32,
    taken: u32,
    /// First entries of places that rows have left, by size.
    left: BTreeMap<u32, Vec<u32>>,
}

impl DeviceTables {
    pub(super) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self {
            memory: Scratch::new(gpu),
            address: 0,
            width: None,
            rows: Vec::new(),
            entries: 0,
            taken: 0,
            left: BTreeMap::new(),
        }
    }

    pub(super) fn memory(&self) -> Option<&CudaBuffer> {
        self.memory.memory()
    }
    pub(super) fn address(&self) -> Address {
        self.address
    }
    /// Returns the first entry of a row.
    pub(super) fn begin(&self, row: u32) -> u32 {
        self.rows.get(to_usize(row)).invariant(FITTED).begin
    }

    /// Makes space for the rows of a batch; growing drops all rows.
    pub(super) fn fit(
        &mut self,
        batch: impl Iterator<Item = u32> + Clone,
        tables: &BlockTables,
    ) -> Result<(), DeviceError> {
        assert!(self.width.is_none(), "limits cannot be removed from a queue");
        self.rows.resize(self.rows.len().max(tables.num_rows()), Row::default());
        if batch.clone().all(|row| self.place(row, room_for(tables.row_len(row)))) {
            return Ok(());
        }
        // Twice the need of all rows, so that growing is rare.
        let lens = (0..to_u32(tables.num_rows())).map(|row| tables.row_len(row));
        let used = lens.filter(|len| *len > 0).map(|len| u64::from(room_for(len)));
        let least = batch.clone().map(|row| u64::from(room_for(tables.row_len(row))));
        let entries = used.sum::<u64>().max(least.sum()) * 2;
        self.lay_out(entries)?;
        self.rows.resize(tables.num_rows(), Row::default());
        let mut batch = batch;
        let fits = batch.all(|row| self.place(row, room_for(tables.row_len(row))));
        assert!(fits, "the rows of a batch need more than {entries} entries");
        Ok(())
    }

    /// Does the same for steps of a fixed size: from the first step on, each row that the limits
    /// allow has `width` entries. Returns `false` for a batch with a longer row.
    pub(super) fn fit_fixed(
        &mut self,
        mut batch: impl Iterator<Item = u32>,
        tables: &BlockTables,
        (limits, width): (StepLimits, u32),
    ) -> Result<bool, DeviceError> {
        let (rows, most) = (tables.num_rows(), limits.cached_sequences);
        if rows > to_usize(most) {
            let why = format!("{rows} sequences, the step limits allow {most}");
            let error = DeviceError::new(DeviceErrorKind::OutOfRange, "begin step");
            return Err(error.with_detail(why));
        }
        if self.width.is_none() {
            self.lay_out(u64::from(most) * u64::from(width))?;
            let begin = |row: u32| row * width;
            let row = |row| Row { begin: begin(row), room: width, ..Row::default() };
            self.rows.extend((0..most).map(row));
            self.width = Some(width);
        }
        Ok(batch.all(|row| tables.row_len(row) <= width))
    }

    /// Allocates memory for `entries` and drops all rows.
    fn lay_out(&mut self, entries: u64) -> Result<(), DeviceError> {
        self.rows.clear();
        self.left.clear();
        (self.address, self.entries, self.taken) = (0, 0, 0);
        let Ok(fit) = u32::try_from(entries) else {
            let why = format!("{entries} entries of block tables");
            let error = DeviceError::new(DeviceErrorKind::Unsupported, "begin step");
            return Err(error.with_detail(why));
        };
        self.address = self.memory.reserve(entries.max(1) * 4)?;
        self.entries = fit;
        Ok(())
    }

    /// Reserves `need` entries for a row, or keeps its place unless that is more than four times
    /// too large; `false` if nothing is left.
    fn place(&mut self, row: u32, need: u32) -> bool {
        let had = *self.rows.get(to_usize(row)).invariant(FITTED);
        if had.room >= need && u64::from(had.room) <= u64::from(need) * 4 {
            return true;
        }
        if had.room > 0 {
            self.left.entry(had.room).or_default().push(had.begin);
        }
        let again = self.left.get_mut(&need).and_then(Vec::pop);
        let fresh = self.taken.checked_add(need).filter(|end| *end <= self.entries);
        let Some(begin) = again.or(fresh.map(|_| self.taken)) else {
            return false;
        };
        if again.is_none() {
            self.taken += need;
        }
        let place = self.rows.get_mut(to_usize(row)).invariant(FITTED);
        *place = Row { begin, room: need, ..Row::default() };
        true
    }

    /// Lists the changes that make `rows` as in `tables`, and records them as sent.
    pub(super) fn changes(
        &mut self,
        rows: impl Iterator<Item = u32>,
        tables: &BlockTables,
        changes: &mut Vec<Change>,
    ) {
        changes.clear();
        for row in rows {
            let sent = self.rows.get_mut(to_usize(row)).invariant(FITTED);
            let blocks = tables.row(row);
            let revision = tables.revision(row) + 1;
            let from = if sent.revision == revision { sent.len.min(blocks.len()) } else { 0 };
            (sent.revision, sent.len) = (revision, blocks.len());
            let begin = sent.begin + to_u32(from);
            // A slice, because every step passes here with rows of thousands of blocks.
            let news = blocks.get(from..).invariant("no more was sent than there is");
            changes.extend(
                news.iter()
                    .zip(0_u32..)
                    .map(|(block, index)| Change { at: begin + index, block: block.0 }),
            );
        }
    }

    /// Records all rows as not sent.
    pub(super) fn forget(&mut self) {
        for row in &mut self.rows {
            (row.revision, row.len) = (0, 0);
        }
    }
}

#[cfg(test)]
#[cfg(feature = "emulated")]
#[expect(clippy::arithmetic_side_effects, reason = "small numbers, and overflow checks are on")]
mod tests {
    use kv_core::BlockId;

    use super::*;
    use crate::EmulatorOptions;
    use crate::tests::late::LateGpu;
    use crate::tests::random::Random;

    fn device_tables() -> DeviceTables {
        let gpu: Arc<dyn Gpu> = Arc::new(LateGpu::with(&EmulatorOptions::default()));
        DeviceTables::new(&gpu)
    }

    fn push(tables: &mut BlockTables, row: u32, blocks: u32) {
        for _ in 0..blocks {
            let block = (row * 7 + tables.row_len(row)) % tables.num_blocks();
            tables.push(row, BlockId(block)).unwrap();
        }
    }

    /// Sends the rows of a batch to `memory`, and reads them back.
    fn send(device: &mut DeviceTables, tables: &BlockTables, batch: &[u32], memory: &mut Vec<u32>) {
        device.fit(batch.iter().copied(), tables).unwrap();
        memory.resize(memory.len().max(to_usize(device.entries)), u32::MAX);
        let mut changes = Vec::new();
        device.changes(batch.iter().copied(), tables, &mut changes);
        for change in changes {
            memory[to_usize(change.at)] = change.block;
        }
        for row in batch {
            let begin = to_usize(device.begin(*row));
            let sent = memory[begin..].iter().copied().map(BlockId);
            let blocks = tables.row(*row);
            assert!(sent.take(blocks.len()).eq(blocks.iter().copied()), "row {row}");
        }
    }

    #[test]
    fn one_long_row_costs_the_others_nothing() {
        let mut tables = BlockTables::new(100_000, 4);
        tables.ensure_rows(1001);
        (0..1000).for_each(|row| push(&mut tables, row, 1));
        push(&mut tables, 1000, 62_500);
        let (mut device, mut memory) = (device_tables(), Vec::new());
        let batch: Vec<_> = (0..=1000).collect();
        send(&mut device, &tables, &batch, &mut memory);
        assert!(device.entries <= 2 * (65_536 + 1000 * ROOM_MIN), "{} entries", device.entries);
    }

    #[test]
    fn changing_rows_equal_those_of_the_cache() {
        let mut random = Random(40);
        let mut tables = BlockTables::new(500, 4);
        tables.ensure_rows(12);
        let (mut device, mut memory) = (device_tables(), Vec::new());
        for _ in 0..2000 {
            let row = random.below(12);
            match random.below(6) {
                0 => tables.truncate(row, 0),
                1 => tables.truncate(row, to_usize(tables.row_len(row) / 2)),
                2 => push(&mut tables, row, 100),
                3 if tables.row_len(row) > 0 => {
                    tables.replace(row, 0, BlockId(random.below(500))).unwrap();
                }
                _ => push(&mut tables, row, 1 + random.below(9)),
            }
            let first = random.below(12);
            let batch: Vec<_> = (first..12.min(first + 5)).collect();
            send(&mut device, &tables, &batch, &mut memory);
        }
        // Rows end after a while, so that their memory is reused.
        assert!(device.entries < 1 << 16, "{} entries", device.entries);
    }
}
