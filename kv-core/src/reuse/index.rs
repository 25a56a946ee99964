//! Prefix index: finds the block that holds given content.
mod siblings;

use hashbrown::{HashMap, HashTable};

use crate::ids::BlockId;
use crate::invariant::Invariant;
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_usize};
use crate::priority::Priority;
use crate::reuse::{BlockContent, BlockKey, NamespaceId};

/// Not a block.
const NONE: u32 = u32::MAX;

/// Everything that determines the K and V of one block, and its key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content<'a> {
    /// Hash of all fields below and of what comes before.
    pub(crate) key: BlockKey,
    /// Key of the block before, the root for the first.
    pub(crate) parent: BlockKey,
    /// Namespace of salt and adapter.
    pub(crate) namespace: NamespaceId,
    /// Index of the block in its prompt.
    pub(crate) index: u32,
    /// The block's tokens.
    pub(crate) tokens: &'a [u32],
    /// Contents of placeholder tokens.
    pub(crate) contents: &'a [BlockContent],
}

/// Result of removing a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Removed {
    /// Namespace of the block.
    pub(crate) namespace: NamespaceId,
    /// The key of a full block, which cannot be found any more.
    pub(crate) gone: Option<BlockKey>,
    /// Whether the open step had yet to write the block.
    pub(crate) is_unwritten: bool,
}

/// Result of offering content, with the block that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offered {
    /// The block has it from now on.
    New,
    /// This block has the content already, or continues it: nothing changed.
    Known(BlockId),
    /// The same as [`Inserted::Refused`].
    Refused,
}

/// One indexed block. `len` is 0 for a block without content.
#[derive(Debug, Clone, Copy)]
struct Entry {
    key: BlockKey,
    parent: BlockKey,
    namespace: NamespaceId,
    index: u32,
    len: u32,
    has_contents: bool,
    /// Whether the block has fewer tokens than a full one, so that it is found only as a sibling.
    is_partial: bool,
    /// Whether the open step has yet to write the block: it can be shared, but not copied in part.
    is_unwritten: bool,
    priority: Priority,
    /// Neighbours among the blocks with the same parent: newer, older.
    siblings: [u32; 2],
}

const EMPTY: Entry = Entry {
    key: BlockKey(0),
    parent: BlockKey(0),
    namespace: NamespaceId::NONE,
    index: 0,
    len: 0,
    has_contents: false,
    is_partial: false,
    is_unwritten: false,
    priority: Priority { level: Priority::DEFAULT_LEVEL, duration: None },
    siblings: [NONE; 2],
};

/// The index of blocks by content.
///
/// Invariants: no two blocks have the same content; a block is under its key and among its parent's
/// children exactly if it has content.
#[derive(Debug, Clone)]
pub struct PrefixIndex {
    block_tokens: usize,
    entries: Vec<Entry>,
    /// `block_tokens` for every block.
    tokens: Vec<u32>,
    /// Contents of the few blocks that have any.
    contents: HashMap<u32, Box<[BlockContent]>>,
    /// The block of every key.
    keys: HashTable<u32>,
    /// Newest child of every parent.
    children: HashTable<u32>,
    len: usize,
}

/// One indexed block, for listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexedBlock<'a> {
    /// The block.
    pub block: BlockId,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before, the root for the first.
    pub parent: BlockKey,
    /// Salt and adapter of its prompt:
    /// [`CacheState::namespace`](crate::scheduling::CacheState::namespace).
    pub namespace: NamespaceId,
    /// Index of the block in its prompt.
    pub index: u32,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Contents of placeholder tokens.
    pub contents: &'a [BlockContent],
    /// Its priority.
    pub priority: Priority,
    /// Whether the block has fewer tokens than a full one.
    pub is_partial: bool,
    /// Whether the open step has yet to write the block.
    pub is_unwritten: bool,
}

fn hash(key: BlockKey) -> u64 {
    // The key is a hash already.
    u64::try_from(key.0 & u128::from(u64::MAX)).unwrap_or(0)
}

impl PrefixIndex {
    /// Creates the index for blocks `0..num_blocks` of at most `block_tokens` tokens.
    pub(crate) fn new(num_blocks: u32, block_tokens: u32) -> Self {
        let (blocks, block_tokens) = (to_usize(num_blocks), to_usize(block_tokens));
        Self {
            block_tokens,
            entries: vec![EMPTY; blocks],
            tokens: vec![0; blocks * block_tokens],
            contents: HashMap::new(),
            keys: HashTable::with_capacity(blocks),
            children: HashTable::with_capacity(blocks),
            len: 0,
        }
    }

    /// Returns the bytes of host memory, for blocks without contents.
    #[cfg(test)]
    pub(crate) fn host_bytes(&self) -> usize {
        assert!(self.contents.is_empty(), "these are not counted");
        let tables = [&self.keys, &self.children].map(HashTable::allocation_size);
        let arrays = [list_bytes(&self.entries), list_bytes(&self.tokens)];
        tables.iter().chain(&arrays).sum()
    }

