//! The blocks that a step takes, that it gives back when it never happened, and that sequences let
//! go of.
use std::ops::Range;

use hashbrown::HashMap;

use crate::backend::Backend;
use crate::block::BlockPool;
use crate::cache::lookup::{first_live, sink_blocks};
use crate::cache::open::OpenEntry;
use crate::cache::start::exhausted;
use crate::cache::{Group, KvCache, push_held, slot_map};
use crate::error::CacheError;
use crate::ids::{BlockId, SequenceId};
use crate::num::{to_u32, to_usize};
use crate::plan::{BatchEntry, BlockCopy, Growth};
use crate::slot_map::SlotMap;

/// How to take back one change of an open step, last first.
#[derive(Debug, Clone, Copy)]
pub(super) enum Undo {
    /// A block was appended.
    Pushed { group: usize, row: u32 },
    /// A block that others hold or may reuse was exchanged for a copy; `kept`: nobody else holds
    /// it, so it stays held until the step ends.
    Replaced { group: usize, row: u32, index: usize, old: BlockId, kept: bool },
    /// The blocks of a tail went behind the others.
    Rotated { group: usize, row: u32, begin: usize, by: usize },
    /// A block was offered to the index; `is_new` where the index took it.
    Stored { group: usize, row: u32, block: BlockId, is_new: bool },
    /// A sequence began.
    Started { sequence: SequenceId },
}

/// What of a row's blocks a step writes.
#[derive(Debug, Clone)]
struct Written {
    growth: Growth,
    /// Blocks the row must have.
    blocks: u32,
    /// Entries that are written, of codes and sinks and of the tail.
    entries: [Range<u32>; 2],
}

impl Written {
    fn new<Buf>(group: &Group<Buf>, entry: &BatchEntry, lookahead: u32) -> Self {
        let map = slot_map(group);
        let (cached, len) = (entry.cached, entry.cached.saturating_add(entry.new_tokens));
        let growth = Growth::new(&map, group.tables.coded(entry.row), cached, len);
        let ahead = if map.has_tail() { 0 } else { map.blocks(len.saturating_add(lookahead)) };
        let blocks = growth.blocks().max(ahead);
        if !map.has_tail() {
            let entries = [map.place(cached).index..growth.code_blocks, 0..0];
            return Self { growth, blocks, entries };
        }
        // The first row that is written among the codes, and the first in the tail.
        let first_code = if cached < map.sinks() { cached } else { growth.tail_begin };
        let tail_begin = map.tail_begin(len, growth.coded);
        let codes = if first_code < tail_begin {
            map.place(first_code).index..growth.code_blocks
        } else {
            0..0
        };
        let tail = if growth.tail_blocks > 0 {
            let first = map.place_in(tail_begin.max(cached), growth.coded).index;
            first..growth.code_blocks.saturating_add(growth.tail_blocks)
        } else {
            0..0
        };
        Self { growth, blocks, entries: [codes, tail] }
    }

