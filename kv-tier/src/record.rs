//! The expected content of one chunk, owned.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::GroupId;
use kv_core::events::{EventKind, StoredBlock, Tier};
use kv_core::eviction::Priority;
use kv_core::num::to_usize;
use kv_core::reuse::BlockKey;

use crate::chunk::{ChunkContent, Expectation};
use crate::identity::ChunkRoot;
use crate::name::ChunkName;
use crate::store::ChunkAddress;

/// The expected content of a chunk, owned for threads that outlast the prompt, and its keys.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) root: Arc<ChunkRoot>,
    pub(crate) index: u32,
    pub(crate) parent: ChunkName,
    pub(crate) name: ChunkName,
    /// Key of the block before the first.
    pub(crate) parent_key: BlockKey,
    /// Keys of all blocks.
    pub(crate) keys: Box<[BlockKey]>,
    pub(crate) tokens: Box<[u32]>,
    pub(crate) contents: Box<[ChunkContent]>,
    /// The lowest priority of the blocks.
    pub(crate) priority: Priority,
    /// Set when the chunk must not go where it is on its way to.
    pub(crate) is_forgotten: AtomicBool,
}

impl Record {
    pub(crate) fn expectation(&self) -> Expectation<'_> {
        Expectation {
            root: &self.root,
            index: self.index,
            parent: self.parent,
            name: self.name,
            last_key: self
                .root
                .last_key(&self.name, self.keys.last().copied().unwrap_or(self.parent_key)),
            tokens: &self.tokens,
            contents: &self.contents,
        }
    }

    /// Stops the chunk on its way. A chunk that is computed anew has its own record.
    pub(crate) fn forget(&self) {
        self.is_forgotten.store(true, Ordering::Relaxed);
    }
    pub(crate) fn is_forgotten(&self) -> bool {
        self.is_forgotten.load(Ordering::Relaxed)
    }

    pub(crate) fn address(&self) -> ChunkAddress {
        ChunkAddress { root: self.root.name(), name: self.name }
    }
    pub(crate) fn group(&self) -> GroupId {
        self.root.spec().group()
    }

    /// Returns the index of the last block in its prompt.
    pub(crate) fn last_block(&self) -> u32 {
        let spec = self.root.spec();
        spec.first_block(self.index) + spec.blocks() - 1
    }

    /// Returns the number of tokens up to the end of the chunk.
    pub(crate) fn end(&self) -> u32 {
        self.root.spec().span(self.index).end
    }

    /// Returns the announcements that a tier has the blocks of this chunk.
    pub(crate) fn stored(&self, tier: Tier) -> impl Iterator<Item = EventKind> + '_ {
        let spec = self.root.spec();
        let begin = spec.span(self.index).start;
        let mut parent = self.parent_key;
        (0_u32..).zip(&self.keys).map(move |(block, &key)| {
            let span = spec.block_span(self.index, block);
            let at = |position: u32| to_usize(position - begin);
            let tokens = &self.tokens[at(span.start)..at(span.end)];
            let stored = StoredBlock {
                group: self.group(),
                key,
                parent,
                index: spec.first_block(self.index) + block,
                tokens: tokens.into(),
                tier,
                priority: self.priority,
            };
            parent = key;
            EventKind::Stored(stored)
        })
    }

    /// Returns the announcements that a tier has given the blocks up.
    pub(crate) fn removed(&self, tier: Tier) -> impl Iterator<Item = EventKind> + '_ {
        let group = self.group();
        self.keys.iter().map(move |&key| EventKind::Removed { group, key, tier })
    }
}
