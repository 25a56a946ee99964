//! The names of a prompt's chunks, and the number of tokens up to which available chunks reach.
use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

use kv_core::GroupId;
use kv_core::eviction::Priority;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::{BlockKey, PrefixProbe, ProbedBlock};

use crate::chunk::{ChunkContent, ChunkSpec};
use crate::identity::ChunkRoot;
use crate::name::ChunkName;
use crate::record::Record;
use crate::store::ChunkAddress;

/// The names of a prompt's whole chunks in one group.
#[derive(Debug)]
pub(crate) struct Chain {
    root: Arc<ChunkRoot>,
    names: Vec<ChunkName>,
}

const CHUNK: &str = "a chain names the whole chunks of its prompt";

impl Chain {
    pub(crate) fn new(probe: &PrefixProbe, root: Arc<ChunkRoot>) -> Self {
        let spec = *root.spec();
        let (mut names, mut parts) = (Vec::new(), Vec::new());
        let mut link = root.name();
        for block in probe.blocks(spec.named_by()) {
            probe.contents(&block, &mut parts);
            link = root.link(&link, probe.tokens(&block), parts.drain(..));
            if ends_chunk(&spec, block.index) {
                names.push(link);
            }
        }
        Self { root, names }
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
    pub(crate) fn len(&self) -> u32 {
        to_u32(self.names.len())
    }
    pub(crate) fn name(&self, chunk: u32) -> &ChunkName {
        self.names.get(to_usize(chunk)).invariant(CHUNK)
    }
    pub(crate) fn address(&self, chunk: u32) -> ChunkAddress {
        ChunkAddress { root: self.root.name(), name: *self.name(chunk) }
    }

    /// Iterates over the blocks of a chunk of the prompt.
    pub(crate) fn blocks<'a>(
        &self,
        probe: &'a PrefixProbe,
        chunk: u32,
    ) -> impl Iterator<Item = ProbedBlock> + use<'a> {
        let (spec, group) = (self.spec(), self.group());
        let first = spec.first_block(chunk);
        let blocks = first..first + spec.blocks();
        blocks.map_while(move |index| probe.block(group, index))
    }

    /// Returns the last block of a chunk of the prompt.
    pub(crate) fn last_block(&self, probe: &PrefixProbe, chunk: u32) -> Option<ProbedBlock> {
        self.blocks(probe, chunk).last()
    }

    /// Returns the expected content of a chunk of the prompt.
    pub(crate) fn record(&self, probe: &PrefixProbe, chunk: u32) -> Record {
        let blocks = self.blocks(probe, chunk);
        let (mut keys, mut contents, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tokens, mut parent_key) = (Vec::new(), probe.root());
        for (at, block) in (0..).zip(blocks) {
            if at == 0 {
                parent_key = block.parent;
            }
            keys.push(block.key);
            tokens.extend_from_slice(probe.tokens(&block));
            probe.contents(&block, &mut parts);
            contents.extend(parts.drain(..).map(|content| ChunkContent { block: at, content }));
        }
        let parent = chunk.checked_sub(1).map_or_else(|| self.root.name(), |at| *self.name(at));
        Record {
            root: Arc::clone(&self.root),
            index: chunk,
            parent,
            name: *self.name(chunk),
            parent_key,
            keys: keys.into(),
            tokens: tokens.into(),
            contents: contents.into(),
            priority: Priority::default(),
            is_forgotten: false.into(),
        }
    }
}

