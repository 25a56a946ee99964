//! The names of a prompt's chunks, and the number of tokens up to which available chunks reach.
mod reach;

use std::sync::Arc;

use kv_core::GroupId;
use kv_core::eviction::Priority;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::{BlockKey, PrefixProbe, ProbedBlock};

use crate::chunk::{ChunkContent, ChunkSpec, NO_TOKEN};
use crate::identity::ChunkRoot;
use crate::name::ChunkName;
use crate::record::Record;
use crate::store::ChunkAddress;

pub(crate) use reach::{absent, missing, reach, with_state};

/// A chunk of a prompt in one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ChunkAt {
    /// A whole chunk of rows, by its index.
    Whole(u32),
    /// The chunk that ends behind this many tokens: a snapshot of recurrent states; or the tail
    /// that a snapshot needs besides, the rows between the last whole chunk and the snapshot.
    Upto(u32),
}

/// The names of a prompt's chunks in one group.
#[derive(Debug)]
pub(crate) struct Chain {
    root: Arc<ChunkRoot>,
    /// The link of every full block.
    links: Vec<ChunkName>,
}

const CHUNK: &str = "a chain names the chunks of its prompt";

impl Chain {
    pub(crate) fn new(probe: &PrefixProbe, root: Arc<ChunkRoot>) -> Self {
        let (mut links, mut parts) = (Vec::new(), Vec::new());
        let mut link = root.name();
        for block in probe.blocks(root.spec().named_by()) {
            probe.contents(&block, &mut parts);
            link = root.link(&link, probe.tokens(&block), parts.drain(..));
            links.push(link);
        }
        Self { root, links }
    }

    pub(crate) fn root(&self) -> &ChunkRoot {
        &self.root
    }
    pub(crate) fn spec(&self) -> &ChunkSpec {
        self.root.spec()
    }
    pub(crate) fn group(&self) -> GroupId {
        self.spec().group()
    }
    /// Returns the number of whole chunks of rows.
    pub(crate) fn len(&self) -> u32 {
        if self.spec().is_of_states() {
            return 0;
        }
        to_u32(self.links.len()).div_euclid(self.spec().blocks())
    }
    /// Returns the number of whole chunks of rows that end at or before some tokens.
    pub(crate) fn chunks_within(&self, tokens: u32) -> u32 {
        let spec = self.spec();
        let mut chunks = self.len();
        while let Some(last) = chunks.checked_sub(1).filter(|last| spec.span(*last).end > tokens) {
            chunks = last;
        }
        chunks
    }
    /// Returns the link before a block: that of the block before, the root's name for the first.
    pub(crate) fn link_before(&self, block: u32) -> ChunkName {
        let before = block.checked_sub(1);
        before.map_or_else(|| self.root.name(), |at| *self.links.get(to_usize(at)).invariant(CHUNK))
    }
    /// Returns the name of the last of some whole chunks; the root's of none.
    pub(crate) fn last_name(&self, chunks: u32) -> ChunkName {
        self.link_before(self.spec().first_block(chunks))
    }

    /// Returns whether a block is the last one of a whole chunk.
    pub(crate) fn ends_chunk(&self, block: &ProbedBlock) -> bool {
        let chunk = chunk_of(self.spec(), block.index);
        chunk < self.len() && self.spec().span(chunk).end == block.end
    }

