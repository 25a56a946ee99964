//! The blocks that a step takes, and those that leave a window when it begins.
use std::ops::Range;

use crate::backend::Backend;
use crate::cache::demand::{Demand, Written, demand_at_most};
use crate::cache::lookup::{first_live, sink_blocks};
use crate::cache::start::exhausted;
use crate::cache::undo::Undo;
use crate::cache::{Group, KvCache, push_held, slot_map};
use crate::error::CacheError;
use crate::ids::BlockId;
use crate::num::to_usize;
use crate::plan::{BatchEntry, BlockCopy};
use crate::slot_map::SlotMap;

impl<B: Backend> KvCache<B> {
    /// Takes the blocks that growing entries write, and a private copy of each that others hold.
    /// Changes nothing but windows when there are not enough.
    pub(super) fn reserve(&mut self, first: usize) -> Result<(), CacheError> {
        if self.has_windows {
            self.leave_windows(first);
        }
        if self.open.growing.is_empty() {
            return Ok(());
        }
        for index in 0..self.groups.len() {
            self.check_demand(index)?;
        }
        for index in 0..self.groups.len() {
            for at in 0..self.open.growing.len() {
                let number = self.open.growing.get(at).copied().unwrap_or(usize::MAX);
                if let Some(&entry) = self.open.batch.get(number) {
                    let lookahead = self.open.entry(number).lookahead;
                    self.reserve_entry(index, entry, lookahead);
                }
            }
            self.keep_stored(index);
        }
        self.note_own();
        Ok(())
    }

    /// Notes up to where the blocks of growing entries are their own, so that further tokens there
    /// ask nothing.
    fn note_own(&mut self) {
        // Windows are left step by step, and a tail grows in its own way.
        if self.has_windows || self.chains.iter().any(|map| !map.is_plain()) {
            return;
        }
        for number in &self.open.growing {
            let Some(entry) = self.open.batch.get(*number) else {
                continue;
            };
            let len = entry.cached.saturating_add(entry.new_tokens);
            let end = |map: &SlotMap| map.tokens(map.blocks(len));
            if let Some(state) = self.sequences.at_mut(entry.row) {
                state.own_end = self.chains.iter().map(end).min().unwrap_or(0);
            }
        }
    }

    /// Refuses a batch that needs more blocks than there are.
    fn check_demand(&self, index: usize) -> Result<(), CacheError> {
        let Some(group) = self.groups.get(index) else {
            return Ok(());
        };
        let growing = || {
            let numbers = self.open.growing.iter();
            numbers.filter_map(|n| Some((self.open.batch.get(*n)?, self.open.entries.get(*n)?)))
        };
        let free = group.pool.num_free();
        if demand_at_most(group, growing()) <= free {
            return Ok(());
        }
        let mut demand = Demand::default();
        for (entry, detail) in growing() {
            demand.add(group, entry, detail.lookahead, &self.open.exchanged);
        }
        if demand.blocks <= free {
            return Ok(());
        }
        Err(exhausted(index, demand.blocks, &group.pool, 0).into())
    }

    fn reserve_entry(&mut self, index: usize, entry: BatchEntry, lookahead: u32) {
        let Some(group) = self.groups.get(index).filter(|_| entry.new_tokens > 0) else {
            return;
        };
        let written = Written::new(group, &entry, lookahead);
        let row = entry.row;
        let had = group.tables.row_len(row);
        self.extend(index, row, written.blocks);
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        if written.growth.seals() {
            let begin = to_usize(written.growth.code_blocks_before);
            let by = to_usize(written.growth.tail_blocks_before);
            group.tables.rotate(row, begin, by);
            self.open.undo.push(Undo::Rotated { group: index, row, begin, by });
        }
        let map = slot_map(group);
        for at in written.entries_had(had) {
            let Some(group) = self.groups.get(index) else {
                return;
            };
            let Some(old) = group.tables.row(row).get(to_usize(at)).copied() else {
                continue;
            };
            let slots = written.kept(&map, at, entry.cached);
            if group.pool.holders(old) > 1 {
                self.unshare(index, (row, at), (old, slots), false);
            } else if self.open.exchanged.filled(index, old) > slots {
                // Its last holder, but a step that is taken back gives it to another again.
                self.unshare(index, (row, at), (old, slots), true);
            } else if group.pool.is_stored(old) {
                self.open.stored_targets.push((row, at, slots));
            }
        }
    }

