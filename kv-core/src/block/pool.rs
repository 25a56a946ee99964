//! The blocks of one group: who holds them, what can be reused, and which is given up next.
use crate::block::Ledger;
use crate::eviction::{BlockInfo, EvictionPolicy, Priority};
use crate::ids::{BlockId, GroupId};
use crate::num::{to_u32, to_usize};
use crate::reuse::{
    BlockContent, BlockKey, Content, IndexedBlock, NamespaceId, Offered, PrefixIndex,
};

/// Hands out blocks, counts who holds them and finds those whose content can be reused.
///
/// A block is *held*, *idle* (nobody holds it, its content can be reused) or *empty*. Idle blocks
/// count as free: one is given up, by the policy's choice, when no empty one is left. Everything is
/// O(1) but what the policy makes dearer.
///
/// Invariants: a block is empty exactly when it is on the free list, has no holder and no content;
/// no two blocks have the same content; the policy knows exactly the blocks with content, and has
/// the idle ones as candidates.
#[derive(Debug)]
pub struct BlockPool {
    group: GroupId,
    /// Empty blocks; the last to be emptied is the first to go.
    free: Vec<BlockId>,
    /// Holders, and [`STORED`] where the content can be reused: all that a step asks about a block.
    counts: Vec<u32>,
    idle: u32,
    index: PrefixIndex,
    policy: Box<dyn EvictionPolicy>,
    stats: PoolStats,
}

/// Marks the count of a block whose content can be reused.
const STORED: u32 = 1 << 31;

/// What a pool has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Blocks whose content became reusable.
    pub stored: u64,
    /// Blocks that were filled with content another block had already: they were not stored.
    pub duplicates: u64,
    /// Idle blocks given up for others.
    pub evictions: u64,
    /// Blocks that a further sequence took for their content.
    pub reused: u64,
}

/// A block handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts about one block")]
pub struct Taken {
    /// The block, held once.
    pub block: BlockId,
    /// Whether it held content until now.
    pub evicted: bool,
}

impl BlockPool {
    /// A pool of `num_blocks` empty blocks of at most `block_tokens` tokens, handed out in
    /// ascending order at first. `policy` must be made for as many blocks.
    pub fn new(
        group: GroupId,
        num_blocks: u32,
        block_tokens: u32,
        policy: Box<dyn EvictionPolicy>,
    ) -> Self {
        Self {
            group,
            free: (0..num_blocks).rev().map(BlockId).collect(),
            counts: vec![0; to_usize(num_blocks)],
            idle: 0,
            index: PrefixIndex::new(num_blocks, block_tokens),
            policy,
            stats: PoolStats::default(),
        }
    }

    /// Takes an empty block or, where there is none, an idle one, held once. `None` when all are
    /// held.
    #[inline]
    pub fn allocate(&mut self, ledger: &mut Ledger) -> Option<Taken> {
        let (block, evicted) = match self.free.pop() {
            Some(block) => (block, false),
            None => (self.evict(ledger)?, true),
        };
        if let Some(count) = self.counts.get_mut(to_usize(block.0)) {
            *count = 1;
        }
        Some(Taken { block, evicted })
    }

    #[inline(never)]
    fn evict(&mut self, ledger: &mut Ledger) -> Option<BlockId> {
        if self.idle == 0 {
            return None;
        }
        let named = self.policy.evict().filter(|block| self.is_idle(*block));
        debug_assert!(named.is_some(), "a policy has every idle block as a candidate");
        // A policy of the caller's own may be wrong: any idle block will do then.
        let block = named.or_else(|| {
            let blocks = (0..to_u32(self.counts.len())).map(BlockId);
            let block = blocks.into_iter().find(|block| self.is_idle(*block))?;
            self.policy.dropped(block);
            Some(block)
        })?;
        self.idle = self.idle.saturating_sub(1);
        self.stats.evictions = self.stats.evictions.saturating_add(1);
        self.unindex(block, ledger);
        Some(block)
    }

    fn unindex(&mut self, block: BlockId, ledger: &mut Ledger) {
        if let Some(count) = self.counts.get_mut(to_usize(block.0)) {
            *count &= !STORED;
        }
        if let Some(removed) = self.index.remove(block) {
            ledger.block_removed(self.group, removed.namespace, removed.gone);
        }
    }

    /// Adds a holder to a block that is held, by way of a sequence that holds it.
    ///
    /// # Panics
    /// When nobody holds the block: its content may already be another's.
    pub fn retain(&mut self, block: BlockId) {
        let count = self.held_mut(block);
        assert!(count.is_some(), "retain of block {block}, which nobody holds");
        if let Some(count) = count {
            *count = count.saturating_add(1);
        }
    }

    fn held_mut(&mut self, block: BlockId) -> Option<&mut u32> {
        self.counts.get_mut(to_usize(block.0)).filter(|count| **count & !STORED > 0)
    }

