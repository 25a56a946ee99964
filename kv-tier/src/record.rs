//! The expected content of one chunk, owned.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::GroupId;
use kv_core::events::{EventKind, StoredBlock, Tier};
use kv_core::eviction::Priority;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::BlockKey;

use crate::chain::ChunkAt;
use crate::chunk::{ChunkContent, Expectation};
use crate::identity::ChunkRoot;
use crate::name::ChunkName;
use crate::store::ChunkAddress;

/// The expected content of a chunk, owned for threads that outlast the prompt, and its keys.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) root: Arc<ChunkRoot>,
    pub(crate) at: ChunkAt,
    pub(crate) index: u32,
    /// Tokens up to the end of the chunk.
    pub(crate) end: u32,
    pub(crate) parent: ChunkName,
    pub(crate) name: ChunkName,
    /// Key of the block before the first.
    pub(crate) parent_key: BlockKey,
    /// Keys of all blocks.
    pub(crate) keys: Box<[BlockKey]>,
    /// [`NO_TOKEN`](crate::chunk::NO_TOKEN) after those of a tail or a state.
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
        self.root.spec().first_block(self.index) + to_u32(self.keys.len()).saturating_sub(1)
    }

    /// Returns whether the chunk has the rows between the last whole chunk and a state.
    pub(crate) fn is_tail(&self) -> bool {
        !self.root.spec().is_of_states() && matches!(self.at, ChunkAt::Upto(_))
    }

    /// Returns the keys that are announced: a tail is announced with the state that it is for.
    fn announced(&self) -> &[BlockKey] {
        if self.is_tail() { &[] } else { &self.keys }
    }

    /// Returns the announcements that a tier has the blocks of this chunk.
    pub(crate) fn stored(&self, tier: Tier) -> impl Iterator<Item = EventKind> + '_ {
        let spec = self.root.spec();
        let begin = spec.span(self.index).start;
        let mut parent = self.parent_key;
        (0_u32..).zip(self.announced()).map(move |(block, &key)| {
            let span = spec.block_span(self.index, block);
            let at = |position: u32| to_usize(position - begin);
            let tokens = &self.tokens[at(span.start)..at(span.end.min(self.end))];
            let stored = StoredBlock {
                group: self.group(),
                key,
                parent,
                index: spec.first_block(self.index) + block,
                tokens: tokens.into(),
                tier,
                priority: self.priority,
                salt: self.root.salt().into(),
                adapter: self.root.adapter(),
            };
            parent = key;
            EventKind::Stored(stored)
        })
    }

    /// Returns the announcements that a tier has given the blocks up.
    pub(crate) fn removed(&self, tier: Tier) -> impl Iterator<Item = EventKind> + '_ {
        let group = self.group();
        self.announced().iter().map(move |&key| EventKind::Removed { group, key, tier })
    }
}
