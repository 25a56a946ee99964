//! Finds the block that holds given content.
mod siblings;

use hashbrown::{HashMap, HashTable};

use crate::eviction::Priority;
use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};
use crate::reuse::{BlockContent, BlockKey, NamespaceId};

/// No block.
const NONE: u32 = u32::MAX;

/// What decides the K and V of one block, and its name.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct Content<'a> {
    /// Hash of everything below and of what comes before.
    pub key: BlockKey,
    /// Key of the block before, the root for the first.
    pub parent: BlockKey,
    /// Salt and adapter.
    pub namespace: NamespaceId,
    /// Index of the block in its prompt.
    pub index: u32,
    /// The block's tokens.
    pub tokens: &'a [u32],
    /// What lies behind placeholder tokens.
    pub contents: &'a [BlockContent],
}

/// What became of content offered to the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "new, there already, or impossible")]
pub enum Inserted {
    /// The first block with this content.
    New,
    /// Another block has it too; both are kept, so that one may go.
    Duplicate,
    /// Other content has this key, or the block has content already: nothing changed.
    Refused,
}

/// What the index lost with a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts about one removal")]
pub struct Removed {
    /// Namespace of the block.
    pub namespace: NamespaceId,
    /// The key, where no other block has it.
    pub gone: Option<BlockKey>,
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
    /// Fewer tokens than a block holds: found as a sibling only.
    is_partial: bool,
    priority: Priority,
    /// Next block of the same content.
    same: u32,
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
    priority: Priority { level: Priority::DEFAULT_LEVEL, duration: None },
    same: NONE,
    siblings: [NONE; 2],
};

/// Blocks by content.
///
/// Invariants: every block under one key has the same content; a block is under its key exactly
/// when it is full, and among its parent's children exactly when it has content.
#[derive(Debug, Clone)]
pub struct PrefixIndex {
    block_tokens: usize,
    entries: Vec<Entry>,
    /// `block_tokens` for every block.
    tokens: Vec<u32>,
    /// Of the few blocks that have any.
    contents: HashMap<u32, Box<[BlockContent]>>,
    /// First block of every key.
    keys: HashTable<u32>,
    /// Newest child of every parent.
    children: HashTable<u32>,
    len: usize,
}

/// One indexed block, for those who list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexedBlock<'a> {
    /// The block.
    pub block: BlockId,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before, the root for the first.
    pub parent: BlockKey,
    /// Index of the block in its prompt.
    pub index: u32,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// What its owner asked for it.
    pub priority: Priority,
    /// Whether it holds fewer tokens than it could.
    pub is_partial: bool,
}

fn hash(key: BlockKey) -> u64 {
    // The key is a hash already.
    u64::try_from(key.0 & u128::from(u64::MAX)).unwrap_or(0)
}

impl PrefixIndex {
    /// For blocks `0..num_blocks` of at most `block_tokens` tokens.
    pub fn new(num_blocks: u32, block_tokens: u32) -> Self {
        let (blocks, block_tokens) = (to_usize(num_blocks), to_usize(block_tokens));
        Self {
            block_tokens,
            entries: vec![EMPTY; blocks],
            tokens: vec![0; blocks.saturating_mul(block_tokens)],
            contents: HashMap::new(),
            keys: HashTable::with_capacity(blocks),
            children: HashTable::with_capacity(blocks),
            len: 0,
        }
    }

