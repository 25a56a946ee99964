//! Allocation of a step's blocks, and release of those that leave a window.
use std::ops::Range;

use crate::cache::state::block_demand::{Demand, Exchanged, Written, demand_at_most};
use crate::cache::state::lookup::{first_live, sink_blocks};
use crate::cache::state::start::exhausted;
use crate::cache::state::undo::Undo;
use crate::cache::state::{CacheState, Group};
use crate::error::{CacheError, PlanError};
use crate::ids::BlockId;
use crate::invariant::Invariant;
use crate::num::to_usize;
use crate::plan::{BatchEntry, BlockCopy};
use crate::slot_map::SlotMap;

impl CacheState {
    /// Allocates the blocks that growing entries write, and a private copy of each shared one,
    /// after releasing the blocks that left a window. Changes nothing if there are not enough.
    pub(super) fn reserve(&mut self, first: usize) -> Result<(), CacheError> {
        if !self.open.growing.is_empty() {
            for group in self.groups.iter() {
                self.check_demand(group, first)?;
            }
        }
        // Plans check these counts, but windows are left before they are made.
        let max = u64::from(u32::MAX);
        if self.open.total_q > max {
            let (what, got) = ("tokens in a step", self.open.total_q);
            return Err(PlanError::TooMany { what, got, max }.into());
        }
        if self.has_windows {
            self.leave_windows(first);
        }
        if self.open.growing.is_empty() {
            return Ok(());
        }
        for index in 0..self.groups.len() {
            for at in 0..self.open.growing.len() {
                let number = self.open.growing.get(at).copied();
                let number = number.invariant("no entry is added while blocks are taken");
                let (entry, details) = self.open.entry(number);
                self.reserve_entry(index, entry, details.lookahead);
            }
            self.keep_stored(index);
        }
        self.note_own();
        Ok(())
    }

    /// Records up to where growing entries own their blocks, so that further tokens there need no
    /// check.
    fn note_own(&mut self) {
        // Not with windows, which are left step by step, or with a tail, which grows differently.
        if self.has_windows || self.chains.iter().any(|map| !map.is_plain()) {
            return;
        }
        for number in &self.open.growing {
            let (entry, _) = self.open.entry(*number);
            let len = entry.cached + entry.new_tokens;
            let end = |map: &SlotMap| map.tokens(map.blocks(len));
            let end = self.chains.iter().map(end).min();
            self.sequences.at_mut(entry.row).own_end = end.invariant("a spec has a group");
        }
    }

    /// Refuses a batch that needs more blocks of a group than are free, including those that leave
    /// a window when the entries from `first` on begin.
    fn check_demand(&self, group: &Group, first: usize) -> Result<(), CacheError> {
        let open = &self.open;
        let growing = || open.growing.iter().map(|number| open.entry(*number));
        let mut free = group.pool.num_free();
        if demand_at_most(group, growing()) <= free {
            return Ok(());
        }
        let mut demand = Demand::default();
        let mut evictable = group.pool.num_idle();
        if group.window.is_some() {
            for entry in open.batch_from(first) {
                let leaving = group.leaving_entries(entry, &open.exchanged);
                group.entries(entry.row, leaving).iter().for_each(|block| demand.leave(*block));
            }
            let left = demand.left_by_all(&group.pool);
            free += left.blocks;
            evictable += left.stored;
        }
        for (entry, details) in growing() {
            demand.add(group, &entry, details.lookahead, &open.exchanged);
        }
        if demand.blocks <= free {
            return Ok(());
        }
        Err(exhausted(group, demand.blocks, (free, evictable)).into())
    }

    fn reserve_entry(&mut self, index: usize, entry: BatchEntry, lookahead: u32) {
        if entry.new_tokens == 0 {
            return;
        }
        let Self { groups, ledger, open, unwiped, .. } = self;
        let group = groups.at_mut(index);
        let written = Written::new(group, &entry, lookahead);
        let row = entry.row;
        let had = group.tables.row_len(row);
        let count = written.blocks.saturating_sub(had);
        for _ in 0..count {
            let block = group.take(ledger, unwiped);
            group.push(row, block);
        }
        if count > 0 {
            open.undo.push(Undo::Pushed { group: index, row, count });
        }
        if written.growth.seals() {
            let begin = to_usize(written.growth.code_blocks_before);
            let by = to_usize(written.growth.tail_blocks_before);
            group.tables.rotate(row, begin, by);
            open.undo.push(Undo::Rotated { group: index, row, begin, by });
        }
        let map = group.slot_map();
        for at in written.entries_had(had) {
            let group = self.groups.at(index);
            let old = group.entry(row, at);
            let slots = written.kept(&map, at, entry.cached);
            if group.pool.holders(old) > 1 {
                self.unshare(index, (row, at), (old, slots), false);
            } else if self.open.exchanged.filled(index, old) > slots {
                // The block has one holder now, but a rollback returns it to another one.
                self.unshare(index, (row, at), (old, slots), true);
            } else if group.pool.is_stored(old) {
                self.open.stored_targets.push((row, at, slots));
            }
        }
    }

