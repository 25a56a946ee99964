//! The blocks that a step takes, that it gives back when it never happened, and that sequences let
//! go of.
use crate::backend::Backend;
use crate::cache::{KvCache, slot_map};
use crate::error::{BlocksExhausted, CacheError};
use crate::ids::{BlockId, GroupId};
use crate::num::to_usize;
use crate::plan::{BatchEntry, BlockCopy, Growth};

/// How to take back one change of a table, last first.
#[derive(Debug, Clone, Copy)]
pub(super) enum Undo {
    /// A block was appended.
    Pushed { group: usize, row: u32 },
    /// A shared block was exchanged for a copy.
    Replaced { group: usize, row: u32, index: usize, old: BlockId },
    /// A shared block lost a holder whose copy found no block.
    Released { group: usize, block: BlockId },
    /// The blocks of a tail went behind the others.
    Rotated { group: usize, row: u32, begin: usize, by: usize },
}

/// Blocks that a step takes, and blocks that it lacks.
#[derive(Debug, Clone, Copy, Default)]
struct Demand {
    taken: u32,
    missing: u32,
}

impl<B: Backend> KvCache<B> {
    /// Takes the blocks that the batch writes, and a private copy of each that others share.
    pub(super) fn reserve(&mut self) -> Result<(), CacheError> {
        for index in 0..self.groups.len() {
            let group = GroupId(u8::try_from(index).unwrap_or(u8::MAX));
            let free = self.free_blocks(group);
            let mut demand = Demand::default();
            for entry in 0..self.open.batch.len() {
                if let Some(&entry) = self.open.batch.get(entry) {
                    self.reserve_entry(index, entry, &mut demand);
                }
            }
            if demand.missing > 0 {
                let needed = demand.taken.saturating_add(demand.missing);
                return Err(BlocksExhausted { group, needed, free, evictable: 0 }.into());
            }
        }
        Ok(())
    }

    fn reserve_entry(&mut self, index: usize, entry: BatchEntry, demand: &mut Demand) {
        let Some(group) = self.groups.get(index) else {
            return;
        };
        if entry.new_tokens == 0 {
            return;
        }
        let (map, row) = (slot_map(group), entry.row);
        let (cached, len) = (entry.cached, entry.cached.saturating_add(entry.new_tokens));
        let growth = Growth::new(&map, group.tables.coded(row), cached, len);
        let is_whole = self.extend(index, row, growth.blocks(), demand);
        if growth.seals() {
            let (begin, by) =
                (to_usize(growth.code_blocks_before), to_usize(growth.tail_blocks_before));
            let Some(group) = self.groups.get_mut(index).filter(|_| is_whole) else {
                return;
            };
            group.tables.rotate(row, begin, by);
            self.open.undo.push(Undo::Rotated { group: index, row, begin, by });
        }
        // The first row that is written among the codes, and the first in the tail.
        let first_code = if cached < map.sinks() { cached } else { growth.tail_begin };
        let tail_begin = map.tail_begin(len, growth.coded);
        let codes =
            (first_code < tail_begin).then(|| map.place(first_code).index..growth.code_blocks);
        let tail = (growth.tail_blocks > 0)
            .then(|| map.place_in(tail_begin.max(cached), growth.coded).index)
            .map(|first| first..growth.code_blocks.saturating_add(growth.tail_blocks));
        // What blocks hold of the rows there were, in the places they keep.
        let kept = if growth.seals() { growth.tail_begin } else { cached };
        let filled = |at| map.filled(at, kept, growth.coded_before);
        for range in [codes, tail].into_iter().flatten() {
            for at in range {
                self.unshare(index, (row, at), filled, demand);
            }
        }
    }

    /// Appends blocks until the row has `blocks`; false when the pool ran out.
    fn extend(&mut self, index: usize, row: u32, blocks: u32, demand: &mut Demand) -> bool {
        let Some(group) = self.groups.get_mut(index) else {
            return false;
        };
        let missing = demand.missing;
        for _ in group.tables.row(row).len()..to_usize(blocks) {
            match group.pool.allocate(&mut self.ledger) {
                None => demand.missing = demand.missing.saturating_add(1),
                new => {
                    demand.taken = demand.taken.saturating_add(1);
                    super::push_held(&mut group.tables, row, new.map(|taken| taken.block));
                    self.open.undo.push(Undo::Pushed { group: index, row });
                }
            }
        }
        demand.missing == missing
    }

    /// Exchanges a block that others hold too for a copy of its `filled` first slots.
    fn unshare(
        &mut self,
        index: usize,
        (row, entry): (u32, u32),
        filled: impl Fn(u32) -> u32,
        demand: &mut Demand,
    ) {
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let at = to_usize(entry);
        let held = group.tables.row(row).get(at).copied();
        let Some(old) = held.filter(|block| group.pool.holders(*block) > 1) else {
            return;
        };
        let new = group.pool.allocate(&mut self.ledger).map(|taken| taken.block);
        let Some(new) = new else {
            demand.missing = demand.missing.saturating_add(1);
            group.pool.release(old);
            self.open.undo.push(Undo::Released { group: index, block: old });
            return;
        };
        demand.taken = demand.taken.saturating_add(1);
        // Both blocks are of this group's pool, so the exchange is not refused.
        let replaced = group.tables.replace(row, at, new);
        debug_assert_eq!(replaced, Ok(Some(old)), "the entry was read just before");
        group.pool.release(old);
        self.open.undo.push(Undo::Replaced { group: index, row, index: at, old });
        let slots = filled(entry);
        if let Some(copies) = self.open.copies.get_mut(index).filter(|_| slots > 0) {
            copies.push(BlockCopy { from: old, to: new, slots });
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
        while group.tables.row(row).len() > keep {
            let Some(block) = group.tables.pop(row) else {
                break;
            };
            if group.pool.release(block) && self.spec.wipe_on_release() {
                self.unwiped.push((index, block));
            }
        }
    }

    /// Takes back every change of the open step; nothing to do when none is open.
    pub(crate) fn roll_back(&mut self) {
        while let Some(undo) = self.open.undo.pop() {
            let (Undo::Pushed { group: index, .. }
            | Undo::Replaced { group: index, .. }
            | Undo::Released { group: index, .. }
            | Undo::Rotated { group: index, .. }) = undo;
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let freed = match undo {
                Undo::Pushed { row, .. } => {
                    let block = group.tables.pop(row);
                    block.filter(|block| group.pool.release(*block))
                }
                Undo::Replaced { row, index: at, old, .. } => {
                    group.pool.retain(old);
                    let copy = group.tables.replace(row, at, old).ok().flatten();
                    copy.filter(|copy| group.pool.release(*copy))
                }
                Undo::Released { block, .. } => {
                    group.pool.retain(block);
                    None
                }
                Undo::Rotated { row, begin, by, .. } => {
                    group.tables.rotate_back(row, begin, by);
                    None
                }
            };
            if let Some(block) = freed.filter(|_| self.spec.wipe_on_release()) {
                self.unwiped.push((index, block));
            }
        }
        self.close();
    }
}
