//! The blocks on the device: which chunks became complete, and which are gone.
use std::collections::HashSet;

use kv_core::backend::Backend;
use kv_core::block::{BlockChange, BlockChangeKind};
use kv_core::invariant::Invariant;
use kv_core::reuse::IndexedBlock;
use kv_core::{BlockId, GroupId, KvCache};

use super::links::Linked;
use super::{GROUP, Tiers};

/// Chunks of a group that may wait for their copy; older ones are given up.
const WAITING_MAX: usize = 4096;

impl<B: Backend> Tiers<B> {
    /// Follows the blocks that became reusable and those that are gone.
    pub(super) fn follow_changes(&mut self, cache: &mut KvCache<B>) {
        let mut changes = std::mem::take(&mut self.changes);
        if !cache.drain_changes(&mut changes) {
            self.follow_all(cache);
        }
        let pinned = if changes.is_empty() { HashSet::new() } else { pinned_blocks(cache) };
        for change in changes.drain(..) {
            self.follow(cache, change, &pinned);
        }
        self.changes = changes;
    }

    /// Follows what is on the device, after changes were lost. Blocks that were followed before are
    /// not copied again.
    fn follow_all(&mut self, cache: &KvCache<B>) {
        let pinned = pinned_blocks(cache);
        for group in 0..self.groups.len() {
            let id = self.groups.get(group).invariant(GROUP).spec.group();
            let links = &mut self.groups.get_mut(group).invariant(GROUP).links;
            links.retain(&cache.stored_blocks(id).map(|block| (block.block, block.key)).collect());
            let is_new = |block: &IndexedBlock<'_>| !links.is_stored(block.block, block.key);
            let mut blocks: Vec<_> = cache.stored_blocks(id).filter(is_new).collect();
            // A block before those that follow it.
            blocks.sort_by_key(|block| block.index);
            for block in blocks {
                self.follow_stored(cache, group, &block, &pinned);
            }
        }
    }

    fn follow(
        &mut self,
        cache: &KvCache<B>,
        change: BlockChange,
        pinned: &HashSet<(GroupId, BlockId)>,
    ) {
        let group = usize::from(change.group.0);
        match change.kind {
            BlockChangeKind::Removed => {
                let links = &mut self.groups.get_mut(group).invariant(GROUP).links;
                links.removed(change.block, change.key);
            }
            BlockChangeKind::Stored => {
                let block = cache.pool(change.group).and_then(|pool| pool.content(change.block));
                // Of a block that has other content by now, that is a change of its own.
                let block = block.filter(|block| block.key == change.key && !block.is_partial);
                if let Some(block) = block {
                    self.follow_stored(cache, group, &block, pinned);
                }
            }
        }
    }

    fn follow_stored(
        &mut self,
        cache: &KvCache<B>,
        group: usize,
        block: &IndexedBlock<'_>,
        pinned: &HashSet<(GroupId, BlockId)>,
    ) {
        let space = cache.namespace(block.namespace);
        let root = space.and_then(|space| self.root(cache.encoding_key(), group, space));
        let of = self.groups.get_mut(group).invariant(GROUP);
        let pool = cache.pool(of.spec.group()).invariant(GROUP);
        let linked = root.map_or(Linked::Unnamed, |root| of.links.stored(block, &root, pool));
        match linked {
            Linked::Inside => {}
            Linked::Unnamed => {
                self.stats.unnamed_blocks = self.stats.unnamed_blocks.saturating_add(1);
            }
            Linked::Incomplete => {
                self.stats.offload_missed = self.stats.offload_missed.saturating_add(1);
            }
            Linked::Complete(mut complete) => {
                let id = of.spec.group();
                let is_pinned = |block: &BlockId| pinned.contains(&(id, *block));
                complete.record.is_pinned = complete.blocks.iter().any(is_pinned);
                if of.host.contains(&complete.record.name) {
                    of.host.touch(&complete.record.name);
                    return;
                }
                // The caller wants these evicted first: they are not worth a copy.
                if complete.record.priority.level == 0 {
                    return;
                }
                of.waiting.push_back(complete);
                if of.waiting.len() > WAITING_MAX {
                    of.waiting.pop_front();
                    self.stats.offload_missed = self.stats.offload_missed.saturating_add(1);
                }
            }
        }
    }
}

fn pinned_blocks<B: Backend>(cache: &KvCache<B>) -> HashSet<(GroupId, BlockId)> {
    let groups = (0..=u8::MAX).map(GroupId).take(cache.spec().groups().len());
    groups.flat_map(|id| cache.pinned_blocks(id).map(move |block| (id, block))).collect()
}