    /// Replaces an entry by a copy of its first `slots` slots, in a block that the demand counted.
    fn unshare(
        &mut self,
        index: usize,
        place: (u32, u32),
        (old, slots): (BlockId, u32),
        kept: bool,
    ) {
        let Self { groups, ledger, unwiped, .. } = self;
        let new = groups.at_mut(index).take(ledger, unwiped);
        self.exchange(index, place, (old, new, slots), kept);
    }

    fn exchange(
        &mut self,
        index: usize,
        (row, at): (u32, u32),
        (old, new, slots): (BlockId, BlockId, u32),
        kept: bool,
    ) {
        let Self { groups, open, stats, .. } = self;
        let group = groups.at_mut(index);
        group.replace(row, at, (old, new));
        if kept {
            open.kept.push((index, old));
        } else {
            group.pool.release(old);
        }
        open.exchanged.note(index, old, slots);
        open.undo.push(Undo::Replaced { group: index, row, at, old, kept });
        if slots > 0 {
            let copies = open.copies.get_mut(index).invariant(super::GROUP);
            copies.push(BlockCopy { from: old, to: new, slots });
            stats.cow_copies += 1;
        }
    }

    /// Handles blocks that a row alone holds and writes, but whose content is in the index: the row
    /// gets a copy while there are blocks; otherwise the content is evicted.
    fn keep_stored(&mut self, index: usize) {
        while let Some((row, at, slots)) = self.open.stored_targets.pop() {
            let Self { groups, ledger, unwiped, .. } = self;
            let group = groups.at_mut(index);
            let old = group.entry(row, at);
            match group.try_take(ledger, unwiped) {
                Some(new) => self.exchange(index, (row, at), (old, new, slots), true),
                None => group.forget(old, ledger, unwiped),
            }
        }
    }

    /// Releases the blocks that no query from here on sees, of the entries from `first` on. A
    /// rollback does not take them back: nothing at the sequence's length needs them, and the step
    /// may have overwritten them.
    fn leave_windows(&mut self, first: usize) {
        let Self { groups, open, unwiped, .. } = self;
        for group in groups.iter_mut().filter(|group| group.window.is_some()) {
            for entry in open.batch_from(first) {
                let Range { start, end } = group.leaving_entries(entry, &open.exchanged);
                for at in (start..end).rev() {
                    group.release_holder(group.entry(entry.row, at), unwiped);
                }
                if start < end {
                    group.tables.set_live(entry.row, end);
                }
            }
        }
    }
}

impl Group {
    /// Returns the entries of a row that neither the first query of a step nor a later one sees;
    /// none if a rollback would need one of the blocks for another row.
    pub(super) fn leaving_entries(&self, entry: &BatchEntry, exchanged: &Exchanged) -> Range<u32> {
        let Some(window) = self.window.filter(|_| entry.new_tokens > 0) else {
            return 0..0;
        };
        let map = self.slot_map();
        let row = entry.row;
        let begin = self.tables.live(row).max(sink_blocks(self.window, &map));
        let mut end = first_live(&map, window, window.shortest(entry.cached));
        if map.has_tail() {
            // The rows of a tail are read once more, when they are quantised.
            end = end.min(map.full_blocks(self.tables.coded(row)));
        }
        let leaving = begin..end.max(begin);
        let is_exchanged = |block: &BlockId| exchanged.contains(self.id, *block);
        if self.entries(row, leaving.clone()).iter().any(is_exchanged) { 0..0 } else { leaving }
    }

    /// Returns the blocks of some entries of a row.
    pub(super) fn entries(&self, row: u32, range: Range<u32>) -> &[BlockId] {
        let entries = self.tables.row(row).get(to_usize(range.start)..to_usize(range.end));
        // A row may end before the blocks of its sink tokens do.
        let entries = entries.or_else(|| range.is_empty().then_some(&[]));
        entries.invariant("a row has an entry for every block of its sequence")
    }

    /// Replaces the block `old` at entry `at` of a row by `new`.
    pub(super) fn replace(&mut self, row: u32, at: u32, (old, new): (BlockId, BlockId)) {
        let replaced = self.tables.replace(row, to_usize(at), new);
        assert_eq!(replaced, Ok(Some(old)), "entry {at} of row {row} is block {old}");
    }
}
