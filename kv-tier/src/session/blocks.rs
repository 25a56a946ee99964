//! The blocks of a session in one group, and the expected content of their chunks.
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use kv_core::backend::Backend;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::reuse::{BlockContent, BlockKey, PrefixProbe, ProbedBlock};
use kv_core::{BlockId, GroupId, KvCache, SequenceId};

use super::{SessionError, SessionGroup};
use crate::chain::Chain;
use crate::chunk::{ChunkContent, ChunkSpec, Expectation, NO_TOKEN};
use crate::identity::{ChunkRoot, Identity};
use crate::name::ChunkName;

/// The blocks of one group: the full blocks of the text and the partial block after them.
#[derive(Debug)]
pub(super) struct SessionBlocks {
    pub(super) chain: Chain,
    root: Arc<ChunkRoot>,
    full: Vec<ProbedBlock>,
    /// Tokens of the text.
    len: u32,
}

/// The expected content of the chunk of one block, owned.
#[derive(Debug)]
pub(super) struct BlockRecord {
    root: Arc<ChunkRoot>,
    index: u32,
    /// One past the position of its last token.
    pub(super) end: u32,
    parent: ChunkName,
    name: ChunkName,
    key: BlockKey,
    tokens: Vec<u32>,
    contents: Vec<ChunkContent>,
}

impl BlockRecord {
    pub(super) fn expectation(&self) -> Expectation<'_> {
        Expectation {
            root: &self.root,
            index: self.index,
            parent: self.parent,
            name: self.name,
            last_key: self.root.last_key(&self.name, self.key),
            tokens: &self.tokens,
            contents: &self.contents,
        }
    }
}

const BLOCK: &str = "a session lists blocks of its text";

impl SessionBlocks {
    /// Names the blocks of a probed text, all of which may be reused, in chunks of one block.
    pub(super) fn new<B: Backend>(
        cache: &KvCache<B>,
        group: GroupId,
        identity: &Identity,
        (probe, len): (&PrefixProbe, u32),
    ) -> Result<Self, SessionError> {
        let spec = ChunkSpec::new(cache.state().spec(), group)?.with_blocks(1)?;
        let (salt, adapter) = (probe.salt(), probe.adapter());
        let root = Arc::new(identity.root(&spec, cache.state().encoding_key(), salt, adapter)?);
        let chain = Chain::new(probe, Arc::clone(&root));
        let full = probe.blocks(group).collect();
        Ok(Self { chain, root, full, len })
    }

    pub(super) fn spec(&self) -> &ChunkSpec {
        self.root.spec()
    }
    pub(super) fn root(&self) -> ChunkName {
        self.root.name()
    }
    pub(super) fn group(&self) -> GroupId {
        self.spec().group()
    }

    /// Returns the number of blocks of the text, the partial one included.
    pub(super) fn num_blocks(&self) -> u32 {
        let full = to_u32(self.full.len());
        let is_partial = self.spec().span(full).start < self.len;
        full + u32::from(is_partial)
    }

    /// Returns the blocks without which a sequence does not reuse the first `len` tokens.
    pub(super) fn needed(&self, probe: &PrefixProbe, len: u32) -> BTreeSet<u32> {
        let blocks = probe.needed_indices(self.group(), len).into_iter().flatten();
        blocks.chain(probe.part(self.group(), len).map(|part| part.index)).collect()
    }

    /// Returns the block on the device with the content of one of the text: a cached one, or one of
    /// the sequence. A group with a tail publishes every block whose bytes follow from its tokens.
    pub(super) fn on_device<B: Backend>(
        &self,
        cache: &KvCache<B>,
        sequence: SequenceId,
        block: u32,
    ) -> Option<BlockId> {
        let cached = self.full.get(to_usize(block)).and_then(|block| block.cached);
        cached.or_else(|| {
            if self.spec().layout().planes().first().slot_map().has_tail()
                || cache.state().vacant_entries(sequence, self.group())?.contains(&block)
            {
                return None;
            }
            cache.state().block_table(sequence, self.group())?.get(to_usize(block)).copied()
        })
    }

