//! Token ids of a sequence, and the keys of the blocks they fill.

use crate::block::Ledger;
use crate::cache::state::StartOptions;
use crate::cache::state::shared_list::SharedList;
use crate::eviction::{Priority, Retention, Return};
use crate::invariant::Invariant;
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{recycle, to_u32, to_usize};
use crate::reuse::{BlockContent, BlockKey, Content, ContentSpan, ContentSpans, NamespaceId};
use crate::slot_map::SlotMap;

/// Tokens of one sequence and the keys of its blocks. Forks share both, except the last few.
///
/// The prompt is known from the start, so its keys are computed once, when it is looked up. Tokens
/// of a step are compared with it: if they differ from the prompt, they get new keys.
#[derive(Debug, Default, Clone)]
pub(crate) struct History {
    /// `None` for a sequence without reuse.
    space: Option<(NamespaceId, BlockKey)>,
    /// From position 0 on, as far as known.
    tokens: SharedList<u32, TOKENS_SHARED>,
    contents: ContentSpans,
    /// Keys of the full blocks of [`Self::tokens`], by chain, computed on demand.
    keys: Vec<SharedList<BlockKey, KEYS_SHARED>>,
    /// Leading blocks that are already published, by group.
    stored: Vec<u32>,
    /// A block that is never published, by group: [`NO_BLOCK`] for none.
    cut: Vec<u32>,
    retention: Option<Retention>,
    /// What the caller expects after the end of the sequence.
    pub(super) hint: Option<Return>,
    prompt_len: u32,
    /// Contents of the last requested block.
    parts: Vec<BlockContent>,
    /// Its tokens, if they span two chunks.
    straddling: Vec<u32>,
}

/// Chunk sizes of tokens and keys: forks share full chunks and copy the rest.
const TOKENS_SHARED: usize = 4096;
const KEYS_SHARED: usize = 512;
/// Not a block of any sequence.
const NO_BLOCK: u32 = u32::MAX;
const OF_GROUP: &str = "a live history has a number for every group";

impl History {
    /// Resets the history to a prompt. `chains` and `groups` are those of the cache.
    pub(crate) fn begin(
        &mut self,
        space: Option<(NamespaceId, BlockKey)>,
        (prompt, options): (&[u32], &StartOptions<'_>),
        (chains, groups): (usize, usize),
    ) {
        self.space = space;
        self.tokens.clear();
        self.contents.set(options.contents);
        self.retention = options.retention.cloned();
        self.hint = options.hint;
        self.prompt_len = to_u32(prompt.len());
        self.parts.clear();
        self.keys.iter_mut().for_each(SharedList::clear);
        self.keys.resize_with(chains, SharedList::default);
        self.stored.clear();
        self.stored.resize(groups, 0);
        self.cut.clear();
        self.cut.resize(groups, NO_BLOCK);
        if space.is_some() {
            self.tokens.extend_from_slice(prompt);
        }
    }

    /// Leaves the namespace.
    pub(crate) fn end(&mut self, ledger: &mut Ledger) {
        if let Some((id, _)) = self.space.take() {
            ledger.leave(id);
        }
    }

    /// Clears the history of a sequence that has left its namespace. Keeps a little memory for the
    /// next one.
    pub(crate) fn clear(&mut self) {
        assert!(self.space.is_none(), "a history that is forgotten has left its namespace");
        self.tokens.clear();
        self.keys.iter_mut().for_each(SharedList::clear);
        for list in [&mut self.straddling, &mut self.stored] {
            recycle(list);
        }
        self.contents.clear();
        recycle(&mut self.parts);
        self.retention = None;
        self.hint = None;
    }

    /// Copies the history of another sequence with `len` tokens, sharing most of it.
    pub(crate) fn fork_from(
        &mut self,
        parent: &Self,
        (len, maps): (u32, &[SlotMap]),
        ledger: &mut Ledger,
    ) {
        self.space = parent.space;
        if let Some((id, _)) = self.space {
            ledger.namespaces_mut().enter(id);
        }
        self.tokens = parent.tokens.fork(to_usize(len));
        self.contents.clone_from(&parent.contents);
        // Buffers of the previous sequence.
        self.parts.clear();
        self.retention.clone_from(&parent.retention);
        self.hint = parent.hint;
        self.prompt_len = parent.prompt_len;
        // Later keys belong to the rest of the parent's prompt.
        let known = to_u32(self.tokens.len());
        let keys = parent.keys.iter().zip(maps);
        let keys = keys.map(|(keys, map)| keys.fork(to_usize(map.full_blocks(known))));
        self.keys = keys.collect();
        self.stored.clone_from(&parent.stored);
        self.cut.clone_from(&parent.cut);
    }

    /// Returns the bytes of ids, keys and copies of straddling blocks.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let keys = self.keys.iter().map(SharedList::bytes);
        let lists = keys.chain([self.tokens.bytes(), list_bytes(&self.straddling)]);
        lists.sum()
    }