    /// Iterates over the names by which the chunks of a prompt are told from generated text: those
    /// of whole chunks, and the links before states.
    pub(crate) fn prompted_names(&self) -> impl Iterator<Item = ChunkName> + '_ {
        self.links
            .iter()
            .copied()
            .skip(to_usize(self.spec().blocks()) - 1)
            .step_by(to_usize(self.spec().blocks()))
    }

    /// Returns the name of a chunk.
    pub(crate) fn name(&self, probe: &PrefixProbe, at: ChunkAt) -> ChunkName {
        match at {
            ChunkAt::Whole(chunk) => self.last_name(chunk + 1),
            ChunkAt::Upto(_) => {
                let last = self.last_block(probe, at).invariant(CHUNK);
                self.link_to(probe, &last)
            }
        }
    }
    pub(crate) fn address(&self, probe: &PrefixProbe, at: ChunkAt) -> ChunkAddress {
        ChunkAddress { root: self.root.name(), name: self.name(probe, at) }
    }

    /// Returns the link of a block, full or not.
    fn link_to(&self, probe: &PrefixProbe, block: &ProbedBlock) -> ChunkName {
        let full = probe.block(self.spec().named_by(), block.index);
        if full.is_some_and(|full| full.end == block.end) {
            return self.link_before(block.index + 1);
        }
        let mut parts = Vec::new();
        probe.contents(block, &mut parts);
        let before = self.link_before(block.index);
        self.root.link(&before, probe.tokens(block), parts.into_iter())
    }

    /// Returns the last block of a chunk of the prompt. Of a tail there is none where no sequence
    /// goes on from it: a prompt reuses full blocks alone, or another group ends elsewhere.
    pub(crate) fn last_block(&self, probe: &PrefixProbe, at: ChunkAt) -> Option<ProbedBlock> {
        let group = self.group();
        match at {
            ChunkAt::Whole(chunk) => {
                probe.block(group, self.spec().first_block(chunk + 1).checked_sub(1)?)
            }
            ChunkAt::Upto(len) if self.spec().is_of_states() => probe.state(len),
            ChunkAt::Upto(len) => {
                let [_, others] = probe.needed_indices(group, len);
                let full = || probe.block(group, others.end.checked_sub(1)?);
                probe.part(group, len).or_else(full).filter(|last| last.end == len)
            }
        }
    }

    /// Iterates over the blocks of a chunk of the prompt.
    pub(crate) fn blocks(
        &self,
        probe: &PrefixProbe,
        at: ChunkAt,
    ) -> impl DoubleEndedIterator<Item = ProbedBlock> {
        let last = self.last_block(probe, at);
        let first = last.map(|last| self.spec().first_block(chunk_of(self.spec(), last.index)));
        let group = self.group();
        let before = first.into_iter().flat_map(|first| first..last.map_or(first, |of| of.index));
        let before: Vec<_> = before.filter_map(|index| probe.block(group, index)).collect();
        before.into_iter().chain(last)
    }

    /// Returns the expected content of a chunk of the prompt.
    pub(crate) fn record(&self, probe: &PrefixProbe, at: ChunkAt) -> Record {
        let (mut keys, mut contents, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tokens, mut parent_key, mut last) = (Vec::new(), probe.root(), None);
        for (number, block) in (0..).zip(self.blocks(probe, at)) {
            if number == 0 {
                parent_key = block.parent;
            }
            keys.push(block.key);
            tokens.extend_from_slice(probe.tokens(&block));
            probe.contents(&block, &mut parts);
            let block_contents = parts.drain(..);
            contents.extend(block_contents.map(|content| ChunkContent { block: number, content }));
            last = Some(block);
        }
        let last = last.invariant(CHUNK);
        let index = chunk_of(self.spec(), last.index);
        let span = self.spec().span(index);
        tokens.resize(to_usize(span.end - span.start), NO_TOKEN);
        Record {
            root: Arc::clone(&self.root),
            at,
            index,
            end: last.end,
            parent: self.last_name(index),
            name: self.link_to(probe, &last),
            parent_key,
            keys: keys.into(),
            tokens: tokens.into(),
            contents: contents.into(),
            priority: Priority::default(),
            is_forgotten: false.into(),
        }
    }
}

/// Returns the chunk of a block.
pub(crate) fn chunk_of(spec: &ChunkSpec, block: u32) -> u32 {
    block / spec.blocks()
}

/// Returns the key of the last full block of a prompt in a group: it differs if any token or
/// content before does.
pub(crate) fn last_key(probe: &PrefixProbe, group: GroupId) -> Option<BlockKey> {
    probe.blocks(group).last().map(|block| block.key)
}
