//! Blocks held while their bytes are read.
use hashbrown::HashMap;

#[cfg(doc)]
use crate::KvCache;
use crate::cache::state::snapshots::snapshots_of;
use crate::cache::state::{CacheState, group_id, unique};
use crate::error::{PlanError, StateProblem};
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::num::{to_u32, to_usize};
use crate::reuse::BlockKey;

/// One cached block, held while its bytes are read: it is not evicted, and no step writes to it.
///
/// [Pins](crate::reuse::Pin) keep a prefix for the prompts to come; a hold keeps one block for a
/// reader, and is no use of its content. The block counts as held, so that holds should be few and
/// short: [`KvCache::release_hold_after`](crate::KvCache::release_hold_after) ends one as soon as
/// the read is recorded, [`KvCache::release_hold`] when it is done. The cache keeps a list of
/// all holds: one that is dropped stays there until [`KvCache::release_holds`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the block stays held until the hold is released"]
pub struct BlockHold {
    id: u64,
    group: GroupId,
    block: BlockId,
}

impl BlockHold {
    /// Returns the group whose pool has the block.
    pub fn group(&self) -> GroupId {
        self.group
    }
    /// Returns the block.
    pub fn block(&self) -> BlockId {
        self.block
    }
}

/// All holds.
#[derive(Debug, Default)]
pub(super) struct Holds {
    held: HashMap<u64, (usize, BlockId)>,
}

impl Holds {
    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.held.values().copied()
    }
}

impl CacheState {
    /// Holds a cached block: see
    /// [`KvCache::hold_block`](crate::KvCache::hold_block).
    pub(in crate::cache) fn hold_block(
        &mut self,
        group: GroupId,
        block: BlockId,
        key: BlockKey,
    ) -> Result<Option<BlockHold>, PlanError> {
        self.check_closed("hold block")?;
        let index = usize::from(group.0);
        let content = self.pool(group).and_then(|pool| pool.content(block));
        if content.is_none_or(|content| content.key != key) {
            return Ok(None);
        }
        match snapshots_of(&mut self.states, group) {
            Some(snapshots) => {
                assert!(snapshots.pool.hold(block), "snapshot {block} has content and no holder");
            }
            None => self.groups.at_mut(index).hold(block),
        }
        let id = unique();
        self.holds.held.insert(id, (index, block));
        self.note_peak();
        Ok(Some(BlockHold { id, group, block }))
    }

    /// Holds the block of a sequence: see [`KvCache::hold_entry`](crate::KvCache::hold_entry).
    pub(in crate::cache) fn hold_entry(
        &mut self,
        sequence: SequenceId,
        group: GroupId,
        index: u32,
    ) -> Result<Option<BlockHold>, PlanError> {
        self.check_closed("hold block")?;
        let row = self.sequences.row(sequence)?;
        let Some(of) = self.groups.get_mut(usize::from(group.0)) else {
            return Ok(None);
        };
        let block = of.tables.row(row).get(to_usize(index)).copied();
        let Some(block) = block.filter(|_| !of.vacant(row).contains(&index)) else {
            return Ok(None);
        };
        of.pool.retain(block);
        let id = unique();
        self.holds.held.insert(id, (usize::from(group.0), block));
        Ok(Some(BlockHold { id, group, block }))
    }

    /// Releases a block: see [`KvCache::release_hold`](crate::KvCache::release_hold).
    #[expect(clippy::needless_pass_by_value, reason = "a hold ends with this call")]
    pub(in crate::cache) fn release_hold(&mut self, hold: BlockHold) -> Result<(), PlanError> {
        const OPERATION: &str = "release hold";
        self.check_closed(OPERATION)?;
        let Some((index, block)) = self.holds.held.remove(&hold.id) else {
            return Err(PlanError::State { operation: OPERATION, problem: StateProblem::Ended });
        };
        self.end_hold(index, block);
        Ok(())
    }

    /// Does what [`Self::release_hold`] does while the bytes are read beside the queue: the block
    /// is listed in [`Self::outlived_reads`] once it may be written.
    pub(in crate::cache) fn release_hold_in_read(
        &mut self,
        hold: BlockHold,
    ) -> Result<(), PlanError> {
        let (group, block) = (hold.group, hold.block);
        self.release_hold(hold)?;
        let has_content = self.pool(group).is_some_and(|pool| pool.is_stored(block));
        self.ledger.begin_read((group, block), has_content);
        Ok(())
    }
    /// Records that the reads of a block are done.
    pub(in crate::cache) fn end_read(&mut self, place: (GroupId, BlockId)) {
        self.ledger.end_read(place);
    }
    /// Returns the blocks that lost their content while they were read: before they are written,
    /// their reads must be done.
    pub(in crate::cache) fn outlived_reads(&self) -> &[(GroupId, BlockId)] {
        self.ledger.outlived_reads()
    }
    /// Records that writes wait for the reads of the last of them.
    pub(in crate::cache) fn pop_outlived_read(&mut self) {
        self.ledger.pop_outlived_read();
    }

    /// Releases every hold: see [`KvCache::release_holds`](crate::KvCache::release_holds).
    pub(in crate::cache) fn release_holds(&mut self) -> Result<u32, PlanError> {
        self.check_closed("release holds")?;
        let held = std::mem::take(&mut self.holds.held);
        let count = to_u32(held.len());
        held.into_values().for_each(|(index, block)| self.end_hold(index, block));
        Ok(count)
    }

    /// Removes a holder of a block of rows, or of a snapshot, that was no use of its content.
    pub(super) fn end_hold(&mut self, index: usize, block: BlockId) {
        let Self { groups, states, unwiped, .. } = self;
        let group = group_id(index);
        let is_empty = match snapshots_of(states, group) {
            Some(snapshots) => snapshots.pool.end_hold(block),
            None => groups.at_mut(index).pool.end_hold(block),
        };
        if is_empty {
            unwiped.note(group, block);
        }
    }

    /// Returns the number of holds that were not released.
    pub fn num_holds(&self) -> u32 {
        to_u32(self.holds.held.len())
    }
}
