//! Blocks with the same parent, for prompts that agree with one of them in part.
use hashbrown::hash_table;

use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};
use crate::reuse::index::{Entry, NONE, PrefixIndex, hash};
use crate::reuse::{BlockContent, BlockKey, Content, NamespaceId};

/// Siblings that a search for a common beginning visits, newest first: a system prompt may have
/// thousands, and the search must not cost more than it saves.
const SIBLINGS_MAX: usize = 32;

impl PrefixIndex {
    /// Finds, among the blocks after `parent`, the one that agrees with the most leading `tokens`,
    /// some of which stand for `contents`. Returns it with the number of tokens before the first
    /// difference in either.
    pub fn longest_beginning(
        &self,
        parent: BlockKey,
        namespace: NamespaceId,
        (tokens, contents): (&[u32], &[BlockContent]),
    ) -> Option<(BlockId, u32)> {
        let mut best = None;
        for (block, entry) in self.siblings(self.first_child(parent)) {
            if entry.namespace == namespace && !entry.is_unwritten {
                let common = self.common((block, entry), tokens, contents);
                if common > best.map_or(0, |(_, most)| most) {
                    best = Some((BlockId(block), common));
                }
            }
        }
        best
    }

    /// Finds, among the blocks after `parent`, the one with the most tokens that are all at the
    /// beginning of `tokens`, some of which stand for `contents`. Returns it with their number.
    pub(crate) fn longest_whole(
        &self,
        parent: BlockKey,
        namespace: NamespaceId,
        (tokens, contents): (&[u32], &[BlockContent]),
    ) -> Option<(BlockId, u32)> {
        let siblings = self.siblings(self.first_child(parent)).filter(|(block, entry)| {
            entry.namespace == namespace
                && !entry.is_unwritten
                && self.common((*block, entry), tokens, contents) == entry.len
        });
        let longest = siblings.max_by_key(|(_, entry)| entry.len);
        longest.map(|(block, entry)| (BlockId(block), entry.len))
    }

    /// Returns a block whose content begins with all of `content`, whether it continues or not.
    pub(super) fn continued_by(&self, content: &Content<'_>) -> Option<BlockId> {
        let len = to_u32(content.tokens.len());
        let found = self.siblings(self.first_child(content.parent)).find(|&(block, entry)| {
            entry.namespace == content.namespace
                && self.common((block, entry), content.tokens, content.contents) == len
        });
        found.map(|(block, _)| BlockId(block))
    }

    /// Returns a partial block whose whole content `block` begins with.
    pub(crate) fn beginning_of(&self, block: BlockId) -> Option<BlockId> {
        let own = self.entry(block.0);
        let [newer, older] = own.siblings;
        if [newer, older] == [NONE; 2] {
            return None; // Nearly every block after the first of a prompt.
        }
        let tokens = self.tokens(block.0, own);
        let contents = self.contents_of(block.0, own);
        let found = self.siblings(self.first_child(own.parent)).find(|&(other, entry)| {
            entry.is_partial
                && other != block.0
                && entry.namespace == own.namespace
                && self.common((other, entry), tokens, contents) == entry.len
        });
        found.map(|(block, _)| BlockId(block))
    }

    /// Makes a block with content the newest child of its parent.
    pub(crate) fn renew(&mut self, block: BlockId) {
        let entry = *self.entry(block.0);
        if entry.len > 0 && entry.siblings[0] != NONE {
            self.unlink(block.0, &entry);
            self.link(block.0, entry.parent);
        }
    }

    /// Iterates over a block and its older siblings, up to the limit of a search.
    fn siblings(&self, newest: u32) -> impl Iterator<Item = (u32, &Entry)> + '_ {
        let mut next = newest;
        let each = std::iter::from_fn(move || {
            let block = (next != NONE).then_some(next)?;
            let found = (block, self.entry(block));
            [_, next] = found.1.siblings;
            Some(found)
        });
        each.take(SIBLINGS_MAX)
    }

    /// Counts the leading tokens of a block that agree with `tokens`, and their contents with
    /// `contents`.
    fn common(
        &self,
        (block, entry): (u32, &Entry),
        tokens: &[u32],
        contents: &[BlockContent],
    ) -> u32 {
        let pairs = self.tokens(block, entry).iter().zip(tokens);
        let common = to_u32(pairs.take_while(|(a, b)| a == b).count());
        if common == 0 || (!entry.has_contents && contents.is_empty()) {
            return common;
        }
        common.min(BlockContent::first_difference(self.contents_of(block, entry), contents))
    }

    pub(super) fn first_child(&self, parent: BlockKey) -> u32 {
        let is_child = |child: &u32| self.entry(*child).parent == parent;
        let child = self.children.find(hash(parent), is_child);
        child.copied().unwrap_or(NONE)
    }

    /// Makes a block the newest child of its parent.
    pub(super) fn link(&mut self, block: u32, parent: BlockKey) {
        let entries = &self.entries;
        let parent_of = |block: &u32| entries[to_usize(*block)].parent;
        let hash_of = |block: &u32| hash(parent_of(block));
        let is_child = |child: &u32| parent_of(child) == parent;
        let older = match self.children.entry(hash(parent), is_child, hash_of) {
            hash_table::Entry::Occupied(mut newest) => std::mem::replace(newest.get_mut(), block),
            hash_table::Entry::Vacant(none) => {
                none.insert(block);
                NONE
            }
        };
        if older != NONE {
            self.entry_mut(older).siblings[0] = block;
        }
        self.entry_mut(block).siblings = [NONE, older];
    }

    pub(super) fn unlink(&mut self, block: u32, entry: &Entry) {
        let [newer, older] = entry.siblings;
        if newer == NONE {
            self.set_first_child(entry.parent, block, (older != NONE).then_some(older));
        } else {
            self.entry_mut(newer).siblings[1] = older;
        }
        if older != NONE {
            self.entry_mut(older).siblings[0] = newer;
        }
    }

    /// Replaces `from` as the newest child of a parent by `to`, if any.
    fn set_first_child(&mut self, parent: BlockKey, from: u32, to: Option<u32>) {
        if let Ok(mut found) = self.children.find_entry(hash(parent), |child| *child == from) {
            match to {
                Some(to) => *found.get_mut() = to,
                None => drop(found.remove()),
            }
        }
    }
}