    /// Returns namespace and root, `None` without reuse.
    pub(crate) fn space(&self) -> Option<(NamespaceId, BlockKey)> {
        self.space
    }
    /// Returns the number of known tokens, including those of the prompt that no step has added
    /// yet.
    pub(crate) fn known(&self) -> u32 {
        to_u32(self.tokens.len())
    }
    /// Returns the first `len` known tokens, or all if there are fewer.
    pub(crate) fn tokens(&self, len: usize) -> Vec<u32> {
        let len = len.min(self.tokens.len());
        let mut copy = Vec::new();
        self.tokens.slice(0..len, &mut copy).invariant("the list has these tokens").to_vec()
    }
    /// Returns the contents of the placeholder tokens of the prompt.
    pub(crate) fn contents(&self) -> &[ContentSpan] {
        self.contents.list()
    }
    pub(crate) fn stored(&self, group: usize) -> u32 {
        self.stored.get(group).copied().invariant(OF_GROUP)
    }
    pub(crate) fn set_stored(&mut self, group: usize, blocks: u32) {
        *self.stored.get_mut(group).invariant(OF_GROUP) = blocks;
    }

    /// Returns whether a block is never published.
    pub(crate) fn is_cut(&self, group: usize, block: u32) -> bool {
        self.cut.get(group) == Some(&block)
    }
    /// Records that the sequence was truncated to `full` whole blocks. With `is_cut`, the block
    /// after them keeps quantised tokens and is not published when it is full again.
    pub(crate) fn cut_to(&mut self, group: usize, full: u32, is_cut: bool) {
        let stored = self.stored.get_mut(group).invariant(OF_GROUP);
        let cut = self.cut.get_mut(group).invariant(OF_GROUP);
        *stored = (*stored).min(full);
        if *cut >= full {
            *cut = NO_BLOCK;
        }
        if is_cut {
            // If there is such a block already, it is skipped together with the blocks before it.
            if *cut != NO_BLOCK {
                *stored = (*stored).max(*cut + 1);
            }
            *cut = full;
        }
    }

