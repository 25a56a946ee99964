//! The chunks that wait for their copy from the device.
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::block::BlockPool;
use kv_core::reuse::BlockKey;

use super::links::{Complete, Links};
use crate::name::ChunkName;

/// The chunks of one group that wait for their copy to host memory. Exports come first, then
/// beginnings of prompts, because a chunk needs the chunks before it.
///
/// A chunk is identified by its last block and leaves with this block, so the device's number of
/// blocks bounds their number.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    exported: VecDeque<Complete>,
    /// Index of the last block in the prompt, and its key.
    published: BTreeSet<(u32, BlockKey)>,
    /// Chunks on the device that host memory has given up before some stores had them.
    lost: BTreeMap<(u32, BlockKey), u64>,
}

/// A chunk that is about to be copied.
#[derive(Debug)]
pub(super) enum Next {
    Exported(Complete),
    Published(BlockKey),
}

impl Waiting {
    pub(super) fn len(&self) -> usize {
        self.exported.len() + self.published.len()
    }

    /// Adds the chunk that ends with a block.
    pub(super) fn insert(&mut self, last_index: u32, key: BlockKey) {
        self.published.insert((last_index, key));
    }
    /// Takes out the chunk that ends with a block; returns whether it waited.
    pub(super) fn remove(&mut self, last_index: u32, key: BlockKey) -> bool {
        self.lost.remove(&(last_index, key));
        self.published.remove(&(last_index, key))
    }
    /// Notes that the chunk that ends with a block was lost on its way to some stores.
    pub(super) fn note_lost(&mut self, last_index: u32, key: BlockKey, stores: u64) {
        *self.lost.entry((last_index, key)).or_default() |= stores;
    }
    /// Lets chunks that one of some stores lacks wait for another copy.
    pub(super) fn retry_lost(&mut self, stores: u64) {
        let again = self.lost.extract_if(.., |_, lack| *lack & stores != 0);
        self.published.extend(again.map(|(at, _)| at));
    }
    pub(super) fn contains(&self, last_index: u32, key: BlockKey) -> bool {
        self.published.contains(&(last_index, key))
    }

    /// Returns the number of chunks whose blocks are known, of exports and of states.
    pub(super) fn num_exported(&self) -> usize {
        self.exported.len()
    }
    /// Adds a chunk for an export or for a state, whether or not its blocks have been followed.
    pub(super) fn export(&mut self, complete: Complete) {
        self.exported.push_back(complete);
    }
    /// Returns whether a chunk waits for an export or for a state.
    pub(super) fn is_exported(&self, name: &ChunkName) -> bool {
        self.exported.iter().any(|complete| complete.record.name == *name)
    }

    /// Takes out the chunks that meet a condition on the names of root and chunk. Returns the
    /// published ones, by their last blocks.
    pub(super) fn extract(
        &mut self,
        links: &Links,
        is_wanted: impl Fn(&ChunkName, &ChunkName) -> bool,
    ) -> Vec<(u32, BlockKey)> {
        self.exported.retain(|at| !is_wanted(&at.record.root.name(), &at.record.name));
        let is_out = |(_, key): &(u32, BlockKey)| {
            links.names(*key).is_some_and(|(root, name)| is_wanted(&root, &name))
        };
        self.lost.retain(|at, _| !is_out(at));
        let out: Vec<_> = self.published.iter().copied().filter(is_out).collect();
        for at in &out {
            self.published.remove(at);
        }
        out
    }

    /// Returns the name of the next chunk; `Some(None)` for one without a name any more.
    #[expect(clippy::option_option, reason = "nothing waits, or what waits has no name")]
    pub(super) fn next(&self, links: &Links) -> Option<Option<ChunkName>> {
        if let Some(complete) = self.exported.front() {
            return Some(Some(complete.record.name));
        }
        let (_, key) = self.published.first()?;
        Some(links.names(*key).map(|(_, name)| name))
    }

    pub(super) fn take_next(&mut self) -> Option<Next> {
        let exported = self.exported.pop_front().map(Next::Exported);
        exported.or_else(|| Some(Next::Published(self.published.pop_first()?.1)))
    }
}

impl Next {
    /// Returns the chunk and its blocks; `None` if one has left the device.
    pub(super) fn complete(self, links: &Links, pool: &BlockPool) -> Option<Complete> {
        match self {
            Self::Exported(complete) => Some(complete),
            Self::Published(key) => links.rebuild(key, pool),
        }
    }
}
