//! The blocks on the device: which chunks became complete, and which are gone.
use std::collections::HashSet;

use kv_core::backend::Backend;
use kv_core::block::{BlockChange, BlockChangeKind};
use kv_core::invariant::Invariant;
use kv_core::reuse::{BlockKey, IndexedBlock};
use kv_core::{BlockId, GroupId, KvCache};

use super::links::{Complete, Linked};
use super::{GROUP, Tiers, group};
use crate::chunk::ChunkSpec;
use crate::policy::ChunkEvent;
use crate::record::Record;

impl<B: Backend> Tiers<B> {
    /// Follows the blocks that became reusable and those that are gone.
    pub(super) fn follow_changes(&mut self, cache: &mut KvCache<B>) {
        let mut changes = std::mem::take(&mut self.changes);
        if !cache.drain_changes(&mut changes) {
            self.follow_all(cache);
        }
        for change in changes.drain(..) {
            self.follow(cache, change);
        }
        self.changes = changes;
    }

    /// Sends chunks that were pinned since the last call to the stores that get pinned ones at
    /// once.
    pub(super) fn follow_pins(&mut self, cache: &KvCache<B>) {
        if cache.state().pins_revision() == self.pinned.revision {
            return;
        }
        let before = std::mem::replace(&mut self.pinned, Pinned::of(cache));
        let is_new = |key: &_| self.pinned.keys.contains(key) && !before.keys.contains(key);
        let mut records = self.host_records();
        records.retain(|record| record.keys.iter().any(|key| is_new(&(record.group(), *key))));
        // Those that host memory has given up are copied again.
        let contents = self.pinned.blocks.iter().filter_map(|(group, block)| {
            let content = cache.state().pool(*group)?.content(*block)?;
            (!content.is_partial && is_new(&(*group, content.key))).then_some((*group, content))
        });
        let contents: Vec<_> = contents.collect();
        for record in records {
            self.decide_writes(&record, ChunkEvent::Reused);
        }
        for (id, block) in contents {
            let Some(group) = group::place_of(&self.groups, id) else { continue };
            if self.is_of_states(group) {
                self.snapshots.push(id, block.block, block.key);
            } else if let Linked::Complete(complete) = self.link(cache, group, &block) {
                self.wait_for_copy(group, &complete);
            }
        }
    }

    /// Follows the blocks on the device, after changes were lost. Blocks that were followed before
    /// are not copied again.
    fn follow_all(&mut self, cache: &KvCache<B>) {
        for group in 0..self.groups.len() {
            let id = self.groups.get(group).invariant(GROUP).spec.group();
            if self.is_of_states(group) {
                for block in cache.state().stored_blocks(id) {
                    self.snapshots.push(id, block.block, block.key);
                }
                continue;
            }
            let links = &mut self.groups.get_mut(group).invariant(GROUP).links;
            links.retain(
                &cache.state().stored_blocks(id).map(|block| (block.block, block.key)).collect(),
            );
            let is_new = |block: &IndexedBlock<'_>| !links.is_stored(block.block, block.key);
            let mut blocks: Vec<_> = cache.state().stored_blocks(id).filter(is_new).collect();
            // A block before those that follow it.
            blocks.sort_by_key(|block| block.index);
            for block in blocks {
                self.follow_stored(cache, group, &block);
            }
        }
    }

    fn follow(&mut self, cache: &KvCache<B>, change: BlockChange) {
        let Some(group) = group::place_of(&self.groups, change.group) else { return };
        match change.kind {
            BlockChangeKind::Stored if self.is_of_states(group) => {
                self.snapshots.push(change.group, change.block, change.key);
            }
            BlockChangeKind::Removed if self.is_of_states(group) => {
                let is_missed = self.snapshots.remove(change.group, change.key);
                self.stats.offload_missed += u64::from(is_missed);
            }
            BlockChangeKind::Removed => {
                let of = self.groups.get_mut(group).invariant(GROUP);
                let index = of.links.removed(change.block, change.key);
                if index.is_some_and(|index| of.waiting.remove(index, change.key)) {
                    self.stats.offload_missed += 1;
                }
            }
            BlockChangeKind::Stored => {
                let block =
                    cache.state().pool(change.group).and_then(|pool| pool.content(change.block));
                // Of a block that has other content by now, that is a change of its own.
                let block = block.filter(|block| block.key == change.key && !block.is_partial);
                if let Some(block) = block {
                    self.follow_stored(cache, group, &block);
                }
            }
        }
    }

    /// Returns whether a group is one of snapshots of states.
    fn is_of_states(&self, group: usize) -> bool {
        self.groups.get(group).invariant(GROUP).spec.is_of_states()
    }

    /// Gives a block its name; returns the chunk that it completes.
    fn link(&mut self, cache: &KvCache<B>, group: usize, block: &IndexedBlock<'_>) -> Linked {
        let space = cache.state().namespace(block.namespace);
        let root = space.and_then(|space| self.root(cache.state().encoding_key(), group, space));
        let of = self.groups.get_mut(group).invariant(GROUP);
        let pool = cache.state().pool(of.spec.group()).invariant(GROUP);
        root.map_or(Linked::Unnamed, |root| of.links.stored(block, &root, pool))
    }

    fn follow_stored(&mut self, cache: &KvCache<B>, group: usize, block: &IndexedBlock<'_>) {
        match self.link(cache, group, block) {
            Linked::Inside => {}
            Linked::Unnamed => {
                self.stats.unnamed_blocks += 1;
            }
            Linked::Incomplete => {
                self.stats.offload_missed += 1;
            }
            Linked::Complete(complete) => self.wait_for_copy(group, &complete),
        }
    }

    /// Queues a chunk for its copy to host memory, unless host memory has it or it has level 0.
    fn wait_for_copy(&mut self, group: usize, complete: &Complete) {
        let of = self.groups.get_mut(group).invariant(GROUP);
        if of.host.contains(&complete.record.name) {
            let name = &complete.record.name;
            of.host.touch(name, self.prompted.hint(name));
            return;
        }
        // The caller wants these evicted first: they are not worth a copy.
        if complete.record.priority.level == 0 {
            return;
        }
        if let Some(key) = complete.record.keys.last() {
            of.waiting.insert(complete.record.last_block(), *key);
        }
    }
}

/// The blocks that the caller has pinned.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// [`CacheState::pins_revision`](kv_core::scheduling::CacheState::pins_revision) then.
    revision: u64,
    blocks: Vec<(GroupId, BlockId)>,
    keys: HashSet<(GroupId, BlockKey)>,
}

impl Pinned {
    fn of<B: Backend>(cache: &KvCache<B>) -> Self {
        let blocks: Vec<_> = pinned_blocks(cache).collect();
        let key = |(group, block): &(GroupId, BlockId)| {
            Some((*group, cache.state().pool(*group)?.content(*block)?.key))
        };
        let keys = blocks.iter().filter_map(key).collect();
        Self { revision: cache.state().pins_revision(), blocks, keys }
    }

    /// Returns whether a prefix with some block of a chunk is pinned.
    pub(super) fn has(&self, record: &Record) -> bool {
        let is_pinned = |key: &BlockKey| self.keys.contains(&(record.group(), *key));
        !self.keys.is_empty() && record.keys.iter().any(is_pinned)
    }
}

fn pinned_blocks<B: Backend>(cache: &KvCache<B>) -> impl Iterator<Item = (GroupId, BlockId)> + '_ {
    let groups = ChunkSpec::groups_of(cache.state().spec()).into_iter();
    groups.flat_map(|id| cache.state().pinned_blocks(id).map(move |block| (id, block)))
}