    /// Appends blocks until the row has `blocks`; [`Self::check_demand`] made sure of them.
    fn extend(&mut self, index: usize, row: u32, blocks: u32) {
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let count = blocks.saturating_sub(group.tables.row_len(row));
        for _ in 0..count {
            let taken = group.pool.allocate(&mut self.ledger);
            if taken.is_some_and(|taken| taken.evicted) && self.spec.wipe_on_release() {
                self.unwiped.extend(taken.map(|taken| (index, taken.block)));
            }
            push_held(&mut group.tables, row, taken.map(|taken| taken.block));
        }
        if count > 0 {
            self.open.undo.push(Undo::Pushed { group: index, row, count });
        }
    }

    /// Exchanges an entry for a copy of its first `slots` slots; false when there is no block.
    fn unshare(
        &mut self,
        index: usize,
        (row, at): (u32, u32),
        (old, slots): (BlockId, u32),
        kept: bool,
    ) -> bool {
        let Some(group) = self.groups.get_mut(index) else {
            return false;
        };
        let Some(taken) = group.pool.allocate(&mut self.ledger) else {
            return false;
        };
        let (new, entry) = (taken.block, to_usize(at));
        if taken.evicted && self.spec.wipe_on_release() {
            self.unwiped.push((index, new));
        }
        // Both blocks are of this group's pool, so the exchange is not refused.
        let replaced = group.tables.replace(row, entry, new);
        debug_assert_eq!(replaced, Ok(Some(old)), "the entry was read just before");
        if kept {
            self.open.kept.push((index, old));
        } else {
            group.pool.release(old);
        }
        self.open.exchanged.note(index, old, slots);
        self.open.undo.push(Undo::Replaced { group: index, row, index: entry, old, kept });
        if let Some(copies) = self.open.copies.get_mut(index).filter(|_| slots > 0) {
            copies.push(BlockCopy { from: old, to: new, slots });
            self.stats.cow_copies = self.stats.cow_copies.saturating_add(1);
        }
        true
    }

    /// Blocks that a row alone holds and writes, but whose content others may reuse: a copy goes to
    /// the row while there are blocks, and where there are none the content is given up.
    fn keep_stored(&mut self, index: usize) {
        while let Some((row, at, slots)) = self.open.stored_targets.pop() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let Some(old) = group.tables.row(row).get(to_usize(at)).copied() else {
                continue;
            };
            let is_copied = self.unshare(index, (row, at), (old, slots), true);
            if let Some(group) = self.groups.get_mut(index).filter(|_| !is_copied) {
                group.pool.forget(old, &mut self.ledger);
            }
        }
    }

    /// Gives the blocks back that no query from here on sees. They stay out when the step is rolled
    /// back: nothing at the sequence's length needs them.
    fn leave_windows(&mut self, first: usize) {
        for index in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            if group.window.is_none() {
                continue;
            }
            for entry in self.open.batch.get(first..).unwrap_or_default() {
                if entry.new_tokens == 0 {
                    continue;
                }
                let Range { start, end } = group.leaving_entries(entry.row, entry.cached);
                let row = group.tables.row(entry.row);
                let leaving = row.get(to_usize(start)..to_usize(end)).unwrap_or_default();
                if is_copied_from(&self.open.undo, index, leaving) {
                    continue;
                }
                for at in (start..end).rev() {
                    let block = group.tables.row(entry.row).get(to_usize(at)).copied();
                    let emptied = block.filter(|block| group.pool.release(*block));
                    if let Some(block) = emptied.filter(|_| self.spec.wipe_on_release()) {
                        self.unwiped.push((index, block));
                    }
                }
                if start < end {
                    group.tables.set_live(entry.row, end);
                }
            }
        }
    }
}

impl<Buf> Group<Buf> {
    /// Entries of a row of `len` tokens that its next query does not see any more.
    pub(super) fn leaving_entries(&self, row: u32, len: u32) -> Range<u32> {
        let Some(window) = self.window else {
            return 0..0;
        };
        let map = slot_map(self);
        let begin = self.tables.live(row).max(sink_blocks(self.window, &map));
        let mut end = first_live(&map, window, window.shortest(len));
        if map.has_tail() {
            // The rows of a tail are read once more, when they become codes.
            end = end.min(map.full_blocks(self.tables.coded(row)));
        }
        begin..end.max(begin)
    }
}

/// Whether a step that is rolled back would want one of `blocks` back.
fn is_copied_from(undo: &[Undo], index: usize, blocks: &[BlockId]) -> bool {
    undo.iter().any(|undo| match undo {
        Undo::Replaced { group, old, .. } => *group == index && blocks.contains(old),
        _ => false,
    })
}