/// Returns whether a block is the last one of a chunk.
fn ends_chunk(spec: &ChunkSpec, index: u32) -> bool {
    (index + 1).is_multiple_of(spec.blocks())
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

/// The blocks of one group of a prompt that are on the device or in available chunks.
#[derive(Debug)]
struct AtHand {
    group: GroupId,
    blocks: Vec<ProbedBlock>,
    /// For each block, the first block of the unbroken run that ends with this block. One past a
    /// missing block.
    run_start: Vec<u32>,
}

impl AtHand {
    fn new(probe: &PrefixProbe, chain: &Chain, mut has: impl FnMut(u32) -> bool) -> Self {
        let blocks: Vec<_> = probe.blocks(chain.group()).collect();
        let mut run_start = Vec::with_capacity(blocks.len());
        let mut start = 0;
        // `has` is called once per chunk.
        let (mut chunk, mut is_here) = (u32::MAX, false);
        for block in &blocks {
            let of = chunk_of(chain.spec(), block.index);
            if of != chunk {
                (chunk, is_here) = (of, of < chain.len() && has(of));
            }
            if block.cached.is_none() && !is_here {
                start = block.index + 1;
            }
            run_start.push(start);
        }
        Self { group: chain.group(), blocks, run_start }
    }

    fn has_all(&self, range: &Range<u32>) -> bool {
        let Some(last) = range.end.checked_sub(1).filter(|last| *last >= range.start) else {
            return true;
        };
        self.run_start.get(to_usize(last)).is_some_and(|start| *start <= range.start)
    }

    /// Returns a number of tokens to try next, less than `upto`, given that some block of `needed`
    /// is missing: no number in between can be reached.
    fn next(&self, needed: &[Range<u32>; 2], upto: u32) -> u32 {
        let [sinks, others] = needed;
        let begin = |index: u32| {
            let block = self.blocks.get(to_usize(index));
            block.map_or(0, |block| block.begin).min(upto.saturating_sub(1))
        };
        if !self.has_all(sinks) {
            return begin(sinks.start);
        }
        if others.start == 0 {
            // Without a window all blocks from the first on are needed: up to the first gap.
            let reached = self.run_start.iter().position(|start| *start > 0);
            return begin(reached.map_or(others.start, to_u32));
        }
        begin(others.end - 1)
    }
}

/// Returns the most tokens, up to `most`, that can be reused if the chunks come that `has` says, by
/// group and chunk; 0 for none. Without chains there are no names, and nothing can come.
pub(crate) fn reach<C: Borrow<Chain>>(
    probe: &PrefixProbe,
    chains: &[C],
    most: u32,
    mut has: impl FnMut(&Chain, u32) -> bool,
) -> u32 {
    let groups = chains.iter().map(Borrow::borrow);
    let groups = groups.map(|chain| AtHand::new(probe, chain, |chunk| has(chain, chunk)));
    let groups: Vec<_> = groups.collect();
    let mut upto = if chains.is_empty() { 0 } else { most.min(probe.limit()) };
    'shorter: while probe.hit(upto) > 0 {
        for group in &groups {
            let needed = probe.needed_indices(group.group, upto);
            if !needed.iter().all(|range| group.has_all(range)) {
                upto = group.next(&needed, upto);
                continue 'shorter;
            }
        }
        return upto;
    }
    0
}

/// Returns the chunks that hold blocks which are needed to reuse [`PrefixProbe::hit`]`(upto)`
/// tokens and are not on the device, in the order of the prompt.
pub(crate) fn missing(probe: &PrefixProbe, chain: &Chain, upto: u32) -> Vec<u32> {
    let needed = probe.needed(chain.group(), upto).filter(|block| block.cached.is_none());
    let mut chunks: Vec<_> = needed.map(|block| chunk_of(chain.spec(), block.index)).collect();
    chunks.dedup();
    chunks.retain(|chunk| *chunk < chain.len());
    chunks
}

/// Returns the whole chunks of a prompt with a block that is not on the device and that some number
/// of reused tokens needs.
pub(crate) fn absent(probe: &PrefixProbe, chain: &Chain) -> Vec<u32> {
    let blocks = probe.blocks(chain.group()).filter(|block| block.cached.is_none());
    let mut chunks: Vec<_> = blocks.map(|block| chunk_of(chain.spec(), block.index)).collect();
    chunks.dedup();
    chunks.retain(|chunk| *chunk < chain.len());
    chunks
}
