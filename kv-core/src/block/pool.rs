//! The blocks of one group: holders, reusable content, and eviction.
use hashbrown::HashMap;

use crate::block::Ledger;
use crate::events::Tier;
use crate::eviction::{BlockInfo, EvictionPolicy, Priority, Return};
use crate::ids::{BlockId, GroupId};
use crate::num::{to_u32, to_usize};
use crate::reuse::{
    BlockContent, BlockKey, Content, IndexedBlock, NamespaceId, Offered, PrefixIndex,
};

/// Allocates blocks, counts their holders and finds those with reusable content.
///
/// A block is *held*, *idle* (no holder, reusable content) or *empty*. Idle blocks count as free:
/// when no empty block is left, the policy chooses one to evict. Everything is O(1) except for the
/// policy.
///
/// Invariants: a block is empty exactly if it is on the free list, has no holder and no content; no
/// two blocks have the same content; the policy knows exactly the blocks with content, and has the
/// idle ones as candidates.
#[derive(Debug)]
pub struct BlockPool {
    group: GroupId,
    /// Empty blocks; the last to become empty is allocated first.
    free: Vec<BlockId>,
    /// Number of holders, and [`STORED`] for reusable content: all that a step needs of a block.
    counts: Vec<u32>,
    idle: u32,
    index: PrefixIndex,
    policy: Box<dyn EvictionPolicy>,
    stats: PoolStats,
    /// The tier that content was imported from and not reused since; of few blocks.
    imported: HashMap<BlockId, Tier>,
}

/// How much of an offered block is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fill {
    /// All of its tokens.
    Full,
    /// All of its tokens once the open step has written them.
    Unwritten,
    /// Fewer tokens than fit, whatever their number: in some groups full blocks have different
    /// numbers of tokens.
    Partial,
}

/// Flag in the count of a block with reusable content.
const STORED: u32 = 1 << 31;

/// Counters of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Blocks whose content became reusable.
    pub stored: u64,
    /// Blocks filled with content that another block had already: they were not stored.
    pub duplicates: u64,
    /// Idle blocks that were evicted.
    pub evictions: u64,
    /// Blocks that a further sequence reused.
    pub reused: u64,
}

/// An allocated block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    /// The block, held once.
    pub(crate) block: BlockId,
    /// Whether content was evicted from it.
    pub(crate) evicted: bool,
}