    /// Appends known tokens.
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        if self.space.is_some() {
            self.tokens.extend_from_slice(tokens);
        }
    }

    /// Records the tokens of a step at `position`; `None` if their ids are unknown.
    pub(crate) fn note(&mut self, position: u32, brought: Option<&[u32]>, maps: &[SlotMap]) {
        if self.space.is_none() {
            return;
        }
        let at = to_usize(position);
        match brought {
            Some(brought) if at == self.tokens.len() => self.tokens.extend_from_slice(brought),
            brought => self.revise(at, brought.unwrap_or_default(), brought.is_none(), maps),
        }
    }

    fn revise(&mut self, at: usize, brought: &[u32], is_unknown: bool, maps: &[SlotMap]) {
        if at > self.tokens.len() {
            return; // After unknown tokens.
        }
        let same = self.tokens.common(at, brought);
        let is_all = same == brought.len() && !is_unknown;
        if is_all {
            return;
        }
        let keep = at + same;
        self.tokens.truncate(keep);
        self.tokens.extend_from_slice(brought.get(same..).unwrap_or_default());
        for (keys, map) in self.keys.iter_mut().zip(maps) {
            keys.truncate(to_usize(map.full_blocks(to_u32(keep))));
        }
    }

    /// Returns the content of full block `index`; its tokens must be known.
    #[inline]
    pub(crate) fn full(&mut self, chain: usize, map: &SlotMap, index: u32) -> Option<Content<'_>> {
        let (namespace, root) = self.space?;
        let keys = self.keys.get_mut(chain)?;
        let begin = map.tokens(index);
        let end = map.tokens(index + 1);
        let parent = index.checked_sub(1).map_or(Some(root), |i| keys.get(to_usize(i)))?;
        let range = to_usize(begin)..to_usize(end);
        let tokens = self.tokens.slice(range, &mut self.straddling)?;
        if !self.contents.is_empty() {
            self.contents.cut((begin, end), &mut self.parts);
        }
        let key = keys.get(to_usize(index)).unwrap_or_else(|| {
            let key = parent.child(tokens, &self.parts);
            keys.push(key);
            key
        });
        Some(Content { key, parent, namespace, index, tokens, contents: &self.parts })
    }

    /// Passes the contents of the first `count` full blocks to `go_on`, one after another, until it
    /// returns false.
    pub(crate) fn each_full(
        &mut self,
        chain: usize,
        map: &SlotMap,
        count: u32,
        mut go_on: impl FnMut(&Content<'_>) -> bool,
    ) {
        let plain = self.keys.get_mut(chain).filter(|_| map.is_plain() && self.contents.is_empty());
        let (Some((namespace, root)), Some(keys)) = (self.space, plain) else {
            (0..count).all(|index| self.full(chain, map, index).is_some_and(|c| go_on(&c)));
            return;
        };
        // The common case of a prompt without contents.
        let (mut parent, contents) = (root, &[][..]);
        let size = to_usize(map.block_size());
        let mut begin = 0_usize;
        for index in 0..count {
            let end = begin + size;
            let Some(tokens) = self.tokens.slice(begin..end, &mut self.straddling) else {
                return;
            };
            begin = end;
            let key = keys.get(to_usize(index)).unwrap_or_else(|| {
                let key = parent.child(tokens, contents);
                keys.push(key);
                key
            });
            if !go_on(&Content { key, parent, namespace, index, tokens, contents }) {
                return;
            }
            parent = key;
        }
    }

    /// Computes the keys of the first `blocks` full blocks.
    pub(crate) fn make_keys(&mut self, chain: usize, map: &SlotMap, blocks: u32) {
        for index in to_u32(self.keys.get(chain).map_or(0, SharedList::len))..blocks {
            if self.full(chain, map, index).is_none() {
                break;
            }
        }
    }

    /// Returns the content of block `index` of which `end` tokens of the sequence are certain,
    /// fewer than it can hold.
    pub(crate) fn partial(
        &mut self,
        chain: usize,
        map: &SlotMap,
        (index, end): (u32, u32),
    ) -> Option<Content<'_>> {
        let (namespace, _) = self.space?;
        self.make_keys(chain, map, index);
        let parent = self.parent(chain, index)?;
        let begin = map.tokens(index);
        let range = to_usize(begin)..to_usize(end);
        let tokens = self.tokens.slice(range, &mut self.straddling)?;
        self.contents.cut((begin, end), &mut self.parts);
        let key = parent.child(tokens, &self.parts);
        Some(Content { key, parent, namespace, index, tokens, contents: &self.parts })
    }

    /// Returns the key before block `index`; known if the blocks before were requested.
    pub(crate) fn parent(&self, chain: usize, index: u32) -> Option<BlockKey> {
        let (_, root) = self.space?;
        match index.checked_sub(1) {
            None => Some(root),
            Some(before) => self.keys.get(chain)?.get(to_usize(before)),
        }
    }

    /// Returns whether the sequence sets priorities for its blocks.
    pub(crate) fn has_retention(&self) -> bool {
        self.retention.is_some()
    }
    /// Returns the priority of the block that begins at `position`.
    pub(crate) fn priority(&self, position: u32) -> Priority {
        let retention = self.retention.as_ref();
        retention.map_or_else(Priority::default, |all| all.priority_at(position, self.prompt_len))
    }
}
