//! Names of the blocks on the device: from changes of blocks to chunks that are complete.
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use kv_core::block::BlockPool;
use kv_core::num::{to_u32, to_usize};
use kv_core::reuse::{BlockKey, IndexedBlock};
use kv_core::{BlockId, SequenceId};

use crate::chain::ChunkAt;
use crate::chunk::{ChunkContent, ChunkSpec};
use crate::identity::ChunkRoot;
use crate::name::ChunkName;
use crate::record::Record;

/// The links of the blocks of one group that are or were on the device.
///
/// A link needs the link of the block before it, and blocks are published in the order of their
/// prompt. Links of blocks that have left the device are kept for a while: with a window, a
/// sequence goes on after its first blocks have left.
#[derive(Debug)]
pub(super) struct Links {
    by_key: HashMap<BlockKey, Link>,
    /// Blocks that left, oldest first.
    gone: VecDeque<BlockKey>,
    gone_max: usize,
}

#[derive(Debug)]
struct Link {
    name: ChunkName,
    root: Arc<ChunkRoot>,
    parent: BlockKey,
    /// Index of the block in its prompt.
    index: u32,
    /// The block with this content, while it is on the device.
    block: Option<BlockId>,
}

/// A chunk whose blocks are all on the device.
#[derive(Debug)]
pub(super) struct Complete {
    pub(super) record: Record,
    pub(super) blocks: Box<[Source]>,
}

/// A block of the device to copy.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// One with cached content, of this key.
    Cached(BlockId, BlockKey),
    /// The one at this index of a sequence.
    OfSequence(SequenceId, u32),
}

/// The place of a stored block in its chunk.
#[derive(Debug)]
pub(super) enum Linked {
    /// It is inside a chunk.
    Inside,
    /// It is the last one of a chunk.
    Complete(Box<Complete>),
    /// It is the last one of a chunk that lacks earlier blocks.
    Incomplete,
    /// It has no name: the block before is unknown.
    Unnamed,
}

impl Links {
    pub(super) fn new(num_blocks: u32) -> Self {
        let gone_max = to_usize(num_blocks) * 2;
        Self { by_key: HashMap::new(), gone: VecDeque::new(), gone_max }
    }

    pub(super) fn clear(&mut self) {
        self.by_key.clear();
        self.gone.clear();
    }

    /// Returns whether a block with this content is known to be on the device.
    pub(super) fn is_stored(&self, block: BlockId, key: BlockKey) -> bool {
        self.by_key.get(&key).is_some_and(|link| link.block == Some(block))
    }

    /// Returns the names of the root and of the chunk that ends with a block.
    pub(super) fn names(&self, key: BlockKey) -> Option<(ChunkName, ChunkName)> {
        self.by_key.get(&key).map(|link| (link.root.name(), link.name))
    }

    /// Returns whether the block with this key is on the device.
    pub(super) fn is_on_device(&self, key: BlockKey) -> bool {
        self.by_key.get(&key).is_some_and(|link| link.block.is_some())
    }

    /// Notes that all other blocks lost their content.
    pub(super) fn retain(&mut self, stored: &HashSet<(BlockId, BlockKey)>) {
        let known = self.by_key.iter().filter_map(|(key, link)| Some((link.block?, *key)));
        let mut removed: Vec<_> = known.filter(|known| !stored.contains(known)).collect();
        // In any order that does not depend on the table's.
        removed.sort_unstable();
        for (block, key) in removed {
            self.removed(block, key);
        }
    }

    /// Notes that a block has content that can be reused. `root` is that of its namespace.
    pub(super) fn stored(
        &mut self,
        block: &IndexedBlock<'_>,
        root: &Arc<ChunkRoot>,
        pool: &BlockPool,
    ) -> Linked {
        let before = if block.index == 0 {
            root.name()
        } else {
            match self.by_key.get(&block.parent) {
                Some(link) if link.root.name() == root.name() => link.name,
                _ => return Linked::Unnamed,
            }
        };
        let name = root.link(&before, block.tokens, block.contents.iter().copied());
        let root = Arc::clone(root);
        let spec = *root.spec();
        let (parent, index) = (block.parent, block.index);
        let link = Link { name, root, parent, index, block: Some(block.block) };
        self.by_key.insert(block.key, link);
        if block.index.checked_add(1).and_then(|end| end.checked_rem(spec.blocks())) != Some(0) {
            return Linked::Inside;
        }
        match self.complete(block, &spec, pool) {
            Some(complete) => Linked::Complete(Box::new(complete)),
            None => Linked::Incomplete,
        }
    }

    /// Removes the link of a block without content; returns the index in its prompt, if known.
    pub(super) fn removed(&mut self, block: BlockId, key: BlockKey) -> Option<u32> {
        let link = self.by_key.get_mut(&key).filter(|link| link.block == Some(block))?;
        let index = link.index;
        link.block = None;
        self.gone.push_back(key);
        if self.gone.len() > self.gone_max
            && let Some(oldest) = self.gone.pop_front()
            && self.by_key.get(&oldest).is_some_and(|link| link.block.is_none())
        {
            self.by_key.remove(&oldest);
        }
        Some(index)
    }

    /// Collects the blocks of the chunk that ends with a block, if all are on the device still.
    pub(super) fn rebuild(&self, key: BlockKey, pool: &BlockPool) -> Option<Complete> {
        let link = self.by_key.get(&key)?;
        let last = pool.content(link.block?).filter(|last| last.key == key)?;
        self.complete(&last, link.root.spec(), pool)
    }

    /// Collects the blocks of the chunk that ends with a block.
    fn complete(
        &self,
        last: &IndexedBlock<'_>,
        spec: &ChunkSpec,
        pool: &BlockPool,
    ) -> Option<Complete> {
        let of_last = self.by_key.get(&last.key)?;
        let len = to_usize(spec.blocks());
        let (mut keys, mut blocks) = (Vec::with_capacity(len), Vec::with_capacity(len));
        let mut key = last.key;
        for _ in 0..len {
            let link = self.by_key.get(&key)?;
            keys.push(key);
            blocks.push(link.block?);
            key = link.parent;
        }
        keys.reverse();
        blocks.reverse();
        let first = last.index.checked_add(1)?.checked_sub(spec.blocks())?;
        let parent = if first == 0 { of_last.root.name() } else { self.by_key.get(&key)?.name };
        let (mut tokens, mut contents) = (Vec::new(), Vec::new());
        let mut priority = last.priority;
        for (at, (block, key)) in blocks.iter().zip(&keys).enumerate() {
            let block = pool.content(*block).filter(|block| block.key == *key)?;
            tokens.extend_from_slice(block.tokens);
            let at = to_u32(at);
            let parts = block.contents.iter();
            contents.extend(parts.map(|content| ChunkContent { block: at, content: *content }));
            priority =
                if block.priority.level < priority.level { block.priority } else { priority };
        }
        let record = Record {
            root: Arc::clone(&of_last.root),
            at: ChunkAt::Whole(first.checked_div(spec.blocks())?),
            index: first.checked_div(spec.blocks())?,
            end: spec.span(first.checked_div(spec.blocks())?).end,
            parent,
            name: of_last.name,
            parent_key: key,
            keys: keys.into(),
            tokens: tokens.into(),
            contents: contents.into(),
            priority,
            is_forgotten: false.into(),
        };
        let blocks = blocks.into_iter().zip(&record.keys);
        let blocks = blocks.map(|(block, key)| Source::Cached(block, *key)).collect();
        Some(Complete { record, blocks })
    }
}
