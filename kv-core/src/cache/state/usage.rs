//! How full a cache is, for reports.
use std::ops::Range;

use hashbrown::HashMap;

use crate::block::BlockPool;
use crate::cache::state::{CacheState, Group};
use crate::ids::{GroupId, SequenceId};

/// How full a cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Live sequences.
    pub sequences: u32,
    /// Committed tokens of all sequences; a shared token counts once a sequence.
    pub tokens: u64,
    /// Blocks of all pools.
    pub blocks_total: u32,
    /// Blocks somebody holds.
    pub blocks_used: u32,
    /// The most blocks held after any commit.
    pub blocks_peak: u32,
    /// Of the others, blocks whose content can be reused.
    pub blocks_cached: u32,
    /// Slots of held blocks that hold no committed token of any sequence; pinned blocks are full.
    /// The further slots of a row in 16 bits hold it.
    pub slots_wasted: u64,
}

impl CacheState {
    /// Entries of a sequence's [block table](Self::block_table) that mean nothing, because their
    /// blocks fell out of the group's window; `None` for an unknown sequence or group.
    pub fn vacant_entries(&self, sequence: SequenceId, group: GroupId) -> Option<Range<u32>> {
        let row = self.sequences.row(sequence).ok()?;
        Some(self.find_group(group)?.vacant(row))
    }

    /// Bytes of host memory that block tables and the plans of steps take, room that they keep for
    /// later steps included. Grows with the blocks of live sequences and with the largest of the
    /// last steps; pools and their index are apart, a fixed size a block.
    pub fn plan_bytes(&self) -> usize {
        let tables = self.groups.iter().map(|group| group.tables.host_bytes());
        tables.fold(self.open.host_bytes(), usize::saturating_add)
    }

    /// Bytes that the histories of all sequences take.
    #[cfg(test)]
    pub(in crate::cache) fn history_bytes(&self) -> usize {
        self.sequences.history_bytes()
    }

    /// How full the cache is. Walks all sequences and their blocks: for reports, not for every
    /// step.
    pub fn usage(&self) -> Usage {
        let tokens = self.sequences.iter().map(|(_, state)| u64::from(state.len)).sum();
        let sum = |count: fn(&BlockPool) -> u32| {
            self.groups.iter().fold(0_u32, |n, group| n.saturating_add(count(&group.pool)))
        };
        Usage {
            sequences: self.num_sequences(),
            tokens,
            blocks_total: sum(BlockPool::num_blocks),
            blocks_used: sum(BlockPool::num_used),
            blocks_peak: self.blocks_peak,
            blocks_cached: sum(BlockPool::num_idle),
            slots_wasted: self.groups.iter().map(|group| self.wasted(group)).sum(),
        }
    }

    /// Slots of held blocks without a committed token. A shared block's tokens are those of the
    /// holder that has most.
    fn wasted(&self, group: &Group) -> u64 {
        let (map, size) = (group.slot_map(), group.block_size());
        let mut filled = HashMap::new();
        for (row, state) in self.sequences.iter() {
            let vacant = group.vacant(row);
            for (block, index) in group.tables.row(row).iter().zip(0_u32..) {
                if vacant.contains(&index) {
                    continue;
                }
                let slots = map.filled(index, state.len, group.tables.coded(row));
                let most = filled.entry(*block).or_insert(0_u32);
                *most = slots.max(*most);
            }
        }
        for (_, block) in self.pins.blocks().filter(|(index, _)| *index == group.id) {
            filled.insert(block, size);
        }
        let filled: u64 = filled.values().map(|n| u64::from(*n)).sum();
        let slots = u64::from(group.pool.num_used()).saturating_mul(u64::from(size));
        slots.saturating_sub(filled)
    }
}