    /// Slots of entry `index` that hold rows from before, in the places they keep.
    fn kept(&self, map: &SlotMap, index: u32, cached: u32) -> u32 {
        let kept = if self.growth.seals() { self.growth.tail_begin } else { cached };
        map.filled(index, kept, self.growth.coded_before)
    }
}

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
            demand.add(group, entry, detail.lookahead);
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
        for at in written.entries.iter().cloned().flatten() {
            let Some(group) = self.groups.get(index) else {
                return;
            };
            let Some(old) = group.tables.row(row).get(to_usize(at)).copied() else {
                continue;
            };
            let slots = written.kept(&map, at, entry.cached);
            if group.pool.holders(old) > 1 {
                self.unshare(index, (row, at), (old, slots), false);
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
        for _ in group.tables.row(row).len()..to_usize(blocks) {
            let taken = group.pool.allocate(&mut self.ledger);
            if taken.is_some_and(|taken| taken.evicted) && self.spec.wipe_on_release() {
                self.unwiped.extend(taken.map(|taken| (index, taken.block)));
            }
            push_held(&mut group.tables, row, taken.map(|taken| taken.block));
            self.open.undo.push(Undo::Pushed { group: index, row });
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

    /// Notes what is codes in a committed sequence of `len` tokens and gives the blocks of a tail
    /// back that has become codes.
    pub(super) fn settle(&mut self, row: u32, len: u32) {
        let reserved = self.sequences.at_mut(row).map_or(0, |state| state.reserved);
        for index in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let map = slot_map(group);
            if map.has_tail() {
                let coded = map.coded_after(group.tables.coded(row), len);
                group.tables.set_coded(row, coded);
                let keep = map.blocks_in(len, coded).max(map.blocks_reserved(reserved));
                self.shorten(index, row, to_usize(keep));
            }
        }
    }

    /// Lets go of the blocks that a sequence of `len` tokens does not need, last first; `reserved`
    /// tokens keep theirs.
    pub(super) fn drop_blocks(&mut self, row: u32, len: u32, reserved: u32) {
        for index in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let map = slot_map(group);
            let coded = map.coded_truncated(group.tables.coded(row), len);
            group.tables.set_coded(row, coded);
            let keep = map.blocks_in(len, coded).max(map.blocks_reserved(reserved));
            self.shorten(index, row, to_usize(keep));
        }
    }

    /// Lets go of a row's blocks beyond the first `keep`, last first.
    fn shorten(&mut self, index: usize, row: u32, keep: usize) {
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let vacant = group.vacant(row);
        while group.tables.row(row).len() > keep {
            let Some(block) = group.tables.pop(row) else {
                break;
            };
            if vacant.contains(&to_u32(group.tables.row(row).len())) {
                continue;
            }
            if group.pool.release(block) && self.spec.wipe_on_release() {
                self.unwiped.push((index, block));
            }
        }
        let live = group.tables.live(row).min(to_u32(group.tables.row(row).len()));
        group.tables.set_live(row, live);
    }

    /// Takes back every change of the open step; nothing to do when none is open.
    pub(crate) fn roll_back(&mut self) {
        self.undo_to(0);
        self.close();
    }

    /// Takes back the changes of the open step but for the first `keep`.
    pub(super) fn undo_to(&mut self, keep: usize) {
        while self.open.undo.len() > keep {
            let Some(undo) = self.open.undo.pop() else {
                break;
            };
            self.undo(undo);
        }
    }

    fn undo(&mut self, undo: Undo) {
        let index = match undo {
            Undo::Started { sequence } => return self.unstart(sequence),
            Undo::Pushed { group, .. }
            | Undo::Replaced { group, .. }
            | Undo::Rotated { group, .. }
            | Undo::Stored { group, .. } => group,
        };
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let freed = match undo {
            Undo::Pushed { row, .. } => {
                self.sequences.disown(row);
                let block = group.tables.pop(row);
                block.filter(|block| group.pool.release(*block))
            }
            Undo::Replaced { row, index: at, old, kept, .. } => {
                self.sequences.disown(row);
                if kept {
                    self.open.kept.pop();
                } else {
                    group.pool.retain(old);
                }
                let copy = group.tables.replace(row, at, old).ok().flatten();
                copy.filter(|copy| group.pool.release(*copy))
            }
            Undo::Rotated { row, begin, by, .. } => {
                group.tables.rotate_back(row, begin, by);
                None
            }
            Undo::Stored { row, block, is_new, .. } => {
                if is_new {
                    group.pool.forget(block, &mut self.ledger);
                }
                if let Some((state, history)) = self.sequences.both_mut(row) {
                    state.store_at = 0;
                    history.set_stored(index, history.stored(index).saturating_sub(1));
                }
                None
            }
            Undo::Started { .. } => None,
        };
        if let Some(block) = freed.filter(|_| self.spec.wipe_on_release()) {
            self.unwiped.push((index, block));
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
        let mut end = first_live(&map, window, len);
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

/// A bound on the blocks a batch needs that costs nothing; above it they are counted.
fn demand_at_most<'a, Buf>(
    group: &Group<Buf>,
    entries: impl Iterator<Item = (&'a BatchEntry, &'a OpenEntry)>,
) -> u32 {
    let map = slot_map(group);
    let (mut tokens, mut count) = (0_u32, 0_u32);
    for (entry, detail) in entries {
        tokens = tokens.saturating_add(entry.new_tokens).saturating_add(detail.lookahead);
        count = count.saturating_add(1);
    }
    let rows = tokens.saturating_mul(map.wide_slots());
    let blocks = rows.checked_div(super::block_size(group)).unwrap_or(u32::MAX);
    let each = map.tail_blocks_max().saturating_mul(3).saturating_add(3);
    blocks.saturating_add(count.saturating_mul(each))
}

/// Counts the blocks that a batch needs of one group.
#[derive(Debug, Default)]
pub(super) struct Demand {
    pub(super) blocks: u32,
    /// Rows of the batch that write a block others hold too.
    writers: HashMap<BlockId, u32>,
    /// Rows of the batch that let go of a block before any is written, because it leaves their
    /// window.
    leavers: HashMap<BlockId, u32>,
}

impl Demand {
    /// Adds one sequence.
    pub(super) fn add<Buf>(&mut self, group: &Group<Buf>, entry: &BatchEntry, lookahead: u32) {
        if entry.new_tokens == 0 {
            return;
        }
        let written = Written::new(group, entry, lookahead);
        let row = group.tables.row(entry.row);
        let new = written.blocks.saturating_sub(to_u32(row.len()));
        self.blocks = self.blocks.saturating_add(new);
        let growth = &written.growth;
        let (begin, by) = (growth.code_blocks_before, growth.tail_blocks_before);
        for at in written.entries.iter().cloned().flatten() {
            // Where the entry is before the blocks of the tail go behind the others.
            let at = if growth.seals() && at >= begin { at.saturating_add(by) } else { at };
            if let Some(block) = row.get(to_usize(at)) {
                self.share(&group.pool, *block);
            }
        }
    }

    /// Notes that a row lets go of a block before the batch writes.
    pub(super) fn leave(&mut self, block: BlockId) {
        let leavers = self.leavers.entry(block).or_default();
        *leavers = leavers.saturating_add(1);
    }

    /// Blocks that all of their holders leave.
    pub(super) fn left_by_all(&self, pool: &BlockPool) -> u32 {
        let left = |(block, rows): &(&BlockId, &u32)| pool.holders(**block) == **rows;
        to_u32(self.leavers.iter().filter(left).count())
    }

    fn share(&mut self, pool: &BlockPool, block: BlockId) {
        let holders = pool.holders(block);
        if holders < 2 {
            return;
        }
        let leavers = self.leavers.get(&block).copied().unwrap_or(0);
        let holders = holders.saturating_sub(leavers);
        if holders < 2 {
            return;
        }
        let writers = self.writers.entry(block).or_default();
        *writers = writers.saturating_add(1);
        // The last of the holders keeps it.
        if *writers < holders {
            self.blocks = self.blocks.saturating_add(1);
        }
    }
}
