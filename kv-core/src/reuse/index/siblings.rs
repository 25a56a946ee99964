//! Blocks that come behind the same content, for prompts that agree with one of them in part.
use hashbrown::hash_table;

use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};
use crate::reuse::index::{Entry, NONE, PrefixIndex, hash};
use crate::reuse::{BlockKey, NamespaceId};

/// Siblings that a search for a common beginning looks at, newest first: a system prompt may have
/// thousands, and the search must not cost more than it saves.
const SIBLINGS_MAX: usize = 32;

impl PrefixIndex {
    /// Among the blocks behind `parent`, the one whose tokens begin most like `tokens`, and how
    /// many agree. Blocks with [contents](crate::reuse::BlockContent) do not count.
    pub fn longest_common(
        &self,
        parent: BlockKey,
        namespace: NamespaceId,
        tokens: &[u32],
    ) -> Option<(BlockId, u32)> {
        let mut best = None;
        let mut next = self.first_child(parent);
        for _ in 0..SIBLINGS_MAX {
            let Some(entry) = self.entries.get(to_usize(next)) else {
                break;
            };
            if entry.namespace == namespace && !entry.has_contents {
                let pairs = self.tokens(next, entry).iter().zip(tokens);
                let common = to_u32(pairs.take_while(|(a, b)| a == b).count());
                if common > best.map_or(0, |(_, most)| most) {
                    best = Some((BlockId(next), common));
                }
            }
            let [_, older] = entry.siblings;
            next = older;
        }
        best
    }

    pub(super) fn first_child(&self, parent: BlockKey) -> u32 {
        let parent_of = |block: &u32| self.entries.get(to_usize(*block)).map(|entry| entry.parent);
        let child = self.children.find(hash(parent), |child| parent_of(child) == Some(parent));
        child.copied().unwrap_or(NONE)
    }

    /// Makes a block the newest child of its parent.
    pub(super) fn adopt(&mut self, block: u32, parent: BlockKey) {
        let entries = &self.entries;
        let parent_of = |block: &u32| entries.get(to_usize(*block)).map(|entry| entry.parent);
        let hash_of = |block: &u32| parent_of(block).map_or(0, hash);
        let is_child = |child: &u32| parent_of(child) == Some(parent);
        let older = match self.children.entry(hash(parent), is_child, hash_of) {
            hash_table::Entry::Occupied(mut newest) => std::mem::replace(newest.get_mut(), block),
            hash_table::Entry::Vacant(none) => {
                none.insert(block);
                NONE
            }
        };
        if let Some(entry) = self.entries.get_mut(to_usize(older)) {
            entry.siblings[0] = block;
        }
        if let Some(entry) = self.entries.get_mut(to_usize(block)) {
            entry.siblings = [NONE, older];
        }
    }

    pub(super) fn disown(&mut self, block: u32, entry: &Entry) {
        let [newer, older] = entry.siblings;
        if let Some(entry) = self.entries.get_mut(to_usize(newer)) {
            entry.siblings[1] = older;
        } else {
            self.set_first_child(entry.parent, block, (older != NONE).then_some(older));
        }
        if let Some(entry) = self.entries.get_mut(to_usize(older)) {
            entry.siblings[0] = newer;
        }
    }

    /// Makes `to`, if any, the newest child of a parent in the place of `from`.
    fn set_first_child(&mut self, parent: BlockKey, from: u32, to: Option<u32>) {
        if let Ok(mut found) = self.children.find_entry(hash(parent), |child| *child == from) {
            match to {
                Some(to) => *found.get_mut() = to,
                None => drop(found.remove()),
            }
        }
    }
}
