//! The fill of a cache, for reports.
use std::ops::Range;

use hashbrown::HashMap;

use crate::block::BlockPool;
use crate::cache::state::{CacheState, Group};
use crate::ids::{GroupId, SequenceId};

/// The fill of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Live sequences.
    pub sequences: u32,
    /// Committed tokens of all sequences; a shared token counts once a sequence.
    pub tokens: u64,
    /// Blocks of all pools.
    pub blocks_total: u32,
    /// Blocks with a holder.
    pub blocks_used: u32,
    /// The most blocks held after any commit.
    pub blocks_peak: u32,
    /// Free blocks whose content can be reused.
    pub blocks_cached: u32,
    /// Slots of held blocks without a committed token of any sequence; blocks of pins, holds and
    /// imports count as full.
    /// All slots of a 16-bit row count as its token's.
    pub slots_wasted: u64,
}

impl CacheState {
    /// Returns the entries of a sequence's [block table](Self::block_table) that are vacant,
    /// because their blocks left the group's window; `None` for an unknown sequence or group.
    pub fn vacant_entries(&self, sequence: SequenceId, group: GroupId) -> Option<Range<u32>> {
        let row = self.sequences.row(sequence).ok()?;
        Some(self.find_group(group)?.vacant(row))
    }

    /// Returns the bytes of host memory of block tables and plans, including memory that they keep
    /// for later steps. It grows with the blocks of live sequences and with the largest recent
    /// step. Pools and their index are not included: they take a fixed size per block.
    pub fn plan_bytes(&self) -> usize {
        let tables = self.groups.iter().map(|group| group.tables.host_bytes());
        self.open.host_bytes() + tables.sum::<usize>()
    }

    /// Returns the bytes of the histories of all sequences.
    #[cfg(test)]
    pub(in crate::cache) fn history_bytes(&self) -> usize {
        self.sequences.history_bytes()
    }

    /// Returns how full the cache is. Visits all sequences and their blocks: for reports, not for
    /// every step.
    pub fn usage(&self) -> Usage {
        let tokens = self.sequences.iter().map(|(_, state)| u64::from(state.len)).sum();
        let sum =
            |count: fn(&BlockPool) -> u32| self.groups.iter().map(|group| count(&group.pool)).sum();
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

    /// Returns the slots of held blocks without a committed token. A shared block counts the tokens
    /// of the holder that has most.
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
        let others = self.pins.blocks().chain(self.holds.blocks()).chain(self.imports.blocks());
        for (_, block) in others.filter(|(index, _)| *index == group.id) {
            filled.insert(block, size);
        }
        let filled: u64 = filled.values().map(|n| u64::from(*n)).sum();
        u64::from(group.pool.num_used()) * u64::from(size) - filled
    }
}