    /// Tokens that a block holds at most.
    pub(crate) fn block_tokens(&self) -> usize {
        self.block_tokens
    }
    /// Blocks with content.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether no block has content.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Whether a block has content.
    #[inline]
    pub fn contains(&self, block: BlockId) -> bool {
        self.entries.get(to_usize(block.0)).is_some_and(|entry| entry.len > 0)
    }
    /// One block, if it has content.
    pub fn get(&self, block: BlockId) -> Option<IndexedBlock<'_>> {
        let entry = self.entries.get(to_usize(block.0)).filter(|entry| entry.len > 0)?;
        Some(IndexedBlock {
            block,
            key: entry.key,
            parent: entry.parent,
            index: entry.index,
            tokens: self.tokens(block.0, entry),
            priority: entry.priority,
            is_partial: entry.is_partial,
        })
    }
    /// Every block with content, in order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = IndexedBlock<'_>> + '_ {
        (0..to_u32(self.entries.len())).filter_map(|block| self.get(BlockId(block)))
    }

    /// The block that holds exactly this content; of several the one that came first.
    #[inline]
    pub fn find(&self, content: &Content<'_>) -> Option<BlockId> {
        let block = self.first_of_key(content.key)?;
        self.confirms(block, content).then_some(BlockId(block))
    }
    /// Whether any block has this key.
    pub fn contains_key(&self, key: BlockKey) -> bool {
        self.first_of_key(key).is_some()
    }
    #[inline]
    fn first_of_key(&self, key: BlockKey) -> Option<u32> {
        self.keys.find(hash(key), |block| self.key(*block) == key).copied()
    }
    /// Whether any block comes directly behind the content of this key.
    pub fn has_children(&self, key: BlockKey) -> bool {
        self.first_child(key) != NONE
    }

    /// Puts a block under its key, or beside its siblings alone when it has fewer tokens than
    /// blocks hold.
    pub fn insert(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        priority: Priority,
    ) -> Inserted {
        let is_partial = content.tokens.len() < self.block_tokens;
        self.insert_as(block, content, priority, is_partial)
    }

    /// As [`Self::insert`]; `is_partial` where a whole block holds fewer tokens than others because
    /// some take more room.
    pub(crate) fn insert_as(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        priority: Priority,
        is_partial: bool,
    ) -> Inserted {
        let at = to_usize(block.0).saturating_mul(self.block_tokens);
        let len = content.tokens.len();
        if len == 0 || len > self.block_tokens {
            return Inserted::Refused;
        }
        if self.entries.get(to_usize(block.0)).is_none_or(|entry| entry.len > 0) {
            return Inserted::Refused;
        }
        // A partial block is found among its siblings alone.
        let twin = if is_partial { None } else { self.first_of_key(content.key) };
        if twin.is_some_and(|twin| !self.confirms(twin, content)) {
            return Inserted::Refused;
        }
        let Some(room) = self.tokens.get_mut(at..at.saturating_add(len)) else {
            return Inserted::Refused;
        };
        room.copy_from_slice(content.tokens);
        if let Some(entry) = self.entries.get_mut(to_usize(block.0)) {
            *entry = Entry {
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
        }
        if !content.contents.is_empty() {
            self.contents.insert(block.0, content.contents.into());
        }
        self.len = self.len.saturating_add(1);
        self.adopt(block.0, content.parent);
        if is_partial {
            return Inserted::New;
        }
        let Some(first) = twin else {
            let entries = &self.entries;
            let key_of = |block: &u32| entries.get(to_usize(*block)).map_or(BlockKey(0), |e| e.key);
            self.keys.insert_unique(hash(content.key), block.0, |block| hash(key_of(block)));
            return Inserted::New;
        };
        let mut last = first;
        while let Some(next) = self.same(last) {
            last = next;
        }
        if let Some(entry) = self.entries.get_mut(to_usize(last)) {
            entry.same = block.0;
        }
        Inserted::Duplicate
    }

    /// Forgets a block's content; `None` if it has none.
    pub fn remove(&mut self, block: BlockId) -> Option<Removed> {
        let entry = *self.entries.get(to_usize(block.0)).filter(|entry| entry.len > 0)?;
        self.disown(block.0, &entry);
        if entry.has_contents {
            self.contents.remove(&block.0);
        }
        self.len = self.len.saturating_sub(1);
        let gone = (!entry.is_partial && self.unkey(block.0, &entry)).then_some(entry.key);
        if let Some(entry) = self.entries.get_mut(to_usize(block.0)) {
            *entry = EMPTY;
        }
        Some(Removed { namespace: entry.namespace, gone })
    }

    /// Notes another priority; the one before, if the block has content.
    pub fn set_priority(&mut self, block: BlockId, priority: Priority) -> Option<Priority> {
        let entry = self.entries.get_mut(to_usize(block.0)).filter(|entry| entry.len > 0)?;
        Some(std::mem::replace(&mut entry.priority, priority))
    }

    #[inline]
    fn key(&self, block: u32) -> BlockKey {
        self.entries.get(to_usize(block)).map_or(BlockKey(0), |entry| entry.key)
    }

    #[inline]
    fn tokens(&self, block: u32, entry: &Entry) -> &[u32] {
        let at = to_usize(block).saturating_mul(self.block_tokens);
        self.tokens.get(at..at.saturating_add(to_usize(entry.len))).unwrap_or_default()
    }

    #[inline]
    fn confirms(&self, block: u32, content: &Content<'_>) -> bool {
        let Some(entry) = self.entries.get(to_usize(block)) else {
            return false;
        };
        entry.parent == content.parent
            && entry.namespace == content.namespace
            && entry.has_contents != content.contents.is_empty()
            && self.tokens(block, entry) == content.tokens
            && (!entry.has_contents
                || self.contents.get(&block).is_some_and(|have| **have == *content.contents))
    }

    fn same(&self, block: u32) -> Option<u32> {
        let same = self.entries.get(to_usize(block)).map_or(NONE, |entry| entry.same);
        (same != NONE).then_some(same)
    }

    /// Takes a block from under its key; whether it was the only one.
    fn unkey(&mut self, block: u32, entry: &Entry) -> bool {
        let entries = &self.entries;
        let key_of = |block: &u32| entries.get(to_usize(*block)).map_or(BlockKey(0), |e| e.key);
        let found = self.keys.find_entry(hash(entry.key), |other| key_of(other) == entry.key);
        let Ok(mut found) = found else {
            return false;
        };
        if *found.get() == block {
            if entry.same == NONE {
                found.remove();
                return true;
            }
            *found.get_mut() = entry.same;
            return false;
        }
        let mut before = *found.get();
        while let Some(next) = self.same(before) {
            if next == block {
                if let Some(before) = self.entries.get_mut(to_usize(before)) {
                    before.same = entry.same;
                }
                break;
            }
            before = next;
        }
        false
    }
}