    /// Returns the expected content of the chunk of a block; of states, behind `at` tokens.
    pub(super) fn record(&self, probe: &PrefixProbe, at: u32) -> BlockRecord {
        if self.spec().is_of_states() {
            return self.state_record(probe, at);
        }
        let block = at;
        let mut parts = Vec::new();
        if let Some(of) = self.full.get(to_usize(block)) {
            probe.contents(of, &mut parts);
            return self.record_of((of.index, of.end, of.key), probe.tokens(of), parts);
        }
        let (tokens, contents) = self.partial(probe, &self.spec().span(block));
        let before = block.checked_sub(1).and_then(|before| self.full.get(to_usize(before)));
        let key = before.map_or_else(|| probe.root(), |before| before.key);
        let key = key.child(tokens, &contents);
        self.record_of((block, self.len, key), tokens, contents)
    }

    /// Returns the expected content of the chunk of the state behind `len` tokens.
    fn state_record(&self, probe: &PrefixProbe, len: u32) -> BlockRecord {
        let of = probe.state(len).invariant("a state of a session is behind tokens of its text");
        let mut parts = Vec::new();
        probe.contents(&of, &mut parts);
        self.record_of((of.index, len, of.key), probe.tokens(&of), parts)
    }

    /// Returns the expected content of the chunk of tokens, which may be fewer than a block's.
    fn record_of(
        &self,
        (index, end, key): (u32, u32, BlockKey),
        tokens: &[u32],
        parts: Vec<BlockContent>,
    ) -> BlockRecord {
        let parent = self.chain.link_before(index);
        let name = self.root.link(&parent, tokens, parts.iter().copied());
        let span = self.spec().span(index);
        let mut tokens = tokens.to_vec();
        tokens.resize(to_usize(span.end - span.start), NO_TOKEN);
        let contents = parts.into_iter().map(|content| ChunkContent { block: 0, content });
        let (root, contents) = (Arc::clone(&self.root), contents.collect());
        BlockRecord { root, index, end, parent, name, key, tokens, contents }
    }

    /// Describes the group in the header of a file that has these chunks, in ascending order.
    pub(super) fn group_of(&self, found: &[(u32, BlockId)]) -> SessionGroup {
        SessionGroup {
            root: self.root(),
            chunk_bytes: to_u64(self.spec().chunk_bytes()),
            is_of_states: self.spec().is_of_states(),
            blocks: ranges(found.iter().map(|(index, _)| *index)),
        }
    }

    /// Returns one past the last number of a chunk that a file may have: of blocks, their indices,
    /// of states, the tokens behind which they are.
    pub(super) fn end(&self) -> u32 {
        if self.spec().is_of_states() { self.len + 1 } else { self.num_blocks() }
    }

    /// Returns whether all blocks are in the file, or on the device, that a sequence needs to reuse
    /// the first `len` tokens.
    pub(super) fn has_all(
        &self,
        probe: &PrefixProbe,
        len: u32,
        in_file: impl Fn(u32) -> bool,
    ) -> bool {
        let is_cached =
            |index: u32| self.full.get(to_usize(index)).is_some_and(|block| block.cached.is_some());
        self.needed(probe, len).into_iter().all(|index| in_file(index) || is_cached(index))
    }

    /// Returns tokens and contents of the partial block.
    fn partial<'a>(
        &self,
        probe: &'a PrefixProbe,
        span: &Range<u32>,
    ) -> (&'a [u32], Vec<BlockContent>) {
        let tokens = probe.prompt().get(to_usize(span.start)..to_usize(self.len));
        let mut parts = Vec::new();
        BlockContent::cut(probe.content_spans(), (span.start, self.len), &mut parts);
        (tokens.invariant(BLOCK), parts)
    }
}

/// Joins ascending numbers to ranges.
pub(super) fn ranges(blocks: impl Iterator<Item = u32>) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for block in blocks {
        match ranges.last_mut() {
            Some(last) if last.end == block => last.end = block + 1,
            _ => ranges.push(block..block + 1),
        }
    }
    ranges
}