impl BlockPool {
    /// Creates a pool of `num_blocks` empty blocks of at most `block_tokens` tokens, first
    /// allocated in ascending order. `policy` must be made for this number of blocks.
    pub(crate) fn new(
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
            imported: HashMap::new(),
        }
    }

    /// Allocates an empty block or, if there is none, evicts an idle one. It has one holder. `None`
    /// if all are held.
    #[inline]
    pub(crate) fn allocate(&mut self, ledger: &mut Ledger) -> Option<Taken> {
        let (block, evicted) = match self.free.pop() {
            Some(block) => (block, false),
            None => (self.evict(ledger)?, true),
        };
        *self.count_mut(block) = 1;
        Some(Taken { block, evicted })
    }

    #[inline(never)]
    fn evict(&mut self, ledger: &mut Ledger) -> Option<BlockId> {
        if self.idle == 0 {
            return None;
        }
        let named = self.policy.evict().filter(|block| self.is_idle(*block));
        debug_assert!(named.is_some(), "a policy has every idle block as a candidate");
        // The caller's policy may be wrong: take any idle block then.
        let block = named.or_else(|| {
            let blocks = (0..to_u32(self.counts.len())).map(BlockId);
            let block = blocks.into_iter().find(|block| self.is_idle(*block))?;
            self.policy.dropped(block);
            Some(block)
        })?;
        self.idle -= 1;
        self.stats.evictions += 1;
        self.unindex(block, ledger);
        Some(block)
    }

    fn unindex(&mut self, block: BlockId, ledger: &mut Ledger) {
        *self.count_mut(block) &= !STORED;
        if !self.imported.is_empty() {
            self.imported.remove(&block);
        }
        if let Some(removed) = self.index.remove(block) {
            ledger.block_removed(self.group, block, removed);
        }
    }

    /// Adds a holder to a held block, for a sequence that shares it.
    ///
    /// # Panics
    /// If the block has no holder, because its content may have been replaced, or is outside of the
    /// pool.
    pub(crate) fn retain(&mut self, block: BlockId) {
        let count = self.count_mut(block);
        assert!(*count & !STORED > 0, "retain of block {block}, which has no holder");
        *count += 1;
    }

    /// Returns the count of a block for a change.
    ///
    /// # Panics
    /// If the block is outside of the pool.
    #[inline]
    #[track_caller]
    fn count_mut(&mut self, block: BlockId) -> &mut u32 {
        let num_blocks = self.counts.len();
        match self.counts.get_mut(to_usize(block.0)) {
            Some(count) => count,
            None => outside(block, num_blocks),
        }
    }

    /// Adds a holder to a block for its content, which [`Self::find`] or
    /// [`Self::longest_beginning`] found. Does nothing for a block without content.
    ///
    /// # Panics
    /// If the block is outside of the pool.
    #[inline]
    pub(crate) fn reuse(&mut self, block: BlockId) {
        let count = self.count_mut(block);
        if *count & STORED == 0 {
            return;
        }
        let was_idle = *count == STORED;
        *count += 1;
        if was_idle {
            self.idle -= 1;
        }
        self.stats.reused += 1;
        self.policy.reused(block);
    }

    /// Adds a holder that reads the block's bytes, or keeps them until they are reused: unlike
    /// [`Self::reuse`], this is no use of the content, for counters or for the policy. `false`, and
    /// no change, for a block without content.
    ///
    /// # Panics
    /// If the block is outside of the pool.
    pub(crate) fn hold(&mut self, block: BlockId) -> bool {
        let count = self.count_mut(block);
        if *count & STORED == 0 {
            return false;
        }
        let was_idle = *count == STORED;
        *count += 1;
        if was_idle {
            self.idle -= 1;
            self.policy.held(block);
        }
        true
    }

    /// Records that the content of a block came from a lower tier.
    pub(crate) fn set_imported(&mut self, block: BlockId, tier: Tier) {
        if tier != Tier::Device && self.is_stored(block) {
            self.imported.insert(block, tier);
        }
    }

    /// Does what [`Self::reuse`] does, and returns the tier that the content came from if this is
    /// its first use.
    #[inline]
    pub(crate) fn reuse_imported(&mut self, block: BlockId) -> Tier {
        if self.imported.is_empty() {
            self.reuse(block);
            return Tier::Device;
        }
        let tier = self.imported.remove(&block);
        if tier.is_some() && self.holders(block) > 0 {
            // The policy has counted this use when the content was stored for it.
            *self.count_mut(block) += 1;
            self.stats.reused += 1;
        } else {
            self.reuse(block);
        }
        tier.unwrap_or_default()
    }

    /// Removes a holder that knows nothing of the content's return; `true` if it was the last and
    /// the block is empty now, `false` if it has other holders or is idle now.
    ///
    /// # Panics
    /// If the block has no holder, or is outside of the pool.
    #[inline]
    pub(crate) fn release(&mut self, block: BlockId) -> bool {
        self.release_hinted(block, None)
    }

    /// Does what [`Self::release`] does, for a sequence that ends with this hint.
    #[inline]
    pub(crate) fn release_hinted(&mut self, block: BlockId, hint: Option<Return>) -> bool {
        self.remove_holder(block, |policy| policy.hinted(block, hint))
    }

    /// Does what [`Self::release`] does after [`Self::hold`], which is no use of the content: what
    /// the policy was told of its return stands.
    pub(crate) fn end_hold(&mut self, block: BlockId) -> bool {
        self.remove_holder(block, |_| {})
    }

    #[inline]
    fn remove_holder(
        &mut self,
        block: BlockId,
        tell: impl FnOnce(&mut dyn EvictionPolicy),
    ) -> bool {
        let count = self.count_mut(block);
        assert!(*count & !STORED > 0, "release of block {block}, which has no holder");
        *count -= 1;
        let left = *count;
        if left == STORED {
            self.idle += 1;
            tell(&mut *self.policy);
            self.policy.idle(block);
        } else if left == 0 {
            self.free.push(block);
        }
        left == 0
    }

    /// Makes the content of a held block reusable unless it is indexed already. The caller drops
    /// content that becomes redundant ([`Self::beginning_of`]).
    pub(crate) fn offer(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        (priority, fill): (Priority, Fill),
        ledger: &mut Ledger,
    ) -> Offered {
        if self.holders(block) == 0 {
            return Offered::Refused;
        }
        let is_partial = fill == Fill::Partial;
        // A block that another holder left partial may be full now: that replaces it.
        if !is_partial && self.index.get(block).is_some_and(|entry| entry.is_partial) {
            self.unindex(block, ledger);
            self.policy.dropped(block);
        }
        let offered = self.index.offer(block, content, priority, is_partial);
        if offered == Offered::New {
            self.note_stored(block, content, (priority, fill), ledger);
        }
        offered
    }

    fn note_stored(
        &mut self,
        block: BlockId,
        content: &Content<'_>,
        (priority, fill): (Priority, Fill),
        ledger: &mut Ledger,
    ) {
        *self.count_mut(block) |= STORED;
        self.stats.stored += 1;
        let (key, index) = (content.key, content.index);
        let parent = (index > 0).then_some(content.parent);
        self.policy.stored(block, &BlockInfo { key, parent, index, priority });
        if fill == Fill::Unwritten {
            self.index.set_unwritten(block);
        }
        ledger.block_stored((self.group, block), content, priority, fill);
    }

    /// Records that a sequence without `block` has computed its content again: an idle block counts
    /// as just released, with what the sequence says of its return so far.
    pub(crate) fn renew(&mut self, block: BlockId, hint: Option<Return>) {
        self.note_duplicate(block);
        if self.is_idle(block) {
            self.policy.computed_again(block);
            self.policy.hinted(block, hint);
            self.policy.idle(block);
        }
    }

    /// Gives a holder of `own` the block `known` with the same content in its place. `true` if
    /// `own` is empty now.
    ///
    /// # Panics
    /// If `own` has no holder, or `known` has no content.
    pub(crate) fn exchange(&mut self, own: BlockId, known: BlockId) -> bool {
        assert!(self.is_stored(known), "block {known} was found for its content and has none");
        if self.is_idle(known) {
            self.idle -= 1;
        }
        self.note_duplicate(known);
        self.policy.computed_again(known);
        *self.count_mut(known) += 1;
        self.release(own)
    }

    /// Counts content that was brought or computed again: searches among siblings find the block
    /// first.
    pub(crate) fn note_duplicate(&mut self, known: BlockId) {
        self.stats.duplicates += 1;
        // A search for a common beginning visits the newest siblings.
        self.index.renew(known);
    }

    /// Returns a partial block whose whole content `block` begins with, which makes it redundant.
    pub(crate) fn beginning_of(&self, block: BlockId) -> Option<BlockId> {
        self.index.beginning_of(block)
    }

    /// Records that the open step has written a block that was offered before.
    pub(crate) fn set_written(&mut self, block: BlockId, ledger: &mut Ledger) {
        if let Some(key) = self.index.set_written(block) {
            ledger.block_written(self.group, block, key);
        }
    }

    /// Returns whether the open step has yet to write a block with content.
    pub(crate) fn is_unwritten(&self, block: BlockId) -> bool {
        self.index.is_unwritten(block)
    }

    /// Removes the content of a block from the index; its holders keep it. `true` if it has no
    /// holder: the block is empty now. `false`, and no change, for a block without content.
    ///
    /// # Panics
    /// If the block is outside of the pool.
    pub(crate) fn forget(&mut self, block: BlockId, ledger: &mut Ledger) -> bool {
        if *self.count_mut(block) & STORED == 0 {
            return false;
        }
        self.unindex(block, ledger);
        self.policy.dropped(block);
        let is_idle = self.holders(block) == 0;
        if is_idle {
            self.idle -= 1;
            self.free.push(block);
        }
        is_idle
    }

    /// Removes all content from the index without an event. Returns the blocks that are empty now.
    pub(crate) fn clear(&mut self, ledger: &mut Ledger) -> Vec<BlockId> {
        let mut emptied = Vec::new();
        self.imported.clear();
        for block in (0..self.num_blocks()).map(BlockId) {
            let Some(removed) = self.index.remove(block) else {
                continue;
            };
            ledger.content_left(self.group, block, removed);
            self.policy.dropped(block);
            *self.count_mut(block) &= !STORED;
            if self.holders(block) == 0 {
                emptied.push(block);
            }
        }
        self.idle = 0;
        // The lowest block is allocated first, as in a new pool.
        self.free.extend(emptied.iter().rev());
        emptied
    }

    /// Sets the priority of a block's content, with a duration that begins now; does nothing for a
    /// block without content.
    pub(crate) fn set_priority(&mut self, block: BlockId, priority: Priority, ledger: &mut Ledger) {
        let Some(before) = self.index.set_priority(block, priority) else {
            return;
        };
        // A level that has expired may be set again.
        if before != priority || priority.duration.is_some() {
            self.policy.set_priority(block, priority);
        }
        let entry = self.index.get(block).filter(|entry| !entry.is_partial && before != priority);
        if let Some(entry) = entry {
            ledger.block_updated(self.group, entry.key, priority);
        }
    }

    /// Replaces the policy; `false`, and no change, while any block has content.
    pub(crate) fn set_policy(&mut self, policy: Box<dyn EvictionPolicy>) -> bool {
        let is_empty = self.index.is_empty();
        if is_empty {
            self.policy = policy;
        }
        is_empty
    }

    /// Signals the beginning of a request, the time unit of policies that age.
    pub(crate) fn tick(&mut self) {
        self.policy.tick();
    }

    /// Returns the block with exactly this content, held or idle.
    #[inline]
    pub(crate) fn find(&self, content: &Content<'_>) -> Option<BlockId> {
        self.index.find(content)
    }
    /// Finds the block after `parent` that agrees with the most leading `tokens`, some of which
    /// stand for `contents`, and the number of these tokens.
    pub fn longest_beginning(
        &self,
        parent: BlockKey,
        namespace: NamespaceId,
        (tokens, contents): (&[u32], &[BlockContent]),
    ) -> Option<(BlockId, u32)> {
        self.index.longest_beginning(parent, namespace, (tokens, contents))
    }
    /// Returns the index of reusable content.
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }
    /// Returns the content of a block.
    pub fn content(&self, block: BlockId) -> Option<IndexedBlock<'_>> {
        self.index.get(block)
    }
    /// Returns whether a block's content can be reused.
    #[inline]
    pub fn is_stored(&self, block: BlockId) -> bool {
        self.count(block) & STORED > 0
    }
    /// Returns whether a sequence that holds a block may write to it: it has no other holder, and
    /// its content is not in the index.
    #[inline]
    pub fn is_private(&self, block: BlockId) -> bool {
        self.count(block) == 1
    }
    #[inline]
    fn count(&self, block: BlockId) -> u32 {
        self.counts.get(to_usize(block.0)).copied().unwrap_or(0)
    }
    /// Returns whether a block has no holder and reusable content.
    #[inline]
    pub fn is_idle(&self, block: BlockId) -> bool {
        self.count(block) == STORED
    }

    /// Returns the number of holders of `block`; 0 for a free or an unknown one.
    #[inline]
    pub fn holders(&self, block: BlockId) -> u32 {
        self.count(block) & !STORED
    }
    /// Returns the number of blocks in the pool.
    pub fn num_blocks(&self) -> u32 {
        to_u32(self.counts.len())
    }
    /// Returns the number of blocks without a holder, empty and idle ones.
    #[inline]
    pub fn num_free(&self) -> u32 {
        self.num_empty() + self.idle
    }
    /// Returns the number of blocks without holder and content.
    #[inline]
    pub fn num_empty(&self) -> u32 {
        to_u32(self.free.len())
    }
    /// Returns the number of blocks without holder whose content can be reused.
    #[inline]
    pub fn num_idle(&self) -> u32 {
        self.idle
    }
    /// Returns the number of blocks with a holder.
    pub fn num_used(&self) -> u32 {
        self.num_blocks() - self.num_free()
    }
    /// Returns the counters.
    pub fn stats(&self) -> PoolStats {
        self.stats
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn outside(block: BlockId, num_blocks: usize) -> ! {
    unreachable!("block {block} is outside of its pool of {num_blocks} blocks")
}

#[cfg(test)]
mod tests;
