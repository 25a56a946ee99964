//! The blocks of one group that a step allocates, and the blocks that it writes.
use std::ops::Range;

use hashbrown::HashMap;

use crate::block::BlockPool;
use crate::cache::state::Group;
use crate::cache::state::step_state::OpenEntry;
use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};
use crate::plan::{BatchEntry, Growth};
use crate::slot_map::SlotMap;

/// Blocks of a row that a step writes.
#[derive(Debug, Clone)]
pub(super) struct Written {
    pub(super) growth: Growth,
    /// Number of blocks that the row must have.
    pub(super) blocks: u32,
    /// Entries that are written, of full-precision prefix and codes, and of the tail.
    entries: [Range<u32>; 2],
}

impl Written {
    pub(super) fn new(group: &Group, entry: &BatchEntry, lookahead: u32) -> Self {
        let map = group.slot_map();
        let (cached, len) = (entry.cached, entry.cached + entry.new_tokens);
        let growth = Growth::new(&map, group.tables.coded(entry.row), cached, len);
        // Lookahead may be any number.
        let ahead = if map.has_tail() { 0 } else { map.blocks(len.saturating_add(lookahead)) };
        let blocks = growth.blocks().max(ahead);
        if !map.has_tail() {
            let entries = [map.place(cached).index..growth.code_blocks, 0..0];
            return Self { growth, blocks, entries };
        }
        // The first row that is written among the codes, and the first in the tail.
        let first_code =
            if cached < map.full_precision_prefix() { cached } else { growth.tail_begin };
        let tail_begin = map.tail_begin(len, growth.coded);
        let codes = if first_code < tail_begin {
            map.place(first_code).index..growth.code_blocks
        } else {
            0..0
        };
        let tail = if growth.tail_blocks > 0 {
            let first = map.place_in(tail_begin.max(cached), growth.coded).index;
            first..growth.code_blocks + growth.tail_blocks
        } else {
            0..0
        };
        Self { growth, blocks, entries: [codes, tail] }
    }

    /// Iterates over the written entries among the first `had` of a row: later ones are new and its
    /// own. All of them if the blocks of a tail move.
    pub(super) fn entries_had(&self, had: u32) -> impl Iterator<Item = u32> + use<> {
        let end = if self.growth.seals() { u32::MAX } else { had };
        let had = self.entries.clone().map(|range| range.start..range.end.min(end));
        had.into_iter().flatten()
    }

    /// Returns the slots of entry `index` that keep rows from before the step.
    pub(super) fn kept(&self, map: &SlotMap, index: u32, cached: u32) -> u32 {
        let kept = if self.growth.seals() { self.growth.tail_begin } else { cached };
        map.filled(index, kept, self.growth.coded_before)
    }
}

/// Returns a cheap upper bound of the blocks that a batch needs; beyond it they are counted.
/// Saturating, because lookahead may be any number.
pub(super) fn demand_at_most(
    group: &Group,
    entries: impl Iterator<Item = (BatchEntry, OpenEntry)>,
) -> u32 {
    let map = group.slot_map();
    let (mut tokens, mut count) = (0_u32, 0_u32);
    for (entry, detail) in entries {
        tokens = tokens.saturating_add(entry.new_tokens).saturating_add(detail.lookahead);
        count += 1;
    }
    let rows = tokens.saturating_mul(map.wide_slots());
    let blocks = rows / group.block_size();
    let each = map.tail_blocks_max() * 3 + 3;
    blocks.saturating_add(count * each)
}

/// Blocks that become free when a step begins, because they left a window.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Left {
    pub(super) blocks: u32,
    /// Number of them whose content can be reused.
    pub(super) stored: u32,
}

/// Counts the blocks that a batch needs of one group.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// `u32::MAX` if more: lookahead may be any number.
    pub(super) blocks: u32,
    /// Number of rows of the batch that write a shared block, and the most slots that one of them
    /// has filled.
    writers: HashMap<BlockId, (u32, u32)>,
    /// Number of rows of the batch that release a block before any is written, because it leaves
    /// their window.
    leavers: HashMap<BlockId, u32>,
}