    /// Adds a holder to a block for its content, which [`Self::find`] or
    /// [`Self::longest_beginning`] found. No change for a block without content.
    #[inline]
    pub fn reuse(&mut self, block: BlockId) {
        let Some(count) = self.counts.get_mut(to_usize(block.0)) else {
            return;
        };
        if *count & STORED == 0 {
            return;
        }
        if *count == STORED {
            self.idle = self.idle.saturating_sub(1);
        }
        *count = count.saturating_add(1);
        self.stats.reused = self.stats.reused.saturating_add(1);
        self.policy.reused(block);
    }

    /// Takes a holder away; `true` when it was the last and the block is empty again, `false` when
    /// others hold it or it is idle now.
    ///
    /// # Panics
    /// When nobody holds the block.
    #[inline]
    pub fn release(&mut self, block: BlockId) -> bool {
        let count = self.held_mut(block);
        assert!(count.is_some(), "release of block {block}, which nobody holds");
        let left = count.map_or(0, |count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left == STORED {
            self.idle = self.idle.saturating_add(1);
            self.policy.idle(block);
        } else if left == 0 {
            self.free.push(block);
        }
        left == 0
    }

    /// Makes the content of a held block reusable. `false`, and no change, when nobody holds it, it
    /// has content already, its key names other content, or another block has the same content: a
    /// block with fewer tokens than blocks hold also where another one goes on behind them.
    pub fn store(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        priority: Priority,
        ledger: &mut Ledger,
    ) -> bool {
        let is_partial = content.tokens.len() < self.index.block_tokens();
        let offered = self.offer(block, content, (priority, is_partial), ledger);
        match offered {
            Offered::New => {
                while let Some(beginning) = self.beginning_of(block) {
                    self.forget(beginning, ledger);
                }
            }
            Offered::Known(known) if known != block => self.renew(known),
            Offered::Known(_) | Offered::Refused => {}
        }
        offered == Offered::New
    }

    /// Makes the content of a held block reusable unless it can be found already; `is_partial` says
    /// that the block is not full, whatever it holds. What is of no use beside new content
    /// ([`Self::beginning_of`]) is left to the caller.
    pub(crate) fn offer(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        (priority, is_partial): (Priority, bool),
        ledger: &mut Ledger,
    ) -> Offered {
        if self.holders(block) == 0 {
            return Offered::Refused;
        }
        // A block that another holder left behind unfull may be full by now: that says more.
        if !is_partial && self.index.get(block).is_some_and(|entry| entry.is_partial) {
            self.unindex(block, ledger);
            self.policy.dropped(block);
        }
        let offered = self.index.offer(block, content, priority, is_partial);
        if offered == Offered::New {
            self.note_stored(block, content, (priority, is_partial), ledger);
        }
        offered
    }

    fn note_stored(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        (priority, is_partial): (Priority, bool),
        ledger: &mut Ledger,
    ) {
        if let Some(count) = self.counts.get_mut(to_usize(block.0)) {
            *count |= STORED;
        }
        self.stats.stored = self.stats.stored.saturating_add(1);
        let (key, index) = (content.key, content.index);
        let parent = (index > 0).then_some(content.parent);
        self.policy.stored(block, &BlockInfo { key, parent, index, priority });
        ledger.block_stored(self.group, content, priority, !is_partial);
    }

    /// Notes that a sequence which does not hold `block` has computed its content again: an idle
    /// block is as if it had been released just now.
    pub(crate) fn renew(&mut self, block: BlockId) {
        self.note_duplicate(block);
        if self.is_idle(block) {
            self.policy.computed_again(block);
            self.policy.idle(block);
        }
    }

    /// Gives a holder of `own` the block `known` with the same content in its place. `true` when
    /// `own` is empty now.
    ///
    /// # Panics
    /// When nobody holds `own`, or `known` has no content.
    pub(crate) fn exchange(&mut self, own: BlockId, known: BlockId) -> bool {
        assert!(self.is_stored(known), "block {known} was found for its content and has none");
        if self.is_idle(known) {
            self.idle = self.idle.saturating_sub(1);
        }
        self.note_duplicate(known);
        self.policy.computed_again(known);
        if let Some(count) = self.counts.get_mut(to_usize(known.0)) {
            *count = count.saturating_add(1);
        }
        self.release(own)
    }

    fn note_duplicate(&mut self, known: BlockId) {
        self.stats.duplicates = self.stats.duplicates.saturating_add(1);
        // A search for a common beginning looks at the newest siblings.
        self.index.renew(known);
    }

    /// A partial block whose whole content that of `block` begins with: of no use beside it.
    pub(crate) fn beginning_of(&self, block: BlockId) -> Option<BlockId> {
        self.index.beginning_of(block)
    }

    /// Notes whether the open step has yet to write a block with content.
    pub(crate) fn set_unwritten(&mut self, block: BlockId, is_unwritten: bool) {
        self.index.set_unwritten(block, is_unwritten);
    }

    /// Whether the open step has yet to write a block with content.
    pub(crate) fn is_unwritten(&self, block: BlockId) -> bool {
        self.index.is_unwritten(block)
    }

    /// Makes the content of a block unfindable; holders keep it. `true` when nobody holds it: the
    /// block is empty now.
    pub fn forget(&mut self, block: BlockId, ledger: &mut Ledger) -> bool {
        if !self.is_stored(block) {
            return false;
        }
        self.unindex(block, ledger);
        self.policy.dropped(block);
        let is_idle = self.holders(block) == 0;
        if is_idle {
            self.idle = self.idle.saturating_sub(1);
            self.free.push(block);
        }
        is_idle
    }

    /// Makes every content unfindable without an event. Returns the blocks that are empty now.
    pub(crate) fn clear(&mut self, ledger: &mut Ledger) -> Vec<BlockId> {
        let mut emptied = Vec::new();
        for block in (0..self.num_blocks()).map(BlockId) {
            let Some(removed) = self.index.remove(block) else {
                continue;
            };
            ledger.leave(removed.namespace);
            self.policy.dropped(block);
            if let Some(count) = self.counts.get_mut(to_usize(block.0)) {
                *count &= !STORED;
            }
            if self.holders(block) == 0 {
                emptied.push(block);
            }
        }
        self.idle = 0;
        // The lowest block goes first, as in a new pool.
        self.free.extend(emptied.iter().rev());
        emptied
    }

    /// Sets what the owner of a block's content asks for it, from now on where it has a duration;
    /// no change for a block without content.
    pub fn set_priority(&mut self, block: BlockId, priority: Priority, ledger: &mut Ledger) {
        let Some(before) = self.index.set_priority(block, priority) else {
            return;
        };
        // A level may have run out since, and is asked for again.
        if before != priority || priority.duration.is_some() {
            self.policy.set_priority(block, priority);
        }
        let entry = self.index.get(block).filter(|entry| !entry.is_partial && before != priority);
        if let Some(entry) = entry {
            ledger.block_updated(self.group, entry.key, priority);
        }
    }

    /// Exchanges the policy; `false`, and no change, while any block has content.
    pub(crate) fn set_policy(&mut self, policy: Box<dyn EvictionPolicy>) -> bool {
        let is_empty = self.index.is_empty();
        if is_empty {
            self.policy = policy;
        }
        is_empty
    }

    /// A request begins: what policies that age count in.
    pub fn tick(&mut self) {
        self.policy.tick();
    }

    /// The block with exactly this content, held or idle.
    #[inline]
    pub fn find(&self, content: &Content<'_>) -> Option<BlockId> {
        self.index.find(content)
    }
    /// The block after `parent` that begins most like `tokens`, of which some stand for `contents`,
    /// and how many tokens agree.
    pub fn longest_beginning(
        &self,
        parent: BlockKey,
        namespace: NamespaceId,
        (tokens, contents): (&[u32], &[BlockContent]),
    ) -> Option<(BlockId, u32)> {
        self.index.longest_beginning(parent, namespace, (tokens, contents))
    }
    /// What can be reused.
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }
    /// The content of a block.
    pub fn content(&self, block: BlockId) -> Option<IndexedBlock<'_>> {
        self.index.get(block)
    }
    /// Whether a block's content can be reused.
    #[inline]
    pub fn is_stored(&self, block: BlockId) -> bool {
        self.count(block) & STORED > 0
    }
    /// Whether a sequence that holds a block may write to it: no other holds it, and its content is
    /// not offered to others.
    #[inline]
    pub fn is_private(&self, block: BlockId) -> bool {
        self.count(block) == 1
    }
    #[inline]
    fn count(&self, block: BlockId) -> u32 {
        self.counts.get(to_usize(block.0)).copied().unwrap_or(0)
    }
    /// Whether nobody holds a block whose content can be reused.
    #[inline]
    pub fn is_idle(&self, block: BlockId) -> bool {
        self.count(block) == STORED
    }

    /// How many hold `block`; 0 for a free or an unknown one.
    #[inline]
    pub fn holders(&self, block: BlockId) -> u32 {
        self.count(block) & !STORED
    }
    /// Blocks in the pool.
    pub fn num_blocks(&self) -> u32 {
        to_u32(self.counts.len())
    }
    /// Blocks nobody holds, empty and idle ones.
    #[inline]
    pub fn num_free(&self) -> u32 {
        self.num_empty().saturating_add(self.idle)
    }
    /// Blocks without holder and content.
    #[inline]
    pub fn num_empty(&self) -> u32 {
        to_u32(self.free.len())
    }
    /// Blocks without holder whose content can be reused.
    #[inline]
    pub fn num_idle(&self) -> u32 {
        self.idle
    }
    /// Blocks somebody holds.
    pub fn num_used(&self) -> u32 {
        self.num_blocks().saturating_sub(self.num_free())
    }
    /// What the pool has done so far.
    pub fn stats(&self) -> PoolStats {
        self.stats
    }
}

#[cfg(test)]
mod tests;