    /// Returns the number of blocks with content.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Returns whether no block has content.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Returns one block, if it has content.
    pub(crate) fn get(&self, block: BlockId) -> Option<IndexedBlock<'_>> {
        let entry = self.entries.get(to_usize(block.0)).filter(|entry| entry.len > 0)?;
        Some(IndexedBlock {
            block,
            key: entry.key,
            parent: entry.parent,
            namespace: entry.namespace,
            index: entry.index,
            tokens: self.tokens(block.0, entry),
            contents: self.contents_of(block.0, entry),
            priority: entry.priority,
            is_partial: entry.is_partial,
            is_unwritten: entry.is_unwritten,
        })
    }
    /// Returns the full block with a key.
    pub(crate) fn with_key(&self, key: BlockKey) -> Option<IndexedBlock<'_>> {
        self.get(BlockId(self.full_block_of_key(key)?))
    }
    /// Iterates over every block with content, ordered by ID.
    pub fn iter(&self) -> impl Iterator<Item = IndexedBlock<'_>> + '_ {
        (0..to_u32(self.entries.len())).filter_map(|block| self.get(BlockId(block)))
    }

    /// Returns the full block that holds exactly this content.
    #[inline]
    pub(crate) fn find(&self, content: &Content<'_>) -> Option<BlockId> {
        let block = self.full_block_of_key(content.key)?;
        self.confirms(block, content).then_some(BlockId(block))
    }
    #[inline]
    fn full_block_of_key(&self, key: BlockKey) -> Option<u32> {
        self.block_of_key(key).filter(|block| !self.entry(*block).is_partial)
    }
    #[inline]
    fn block_of_key(&self, key: BlockKey) -> Option<u32> {
        self.keys.find(hash(key), |block| self.entry(*block).key == key).copied()
    }
    #[inline]
    fn entry(&self, block: u32) -> &Entry {
        &self.entries[to_usize(block)]
    }
    #[inline]
    fn entry_mut(&mut self, block: u32) -> &mut Entry {
        &mut self.entries[to_usize(block)]
    }
    /// Returns whether any block directly continues the content of this key.
    pub(crate) fn has_children(&self, key: BlockKey) -> bool {
        self.first_child(key) != NONE
    }

    /// Inserts a block under its key and among its siblings. A partial block can be found only
    /// among its siblings.
    pub(crate) fn offer(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        priority: Priority,
        is_partial: bool,
    ) -> Offered {
        let at = to_usize(block.0) * self.block_tokens;
        let len = content.tokens.len();
        if len == 0 || len > self.block_tokens {
            return Offered::Refused;
        }
        let has_content = self.entry(block.0).len > 0;
        if let Some(twin) = self.block_of_key(content.key) {
            let is_known = self.confirms(twin, content) && (!has_content || twin == block.0);
            return if is_known { Offered::Known(BlockId(twin)) } else { Offered::Refused };
        }
        if has_content {
            return Offered::Refused;
        }
        if is_partial && let Some(longer) = self.continued_by(content) {
            return Offered::Known(longer);
        }
        self.tokens[at..at + len].copy_from_slice(content.tokens);
        *self.entry_mut(block.0) = Entry {
            key: content.key,
            parent: content.parent,
            namespace: content.namespace,
            index: content.index,
            len: to_u32(len),
            has_contents: !content.contents.is_empty(),
            is_partial,
            priority,
            ..EMPTY
        };
        if !content.contents.is_empty() {
            self.contents.insert(block.0, content.contents.into());
        }
        self.len += 1;
        self.link(block.0, content.parent);
        let entries = &self.entries;
        let hash_of = |block: &u32| hash(entries[to_usize(*block)].key);
        self.keys.insert_unique(hash(content.key), block.0, hash_of);
        Offered::New
    }

    /// Removes a block's content; `None` if it has none.
    pub(crate) fn remove(&mut self, block: BlockId) -> Option<Removed> {
        let entry = *self.entry(block.0);
        if entry.len == 0 {
            return None;
        }
        self.unlink(block.0, &entry);
        if entry.has_contents {
            self.contents.remove(&block.0);
        }
        self.len -= 1;
        self.remove_key(block, entry.key);
        *self.entry_mut(block.0) = EMPTY;
        Some(Removed {
            namespace: entry.namespace,
            gone: (!entry.is_partial).then_some(entry.key),
            is_unwritten: entry.is_unwritten,
        })
    }

    fn remove_key(&mut self, block: BlockId, key: BlockKey) {
        let found = self.keys.find_entry(hash(key), |other| *other == block.0);
        found.invariant("a block with content is under its key").remove();
    }

    /// Records that the open step has yet to write a block with content.
    pub(crate) fn set_unwritten(&mut self, block: BlockId) {
        let entry = self.entry_mut(block.0);
        debug_assert!(entry.len > 0, "block {block} has no content to write");
        entry.is_unwritten = true;
    }

    /// Records that a block is written and returns its key; `None` for one that was written before
    /// or has no content.
    pub(crate) fn set_written(&mut self, block: BlockId) -> Option<BlockKey> {
        let entry = self.entry_mut(block.0);
        std::mem::take(&mut entry.is_unwritten).then_some(entry.key)
    }

    /// Returns whether the open step has yet to write a block with content.
    pub(crate) fn is_unwritten(&self, block: BlockId) -> bool {
        self.entry(block.0).is_unwritten
    }

    /// Sets another priority and returns the one before, if the block has content.
    pub(crate) fn set_priority(&mut self, block: BlockId, priority: Priority) -> Option<Priority> {
        let entry = self.entry_mut(block.0);
        (entry.len > 0).then(|| std::mem::replace(&mut entry.priority, priority))
    }

    #[inline]
    fn tokens(&self, block: u32, entry: &Entry) -> &[u32] {
        let at = to_usize(block) * self.block_tokens;
        &self.tokens[at..at + to_usize(entry.len)]
    }

    #[inline]
    fn confirms(&self, block: u32, content: &Content<'_>) -> bool {
        let entry = self.entry(block);
        entry.parent == content.parent
            && entry.namespace == content.namespace
            && entry.has_contents != content.contents.is_empty()
            && self.tokens(block, entry) == content.tokens
            && self.contents_of(block, entry) == content.contents
    }

    /// Returns the contents of a block's tokens.
    #[inline]
    fn contents_of(&self, block: u32, entry: &Entry) -> &[BlockContent] {
        if !entry.has_contents {
            return &[];
        }
        self.contents.get(&block).invariant("a block that has contents lists them")
    }
}