impl Demand {
    /// Adds one sequence to the demand of an open step.
    pub(super) fn add(
        &mut self,
        group: &Group,
        entry: &BatchEntry,
        lookahead: u32,
        exchanged: &Exchanged,
    ) {
        if entry.new_tokens == 0 {
            return;
        }
        let written = Written::new(group, entry, lookahead);
        let row = group.tables.row(entry.row);
        let new = written.blocks.saturating_sub(to_u32(row.len()));
        self.blocks = self.blocks.saturating_add(new);
        let growth = &written.growth;
        let (begin, by) = (growth.code_blocks_before, growth.tail_blocks_before);
        for at in written.entries_had(to_u32(row.len())) {
            let kept = written.kept(&group.slot_map(), at, entry.cached);
            // The entry's index before the blocks of the tail move after the others.
            let at = if growth.seals() && at >= begin { at + by } else { at };
            if let Some(block) = row.get(to_usize(at)) {
                let filled = exchanged.filled(group.id, *block);
                self.share(&group.pool, *block, (kept, filled));
            }
        }
    }

    /// Records that a row releases a block before the batch writes.
    pub(super) fn leave(&mut self, block: BlockId) {
        let leavers = self.leavers.entry(block).or_default();
        *leavers += 1;
    }

    /// Counts the blocks that all of their holders leave.
    pub(super) fn left_by_all(&self, pool: &BlockPool) -> Left {
        let mut left = Left::default();
        let blocks = self.leavers.iter().filter(|(block, rows)| pool.holders(**block) == **rows);
        for (block, _) in blocks {
            left.blocks += 1;
            left.stored += u32::from(pool.is_stored(*block));
        }
        left
    }

    /// Counts the copy of a block of which the row has filled `kept` slots, and rows that release
    /// it in this step at most `filled`.
    fn share(&mut self, pool: &BlockPool, block: BlockId, (kept, filled): (u32, u32)) {
        if pool.holders(block) <= 1 && filled == 0 {
            // Nearly every block: its only holder writes in place.
            return;
        }
        let leavers = self.leavers.get(&block).copied().unwrap_or(0);
        // Those who ask for a demand may name a sequence twice.
        let holders = pool.holders(block).saturating_sub(leavers);
        let (writers, most) = self.writers.entry(block).or_default();
        *writers += 1;
        // The last holder keeps the block, unless it would overwrite another holder's rows.
        let is_last = *writers >= holders;
        if !is_last || (*most).max(filled) > kept {
            self.blocks = self.blocks.saturating_add(1);
        }
        *most = kept.max(*most);
    }
}

/// Blocks that [`Exchanged`] keeps memory for when it is empty.
const KEPT: usize = 1024;

/// Blocks that rows released for a copy in an open step, with the most slots that one of them had
/// filled. A row that writes such a block in place must not write to these slots, because the step
/// may be rolled back.
#[derive(Debug, Default)]
pub(super) struct Exchanged {
    filled: HashMap<(usize, BlockId), u32>,
}

impl Exchanged {
    pub(super) fn clear(&mut self) {
        self.filled.clear();
        self.filled.shrink_to(KEPT);
    }
    pub(super) fn is_empty(&self) -> bool {
        self.filled.is_empty()
    }
    pub(super) fn note(&mut self, group: usize, block: BlockId, slots: u32) {
        let filled = self.filled.entry((group, block)).or_default();
        *filled = slots.max(*filled);
    }
    pub(super) fn contains(&self, group: usize, block: BlockId) -> bool {
        !self.is_empty() && self.filled.contains_key(&(group, block))
    }
    pub(super) fn filled(&self, group: usize, block: BlockId) -> u32 {
        if self.is_empty() {
            return 0;
        }
        self.filled.get(&(group, block)).copied().unwrap_or(0)
    }
}
